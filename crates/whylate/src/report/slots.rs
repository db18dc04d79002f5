// SPDX-License-Identifier: MIT OR Apache-2.0
//! A recording of any length as a few hundred slots of time: the moments of a slot are merged as a replay merges them.

use std::collections::BTreeMap;

use whylate_model::look::{Found, Look};
use whylate_model::{Card, Merger, Snapshot};

/// So many slots there are at most: more can hardly be seen on a screen.
pub const MOST: usize = 360;

/// And so many series at most: with more of them there are fewer slots, but never fewer than that.
const MOST_SERIES: usize = 100_000;
const LEAST: usize = 60;

/// Slots in order of time. Each has equally many moments, but for the last one.
#[derive(Debug, Default)]
pub struct Slots {
    slots: Vec<Slot>,
    /// A power of two.
    moments_each: u64,
    in_last: u64,
    moments: u64,
    /// When all of it ends.
    end_unix_ns: u64,
}

/// What all sources saw in a few neighbouring moments.
#[derive(Debug)]
pub struct Slot {
    /// When its first snapshot begins and its last one ends, to the microsecond as recordings have it.
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    /// By the number of the source.
    pub sources: Vec<Option<OfSource>>,
    /// Of what sources share.
    pub lost: BTreeMap<String, u64>,
}

/// What one of them saw.
#[derive(Debug)]
pub struct OfSource {
    pub found: Found<'static>,
    merger: Merger,
    /// How many events were late, those of `found` that were not explained with them, and the longest.
    pub late: u64,
    pub late_max_ns: u64,
    /// Waits for others that were held up.
    pub held_up: u64,
    pub held_up_max_ns: u64,
    /// Of all of these.
    pub late_ns: u64,
}

/// What one source saw in one moment.
pub struct Part<'a> {
    pub number: usize,
    pub found: Found<'static>,
    /// Without stacks and late events.
    pub snapshot: &'a Snapshot,
}

impl Slots {
    /// The slot that the next moment goes to.
    pub fn next(&self) -> u32 {
        let is_full = self.slots.is_empty() || self.in_last >= self.moments_each;
        (self.slots.len() as u32).saturating_sub(u32::from(!is_full))
    }

    /// Adds a moment, of which the look tells who was late, and nothing where nobody was; `lost` is of what sources share. True where slots have become
    /// half as many: whoever counts by slot does the same.
    pub fn add(&mut self, parts: Vec<Part<'_>>, look: &Look, lost: BTreeMap<String, u64>, sources: usize) -> bool {
        let next = self.next() as usize;
        if next == self.slots.len() {
            self.slots.push(Slot::empty(sources));
            self.in_last = 0;
        }
        self.in_last += 1;
        let slot = &mut self.slots[next];
        super::add_lost(&mut slot.lost, lost);
        parts.into_iter().for_each(|part| slot.add_part(part, look));
        self.moments_each = self.moments_each.max(1);
        self.moments += 1;
        // To count them is asked last: it takes longest.
        let is_many = || self.slots.len() >= 2 * LEAST && self.series() > MOST_SERIES;
        let is_full = self.in_last >= self.moments_each && (self.slots.len() >= 2 * MOST || is_many());
        if is_full {
            self.coarsen();
        }
        is_full
    }

    fn series(&self) -> usize {
        self.slots.iter().flat_map(|slot| &slot.sources).flatten().map(|of| of.merger.series()).sum()
    }

    fn coarsen(&mut self) {
        let was_alone = self.slots.len() % 2 == 1;
        let mut kept: Vec<Slot> = Vec::with_capacity(self.slots.len() / 2 + 1);
        for (number, slot) in std::mem::take(&mut self.slots).into_iter().enumerate() {
            match kept.last_mut() {
                Some(last) if number % 2 == 1 => last.add(slot),
                _ => kept.push(slot),
            }
        }
        self.in_last = if was_alone { self.in_last } else { self.in_last + self.moments_each };
        self.moments_each *= 2;
        self.slots = kept;
    }

    /// Whether there are more than may stay: then they become half as many.
    pub fn narrow(&mut self) -> bool {
        let is_too_many = self.slots.len() > MOST;
        if is_too_many {
            self.coarsen();
        }
        is_too_many
    }

