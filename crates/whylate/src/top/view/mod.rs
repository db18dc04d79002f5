// SPDX-License-Identifier: MIT OR Apache-2.0
//! The panels of each view, made of what is shown.

mod culprit;
mod event;
mod frames;
mod help;
mod late;
mod look;
mod program;
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
        What::Source(name) => named(name).map_or_else(Vec::new, |card| source::panels(state, card, columns)),
        What::Series(name, labels) => {
            named(name).map_or_else(Vec::new, |card| source::of_series(state, card, labels, columns))
        }
        What::Frames(name, stacks, path) => {
            named(name).map_or_else(Vec::new, |card| frames::zoomed(state, card, stacks, path, columns))
        }
        What::Culprit(kind, who) => culprit::panels(state, *kind, who, columns),
        What::Event(source, moment, place) => event::panels(state, source, *moment, *place, columns),
        What::Program(whose) => program::panels(state, whose, columns),
        What::Help => help::panels(),
    }
}

/// A value of each of so many parts of the time that is shown: the largest of its moments.
fn over_time(state: &State, parts: usize, value: impl Fn(&Moment) -> Option<u64>) -> Vec<Option<u64>> {
    let per_part = moments_per_part(state, parts);
    let values: Vec<Option<u64>> = state.shown().map(value).collect();
    values.chunks(per_part).map(|part| part.iter().flatten().max().copied()).collect()
}

/// How many moments each of so many parts has, but the last one.
fn moments_per_part(state: &State, parts: usize) -> usize {
    state.shown().len().div_ceil(parts.max(1)).max(1)
}

/// What a writer of text writes.
fn written(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
    let mut bytes = Vec::new();
    match write(&mut bytes) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => error.to_string(),
    }
}
