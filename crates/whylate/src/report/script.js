// SPDX-License-Identifier: MIT OR Apache-2.0
// What the tables and pictures of a report say of a span that somebody selects. Everything of the whole span is in the page
// already; sums here follow the rules by which whylate merges snapshots, so that `whylate replay` of the span prints the same.
// Names come from strangers: they enter the page as text alone.
"use strict";
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 10000;
  const MOST_ROWS = 50;
  const MOST_CULPRITS = 30;
  const state = { from: 0, to: 0, culprit: -1, sorts: {}, open: new Set(), showsAll: false };
  let data = null;
  const byId = (id) => document.getElementById(id);

  // Elements.

  function element(tag, attributes, children) {
    const made = document.createElement(tag);
    return filled(made, attributes, children);
  }

  function picture(tag, attributes, children) {
    return filled(document.createElementNS(SVG, tag), attributes, children);
  }

  function filled(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    for (const child of children || []) made.append(child);
    return made;
  }

  function button(text, attributes, act) {
    const made = element("button", Object.assign({ type: "button" }, attributes), [text]);
    made.addEventListener("click", act);
    return made;
  }

  function swatch(kind) {
    const square = picture("path", { class: kind, d: "M0 0h10v10H0z" });
    return picture("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" }, [square]);
  }

  // Figures as whylate writes them.

  // As `toFixed`, but that a number exactly between two goes to the even one.
  function fixed(value, digits) {
    const scaled = value * 10 ** digits, below = Math.floor(scaled);
    if (scaled - below === 0.5 && below % 2 === 0) return (below / 10 ** digits).toFixed(digits);
    return value.toFixed(digits);
  }

  function formatNs(ns) {
    const units = [[1, "ns"], [1e3, "us"], [1e6, "ms"], [1e9, "s"]];
    const [unit, name] = units.find(([unit]) => ns * 2 < unit * 1999) || units[3];
    const value = ns / unit;
    const digits = unit === 1 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    return fixed(value, digits) + name;
  }

  const percent = (share) => fixed(share * 100, 1) + "%";
  const number = (value) => Number.isInteger(value) || Math.abs(value) >= 1000 ? fixed(value, 0) : fixed(value, 2);
  const times = (count) => (count === 1 ? "once" : count + " times");
  const counted = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");

  const none = { t: "-", v: null, n: true };
  const cellNs = (ns) => (ns === null || ns === undefined ? none : { t: formatNs(ns), v: ns, n: true });
  const cellCount = (count) => (count === null || count === undefined ? none : { t: String(count), v: count, n: true });
  const cellShare = (share) => (share === undefined ? none : { t: percent(share), v: share, n: true });
  const cellText = (text) => ({ t: text, v: text });

  // Where the recording was made: its date and time of day, to the microsecond.
  function local(ns) {
    const us = (BigInt(data.base_ns) + BigInt(Math.round(ns))) / 1000n + BigInt(data.offset_s) * 1000000n;
    const date = new Date(Number(us / 1000n)).toISOString();
    return [date.slice(0, 10), date.slice(11, 23) + String(us % 1000n).padStart(3, "0")];
  }

  // Distributions: a row of the largest value, then upper bounds and counts in turns.

  function gathered(rows) {
    const counts = new Map();
    let max = 0, count = 0;
    for (const row of rows) {
      if (!row || row.length === 0) continue;
      max = Math.max(max, row[0]);
      for (let at = 1; at < row.length; at += 2) {
        counts.set(row[at], (counts.get(row[at]) || 0) + row[at + 1]);
        count += row[at + 1];
      }
    }
    return { buckets: [...counts].sort((a, b) => a[0] - b[0]), count, max };
  }

  function quantile(of, share) {
    const rank = Math.min(Math.max(Math.ceil(share * of.count), 1), Math.max(of.count, 1));
    let seen = 0;
    for (const [bound, count] of of.buckets) {
      seen += count;
      if (seen >= rank) return Math.min(bound, of.max);
    }
    return 0;
  }

  // What a source has in the span.

  const inSpan = (slot) => slot >= state.from && slot <= state.to;
  const isWhole = () => state.from === 0 && state.to === data.slots.length - 1;

  function found(source) {
    const cells = source.slots.slice(state.from, state.to + 1).filter((cell) => cell !== null);
    if (cells.length === 0) return null;
    const sum = (of) => cells.reduce((all, cell) => all + (of(cell) || 0), 0);
    const most = (of) => cells.reduce((all, cell) => Math.max(all, of(cell) || 0), 0);
    const last = cells[cells.length - 1];
    const figures = gathered(cells.map((cell) => cell.f).concat([last.e]));
    const has = cells.some((cell) => cell.has), hasLost = cells.some((cell) => cell.lost);
    if (source.is_nothing && !has && !hasLost) return null;
    let remark = null;
    if (source.share) {
      const [value, from, of, late] = source.share;
      const shares = source.series.map((series) => values(source, series)[value]).filter((share) => share !== undefined);
      const starved = shares.filter((share) => share >= from).length;
      remark = { text: of + ": " + shares.length + ", " + late + ": " + starved, late: starved > 0 };
    }
    const late = sum((cell) => cell.late), held = sum((cell) => cell.held);
    return {
      source, figures, late, held, remark,
      lateMax: most((cell) => cell.late_max), heldMax: most((cell) => cell.held_max), lateNs: sum((cell) => cell.late_ns),
      isLate: late > 0 || held > 0 || figures.max >= source.from || (remark !== null && remark.late),
    };
  }

  function judged(of) {
    const { source, figures } = of, known = figures.count > 0;
    const isLate = source.late_of ? known && figures.max >= source.from : of.isLate;
    const figure = (value) => (known ? value : null);
    const late = !isLate ? 0 : of.late > 0 && !source.late_of ? of.late : null;
    const rows = [row(isLate, source.of === "" ? null : figures.count, figure(quantile(figures, 0.5)),
      figure(quantile(figures, 0.99)), figure(figures.max), source.from, late, of.remark ? of.remark.text : source.of)];
    if (source.late_of) rows.push(event(of.late, of.lateMax, source.late_of));
    if (source.held_up) rows.push(event(of.held, of.heldMax, source.held_up));
    return rows;

    function event(count, max, [what, from]) {
      return row(count > 0, null, null, null, count > 0 ? max : null, from, count, what);
    }
    function row(isLate, count, p50, p99, max, from, late, what) {
      const cells = [cellText(source.name), cellText(isLate ? "LATE" : "normal"), cellCount(count), cellNs(p50), cellNs(p99),
        cellNs(max), cellNs(from), cellCount(late), cellText(what)];
      return { cells, kind: isLate ? "late" : "" };
    }
  }

  // Figures of a series over the span, slot by slot as they were merged before.

  function values(source, series) {
    const bySlot = new Map(series.slots.map(([slot, , of]) => [slot, of]));
    const hasPresence = source.merging.present === "presence" || Object.values(source.merging).includes("presence");
    let merged = null, span = 0, isFirst = true;
    for (let slot = state.from; slot <= state.to; slot++) {
      const cell = source.slots[slot];
      if (cell === null) continue;
      const later = bySlot.get(slot);
      if (isFirst || (merged === null && later === undefined)) {
        merged = later === undefined ? null : Object.assign({}, later);
      } else {
        merged = followed(merged === null ? (hasPresence ? { present: 0 } : {}) : merged, later, span, cell.d);
      }
      isFirst = false;
      span += cell.d;
    }
    return merged || {};

    function followed(was, later, before, after) {
      const present = (of, span) => (of.present === undefined ? 1 : of.present) * span;
      const wasThere = present(was, before), isThere = later ? present(later, after) : 0;
      const is = later || {}, merged = {};
      for (const name of new Set([...Object.keys(was), ...Object.keys(is)])) {
        if (name === "present" && hasPresence) continue;
        const value = one(source.merging[name], was[name], is[name], before, after, wasThere, isThere);
        if (value !== undefined) merged[name] = value;
      }
      if (hasPresence && before + after > 0 && (wasThere + isThere) / (before + after) < 1) {
        merged.present = (wasThere + isThere) / (before + after);
      }
      return merged;
    }
    function one(rule, was, is, before, after, wasThere, isThere) {
      const average = (a, b) => (a + b > 0 ? ((was || 0) * a + (is || 0) * b) / (a + b) : undefined);
      switch (rule) {
        case "max": return Math.max(was === undefined ? -Infinity : was, is === undefined ? -Infinity : is);
        case "latest": return is;
        case "known": return is === undefined ? was : is;
        case "span": return average(before, after);
        case "presence": return average(wasThere, isThere);
        // It follows from others, by a rule that only whylate has.
        case "derived": return undefined;
        default: return (was || 0) + (is || 0);
      }
    }
  }

  function seriesRow(source, series) {
    const inside = series.slots.filter(([slot]) => inSpan(slot));
    if (inside.length === 0) return null;
    const distributions = {}, figures = values(source, series);
    const of = (name) => (distributions[name] = distributions[name] || gathered(inside.map(([, of]) => of[name])));
    const cells = source.columns.map(([what, name, how]) => {
      if (what === "label") return series.labels[name] === undefined ? { t: "-", v: null } : cellText(series.labels[name]);
      if (what === "of") {
        const all = of(name);
        if (all.count === 0) return none;
        return how === "count" ? cellCount(all.count)
          : cellNs(how === "max" ? all.max : quantile(all, how === "p50" ? 0.5 : 0.99));
      }
      const value = figures[name];
      if (value === undefined) return none;
      return how === "ns" ? cellNs(Math.floor(Math.max(value, 0)))
        : how === "share" ? cellShare(value) : { t: number(value), v: value, n: true };
    });
    return { cells, kind: "" };
  }

  // Tables: rows of cells, sorted by whatever heading was chosen. Returns those that are beyond the first so many.

  function fill(table, key, rows, most) {
    if (!table) return [];
    const sort = state.sorts[key];
    if (sort) {
      const value = (row) => row.cells[sort.column].v;
      rows.sort((a, b) => {
        const one = value(a), other = value(b);
        if (one === null || other === null) return (one === null) - (other === null);
        const order = typeof one === "number" && typeof other === "number" ? one - other
          : String(one).localeCompare(String(other), "en", { numeric: true });
        return sort.up ? order : -order;
      });
    }
    const rest = most === undefined ? [] : rows.splice(most), made = [];
    for (const row of rows) {
      made.push(element("tr", row.kind ? { class: row.kind } : {}, row.cells.map(cell)));
      if (row.opened) made.push(row.opened());
    }
    table.tBodies[0].replaceChildren(...made);
    if (!table.dataset.sortable) {
      table.dataset.sortable = "yes";
      [...table.tHead.rows[0].cells].forEach((heading, column) => {
        const text = heading.textContent;
        heading.replaceChildren(button(text, {}, () => {
          const was = state.sorts[key];
          const startsUp = !rows.some((row) => typeof row.cells[column].v === "number");
          state.sorts[key] = { column, up: was && was.column === column ? !was.up : startsUp };
          show();
        }));
      });
    }
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      if (sort && sort.column === column) heading.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
      else heading.removeAttribute("aria-sort");
    });
    return rest;

    function cell(of) {
      const attributes = of.n ? { class: "n" } : of.bar !== undefined ? { class: "bar" } : {};
      if (of.v !== null && of.v !== undefined) attributes["data-v"] = of.v;
      return element("td", attributes, of.nodes || (of.bar !== undefined ? [bar(of.bar)] : [of.t]));
    }
    function bar(share) {
      const length = Math.round(Math.min(Math.max(share, 0), 1) * 1000);
      const path = picture("path", { d: "M0 0h" + length + "v10h-" + length + "z" });
      return picture("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, [path]);
    }
  }

  function sourcesTable() {
    const all = data.sources.map(found).filter((of) => of !== null);
    all.sort((a, b) => b.isLate - a.isLate || b.lateNs - a.lateNs);
    fill(byId("sources"), "sources", all.flatMap(judged));
  }

  function delays(culprit) {
    const victims = culprit.by.map(([source, delays]) => {
      const sum = { source, events: 0, total: 0, worst: 0 };
      for (const [slot, events, total, worst] of delays) {
        if (!inSpan(slot)) continue;
        sum.events += events;
        sum.total += total;
        sum.worst = Math.max(sum.worst, worst);
      }
      return sum;
    }).filter((of) => of.total > 0);
    victims.sort((a, b) => b.total - a.total);
    const sum = (of) => victims.reduce((all, victim) => all + of(victim), 0);
    return { victims, total: sum((of) => of.total), events: sum((of) => of.events) };
  }

  function culpritsTable() {
    const table = byId("culprits");
    if (!table) return;
    const all = data.culprits.map((culprit, at) => Object.assign({ culprit, at }, delays(culprit))).filter((of) => of.total > 0);
    all.sort((a, b) => b.total - a.total || b.events - a.events || a.at - b.at);
    const others = data.others.filter(([slot]) => inSpan(slot)).reduce((sum, [, ns]) => sum + ns, 0);
    const whole = all.reduce((sum, of) => sum + of.total, others);
    byId("delay").textContent = formatNs(whole);
    byId("delay").dataset.v = whole;
    const left = fill(table, "culprits", all.map((of) => {
      const { culprit, at, total, victims } = of, share = total / Math.max(whole, 1);
      const isChosen = state.culprit === at;
      const choose = button(culprit.who, { class: "choose", "aria-pressed": String(isChosen), title: "Show only what it had a part in" }, () => {
        state.culprit = isChosen ? -1 : at;
        show();
        const again = table.querySelector("button[aria-pressed=true]");
        if (again) again.focus();
      });
      const told = victims.map((of) => of.source + " " + times(of.events) + " by " + formatNs(of.total) + " (worst " + formatNs(of.worst) + ")");
      const cgroup = culprit.cgroup ? [" ", element("small", {}, [culprit.cgroup])] : [];
      const cells = [cellShare(share), cellNs(total), { bar: share, v: share }, cellText(culprit.word),
        { t: culprit.who, v: culprit.who, nodes: [choose, ...cgroup] }, cellText(told.join(", "))];
      return { cells, kind: isChosen ? "chosen" : "", total };
    }), MOST_CULPRITS);
    const more = byId("more-culprits");
    if (more) {
      const count = left.length + (others > 0 ? data.others_count : 0);
      more.textContent = count === 0 ? "" : counted(count, "other") + " caused " + formatNs(left.reduce((sum, of) => sum + of.total, others)) + " more.";
    }
  }

  // Late events.

  function lateTable() {
    const table = byId("late");
    if (!table) return;
    const isOf = (late) => state.culprit < 0 || late.causes.some(([culprit]) => culprit === state.culprit);
    const all = data.late.map((late, at) => ({ late, at })).filter(({ late }) => inSpan(late.slot) && isOf(late));
    const rows = all.map(({ late, at }) => {
      const [day, clock] = local(late.at), isOpen = state.open.has(at);
      const time = data.has_dates ? day.slice(5) + " " + clock : clock;
      const open = button((isOpen ? "▾ " : "▸ ") + time, { class: "open", "aria-expanded": String(isOpen) }, () => {
        if (!state.open.delete(at)) state.open.add(at);
        lateTable();
        const again = table.querySelector("[data-late=\"" + at + "\"]");
        if (again) again.focus();
      });
      open.dataset.late = at;
      const cells = [{ t: time, v: late.at, nodes: [open] }, cellText(data.sources[late.source].name), cellNs(late.ns),
        cellText(late.who || "-"), cellCount(late.cpu), cellText(late.main)];
      return { cells, kind: "", opened: isOpen ? () => details(late) : null };
    });
    const rest = fill(table, "late", rows, state.showsAll ? undefined : MOST_ROWS);
    const told = [state.culprit >= 0
      ? "Only events that " + data.culprits[state.culprit].told + " had a part in: " + all.length + "."
      : counted(all.length, "late event") + " can be opened here."];
    if (rest.length > 0) told.push("The first " + rows.length + " are shown.");
    const how = byId("how-many");
    const kept = how.dataset.kept === undefined ? (how.dataset.kept = how.textContent.replace(/Without scripts.*/, "")) : how.dataset.kept;
    how.replaceChildren(kept + told.join(" "));
    if (rest.length > 0) {
      how.append(" ", button("Show all " + all.length, { id: "show-all" }, () => {
        state.showsAll = true;
        lateTable();
      }));
    }
    if (state.culprit >= 0) {
      how.append(" ", button("Whoever made them late", { id: "unfilter" }, () => {
        state.culprit = -1;
        show();
      }));
    }
  }

  function details(late) {
    const inside = [];
    if (late.parts.length > 0) {
      inside.push(element("h4", {}, [late.in_order ? "In order of time" : "Sums, not in order of time"]), pathPicture(late));
      inside.push(element("ol", { class: "parts" }, late.parts.map(([ns, kind, text]) =>
        element("li", {}, [swatch("k-" + kind), " ", element("b", {}, [formatNs(ns)]), " " + text]))));
    }
    if (late.causes.length > 0) {
      const head = ["Share", "Time", "How", "Who"].map((text, at) => element("th", at < 2 ? { scope: "col", class: "n" } : { scope: "col" }, [text]));
      const rows = late.causes.map(([, word, who, ns]) => element("tr", {}, [
        element("td", { class: "n" }, [percent(ns / Math.max(late.ns, 1))]), element("td", { class: "n", "data-v": ns }, [formatNs(ns)]),
        element("td", {}, [word]), element("td", {}, [who])]));
      inside.push(element("h4", {}, ["Causes"]), element("table", { class: "causes" },
        [element("thead", {}, [element("tr", {}, head)]), element("tbody", {}, rows)]));
    }
    if (late.facts.length > 0) {
      inside.push(element("dl", { class: "facts" }, late.facts.map(([what, value]) =>
        element("div", {}, [element("dt", {}, [what]), element("dd", {}, [value])]))));
    }
    for (const [whose, frames] of late.stacks) {
      const list = element("ol", { class: "frames" }, frames.map((frame) => element("li", {}, [data.names[frame]])));
      inside.push(element("details", { open: "" }, [element("summary", {}, [whose]), list]));
    }
    return element("tr", { class: "more" }, [element("td", { colspan: "6" }, inside)]);
  }

  function pathPicture(late) {
    const paths = [];
    let at = 0;
    for (const [ns, kind, text] of late.parts) {
      const x = Math.floor((at / late.ns) * WIDTH);
      at += ns;
      const width = Math.max(Math.floor((at / late.ns) * WIDTH) - x, 1);
      const path = picture("path", { class: "k-" + kind, d: "M" + x + " 0h" + width + "v10h-" + width + "z" },
        [picture("title", {}, [formatNs(ns) + " " + text])]);
      paths.push(path);
    }
    return picture("svg", { class: "path", viewBox: "0 0 " + WIDTH + " 10", preserveAspectRatio: "none", role: "img",
      "aria-label": "The parts of its time; the list below tells each in words" }, paths);
  }

  // Sources.

  function sections() {
    for (const section of document.querySelectorAll("section.source")) {
      const source = data.sources[Number(section.dataset.number)];
      const of = found(source);
      const drawn = section.querySelector("svg.histogram");
      if (drawn) histogram(section, drawn, of ? of.figures : gathered([]));
      const table = section.querySelector("table.series");
      fill(table, "series " + source.name, source.series.map((series) => seriesRow(source, series)).filter((row) => row !== null));
    }
  }

  function histogram(section, drawn, of) {
    const powers = new Map();
    for (const [bound, count] of of.buckets) {
      // A bucket lies within a power of two.
      const power = bound < 1 ? 0 : Math.floor(Math.log2(bound));
      powers.set(power, (powers.get(power) || 0) + count);
    }
    const low = Math.min(...powers.keys()), high = Math.max(...powers.keys()), most = Math.max(...powers.values());
    let d = "";
    for (const [power, count] of powers) {
      const height = Math.max((count / most) * 100, 1);
      d += "M" + (power - low) * 10 + " " + (100 - height).toFixed(1) + "h9v" + height.toFixed(1) + "h-9z";
    }
    drawn.replaceChildren(...(d ? [picture("path", { d })] : []));
    const labels = section.querySelectorAll("ol.x li");
    if (d) {
      drawn.setAttribute("viewBox", "0 0 " + (high - low + 1) * 10 + " 100");
      [low, Math.floor((low + high + 1) / 2), high + 1].forEach((power, at) => {
        labels[at].textContent = formatNs(2 ** power);
      });
    }
    const figure = (share) => (of.count > 0 ? cellNs(quantile(of, share)) : none);
    const cells = [cellCount(of.count), figure(0.5), figure(0.9), figure(0.99), figure(0.999), of.count > 0 ? cellNs(of.max) : none];
    fill(section.querySelector("table.percentiles"), "percentiles", [{ cells, kind: "" }]);
  }

  // Flame graphs.

  const HEIGHT = 18, LETTER = 7, MOST_FRAMES = 4000, DEEPEST = 120;

  class Flame {
    constructor(box, graph) {
      this.graph = graph;
      this.path = [];
      this.hidesIdle = graph.rows.some((row) => row[1]) && graph.rows.some((row) => !row[1]);
      this.svg = box.querySelector("svg.flame");
      this.said = element("output", { class: "matched" });
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
        tools.push(element("label", {}, [check, " without what is idle by design"]));
      }
      box.querySelector("h3").after(element("p", { class: "tools" }, [...tools, this.said]));
      this.svg.addEventListener("click", (event) => this.choose(event.target));
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }

    // The rows of the span, and of the culprit that was chosen where any has it.
    rows() {
      const { rows, frames } = this.graph;
      const shown = rows.filter((row) => !this.hidesIdle || !row[1]);
      if (state.culprit < 0) return shown;
      const who = data.culprits[state.culprit].who.replace(/:[0-9]+$/, "");
      const has = new Set(frames.map((frame, at) => (frame[0].includes(who) ? at : -1)));
      const of = shown.filter((row) => row[0].some((frame) => has.has(frame)));
      return of.length > 0 ? of : shown;
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
      const width = Math.max(this.svg.parentNode.clientWidth, 320), wanted = this.search.value.trim().toLowerCase();
      const isHit = (node) => wanted !== "" && node.name.toLowerCase().includes(wanted);
      this.shown = [];
      const above = [];
      for (let node = zoomed.above; node; node = node.above) above.unshift(node);
      above.forEach((node, depth) => this.shown.push({ node, x: 0, width, depth, isAbove: true }));
      const place = (node, x, depth) => {
        const wide = zoomed.ns > 0 ? (node.ns / zoomed.ns) * width : width;
        if ((wide < 1 && depth > 0) || this.shown.length >= MOST_FRAMES || depth > DEEPEST) return;
        this.shown.push({ node, x, width: wide, depth });
        const children = [...node.children.values()].sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
        for (const child of children) {
          place(child, x, depth + 1);
          x += zoomed.ns > 0 ? (child.ns / zoomed.ns) * width : 0;
        }
      };
      place(zoomed, 0, above.length);
      const deepest = this.shown.reduce((most, of) => Math.max(most, of.depth), 0);
      this.svg.setAttribute("viewBox", "0 0 " + width + " " + (deepest + 1) * HEIGHT);
      this.svg.replaceChildren(...this.shown.map((of, at) => this.frame(of, at, root, isHit(of.node))));
      this.svg.setAttribute("role", "group");
      const matched = (node) => (isHit(node) ? node.ns : [...node.children.values()].reduce((sum, child) => sum + matched(child), 0));
      this.said.textContent = wanted === "" ? "" : "Matched: " + percent(root.ns > 0 ? matched(root) / root.ns : 0);
    }

    frame({ node, x, width, depth, isAbove }, at, root, isHit) {
      const y = depth * HEIGHT, room = Math.floor((width - 4) / LETTER);
      const told = node.name + ": " + formatNs(node.ns) + " (" + percent(root.ns > 0 ? node.ns / root.ns : 0) + ")";
      const parts = [picture("title", {}, [told]), picture("rect", { class: node.kind, x: x.toFixed(1), y, width: Math.max(width - 0.5, 0.5).toFixed(1), height: HEIGHT - 1 })];
      if (room >= 3) {
        const letters = [...node.name];
        const text = letters.length <= room ? node.name : letters.slice(0, room - 2).join("") + "..";
        parts.push(picture("text", { x: (x + 3).toFixed(1), y: y + 13 }, [text]));
      }
      const kind = (isHit ? "hit " : "") + (isAbove ? "above" : "");
      return picture("g", { class: kind.trim(), tabindex: at === 0 ? "0" : "-1", role: "button", "aria-label": told, "data-at": at }, parts);
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

  // Selecting a span: it snaps to slots, as only whole snapshots can be merged.

  function span() {
    const first = data.slots[state.from], last = data.slots[state.to];
    const [day, from] = local(first[0]), [until, to] = local(last[1]);
    byId("span").textContent = day + " " + from.slice(0, 12) + " to " + (until === day ? "" : until + " ") + to.slice(0, 12) + " (" + formatNs(last[1] - first[0]) + ", " +
      counted(state.to - state.from + 1, "slot") + " of " + data.slots.length + ")";
    const options = isWhole() ? "" : " --from " + first[4] + " --to " + last[5];
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
      told.push(source.name + ": " + of.count + " values" + (of.count > 0 ? ", p99 " + formatNs(quantile(of, 0.99)) + ", max " + formatNs(of.max) : "") +
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
    new Response(unpacked).text().then(begin);
  } else {
    makeSave();
  }
})();
