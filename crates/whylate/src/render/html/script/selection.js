// SPDX-License-Identifier: MIT OR Apache-2.0
// Selects a span, and starts the page.

// Selecting a span: it snaps to slots, as only whole snapshots can be merged.

function updateSpan() {
  const first = data.slots[state.from], last = data.slots[state.to];
  const [fromDay, from] = local(first[0]), [toDay, to] = local(last[1]);
  byId("span").textContent = fromDay + " " + from.slice(0, 12) + " to " + (toDay === fromDay ? "" : toDay + " ") + to.slice(0, 12) + " (" + formatNs(last[1] - first[0]) + ", " +
    pluralize(state.to - state.from + 1, "slot") + " of " + data.slots.length + ")";
  // If the clock was set within the span, its timestamps may be out of order.
  const [from_stamp, to_stamp] = [first[4], last[5]].sort();
  const options = isWhole() ? "" : " --from " + from_stamp + " --to " + to_stamp;
  byId("command").textContent = data.command + options;
  byId("from").value = state.from;
  byId("to").value = state.to;
  byId("from").setAttribute("aria-valuetext", from);
  byId("to").setAttribute("aria-valuetext", to);
  for (const mark of document.querySelectorAll("#first rect.sel")) {
    mark.setAttribute("x", first[2]);
    mark.setAttribute("width", Math.max(last[3] - first[2], 1));
    mark.classList.toggle("none", isWhole());
  }
  document.body.classList.toggle("part", !isWhole());
}

function select(from, to) {
  state.from = Math.min(from, to);
  state.to = Math.max(from, to);
  updateSpan();
}

function show() {
  updateSpan();
  sourcesTable();
  culpritsTable();
  lateTable();
  sections();
  flames.forEach((flame) => flame.draw());
}

let isScheduled = false;
function showSoon() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    show();
  });
}

function slotAt(svg, event) {
  const box = svg.getBoundingClientRect();
  const x = ((event.clientX - box.left) / Math.max(box.width, 1)) * WIDTH;
  const after = data.slots.findIndex((slot) => slot[2] > x);
  return Math.max((after < 0 ? data.slots.length : after) - 1, 0);
}

function describeSlot(svg, slot) {
  const plot = svg.closest(".plot"), source = data.sources.find((of) => of.name === plot.dataset.source);
  const [day, time] = local(data.slots[slot][0]);
  const texts = [(data.has_dates ? day.slice(5) + " " : "") + time.slice(0, 12)];
  if (source && source.slots[slot]) {
    const cell = source.slots[slot], of = mergeHistograms([cell.f, cell.e]);
    texts.push(source.name + ": " + pluralize(of.count, "value") + (of.count > 0 ? ", p99 " + formatNs(quantile(of, 0.99)) + ", max " + formatNs(of.max) : "") +
      ", " + (lateValues(source, cell.late || 0, lateFigures(source, [cell], of.max)) + (source.late_of ? cell.late || 0 : 0) + (cell.held || 0)) + " late");
  } else if (plot.dataset.percents) {
    texts.push(plot.querySelector("h3").textContent + ": held up " + plot.dataset.percents.split(",")[slot] + "% of the time");
  } else if (!source) {
    const culprits = data.culprits.map((culprit) => [culprit.name, culprit.by.reduce((sum, [, delays]) =>
      delays.reduce((sum, of) => (of[0] === slot ? sum + of[2] : sum), sum), 0)]).filter(([, ns]) => ns > 0);
    culprits.sort((a, b) => b[1] - a[1]);
    texts.push(culprits.slice(0, 3).map(([who, ns]) => who + " " + formatNs(ns)).join(", ") || "none");
  }
  byId("under").textContent = texts.join("  ");
}

function makeSelection() {
  const from = byId("from"), to = byId("to");
  from.max = to.max = data.slots.length - 1;
  for (const svg of document.querySelectorAll("#first .plot svg.heat, #first .plot svg.held-up, #first .plot svg.stack")) {
    svg.append(picture("rect", { class: "sel none", x: 0, y: 0, width: 0, height: "100%" }));
    let startSlot = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      svg.setPointerCapture(event.pointerId);
      startSlot = slotAt(svg, event);
      select(startSlot, startSlot);
    });
    svg.addEventListener("pointermove", (event) => {
      const slot = slotAt(svg, event);
      describeSlot(svg, slot);
      if (startSlot !== null) select(startSlot, slot);
    });
    const end = () => {
      if (startSlot === null) return;
      startSlot = null;
      show();
    };
    svg.addEventListener("pointerup", end);
    svg.addEventListener("pointercancel", end);
  }
  from.addEventListener("input", () => {
    select(Number(from.value), Math.max(Number(from.value), state.to));
    showSoon();
  });
  to.addEventListener("input", () => {
    select(Math.min(Number(to.value), state.from), Number(to.value));
    showSoon();
  });
  byId("all").addEventListener("click", () => {
    select(0, data.slots.length - 1);
    show();
  });
  byId("selection").hidden = false;
}

// The embedded recording.

function bytesOf(base64) {
  const text = atob(base64.trim()), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return bytes;
}

function makeSave() {
  const save = byId("save");
  save.hidden = false;
  save.addEventListener("click", () => {
    const file = new Blob([bytesOf(byId("recording").textContent)], { type: "application/octet-stream" });
    const url = URL.createObjectURL(file);
    const link = element("a", { href: url, download: save.dataset.name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  });
}

function begin(text) {
  data = JSON.parse(text);
  makeSave();
  if (data.slots.length === 0) return;
  state.to = data.slots.length - 1;
  makeSelection();
  makeFlames();
  show();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) showSoon();
    width = window.innerWidth;
  });
  document.documentElement.dataset.ready = "yes";
}

const plain = byId("data"), packed = byId("packed");
if (plain) {
  begin(plain.textContent);
} else if (packed && window.DecompressionStream) {
  const unpacked = new Blob([bytesOf(packed.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  new Response(unpacked).text().then(begin, makeSave);
} else {
  makeSave();
}
