// SPDX-License-Identifier: MIT OR Apache-2.0
//! Forward reader over the account's rings: streams the run slices of all CPUs.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use whylate_model::path::history::{RunSlice, SwitchIn};

use super::rings::Rings;
use super::skel::types::interval;
use super::slices::slice;

/// After an overrun, skip to the newest 7/8 of the ring, so that the writer does not catch up at once.
const KEPT_EIGHTHS: u32 = 7;
/// Maximum number of rounds at the end of a stream. The CPU may switch between two reads; a CPU that was never seen has
/// nothing to read.
const ATTEMPTS: usize = 10;

/// Returns each interval once, in time order per CPU.
#[derive(Debug)]
pub struct Stream {
    rings: Rc<Rings>,
    cursors: Vec<CpuCursor>,
}

#[derive(Clone, Copy, Debug)]
struct CpuCursor {
    /// The interval that is returned next once it has ended, if it was read already.
    read: Option<interval>,
    position: u32,
    /// End of the previous interval; 0 if there was none.
    since_ns: u64,
}

impl Stream {
    /// Starts with the intervals in progress.
    pub(super) fn new(rings: Rc<Rings>) -> Self {
        let cursor = |cpu| CpuCursor { read: None, position: rings.written(cpu), since_ns: 0 };
        let cursors = (0..rings.cpus()).map(cursor).collect();
        Stream { rings, cursors }
    }

    /// Passes each slice that ended by `until_ns` to `each`, with its CPU. Time of overwritten intervals is passed as
    /// unattributed, and the intervals are counted.
    pub fn drain(&mut self, until_ns: u64, each: &mut dyn FnMut(usize, RunSlice)) {
        for (cpu, cursor) in self.cursors.iter_mut().enumerate() {
            while let Some(slice) = cursor.next(&self.rings, cpu, until_ns) {
                each(cpu, slice);
            }
        }
    }

    /// Ends the stream at `until_ns`, which must be in the past: also passes the slices still in progress.
    pub fn finish(&mut self, until_ns: u64, each: &mut dyn FnMut(usize, RunSlice)) {
        for (cpu, cursor) in self.cursors.iter_mut().enumerate() {
            let mut attempts = 0..ATTEMPTS;
            while cursor.since_ns < until_ns && attempts.next().is_some() {
                while let Some(slice) = cursor.next(&self.rings, cpu, until_ns) {
                    each(cpu, slice);
                }
                let rest =
                    cursor.next(&self.rings, cpu, u64::MAX).or_else(|| cursor.present(&self.rings, cpu, until_ns));
                if let Some(slice) = rest {
                    each(cpu, slice);
                }
            }
        }
    }
}

impl CpuCursor {
    fn next(&mut self, rings: &Rings, cpu: usize, until_ns: u64) -> Option<RunSlice> {
        let Some(of) = self.read.or_else(|| rings.interval(cpu, self.position)) else {
            return self.skip_overwritten(rings, cpu);
        };
        let after = self.position.wrapping_add(1);
        let whole = rings.interval(cpu, after);
        // The interval in progress has no end yet.
        let present = || rings.present(cpu).filter(|&(_, written)| written == after).map(|(present, _)| present);
        self.read = Some(of);
        let Some(next) = whole.or_else(present) else {
            // The next interval was overwritten, so the end of this one is unknown.
            if rings.written(cpu).wrapping_sub(after) >= rings.slots() {
                self.read = None;
                return self.skip_overwritten(rings, cpu);
            }
            return None;
        };
        if next.start_ns > until_ns {
            return None;
        }
        let slice = slice(&of, next.start_ns, (cpu, self.position), rings);
        (self.read, self.position, self.since_ns) = (whole, after, next.start_ns);
        Some(slice)
    }

