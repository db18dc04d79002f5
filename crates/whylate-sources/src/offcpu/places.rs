// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where time was spent, out of the tables of the programs.

use std::collections::HashMap;

use libbpf_rs::{MapCore, MapFlags};
use whylate_model::WokenBy;
use whylate_model::wait::State;

use super::skel::OffcpuMaps;
use super::skel::types::{place_key, wait_key, waker};
use super::state;
use crate::attach::read_plain;

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
}

/// The places that have more than when they were told last, as (now, before) in `sums`, by their number.
pub(super) fn changed(
    maps: &OffcpuMaps<'_>,
    now: &[Sum],
    before: &[Sum],
    tells_wakers: bool,
) -> anyhow::Result<Vec<Place>> {
    let keys = keys_by_number::<place_key>(&maps.place_by_key)?;
    let waits = if tells_wakers { keys_by_number::<wait_key>(&maps.place_by_wait)? } else { HashMap::new() };
    let mut places = Vec::new();
    for (number, now) in now.iter().enumerate() {
        let before = before.get(number).copied().unwrap_or_default();
        if now.samples <= before.samples {
            continue;
        }
        let sum =
            Sum { ns: now.ns - before.ns, samples: now.samples - before.samples, waits: now.waits - before.waits };
        let number = number as u32;
        let (key, woken) = match (keys.get(&number), waits.get(&number)) {
            (Some(key), _) => (key, (tells_wakers && can_be_woken(key)).then_some(Woken::By(WokenBy::Nobody))),
            (None, Some(wait)) => match keys.get(&wait.place) {
                Some(key) => (key, Some(woken(wait.waker, &keys))),
                None => continue,
            },
            (None, None) => continue,
        };
        places.push(Place { number, key: *key, woken, sum });
    }
    Ok(places)
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

/// What numbers were given to.
fn keys_by_number<Key: crate::attach::PlainData>(map: &impl MapCore) -> anyhow::Result<HashMap<u32, Key>> {
    let mut keys = HashMap::new();
    for bytes in map.keys() {
        let Some(number) = map.lookup(&bytes, MapFlags::ANY)? else { continue };
        if let (Some(number), Some(key)) = (read_plain::<u32>(&number), read_plain::<Key>(&bytes)) {
            keys.insert(number, key);
        }
    }
    Ok(keys)
}
