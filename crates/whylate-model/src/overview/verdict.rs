// SPDX-License-Identifier: MIT OR Apache-2.0
//! The verdict of an overview, which the overview, `whylate top` and reports put into the same words.

use super::{Overview, Row};
use crate::CauseKind;
use crate::culprits::Culprit;
use crate::programs::Programs;

/// What was late over a span, and its main culprit.
#[derive(Clone, Debug)]
pub struct Verdict<'a> {
    /// The machine's host name.
    pub host: &'a str,
    /// Duration of the span in nanoseconds.
    pub duration_ns: u64,
    /// Rows over their limits; empty if nothing was late.
    pub late: Vec<Row<'a>>,
    /// Programs over the limit.
    pub programs: &'a Programs,
    /// Total delay of the late events in nanoseconds.
    pub delay_ns: u64,
    /// Number of late events that were recorded, if more values were late.
    pub recorded: Option<u64>,
    /// The culprit with the largest share of the delay, if one is known.
    pub main: Option<MainCulprit<'a>>,
}

/// The main culprit.
#[derive(Clone, Debug)]
pub struct MainCulprit<'a> {
    /// The culprit.
    pub culprit: &'a Culprit,
    /// Share of the culprit, as a percentage.
    pub percent: f64,
    /// Whether the share is of all delay; otherwise of the delay that is explained.
    pub is_of_all: bool,
}

impl Overview {
    /// Returns the verdict.
    pub fn verdict(&self) -> Verdict<'_> {
        // Figures count events that were too many, or too short, to be recorded.
        let has_all = self.sources.iter().all(|of| of.late_of.is_some() || of.late >= of.late_figures);
        let recorded = || self.sources.iter().map(|of| of.late + of.held_up.as_ref().map_or(0, |of| of.late)).sum();
        let explained_ns = self.explained_ns();
        let main =
            self.culprits.iter().find(|culprit| culprit.kind != CauseKind::Unknown).filter(|_| explained_ns > 0).map(
                |culprit| MainCulprit {
                    culprit,
                    percent: culprit.total_ns as f64 * 100.0 / explained_ns as f64,
                    is_of_all: has_all && self.unexplained().events == 0,
                },
            );
        let late: Vec<Row<'_>> = self.rows().filter(|row| row.is_late).collect();
        Verdict {
            host: &self.host,
            duration_ns: self.duration_ns,
            main: main.filter(|_| !late.is_empty()),
            late,
            programs: &self.programs,
            delay_ns: self.sources.iter().map(|source| source.late_ns).fold(0, u64::saturating_add),
            recorded: (!has_all).then(recorded),
        }
    }

    /// Returns the delay that the culprits caused, in nanoseconds.
    pub fn explained_ns(&self) -> u64 {
        self.culprits.iter().map(|culprit| culprit.total_ns).fold(0, u64::saturating_add)
    }
}
