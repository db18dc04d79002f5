// SPDX-License-Identifier: MIT OR Apache-2.0
//! Walks by what can change them, so that a change costs as much as it matters, however many walks there are.

use std::collections::{BTreeSet, BinaryHeap, HashMap};

use super::cursor::{Cursor, Place};
use super::rewind::{Change, Rewind};
use super::{Finding, Limits};

/// How much work walks may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// As much as there is to follow.
    None,
    /// So many visits and findings for each change, and so many more, of walks that follow who ended a wait: where it is
    /// more, only those of some threads do.
    Work { of_change: u64, more: u64 },
}

impl Bound {
    /// That of sums.
    pub const OF_SUMS: Bound = Bound::Work { of_change: 8, more: 1 << 20 };
}

/// The maximum number of times kept at which no cursor has anything to do any more, beyond four for each cursor.
const STALE: usize = 4_096;

/// All cursors of a walk that have begun and are not done.
#[derive(Debug)]
pub(super) struct Cursors {
    /// By number, in the order in which they were added.
    entries: Vec<Option<Entry>>,
    count: usize,
    /// Of a thread, the cursors that its changes of CPU matter to.
    by_tid: HashMap<u32, BTreeSet<u32>>,
    /// Of each CPU, the cursors that each of its changes matters to.
    running: Vec<Vec<u32>>,
    /// Of each CPU, the cursors whose thread waits for it, which take in its changes at the end of the wait.
    ready: Vec<Vec<u32>>,
    /// When each cursor has something to do, whatever the CPUs do; also when one was to have that has not any more.
    due: BinaryHeap<(u64, u32)>,
    /// Those that the next change matters to, whatever it is.
    next: Vec<u32>,
    /// Those that were visited last.
    visited: Vec<u32>,
    /// How many visits there were.
    pub visits: u64,
    bound: Bound,
    /// How much work is left.
    left: u64,
    /// Of the walks, one of 2 to the power of this is followed to who ended its waits.
    cut: u32,
}

#[derive(Debug)]
struct Entry {
    /// Which of the walks it is.
    index: usize,
    /// By how many halvings of the threads it is still followed to who ended its waits.
    stays: u32,
    cursor: Cursor,
    /// What is noted of it in `by_tid`, `due`, and in `running` or `ready`, with its position there.
    tids: Vec<u32>,
    /// `None` once it was due.
    due_ns: Option<u64>,
    place: Option<(Place, usize)>,
}

impl Entry {
    fn is_due(&self, at_ns: u64) -> bool {
        [self.due_ns, Some(self.cursor.start_ns())].contains(&Some(at_ns))
    }
}

impl Cursors {
    /// None yet, on so many CPUs.
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

    /// Adds one, which is visited at the next change.
    pub fn add(&mut self, index: usize, mut cursor: Cursor, tid: u32) {
        let number = self.entries.len() as u32;
        self.next.push(number);
        // Where its time begins it has something to do for certain, which is noted once.
        self.due.push((cursor.start_ns(), number));
        // Spreads numbers that follow each other (Knuth's multiplicative hash).
        let stays = tid.wrapping_mul(0x9e37_79b1).leading_zeros();
        cursor.set_cut(stays < self.cut);
        self.entries.push(Some(Entry { index, stays, cursor, tids: Vec::new(), due_ns: None, place: None }));
        self.count += 1;
    }

    /// Has all cursors go back to a change that it matters to, or that have something to do before it. Without a change,
    /// which is the end of what is known, these are all of them.
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
            // What a thread does itself is always told.
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
        // Its memory is used again.
        self.visited = visited;
    }

    /// Forgets times at which no cursor has anything to do any more, where they are many.
    fn forget_stale(&mut self) {
        if self.due.len() <= STALE + 4 * self.count {
            return;
        }
        let entries = &self.entries;
        self.due
            .retain(|&(due_ns, number)| entries[number as usize].as_ref().is_some_and(|entry| entry.is_due(due_ns)));
    }

    /// Takes work from what is left. Where none is, waits of half as many threads are followed from now on,
    /// and where there are plenty, of twice as many.
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
            let (index, is_cut) = (entry.index, entry.stays < cut);
            entry.cursor.set_cut(is_cut);
            if is_cut && entry.cursor.cut_short(rewind, reached_ns, &mut |finding| found(index, finding)) {
                found(index, Finding::NotFollowed);
                self.note(number, rewind, reached_ns, None);
            }
        }
    }

    /// Those that have something to do, in the order in which they were added.
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
            concerned.extend(self.by_tid.get(&tid).into_iter().flatten());
        }
        concerned.extend_from_slice(&self.running[change.cpu]);
        if is_full {
            concerned.extend_from_slice(&self.ready[change.cpu]);
        }
        concerned.sort_unstable();
        concerned.dedup();
        concerned
    }

    /// Notes what can change a cursor from now on.
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
                self.by_tid.entry(tid).or_default().insert(number);
            }
            entry.tids.push(tid);
        }
        let place = entry.cursor.place(reached_ns);
        if place != entry.place.map(|(place, _)| place) {
            self.leave(number, rewind);
            self.take(number, place, rewind);
        }
    }

    fn remove(&mut self, number: u32, rewind: &mut Rewind<'_>) {
        self.leave(number, rewind);
        let Some(entry) = self.entries[number as usize].take() else { return };
        self.count -= 1;
        entry.tids.into_iter().for_each(|tid| forget(&mut self.by_tid, tid, number));
    }

    fn at(&mut self, place: Place) -> &mut Vec<u32> {
        match place {
            Place::Running(cpu) => &mut self.running[cpu],
            Place::Ready(cpu) => &mut self.ready[cpu],
        }
    }

    fn take(&mut self, number: u32, place: Option<Place>, rewind: &mut Rewind<'_>) {
        let Some(place) = place else { return };
        let there = self.at(place);
        there.push(number);
        let position = there.len() - 1;
        if let Some(entry) = &mut self.entries[number as usize] {
            entry.place = Some((place, position));
        }
        if let Place::Ready(cpu) = place {
            rewind.passed_mut(cpu).begin_wait();
        }
    }

    fn leave(&mut self, number: u32, rewind: &mut Rewind<'_>) {
        let taken = self.entries[number as usize].as_mut().and_then(|entry| entry.place.take());
        let Some((place, position)) = taken else { return };
        let there = self.at(place);
        there.swap_remove(position);
        let moved = there.get(position).copied();
        if let Some(moved) = moved.and_then(|moved| self.entries[moved as usize].as_mut()) {
            moved.place = Some((place, position));
        }
        if let Place::Ready(cpu) = place {
            rewind.passed_mut(cpu).end_wait();
        }
    }
}

/// A thread's changes do not matter to a cursor any more, if they did.
fn forget(by_tid: &mut HashMap<u32, BTreeSet<u32>>, tid: u32, number: u32) {
    let Some(cursors) = by_tid.get_mut(&tid) else { return };
    cursors.remove(&number);
    if cursors.is_empty() {
        by_tid.remove(&tid);
    }
}