    /// Returns the interval in progress, cut at `until_ns`.
    fn present(&mut self, rings: &Rings, cpu: usize, until_ns: u64) -> Option<RunSlice> {
        let (of, written) = rings.present(cpu)?;
        if written != self.position || of.start_ns >= until_ns {
            return None;
        }
        self.since_ns = until_ns;
        Some(slice(&of, until_ns, (cpu, written), rings))
    }

    /// Skips overwritten intervals and returns the gap as an unattributed slice; `None` if none was overwritten.
    fn skip_overwritten(&mut self, rings: &Rings, cpu: usize) -> Option<RunSlice> {
        let written = rings.written(cpu);
        if written.wrapping_sub(self.position) < rings.slots() {
            return None;
        }
        let position = written.wrapping_sub(rings.slots() / 8 * KEPT_EIGHTHS);
        let of = rings.interval(cpu, position)?;
        rings.intervals_lost.fetch_add(position.wrapping_sub(self.position).into(), Ordering::Relaxed);
        let gap =
            RunSlice { start_ns: self.since_ns, end_ns: of.start_ns, entry: SwitchIn::Unseen, ..RunSlice::default() };
        (self.read, self.position, self.since_ns) = (Some(of), position, of.start_ns);
        // Time before the first slice is no gap.
        if gap.start_ns == 0 { None } else { Some(gap) }
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::path::history::Holder;

    use super::super::rings::fixtures::{SLOTS, rings, start_of};
    use super::*;

    #[test]
    fn returns_each_interval_once_and_counts_overwritten_ones() {
        let (rings, kernel) = rings();
        let rings = Rc::new(rings);
        let mut stream = Stream::new(Rc::clone(&rings));
        let drained = |stream: &mut Stream, until_ns| {
            let mut slices = Vec::new();
            stream.drain(until_ns, &mut |cpu, slice| {
                assert_eq!(cpu, 0);
                slices.push(slice);
            });
            slices
        };
        (0..=20).for_each(|_| kernel.switch());
        let mut all = drained(&mut stream, start_of(10));
        assert_eq!((all.len(), all[9].end_ns), (10, start_of(10)));
        all.extend(drained(&mut stream, u64::MAX));
        // The interval in progress has not ended.
        assert_eq!((all.len(), all[19].end_ns), (20, start_of(20)));
        assert!(drained(&mut stream, u64::MAX).is_empty());
        (0..200).for_each(|_| kernel.switch());
        let after = drained(&mut stream, u64::MAX);
        let lost = u64::from(220 - SLOTS / 8 * 7 - 20);
        assert_eq!(rings.intervals_lost.load(Ordering::Relaxed), lost);
        assert_eq!((after[0].holder, after[0].start_ns), (Holder::Unrecorded, start_of(20)));
        assert_eq!(after[0].end_ns - after[0].start_ns, lost * 10);
        all.extend(after);
        assert!(all.windows(2).all(|pair| pair[0].end_ns == pair[1].start_ns));
        assert_eq!(all.last().map(|last| last.end_ns), Some(start_of(220)));
    }

    #[test]
    fn finish_cuts_interval_in_progress_at_end() {
        // One that has ended since, and one in progress.
        for (switches, end_ns) in [(30, start_of(21)), (20, start_of(20) + 5)] {
            let (rings, kernel) = rings();
            let mut stream = Stream::new(Rc::new(rings));
            (0..=switches).for_each(|_| kernel.switch());
            let mut slices = Vec::new();
            stream.finish(start_of(20) + 5, &mut |_, slice| slices.push(slice));
            assert_eq!(slices.len(), 21);
            assert!(slices.windows(2).all(|pair| pair[0].end_ns == pair[1].start_ns));
            assert_eq!(slices.last().map(|last| (last.start_ns, last.end_ns)), Some((start_of(20), end_ns)));
        }
    }

    #[test]
    fn unseen_cpu_yields_no_slice() {
        let (rings, _kernel) = rings();
        Stream::new(Rc::new(rings)).finish(start_of(20), &mut |_, slice| panic!("{slice:?}"));
    }
}
