// SPDX-License-Identifier: MIT OR Apache-2.0
//! All CPUs, run backwards: at any moment it is known who has each.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::history::{Exit, Holder, Past, Slice};
use super::passed::{Passed, Sum};

/// How many lanes that were passed are kept in all, while threads wait for their CPUs.
const PASSED: usize = 1 << 16;
/// How many of each CPU, where CPUs are many.
const PASSED_OF_CPU: usize = 1 << 10;

/// One CPU at the present moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    /// Who has it.
    pub slice: Slice,
    /// Since when interrupts are known to be off there, until its slice ends.
    pub irqs_off_ns: u64,
}

/// A CPU changes hands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub at_ns: u64,
    pub cpu: usize,
    /// Who has it from then on.
    pub after: Slice,
    /// Who had it until then.
    pub before: Slice,
}

/// The past of all CPUs, as far as it has been gone back.
pub(super) struct Rewind<'a> {
    past: &'a mut dyn Past,
    pub lanes: Vec<Lane>,
    /// When each lane's slice began, the latest first.
    changes: BinaryHeap<(u64, Reverse<usize>)>,
    /// Of each CPU, what comes before its lane's slice; kept where a gap lies in between.
    waiting: Vec<Option<Slice>>,
    /// The thread of each lane's slice.
    tids: Vec<Option<u32>>,
    /// Of each CPU, what was passed since a thread began to wait for it.
    passed: Vec<Passed>,
    /// How many lanes are kept of each CPU at most.
    room: usize,
    /// Long waits for a CPU are told in sums.
    has_sums: bool,
}

impl<'a> Rewind<'a> {
    /// At the end of what is known.
    pub fn new(past: &'a mut dyn Past, has_sums: bool) -> Self {
        let cpus = past.cpus();
        let mut rewind = Rewind {
            past,
            lanes: vec![Lane::default(); cpus],
            changes: BinaryHeap::with_capacity(cpus),
            waiting: vec![None; cpus],
            tids: vec![None; cpus],
            passed: (0..cpus).map(|_| Passed::default()).collect(),
            room: (PASSED / cpus.max(1)).max(PASSED_OF_CPU),
            has_sums,
        };
        for cpu in 0..cpus {
            // After the end nothing is known.
            rewind.lanes[cpu].slice.end_ns = u64::MAX;
            let before = rewind.before(cpu, u64::MAX);
            rewind.enter(cpu, before);
        }
        rewind
    }

    /// When a CPU last changed hands before the present moment; `None` where no more is known of any.
    pub fn next_ns(&self) -> Option<u64> {
        self.changes.peek().map(|&(at_ns, _)| at_ns)
    }

    /// What changed then. The lanes still are as they were after it.
    pub fn next(&mut self) -> Option<Change> {
        let (at_ns, Reverse(cpu)) = self.changes.pop()?;
        let before = self.before(cpu, at_ns);
        Some(Change { at_ns, cpu, after: self.lanes[cpu].slice, before })
    }

    /// Goes back to before a change.
    pub fn pass(&mut self, change: &Change) {
        self.passed[change.cpu].push(change.cpu, self.lanes[change.cpu], self.has_sums);
        self.enter(change.cpu, change.before);
    }

    /// What a CPU was passed doing while threads wait for it.
    pub fn passed_mut(&mut self, cpu: usize) -> &mut Passed {
        &mut self.passed[cpu]
    }

    /// Whether no more lanes of this CPU are to be kept: whoever waits for it takes them in, and they are forgotten.
    pub fn is_full(&self, cpu: usize) -> bool {
        self.passed[cpu].len() >= self.room
    }

    /// The lanes of a CPU within a time since a thread began to wait for it, the latest first.
    pub fn passed(&self, cpu: usize, from_ns: u64, to_ns: u64) -> impl Iterator<Item = &Lane> {
        self.passed[cpu].lanes(from_ns, to_ns).iter().chain([&self.lanes[cpu]])
    }

    /// What they were to the thread that waited, where they are many and sums are wanted.
    pub fn sum(&self, cpu: usize, from_ns: u64, to_ns: u64, ready: u32) -> Option<Sum> {
        let before = &self.lanes[cpu];
        self.has_sums.then(|| self.passed[cpu].sum(cpu, before, from_ns, to_ns, ready)).flatten()
    }

    /// The CPU that this thread has, itself and not an interrupt on top of it.
    pub fn cpu_of(&self, tid: u32) -> Option<usize> {
        self.tids.iter().position(|&holder| holder == Some(tid))
    }

    /// Who had the CPU up to `end_ns`, from when the slice began; nobody where nothing is known.
    fn before(&mut self, cpu: usize, end_ns: u64) -> Slice {
        loop {
            let Some(slice) = self.waiting[cpu].take().or_else(|| self.past.previous(cpu)) else {
                return Slice { end_ns, ..Slice::default() };
            };
            // Slices are disjoint, whatever they say.
            if slice.start_ns >= end_ns || slice.start_ns >= slice.end_ns {
                continue;
            }
            if slice.end_ns < end_ns {
                self.waiting[cpu] = Some(slice);
                return Slice { start_ns: slice.end_ns, end_ns, ..Slice::default() };
            }
            let exit = if slice.end_ns == end_ns { slice.exit } else { Exit::GoesOn };
            return Slice { end_ns, exit, ..slice };
        }
    }

    fn enter(&mut self, cpu: usize, slice: Slice) {
        let lane = &mut self.lanes[cpu];
        // Whoever gives the CPU up does so with interrupts on, so it was whoever the interrupt has found.
        lane.irqs_off_ns = match lane.slice.holder {
            Holder::Irq { late_ns } if late_ns > 0 && lane.slice.start_ns == slice.end_ns => {
                slice.end_ns.saturating_sub(late_ns)
            }
            _ => u64::MAX,
        };
        lane.slice = slice;
        self.tids[cpu] = slice.holder.tid();
        if slice.start_ns > 0 {
            self.changes.push((slice.start_ns, Reverse(cpu)));
        }
    }
}
