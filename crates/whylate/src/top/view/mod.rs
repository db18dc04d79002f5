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
use super::view_kind::ViewKind;
use super::window::Window;

/// Builds the panels of a view for a screen of `columns`.
pub fn panels(window: &Window, kind: &ViewKind, columns: usize) -> Vec<Panel> {
    match kind {
        ViewKind::Overview => overview::panels(window, columns),
        ViewKind::Source(name) => named(name).map_or_else(Vec::new, |card| source::panels(window, card, columns)),
        ViewKind::Series(name, labels) => {
            named(name).map_or_else(Vec::new, |card| source::of_series(window, card, labels, columns))
        }
        ViewKind::Frames(name, stacks, path) => {
            named(name).map_or_else(Vec::new, |card| frames::zoomed(window, card, stacks, path, columns))
        }
        ViewKind::Culprit(kind, who) => culprit::panels(window, *kind, who, columns),
        ViewKind::Event(source, tick, index) => event::panels(window, source, *tick, *index, columns),
        ViewKind::Program(program) => program::panels(window, program, columns),
        ViewKind::Help => help::panels(),
    }
}

/// Splits the window into at most `parts` parts and returns the largest value of the ticks in each.
fn over_time(window: &Window, parts: usize, value: impl Fn(&Tick) -> Option<u64>) -> Vec<Option<u64>> {
    let per_part = ticks_per_part(window, parts);
    let values: Vec<Option<u64>> = window.ticks().map(value).collect();
    values.chunks(per_part).map(|part| part.iter().flatten().max().copied()).collect()
}

/// Returns the number of ticks per part; the last part may have fewer.
fn ticks_per_part(window: &Window, parts: usize) -> usize {
    window.ticks().len().div_ceil(parts.max(1)).max(1)
}
