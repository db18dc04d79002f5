// SPDX-License-Identifier: MIT OR Apache-2.0
//! All CPUs, run backwards: at any moment it is known who has each.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::history::{Exit, Holder, Past, Slice};

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
        self.enter(change.cpu, change.before);
    }

    /// The CPU that this thread has, itself and not an interrupt on top of it.
    pub fn cpu_of(&self, tid: u32) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.slice.holder.tid() == Some(tid))
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
        if slice.start_ns > 0 {
            self.changes.push((slice.start_ns, Reverse(cpu)));
        }
    }
}
