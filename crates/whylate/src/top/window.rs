// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shown ticks, and what is derived from them: all that the views read.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::overview::Overview;
use whylate_model::recording::{Header, Line};
use whylate_model::sources::named;
use whylate_model::{Card, LateEvent, Snapshot};

use super::history::{History, Tick};
use super::panel::Glyphs;

/// Source name, sequence numbers, and merged snapshot.
type Merged = (&'static str, Range<u64>, Rc<Snapshot>);

/// The shown part of the history.
#[derive(Debug)]
pub struct Window {
    pub header: Header,
    pub history: History,
    pub look: Overview,
    /// Sequence numbers of the shown ticks.
    pub range: Range<u64>,
    pub glyphs: Glyphs,
    pub zone: TimeZone,
    /// How culprits are ranked.
    pub rank_by: By,
    /// The sources had no time for results yet.
    pub is_starting: bool,
    /// Result of the last merge: most keys do not change it.
    merged: RefCell<Option<Merged>>,
}

impl Window {
    /// Creates an empty window, before the first tick.
    pub fn new(history: History, glyphs: Glyphs, zone: TimeZone) -> Self {
        let (header, look) = (Header::default(), Overview::default());
        Window {
            header,
            history,
            look,
            range: 0..0,
            glyphs,
            zone,
            rank_by: By::Name,
            is_starting: false,
            merged: RefCell::new(None),
        }
    }

    /// Returns what an empty table shows: `otherwise`, once the sources had time for results.
    pub fn nothing(&self, otherwise: &'static str) -> &'static str {
        if self.is_starting { "starting: no results yet" } else { otherwise }
    }

    /// Returns the end of the window, in nanoseconds since the Unix epoch.
    pub fn end_unix_ns(&self) -> Option<u64> {
        self.ticks().next_back().map(|tick| tick.end_unix_ns)
    }

    /// Iterates over the shown ticks.
    pub fn ticks(&self) -> impl DoubleEndedIterator<Item = &Tick> + ExactSizeIterator {
        self.history.within(&self.range)
    }

    /// Returns the source's merged snapshot of the window.
    pub fn merged(&self, card: &Card) -> Option<Rc<Snapshot>> {
        let known = self.merged.borrow().clone();
        if let Some((_, _, snapshot)) = known.filter(|(name, range, _)| *name == card.name && *range == self.range) {
            return Some(snapshot);
        }
        let snapshot = Rc::new(self.history.merged(&self.range, card)?);
        *self.merged.borrow_mut() = Some((card.name, self.range.clone(), Rc::clone(&snapshot)));
        Some(snapshot)
    }

    /// Returns whether the overview counts the late event.
    pub fn counts(&self, card: &Card, event: &LateEvent) -> bool {
        card.is_late(event, &self.cards())
    }

    /// Returns the attached sources.
    pub fn cards(&self) -> Vec<&'static Card> {
        self.header.sources.iter().filter_map(|of| named(&of.source)).collect()
    }

    /// Iterates over the shown ticks as lines of a recording.
    pub fn lines(&self) -> impl Iterator<Item = Vec<Line>> + '_ {
        self.ticks().map(Tick::lines)
    }
}
