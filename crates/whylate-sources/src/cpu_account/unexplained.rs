// SPDX-License-Identifier: MIT OR Apache-2.0
//! Late events without causes because they exceeded the budget or the ring's space.

use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use whylate_model::Snapshot;

use super::Account;
use super::skel::types::unexplained;
use crate::kernel::mapped::MappedArray;

/// Counters of one source's programs (`bpf/window.bpf.h`).
pub(super) struct Unexplained {
    counts: MappedArray,
}

impl Account {
    /// Maps the counters of the source's programs, `start` bytes into `variables`.
    ///
    /// # Errors
    /// Fails if the map cannot be mapped.
    pub(crate) fn watch_unexplained(&mut self, variables: BorrowedFd<'_>, start: usize) -> anyhow::Result<()> {
        let counts = MappedArray::inside(variables, start, 1, size_of::<unexplained>());
        self.unexplained = Some(Unexplained { counts: counts.context("cannot map the counts of late events")? });
        Ok(())
    }

    /// Counts a late event that user space does not explain, because the budget is spent.
    pub(crate) fn leave_unexplained(&self, late_ns: u64) {
        let Some(Unexplained { counts }) = &self.unexplained else { return };
        counts.u64_at(0, offset_of!(unexplained, over_budget)).fetch_add(1, Ordering::Relaxed);
        counts.u64_at(0, offset_of!(unexplained, late_ns)).fetch_add(late_ns, Ordering::Relaxed);
    }

    /// Adds the unexplained late events since the last call to the snapshot's loss counters.
    pub(crate) fn report_unexplained(&self, snapshot: &mut Snapshot) {
        let Some(Unexplained { counts }) = &self.unexplained else { return };
        let take = |offset| counts.u64_at(0, offset).swap(0, Ordering::Relaxed);
        let over_budget = take(offset_of!(unexplained, over_budget));
        let no_room = take(offset_of!(unexplained, no_room));
        snapshot.unexplained.events += over_budget + no_room;
        snapshot.unexplained.total_ns += take(offset_of!(unexplained, late_ns));
        snapshot.lost.insert("over_budget".to_owned(), over_budget);
        *snapshot.lost.entry("late_events".to_owned()).or_default() += no_room;
    }
}
