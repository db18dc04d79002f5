// SPDX-License-Identifier: MIT OR Apache-2.0
//! The threads of a trace, from creation to exit: TIDs are reused.

use std::collections::{HashMap, HashSet};

use crate::path::history::{Name, Recorded, SwitchIn, Waker};

/// Maximum number of names of a thread.
const MAX_NAMES: usize = 8;

/// A thread, as far as a trace shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// TID.
    pub tid: u32,
    /// Names of the thread, in order of time.
    pub names: Vec<Name>,
    /// Time of creation.
    pub born_ns: Option<u64>,
    /// Time of exit.
    pub died_ns: Option<u64>,
    /// Time at which the thread first executed a program.
    pub exec_ns: Option<u64>,
    /// Time of the first mention in the trace.
    pub first_ns: u64,
    /// Total time on a CPU, interrupts included.
    pub ran_ns: u64,
    /// Index of the creator; or of the same thread before it took over another TID.
    parent: Option<usize>,
    /// Index of the same thread after it took over another TID.
    next: Option<usize>,
    since_ns: Option<u64>,
}

impl Life {
    /// Returns the last name.
    pub fn name(&self) -> Name {
        self.names.last().copied().unwrap_or_default()
    }

    fn set_name(&mut self, name: Name) {
        if self.names.last() != Some(&name) && name != Name::default() && self.names.len() < MAX_NAMES {
            self.names.push(name);
        }
    }
}

/// All threads of a trace.
#[derive(Debug, Default)]
pub(super) struct Lives {
    pub all: Vec<Life>,
    /// Index of the last thread of each TID.
    present: HashMap<u32, usize>,
    /// TIDs of threads that have exited.
    ended: HashSet<u32>,
}

impl Lives {
    pub fn present(&mut self, tid: u32, at_ns: u64) -> &mut Life {
        let index = self.index_of(tid, at_ns);
        &mut self.all[index]
    }

    fn index_of(&mut self, tid: u32, at_ns: u64) -> usize {
        *self.present.entry(tid).or_insert_with(|| {
            self.ended.remove(&tid);
            self.all.push(Life { tid, first_ns: at_ns, ..Life::default() });
            self.all.len() - 1
        })
    }

    /// Records the creation of a thread. The fork and the first wakeup both report it.
    pub fn born(&mut self, tid: u32, name: Name, parent: u32, at_ns: u64) {
        let parent = self.index_of(parent, at_ns);
        let is_recorded = self.present.get(&tid).is_some_and(|&index| {
            let life = &self.all[index];
            life.born_ns.is_some() && life.ran_ns == 0 && life.since_ns.is_none() && life.died_ns.is_none()
        });
        if !is_recorded {
            self.ended.remove(&tid);
            self.present.insert(tid, self.all.len());
            self.all.push(Life { tid, first_ns: at_ns, parent: Some(parent), ..Life::default() });
        }
        let life = self.present(tid, at_ns);
        life.born_ns = Some(at_ns);
        life.set_name(name);
    }

    pub fn switched_out(&mut self, tid: u32, name: Name, at_ns: u64, is_dead: bool) {
        let life = self.present(tid, at_ns);
        life.set_name(name);
        life.ran_ns += life.since_ns.take().map_or(0, |since_ns| at_ns.saturating_sub(since_ns));
        if is_dead {
            life.died_ns = Some(at_ns);
            self.present.remove(&tid);
            self.ended.insert(tid);
        }
    }

    pub fn switched_in(&mut self, tid: u32, name: Name, at_ns: u64) {
        let life = self.present(tid, at_ns);
        life.set_name(name);
        life.since_ns = Some(at_ns);
    }

    pub fn exec(&mut self, tid: u32, name: Name, at_ns: u64) {
        let life = self.present(tid, at_ns);
        life.set_name(name);
        life.exec_ns.get_or_insert(at_ns);
    }