    /// Nothing follows but what was lost since.
    pub fn end(&mut self, end_unix_ns: u64, lost: BTreeMap<String, u64>) {
        self.end_unix_ns = end_unix_ns;
        if let Some(last) = self.slots.last_mut() {
            super::add_lost(&mut last.lost, lost);
        }
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Slot> + ExactSizeIterator {
        self.slots.iter()
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// How many moments there are in all, and in each slot.
    pub fn moments(&self) -> (u64, u64) {
        (self.moments, self.moments_each)
    }

    /// The snapshot of each source in each slot.
    pub fn merged(&mut self) -> Vec<Vec<Option<Snapshot>>> {
        let of_slot =
            |slot: &mut Slot| slot.sources.iter_mut().map(|of| of.as_mut().and_then(|of| of.merger.take())).collect();
        self.slots.iter_mut().map(of_slot).collect()
    }

    /// From when to when `replay` has to be asked for what these slots have: a snapshot that ends when a span begins is not of
    /// it, and one that begins when it ends is.
    pub fn span_unix_ns(&self, first: usize, last: usize) -> (u64, u64) {
        let (begins_ns, ends_ns) = match (self.slots.get(first), self.slots.get(last)) {
            (Some(first), Some(last)) => (first.start_unix_ns, last.end_unix_ns),
            _ => return (0, 0),
        };
        // Where the clock was set back, what came before or after has other times.
        let before = first.checked_sub(1).and_then(|before| self.slots.get(before));
        let before = before.filter(|before| before.start_unix_ns <= begins_ns);
        let after = self.slots.get(last + 1).filter(|after| ends_ns <= after.end_unix_ns);
        let is_last = last + 1 == self.slots.len();
        let from_ns = before.map_or(begins_ns, |before| before.end_unix_ns);
        let to_ns = match after {
            Some(after) => after.start_unix_ns.saturating_sub(1),
            None if is_last => ends_ns.max(self.end_unix_ns),
            None => ends_ns,
        };
        (from_ns, to_ns)
    }
}

impl Slot {
    fn empty(sources: usize) -> Self {
        let sources = (0..sources).map(|_| None).collect();
        Slot { start_unix_ns: u64::MAX, end_unix_ns: 0, sources, lost: BTreeMap::new() }
    }

    fn add_part(&mut self, Part { number, found, snapshot }: Part<'_>, look: &Look) {
        // As a line of the recording has it.
        let start_unix_ns = snapshot.start_unix_ns / 1_000 * 1_000;
        self.start_unix_ns = self.start_unix_ns.min(start_unix_ns);
        self.end_unix_ns = self.end_unix_ns.max(start_unix_ns.saturating_add(snapshot.duration_ns));
        let of = OfSource::new(found, look);
        let into = match &mut self.sources[number] {
            Some(into) => {
                into.add(of);
                into
            }
            into => into.insert(of),
        };
        into.merger.add_copy(snapshot);
    }

    fn add(&mut self, later: Slot) {
        self.start_unix_ns = self.start_unix_ns.min(later.start_unix_ns);
        self.end_unix_ns = self.end_unix_ns.max(later.end_unix_ns);
        super::add_lost(&mut self.lost, later.lost);
        for (of, later) in self.sources.iter_mut().zip(later.sources) {
            match (of.as_mut(), later) {
                (Some(of), Some(later)) => of.add(later),
                (None, later) => *of = later,
                (Some(_), None) => {}
            }
        }
    }
}

impl OfSource {
    /// Without its snapshot.
    fn new(found: Found<'static>, look: &Look) -> Self {
        let headline = look.sources.iter().find(|headline| headline.source == found.card.name);
        let held_up = headline.and_then(|headline| headline.held_up.as_ref());
        let unexplained = found.unexplained();
        OfSource {
            merger: Merger::default(),
            late: headline.map_or(unexplained.events, |headline| headline.late),
            late_max_ns: headline.and_then(|headline| headline.late_of.as_ref()).map_or(0, |of| of.max_ns),
            held_up: held_up.map_or(0, |held_up| held_up.late),
            held_up_max_ns: held_up.map_or(0, |held_up| held_up.max_ns),
            late_ns: headline.map_or(unexplained.total_ns, |headline| headline.late_ns),
            found,
        }
    }

    fn add(&mut self, mut later: OfSource) {
        self.found.add(&later.found);
        later.merger.take().into_iter().for_each(|snapshot| self.merger.add(snapshot));
        self.late = self.late.saturating_add(later.late);
        self.late_max_ns = self.late_max_ns.max(later.late_max_ns);
        self.held_up = self.held_up.saturating_add(later.held_up);
        self.held_up_max_ns = self.held_up_max_ns.max(later.held_up_max_ns);
        self.late_ns = self.late_ns.saturating_add(later.late_ns);
    }
}

/// What all slots of a source have found.
pub fn whole<'a>(card: &Card, slots: impl Iterator<Item = &'a Slot>) -> Option<Found<'static>> {
    let mut whole: Option<Found<'static>> = None;
    for of in slots.flat_map(|slot| &slot.sources).flatten().filter(|of| of.found.card.name == card.name) {
        match &mut whole {
            Some(whole) => whole.add(&of.found),
            None => whole = Some(of.found.clone()),
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use whylate_model::Series;
    use whylate_model::sources::WQ;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn snapshot(second: u64) -> Snapshot {
        let mut snapshot = Snapshot::new(WQ.name, "made", "web1", second * SECOND_NS);
        snapshot.duration_ns = SECOND_NS;
        snapshot.series.push(Series {
            labels: [("handler".to_owned(), format!("h{}", second % 3))].into(),
            histograms: [("latency".to_owned(), [1_000 + second, 2_000].into_iter().collect())].into(),
            ..Series::default()
        });
        snapshot
    }

    fn add(slots: &mut Slots, second: u64, lost: BTreeMap<String, u64>) {
        let mut snapshot = snapshot(second);
        let found = Found::of_part(&WQ, &mut snapshot);
        slots.add(vec![Part { number: 0, found, snapshot: &snapshot }], &Look::default(), lost, 1);
    }

    fn slots(moments: u64) -> Slots {
        let mut slots = Slots::default();
        for second in 0..moments {
            add(&mut slots, second, [("torn".to_owned(), 1)].into());
        }
        slots
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn slots_have_what_the_moments_have(moments in 1u64..6_000) {
            let mut slots = slots(moments);
            prop_assert!(slots.len() <= 2 * MOST);
            slots.narrow();
            prop_assert!(slots.len() <= MOST);
            let (counted, each) = slots.moments();
            prop_assert!(counted == moments && each.is_power_of_two());
            prop_assert_eq!(slots.len() as u64, moments.div_ceil(each));
            let found = whole(&WQ, slots.iter()).expect("it is there");
            prop_assert_eq!((found.figures().count(), found.duration_ns), (2 * moments, moments * SECOND_NS));
            prop_assert_eq!(slots.iter().map(|slot| slot.lost["torn"]).sum::<u64>(), moments);
            let merged = slots.merged();
            let counts = merged.iter().flatten().flatten().map(|snapshot| snapshot.total("latency").count());
            prop_assert_eq!(counts.sum::<u64>(), 2 * moments);
            prop_assert!(merged.iter().flatten().flatten().all(|snapshot| snapshot.series.len() <= 3));
        }
    }

    #[test]
    fn a_span_of_slots_has_their_snapshots_and_no_others() {
        let slots = slots(10);
        let (from_ns, to_ns) = slots.span_unix_ns(3, 5);
        let replayed = (0..10).filter(|second| (second + 1) * SECOND_NS > from_ns && second * SECOND_NS <= to_ns);
        assert_eq!(replayed.collect::<Vec<u64>>(), [3, 4, 5]);
        assert_eq!(slots.span_unix_ns(0, 9), (0, 10 * SECOND_NS));
    }

    #[test]
    fn a_span_before_or_after_the_clock_was_set_back_has_no_other_snapshots() {
        let mut slots = Slots::default();
        let seconds = [100, 101, 102, 7, 8, 9];
        for second in seconds {
            add(&mut slots, second, BTreeMap::new());
        }
        for (first, last) in [(0, 0), (1, 2), (0, 2), (2, 2), (3, 3), (3, 5), (4, 5)] {
            let (from_ns, to_ns) = slots.span_unix_ns(first, last);
            let is_within = |second: &u64| (second + 1) * SECOND_NS > from_ns && second * SECOND_NS <= to_ns;
            let replayed: Vec<u64> = seconds.iter().copied().filter(is_within).collect();
            assert_eq!(replayed, seconds[first..=last], "{first} to {last}");
        }
    }
}
