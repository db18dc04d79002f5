// SPDX-License-Identifier: MIT OR Apache-2.0
// Histograms and flame graphs of the selected span.

// Source sections.

function sections() {
  for (const section of document.querySelectorAll("section.source")) {
    const source = data.sources[Number(section.dataset.number)];
    const of = sourceInSpan(source);
    const svg = section.querySelector("svg.histogram");
    if (svg) histogram(section, svg, of ? of.figures : mergeHistograms([]));
    const table = section.querySelector("table.series"), isExact = source.has_all && !source.is_coarse;
    if (table && !isExact && !initialRows.has(table)) initialRows.set(table, readRows(table));
    const rows = isWhole() && !isExact ? initialRows.get(table) || [] : source.series.map((series) => seriesRow(source, series)).filter((row) => row !== null);
    fill(table, "series " + source.name, rows);
    const note = section.querySelector("p.of-part");
    if (note) {
      const texts = source.is_coarse ? ["Over a selected span, percentiles are up to 12.5 % too high."] : [];
      if (!source.has_all) texts.push("Only " + source.series.length + " series have figures for a selected span.");
      note.hidden = isWhole() || texts.length === 0;
      note.textContent = texts.join(" ");
    }
    // What would need all series stays that of the whole span.
    if (!source.has_all) continue;
    section.querySelectorAll("h4.whole-only").forEach((heading) => heading.classList.remove("whole-only"));
    if (source.grouped) fill(section.querySelector("table.grouped"), "grouped " + source.name, groupedRows(source));
    const shares = section.querySelector("ul.shares");
    if (shares) shares.replaceChildren(...source.series.map((series) => shareItem(source, series)).filter((item) => item !== null));
  }
}

// Rows from the page as it was loaded. They have series that the script has no data of.
const initialRows = new Map();

function readRows(table) {
  const value = (cell) => {
    const sortValue = cell.dataset.v;
    return sortValue === undefined ? (cell.textContent === "-" ? null : cell.textContent) : sortValue !== "" && !Number.isNaN(Number(sortValue)) ? Number(sortValue) : sortValue;
  };
  return [...table.tBodies[0].rows].map((row) => ({ kind: "", cells: [...row.cells].map((cell) => ({ t: cell.textContent, v: value(cell), n: cell.classList.contains("n") })) }));
}

