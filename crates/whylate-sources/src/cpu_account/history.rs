// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backward reader over the account's rings: the scheduling timeline of all CPUs before a timestamp.

use std::rc::Rc;

use whylate_model::path::history::{CpuTimeline, RunSlice};
use whylate_model::path::stolen::Stolen;

use super::rings::Rings;
use super::slices::slice;

/// Reads lazily from the memory that the kernel writes. Intervals that left the ring are lost, so a slow reader finds
/// fewer.
#[derive(Debug)]
pub struct History {
    rings: Rc<Rings>,
    until_ns: u64,
    cursors: Vec<CpuCursor>,
}

/// Read position in one CPU's ring.
#[derive(Clone, Copy, Debug, Default)]
struct CpuCursor {
    position: Position,
    /// End of the slice that is returned next.
    end_ns: u64,
    stolen: Stolen,
}

#[derive(Clone, Copy, Debug, Default)]
enum Position {
    #[default]
    Present,
    Before(u32),
    End,
}

impl History {
    pub(super) fn new(rings: Rc<Rings>, until_ns: u64) -> Self {
        let cursors = vec![CpuCursor { end_ns: until_ns, ..CpuCursor::default() }; rings.cpus()];
        History { rings, until_ns, cursors }
    }
}

impl CpuTimeline for History {
    fn cpus(&self) -> usize {
        self.cursors.len()
    }

    fn previous(&mut self, cpu: usize) -> Option<RunSlice> {
        let cursor = self.cursors.get_mut(cpu)?;
        loop {
            let (of, position) = match cursor.position {
                Position::Present => self.rings.present(cpu),
                Position::Before(next) => {
                    let position = next.wrapping_sub(1);
                    self.rings.interval(cpu, position).map(|of| (of, position))
                }
                Position::End => None,
            }
            // The slot was reused by a later interval.
            .filter(|(of, _)| of.start_ns < cursor.end_ns || of.start_ns >= self.until_ns)
            .or_else(|| {
                cursor.position = Position::End;
                None
            })?;
            cursor.position = Position::Before(position);
            // It started after `until_ns`.
            if of.start_ns >= self.until_ns {
                continue;
            }
            let mut slice = slice(&of, cursor.end_ns, (cpu, position), &*self.rings);
            cursor.end_ns = of.start_ns;
            cursor.stolen.spread(&mut slice);
            return Some(slice);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use whylate_model::path::history::{Holder, Name};

    use super::super::rings::fixtures::{SLOTS, rings, start_of};
    use super::*;

    fn all(history: &mut History) -> Vec<RunSlice> {
        std::iter::from_fn(|| history.previous(0)).collect()
    }

    #[test]
    fn history_is_contiguous_back_to_overwritten_interval() {
        let (rings, kernel) = rings();
        let rings = Rc::new(rings);
        assert!(all(&mut History::new(Rc::clone(&rings), 5_000)).is_empty());
        (0..=100).for_each(|_| kernel.switch());
        // The current interval, and all slots but the one that the kernel may be writing.
        let slices = all(&mut History::new(Rc::clone(&rings), 5_000));
        assert_eq!(slices.len(), SLOTS as usize);
        let present = RunSlice {
            start_ns: start_of(100),
            end_ns: 5_000,
            holder: Holder::Work { tid: 100, handler: start_of(100) },
            name: Name::default(),
            ..RunSlice::default()
        };
        assert_eq!(slices[0], present);
        assert!(slices.windows(2).all(|pair| pair[0].start_ns == pair[1].end_ns));
        // With an earlier `until_ns`, later slices are left out.
        let slices = all(&mut History::new(rings, start_of(90) + 3));
        assert_eq!((slices[0].start_ns, slices[0].end_ns), (start_of(90), start_of(90) + 3));
        assert_eq!(slices.len(), SLOTS as usize - 10);
    }

    #[test]
    fn concurrent_read_returns_no_torn_slice() {
        let (rings, kernel) = rings();
        let (rings, over) = (Rc::new(rings), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    kernel.switch();
                }
            });
            let mut read = 0;
            while read < 20_000 {
                for slice in all(&mut History::new(Rc::clone(&rings), u64::MAX)) {
                    read += 1;
                    // It was overwritten during the read.
                    if slice.holder == Holder::Unrecorded {
                        continue;
                    }
                    let Holder::Work { tid, handler } = slice.holder else { panic!("{slice:?}") };
                    assert!(slice.start_ns == start_of(tid) && slice.start_ns == handler, "{slice:?}");
                    assert!(slice.end_ns == start_of(tid + 1) || slice.end_ns == u64::MAX, "{slice:?}");
                }
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
