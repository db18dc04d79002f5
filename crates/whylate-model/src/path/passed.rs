// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps what a CPU did while threads wait for it, newest first. Each thread takes it in at once, at the end of its
//! wait, and as sums if it is much.

use super::holding::{CpuState, emit_slice_segments};
use super::{Actor, OTHERS};
use crate::CauseKind;

/// Number of lanes in a block of the prefix sums.
const BLOCK: usize = 8;
/// Number of lanes from which a wait for a CPU is summed, if sums are wanted.
pub(super) const SUMMED_FROM: usize = 64;
/// Maximum number of lanes that are summed one by one, if they have few actors.
const FEW_LANES: usize = 512;
/// Maximum number of few actors.
const FEW_ACTORS: usize = 16;
/// Maximum number of distinct actors in prefix sums. If there are more, threads are merged by name; if these are more,
/// the rest is merged.
const MAX_ACTORS: usize = 64;
/// TID of no thread.
const NO_THREAD: u32 = u32::MAX;

/// Actors on a CPU with their total time.
#[derive(Clone, Debug, Default)]
pub(super) struct Sum {
    parts: Vec<(CauseKind, Actor, u64)>,
}

impl Sum {
    /// Returns the parts, each of another kind or actor.
    pub fn parts(&self) -> &[(CauseKind, Actor, u64)] {
        &self.parts
    }

    fn add(&mut self, kind: CauseKind, who: Actor, ns: u64) {
        match self.parts.iter_mut().find(|part| (part.0, part.1) == (kind, who)) {
            Some(part) => part.2 += ns,
            None => self.parts.push((kind, who, ns)),
        }
    }
}

impl Actor {
    /// Returns the actor without its TID.
    pub(super) fn by_name(self) -> Self {
        self.named().map_or(self, |(name, is_member)| Actor::Program { name, is_member })
    }
}

/// The passed lanes of one CPU.
#[derive(Debug, Default)]
pub(super) struct Passed {
    lanes: Vec<CpuState>,
    /// Kinds and actors in the lanes.
    known: Vec<(CauseKind, Actor)>,
    /// Threads are merged by name.
    is_by_name: bool,
    /// Prefix sums: the total time of each of `known` up to the end of each block. Earlier blocks have fewer entries.
    totals: Vec<Vec<u64>>,
    /// Number of threads that wait for the CPU.
    threads: usize,
}

impl Passed {
    /// Counts a thread that starts to wait.
    pub fn begin_wait(&mut self) {
        self.threads += 1;
    }

    /// Counts a thread that stops waiting.
    pub fn end_wait(&mut self) {
        self.threads -= 1;
        if self.threads == 0 {
            self.clear();
        }
    }

    /// Drops all lanes.
    pub fn clear(&mut self) {
        self.lanes.clear();
        self.known.clear();
        self.is_by_name = false;
        self.totals.clear();
    }

    /// Returns the number of lanes.
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Adds the next earlier lane if a thread waits for the CPU, with prefix sums if `has_sums`.
    pub fn push(&mut self, cpu: usize, lane: CpuState, has_sums: bool) {
        if self.threads == 0 {
            return;
        }
        self.lanes.push(lane);
        if has_sums && self.lanes.len().is_multiple_of(BLOCK) {
            let mut block = Sum::default();
            for lane in &self.lanes[self.lanes.len() - BLOCK..] {
                each_part(lane, cpu, 0, u64::MAX, NO_THREAD, &mut |kind, who, ns| block.add(kind, who, ns));
            }
            self.totals.push(self.totals.last().cloned().unwrap_or_default());
            block.parts.into_iter().for_each(|(kind, who, ns)| self.add_total(kind, who, ns));
        }
    }

