// SPDX-License-Identifier: MIT OR Apache-2.0
//! Panels of each view, built from the shown ticks.

mod culprit;
mod event;
mod frames;
mod help;
mod late;
mod overview;
mod program;
mod source;

use whylate_model::sources::named;

use super::history::Tick;
use super::panel::Panel;
use super::state::{State, ViewKind};

/// Builds the panels of a view for a screen of `columns`.
pub fn panels(state: &State, kind: &ViewKind, columns: usize) -> Vec<Panel> {
    match kind {
        ViewKind::Overview => overview::panels(state, columns),
        ViewKind::Source(name) => named(name).map_or_else(Vec::new, |card| source::panels(state, card, columns)),
        ViewKind::Series(name, labels) => {
            named(name).map_or_else(Vec::new, |card| source::of_series(state, card, labels, columns))
        }
        ViewKind::Frames(name, stacks, path) => {
            named(name).map_or_else(Vec::new, |card| frames::zoomed(state, card, stacks, path, columns))
        }
        ViewKind::Culprit(kind, who) => culprit::panels(state, *kind, who, columns),
        ViewKind::Event(source, tick, index) => event::panels(state, source, *tick, *index, columns),
        ViewKind::Program(program) => program::panels(state, program, columns),
        ViewKind::Help => help::panels(),
    }
}

/// Splits the window into at most `parts` parts and returns the largest value of the ticks in each.
fn over_time(state: &State, parts: usize, value: impl Fn(&Tick) -> Option<u64>) -> Vec<Option<u64>> {
    let per_part = ticks_per_part(state, parts);
    let values: Vec<Option<u64>> = state.shown().map(value).collect();
    values.chunks(per_part).map(|part| part.iter().flatten().max().copied()).collect()
}

/// Returns the number of ticks per part; the last part may have fewer.
fn ticks_per_part(state: &State, parts: usize) -> usize {
    state.shown().len().div_ceil(parts.max(1)).max(1)
}
