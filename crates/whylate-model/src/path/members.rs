// SPDX-License-Identifier: MIT OR Apache-2.0
//! Determines which threads belong to a command: the descendants of its first thread.

use std::collections::HashMap;

use super::history::{CpuTimeline, RunSlice, SwitchIn, Waker};

/// Maximum number of births; threads created later belong to no command.
const MAX_BIRTHS: usize = 4 << 20;

/// The creation of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Birth {
    at_ns: u64,
    tid: u32,
    parent: u32,
    is_in_parents_process: bool,
}

/// Creations of threads, as seen in their first slices, in any order.
#[derive(Clone, Debug, Default)]
pub struct Births {
    births: Vec<Birth>,
    /// Number of births without room.
    pub lost: u64,
}

impl Births {
    /// Adds the birth that a slice shows, if any.
    pub fn add(&mut self, slice: &RunSlice) {
        let (Some(tid), SwitchIn::Woken { at_ns, by: Waker::Parent(parent), .. }) = (slice.holder.tid(), slice.entry)
        else {
            return;
        };
        if self.births.len() < MAX_BIRTHS {
            let is_in_parents_process = slice.is_in_parents_process;
            self.births.push(Birth { at_ns, tid, parent, is_in_parents_process });
        } else {
            self.lost += 1;
        }
    }

    /// Returns when the last thread with this TID was created, if recorded.
    pub fn last_of(&self, tid: u32) -> Option<u64> {
        self.births.iter().filter(|birth| birth.tid == tid).map(|birth| birth.at_ns).max()
    }

    /// Returns when another thread of the process took over the TID of the first one to execute a program, if recorded.
    pub fn taken_over_ns(&self, process: u32) -> Option<u64> {
        let takes = self.births.iter().filter(|birth| birth.tid == process && birth.is_in_parents_process);
        takes.map(|birth| birth.at_ns).max()
    }

    /// Returns the descendants of a thread, and the thread itself.
    pub fn descendants_of(mut self, first: u32) -> Members {
        self.births.sort_unstable();
        let mut lives: HashMap<u32, Vec<(u64, bool)>> = HashMap::from([(first, vec![(0, true)])]);
        let (mut processes, mut parents) = (HashMap::from([(first, first)]), HashMap::new());
        // The first thread is taken to live throughout.
        for Birth { at_ns, tid, parent, is_in_parents_process } in self.births.into_iter().filter(|it| it.tid != first)
        {
            let is_member = lives.get(&parent).and_then(|lives| lives.last()).is_some_and(|&(_, is_member)| is_member);
            // TIDs are reused; those that never were a member's are not needed.
            if is_member || lives.contains_key(&tid) {
                lives.entry(tid).or_default().push((at_ns, is_member));
            }
            if !is_member {
                continue;
            }
            let of_parent = processes.get(&parent).copied().unwrap_or(parent);
            let process = if is_in_parents_process { of_parent } else { tid };
            processes.insert(tid, process);
            if process != of_parent {
                parents.insert(process, of_parent);
            }
        }
        Members { lives, processes, parents }
    }
}

/// Threads of a command.
#[derive(Clone, Debug, Default)]
pub struct Members {
    /// Times from which each TID belonged to a member or to another thread.
    lives: HashMap<u32, Vec<(u64, bool)>>,
    /// Process of each thread, by the TID of its first thread; the last one if the TID was reused.
    processes: HashMap<u32, u32>,
    /// Parent process of each process.
    parents: HashMap<u32, u32>,
}

impl Members {
    /// Returns the process of a member, by the TID of its first thread.
    pub fn process_of(&self, tid: u32) -> Option<u32> {
        self.processes.get(&tid).copied()
    }

    /// Returns the parent process, if it is a member too.
    pub fn parent_of(&self, process: u32) -> Option<u32> {
        self.parents.get(&process).copied()
    }

