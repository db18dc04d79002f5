// SPDX-License-Identifier: MIT OR Apache-2.0
//! Indexes walks by the events that can change them, so that a change's cost does not depend on the number of walks.

use std::collections::{BTreeSet, BinaryHeap};

use hashbrown::HashMap;

use super::cursor::{Cursor, WatchedCpu};
use super::rewind::{Change, Rewind};
use super::{Finding, Limits};

/// Limit on the work of walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// No limit.
    None,
    /// Limit on the visits and findings of walks that are following a waker: a rate for each change, and a burst. If it
    /// is exceeded, only some threads are followed.
    Work { of_change: u64, more: u64 },
}

impl Bound {
    /// Limit for walks of which only sums are wanted.
    pub const OF_SUMS: Bound = Bound::Work { of_change: 8, more: 1 << 20 };
}

/// Maximum number of stale entries in `due`, beyond four for each cursor.
const MAX_STALE: usize = 4_096;

/// All cursors that have been added and are not done.
#[derive(Debug)]
pub(super) struct Cursors {
    /// Cursors by number, in the order in which they were added.
    entries: Vec<Option<Entry>>,
    count: usize,
    /// Numbers of the cursors that the context switches of a thread concern.
    by_tid: HashMap<u32, Numbers>,
    /// Numbers of the cursors that each change of a CPU concerns.
    running: Vec<Vec<u32>>,
    /// Numbers of the cursors that wait for a CPU; they take in its changes at the end of the wait.
    ready: Vec<Vec<u32>>,
    /// Times at which cursors are due without a context switch; may have stale entries.
    due: BinaryHeap<(u64, u32)>,
    /// Cursors that the next change concerns, whatever it is.
    next: Vec<u32>,
    /// Cursors that were visited last.
    visited: Vec<u32>,
    /// Number of visits.
    pub visits: u64,
    bound: Bound,
    /// Work that is left.
    left: u64,
    /// One of 2^`cut` threads is followed to its wakers.
    cut: u32,
}

/// Numbers of the cursors that a thread concerns. Most threads concern only their own.
#[derive(Debug)]
enum Numbers {
    One(u32),
    More(BTreeSet<u32>),
}

impl Numbers {
    fn insert(&mut self, number: u32) {
        match self {
            Numbers::One(one) if *one == number => {}
            Numbers::One(one) => *self = Numbers::More([*one, number].into()),
            Numbers::More(numbers) => {
                numbers.insert(number);
            }
        }
    }

    /// Removes a number. Returns whether none is left.
    fn remove(&mut self, number: u32) -> bool {
        match self {
            Numbers::One(one) => *one == number,
            Numbers::More(numbers) => {
                numbers.remove(&number);
                numbers.is_empty()
            }
        }
    }
}

#[derive(Debug)]
struct Entry {
    /// Index of the query.
    index: usize,
    /// Maximum `cut` with which the thread is still followed to its wakers.
    max_cut: u32,
    cursor: Cursor,
    /// Entries of this cursor in `by_tid`, `due`, and in `running` or `ready`, with its position there.
    tids: Vec<u32>,
    /// `None` after the time was reached.
    due_ns: Option<u64>,
    watched: Option<(WatchedCpu, usize)>,
}

impl Entry {
    fn is_due(&self, at_ns: u64) -> bool {
        [self.due_ns, Some(self.cursor.start_ns())].contains(&Some(at_ns))
    }
}

