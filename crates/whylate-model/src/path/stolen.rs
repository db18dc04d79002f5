// SPDX-License-Identifier: MIT OR Apache-2.0
//! Spreads steal time where only the last slice of an on-CPU span has it.

use super::history::{CpuTimeline, Holder, RunSlice};

/// Steal time of one CPU, read backwards, that belongs to slices before the one read last.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stolen {
    left_ns: u64,
    of: Option<u32>,
}

impl Stolen {
    /// Moves steal time that exceeds the slice to the slices before it. Without an exact steal clock, all steal time
    /// since a thread was switched in is reported with its last slice.
    pub fn spread(&mut self, slice: &mut RunSlice) {
        let tid = match slice.holder {
            Holder::Idle => Some(0),
            holder => holder.tid(),
        };
        if slice.steal_ns > 0 || (tid.is_some() && tid != self.of) {
            (self.left_ns, self.of) = (slice.steal_ns, tid);
        }
        slice.steal_ns = self.left_ns.min(slice.end_ns.saturating_sub(slice.start_ns));
        self.left_ns -= slice.steal_ns;
    }
}

/// A timeline in which no slice has more steal time than its length.
#[derive(Debug)]
pub struct Spread<P> {
    /// The timeline as recorded.
    pub past: P,
    lanes: Vec<Stolen>,
}

impl<P: CpuTimeline> Spread<P> {
    /// Wraps a timeline that has not been read yet.
    pub fn new(past: P) -> Self {
        let lanes = vec![Stolen::default(); past.cpus()];
        Spread { past, lanes }
    }
}

impl<P: CpuTimeline> CpuTimeline for Spread<P> {
    fn cpus(&self) -> usize {
        self.past.cpus()
    }

    fn previous(&mut self, cpu: usize) -> Option<RunSlice> {
        let mut slice = self.past.previous(cpu)?;
        self.lanes.get_mut(cpu)?.spread(&mut slice);
        Some(slice)
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::Recorded;
    use super::*;

    #[test]
    fn steal_beyond_slice_length_moves_to_earlier_slices() {
        let slice =
            |start_ns, end_ns, holder, steal_ns| RunSlice { start_ns, end_ns, holder, steal_ns, ..RunSlice::default() };
        let (own, irq) = (Holder::Thread(5), Holder::Irq { late_ns: 0 });
        let slices = vec![
            slice(0, 10, Holder::Thread(4), 0),
            slice(10, 20, own, 0),
            slice(20, 24, irq, 0),
            slice(24, 30, own, 0),
            slice(30, 32, own, 14),
            slice(32, 40, Holder::Idle, 0),
        ];
        let mut past = Spread::new(Recorded { cpus: vec![slices] });
        let back: Vec<u64> = std::iter::from_fn(|| past.previous(0)).map(|slice| slice.steal_ns).collect();
        assert_eq!(back, [0, 2, 6, 4, 2, 0]);
    }
}
