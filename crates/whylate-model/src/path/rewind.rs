// SPDX-License-Identifier: MIT OR Apache-2.0
//! All CPUs, run backwards: at any moment it is known who has each.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::history::{Exit, Holder, Past, Slice};

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
}

/// The lanes of one CPU that were passed, the latest first, as long as threads wait for it.
#[derive(Debug, Default)]
struct Passed {
    lanes: Vec<Lane>,
    threads: usize,
}

impl<'a> Rewind<'a> {
    /// At the end of what is known.
    pub fn new(past: &'a mut dyn Past) -> Self {
        let cpus = past.cpus();
        let mut rewind = Rewind {
            past,
            lanes: vec![Lane::default(); cpus],
            changes: BinaryHeap::with_capacity(cpus),
            waiting: vec![None; cpus],
            tids: vec![None; cpus],
            passed: (0..cpus).map(|_| Passed::default()).collect(),
            room: (PASSED / cpus.max(1)).max(PASSED_OF_CPU),
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
        let passed = &mut self.passed[change.cpu];
        if passed.threads > 0 {
            passed.lanes.push(self.lanes[change.cpu]);
        }
        self.enter(change.cpu, change.before);
    }

    /// From now on, until [`Rewind::end_wait`], one more thread waits for this CPU.
    pub fn begin_wait(&mut self, cpu: usize) {
        self.passed[cpu].threads += 1;
    }

    /// One thread less waits for this CPU.
    pub fn end_wait(&mut self, cpu: usize) {
        let passed = &mut self.passed[cpu];
        passed.threads -= 1;
        if passed.threads == 0 {
            passed.lanes.clear();
        }
    }

    /// Whether the lanes of this CPU have no more room: whoever waits for it takes them in before they are forgotten.
    pub fn is_full(&self, cpu: usize) -> bool {
        self.passed[cpu].lanes.len() >= self.room
    }

    /// Forgets the lanes of a CPU that were passed: all threads that wait for it have taken them in.
    pub fn forget_passed(&mut self, cpu: usize) {
        self.passed[cpu].lanes.clear();
    }

    /// The lanes of a CPU within a time since a thread began to wait for it, the latest first.
    pub fn passed(&self, cpu: usize, from_ns: u64, to_ns: u64) -> impl Iterator<Item = &Lane> {
        let passed = &self.passed[cpu].lanes;
        let later = passed.partition_point(|lane| lane.slice.start_ns >= to_ns);
        let within = move |lane: &&Lane| lane.slice.end_ns > from_ns;
        passed[later..].iter().chain([&self.lanes[cpu]]).take_while(within)
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
