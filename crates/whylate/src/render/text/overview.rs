// SPDX-License-Identifier: MIT OR Apache-2.0
//! The overview as text: the verdict and other words that `top` and the report share, and the screen.

pub mod programs;
mod screen;
mod verdict;

use whylate_model::culprits::Culprit;
use whylate_model::overview::Overview;
use whylate_model::units::format_ns;

pub use screen::{Screen, delayed, delayed_events, write};
pub use verdict::Sentences;

/// Renders whether a row is late.
pub fn status(is_late: bool) -> &'static str {
    if is_late { "LATE" } else { "ok" }
}

/// Renders the victims of a culprit per source: how often they were delayed, in total, and the worst delay.
pub fn victims(culprit: &Culprit) -> String {
    let each = culprit.victims.iter().map(|victims| {
        let times = if victims.events == 1 { "once".to_owned() } else { format!("{} times", victims.events) };
        let (total, worst) = (format_ns(victims.total_ns), format_ns(victims.worst_ns));
        format!("{} {times} by {total} (worst {worst})", victims.source)
    });
    each.collect::<Vec<_>>().join(", ")
}

/// Lists lost events with their source.
pub fn lost_events(look: &Overview) -> Vec<String> {
    look.lost().map(|(source, reason, count)| format!("{count} {} ({source})", reason.replace('_', " "))).collect()
}
