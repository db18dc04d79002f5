// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws for which share of the time programs were held up, over time.

use std::fmt::Write as _;

use whylate_model::programs::{HeldUpPart, HeldUpProgram, Programs};
use whylate_model::units::format_span;

use super::super::Report;
use super::super::markup::{sentence, text};
use super::super::slots::Slot;
use super::{Axis, WIDTH, y_labels};
use crate::render::text::overview::programs::by;

/// Height of a picture, in its own units: a percent each.
const HEIGHT: u64 = 100;
/// Maximum number of programs with a picture.
const MAX_PROGRAMS: usize = 5;

/// Returns a picture of each program over the limit, longest held up first.
pub fn write(report: &Report, axis: &Axis) -> String {
    let all = &report.look.programs;
    all.held_up.iter().take(MAX_PROGRAMS).map(|of| picture(report, all, of, axis)).collect()
}

fn picture(report: &Report, all: &Programs, of: &HeldUpProgram, axis: &Axis) -> String {
    let percents: Vec<u64> = report.slots.iter().map(|slot| percent_of(slot, of)).collect();
    let mut bars = String::new();
    for (slot, &percent) in report.slots.iter().zip(&percents).filter(|(_, percent)| **percent > 0) {
        let (x, width) = axis.position(slot);
        let _ = write!(bars, "M{x} {}h{width}v{percent}h-{width}z", HEIGHT - percent);
    }
    let (percent, span) = (of.share(all.covered_ns) * 100.0, format_span(all.covered_ns));
    let what = format!("held up {percent:.0}% of {span} by {}", by(all, of));
    let percents: Vec<String> = percents.iter().map(u64::to_string).collect();
    let name = text(&of.program().to_string());
    format!(
        "<div class=\"plot\" data-percents=\"{}\"><h3>{name}</h3><p class=\"what\">{}</p>\n<div class=\"axes\">{}\
         <svg class=\"held-up\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"Share of the time for which this program was held up\"><path class=\"h5\" d=\"{bars}\"/></svg></div></div>\n",
        percents.join(","),
        sentence(&what),
        y_labels(["100%", "50%", "0"].map(str::to_owned)),
    )
}

/// Returns the share of a slot's time for which the program was held up as it was in the whole span, in percent. Of several
/// threads of its name, the one that was held up longest stands for it.
fn percent_of(slot: &Slot, of: &HeldUpProgram) -> u64 {
    let name = of.program().by_name();
    let counts = |part: &&HeldUpPart| of.parts.iter().any(|known| known.by == part.by && known.via == part.via);
    let in_slot = slot.sources.iter().flatten().flat_map(|source| {
        let programs = source.found.programs();
        let threads = programs.held_up.iter().filter(|thread| thread.program().by_name() == name);
        threads.map(|thread| {
            let parts = thread.parts.iter().filter(counts).cloned().collect();
            HeldUpProgram { parts, ..thread.clone() }.share(programs.covered_ns)
        })
    });
    (in_slot.fold(0.0, f64::max) * 100.0).round() as u64
}
