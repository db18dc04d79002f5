// SPDX-License-Identifier: MIT OR Apache-2.0
// What selects a span, and begins.

// Selecting a span: it snaps to slots, as only whole snapshots can be merged.

function span() {
  const first = data.slots[state.from], last = data.slots[state.to];
  const [day, from] = local(first[0]), [until, to] = local(last[1]);
  byId("span").textContent = day + " " + from.slice(0, 12) + " to " + (until === day ? "" : until + " ") + to.slice(0, 12) + " (" + formatNs(last[1] - first[0]) + ", " +
    counted(state.to - state.from + 1, "slot") + " of " + data.slots.length + ")";
  // Over a change of the clock, times are not in order.
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
  span();
}

function show() {
  span();
  sourcesTable();
  culpritsTable();
  lateTable();
  sections();
  flames.forEach((flame) => flame.draw());
}

let isAsked = false;
function showSoon() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    show();
  });
}

function slotAt(drawn, event) {
  const box = drawn.getBoundingClientRect();
  const x = ((event.clientX - box.left) / Math.max(box.width, 1)) * WIDTH;
  const after = data.slots.findIndex((slot) => slot[2] > x);
  return Math.max((after < 0 ? data.slots.length : after) - 1, 0);
}

function under(drawn, slot) {
  const plot = drawn.closest(".plot"), source = data.sources.find((of) => of.name === plot.dataset.source);
  const [day, time] = local(data.slots[slot][0]);
  const told = [(data.has_dates ? day.slice(5) + " " : "") + time.slice(0, 12)];
  if (source && source.slots[slot]) {
    const cell = source.slots[slot], of = gathered([cell.f, cell.e]);
    told.push(source.name + ": " + counted(of.count, "value") + (of.count > 0 ? ", p99 " + formatNs(quantile(of, 0.99)) + ", max " + formatNs(of.max) : "") +
      ", " + ((cell.late || 0) + (cell.held || 0)) + " late");
  } else if (!source) {
    const most = data.culprits.map((culprit) => [culprit.told, culprit.by.reduce((sum, [, delays]) =>
      delays.reduce((sum, of) => (of[0] === slot ? sum + of[2] : sum), sum), 0)]).filter(([, ns]) => ns > 0);
    most.sort((a, b) => b[1] - a[1]);
    told.push(most.slice(0, 3).map(([who, ns]) => who + " " + formatNs(ns)).join(", ") || "nobody");
  }
  byId("under").textContent = told.join("  ");
}

function makeSelection() {
  const from = byId("from"), to = byId("to");
  from.max = to.max = data.slots.length - 1;
  for (const drawn of document.querySelectorAll("#first .plot svg.heat, #first .plot svg.stack")) {
    drawn.append(picture("rect", { class: "sel none", x: 0, y: 0, width: 0, height: "100%" }));
    let began = null;
    drawn.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drawn.setPointerCapture(event.pointerId);
      began = slotAt(drawn, event);
      select(began, began);
    });
    drawn.addEventListener("pointermove", (event) => {
      const slot = slotAt(drawn, event);
      under(drawn, slot);
      if (began !== null) select(began, slot);
    });
    const end = () => {
      if (began === null) return;
      began = null;
      show();
    };
    drawn.addEventListener("pointerup", end);
    drawn.addEventListener("pointercancel", end);
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

// The recording inside.

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
    const address = URL.createObjectURL(file);
    const link = element("a", { href: address, download: save.dataset.name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
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
