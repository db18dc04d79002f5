// SPDX-License-Identifier: MIT OR Apache-2.0
//! Items that are waiting or running: a stuck item has no latency yet.

use std::collections::HashMap;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Acquire;

use anyhow::Context as _;
use libbpf_rs::MapCore as _;

use super::skel::WqSkel;
use super::skel::types::{queued_item, queued_set, running_item, running_set};
use crate::kernel::mapped::MappedArray;
use crate::source::AttachError;

const SET_ITEMS: usize = size_of_val_of(|set: &queued_set| &set.items) / size_of::<queued_item>();
const WAYS: usize = size_of_val_of(|set: &running_set| &set.items) / size_of::<running_item>();

const fn size_of_val_of<T, F>(_field: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Number of items, and age of the oldest in ns.
pub(super) type CountAndOldest = (u64, u64);

/// The unfinished items of one series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) queued: CountAndOldest,
    pub(super) running: CountAndOldest,
}

/// The BPF tables of queued and running items.
pub(super) struct Unfinished {
    home: MappedArray,
    spilled: MappedArray,
    running: MappedArray,
}

impl Unfinished {
    pub(super) fn new(skeleton: &WqSkel<'_>) -> Result<Self, AttachError> {
        let map = |map: &libbpf_rs::MapMut<'_>, bytes: usize| {
            MappedArray::new(map.as_fd(), map.max_entries() as usize, bytes).context("cannot map the table of items")
        };
        Ok(Unfinished {
            home: map(&skeleton.maps.queued_items, size_of::<queued_set>())?,
            spilled: map(&skeleton.maps.spilled_items, size_of::<queued_set>())?,
            running: map(&skeleton.maps.running_items, size_of::<running_set>())?,
        })
    }

    /// Counts items by series ID, which is 0 for items without a key.
    pub(super) fn by_series(&self, now_ns: u64) -> HashMap<usize, Counts> {
        let mut counts: HashMap<usize, Counts> = HashMap::new();
        let any_spilled = count_queued(&self.home, now_ns, &mut counts);
        if any_spilled {
            count_queued(&self.spilled, now_ns, &mut counts);
        }
        for set in 0..self.running.entries() {
            for way in 0..WAYS {
                let item = offset_of!(running_set, items) + way * size_of::<running_item>();
                if self.running.u64_at(set, item + offset_of!(running_item, item)).load(Acquire) == 0 {
                    continue;
                }
                let started_ns = self.running.u64_at(set, item + offset_of!(running_item, started_ns)).load(Acquire);
                let series = self.running.u32_at(set, item + offset_of!(running_item, series)).load(Acquire);
                add(&mut counts.entry(series as usize).or_default().running, now_ns.saturating_sub(started_ns));
            }
        }
        counts
    }
}

/// Counts the queued items of a table. Returns whether some items are in the second table.
fn count_queued(table: &MappedArray, now_ns: u64, counts: &mut HashMap<usize, Counts>) -> bool {
    let mut any_spilled = false;
    for set in 0..table.entries() {
        for i in 0..SET_ITEMS {
            let item = offset_of!(queued_set, items) + i * size_of::<queued_item>();
            let stamp_ns = table.u64_at(set, item + offset_of!(queued_item, stamp)).load(Acquire);
            // 0 is free, 1 is being written.
            if stamp_ns > 1 {
                let series = table.u16_at(set, item + offset_of!(queued_item, series)).load(Acquire);
                add(&mut counts.entry(series.into()).or_default().queued, now_ns.saturating_sub(stamp_ns));
            }
        }
        any_spilled |= table.u32_at(set, offset_of!(queued_set, spilled)).load(Acquire) > 0;
    }
    any_spilled
}

fn add((count, oldest_ns): &mut CountAndOldest, age_ns: u64) {
    *count += 1;
    *oldest_ns = age_ns.max(*oldest_ns);
}
