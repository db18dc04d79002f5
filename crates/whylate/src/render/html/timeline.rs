// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws the timeline: a heat map of each source's latencies, with late events as dots, and below them the programs that were
//! held up and the delay that culprits caused, all on one time axis.
//!
//! Pictures stretch to the width of the window, so they have no text. Labels stand beside them, where they are readable
//! on a phone as well as on paper.

mod held_up;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use whylate_model::Card;
use whylate_model::culprits::Culprit;
use whylate_model::overview::RowKind;
use whylate_model::sources::Judged;
use whylate_model::units::{format_ns, format_round_ns};

use super::Report;
use super::listed::ListedEvent;
use super::markup::{sentence, text};
use super::rows::Sum as _;
use super::slots::Slot;
use crate::render::text::time_of_day::in_zone;
use crate::render::text::why::{self, counted};

/// Width of a picture, in its own units.
pub const WIDTH: u64 = 10_000;
/// Height of a power of two, and of the picture of culprits, in the pictures' own units.
const ROW: u64 = 10;
const STACK: f64 = 1_000.0;
/// Number of shades. Each stands for four times as many values as the one before.
const SHADES: usize = 6;
/// Power of two of the lowest row. It has all shorter values: below a microsecond nothing is late.
const LOWEST: u32 = 10;
/// Number of culprits with a color of their own.
pub const COLORED: usize = 6;

/// Scales that two runs share, so that they can be compared.
#[derive(Debug, Default)]
pub struct Scale {
    /// Scale of each source: the lowest and the highest power of two, and the maximum values per second of a cell.
    sources: BTreeMap<&'static str, (u32, u32, f64)>,
    /// The maximum delay per second, of all culprits together.
    max_delay: f64,
}

/// Returns the length of each slot in seconds, at least half the median: a rate over a truncated slot is unreliable.
fn lengths(report: &Report) -> Vec<f64> {
    let seconds = |slot: &Slot| slot.end_unix_ns.saturating_sub(slot.start_unix_ns) as f64 / 1e9;
    let lengths: Vec<f64> = report.slots.iter().map(seconds).collect();
    let mut order = lengths.clone();
    order.sort_unstable_by(f64::total_cmp);
    let min = order.get(order.len() / 2).map_or(1.0, |usual| usual / 2.0).max(1e-9);
    lengths.into_iter().map(|length| length.max(min)).collect()
}

/// Returns the number of values of a slot by power of two.
fn powers(slot: &Slot, number: usize) -> BTreeMap<u32, u64> {
    let mut powers = BTreeMap::new();
    if let Some(of) = &slot.sources[number] {
        for (range, count) in of.found.figures().iter() {
            let middle = range.start() / 2 + range.end() / 2 + (range.start() & range.end() & 1);
            *powers.entry(middle.checked_ilog2().unwrap_or(0).max(LOWEST)).or_default() += count;
        }
    }
    powers
}

impl Scale {
    pub fn for_reports(reports: &[&Report]) -> Self {
        let mut scale = Scale::default();
        for report in reports {
            let lengths = lengths(report);
            for (number, card) in report.cards.iter().enumerate() {
                let mut of = scale.sources.get(card.name).copied().unwrap_or((u32::MAX, 0, 0.0));
                let mut include = |power: u32, rate: f64| {
                    of = (of.0.min(power), of.1.max(power), of.2.max(rate));
                };
                for (slot, length) in report.slots.iter().zip(&lengths) {
                    powers(slot, number).into_iter().for_each(|(power, count)| include(power, count as f64 / length));
                }
                let late = report.late.iter().filter(|late| late.card.name == card.name);
                late.for_each(|late| include(late.event.latency_ns.checked_ilog2().unwrap_or(0).max(LOWEST), 0.0));
                if of.0 <= of.1 {
                    // Includes the limit in the picture.
                    let limit = card.events().late_from_ns.max(1).ilog2();
                    of = (of.0.min(limit), of.1.max(limit), of.2);
                    scale.sources.insert(card.name, of);
                }
            }
            let delays = delays(report);
            for (length, of_slot) in lengths.iter().zip(0..) {
                let sum: u64 = delays.iter().map(|of| of.get(&of_slot).copied().unwrap_or(0)).sum();
                scale.max_delay = scale.max_delay.max(sum as f64 / length);
            }
        }
        scale
    }
}

/// Returns the nanoseconds by slot of each culprit with a color, and of all others together.
fn delays(report: &Report) -> Vec<BTreeMap<u32, u64>> {
    let mut all = vec![BTreeMap::new(); COLORED + 1];
    for (rank, culprit) in report.look.culprits.iter().enumerate() {
        for (_, delays) in report.culprits.delays_by(culprit.kind, &culprit.who) {
            for (slot, delay) in delays {
                let sum: &mut u64 = all[rank.min(COLORED)].entry(*slot).or_default();
                sum.add(&delay.total_ns);
            }
        }
    }
    all
}