impl Cursors {
    /// Creates an empty index for `cpus` CPUs.
    pub fn new(cpus: usize, bound: Bound) -> Self {
        Cursors {
            entries: Vec::new(),
            count: 0,
            by_tid: HashMap::new(),
            running: vec![Vec::new(); cpus],
            ready: vec![Vec::new(); cpus],
            due: BinaryHeap::new(),
            next: Vec::new(),
            visited: Vec::new(),
            visits: 0,
            bound,
            left: if let Bound::Work { more, .. } = bound { more } else { u64::MAX },
            cut: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a cursor, which is visited at the next change.
    pub fn add(&mut self, index: usize, mut cursor: Cursor, tid: u32) {
        let number = self.entries.len() as u32;
        self.next.push(number);
        // The cursor certainly has something to do at its start, which is entered once.
        self.due.push((cursor.start_ns(), number));
        // Spreads consecutive TIDs (Knuth's multiplicative hash).
        let max_cut = tid.wrapping_mul(0x9e37_79b1).leading_zeros();
        cursor.set_cut(max_cut < self.cut);
        self.entries.push(Some(Entry { index, max_cut, cursor, tids: Vec::new(), due_ns: None, watched: None }));
        self.count += 1;
    }

    /// Visits the cursors that a change concerns, or that are due before it. Without a change, at the
    /// start of the timeline, visits all.
    pub fn visit(
        &mut self,
        rewind: &mut Rewind<'_>,
        reached_ns: u64,
        change: Option<&Change>,
        limits: &dyn Limits,
        found: &mut dyn FnMut(usize, Finding),
    ) {
        let is_full = change.is_some_and(|change| rewind.is_full(change.cpu));
        let visited = self.concerned(reached_ns, change, is_full);
        let mut work = 0;
        for &number in &visited {
            let Some(entry) = &mut self.entries[number as usize] else { continue };
            self.visits += 1;
            // The thread's own time is always reported.
            let counts = u64::from(entry.cursor.follows());
            let index = entry.index;
            work += counts;
            entry.cursor.go_back(rewind, reached_ns, change, limits, &mut |finding| {
                work += counts;
                found(index, finding);
            });
            self.note(number, rewind, reached_ns, change);
        }
        if let Some(change) = change.filter(|_| is_full) {
            rewind.passed_mut(change.cpu).clear();
        }
        self.spend(work, rewind, reached_ns, found);
        self.forget_stale();
        // Reuses its memory.
        self.visited = visited;
    }

    /// Removes stale times, if they are many.
    fn forget_stale(&mut self) {
        if self.due.len() <= MAX_STALE + 4 * self.count {
            return;
        }
        let entries = &self.entries;
        self.due
            .retain(|&(due_ns, number)| entries[number as usize].as_ref().is_some_and(|entry| entry.is_due(due_ns)));
    }

    /// Charges work. If none is left, waits of half as many threads are followed from now on; if plenty is left, of
    /// twice as many.
    fn spend(&mut self, work: u64, rewind: &mut Rewind<'_>, reached_ns: u64, found: &mut dyn FnMut(usize, Finding)) {
        let Bound::Work { of_change, more } = self.bound else { return };
        self.left = (self.left + of_change).saturating_sub(work).min(more);
        let cut = match self.left {
            0 => self.cut + 1,
            left if left == more => self.cut.saturating_sub(1),
            _ => self.cut,
        };
        if cut == self.cut {
            return;
        }
        self.left = if cut > self.cut { more / 16 } else { more / 2 };
        self.cut = cut;
        for number in 0..self.entries.len() as u32 {
            let Some(entry) = &mut self.entries[number as usize] else { continue };
            let (index, is_cut) = (entry.index, entry.max_cut < cut);
            entry.cursor.set_cut(is_cut);
            if is_cut && entry.cursor.cut_short(rewind, reached_ns, &mut |finding| found(index, finding)) {
                found(index, Finding::NotFollowed);
                self.note(number, rewind, reached_ns, None);
            }
        }
    }

    /// Returns the cursors that are due, in the order in which they were added.
    fn concerned(&mut self, reached_ns: u64, change: Option<&Change>, is_full: bool) -> Vec<u32> {
        let mut concerned = std::mem::take(&mut self.visited);
        concerned.clear();
        let Some(change) = change else {
            concerned.extend(0..self.entries.len() as u32);
            return concerned;
        };
        concerned.append(&mut self.next);
        while let Some(&(due_ns, number)) = self.due.peek().filter(|due| due.0 >= reached_ns) {
            self.due.pop();
            let Some(entry) = &mut self.entries[number as usize] else { continue };
            if entry.is_due(due_ns) {
                entry.due_ns = None;
                concerned.push(number);
            }
        }
        let [before, after] = [change.before.holder.tid(), change.after.holder.tid()];
        for tid in before.into_iter().chain(after.filter(|_| before != after)) {
            match self.by_tid.get(&tid) {
                Some(Numbers::One(number)) => concerned.push(*number),
                Some(Numbers::More(numbers)) => concerned.extend(numbers),
                None => {}
            }
        }
        concerned.extend_from_slice(&self.running[change.cpu]);
        if is_full {
            concerned.extend_from_slice(&self.ready[change.cpu]);
        }
        concerned.sort_unstable();
        concerned.dedup();
        concerned
    }

    /// Updates the index entries of a cursor.
    fn note(&mut self, number: u32, rewind: &mut Rewind<'_>, reached_ns: u64, change: Option<&Change>) {
        let Some(entry) = self.entries.get_mut(number as usize).and_then(Option::as_mut) else { return };
        if entry.cursor.is_done() {
            self.remove(number, rewind);
            return;
        }
        if change.is_some_and(|change| entry.cursor.is_settled_by(change, reached_ns)) {
            self.next.push(number);
        }
        let due_ns = entry.cursor.wake_ns(reached_ns);
        let before_ns = entry.due_ns.replace(due_ns);
        if before_ns != Some(due_ns) && due_ns != entry.cursor.start_ns() {
            self.due.push((due_ns, number));
        }
        let known = entry.tids.iter().copied().zip(entry.cursor.tids()).take_while(|(noted, now)| noted == now).count();
        for tid in entry.tids.split_off(known) {
            if !entry.tids.contains(&tid) {
                forget(&mut self.by_tid, tid, number);
            }
        }
        for tid in entry.cursor.tids().skip(known) {
            if !entry.tids.contains(&tid) {
                let numbers = self.by_tid.entry(tid).or_insert(Numbers::One(number));
                numbers.insert(number);
            }
            entry.tids.push(tid);
        }
        let watched = entry.cursor.watched_cpu(reached_ns);
        if watched != entry.watched.map(|(watched, _)| watched) {
            self.leave(number, rewind);
            self.take(number, watched, rewind);
        }
    }

    fn remove(&mut self, number: u32, rewind: &mut Rewind<'_>) {
        self.leave(number, rewind);
        let Some(entry) = self.entries[number as usize].take() else { return };
        self.count -= 1;
        entry.tids.into_iter().for_each(|tid| forget(&mut self.by_tid, tid, number));
    }

    fn at(&mut self, watched: WatchedCpu) -> &mut Vec<u32> {
        match watched {
            WatchedCpu::Running(cpu) => &mut self.running[cpu],
            WatchedCpu::Ready(cpu) => &mut self.ready[cpu],
        }
    }

    fn take(&mut self, number: u32, watched: Option<WatchedCpu>, rewind: &mut Rewind<'_>) {
        let Some(watched) = watched else { return };
        let there = self.at(watched);
        there.push(number);
        let position = there.len() - 1;
        if let Some(entry) = &mut self.entries[number as usize] {
            entry.watched = Some((watched, position));
        }
        if let WatchedCpu::Ready(cpu) = watched {
            rewind.passed_mut(cpu).begin_wait();
        }
    }

    fn leave(&mut self, number: u32, rewind: &mut Rewind<'_>) {
        let taken = self.entries[number as usize].as_mut().and_then(|entry| entry.watched.take());
        let Some((watched, position)) = taken else { return };
        let there = self.at(watched);
        there.swap_remove(position);
        let moved = there.get(position).copied();
        if let Some(moved) = moved.and_then(|moved| self.entries[moved as usize].as_mut()) {
            moved.watched = Some((watched, position));
        }
        if let WatchedCpu::Ready(cpu) = watched {
            rewind.passed_mut(cpu).end_wait();
        }
    }
}

/// Removes a cursor from the entries of a thread.
fn forget(by_tid: &mut HashMap<u32, Numbers>, tid: u32, number: u32) {
    if by_tid.get_mut(&tid).is_some_and(|numbers| numbers.remove(number)) {
        by_tid.remove(&tid);
    }
}
