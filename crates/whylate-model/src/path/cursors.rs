// SPDX-License-Identifier: MIT OR Apache-2.0
//! Walks by what can change them, so that a change costs as much as it matters, however many walks there are.

use std::collections::BTreeSet;

use super::rewind::{Change, Rewind};
use super::walk::{Cursor, Place};
use super::{Finding, Limits};

/// All cursors of a walk that have begun and are not done.
#[derive(Debug)]
pub(super) struct Cursors {
    /// By number, in the order in which they were added.
    entries: Vec<Option<Entry>>,
    count: usize,
    /// A thread, and a cursor that its changes of CPU matter to.
    by_tid: BTreeSet<(u32, u32)>,
    /// Of each CPU, the cursors that each of its changes matters to.
    running: Vec<Vec<u32>>,
    /// Of each CPU, the cursors whose thread waits for it, which take in its changes at the end of the wait.
    ready: Vec<Vec<u32>>,
    /// When each cursor has something to do, whatever the CPUs do.
    due: BTreeSet<(u64, u32)>,
    /// Those that the next change matters to, whatever it is.
    next: Vec<u32>,
    /// Those that were visited last.
    visited: Vec<u32>,
    /// How many visits there were.
    pub visits: u64,
}

#[derive(Debug)]
struct Entry {
    /// Which of the walks it is.
    index: usize,
    cursor: Cursor,
    /// What is noted of it in `by_tid`, `due`, and in `running` or `ready`, with its position there.
    tids: Vec<u32>,
    due_ns: Option<u64>,
    place: Option<(Place, usize)>,
}

impl Cursors {
    /// None yet, on so many CPUs.
    pub fn new(cpus: usize) -> Self {
        Cursors {
            entries: Vec::new(),
            count: 0,
            by_tid: BTreeSet::new(),
            running: vec![Vec::new(); cpus],
            ready: vec![Vec::new(); cpus],
            due: BTreeSet::new(),
            next: Vec::new(),
            visited: Vec::new(),
            visits: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds one, which is visited at the next change.
    pub fn add(&mut self, index: usize, cursor: Cursor) {
        self.next.push(self.entries.len() as u32);
        self.entries.push(Some(Entry { index, cursor, tids: Vec::new(), due_ns: None, place: None }));
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
        for &number in &visited {
            let Some(entry) = &mut self.entries[number as usize] else { continue };
            self.visits += 1;
            let index = entry.index;
            entry.cursor.go_back(rewind, reached_ns, change, limits, &mut |finding| found(index, finding));
            self.note(number, rewind, reached_ns, change);
        }
        if let Some(change) = change.filter(|_| is_full) {
            rewind.forget_passed(change.cpu);
        }
        // Its memory is used again.
        self.visited = visited;
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
        concerned.extend(self.due.range((reached_ns, 0)..).map(|&(_, number)| number));
        let [before, after] = [change.before.holder.tid(), change.after.holder.tid()];
        for tid in before.into_iter().chain(after.filter(|_| before != after)) {
            concerned.extend(self.by_tid.range((tid, 0)..=(tid, u32::MAX)).map(|&(_, number)| number));
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
        let due_ns = Some(entry.cursor.wake_ns(reached_ns));
        if due_ns != entry.due_ns {
            let before_ns = std::mem::replace(&mut entry.due_ns, due_ns);
            before_ns.map(|before_ns| self.due.remove(&(before_ns, number)));
            due_ns.map(|due_ns| self.due.insert((due_ns, number)));
        }
        let known = entry.tids.iter().copied().zip(entry.cursor.tids()).take_while(|(noted, now)| noted == now).count();
        for tid in entry.tids.split_off(known) {
            if !entry.tids.contains(&tid) {
                self.by_tid.remove(&(tid, number));
            }
        }
        for tid in entry.cursor.tids().skip(known) {
            if !entry.tids.contains(&tid) {
                self.by_tid.insert((tid, number));
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
        entry.due_ns.map(|due_ns| self.due.remove(&(due_ns, number)));
        entry.tids.into_iter().for_each(|tid| {
            self.by_tid.remove(&(tid, number));
        });
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
            rewind.begin_wait(cpu);
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
            rewind.end_wait(cpu);
        }
    }
}