    /// Returns whether the thread with this TID at `at_ns` is a member.
    pub fn has(&self, tid: u32, at_ns: u64) -> bool {
        let life = |lives: &Vec<(u64, bool)>| {
            let later = lives.partition_point(|&(born_ns, _)| born_ns <= at_ns);
            later.checked_sub(1).is_some_and(|at| lives[at].1)
        };
        self.lives.get(&tid).is_some_and(life)
    }

    /// Returns the number of member threads.
    pub fn count(&self) -> usize {
        self.lives.values().flatten().filter(|(_, is_member)| *is_member).count()
    }
}

/// A timeline that marks the slices of the command.
pub struct Marked<'a> {
    /// The timeline.
    pub past: &'a mut dyn CpuTimeline,
    /// The threads of the command.
    pub members: &'a Members,
}

impl CpuTimeline for Marked<'_> {
    fn cpus(&self) -> usize {
        self.past.cpus()
    }

    fn previous(&mut self, cpu: usize) -> Option<RunSlice> {
        Some(self.past.previous(cpu)?.marked(|tid, at_ns| self.members.has(tid, at_ns)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::Holder;
    use super::*;

    fn birth(at_ns: u64, tid: u32, parent: u32) -> RunSlice {
        let entry = SwitchIn::Woken { at_ns, by: Waker::Parent(parent), cpu: 0 };
        RunSlice { start_ns: at_ns + 1, end_ns: at_ns + 2, holder: Holder::Thread(tid), entry, ..RunSlice::default() }
    }

    #[test]
    fn descendants_are_members_in_any_order_of_births() {
        let mut births = Births::default();
        // TID 7 belongs to a thread that is no member, then to a grandchild, then to no member again.
        for (at_ns, tid, parent) in [(30, 7, 6), (1, 1, 99), (20, 6, 5), (10, 5, 1), (5, 7, 2), (40, 7, 2), (25, 9, 2)]
        {
            births.add(&birth(at_ns, tid, parent));
        }
        let members = births.descendants_of(1);
        assert!(members.has(1, 0) && members.has(5, 10) && members.has(6, 21));
        assert!(!members.has(5, 9) && !members.has(9, 100) && !members.has(2, 100));
        let is_member_at: Vec<bool> = [6, 30, 39, 40, 90].map(|at_ns| members.has(7, at_ns)).into();
        assert_eq!(is_member_at, [false, true, true, false, false]);
        assert_eq!(members.count(), 4);
    }

    #[test]
    fn tid_taken_over_by_exec_starts_new_life() {
        let mut births = Births::default();
        let thread = |slice| RunSlice { is_in_parents_process: true, ..slice };
        for slice in [birth(10, 5, 1), thread(birth(20, 6, 5)), thread(birth(40, 5, 6)), birth(30, 7, 5)] {
            births.add(&slice);
        }
        assert_eq!((births.taken_over_ns(5), births.taken_over_ns(7), births.last_of(5)), (Some(40), None, Some(40)));
        let members = births.descendants_of(1);
        assert!(members.has(5, 15) && members.has(6, 25) && members.has(5, 45) && members.has(7, 45));
        assert_eq!([5, 6].map(|tid| members.process_of(tid)), [Some(5); 2]);
    }

    #[test]
    fn maps_threads_to_processes_and_processes_to_parents() {
        let mut births = Births::default();
        let thread = |slice| RunSlice { is_in_parents_process: true, ..slice };
        // The first thread creates process 5, and its second thread creates process 7; 9 is no member.
        for slice in
            [birth(10, 5, 1), thread(birth(20, 6, 5)), birth(30, 7, 6), thread(birth(40, 8, 7)), birth(50, 9, 2)]
        {
            births.add(&slice);
        }
        let members = births.descendants_of(1);
        assert_eq!(
            [1, 5, 6, 7, 8, 9].map(|tid| members.process_of(tid)),
            [Some(1), Some(5), Some(5), Some(7), Some(7), None]
        );
        assert_eq!([1, 5, 7, 9].map(|process| members.parent_of(process)), [None, Some(1), Some(5), None]);
    }
}
