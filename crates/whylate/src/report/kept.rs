// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which late events a report shows one by one, where there are more than it has room for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use whylate_model::{Card, LateEvent};

/// Of each source, so many of the worst and of the newest; and in each slot the worst one.
const WORST: usize = 120;
const NEWEST: usize = 20;
/// More are sorted out.
const MOST: usize = 6_000;

/// One of them.
#[derive(Debug)]
pub struct Late {
    pub slot: u32,
    pub card: &'static Card,
    pub event: LateEvent,
}

/// Takes them in as they come.
#[derive(Debug, Default)]
pub struct Kept {
    late: Vec<Late>,
    counted: u64,
}

impl Kept {
    pub fn add(&mut self, slot: u32, card: &'static Card, event: LateEvent) {
        self.counted += 1;
        self.late.push(Late { slot, card, event: LateEvent { evidence: None, ..event } });
        if self.late.len() >= MOST {
            self.sort_out();
        }
    }

    /// Two neighbouring slots become one.
    pub fn coarsen(&mut self) {
        self.late.iter_mut().for_each(|late| late.slot /= 2);
    }

    fn sort_out(&mut self) {
        let chosen = chosen(&self.late);
        let mut number = 0;
        self.late.retain(|_| {
            number += 1;
            chosen.contains(&(number - 1))
        });
    }

    /// Those that are shown, in the order in which they came, and how many there were in all.
    pub fn finish(mut self) -> (Vec<Late>, u64) {
        self.sort_out();
        (self.late, self.counted)
    }
}

/// The places of those that stay.
fn chosen(late: &[Late]) -> BTreeSet<usize> {
    let mut by_source: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut worst_of_slot: BTreeMap<(u32, &str), usize> = BTreeMap::new();
    for (place, one) in late.iter().enumerate() {
        by_source.entry(one.card.name).or_default().push(place);
        let worst = worst_of_slot.entry((one.slot, one.card.name)).or_insert(place);
        if late[*worst].event.latency_ns < one.event.latency_ns {
            *worst = place;
        }
    }
    let mut chosen: BTreeSet<usize> = worst_of_slot.into_values().collect();
    for mut places in by_source.into_values() {
        chosen.extend(places.iter().rev().take(NEWEST));
        places.sort_by_key(|&place| Reverse(late[place].event.latency_ns));
        chosen.extend(places.iter().take(WORST));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::{TIMERLAT, WQ};

    use super::*;

    #[test]
    fn the_worst_the_newest_and_the_worst_of_each_slot_stay() {
        let mut kept = Kept::default();
        for number in 0..20_000_u64 {
            let card = if number % 10 == 0 { &TIMERLAT } else { &WQ };
            // The longest come early, and slot 7 has short ones only.
            let latency_ns = if number / 100 == 7 { 1 } else { 1_000_000 - number };
            let event = LateEvent { latency_ns, at_unix_ns: number, ..LateEvent::default() };
            kept.add((number / 100) as u32, card, event);
        }
        let (late, counted) = kept.finish();
        assert_eq!(counted, 20_000);
        assert!((500..2_000).contains(&late.len()), "{}", late.len());
        assert!(late.is_sorted_by_key(|late| late.event.at_unix_ns));
        let of = |card: &Card| late.iter().filter(|late| late.card.name == card.name).collect::<Vec<_>>();
        for (card, first, last) in [(&WQ, 1, 19_999), (&TIMERLAT, 0, 19_990)] {
            let of = of(card);
            let times: Vec<u64> = of.iter().map(|late| late.event.at_unix_ns).collect();
            assert!(times[0] == first && times.last() == Some(&last), "{times:?}");
            assert!(of.iter().any(|late| late.slot == 7));
        }
    }
}
