// SPDX-License-Identifier: MIT OR Apache-2.0
//! Table of late events, newest first.

use std::cmp::Reverse;
use std::collections::HashMap;

use whylate_model::{Card, LateEvent};

use crate::render::text::time_of_day::in_zone;
use crate::render::text::why;
use crate::top::panel::{Cell, Panel, Row};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

/// Maximum number of rows.
const MAX_ROWS: usize = 2_000;

/// Iterates over the shown late events that the overview counts, newest first: source, sequence number of the tick,
/// index within the tick, event.
pub fn events(window: &Window) -> impl Iterator<Item = (&'static Card, u64, usize, &LateEvent)> {
    window.ticks().rev().flat_map(move |tick| {
        let late = tick.late.iter().enumerate().rev();
        let counts = late.filter(move |(_, (card, event))| window.counts(card, event));
        counts.map(move |(index, (card, event))| (*card, tick.number, index, event))
    })
}

/// Properties that equal late events share: the tick, the source, the victim, and the main cause.
type Key<'a> = (u64, &'static str, &'a str, String);

/// Equal late events.
struct Group<'a> {
    newest_unix_ns: u64,
    count: u64,
    /// The longest event, with its index within the tick.
    worst: (usize, &'a LateEvent),
}

/// Lists the late events that match `is_of`, with a row for equal ones of a tick.
pub fn panel(window: &Window, is_of: impl Fn(&Card, &LateEvent) -> bool) -> Panel {
    let mut groups: Vec<(Key<'_>, Group<'_>)> = Vec::new();
    let mut places: HashMap<Key<'_>, usize> = HashMap::new();
    let mut more = 0_u64;
    for (card, tick, index, event) in events(window).filter(|(card, _, _, event)| is_of(card, event)) {
        let main = event.causes.iter().max_by_key(|cause| cause.ns);
        let because = main.map_or_else(|| "not explained".to_owned(), |cause| why::culprit(cause.kind, &cause.who));
        let key = (tick, card.name, event.subject.as_str(), because);
        if let Some(&place) = places.get(&key) {
            let group = &mut groups[place].1;
            group.count += 1;
            group.newest_unix_ns = group.newest_unix_ns.max(event.at_unix_ns);
            if event.latency_ns > group.worst.1.latency_ns {
                group.worst = (index, event);
            }
        } else if groups.len() >= MAX_ROWS {
            more += 1;
        } else {
            places.insert(key.clone(), groups.len());
            groups.push((key, Group { newest_unix_ns: event.at_unix_ns, count: 1, worst: (index, event) }));
        }
    }
    // Sources report at different times.
    groups.sort_by_key(|(_, group)| Reverse(group.newest_unix_ns));
    let row = |((tick, source, subject, because), group): (Key<'_>, Group<'_>)| {
        let Group { newest_unix_ns, count, worst: (index, event) } = group;
        Row {
            key: format!("{tick} {source} {subject} {because}"),
            cells: vec![
                Cell::Ordered(time_of_day(newest_unix_ns, window), newest_unix_ns),
                Cell::Text(source.to_owned()),
                Cell::Ns(event.latency_ns),
                Cell::Text(format!("{subject}{}", window.glyphs.times(count))),
                Cell::Text(because),
            ],
            is_late: false,
            opens: Some(ViewKind::Event(source, tick, index)),
        }
    };
    let rows = groups.into_iter().map(row).collect();
    let title = match more {
        0 => "LATE EVENTS".to_owned(),
        _ => format!("LATE EVENTS; {more} older ones not shown"),
    };
    Panel::table("late", title, "<AT, <SOURCE, LATENCY, <VICTIM, <MAIN CAUSE", rows, window.nothing("nothing was late"))
}

/// Formats the time of day with milliseconds: the column has no room for more.
pub fn time_of_day(unix_ns: u64, window: &Window) -> String {
    in_zone(unix_ns, &window.zone, "%H:%M:%S%.3f")
}
