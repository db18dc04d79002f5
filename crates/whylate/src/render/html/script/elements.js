// SPDX-License-Identifier: MIT OR Apache-2.0
// The script parts form one function, which page.rs puts together. It draws tables and pictures again for a selected
// span. The page already has everything for the whole span. Names are only inserted as text.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 10000;
const MAX_ROWS = 50;
const MAX_CULPRITS = 30, SMALL_PART = 0.005;
const state = { from: 0, to: 0, culprit: -1, sorts: {}, open: new Set(), showsAll: false };
let data = null;
const byId = (id) => document.getElementById(id);

// Elements.

function element(tag, attributes, children) {
  const node = document.createElement(tag);
  return fillElement(node, attributes, children);
}

function picture(tag, attributes, children) {
  return fillElement(document.createElementNS(SVG, tag), attributes, children);
}

function fillElement(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  for (const child of children || []) node.append(child);
  return node;
}

function button(text, attributes, onClick) {
  const node = element("button", Object.assign({ type: "button" }, attributes), [text]);
  node.addEventListener("click", onClick);
  return node;
}

function swatch(kind) {
  const square = picture("path", { class: kind, d: "M0 0h10v10H0z" });
  return picture("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" }, [square]);
}

// Numbers, formatted as by whylate.

// Rounds like `toFixed`, but ties go to the even digit, as in whylate.
function fixed(value, digits) {
  // Tests all digits of the number: a scaled product would be rounded itself.
  const [whole, part] = value.toFixed(60).split("."), truncated = whole + part.slice(0, digits);
  if (/^50*$/.test(part.slice(digits)) && "02468".includes(truncated.at(-1))) return whole + (digits > 0 ? "." + part.slice(0, digits) : "");
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
const pluralize = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");

const emptyCell = { t: "-", v: null, n: true };
const cellNs = (ns) => (ns === null || ns === undefined ? emptyCell : { t: formatNs(ns), v: ns, n: true });
const cellCount = (count) => (count === null || count === undefined ? emptyCell : { t: String(count), v: count, n: true });
const cellShare = (share) => (share === undefined ? emptyCell : { t: percent(share), v: share, n: true });
const cellText = (text) => ({ t: text, v: text });

// Date and time of day in the time zone of the recorded machine, to the microsecond.
function local(ns) {
  // The offset may have changed during the recording.
  const [, ahead] = data.offsets.findLast(([from]) => from <= ns) || data.offsets[0];
  const us = (BigInt(data.base_ns) + BigInt(Math.round(ns))) / 1000n + BigInt(ahead) * 1000000n;
  const date = new Date(Number(us / 1000n)).toISOString();
  return [date.slice(0, 10), date.slice(11, 23) + String(us % 1000n).padStart(3, "0")];
}

// Histograms: an array of the maximum, then of upper bounds and counts in turn.

function mergeHistograms(rows) {
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

function quantile(histogram, share) {
  const rank = Math.min(Math.max(Math.ceil(share * histogram.count), 1), Math.max(histogram.count, 1));
  let seen = 0;
  for (const [bound, count] of histogram.buckets) {
    seen += count;
    if (seen >= rank) return Math.min(bound, histogram.max);
  }
  return 0;
}
