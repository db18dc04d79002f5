// SPDX-License-Identifier: MIT OR Apache-2.0
//! What all CPUs do, from a moment on, for as long as somebody reads it in time.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use whylate_model::path::history::{Entry, Slice};

use super::rings::Rings;
use super::skel::types::interval;
use super::slices::slice;

/// Where an interval was overwritten, so many parts of eight of a ring are left for reading in peace.
const LEFT_OF_EIGHT: u32 = 7;
/// A CPU may change hands between two readings; one that was never seen to has nothing to read.
const ATTEMPTS: usize = 10;

/// Reads each interval once, in the order of time on its CPU.
#[derive(Debug)]
pub struct Stream {
    rings: Rc<Rings>,
    lanes: Vec<Lane>,
}

#[derive(Clone, Copy, Debug)]
struct Lane {
    /// The interval that is handed out next, as soon as it has ended, if it was read already.
    read: Option<interval>,
    position: u32,
    /// When the one before it ended; 0: there was none.
    since_ns: u64,
}

impl Stream {
    /// From those in progress on.
    pub(super) fn new(rings: Rc<Rings>) -> Self {
        let lane = |cpu| Lane { read: None, position: rings.written(cpu), since_ns: 0 };
        let lanes = (0..rings.cpus()).map(lane).collect();
        Stream { rings, lanes }
    }

    /// Hands out what each CPU has done since the last time, as far as it had ended by then, with the number of the
    /// CPU. Time whose intervals were overwritten before that is nobody's, and they are counted.
    pub fn drain(&mut self, until_ns: u64, each: &mut dyn FnMut(usize, Slice)) {
        for (cpu, lane) in self.lanes.iter_mut().enumerate() {
            while let Some(slice) = lane.next(&self.rings, cpu, until_ns) {
                each(cpu, slice);
            }
        }
    }

    /// The same for the last time, up to a moment that is over: what goes on beyond it is handed out too.
    pub fn finish(&mut self, until_ns: u64, each: &mut dyn FnMut(usize, Slice)) {
        for (cpu, lane) in self.lanes.iter_mut().enumerate() {
            let mut attempts = 0..ATTEMPTS;
            while lane.since_ns < until_ns && attempts.next().is_some() {
                while let Some(slice) = lane.next(&self.rings, cpu, until_ns) {
                    each(cpu, slice);
                }
                let rest = lane.next(&self.rings, cpu, u64::MAX).or_else(|| lane.present(&self.rings, cpu, until_ns));
                if let Some(slice) = rest {
                    each(cpu, slice);
                }
            }
        }
    }
}

impl Lane {
    fn next(&mut self, rings: &Rings, cpu: usize, until_ns: u64) -> Option<Slice> {
        let Some(of) = self.read.or_else(|| rings.interval(cpu, self.position)) else {
            return self.skip_overwritten(rings, cpu);
        };
        let after = self.position.wrapping_add(1);
        let whole = rings.interval(cpu, after);
        // The one in progress is not whole yet.
        let present = || rings.present(cpu).filter(|&(_, written)| written == after).map(|(present, _)| present);
        self.read = Some(of);
        let Some(next) = whole.or_else(present) else {
            // The one after it was overwritten: how long it went on is not known.
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

    /// The one in progress, up to a moment that is over.
    fn present(&mut self, rings: &Rings, cpu: usize, until_ns: u64) -> Option<Slice> {
        let (of, written) = rings.present(cpu)?;
        if written != self.position || of.start_ns >= until_ns {
            return None;
        }
        self.since_ns = until_ns;
        Some(slice(&of, until_ns, (cpu, written), rings))
    }

    /// `None` where nothing was.
    fn skip_overwritten(&mut self, rings: &Rings, cpu: usize) -> Option<Slice> {
        let written = rings.written(cpu);
        if written.wrapping_sub(self.position) < rings.slots() {
            return None;
        }
        let position = written.wrapping_sub(rings.slots() / 8 * LEFT_OF_EIGHT);
        let of = rings.interval(cpu, position)?;
        rings.intervals_lost.fetch_add(position.wrapping_sub(self.position).into(), Ordering::Relaxed);
        let gap = Slice { start_ns: self.since_ns, end_ns: of.start_ns, entry: Entry::Unseen, ..Slice::default() };
        (self.read, self.position, self.since_ns) = (Some(of), position, of.start_ns);
        // Before the first one nothing was promised.
        if gap.start_ns == 0 { None } else { Some(gap) }
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::path::history::Holder;

    use super::super::rings::made_up::{SLOTS, rings, start_of};
    use super::*;

    #[test]
    fn each_interval_comes_once_and_what_was_overwritten_is_counted() {
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
        // The one in progress has not ended.
        assert_eq!((all.len(), all[19].end_ns), (20, start_of(20)));
        assert!(drained(&mut stream, u64::MAX).is_empty());
        (0..200).for_each(|_| kernel.switch());
        let after = drained(&mut stream, u64::MAX);
        let lost = u64::from(220 - SLOTS / 8 * 7 - 20);
        assert_eq!(rings.intervals_lost.load(Ordering::Relaxed), lost);
        assert_eq!((after[0].holder, after[0].start_ns), (Holder::Nobody, start_of(20)));
        assert_eq!(after[0].end_ns - after[0].start_ns, lost * 10);
        all.extend(after);
        assert!(all.windows(2).all(|pair| pair[0].end_ns == pair[1].start_ns));
        assert_eq!(all.last().map(|last| last.end_ns), Some(start_of(220)));
    }

    #[test]
    fn what_goes_on_at_the_end_is_handed_out_up_to_there() {
        // One that has ended since, and the one in progress.
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
    fn a_cpu_that_was_never_seen_ends_without_anything() {
        let (rings, _kernel) = rings();
        Stream::new(Rc::new(rings)).finish(start_of(20), &mut |_, slice| panic!("{slice:?}"));
    }
}
