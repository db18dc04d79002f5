// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which late events a report shows one by one, where there are more than it has room for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use whylate_model::{Card, LateEvent};

/// Of each source, so many of the worst and of the newest; and in each slot the worst one.
const WORST: usize = 120;
const NEWEST: usize = 20;
/// More are sorted out: so many, or with so many segments of paths and causes, which are most of their memory.
const MOST: usize = 6_000;
const MOST_SEGMENTS: usize = 200_000;

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
    segments: usize,
    counted: u64,
}

fn segments(event: &LateEvent) -> usize {
    1 + event.path.len() + event.causes.len()
}

impl Kept {
    pub fn add(&mut self, slot: u32, card: &'static Card, event: LateEvent) {
        self.counted += 1;
        self.segments += segments(&event);
        self.late.push(Late { slot, card, event: LateEvent { evidence: None, ..event } });
        if self.late.len() >= MOST || self.segments >= MOST_SEGMENTS {
            self.sort_out();
        }
    }

    /// Two neighbouring slots become one.
    pub fn coarsen(&mut self) {
        self.late.iter_mut().for_each(|late| late.slot /= 2);
    }

    fn sort_out(&mut self) {
        self.keep(&chosen(&self.late, WORST, true));
        // Where paths are that long, each of few.
        let mut most = WORST;
        while self.segments >= MOST_SEGMENTS / 2 && most > 1 {
            most /= 2;
            self.keep(&chosen(&self.late, most, false));
        }
    }

    fn keep(&mut self, chosen: &BTreeSet<usize>) {
        let mut number = 0;
        self.late.retain(|_| {
            number += 1;
            chosen.contains(&(number - 1))
        });
        self.segments = self.late.iter().map(|late| segments(&late.event)).sum();
    }

    /// Those that are shown, in the order in which they came, and how many there were in all.
    pub fn finish(mut self) -> (Vec<Late>, u64) {
        self.sort_out();
        (self.late, self.counted)
    }
}

/// The places of those that stay: of each source so many of the worst, the newest, and the worst of each slot where asked for.
fn chosen(late: &[Late], most_worst: usize, with_slots: bool) -> BTreeSet<usize> {
    let mut by_source: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut worst_of_slot: BTreeMap<(u32, &str), usize> = BTreeMap::new();
    for (place, one) in late.iter().enumerate() {
        by_source.entry(one.card.name).or_default().push(place);
        let worst = worst_of_slot.entry((one.slot, one.card.name)).or_insert(place);
        if late[*worst].event.latency_ns < one.event.latency_ns {
            *worst = place;
        }
    }
    let mut chosen: BTreeSet<usize> = worst_of_slot.into_values().filter(|_| with_slots).collect();
    for mut places in by_source.into_values() {
        chosen.extend(places.iter().rev().take(NEWEST.min(most_worst)));
        places.sort_by_key(|&place| Reverse(late[place].event.latency_ns));
        chosen.extend(places.iter().take(most_worst));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use whylate_model::path::PathSegment;
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

    #[test]
    fn long_paths_are_bounded_as_well() {
        let mut kept = Kept::default();
        for number in 0..3_000_u64 {
            let path = vec![PathSegment::default(); 800];
            let event = LateEvent { latency_ns: 1 + number % 1_000, path, ..LateEvent::default() };
            kept.add(number as u32, &WQ, event);
            assert!(kept.segments < MOST_SEGMENTS);
        }
        let (late, _) = kept.finish();
        assert!(late.len() > 50 && late.iter().any(|late| late.event.latency_ns == 1_000), "{}", late.len());
    }
}
