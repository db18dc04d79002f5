// SPDX-License-Identifier: MIT OR Apache-2.0
//! Aggregated time by place, read from the BPF tables. A place is the aggregation key of time: process, state,
//! stacks, ….

use std::collections::{HashMap, HashSet};
use std::mem::offset_of;
use std::sync::Arc;

use libbpf_rs::MapCore;
use whylate_model::WokenBy;
use whylate_model::wait::State;

use super::skel::OffcpuMaps;
use super::skel::types::{place_key, process_value, stack_value, wait_key, waker};
use super::state;
use crate::kernel::attach::{self, PlainData, read_plain};
use crate::kernel::whole_map::each_entry;

/// Index that stands for no stack, or no room for one.
const NONE: u32 = 0;

/// Increments of a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) ns: u64,
    pub(super) samples: u64,
    pub(super) waits: u64,
}

/// A place with its increments.
pub(super) struct PlaceDelta {
    pub(super) number: u32,
    pub(super) key: place_key,
    /// The waker, if wakers are recorded.
    pub(super) woken: Option<Woken>,
    pub(super) sum: Sum,
}

/// Waker of a thread, or another event that ended its wait.
#[derive(Clone, Copy)]
pub(super) enum Woken {
    /// A waker other than a known thread.
    By(WokenBy),
    /// A thread, by the place at which it woke others.
    Thread(place_key),
}

impl PlaceDelta {
    /// Returns the key of the waking thread.
    pub(super) fn waker(&self) -> Option<&place_key> {
        match &self.woken {
            Some(Woken::Thread(key)) => Some(key),
            _ => None,
        }
    }

    /// Returns the key of the place, and that of the waker.
    pub(super) fn keys(&self) -> impl Iterator<Item = &place_key> {
        [&self.key].into_iter().chain(self.waker())
    }
}

/// Entries read from the BPF tables so far. Indexes are stable until the tables are emptied, so a table is read again
/// only for an unknown index.
#[derive(Default)]
pub(super) struct Tables {
    places: HashMap<u32, place_key>,
    waits: HashMap<u32, wait_key>,
    /// Frames, innermost first.
    stacks: HashMap<u32, Arc<[u64]>>,
    processes: HashMap<u32, (u32, String)>,
}

impl Tables {
    /// Returns the places with sums that grew from `before` to `now`; sums are indexed by place.
    pub(super) fn changed(
        &mut self,
        maps: &OffcpuMaps<'_>,
        now: &[Sum],
        before: &[Sum],
        records_wakers: bool,
    ) -> anyhow::Result<Vec<PlaceDelta>> {
        let delta = |(number, now): (usize, &Sum)| {
            let before = before.get(number).copied().unwrap_or_default();
            let sum = Sum {
                ns: now.ns.checked_sub(before.ns)?,
                samples: now.samples.checked_sub(before.samples)?,
                waits: now.waits.checked_sub(before.waits)?,
            };
            (sum.samples > 0).then_some((number as u32, sum))
        };
        let sums: Vec<(u32, Sum)> = now.iter().enumerate().filter_map(delta).collect();
        if sums.iter().any(|(number, _)| !self.places.contains_key(number) && !self.waits.contains_key(number)) {
            // A place is inserted before the waits that refer to it.
            if records_wakers {
                read_keys(&maps.place_by_wait, &mut self.waits)?;
            }
            read_keys(&maps.place_by_key, &mut self.places)?;
        }
        let place = |(number, sum): (u32, Sum)| {
            let (key, woken) = match (self.places.get(&number), self.waits.get(&number)) {
                (Some(key), _) => (key, (records_wakers && can_be_woken(key)).then_some(Woken::By(WokenBy::NotYet))),
                (None, Some(wait)) => (self.places.get(&wait.place)?, Some(woken(wait.waker, &self.places))),
                (None, None) => return None,
            };
            Some(PlaceDelta { number, key: *key, woken, sum })
        };
        Ok(sums.into_iter().filter_map(place).collect())
    }

    /// Returns the frames of stacks by their IDs.
    pub(super) fn stacks(
        &mut self,
        maps: &OffcpuMaps<'_>,
        numbers: &HashSet<u32>,
    ) -> anyhow::Result<HashMap<u32, Arc<[u64]>>> {
        let known = &mut self.stacks;
        if numbers.iter().any(|number| *number != NONE && !known.contains_key(number)) {
            each_entry(&maps.stack_by_hash, |_, value| {
                let id = value.get(offset_of!(stack_value, id)..).and_then(<[u8]>::first_chunk);
                if id.is_some_and(|id| !known.contains_key(&u32::from_ne_bytes(*id)))
                    && let Some(stack) = read_plain::<stack_value>(value)
                {
                    known.insert(stack.id, frames_of(&stack).into());
                }
            })?;
        }
        Ok(numbers.iter().filter_map(|number| Some((*number, Arc::clone(known.get(number)?)))).collect())
    }

    /// Returns PID and comm of processes by their IDs in the tables.
    pub(super) fn processes(
        &mut self,
        maps: &OffcpuMaps<'_>,
        numbers: &HashSet<u32>,
    ) -> anyhow::Result<HashMap<u32, (u32, String)>> {
        let known = &mut self.processes;
        if numbers.iter().any(|number| *number != NONE && !known.contains_key(number)) {
            each_entry(&maps.process_by_key, |_, value| {
                if let Some(process) = read_plain::<process_value>(value) {
                    known.entry(process.id).or_insert_with(|| (process.tgid, attach::text(&process.comm)));
                }
            })?;
        }
        Ok(numbers.iter().filter_map(|number| Some((*number, known.get(number)?.clone()))).collect())
    }
}

/// Reads keys by index.
fn read_keys<Key: PlainData>(map: &impl MapCore, known: &mut HashMap<u32, Key>) -> std::io::Result<()> {
    each_entry(map, |key, number| {
        if let (Some(number), Some(key)) = (read_plain::<u32>(number), read_plain::<Key>(key)) {
            known.insert(number, key);
        }
    })
}

/// Returns whether the state is a blocked one: a running or runnable thread needs no waker.
pub(super) fn can_be_woken(key: &place_key) -> bool {
    !matches!(state::from_number(key.state), State::OnCpu | State::Ready | State::Throttled)
}

pub(super) fn woken(by: u32, keys: &HashMap<u32, place_key>) -> Woken {
    match waker(by) {
        waker::WAKER_UNSEEN => Woken::By(WokenBy::Unseen),
        waker::WAKER_INTERRUPT => Woken::By(WokenBy::Interrupt),
        waker(number) => {
            keys.get(&(number - waker::WAKER_THREADS.0)).map_or(Woken::By(WokenBy::Unseen), |&key| Woken::Thread(key))
        }
    }
}

/// Returns the frames of a stack, innermost first.
pub(super) fn frames_of(stack: &stack_value) -> &[u64] {
    &stack.frames[..(stack.length as usize).min(stack.frames.len())]
}
