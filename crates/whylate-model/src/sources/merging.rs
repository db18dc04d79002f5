// SPDX-License-Identifier: MIT OR Apache-2.0
//! How figures of a series are merged over time.

use crate::Series;

/// Rule by which a figure is merged when two spans are merged.
#[derive(Clone, Copy, Debug)]
pub enum Merging {
    /// A counter: both are added.
    Sum,
    /// A maximum.
    Max,
    /// A gauge at the end of a span: the later one holds; dropped if the later span has none.
    Latest,
    /// A gauge that stays known after it was last reported.
    LastKnown,
    /// An average over the span, 0 if absent, weighted by the length of the span.
    OverSpan,
    /// An average over the time for which the subject of the series existed: the share of the span in its figure
    /// `present`; all of it if there is none.
    OverPresence,
    /// Derived from other figures of the merged series.
    Derived(fn(&Series) -> Option<f64>),
}

/// The figure for the share of the span in which the subject of a series existed.
pub const PRESENT: &str = "present";

/// Merges all figures as sums, for an unknown source.
pub fn sum_all(_name: &str) -> Merging {
    Merging::Sum
}
