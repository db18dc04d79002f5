// SPDX-License-Identifier: MIT OR Apache-2.0
// Sums by the rules by which whylate merges snapshots: `whylate replay` of the span prints equal numbers.

// Sources over the span.

const inSpan = (slot) => slot >= state.from && slot <= state.to;
const isWhole = () => state.from === 0 && state.to === data.slots.length - 1;

function sourceInSpan(source) {
  const cells = source.slots.slice(state.from, state.to + 1).filter((cell) => cell !== null);
  if (cells.length === 0) return null;
  const sum = (of) => cells.reduce((all, cell) => all + (of(cell) || 0), 0);
  const max = (of) => cells.reduce((all, cell) => Math.max(all, of(cell) || 0), 0);
  const last = cells[cells.length - 1];
  const figures = mergeHistograms(cells.map((cell) => cell.f).concat([last.e]));
  const hasSeries = cells.some((cell) => cell.has), hasLost = cells.some((cell) => cell.lost);
  if (source.is_nothing && !hasSeries && !hasLost) return null;
  let remark = null;
  if (source.share) {
    const [value, from, of, late] = source.share;
    const series = source.has_all ? source.series : source.judged;
    const shares = series.map((series) => values(source, series)[value]).filter((share) => share !== undefined);
    const lateCount = shares.filter((share) => share >= from).length;
    const isKnown = source.has_all || source.judged.length > 0;
    if (isKnown) remark = { text: of + ": " + shares.length + ", " + late + ": " + lateCount, late: lateCount > 0 };
    else if (source.remark) remark = { text: source.remark[0] + (isWhole() ? "" : " (over the whole span)"), late: source.remark[1] };
  }
  const late = sum((cell) => cell.late), held = sum((cell) => cell.held);
  return {
    source, figures, late, held, remark, lateFigures: lateFigures(source, cells, figures.max),
    lateMax: max((cell) => cell.late_max), heldMax: max((cell) => cell.held_max), lateNs: sum((cell) => cell.late_ns),
    isLate: late > 0 || held > 0 || figures.max >= source.from || (remark !== null && remark.late),
  };
}

// Late values among the figures, at least: those in the limit's own bucket are not known.
function lateFigures(source, cells, max) {
  const overTime = cells.reduce((all, cell) => all + (cell.f_late || 0), 0), atEnd = cells[cells.length - 1].e_late || 0;
  return Math.max(overTime + atEnd, max >= source.from ? 1 : 0);
}

// Late values: those that were recorded as events may be fewer.
const lateValues = (source, recorded, figures) => Math.max(source.late_of ? 0 : recorded, figures);

function verdictRows(of) {
  const { source, figures } = of, hasFigures = figures.count > 0;
  const isLate = source.late_of ? hasFigures && figures.max >= source.from : of.isLate;
  const figure = (value) => (hasFigures ? value : null);
  const late = isLate ? lateValues(source, of.late, of.lateFigures) || null : 0;
  const rows = [row(isLate, source.of === "" ? null : figures.count, figure(quantile(figures, 0.5)),
    figure(quantile(figures, 0.99)), figure(figures.max), source.from, late, of.remark ? of.remark.text : source.of)];
  if (source.late_of) rows.push(event(of.late, of.lateMax, source.late_of));
  if (source.held_up) rows.push(event(of.held, of.heldMax, source.held_up));
  return rows;

  function event(count, max, [what, from]) {
    return row(count > 0, null, null, null, count > 0 ? max : null, from, count, what);
  }
  function row(isLate, count, p50, p99, max, from, late, what) {
    const cells = [cellText(what), cellText(source.name), cellText(isLate ? "LATE" : "ok"), cellCount(count), cellNs(p50),
      cellNs(p99), cellNs(max), cellNs(from), cellCount(late)];
    return { cells, kind: isLate ? "late" : "" };
  }
}

// Values of a series over the span, merged slot by slot.

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
      merged = mergeSlot(merged === null ? (hasPresence ? { present: 0 } : {}) : merged, later, span, cell.d);
    }
    isFirst = false;
    span += cell.d;
  }
  return merged || {};

  function mergeSlot(valuesBefore, later, spanBefore, spanAfter) {
    const present = (of, span) => (of.present === undefined ? 1 : of.present) * span;
    const presentBefore = present(valuesBefore, spanBefore), presentAfter = later ? present(later, spanAfter) : 0;
    const valuesAfter = later || {}, merged = {};
    for (const name of new Set([...Object.keys(valuesBefore), ...Object.keys(valuesAfter)])) {
      if (name === "present" && hasPresence) continue;
      const value = mergeValue(source.merging[name], valuesBefore[name], valuesAfter[name], spanBefore, spanAfter, presentBefore, presentAfter);
      if (value !== undefined) merged[name] = value;
    }
    if (hasPresence && spanBefore + spanAfter > 0 && (presentBefore + presentAfter) / (spanBefore + spanAfter) < 1) {
      merged.present = (presentBefore + presentAfter) / (spanBefore + spanAfter);
    }
    return merged;
  }
  function mergeValue(rule, valueBefore, valueAfter, spanBefore, spanAfter, presentBefore, presentAfter) {
    const average = (a, b) => (a + b > 0 ? ((valueBefore || 0) * a + (valueAfter || 0) * b) / (a + b) : undefined);
    switch (rule) {
      case "max": return Math.max(valueBefore === undefined ? -Infinity : valueBefore, valueAfter === undefined ? -Infinity : valueAfter);
      case "latest": return valueAfter;
      case "known": return valueAfter === undefined ? valueBefore : valueAfter;
      case "span": return average(spanBefore, spanAfter);
      case "presence": return average(presentBefore, presentAfter);
      // Only whylate can derive it from other values.
      case "derived": return undefined;
      default: return (valueBefore || 0) + (valueAfter || 0);
    }
  }
}

function seriesRow(source, series) {
  const inside = series.slots.filter(([slot]) => inSpan(slot));
  if (inside.length === 0) return null;
  return { cells: cellsOf(source.columns, series.labels, inside, values(source, series)), kind: "" };
}

// Series added up by the label of the source.
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
  const of = (name) => (distributions[name] = distributions[name] || mergeHistograms(inside.map(([, of]) => of[name])));
  return columns.map(([type, name, format]) => {
    if (type === "label") return labels[name] === undefined ? { t: "-", v: null } : cellText(labels[name]);
    if (type === "of") {
      const all = of(name);
      if (all.count === 0) return emptyCell;
      return format === "count" ? cellCount(all.count)
        : cellNs(format === "max" ? all.max : quantile(all, format === "p50" ? 0.5 : 0.99));
    }
    const value = figures[name];
    if (value === undefined) return emptyCell;
    return format === "ns" ? cellNs(Math.floor(Math.max(value, 0)))
      : format === "share" ? cellShare(value) : { t: number(value), v: value, n: true };
  });
}
