// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which threads ran while a timeline was recorded.

use std::collections::HashSet;

use whylate_model::path::history::{Blocked, RunSlice, SwitchOut};
use whylate_model::wait::Stop;

/// Upper limit of the kernel's TIDs (`PID_MAX_LIMIT` in include/linux/threads.h).
const MAX_TID: u32 = 1 << 22;
/// Maximum number of threads that are remembered to have been stopped by a tracer.
const MAX_TRACED: usize = 1 << 16;

/// Threads with a run slice, by TID.
#[derive(Debug, Default)]
pub(super) struct RanThreads {
    /// One bit for each TID up to the highest.
    bits: Vec<u64>,
    /// Threads that a tracer stopped. If there are too many, none is known to be untraced.
    traced: HashSet<u32>,
}

impl RanThreads {
    /// Adds the thread of a slice.
    pub(super) fn add(&mut self, slice: &RunSlice) {
        let Some(tid) = slice.holder.tid().filter(|&tid| tid < MAX_TID) else { return };
        let (word, bit) = (tid as usize / 64, 1_u64 << (tid % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        self.bits[word] |= bit;
        if matches!(slice.exit, SwitchOut::Blocked(Blocked { stop: Some(Stop::Tracer), .. }))
            && self.traced.len() < MAX_TRACED
        {
            self.traced.insert(tid);
        }
    }

    /// Returns whether the thread ran and no tracer stopped it.
    pub(super) fn ran_untraced(&self, tid: u32) -> bool {
        let word = self.bits.get(tid as usize / 64).copied().unwrap_or(0);
        word & 1 << (tid % 64) != 0 && self.traced.len() < MAX_TRACED && !self.traced.contains(&tid)
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::path::history::Holder;

    use super::*;

    #[test]
    fn threads_that_ran_are_known_apart_from_traced_ones() {
        let slice = |tid, stop| RunSlice {
            holder: Holder::Thread(tid),
            exit: SwitchOut::Blocked(Blocked { stop, ..Blocked::default() }),
            ..RunSlice::default()
        };
        let mut ran = RanThreads::default();
        for (tid, stop) in
            [(63, None), (64, Some(Stop::Signal)), (65, Some(Stop::Tracer)), (65, None), (u32::MAX, None)]
        {
            ran.add(&slice(tid, stop));
        }
        let untraced: Vec<u32> =
            [0, 63, 64, 65, 66, 1 << 21, u32::MAX].into_iter().filter(|&tid| ran.ran_untraced(tid)).collect();
        assert_eq!(untraced, [63, 64]);
        assert!(ran.bits.len() == 2, "a made-up TID takes no memory");
    }
}
