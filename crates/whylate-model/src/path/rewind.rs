// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the timelines of all CPUs backwards in step, so that the actor on each CPU is known at any time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::history::{CpuTimeline, Holder, RunSlice, SwitchOut};
use super::holding::CpuState;
use super::passed::{Passed, Sum};

/// Maximum number of passed lanes kept in total, while threads wait for their CPUs.
const MAX_PASSED: usize = 1 << 16;
/// Minimum number of passed lanes for each CPU, on machines with many CPUs.
const MIN_PASSED_OF_CPU: usize = 1 << 10;

/// Maximum time between two interrupts of a burst: those that were pending come in one after the other.
const MAX_GAP_NS: u64 = 20_000;

/// A change of the actor on a CPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub at_ns: u64,
    pub cpu: usize,
    /// Run slice from then on.
    pub after: RunSlice,
    /// Run slice until then.
    pub before: RunSlice,
}

/// Timelines of all CPUs, with the position that was reached.
pub(super) struct Rewind<'a> {
    past: &'a mut dyn CpuTimeline,
    pub lanes: Vec<CpuState>,
    /// Start of each lane's slice, newest first.
    changes: BinaryHeap<(u64, Reverse<usize>)>,
    /// The slice before each lane's slice; set if there is a gap between the two.
    waiting: Vec<Option<RunSlice>>,
    /// TID of each lane's slice.
    tids: Vec<Option<u32>>,
    /// Lanes of each CPU that were passed since a thread started to wait for it.
    passed: Vec<Passed>,
    /// Maximum number of lanes kept of each CPU.
    room: usize,
    /// Long waits for a CPU are summed.
    has_sums: bool,
}

impl<'a> Rewind<'a> {
    /// Starts at the newest recorded slices.
    pub fn new(past: &'a mut dyn CpuTimeline, has_sums: bool) -> Self {
        let cpus = past.cpus();
        let mut rewind = Rewind {
            past,
            lanes: vec![CpuState::default(); cpus],
            changes: BinaryHeap::with_capacity(cpus),
            waiting: vec![None; cpus],
            tids: vec![None; cpus],
            passed: (0..cpus).map(|_| Passed::default()).collect(),
            room: (MAX_PASSED / cpus.max(1)).max(MIN_PASSED_OF_CPU),
            has_sums,
        };
        for cpu in 0..cpus {
            // After the end of the timeline, the actors are unknown.
            rewind.lanes[cpu].slice.end_ns = u64::MAX;
            let before = rewind.before(cpu, u64::MAX);
            rewind.enter(cpu, before);
        }
        rewind
    }

    /// Returns the time of the next change backwards; `None` at the start of all timelines.
    pub fn next_ns(&self) -> Option<u64> {
        self.changes.peek().map(|&(at_ns, _)| at_ns)
    }

    /// Takes the next change backwards. The lanes still show the state after it.
    pub fn next(&mut self) -> Option<Change> {
        let (at_ns, Reverse(cpu)) = self.changes.pop()?;
        let before = self.before(cpu, at_ns);
        Some(Change { at_ns, cpu, after: self.lanes[cpu].slice, before })
    }

    /// Moves to before a change.
    pub fn pass(&mut self, change: &Change) {
        self.passed[change.cpu].push(change.cpu, self.lanes[change.cpu], self.has_sums);
        self.enter(change.cpu, change.before);
    }

    /// Returns the passed lanes of a CPU.
    pub fn passed_mut(&mut self, cpu: usize) -> &mut Passed {
        &mut self.passed[cpu]
    }

    /// Returns whether there is no room for more passed lanes of this CPU: threads that wait for it must take them in
    /// now.
    pub fn is_full(&self, cpu: usize) -> bool {
        self.passed[cpu].len() >= self.room
    }

    /// Returns the lanes of a CPU that overlap a time in which a thread waits for it, newest first.
    pub fn passed(&self, cpu: usize, from_ns: u64, to_ns: u64) -> impl Iterator<Item = &CpuState> {
        self.passed[cpu].lanes(from_ns, to_ns).iter().chain([&self.lanes[cpu]])
    }

    /// Returns the sum of these lanes for the waiting thread, if they are many and sums are wanted.
    pub fn sum(&self, cpu: usize, from_ns: u64, to_ns: u64, ready: u32) -> Option<Sum> {
        let before = &self.lanes[cpu];
        self.has_sums.then(|| self.passed[cpu].sum(cpu, before, from_ns, to_ns, ready)).flatten()
    }

    /// Returns the CPU that this thread occupies, itself and not an interrupt nested on it.
    pub fn cpu_of(&self, tid: u32) -> Option<usize> {
        self.tids.iter().position(|&holder| holder == Some(tid))
    }

    /// Returns the slice that ends at `end_ns`; one without an actor for a gap.
    fn before(&mut self, cpu: usize, end_ns: u64) -> RunSlice {
        loop {
            let Some(slice) = self.waiting[cpu].take().or_else(|| self.past.previous(cpu)) else {
                return RunSlice { end_ns, ..RunSlice::default() };
            };
            // Slices are made disjoint, whatever was recorded.
            if slice.start_ns >= end_ns || slice.start_ns >= slice.end_ns {
                continue;
            }
            if slice.end_ns < end_ns {
                self.waiting[cpu] = Some(slice);
                return RunSlice { start_ns: slice.end_ns, end_ns, ..RunSlice::default() };
            }
            let exit = if slice.end_ns == end_ns { slice.exit } else { SwitchOut::GoesOn };
            return RunSlice { end_ns, exit, ..slice };
        }
    }

    fn enter(&mut self, cpu: usize, slice: RunSlice) {
        let lane = &mut self.lanes[cpu];
        let due_ns = if lane.slice.start_ns == slice.end_ns { lane.due_ns } else { u64::MAX };
        let is_brief = slice.end_ns.saturating_sub(slice.start_ns) <= MAX_GAP_NS;
        let is_gap = is_brief && due_ns < slice.start_ns && !matches!(slice.holder, Holder::Idle | Holder::Unrecorded);
        (lane.irqs_off_ns, lane.due_ns) = match slice.holder {
            // Another interrupt of the burst may have come in before the late one.
            Holder::Irq { late_ns: 0 } => (u64::MAX, due_ns),
            Holder::Irq { late_ns } => (u64::MAX, due_ns.min(slice.start_ns.saturating_sub(late_ns))),
            // A thread is switched out with interrupts on, so the interrupted thread had them off.
            _ => (due_ns, if is_gap { due_ns } else { u64::MAX }),
        };
        lane.slice = slice;
        self.tids[cpu] = slice.holder.tid();
        if slice.start_ns > 0 {
            self.changes.push((slice.start_ns, Reverse(cpu)));
        }
    }
}
