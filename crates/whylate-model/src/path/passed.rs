// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a CPU was passed doing, the latest first, while threads wait for it: so each of them takes it in at once at the
//! end of its wait, and where it was much, in sums.

use super::holding::tell_holder;
use super::rewind::Lane;
use super::{OTHERS, Party};
use crate::CauseKind;

/// Of so many lanes each there is a sum.
const BLOCK: usize = 8;
/// A wait for a CPU that has more lanes is told in sums, where those are wanted.
pub(super) const SUMMED_FROM: usize = 64;
/// Up to so many lanes are looked at one by one, to see whether they are those of few holders.
const FEW_LANES: usize = 512;
/// So many are few.
const FEW_HOLDERS: usize = 16;
/// So many holders are told apart in sums of more lanes. If there are more, threads of one name are one holder; if these
/// are more, the rest are others.
const HOLDERS: usize = 64;
/// The number of no thread.
const NOBODY: u32 = u32::MAX;

/// Who had a CPU, and for how long in all.
#[derive(Clone, Debug, Default)]
pub(super) struct Sum {
    parts: Vec<(CauseKind, Party, u64)>,
}

impl Sum {
    /// The parts, each of another kind or holder.
    pub fn parts(&self) -> &[(CauseKind, Party, u64)] {
        &self.parts
    }

    fn add(&mut self, kind: CauseKind, who: Party, ns: u64) {
        match self.parts.iter_mut().find(|part| (part.0, part.1) == (kind, who)) {
            Some(part) => part.2 += ns,
            None => self.parts.push((kind, who, ns)),
        }
    }
}

impl Party {
    /// What threads of one name have in common.
    pub(super) fn by_name(self) -> Self {
        self.named().map_or(self, |(name, is_member)| Party::Program { name, is_member })
    }
}

/// The lanes of one CPU that were passed.
#[derive(Debug, Default)]
pub(super) struct Passed {
    lanes: Vec<Lane>,
    /// Kinds and holders that were met in them.
    known: Vec<(CauseKind, Party)>,
    /// Threads of one name are one holder.
    is_by_name: bool,
    /// For how long each was met up to the end of each block, one block after the other: the first has as many numbers as
    /// were known then.
    totals: Vec<Vec<u64>>,
    /// How many threads wait for the CPU.
    threads: usize,
}

impl Passed {
    /// One more thread waits from now on.
    pub fn begin_wait(&mut self) {
        self.threads += 1;
    }

    /// One less does.
    pub fn end_wait(&mut self) {
        self.threads -= 1;
        if self.threads == 0 {
            self.clear();
        }
    }

    /// Forgets all lanes.
    pub fn clear(&mut self) {
        self.lanes.clear();
        self.known.clear();
        self.is_by_name = false;
        self.totals.clear();
    }

    /// How many lanes are kept.
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Keeps the next earlier lane if anybody waits for the CPU, with sums where those are wanted.
    pub fn push(&mut self, cpu: usize, lane: Lane, has_sums: bool) {
        if self.threads == 0 {
            return;
        }
        self.lanes.push(lane);
        if has_sums && self.lanes.len().is_multiple_of(BLOCK) {
            let mut block = Sum::default();
            for lane in &self.lanes[self.lanes.len() - BLOCK..] {
                each_part(lane, cpu, 0, u64::MAX, NOBODY, &mut |kind, who, ns| block.add(kind, who, ns));
            }
            self.totals.push(self.totals.last().cloned().unwrap_or_default());
            block.parts.into_iter().for_each(|(kind, who, ns)| self.add_total(kind, who, ns));
        }
    }

