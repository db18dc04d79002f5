// SPDX-License-Identifier: MIT OR Apache-2.0
// The parts of one function, which page.rs puts together. What the tables and pictures of a report say of a span that somebody
// selects: everything of the whole span is in the page already, and names enter it as text alone.

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
  // By all the digits that the number has: a product would be rounded itself.
  const [whole, part] = value.toFixed(60).split("."), kept = whole + part.slice(0, digits);
  if (/^50*$/.test(part.slice(digits)) && "02468".includes(kept.at(-1))) return whole + (digits > 0 ? "." + part.slice(0, digits) : "");
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
  // Clocks may have changed within it.
  const [, ahead] = data.offsets.findLast(([from]) => from <= ns) || data.offsets[0];
  const us = (BigInt(data.base_ns) + BigInt(Math.round(ns))) / 1000n + BigInt(ahead) * 1000000n;
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
