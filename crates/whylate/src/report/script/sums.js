// SPDX-License-Identifier: MIT OR Apache-2.0
// Sums by the rules by which whylate merges snapshots: `whylate replay` of the span prints the same.

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
    const series = source.has_all ? source.series : source.judged;
    const shares = series.map((series) => values(source, series)[value]).filter((share) => share !== undefined);
    const starved = shares.filter((share) => share >= from).length;
    const isKnown = source.has_all || source.judged.length > 0;
    if (isKnown) remark = { text: of + ": " + shares.length + ", " + late + ": " + starved, late: starved > 0 };
    else if (source.remark) remark = { text: source.remark[0] + (isWhole() ? "" : " (over the whole span)"), late: source.remark[1] };
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
  return { cells: cellsOf(source.columns, series.labels, inside, values(source, series)), kind: "" };
}

// Series added up by the label that the source is read by.
function groupedRows(source) {
  const { label, columns, order } = source.grouped, groups = new Map(order.map((value) => [value, []]));
  for (const series of source.series) {
    const inside = series.slots.filter(([slot, of]) => inSpan(slot) && Object.keys(of).length > 0);
    (groups.get(series.labels[label] || "") || []).push(...inside);
  }
  const rows = [...groups].filter(([, inside]) => inside.length > 0);
  return rows.map(([value, inside]) => ({ cells: cellsOf(columns, { [label]: value }, inside, {}), kind: "" }));
}

function cellsOf(columns, labels, inside, figures) {
  const distributions = {};
  const of = (name) => (distributions[name] = distributions[name] || gathered(inside.map(([, of]) => of[name])));
  return columns.map(([what, name, how]) => {
    if (what === "label") return labels[name] === undefined ? { t: "-", v: null } : cellText(labels[name]);
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
}
