// SPDX-License-Identifier: MIT OR Apache-2.0
//! The overview as text: its rows, which `top` and the report share, and the screen.

mod screen;

use std::borrow::Cow;
use std::collections::BTreeMap;

use whylate_model::culprits::Culprit;
use whylate_model::overview::{Headline, HeldUp, LateOf, Overview};
use whylate_model::snapshot::Sleeper;
use whylate_model::sources::{self, Judged, SHARED, named};
use whylate_model::units::{format_ns, printable};

use super::footer;

pub use screen::{Screen, delayed, write};

/// A row: one thing that a source compares with a threshold.
struct Row<'a> {
    source: &'a Headline,
    of: Of<'a>,
    is_late: bool,
}

/// Threshold of a source that a row is about.
#[derive(Clone, Copy)]
enum Of<'a> {
    Figures,
    /// Late events, if they do not concern the figures.
    Events(&'a LateOf),
    HeldUp(&'a HeldUp),
}

/// Returns the rows of a source: its figures, its late events, and its waits for other threads.
fn rows_of(source: &Headline) -> impl Iterator<Item = Row<'_>> {
    let late_of = source.late_of.as_ref();
    let is_late = match late_of {
        Some(_) => source.count > 0 && source.max_ns >= source.late_from_ns,
        None => source.is_late,
    };
    let events = late_of.map(|late_of| Row { source, of: Of::Events(late_of), is_late: source.late > 0 });
    let held_up = source.held_up.as_ref();
    let held_up = held_up.map(|held_up| Row { source, of: Of::HeldUp(held_up), is_late: held_up.late > 0 });
    std::iter::once(Row { source, of: Of::Figures, is_late }).chain(events).chain(held_up)
}

/// What a row compares with a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    Figures,
    Events,
    /// Waits for other threads.
    HeldUp,
}

/// A row as it is rendered. Unknown figures are `None`.
#[derive(Clone, Debug)]
pub struct RenderedRow<'a> {
    pub source: &'a str,
    pub kind: RowKind,
    pub is_late: bool,
    pub count: Option<u64>,
    pub p50_ns: Option<u64>,
    pub p99_ns: Option<u64>,
    pub max_ns: Option<u64>,
    pub late_from_ns: u64,
    pub late: Option<u64>,
    /// Lower bound of the late values, of which some were not recorded as events.
    at_least: u64,
    pub of: Cow<'a, str>,
    /// Its names on the source's card; `None` if this version does not know the source.
    pub judged: Option<&'static Judged>,
    /// The command with more details.
    pub next: &'a str,
}

impl RenderedRow<'_> {
    /// Returns the number of late values, as far as it is known.
    pub fn late_values(&self) -> Option<u64> {
        Some(self.late.unwrap_or(0).max(self.at_least)).filter(|&late| late > 0 || !self.is_late)
    }
}

/// Returns the rows of all sources, in the order of the screen.
pub fn shown(look: &Overview) -> impl Iterator<Item = RenderedRow<'_>> {
    look.sources.iter().flat_map(rows_of).map(|row| row.shown())
}

/// Describes the subject of a source's figures: its remark, or what it measures with the longest sleeper first.
fn of_figures(source: &Headline) -> Cow<'_, str> {
    match source.sleepers.first() {
        _ if !source.remark.is_empty() => source.remark.as_str().into(),
        Some(Sleeper { who, .. }) => format!("{}, longest of {}", printable(who), source.of).into(),
        None => source.of.as_str().into(),
    }
}

/// Renders a verdict.
pub fn verdict(is_late: bool) -> &'static str {
    if is_late { "LATE" } else { "normal" }
}

impl<'a> Row<'a> {
    fn shown(&self) -> RenderedRow<'a> {
        let Row { source, of, is_late } = *self;
        let card = named(&source.source);
        let judged = card.and_then(|card| match of {
            Of::Figures => Some(&card.judged),
            Of::Events(_) => Some(card.events()),
            Of::HeldUp(_) => card.held_up.as_ref(),
        });
        let figure = |ns| (source.count > 0).then_some(ns);
        let events = |kind, max_ns, late_from_ns, late: u64, of: &'a str, next: &'a str| RenderedRow {
            source: &source.source,
            kind,
            is_late,
            count: None,
            p50_ns: None,
            p99_ns: None,
            max_ns: (late > 0).then_some(max_ns),
            late_from_ns,
            late: Some(late),
            at_least: 0,
            of: of.into(),
            judged,
            next,
        };
        match of {
            Of::Figures => RenderedRow {
                source: &source.source,
                kind: RowKind::Figures,
                is_late,
                // A source without figures only counts late events.
                count: (!source.of.is_empty()).then_some(source.count),
                p50_ns: figure(source.p50_ns),
                p99_ns: figure(source.p99_ns),
                max_ns: figure(source.max_ns),
                late_from_ns: source.late_from_ns,
                late: match (is_late, source.late) {
                    (false, _) => Some(0),
                    // Sources without explanations count no late events.
                    (true, _) if source.late_of.is_some() => Some(source.late_figures).filter(|&late| late > 0),
                    (true, late) => (late > 0).then_some(late),
                },
                at_least: if is_late { source.late_figures } else { 0 },
                of: of_figures(source),
                judged,
                next: &source.next,
            },
            Of::Events(LateOf { max_ns, late_from_ns, of, next }) => {
                events(RowKind::Events, *max_ns, *late_from_ns, source.late, of, next)
            }
            Of::HeldUp(HeldUp { max_ns, late_from_ns, late, of, next, .. }) => {
                events(RowKind::HeldUp, *max_ns, *late_from_ns, *late, of, next)
            }
        }
    }
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

/// Iterates over the sources, and what they share, with their counts of lost events.
fn counts_of_lost(look: &Overview) -> impl Iterator<Item = (&str, &BTreeMap<String, u64>)> {
    let of_sources = look.sources.iter().map(|source| (source.source.as_str(), &source.lost));
    of_sources.chain([(SHARED, &look.lost)])
}

/// Lists lost events with their source.
pub fn lost_events(look: &Overview) -> Vec<String> {
    let each = counts_of_lost(look).flat_map(|(source, counts)| {
        footer::by_reason(source, counts).into_iter().map(move |lost| format!("{lost} ({source})"))
    });
    each.collect()
}

/// Returns the number of lost events.
pub fn count_lost(look: &Overview) -> u64 {
    counts_of_lost(look).fold(0, |all, (source, counts)| all.saturating_add(sources::count_lost(source, counts)))
}
