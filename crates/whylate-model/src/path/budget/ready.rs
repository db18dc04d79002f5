// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who had the CPUs that one thread waited for, in bounded memory, however often it did.

use std::cmp::Reverse;

use super::super::history::Name;
use super::super::{Finding, Found, Names, OTHERS, Party, PathSegment, Segment};
use crate::CauseKind;

/// So many parts are kept of all threads together.
const PARTS: usize = 1 << 16;
/// Of each thread as many at least and at most.
const PARTS_OF_THREAD: (usize, usize) = (16, 400);

/// After some were summed up, so many times as many parts come in before that is done again.
const CLOSED: usize = 64;

/// What happened, the thread that waited, and how long.
type Part = ((CauseKind, Party, u32), u64);

/// The waits of one thread for a CPU, in sums.
#[derive(Debug)]
pub(super) struct Ready {
    parts: Vec<Part>,
    /// The thread's own, and of those whose part it may be.
    names: Vec<(u32, Name)>,
    room: usize,
    /// For so many parts more, those that are new have no room of their own.
    closed: usize,
}

impl Ready {
    /// None yet, of one of so many threads.
    pub fn of_many(threads: usize) -> Self {
        let (least, most) = PARTS_OF_THREAD;
        let room = (PARTS / threads.max(1)).clamp(least, most);
        Ready { parts: Vec::new(), names: Vec::new(), room, closed: 0 }
    }

    /// Adds what happened for so long while thread `ready` waited for a CPU.
    pub fn add(&mut self, kind: CauseKind, who: Party, ready: u32, ns: u64) {
        self.closed = self.closed.saturating_sub(1);
        self.add_part(((kind, who, ready), ns));
        if self.parts.len() > self.room {
            self.sum_up_small();
            self.closed = CLOSED * self.room;
        }
    }

    fn add_part(&mut self, (what, ns): Part) {
        let (kind, who, ready) = what;
        if let Some(place) = self.parts.iter().position(|part| part.0 == what) {
            self.parts[place].1 += ns;
            // Those that come often are found soon.
            self.parts.swap(place, place / 2);
        } else if self.closed > 0 && who != who.by_name() {
            self.add_part(((kind, who.by_name(), ready), ns));
        } else if self.closed > 0 && self.parts.len() >= self.room && who != Party::Text(OTHERS) {
            self.add_part(((kind, Party::Text(OTHERS), ready), ns));
        } else {
            self.parts.push((what, ns));
        }
    }

    /// The name of a thread: the last that it had counts, which is found first.
    pub fn name(&mut self, tid: u32, name: Name) {
        let is_known = self.names.iter().any(|&(known, _)| known == tid);
        if !is_known && self.names.len() < self.room {
            self.names.push((tid, name));
        }
    }

    /// Makes room: threads of one name become one in the smaller half, and the smallest of what is left is others'.
    fn sum_up_small(&mut self) {
        let mut parts = std::mem::take(&mut self.parts);
        sort(&mut parts);
        for (place, ((kind, who, ready), ns)) in parts.into_iter().enumerate() {
            let who = match place {
                _ if place < self.room / 2 => who,
                _ if self.parts.len() < self.room * 3 / 4 => who.by_name(),
                _ => Party::Text(OTHERS),
            };
            self.add_part(((kind, who, ready), ns));
        }
    }

    /// In words, the largest first.
    pub fn finish(self, names: &mut dyn Names) -> Vec<PathSegment> {
        let mut parts = self.parts;
        sort(&mut parts);
        let mut found = Found::default();
        self.names.into_iter().for_each(|(tid, name)| found.name(tid, name));
        let mut to_ns = parts.iter().map(|&(_, ns)| ns).sum::<u64>();
        // The latest comes first there.
        for ((kind, who, ready), ns) in parts.into_iter().rev() {
            let from_ns = to_ns - ns;
            found.add(Finding::Segment(Segment { from_ns, to_ns, kind, who, ready: Some(ready), hop: None }));
            to_ns = from_ns;
        }
        found.finish(names).segments
    }
}

/// The largest first, and always in the same order.
fn sort(parts: &mut [Part]) {
    parts.sort_by_cached_key(|&((kind, who, ready), ns)| (Reverse(ns), kind, who.key(), ready));
}
