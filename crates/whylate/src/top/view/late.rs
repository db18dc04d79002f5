// SPDX-License-Identifier: MIT OR Apache-2.0
//! Table of late events, newest first.

use std::cmp::Reverse;

use whylate_model::{Card, LateEvent};

use crate::render::text::time_of_day::in_zone;
use crate::render::text::why;
use crate::top::panel::{Cell, Panel, Row};
use crate::top::state::{State, ViewKind};

/// Maximum number of rows.
const MAX_ROWS: usize = 2_000;

/// Iterates over the shown late events that the overview counts, newest first: source, sequence number of the tick,
/// index within the tick, event.
pub fn events(state: &State) -> impl Iterator<Item = (&'static Card, u64, usize, &LateEvent)> {
    state.shown().rev().flat_map(move |tick| {
        let late = tick.late.iter().enumerate().rev();
        let counts = late.filter(move |(_, (card, event))| state.counts(card, event));
        counts.map(move |(index, (card, event))| (*card, tick.number, index, event))
    })
}

/// Lists the late events that match `is_of`.
pub fn panel(state: &State, is_of: impl Fn(&Card, &LateEvent) -> bool) -> Panel {
    let mut rows = Vec::new();
    let mut more = 0_u64;
    for (card, tick, index, event) in events(state).filter(|(card, _, _, event)| is_of(card, event)) {
        if rows.len() >= MAX_ROWS {
            more += 1;
            continue;
        }
        let main = event.causes.iter().max_by_key(|cause| cause.ns);
        let because = main.map_or_else(|| "not explained".to_owned(), |cause| why::culprit(cause.kind, &cause.who));
        let row = Row {
            key: format!("{tick}/{index}"),
            cells: vec![
                Cell::Ordered(time_of_day(event.at_unix_ns, state), event.at_unix_ns),
                Cell::Text(card.name.to_owned()),
                Cell::Ns(event.latency_ns),
                Cell::Text(event.subject.clone()),
                Cell::Text(because),
            ],
            is_late: false,
            opens: Some(ViewKind::Event(card.name, tick, index)),
        };
        rows.push((event.at_unix_ns, row));
    }
    // Sources report at different times.
    rows.sort_by_key(|(at_unix_ns, _)| Reverse(*at_unix_ns));
    let rows = rows.into_iter().map(|(_, row)| row).collect();
    let title = match more {
        0 => "Late events".to_owned(),
        _ => format!("Late events; {more} older ones not shown"),
    };
    Panel::table("late", title, "<AT, <SOURCE, LATENCY, <VICTIM, <MAIN CAUSE", rows, "nothing was late")
}

/// Formats the time of day with milliseconds: the column has no room for more.
pub fn time_of_day(unix_ns: u64, state: &State) -> String {
    in_zone(unix_ns, &state.zone, "%H:%M:%S%.3f")
}
