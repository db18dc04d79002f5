// SPDX-License-Identifier: MIT OR Apache-2.0
//! The past of all CPUs as the account has kept it, from a moment backwards.

use std::rc::Rc;

use whylate_model::path::history::{Past, Slice};
use whylate_model::path::stolen::Stolen;

use super::rings::Rings;
use super::slices::slice;

/// Read as it is asked for, right from the memory into which the kernel writes: what is older than its rings is not
/// known, and the longer one takes, the less is left.
#[derive(Debug)]
pub struct History {
    rings: Rc<Rings>,
    until_ns: u64,
    lanes: Vec<Lane>,
}

/// How far one CPU has been read.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    place: Place,
    /// Where the slice that is handed out next ends.
    end_ns: u64,
    stolen: Stolen,
}

#[derive(Clone, Copy, Debug, Default)]
enum Place {
    #[default]
    Present,
    Before(u32),
    End,
}

impl History {
    pub(super) fn new(rings: Rc<Rings>, until_ns: u64) -> Self {
        let lanes = vec![Lane { end_ns: until_ns, ..Lane::default() }; rings.cpus()];
        History { rings, until_ns, lanes }
    }
}

impl Past for History {
    fn cpus(&self) -> usize {
        self.lanes.len()
    }

    fn previous(&mut self, cpu: usize) -> Option<Slice> {
        let lane = self.lanes.get_mut(cpu)?;
        loop {
            let (of, position) = match lane.place {
                Place::Present => self.rings.present(cpu),
                Place::Before(next) => {
                    let position = next.wrapping_sub(1);
                    self.rings.interval(cpu, position).map(|of| (of, position))
                }
                Place::End => None,
            }
            // A later one has taken its place.
            .filter(|(of, _)| of.start_ns < lane.end_ns || of.start_ns >= self.until_ns)
            .or_else(|| {
                lane.place = Place::End;
                None
            })?;
            lane.place = Place::Before(position);
            // It began after the moment from which on this goes back.
            if of.start_ns >= self.until_ns {
                continue;
            }
            let mut slice = slice(&of, lane.end_ns, (cpu, position), &*self.rings);
            lane.end_ns = of.start_ns;
            lane.stolen.spread(&mut slice);
            return Some(slice);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use whylate_model::path::history::{Holder, Name};

    use super::super::rings::made_up::{SLOTS, rings, start_of};
    use super::*;

    fn all(history: &mut History) -> Vec<Slice> {
        std::iter::from_fn(|| history.previous(0)).collect()
    }

    #[test]
    fn the_past_goes_back_without_a_gap_to_what_was_overwritten() {
        let (rings, kernel) = rings();
        let rings = Rc::new(rings);
        assert!(all(&mut History::new(Rc::clone(&rings), 5_000)).is_empty());
        (0..=100).for_each(|_| kernel.switch());
        // The present one, and all but the one that may just be written.
        let slices = all(&mut History::new(Rc::clone(&rings), 5_000));
        assert_eq!(slices.len(), SLOTS as usize);
        let present = Slice {
            start_ns: start_of(100),
            end_ns: 5_000,
            holder: Holder::Work { tid: 100, handler: start_of(100) },
            name: Name::default(),
            ..Slice::default()
        };
        assert_eq!(slices[0], present);
        assert!(slices.windows(2).all(|pair| pair[0].start_ns == pair[1].end_ns));
        // From a moment in the past on, what came after is left out.
        let slices = all(&mut History::new(rings, start_of(90) + 3));
        assert_eq!((slices[0].start_ns, slices[0].end_ns), (start_of(90), start_of(90) + 3));
        assert_eq!(slices.len(), SLOTS as usize - 10);
    }

    #[test]
    fn no_slice_is_half_of_another_one() {
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
                    // Read while it was written.
                    if slice.holder == Holder::Nobody {
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