// Draws the shares of time of a series.
function shareItem(source, series) {
  const of = values(source, series), present = source.shares.map((name, rank) => [name, "c" + rank, of[name]]).filter(([, , share]) => share !== undefined);
  if (present.length === 0) return null;
  const paths = [], labels = [];
  let at = 0;
  for (const [name, kind, share] of present) {
    const width = Math.min(Math.max(share, 0), 1) * 1000;
    paths.push(picture("path", { class: kind, d: "M" + at.toFixed(0) + " 0h" + width.toFixed(0) + "v10h-" + width.toFixed(0) + "z" }));
    labels.push(...(labels.length > 0 ? [", "] : []), swatch(kind), " " + name + " " + percent(share));
    at += width;
  }
  const svg = picture("svg", { class: "share", viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, paths);
  return element("li", {}, [Object.values(series.labels).join(" ") + " ", svg, " ", ...labels]);
}

function histogram(section, svg, of) {
  const powers = new Map();
  for (const [bound, count] of of.buckets) {
    // A bucket lies within a power of two.
    const power = bound < 1 ? 0 : Math.floor(Math.log2(bound));
    powers.set(power, (powers.get(power) || 0) + count);
  }
  const low = Math.min(...powers.keys()), high = Math.max(...powers.keys()), max = Math.max(...powers.values());
  let d = "";
  for (const [power, count] of powers) {
    const height = Math.max((count / max) * 100, 1);
    d += "M" + (power - low) * 10 + " " + (100 - height).toFixed(1) + "h9v" + height.toFixed(1) + "h-9z";
  }
  svg.replaceChildren(...(d ? [picture("path", { d })] : []));
  const labels = section.querySelectorAll("ol.x li");
  if (d) {
    svg.setAttribute("viewBox", "0 0 " + (high - low + 1) * 10 + " 100");
    [low, Math.floor((low + high + 1) / 2), high + 1].forEach((power, at) => {
      labels[at].textContent = formatNs(2 ** power);
    });
  }
  const figure = (share) => (of.count > 0 ? cellNs(quantile(of, share)) : emptyCell);
  const cells = [cellCount(of.count), figure(0.5), figure(0.9), figure(0.99), figure(0.999), of.count > 0 ? cellNs(of.max) : emptyCell];
  fill(section.querySelector("table.percentiles"), "percentiles", [{ cells, kind: "" }]);
}

// Flame graphs.

const HEIGHT = 18, LETTER = 7, MAX_FRAMES = 4000, MAX_DEPTH = 120;

class Flame {
  constructor(box, graph) {
    this.graph = graph;
    this.path = [];
    this.hidesIdle = graph.rows.some((row) => row[1]) && graph.rows.some((row) => !row[1]);
    this.svg = box.querySelector("svg.flame");
    this.matchedOutput = element("output", { class: "matched" });
    this.search = element("input", { type: "search", autocomplete: "off", spellcheck: "false" });
    this.search.addEventListener("input", () => this.draw());
    const tools = [element("label", {}, ["Search ", this.search]), button("Whole graph", {}, () => {
      this.path = [];
      this.draw();
    })];
    if (this.hidesIdle) {
      const check = element("input", { type: "checkbox", checked: "" });
      check.addEventListener("change", () => {
        this.hidesIdle = check.checked;
        this.path = [];
        this.draw();
      });
      tools.push(element("label", {}, [check, " Hide waits that are idle by design"]));
    }
    box.querySelector("h3").after(element("p", { class: "tools" }, [...tools, this.matchedOutput]));
    this.svg.addEventListener("click", (event) => this.choose(event.target));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // Returns the rows of the selected culprit, or all: those that name it in a frame, or in the text of a label.
  rows() {
    const { rows, frames } = this.graph;
    const shown = rows.filter((row) => !this.hidesIdle || !row[1]);
    if (state.culprit < 0) return shown;
    const who = data.culprits[state.culprit].who.replace(/:[0-9]+$/, "");
    const isWordCharacter = (text, at) => at >= 0 && at < text.length && /[A-Za-z0-9_]/.test(text[at]);
    const namesCulprit = ([name, kind]) => {
      if (name === who) return true;
      const at = name.indexOf(who), isText = ["f-label", "f-waker", "f-concurrent"].includes(kind);
      return isText && at >= 0 && !isWordCharacter(name, at - 1) && !isWordCharacter(name, at + who.length);
    };
    const has = new Set(frames.map((frame, at) => (namesCulprit(frame) ? at : -1)));
    return shown.filter((row) => row[0].some((frame) => has.has(frame)));
  }

  tree() {
    const root = { name: "all", kind: "f-label", ns: 0, children: new Map(), above: null };
    for (const [frames, , slots] of this.rows()) {
      const ns = slots.reduce((sum, [slot, ns]) => (inSpan(slot) ? sum + ns : sum), 0);
      if (ns === 0) continue;
      let node = root;
      node.ns += ns;
      for (const frame of frames) {
        let child = node.children.get(frame);
        if (!child) {
          const [name, kind] = this.graph.frames[frame];
          child = { name, kind, ns: 0, children: new Map(), above: node, key: frame };
          node.children.set(frame, child);
        }
        child.ns += ns;
        node = child;
      }
    }
    return root;
  }

  draw() {
    const root = this.tree();
    let zoomed = root;
    for (const key of this.path) zoomed = zoomed.children.get(key) || zoomed;
    const width = Math.max(this.svg.parentNode.clientWidth, 320), query = this.search.value.trim().toLowerCase();
    const isHit = (node) => query !== "" && node.name.toLowerCase().includes(query);
    this.shown = [];
    const above = [];
    for (let node = zoomed.above; node; node = node.above) above.unshift(node);
    above.forEach((node, depth) => this.shown.push({ node, x: 0, width, depth, isAbove: true }));
    const place = (node, x, depth) => {
      const frameWidth = zoomed.ns > 0 ? (node.ns / zoomed.ns) * width : width;
      if ((frameWidth < 1 && depth > 0) || this.shown.length >= MAX_FRAMES || depth > MAX_DEPTH) return;
      this.shown.push({ node, x, width: frameWidth, depth });
      const children = [...node.children.values()].sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
      for (const child of children) {
        place(child, x, depth + 1);
        x += zoomed.ns > 0 ? (child.ns / zoomed.ns) * width : 0;
      }
    };
    place(zoomed, 0, above.length);
    const maxDepth = this.shown.reduce((max, of) => Math.max(max, of.depth), 0);
    this.svg.setAttribute("viewBox", "0 0 " + width + " " + (maxDepth + 1) * HEIGHT);
    this.svg.replaceChildren(...this.shown.map((of, at) => this.frame(of, at, root, isHit(of.node))));
    this.svg.setAttribute("role", "group");
    const matched = (node) => (isHit(node) ? node.ns : [...node.children.values()].reduce((sum, child) => sum + matched(child), 0));
    const isEmpty = root.ns === 0 && state.culprit >= 0;
    this.matchedOutput.textContent = isEmpty ? "No stack here names " + data.culprits[state.culprit].name + "."
      : query === "" ? "" : "Matched: " + percent(root.ns > 0 ? matched(root) / root.ns : 0);
  }

  frame({ node, x, width, depth, isAbove }, at, root, isHit) {
    const y = depth * HEIGHT, maxChars = Math.floor((width - 4) / LETTER);
    const label = node.name + ": " + formatNs(node.ns) + " (" + percent(root.ns > 0 ? node.ns / root.ns : 0) + ")";
    const parts = [picture("title", {}, [label]), picture("rect", { class: node.kind, x: x.toFixed(1), y, width: Math.max(width - 0.5, 0.5).toFixed(1), height: HEIGHT - 1 })];
    if (maxChars >= 3) {
      const characters = [...node.name];
      const text = characters.length <= maxChars ? node.name : characters.slice(0, maxChars - 2).join("") + "..";
      parts.push(picture("text", { x: (x + 3).toFixed(1), y: y + 13 }, [text]));
    }
    const kind = (isHit ? "hit " : "") + (isAbove ? "above" : "");
    return picture("g", { class: kind.trim(), tabindex: at === 0 ? "0" : "-1", role: "button", "aria-label": label, "data-at": at }, parts);
  }

  choose(target) {
    const group = target.closest("g");
    if (!group) return;
    const { node } = this.shown[Number(group.dataset.at)];
    this.path = [];
    for (let of = node; of.above; of = of.above) this.path.unshift(of.key);
    this.draw();
    const again = this.shown.findIndex((of) => !of.isAbove);
    if (again >= 0 && group.contains(target)) this.svg.children[again].focus();
  }

  key(event) {
    const at = Number(event.target.dataset.at), here = this.shown[at];
    if (!here) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return this.choose(event.target);
    }
    if (event.key === "Escape") {
      this.path = [];
      return this.draw();
    }
    const near = (depth, isBetter) => this.shown.reduce((best, of, number) =>
      of.depth === depth && (best < 0 || isBetter(of, this.shown[best])) ? number : best, -1);
    const isBelow = (of) => of.x >= here.x - 0.5 && of.x + of.width <= here.x + here.width + 0.5;
    const steps = {
      ArrowDown: () => this.shown.findIndex((of) => of.depth === here.depth + 1 && isBelow(of)),
      ArrowUp: () => this.shown.findIndex((of) => of.node === here.node.above),
      ArrowRight: () => near(here.depth, (a, b) => a.x > here.x && (b.x <= here.x || a.x < b.x)),
      ArrowLeft: () => near(here.depth, (a, b) => a.x < here.x && (b.x >= here.x || a.x > b.x)),
    };
    if (!steps[event.key]) return;
    event.preventDefault();
    const next = steps[event.key]();
    if (next >= 0) this.svg.children[next].focus();
  }
}

let flames = [];

function makeFlames() {
  for (const section of document.querySelectorAll("section.source")) {
    const graphs = data.graphs.filter((graph) => graph.source === Number(section.dataset.number));
    section.querySelectorAll(".graph").forEach((box, at) => graphs[at] && flames.push(new Flame(box, graphs[at])));
  }
}
