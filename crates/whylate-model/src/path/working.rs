// SPDX-License-Identifier: MIT OR Apache-2.0
//! Assigns the samples of threads to the segments in which they worked.

use std::collections::HashMap;

use super::{Actor, Segment};
use crate::CauseKind;
use crate::work::{CpuSamples, Work, WorkCounter};

/// Collects the work of queries from segments, which come newest first for each.
#[derive(Debug)]
pub(super) struct Working<'a> {
    counter: WorkCounter<'a>,
    /// Start and end of the interrupts that were reported last for a query.
    interrupts: HashMap<usize, (u64, u64)>,
}

impl<'a> Working<'a> {
    pub(super) fn new(samples: &'a CpuSamples) -> Self {
        Working { counter: WorkCounter::new(samples), interrupts: HashMap::new() }
    }

    /// Adds a segment of a query in which its thread was on a CPU. A sample is taken in an interrupt, which has a
    /// segment of its own: it belongs to what the interrupt came into.
    pub(super) fn add(&mut self, number: usize, segment: &Segment) {
        let later = self.interrupts.remove(&number).filter(|(from_ns, _)| *from_ns == segment.to_ns);
        let end_ns = later.map_or(segment.to_ns, |(_, to_ns)| to_ns);
        match (segment.kind, segment.who) {
            (CauseKind::Running, Actor::Thread { tid, name, .. }) => {
                let worked_ns = segment.to_ns - segment.from_ns;
                self.counter.add(tid, || name.text(), worked_ns, segment.from_ns..end_ns);
            }
            (CauseKind::Irq | CauseKind::Softirq | CauseKind::Nmi | CauseKind::Steal, _) => {
                self.interrupts.insert(number, (segment.from_ns, end_ns));
            }
            _ => {}
        }
    }

    /// Returns the work; `None` if there is no sample.
    pub(super) fn finish(self) -> Option<Work> {
        self.counter.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::Name;
    use super::*;
    use crate::work::{CpuSample, RunningStack, WorkKind};

    #[test]
    fn sample_in_interrupt_belongs_to_what_it_came_into() {
        let stacks = vec![RunningStack { user: vec!["main".into()], ..RunningStack::default() }.into()];
        let sample = |tid, at_ns| CpuSample { tid, at_ns, ns: 1, stack: 0 };
        // The last one is in an interrupt that came into another thread.
        let samples = CpuSamples::new(vec![sample(7, 22), sample(7, 24), sample(7, 5), sample(7, 41)], stacks);
        let thread = |name| Actor::Thread { tid: 7, name: Name::new(name), cgroup: None, is_member: true };
        let segment = |from_ns, to_ns, kind, who| Segment { from_ns, to_ns, kind, who, ready: None, hop: None };
        let interrupt = Actor::Interrupt(Name::new("local_timer"));
        let mut work = Working::new(&samples);
        work.add(0, &segment(40, 42, CauseKind::Irq, interrupt));
        work.add(1, &segment(25, 40, CauseKind::Running, thread("other")));
        work.add(0, &segment(25, 30, CauseKind::Running, thread("late")));
        work.add(0, &segment(23, 25, CauseKind::Softirq, interrupt));
        work.add(0, &segment(20, 23, CauseKind::Irq, interrupt));
        work.add(0, &segment(10, 20, CauseKind::Running, thread("early")));
        let work = work.finish().expect("samples");
        assert_eq!((work.ns, work.samples), (30, 2));
        let sampled = work.parts.iter().filter(|part| part.kind != WorkKind::NotSampled);
        assert_eq!(sampled.map(|part| part.thread.as_str()).collect::<Vec<_>>(), ["early"]);
    }
}