/// Maps times to positions in a picture.
pub struct Axis {
    from_ns: u64,
    to_ns: u64,
}

impl Axis {
    pub fn for_report(report: &Report) -> Self {
        let from_ns = report.slots.iter().map(|slot| slot.start_unix_ns).min().unwrap_or(0);
        let to_ns = report.slots.iter().map(|slot| slot.end_unix_ns).max().unwrap_or(0);
        Axis { from_ns, to_ns: to_ns.max(from_ns + 1) }
    }

    pub fn x(&self, unix_ns: u64) -> u64 {
        let of = u128::from(unix_ns.clamp(self.from_ns, self.to_ns) - self.from_ns) * u128::from(WIDTH);
        (of / u128::from(self.to_ns - self.from_ns)) as u64
    }

    /// Returns the position and the width of a slot, which is at least 1.
    fn position(&self, slot: &Slot) -> (u64, u64) {
        let from = self.x(slot.start_unix_ns);
        (from, self.x(slot.end_unix_ns).saturating_sub(from).max(1))
    }

    /// Returns five equidistant axis labels.
    fn labels(&self, report: &Report) -> String {
        let length_ns = self.to_ns - self.from_ns;
        let format = match length_ns {
            0..10_000_000_000 => "%H:%M:%S%.3f",
            10_000_000_000..43_200_000_000_000 => "%H:%M:%S",
            _ => "%m-%d %H:%M",
        };
        let tick = |part: u64| {
            let at_ns = u128::from(self.from_ns) + u128::from(length_ns) * u128::from(part) / 4;
            format!("<li>{}</li>", in_zone(at_ns as u64, &report.zone, format))
        };
        format!("<ol class=\"x\">{}</ol>\n", (0..5).map(tick).collect::<String>())
    }
}

/// Returns all pictures of a run, in the order of the overview of `first`.
pub fn write(report: &Report, first: &Report, scale: &Scale) -> String {
    let axis = Axis::for_report(report);
    let mut out = String::new();
    for (number, card) in report.ordered_as(first) {
        out += &heat(report, number, card, scale, &axis).unwrap_or_default();
    }
    out += &held_up::write(report, &axis);
    out += &stack(report, scale, &axis);
    out += &axis.labels(report);
    out
}

/// Returns the labels beside a picture: a value at its top, in its middle and at its bottom.
fn y_labels(values: [String; 3]) -> String {
    format!("<ol class=\"y\">{}</ol>", values.map(|value| format!("<li>{value}</li>")).concat())
}

fn heat(report: &Report, number: usize, card: &Card, scale: &Scale, axis: &Axis) -> Option<String> {
    let (low, high, max) = *scale.sources.get(card.name)?;
    let height = u64::from(high - low + 1) * ROW;
    let mut shades = vec![String::new(); SHADES];
    for (slot, length) in report.slots.iter().zip(lengths(report)) {
        let (x, width) = axis.position(slot);
        for (power, count) in powers(slot, number) {
            let less = (max / (count as f64 / length).max(1e-9)).max(1.0).log2() / 2.0;
            let shade = (SHADES - 1).saturating_sub(less as usize);
            let y = u64::from(high - power) * ROW;
            let _ = write!(shades[shade], "M{x} {y}h{width}v{ROW}h-{width}z");
        }
    }
    let y = |ns: u64| ((f64::from(high) + 1.0 - (ns.max(1) as f64).log2()) * ROW as f64).clamp(0.0, height as f64);
    let mut marks = String::new();
    for one in report.late.iter().filter(|one| one.card.name == card.name) {
        let _ = write!(marks, "M{} {:.1}h.1", axis.x(one.event.at_unix_ns), y(one.event.latency_ns));
    }
    let judged = card.events();
    let of = if card.judged.of.is_empty() { judged.of } else { card.judged.of };
    let dots = dots(report, card);
    let mut out = format!(
        "<div class=\"plot\" data-source=\"{0}\"><h3>{0}</h3><p class=\"what\">color: {1}; dots: {2}</p>\n<div class=\"axes\">",
        card.name,
        text(of),
        sentence(&dots)
    );
    let middle = u64::from(low + high + 1) / 2;
    let power = |power: u64| format_ns(1_u64.checked_shl(power as u32).unwrap_or(u64::MAX));
    out += &y_labels([power(u64::from(high) + 1), power(middle), power(low.into())]);
    let _ = write!(
        out,
        "<svg class=\"heat\" viewBox=\"0 0 {WIDTH} {height}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{} over time: {}\">",
        card.name,
        sentence(&dots)
    );
    for (shade, cells) in shades.iter().enumerate().filter(|(_, cells)| !cells.is_empty()) {
        let _ = write!(out, "<path class=\"h{shade}\" d=\"{cells}\"/>");
    }
    let _ = write!(out, "<path class=\"limit\" d=\"M0 {:.1}h{WIDTH}\"/>", y(judged.late_from_ns));
    if !marks.is_empty() {
        let _ = write!(out, "<path class=\"mark\" d=\"{marks}\"/>");
    }
    out += "</svg></div></div>\n";
    Some(out)
}

