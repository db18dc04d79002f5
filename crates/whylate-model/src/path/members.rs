// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which threads belong to a command: those that descend from whoever began it.

use std::collections::HashMap;

use super::history::{Entry, Past, Slice, Waker};

/// How many births are known; those that come later belong to nobody.
const BIRTHS: usize = 4 << 20;

/// Births of threads, as their first slices tell them, in any order.
#[derive(Clone, Debug, Default)]
pub struct Births {
    /// When, who, and by whom.
    births: Vec<(u64, u32, u32)>,
    /// Births that found no room.
    pub lost: u64,
}

impl Births {
    /// Takes in what a slice tells.
    pub fn add(&mut self, slice: &Slice) {
        let (Some(tid), Entry::Woken { at_ns, by: Waker::Parent(parent), .. }) = (slice.holder.tid(), slice.entry)
        else {
            return;
        };
        if self.births.len() < BIRTHS {
            self.births.push((at_ns, tid, parent));
        } else {
            self.lost += 1;
        }
    }

    /// When the thread that has this number was made, where that was seen.
    pub fn last_of(&self, tid: u32) -> Option<u64> {
        self.births.iter().filter(|&&(_, of, _)| of == tid).map(|&(at_ns, ..)| at_ns).max()
    }

    /// Those that descend from a thread, and itself.
    pub fn descendants_of(mut self, first: u32) -> Members {
        self.births.sort_unstable();
        let mut lives: HashMap<u32, Vec<(u64, bool)>> = HashMap::from([(first, vec![(0, true)])]);
        // It lives as long as anybody asks.
        for (born_ns, tid, parent) in self.births.into_iter().filter(|&(_, tid, _)| tid != first) {
            let is_member = lives.get(&parent).and_then(|lives| lives.last()).is_some_and(|&(_, is_member)| is_member);
            // Numbers are used again; of those that never were a member's nothing need be known.
            if is_member || lives.contains_key(&tid) {
                lives.entry(tid).or_default().push((born_ns, is_member));
            }
        }
        Members { lives }
    }
}

/// The threads of a command.
#[derive(Clone, Debug, Default)]
pub struct Members {
    /// Of each number, since when it has been a member's or another one's.
    lives: HashMap<u32, Vec<(u64, bool)>>,
}

impl Members {
    /// Whether the thread that has this number then is one.
    pub fn has(&self, tid: u32, at_ns: u64) -> bool {
        let life = |lives: &Vec<(u64, bool)>| {
            let later = lives.partition_point(|&(born_ns, _)| born_ns <= at_ns);
            later.checked_sub(1).is_some_and(|at| lives[at].1)
        };
        self.lives.get(&tid).is_some_and(life)
    }

    /// How many lives of threads are known.
    pub fn count(&self) -> usize {
        self.lives.values().flatten().filter(|(_, is_member)| *is_member).count()
    }
}

/// A past that says of each slice whether it is a member's.
pub struct Marked<'a> {
    /// The past.
    pub past: &'a mut dyn Past,
    /// The members.
    pub members: &'a Members,
}

impl Past for Marked<'_> {
    fn cpus(&self) -> usize {
        self.past.cpus()
    }

    fn previous(&mut self, cpu: usize) -> Option<Slice> {
        Some(self.past.previous(cpu)?.marked(|tid, at_ns| self.members.has(tid, at_ns)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::Holder;
    use super::*;

    fn birth(at_ns: u64, tid: u32, parent: u32) -> Slice {
        let entry = Entry::Woken { at_ns, by: Waker::Parent(parent), cpu: 0 };
        Slice { start_ns: at_ns + 1, end_ns: at_ns + 2, holder: Holder::Thread(tid), entry, ..Slice::default() }
    }

    #[test]
    fn children_of_children_belong_to_it_whatever_their_order() {
        let mut births = Births::default();
        // 7 is first another one's, then a grandchild's, then another one's again.
        for (at_ns, tid, parent) in [(30, 7, 6), (1, 1, 99), (20, 6, 5), (10, 5, 1), (5, 7, 2), (40, 7, 2), (25, 9, 2)]
        {
            births.add(&birth(at_ns, tid, parent));
        }
        let members = births.descendants_of(1);
        assert!(members.has(1, 0) && members.has(5, 10) && members.has(6, 21));
        assert!(!members.has(5, 9) && !members.has(9, 100) && !members.has(2, 100));
        let told: Vec<bool> = [6, 30, 39, 40, 90].map(|at_ns| members.has(7, at_ns)).into();
        assert_eq!(told, [false, true, true, false, false]);
        assert_eq!(members.count(), 4);
    }
}