    /// Adds to the totals of the last block.
    fn add_total(&mut self, kind: CauseKind, who: Actor, ns: u64) {
        let who = if self.is_by_name { who.by_name() } else { who };
        let index = self.known.iter().position(|&known| known == (kind, who));
        if index.is_none() && self.known.len() >= MAX_ACTORS && who != Actor::Text(OTHERS) {
            if self.is_by_name {
                return self.add_total(kind, Actor::Text(OTHERS), ns);
            }
            self.merge_by_name();
            return self.add_total(kind, who, ns);
        }
        let index = index.unwrap_or_else(|| {
            self.known.push((kind, who));
            self.known.len() - 1
        });
        if let Some(totals) = self.totals.last_mut() {
            totals.resize(self.known.len(), 0);
            totals[index] += ns;
        }
    }

    /// Merges threads by name.
    fn merge_by_name(&mut self) {
        self.is_by_name = true;
        let mut known: Vec<(CauseKind, Actor)> = Vec::new();
        let mut indexes = Vec::with_capacity(self.known.len());
        for &(kind, who) in &self.known {
            let merged = (kind, who.by_name());
            indexes.push(known.iter().position(|&other| other == merged).unwrap_or_else(|| {
                known.push(merged);
                known.len() - 1
            }));
        }
        for totals in &mut self.totals {
            let mut merged = vec![0; known.len()];
            totals.iter().zip(&indexes).for_each(|(ns, &index)| merged[index] += ns);
            *totals = merged;
        }
        self.known = known;
    }

    /// Returns the range of lanes that overlap a time.
    fn within(&self, from_ns: u64, to_ns: u64) -> std::ops::Range<usize> {
        let first = self.lanes.partition_point(|lane| lane.slice.start_ns >= to_ns);
        let end = first + self.lanes[first..].partition_point(|lane| lane.slice.end_ns > from_ns);
        first..end
    }

    /// Returns the lanes that overlap a time, newest first.
    pub fn lanes(&self, from_ns: u64, to_ns: u64) -> &[CpuState] {
        &self.lanes[self.within(from_ns, to_ns)]
    }

    /// Returns the sums for a thread that waited for the CPU, including the lane before them; `None` if they are few.
    pub fn sum(&self, cpu: usize, before: &CpuState, from_ns: u64, to_ns: u64, ready: u32) -> Option<Sum> {
        let within = self.within(from_ns, to_ns);
        if within.len() < SUMMED_FROM {
            return None;
        }
        let mut sum = Sum::default();
        if within.len() < FEW_LANES {
            let are_few = self.lanes[within.clone()].iter().chain([before]).all(|lane| {
                each_part(lane, cpu, from_ns, to_ns, ready, &mut |kind, who, ns| sum.add(kind, who, ns));
                sum.parts.len() <= FEW_ACTORS
            });
            if are_few {
                return Some(sum);
            }
            sum.parts.clear();
        }
        // The first and the last lane may overlap the time in part.
        let (first, last) = ((within.start + 1).div_ceil(BLOCK), (within.end - 1) / BLOCK);
        let alone = [within.start..first * BLOCK, last * BLOCK..within.end];
        for lane in alone.into_iter().flat_map(|range| &self.lanes[range]).chain([before]) {
            each_part(lane, cpu, from_ns, to_ns, ready, &mut |kind, who, ns| {
                sum.add(kind, if self.is_by_name { who.by_name() } else { who }, ns);
            });
        }
        let until = &self.totals[last - 1];
        for (index, &(kind, who)) in self.known[..until.len()].iter().enumerate() {
            let earlier = first.checked_sub(1).and_then(|block| self.totals[block].get(index));
            let ns = until[index] - earlier.copied().unwrap_or(0);
            if ns > 0 {
                sum.add(kind, who, ns);
            }
        }
        Some(sum)
    }
}

/// Reports the parts of a lane within a time.
fn each_part(
    lane: &CpuState,
    cpu: usize,
    from_ns: u64,
    to_ns: u64,
    ready: u32,
    each: &mut dyn FnMut(CauseKind, Actor, u64),
) {
    let (from_ns, to_ns) = (lane.slice.start_ns.max(from_ns), lane.slice.end_ns.min(to_ns));
    emit_slice_segments(lane, cpu, from_ns, to_ns, Some(ready), &mut |from_ns, to_ns, kind, who| {
        if from_ns < to_ns {
            each(kind, who, to_ns - from_ns);
        }
    });
}
