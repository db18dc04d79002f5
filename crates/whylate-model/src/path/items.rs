// SPDX-License-Identifier: MIT OR Apache-2.0
//! The work items for which workers are followed, while a walk is within their waits.

use super::history::Waker;
use crate::wait::Stop;

/// The wakeup of a thread, or the queueing of a work item.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Woken {
    pub at_ns: u64,
    /// Waker; `None` if the wakeup was not recorded.
    pub by: Option<Waker>,
    pub cpu: u32,
    pub is_of_member: bool,
    /// The worker slept in the middle of a work item.
    pub is_within_item: bool,
    /// Why the thread was stopped until the wakeup, if it was.
    pub stop: Option<Stop>,
}

/// A work item that a worker executes. Before it was queued, its wait is followed to the queuer, whatever the worker
/// did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub queued: Woken,
    /// Number of waits within which the worker is followed.
    pub depth: usize,
    /// TID of the worker.
    pub tid: u32,
}

/// Items by depth, at most one each: the last that the worker started; it waited for the earlier ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Items(Vec<Item>);

impl Items {
    /// Adds the item that the worker starts; items at greater depth are dropped.
    pub fn begin(&mut self, item: Item) {
        self.up_to(item.depth + 1);
        if self.0.last().is_none_or(|last| last.depth < item.depth) {
            self.0.push(item);
        }
    }

    /// Drops the items at this depth or more.
    pub fn up_to(&mut self, depth: usize) {
        self.0.retain(|item| item.depth < depth);
    }

    /// Returns the next time, backwards, at which an item was queued.
    pub fn due_ns(&self) -> Option<u64> {
        self.0.iter().map(|item| item.queued.at_ns).max()
    }

    /// Takes the item that was queued at `now_ns` or later, with those at greater depth.
    pub fn take_due(&mut self, now_ns: u64) -> Option<Item> {
        let due = self.0.iter().position(|item| item.queued.at_ns >= now_ns)?;
        self.take(due)
    }

    /// Takes the item at this depth, if its queuer also woke the worker.
    pub fn take_woken_for(&mut self, depth: usize, woken: Woken) -> Option<Item> {
        let is_it = |item: &Item| item.depth == depth && (item.queued.by, item.queued.cpu) == (woken.by, woken.cpu);
        let index = self.0.iter().position(is_it)?;
        self.take(index)
    }

    fn take(&mut self, index: usize) -> Option<Item> {
        self.0.drain(index..).next()
    }
}
