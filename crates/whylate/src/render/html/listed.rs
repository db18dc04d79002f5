// SPDX-License-Identifier: MIT OR Apache-2.0
//! Selects the late events that a report lists, if there are more than fit.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use whylate_model::{Card, LateEvent};

/// Number of the worst and of the newest events listed per source. The worst of each slot is listed as well.
const WORST: usize = 120;
const NEWEST: usize = 20;
/// Limits of events and of their path segments and causes, which take most of the memory. Beyond them, events are
/// dropped.
const MAX_EVENTS: usize = 6_000;
const MAX_SEGMENTS: usize = 200_000;

/// A listed late event.
#[derive(Debug)]
pub struct ListedEvent {
    pub slot: u32,
    pub card: &'static Card,
    pub event: LateEvent,
}

/// Collects late events as they come.
#[derive(Debug, Default)]
pub struct ListedEvents {
    late: Vec<ListedEvent>,
    segments: usize,
    count: u64,
}

fn segments(event: &LateEvent) -> usize {
    1 + event.path.len() + event.causes.len()
}

impl ListedEvents {
    pub fn add(&mut self, slot: u32, card: &'static Card, event: LateEvent) {
        self.count += 1;
        self.segments += segments(&event);
        self.late.push(ListedEvent { slot, card, event: LateEvent { evidence: None, ..event } });
        if self.late.len() >= MAX_EVENTS || self.segments >= MAX_SEGMENTS {
            self.prune();
        }
    }

    /// Merges pairs of neighboring slots.
    pub fn coarsen(&mut self) {
        self.late.iter_mut().for_each(|late| late.slot /= 2);
    }

    fn prune(&mut self) {
        self.retain(&select(&self.late, WORST, true));
        // With such long paths, keeps fewer events of each source.
        let mut max = WORST;
        while self.segments >= MAX_SEGMENTS / 2 && max > 1 {
            max /= 2;
            self.retain(&select(&self.late, max, false));
        }
    }

    fn retain(&mut self, selected: &BTreeSet<usize>) {
        let mut number = 0;
        self.late.retain(|_| {
            number += 1;
            selected.contains(&(number - 1))
        });
        self.segments = self.late.iter().map(|late| segments(&late.event)).sum();
    }

    /// Returns the listed events, in order of arrival, and the number of all events.
    pub fn finish(mut self) -> (Vec<ListedEvent>, u64) {
        self.prune();
        (self.late, self.count)
    }
}

/// Returns the indexes of the events to keep: the worst `max_worst` and the newest of each source, and with
/// `with_slots` the worst of each slot.
fn select(late: &[ListedEvent], max_worst: usize, with_slots: bool) -> BTreeSet<usize> {
    let mut by_source: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut worst_of_slot: BTreeMap<(u32, &str), usize> = BTreeMap::new();
    for (index, one) in late.iter().enumerate() {
        by_source.entry(one.card.name).or_default().push(index);
        let worst = worst_of_slot.entry((one.slot, one.card.name)).or_insert(index);
        if late[*worst].event.latency_ns < one.event.latency_ns {
            *worst = index;
        }
    }
    let mut selected: BTreeSet<usize> = worst_of_slot.into_values().filter(|_| with_slots).collect();
    for mut indexes in by_source.into_values() {
        selected.extend(indexes.iter().rev().take(NEWEST.min(max_worst)));
        indexes.sort_by_key(|&index| Reverse(late[index].event.latency_ns));
        selected.extend(indexes.iter().take(max_worst));
    }
    selected
}

#[cfg(test)]
mod tests {
    use whylate_model::path::PathSegment;
    use whylate_model::sources::{TIMERLAT, WQ};

    use super::*;

    #[test]
    fn keeps_worst_newest_and_worst_of_each_slot() {
        let mut listed = ListedEvents::default();
        for number in 0..20_000_u64 {
            let card = if number % 10 == 0 { &TIMERLAT } else { &WQ };
            // The longest come early, and slot 7 has only short ones.
            let latency_ns = if number / 100 == 7 { 1 } else { 1_000_000 - number };
            let event = LateEvent { latency_ns, at_unix_ns: number, ..LateEvent::default() };
            listed.add((number / 100) as u32, card, event);
        }
        let (late, count) = listed.finish();
        assert_eq!(count, 20_000);
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
    fn bounds_total_path_segments() {
        let mut listed = ListedEvents::default();
        for number in 0..3_000_u64 {
            let path = vec![PathSegment::default(); 800];
            let event = LateEvent { latency_ns: 1 + number % 1_000, path, ..LateEvent::default() };
            listed.add(number as u32, &WQ, event);
            assert!(listed.segments < MAX_SEGMENTS);
        }
        let (late, _) = listed.finish();
        assert!(late.len() > 50 && late.iter().any(|late| late.event.latency_ns == 1_000), "{}", late.len());
    }
}
