// SPDX-License-Identifier: MIT OR Apache-2.0
//! The threads of a trace, from birth to death: numbers are used again.

use std::collections::{HashMap, HashSet};

use crate::path::history::{Entry, Name, Recorded, Waker};

/// So many names of a thread are known.
const NAMES: usize = 8;

/// A thread, as far as a trace tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// Its number.
    pub tid: u32,
    /// What it was called, one after the other.
    pub names: Vec<Name>,
    /// When it was made.
    pub born_ns: Option<u64>,
    /// When it ended.
    pub died_ns: Option<u64>,
    /// When it first became another program.
    pub exec_ns: Option<u64>,
    /// When it is first told of.
    pub first_ns: u64,
    /// How long it had a CPU, interrupts included.
    pub ran_ns: u64,
    /// Who made it, by its place; or what it was before it got another number.
    parent: Option<usize>,
    /// It has another number from then on, as that thread.
    next: Option<usize>,
    since_ns: Option<u64>,
}

impl Life {
    /// Its last name.
    pub fn name(&self) -> Name {
        self.names.last().copied().unwrap_or_default()
    }

    fn call(&mut self, name: Name) {
        if self.names.last() != Some(&name) && name != Name::default() && self.names.len() < NAMES {
            self.names.push(name);
        }
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Lives {
    pub all: Vec<Life>,
    /// The last of each number.
    present: HashMap<u32, usize>,
    /// Numbers of threads that have ended.
    ended: HashSet<u32>,
}

impl Lives {
    pub fn present(&mut self, tid: u32, at_ns: u64) -> &mut Life {
        let place = self.place(tid, at_ns);
        &mut self.all[place]
    }

    fn place(&mut self, tid: u32, at_ns: u64) -> usize {
        *self.present.entry(tid).or_insert_with(|| {
            self.ended.remove(&tid);
            self.all.push(Life { tid, first_ns: at_ns, ..Life::default() });
            self.all.len() - 1
        })
    }

    /// A fork and the first wakeup tell of the same birth.
    pub fn born(&mut self, tid: u32, name: Name, parent: u32, at_ns: u64) {
        let parent = self.place(parent, at_ns);
        let is_told = self.present.get(&tid).is_some_and(|&place| {
            let life = &self.all[place];
            life.born_ns.is_some() && life.ran_ns == 0 && life.since_ns.is_none() && life.died_ns.is_none()
        });
        if !is_told {
            self.ended.remove(&tid);
            self.present.insert(tid, self.all.len());
            self.all.push(Life { tid, first_ns: at_ns, parent: Some(parent), ..Life::default() });
        }
        let life = self.present(tid, at_ns);
        life.born_ns = Some(at_ns);
        life.call(name);
    }

    pub fn leaves(&mut self, tid: u32, name: Name, at_ns: u64, is_dead: bool) {
        let life = self.present(tid, at_ns);
        life.call(name);
        life.ran_ns += life.since_ns.take().map_or(0, |since_ns| at_ns.saturating_sub(since_ns));
        if is_dead {
            life.died_ns = Some(at_ns);
            self.present.remove(&tid);
            self.ended.insert(tid);
        }
    }

    pub fn comes(&mut self, tid: u32, name: Name, at_ns: u64) {
        let life = self.present(tid, at_ns);
        life.call(name);
        life.since_ns = Some(at_ns);
    }

    pub fn exec(&mut self, tid: u32, name: Name, at_ns: u64) {
        let life = self.present(tid, at_ns);
        life.call(name);
        life.exec_ns.get_or_insert(at_ns);
    }

    /// Whether the thread of this number has ended, and no other one has got it.
    pub fn has_ended(&self, tid: u32) -> bool {
        self.ended.contains(&tid)
    }

    /// A thread other than the first executes a program: it gets the number of the first one, which has ended.
    pub fn renumbered(&mut self, tid: u32, old_tid: u32, at_ns: u64) {
        let old = self.place(old_tid, at_ns);
        self.present.remove(&old_tid);
        // The end of the first thread may not have been seen.
        if let Some(place) = self.present.remove(&tid) {
            self.all[place].died_ns.get_or_insert(at_ns);
        }
        self.ended.remove(&tid);
        let next = self.all.len();
        let before = &mut self.all[old];
        before.next = Some(next);
        before.ran_ns += before.since_ns.take().map_or(0, |since_ns| at_ns.saturating_sub(since_ns));
        before.died_ns = Some(at_ns);
        let (name, ran_ns) = (before.name(), before.ran_ns);
        let life = Life { tid, first_ns: at_ns, ran_ns, since_ns: Some(at_ns), parent: Some(old), ..Life::default() };
        self.present.insert(tid, next);
        self.all.push(life);
        self.all[next].call(name);
    }

    /// The thread with which the command of a thread begins, and the one with which it ends. A thread that gets the
    /// number of the first one of its process is its command from then on, and the first one was before.
    pub fn whole(&self, place: usize) -> (usize, usize) {
        let (mut first, mut last) = (place, place);
        while let Some(next) = self.all[last].next {
            last = next;
        }
        while let Some(before) = self.all[first].parent.filter(|&before| self.all[before].next == Some(first)) {
            let tid = self.all[first].tid;
            // All of its process came from the first thread, as far as that was seen.
            let mut leader = self.all[before].parent;
            while let Some(place) = leader.filter(|&place| self.all[place].tid != tid) {
                leader = self.all[place].parent;
            }
            first = leader.unwrap_or(before);
        }
        (first, last)
    }

    /// Marks what these threads did, and those that they have made, and so on.
    pub fn mark(&self, past: &mut Recorded, root: usize) {
        let mut is_member = vec![false; self.all.len()];
        let mut by_tid: HashMap<u32, Vec<usize>> = HashMap::new();
        // Who makes a thread was told of before it.
        for (place, life) in self.all.iter().enumerate() {
            is_member[place] = place == root || life.parent.is_some_and(|parent| is_member[parent]);
            by_tid.entry(life.tid).or_default().push(place);
        }
        let is_own = |tid: u32, at_ns: u64| {
            let own = by_tid.get(&tid).and_then(|lives| {
                let later = lives.partition_point(|&place| self.all[place].first_ns <= at_ns);
                lives.get(later.saturating_sub(1))
            });
            own.is_some_and(|&place| is_member[place])
        };
        past.cpus.iter_mut().flatten().for_each(|slice| *slice = slice.marked(is_own));
    }

    /// Where interrupts are not told of, a waking may be one by an interrupt, and the thread that seems to have woken
    /// another one innocent. It is believed where the two wake each other, or are of one family.
    pub fn doubt(&self, past: &mut Recorded) {
        let mut tops: Vec<usize> = Vec::with_capacity(self.all.len());
        let mut by_tid = HashMap::new();
        for (place, life) in self.all.iter().enumerate() {
            tops.push(life.parent.map_or(place, |parent| tops[parent]));
            by_tid.insert(life.tid, tops[place]);
        }
        let mut wakings: HashSet<(u32, u32)> = HashSet::new();
        let woken_by = |entry: &Entry| match *entry {
            Entry::Woken { by: Waker::Thread(by), .. } => Some(by),
            _ => None,
        };
        for slice in past.cpus.iter().flatten() {
            wakings.extend(woken_by(&slice.entry).zip(slice.holder.tid()));
        }
        for slice in past.cpus.iter_mut().flatten() {
            if matches!(slice.entry, Entry::Queued { by: Waker::Thread(_), .. }) {
                slice.entry = Entry::GoesOn;
            }
            let Some((by, tid)) = woken_by(&slice.entry).zip(slice.holder.tid()) else { continue };
            let family = |tid| by_tid.get(&tid);
            let is_kin = family(by).is_some() && family(by) == family(tid);
            if !is_kin && !wakings.contains(&(tid, by)) {
                slice.entry = Entry::Unseen;
            }
        }
    }
}
