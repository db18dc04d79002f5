// SPDX-License-Identifier: MIT OR Apache-2.0
//! The work items for which workers are followed, while a walk is within their waits.

use super::cursor::Woken;

/// Before it was queued, its wait was whoever queued it, whatever its worker did then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub queued: Woken,
    /// The worker is followed within so many waits.
    pub depth: usize,
    /// The worker.
    pub tid: u32,
}

/// Of each depth one: the last that the worker began, as earlier ones are what that waited for.
#[derive(Clone, Debug, Default)]
pub(super) struct Items(Vec<Item>);

impl Items {
    /// Its worker begins it, and nothing deeper is followed.
    pub fn begin(&mut self, item: Item) {
        self.up_to(item.depth + 1);
        if self.0.last().is_none_or(|last| last.depth < item.depth) {
            self.0.push(item);
        }
    }

    /// Nothing within so many waits or more is followed any more.
    pub fn up_to(&mut self, depth: usize) {
        self.0.retain(|item| item.depth < depth);
    }

    /// When the next one was queued that a walk back comes to.
    pub fn due_ns(&self) -> Option<u64> {
        self.0.iter().map(|item| item.queued.at_ns).max()
    }

    /// The one that was queued at this moment or later; with it go those that were followed for its sake.
    pub fn take_due(&mut self, now_ns: u64) -> Option<Item> {
        let due = self.0.iter().position(|item| item.queued.at_ns >= now_ns)?;
        self.take(due)
    }

    /// The one of this depth, if its worker was woken by whoever queued it.
    pub fn take_woken_for(&mut self, depth: usize, woken: Woken) -> Option<Item> {
        let is_it = |item: &Item| item.depth == depth && (item.queued.by, item.queued.cpu) == (woken.by, woken.cpu);
        let place = self.0.iter().position(is_it)?;
        self.take(place)
    }

    fn take(&mut self, place: usize) -> Option<Item> {
        self.0.drain(place..).next()
    }
}
