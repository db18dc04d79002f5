// SPDX-License-Identifier: MIT OR Apache-2.0
//! Late events as a table, the newest first.

use jiff::Timestamp;
use whylate_model::late::SLEEPER;
use whylate_model::{Card, LateEvent};

use crate::output::why;
use crate::top::panel::{Cell, Panel, Row};
use crate::top::state::{State, What};

/// So many have a row.
const MOST: usize = 2_000;

/// Late events of what is shown, as a look counts them, with the number of their moment and their place in it; the newest
/// first.
pub fn events(state: &State) -> impl Iterator<Item = (&'static Card, u64, usize, &LateEvent)> {
    let cards = state.cards();
    state.history.moments().range(state.window.clone()).rev().flat_map(move |moment| {
        let late = moment.late.iter().enumerate().rev();
        let counts: Vec<_> = late.filter(|(_, (card, event))| is_counted(card, event, &cards)).collect();
        counts.into_iter().map(|(place, (card, event))| (*card, moment.number, place, event))
    })
}

fn is_counted(card: &Card, event: &LateEvent, cards: &[&Card]) -> bool {
    let from_ns = card.judges(event).late_from_ns;
    event.latency_ns >= from_ns && card.counts(event, cards) && !event.labels.contains_key(SLEEPER)
}

/// Those for which it holds.
pub fn panel(state: &State, is_of: impl Fn(&Card, &LateEvent) -> bool) -> Panel {
    let mut rows = Vec::new();
    let mut more = 0_u64;
    for (card, moment, place, event) in events(state).filter(|(card, _, _, event)| is_of(card, event)) {
        if rows.len() >= MOST {
            more += 1;
            continue;
        }
        let main = event.causes.iter().max_by_key(|cause| cause.ns);
        let because = main.map_or_else(|| "not explained".to_owned(), |cause| why::culprit(cause.kind, &cause.who));
        rows.push(Row {
            key: format!("{moment}/{place}"),
            cells: vec![
                Cell::Ordered(time_of_day(event.at_unix_ns, state), event.at_unix_ns),
                Cell::Text(card.name.to_owned()),
                Cell::Ns(event.latency_ns),
                Cell::Text(event.subject.clone()),
                Cell::Text(because),
            ],
            is_late: false,
            opens: Some(What::Event(card.name, moment, place)),
        });
    }
    let title = match more {
        0 => "Late, newest first".to_owned(),
        _ => format!("Late, newest first; {more} older ones have no row"),
    };
    Panel::table(title, "<AT, <SOURCE, LATENCY, <WHO WAITED, <MAINLY BECAUSE OF", rows, "nothing was late")
}

/// To the millisecond: what is longer has no room.
pub fn time_of_day(unix_ns: u64, state: &State) -> String {
    let stamp = Timestamp::from_nanosecond(unix_ns.into()).ok();
    let text = stamp.map(|stamp| stamp.to_zoned(state.zone.clone()).strftime("%H:%M:%S%.3f").to_string());
    text.unwrap_or_default()
}
