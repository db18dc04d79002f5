// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rows of the overview: each is one thing that a source compares with a threshold.

use std::borrow::Cow;

use super::{Headline, HeldUp, LateOf, Overview};
use crate::snapshot::Sleeper;
use crate::sources::{Judged, named};
use crate::units::printable;

/// Quantity that a row compares with a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// The source's figures.
    Figures,
    /// Late events, if they do not concern the figures.
    Events,
    /// Waits for other threads.
    HeldUp,
}

/// A row. Unknown figures are `None`.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// The source's name.
    pub source: &'a str,
    /// What is compared.
    pub kind: RowKind,
    /// Whether anything is late.
    pub is_late: bool,
    /// Number of measured values.
    pub count: Option<u64>,
    /// Median in nanoseconds.
    pub p50_ns: Option<u64>,
    /// 99th percentile in nanoseconds.
    pub p99_ns: Option<u64>,
    /// Maximum in nanoseconds.
    pub max_ns: Option<u64>,
    /// Threshold in nanoseconds.
    pub late_from_ns: u64,
    /// Number of late values: more than were recorded as events, if those were too many or too short. It is a lower
    /// bound, as values in the threshold's own bucket are not counted.
    pub late: Option<u64>,
    /// Subject of the figures.
    pub of: Cow<'a, str>,
    /// Names of the quantity on the source's card; `None` if this version does not know the source.
    pub judged: Option<&'static Judged>,
    /// The command with more details.
    pub next: &'a str,
}

impl Overview {
    /// Returns the rows of all sources, in the order of the screen.
    pub fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.sources.iter().flat_map(rows_of)
    }
}

/// Returns the rows of a source: its figures, its late events, and its waits for other threads.
fn rows_of(source: &Headline) -> impl Iterator<Item = Row<'_>> {
    let card = named(&source.source);
    let events = source.late_of.as_ref().map(|LateOf { of, late_from_ns, max_ns, next }| Row {
        judged: card.map(|card| card.events()),
        ..of_events(source, RowKind::Events, source.late, *max_ns, *late_from_ns, of, next)
    });
    let held_up = source.held_up.as_ref().map(|HeldUp { of, late_from_ns, late, max_ns, next, .. }| Row {
        judged: card.and_then(|card| card.held_up.as_ref()),
        ..of_events(source, RowKind::HeldUp, *late, *max_ns, *late_from_ns, of, next)
    });
    std::iter::once(of_figures(source)).chain(events).chain(held_up)
}

fn of_figures(source: &Headline) -> Row<'_> {
    let has_events_beside = source.late_of.is_some();
    let is_late = match has_events_beside {
        true => source.count > 0 && source.max_ns >= source.late_from_ns,
        false => source.is_late,
    };
    let recorded = if has_events_beside { 0 } else { source.late };
    let late = if is_late { recorded.max(source.late_figures) } else { 0 };
    let figure = |ns| (source.count > 0).then_some(ns);
    Row {
        source: &source.source,
        kind: RowKind::Figures,
        is_late,
        // A source without figures only counts late events.
        count: (!source.of.is_empty()).then_some(source.count),
        p50_ns: figure(source.p50_ns),
        p99_ns: figure(source.p99_ns),
        max_ns: figure(source.max_ns),
        late_from_ns: source.late_from_ns,
        // Sources without explanations count no late events.
        late: Some(late).filter(|&late| late > 0 || !is_late),
        of: subject(source),
        judged: named(&source.source).map(|card| &card.judged),
        next: &source.next,
    }
}

fn of_events<'a>(
    source: &'a Headline,
    kind: RowKind,
    late: u64,
    max_ns: u64,
    late_from_ns: u64,
    of: &'a str,
    next: &'a str,
) -> Row<'a> {
    Row {
        source: &source.source,
        kind,
        is_late: late > 0,
        count: None,
        p50_ns: None,
        p99_ns: None,
        max_ns: (late > 0).then_some(max_ns),
        late_from_ns,
        late: Some(late),
        of: of.into(),
        judged: None,
        next,
    }
}

/// Describes the subject of a source's figures: its remark, or what it measures with the longest sleeper first.
fn subject(source: &Headline) -> Cow<'_, str> {
    match source.sleepers.first() {
        _ if !source.remark.is_empty() => source.remark.as_str().into(),
        Some(Sleeper { who, .. }) => format!("{}, longest of {}", printable(who), source.of).into(),
        None => source.of.as_str().into(),
    }
}
