// SPDX-License-Identifier: MIT OR Apache-2.0
//! The panels of each view, made of what is shown.

mod culprit;
mod event;
mod help;
mod late;
mod look;
mod source;

use std::io::{self, Write};

use whylate_model::sources::named;

use super::history::Moment;
use super::panel::Panel;
use super::state::{State, What};

/// The panels of a view, on a screen of so many columns.
pub fn panels(state: &State, what: &What, columns: usize) -> Vec<Panel> {
    match what {
        What::Look => look::panels(state, columns),
        What::Source(name) => named(name).map_or_else(Vec::new, |card| source::panels(state, card)),
        What::Series(name, labels) => named(name).map_or_else(Vec::new, |card| source::of_series(state, card, labels)),
        What::Culprit(kind, who) => culprit::panels(state, *kind, who, columns),
        What::Event(source, moment, place) => event::panels(state, source, *moment, *place, columns),
        What::Help => help::panels(),
    }
}

/// A value of each of so many parts of the time that is shown: the largest of its moments.
fn over_time(state: &State, parts: usize, value: impl Fn(&Moment) -> Option<u64>) -> Vec<Option<u64>> {
    let moments = state.history.moments().range(state.window.clone());
    let per_part = moments.len().div_ceil(parts.max(1)).max(1);
    let values: Vec<Option<u64>> = moments.map(value).collect();
    values.chunks(per_part).map(|part| part.iter().flatten().max().copied()).collect()
}

/// What a writer of text writes.
fn written(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
    let mut bytes = Vec::new();
    match write(&mut bytes) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => error.to_string(),
    }
}