    /// Adds to the totals of the last block.
    fn add_total(&mut self, kind: CauseKind, who: Party, ns: u64) {
        let who = if self.is_by_name { who.by_name() } else { who };
        let place = self.known.iter().position(|&known| known == (kind, who));
        if place.is_none() && self.known.len() >= HOLDERS && who != Party::Text(OTHERS) {
            if self.is_by_name {
                return self.add_total(kind, Party::Text(OTHERS), ns);
            }
            self.unite();
            return self.add_total(kind, who, ns);
        }
        let place = place.unwrap_or_else(|| {
            self.known.push((kind, who));
            self.known.len() - 1
        });
        if let Some(totals) = self.totals.last_mut() {
            totals.resize(self.known.len(), 0);
            totals[place] += ns;
        }
    }

    /// Makes one holder of threads of one name.
    fn unite(&mut self) {
        self.is_by_name = true;
        let mut known: Vec<(CauseKind, Party)> = Vec::new();
        let mut places = Vec::with_capacity(self.known.len());
        for &(kind, who) in &self.known {
            let united = (kind, who.by_name());
            places.push(known.iter().position(|&other| other == united).unwrap_or_else(|| {
                known.push(united);
                known.len() - 1
            }));
        }
        for totals in &mut self.totals {
            let mut united = vec![0; known.len()];
            totals.iter().zip(&places).for_each(|(ns, &place)| united[place] += ns);
            *totals = united;
        }
        self.known = known;
    }

    /// Which of the lanes lie within a time, at least in part.
    fn within(&self, from_ns: u64, to_ns: u64) -> std::ops::Range<usize> {
        let first = self.lanes.partition_point(|lane| lane.slice.start_ns >= to_ns);
        let end = first + self.lanes[first..].partition_point(|lane| lane.slice.end_ns > from_ns);
        first..end
    }

    /// The lanes within a time, the latest first.
    pub fn lanes(&self, from_ns: u64, to_ns: u64) -> &[Lane] {
        &self.lanes[self.within(from_ns, to_ns)]
    }

    /// What they and the lane before them were to a thread that waited for the CPU, where they are many.
    pub fn sum(&self, cpu: usize, before: &Lane, from_ns: u64, to_ns: u64, ready: u32) -> Option<Sum> {
        let within = self.within(from_ns, to_ns);
        if within.len() < SUMMED_FROM {
            return None;
        }
        let mut sum = Sum::default();
        if within.len() < FEW_LANES {
            let are_few = self.lanes[within.clone()].iter().chain([before]).all(|lane| {
                each_part(lane, cpu, from_ns, to_ns, ready, &mut |kind, who, ns| sum.add(kind, who, ns));
                sum.parts.len() <= FEW_HOLDERS
            });
            if are_few {
                return Some(sum);
            }
            sum.parts.clear();
        }
        // The first and the last lane may lie within it in part.
        let (first, last) = ((within.start + 1).div_ceil(BLOCK), (within.end - 1) / BLOCK);
        let alone = [within.start..first * BLOCK, last * BLOCK..within.end];
        for lane in alone.into_iter().flat_map(|range| &self.lanes[range]).chain([before]) {
            each_part(lane, cpu, from_ns, to_ns, ready, &mut |kind, who, ns| {
                sum.add(kind, if self.is_by_name { who.by_name() } else { who }, ns);
            });
        }
        let until = &self.totals[last - 1];
        for (place, &(kind, who)) in self.known[..until.len()].iter().enumerate() {
            let earlier = first.checked_sub(1).and_then(|block| self.totals[block].get(place));
            let ns = until[place] - earlier.copied().unwrap_or(0);
            if ns > 0 {
                sum.add(kind, who, ns);
            }
        }
        Some(sum)
    }
}

/// Tells the parts of a lane that lie within a time.
fn each_part(
    lane: &Lane,
    cpu: usize,
    from_ns: u64,
    to_ns: u64,
    ready: u32,
    each: &mut dyn FnMut(CauseKind, Party, u64),
) {
    let (from_ns, to_ns) = (lane.slice.start_ns.max(from_ns), lane.slice.end_ns.min(to_ns));
    tell_holder(lane, cpu, from_ns, to_ns, Some(ready), &mut |from_ns, to_ns, kind, who| {
        if from_ns < to_ns {
            each(kind, who, to_ns - from_ns);
        }
    });
}
