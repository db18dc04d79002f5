// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where time was spent, out of the tables of the programs.

use std::collections::{HashMap, HashSet};
use std::mem::offset_of;
use std::sync::Arc;

use libbpf_rs::MapCore;
use whylate_model::WokenBy;
use whylate_model::wait::State;

use super::sampler::frames_of;
use super::skel::OffcpuMaps;
use super::skel::types::{place_key, process_value, stack_value, wait_key, waker};
use super::state;
use crate::attach::{self, PlainData, read_plain};
use crate::whole_map::each_entry;

/// The number of no stack, and of whatever there was no room for.
const NONE: u32 = 0;

/// What was added to a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) ns: u64,
    pub(super) samples: u64,
    pub(super) waits: u64,
}

/// A place to which something was added.
pub(super) struct Place {
    pub(super) number: u32,
    pub(super) key: place_key,
    /// Who ended the waits, where that is asked for.
    pub(super) woken: Option<Woken>,
    pub(super) sum: Sum,
}

/// Who ended waits.
#[derive(Clone, Copy)]
pub(super) enum Woken {
    /// No thread.
    By(WokenBy),
    /// The thread at this place.
    Thread(place_key),
}

impl Place {
    /// Of the thread that ended the waits.
    pub(super) fn waker(&self) -> Option<&place_key> {
        match &self.woken {
            Some(Woken::Thread(key)) => Some(key),
            _ => None,
        }
    }

    /// Of the place, and of whoever ended the waits there.
    pub(super) fn keys(&self) -> impl Iterator<Item = &place_key> {
        [&self.key].into_iter().chain(self.waker())
    }
}

/// What has been read of the tables of the programs. Numbers keep their meaning until the tables are emptied, so a table is
/// read again only for a number that is not known.
#[derive(Default)]
pub(super) struct Tables {
    places: HashMap<u32, place_key>,
    waits: HashMap<u32, wait_key>,
    /// Frames, innermost first.
    stacks: HashMap<u32, Arc<[u64]>>,
    processes: HashMap<u32, (u32, String)>,
}

impl Tables {
    /// The places that have more than when they were told last, as (now, before) in `sums`, by their number.
    pub(super) fn changed(
        &mut self,
        maps: &OffcpuMaps<'_>,
        now: &[Sum],
        before: &[Sum],
        tells_wakers: bool,
    ) -> anyhow::Result<Vec<Place>> {
        let more = |(number, now): (usize, &Sum)| {
            let before = before.get(number).copied().unwrap_or_default();
            let sum = Sum {
                ns: now.ns.checked_sub(before.ns)?,
                samples: now.samples.checked_sub(before.samples)?,
                waits: now.waits.checked_sub(before.waits)?,
            };
            (sum.samples > 0).then_some((number as u32, sum))
        };
        let sums: Vec<(u32, Sum)> = now.iter().enumerate().filter_map(more).collect();
        if sums.iter().any(|(number, _)| !self.places.contains_key(number) && !self.waits.contains_key(number)) {
            // A wait's places are older than the wait.
            if tells_wakers {
                read_keys(&maps.place_by_wait, &mut self.waits)?;
            }
            read_keys(&maps.place_by_key, &mut self.places)?;
        }
        let place = |(number, sum): (u32, Sum)| {
            let (key, woken) = match (self.places.get(&number), self.waits.get(&number)) {
                (Some(key), _) => (key, (tells_wakers && can_be_woken(key)).then_some(Woken::By(WokenBy::Nobody))),
                (None, Some(wait)) => (self.places.get(&wait.place)?, Some(woken(wait.waker, &self.places))),
                (None, None) => return None,
            };
            Some(Place { number, key: *key, woken, sum })
        };
        Ok(sums.into_iter().filter_map(place).collect())
    }

    /// The frames of stacks by their numbers.
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

    /// Numbers and names of processes by their numbers in the tables.
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

/// What numbers were given to.
fn read_keys<Key: PlainData>(map: &impl MapCore, known: &mut HashMap<u32, Key>) -> std::io::Result<()> {
    each_entry(map, |key, number| {
        if let (Some(number), Some(key)) = (read_plain::<u32>(number), read_plain::<Key>(key)) {
            known.insert(number, key);
        }
    })
}

/// A thread that can run, or does, waits for nobody to wake it.
pub(super) fn can_be_woken(key: &place_key) -> bool {
    !matches!(state::of(key.state), State::OnCpu | State::Ready | State::Throttled)
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