    /// Returns whether the thread with this TID has exited and the TID was not reused.
    pub fn has_ended(&self, tid: u32) -> bool {
        self.ended.contains(&tid)
    }

    /// Records that a thread other than the first executes a program: it takes over the TID of the first one, which has
    /// exited.
    pub fn renumbered(&mut self, tid: u32, old_tid: u32, at_ns: u64) {
        let old = self.index_of(old_tid, at_ns);
        self.present.remove(&old_tid);
        // The exit of the first thread may not be recorded.
        if let Some(index) = self.present.remove(&tid) {
            self.all[index].died_ns.get_or_insert(at_ns);
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
        self.all[next].set_name(name);
    }

    /// Returns the threads with which the command of a thread begins and ends. A thread that takes over the TID of its
    /// process's first thread is the command from then on; before, the first thread was.
    pub fn first_and_last(&self, index: usize) -> (usize, usize) {
        let (mut first, mut last) = (index, index);
        while let Some(next) = self.all[last].next {
            last = next;
        }
        while let Some(before) = self.all[first].parent.filter(|&before| self.all[before].next == Some(first)) {
            let tid = self.all[first].tid;
            // All threads of the process descend from the first one, as far as recorded.
            let mut leader = self.all[before].parent;
            while let Some(index) = leader.filter(|&index| self.all[index].tid != tid) {
                leader = self.all[index].parent;
            }
            first = leader.unwrap_or(before);
        }
        (first, last)
    }

    /// Marks the slices of a thread and of its descendants as the command's.
    pub fn mark(&self, past: &mut Recorded, root: usize) {
        let mut is_member = vec![false; self.all.len()];
        let mut by_tid: HashMap<u32, Vec<usize>> = HashMap::new();
        // A creator is mentioned before the threads that it creates.
        for (index, life) in self.all.iter().enumerate() {
            is_member[index] = index == root || life.parent.is_some_and(|parent| is_member[parent]);
            by_tid.entry(life.tid).or_default().push(index);
        }
        let is_own = |tid: u32, at_ns: u64| {
            let own = by_tid.get(&tid).and_then(|lives| {
                let later = lives.partition_point(|&index| self.all[index].first_ns <= at_ns);
                lives.get(later.saturating_sub(1))
            });
            own.is_some_and(|&index| is_member[index])
        };
        past.cpus.iter_mut().flatten().for_each(|slice| *slice = slice.marked(is_own));
    }

    /// Drops unreliable wakers. Without interrupt events, a recorded waker may only be the interrupted thread. It is
    /// kept if the two threads wake each other or have a common ancestor.
    pub fn drop_unreliable_wakers(&self, past: &mut Recorded) {
        let mut tops: Vec<usize> = Vec::with_capacity(self.all.len());
        let mut by_tid = HashMap::new();
        for (index, life) in self.all.iter().enumerate() {
            tops.push(life.parent.map_or(index, |parent| tops[parent]));
            by_tid.insert(life.tid, tops[index]);
        }
        let mut wakings: HashSet<(u32, u32)> = HashSet::new();
        let woken_by = |entry: &SwitchIn| match *entry {
            SwitchIn::Woken { by: Waker::Thread(by), .. } => Some(by),
            _ => None,
        };
        for slice in past.cpus.iter().flatten() {
            wakings.extend(woken_by(&slice.entry).zip(slice.holder.tid()));
        }
        for slice in past.cpus.iter_mut().flatten() {
            if matches!(slice.entry, SwitchIn::Queued { by: Waker::Thread(_), .. }) {
                slice.entry = SwitchIn::GoesOn;
            }
            let Some((by, tid)) = woken_by(&slice.entry).zip(slice.holder.tid()) else { continue };
            let family = |tid| by_tid.get(&tid);
            let is_kin = family(by).is_some() && family(by) == family(tid);
            if !is_kin && !wakings.contains(&(tid, by)) {
                slice.entry = SwitchIn::Unseen;
            }
        }
    }
}