/// Describes the dots of a source: what was late, from which limit on, and how many of all are listed.
fn dots(report: &Report, card: &Card) -> String {
    let events = if card.events.is_some() { RowKind::Events } else { RowKind::Figures };
    let of = |kind: RowKind, judged: &Judged, line: &str| {
        let with_path = kind == RowKind::HeldUp;
        let is_of = |one: &&ListedEvent| one.card.name == card.name && one.event.path.is_empty() != with_path;
        let listed = report.late.iter().filter(is_of).count() as u64;
        let row = report.look.rows().find(|row| row.source == card.name && row.kind == kind);
        let all = row.and_then(|row| row.late).unwrap_or(0);
        if with_path && all == 0 {
            return None;
        }
        let ([one, several], from) = (judged.late, format_round_ns(judged.late_from_ns));
        let which = if listed < all { format!("{listed} of {all}") } else { listed.to_string() };
        let what = if listed.max(all) == 1 { one } else { several };
        Some(format!("{which} {what}, {from} or longer{line}"))
    };
    let late = of(events, card.events(), " (dashed)");
    let held_up = card.held_up.as_ref().and_then(|judged| of(RowKind::HeldUp, judged, ""));
    late.into_iter().chain(held_up).collect::<Vec<_>>().join("; ")
}

/// Describes a culprit, with its share of all delays.
pub fn about(culprit: &Culprit, all_ns: u64) -> String {
    let percent = culprit.total_ns as f64 * 100.0 / all_ns.max(1) as f64;
    format!("{}: {} ({percent:.1}%)", why::culprit(culprit.kind, &culprit.who), format_ns(culprit.total_ns))
}

fn stack(report: &Report, scale: &Scale, axis: &Axis) -> String {
    let all_ns: u64 = report.look.culprits.iter().map(|culprit| culprit.total_ns).sum();
    if all_ns == 0 {
        return "<div class=\"plot\"><h3>culprits</h3><p class=\"what\">No culprit is known.</p></div>\n".to_owned();
    }
    let delays = delays(report);
    let mut paths = vec![String::new(); COLORED + 1];
    for ((slot, length), number) in report.slots.iter().zip(lengths(report)).zip(0..) {
        let (x, width) = axis.position(slot);
        let mut below = 0.0;
        for (path, of) in paths.iter_mut().zip(&delays) {
            let Some(&ns) = of.get(&number).filter(|ns| **ns > 0) else { continue };
            let height = ns as f64 / length / scale.max_delay.max(1e-9) * STACK;
            let _ = write!(path, "M{x} {:.1}h{width}v{height:.1}h-{width}z", STACK - below - height);
            below += height;
        }
    }
    let mut out = "<div class=\"plot\"><h3>culprits</h3><p class=\"what\">delay that each caused, per second</p>\n<div class=\"axes\">".to_owned();
    let per_second = |part: f64| format!("{}/s", format_ns((scale.max_delay * part) as u64));
    out += &y_labels([per_second(1.0), per_second(0.5), "0".to_owned()]);
    let _ = write!(
        out,
        "<svg class=\"stack\" viewBox=\"0 0 {WIDTH} {STACK}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Delay that culprits caused over time\">"
    );
    for (rank, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ = write!(out, "<path class=\"c{rank}\" d=\"{path}\"/>");
    }
    out += "</svg></div><ul class=\"legend\">";
    let (colored, others) = report.look.culprits.split_at(report.look.culprits.len().min(COLORED));
    for (rank, culprit) in colored.iter().enumerate() {
        let _ = write!(out, "<li>{}{}</li>", swatch(&format!("c{rank}")), text(&about(culprit, all_ns)));
    }
    if !others.is_empty() {
        let ns: u64 = others.iter().map(|culprit| culprit.total_ns).sum();
        let how_many = counted(others.len() as u64, "other");
        let _ = write!(out, "<li>{}{how_many}: {}</li>", swatch(&format!("c{COLORED}")), format_ns(ns));
    }
    out + "</ul></div>\n"
}

/// Returns a square of a color.
pub fn swatch(class: &str) -> String {
    format!(
        "<svg class=\"swatch\" viewBox=\"0 0 10 10\" aria-hidden=\"true\"><path class=\"{class}\" d=\"M0 0h10v10H0z\"/></svg> "
    )
}
