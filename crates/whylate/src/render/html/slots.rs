// SPDX-License-Identifier: MIT OR Apache-2.0
//! Merges a recording of any length into a few hundred slots of time, as a replay merges the ticks of a slot.

use std::collections::BTreeMap;

use whylate_model::overview::{Overview, SourceSummary};
use whylate_model::{Card, Merger, Snapshot};

/// Maximum number of slots: more can hardly be seen on a screen.
pub const MAX_SLOTS: usize = 360;

/// Maximum number of series. With more, there are fewer slots, but at least `MIN_SLOTS`.
const MAX_SERIES: usize = 100_000;
const MIN_SLOTS: usize = 60;

/// Slots in order of time. All but the last have equally many ticks.
#[derive(Debug, Default)]
pub struct Slots {
    slots: Vec<Slot>,
    /// Ticks per slot: a power of two.
    ticks_per_slot: u64,
    in_last: u64,
    ticks: u64,
    /// End of the recording.
    end_unix_ns: u64,
}

/// The data of all sources in a few consecutive ticks.
#[derive(Debug)]
pub struct Slot {
    /// Start of the first snapshot and end of the last one, in whole microseconds as in recordings.
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    /// Data by source.
    pub sources: Vec<Option<SourceSlot>>,
    /// Events lost by shared parts of the sources, by reason.
    pub lost: BTreeMap<String, u64>,
}

/// The data of one source.
#[derive(Debug)]
pub struct SourceSlot {
    pub found: SourceSummary<'static>,
    merger: Merger,
    /// Number of late events, including unexplained ones of `found`, and the longest.
    pub late: u64,
    pub late_max_ns: u64,
    /// Number of delayed waits for others, and the longest.
    pub held_up: u64,
    pub held_up_max_ns: u64,
    /// Total latency of all of these.
    pub late_ns: u64,
}

/// The data of one source in one tick.
pub struct SourceTick<'a> {
    pub number: usize,
    pub found: SourceSummary<'static>,
    /// Snapshot without stacks and late events.
    pub snapshot: &'a Snapshot,
}

impl Slots {
    /// Returns the index of the slot of the next tick.
    pub fn next(&self) -> u32 {
        let is_full = self.slots.is_empty() || self.in_last >= self.ticks_per_slot;
        (self.slots.len() as u32).saturating_sub(u32::from(!is_full))
    }

    /// Adds a tick. `look` has its late events, or is empty if there were none; `lost` has the events lost by
    /// what the sources share. Returns whether pairs of slots were merged: callers that count by slot must do the same.
    pub fn add(
        &mut self,
        sources_in_tick: Vec<SourceTick<'_>>,
        look: &Overview,
        lost: BTreeMap<String, u64>,
        sources: usize,
    ) -> bool {
        let next = self.next() as usize;
        if next == self.slots.len() {
            self.slots.push(Slot::empty(sources));
            self.in_last = 0;
        }
        self.in_last += 1;
        let slot = &mut self.slots[next];
        super::add_lost(&mut slot.lost, lost);
        sources_in_tick.into_iter().for_each(|tick| slot.add_source(tick, look));
        self.ticks_per_slot = self.ticks_per_slot.max(1);
        self.ticks += 1;
        // Counted last, as it takes longest.
        let has_too_many_series = || self.slots.len() >= 2 * MIN_SLOTS && self.series() > MAX_SERIES;
        let is_full =
            self.in_last >= self.ticks_per_slot && (self.slots.len() >= 2 * MAX_SLOTS || has_too_many_series());
        if is_full {
            self.coarsen();
        }
        is_full
    }

    fn series(&self) -> usize {
        self.slots.iter().flat_map(|slot| &slot.sources).flatten().map(|of| of.merger.series()).sum()
    }

    fn coarsen(&mut self) {
        let is_odd = self.slots.len() % 2 == 1;
        let mut merged: Vec<Slot> = Vec::with_capacity(self.slots.len() / 2 + 1);
        for (number, slot) in std::mem::take(&mut self.slots).into_iter().enumerate() {
            match merged.last_mut() {
                Some(last) if number % 2 == 1 => last.add(slot),
                _ => merged.push(slot),
            }
        }
        self.in_last = if is_odd { self.in_last } else { self.in_last + self.ticks_per_slot };
        self.ticks_per_slot *= 2;
        self.slots = merged;
    }

    /// Merges pairs of slots if there are more than the maximum. Returns whether it did.
    pub fn coarsen_if_too_many(&mut self) -> bool {
        let is_too_many = self.slots.len() > MAX_SLOTS;
        if is_too_many {
            self.coarsen();
        }
        is_too_many
    }

    /// Adds the losses since the last tick, and the end of the recording.
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

    /// Returns the number of ticks in total, and per slot.
    pub fn ticks(&self) -> (u64, u64) {
        (self.ticks, self.ticks_per_slot)
    }

    /// Takes the snapshot of each source in each slot.
    pub fn merged(&mut self) -> Vec<Vec<Option<Snapshot>>> {
        let of_slot =
            |slot: &mut Slot| slot.sources.iter_mut().map(|of| of.as_mut().and_then(|of| of.merger.take())).collect();
        self.slots.iter_mut().map(of_slot).collect()
    }

    /// Returns the span that `replay` must be given for the data of these slots: a snapshot that ends when the span
    /// begins is outside of it, and one that begins when it ends is inside.
    pub fn span_unix_ns(&self, first: usize, last: usize) -> (u64, u64) {
        let (start_ns, end_ns) = match (self.slots.get(first), self.slots.get(last)) {
            (Some(first), Some(last)) => (first.start_unix_ns, last.end_unix_ns),
            _ => return (0, 0),
        };
        // If the clock was set back, the adjacent slots may have unrelated times.
        let before = first.checked_sub(1).and_then(|before| self.slots.get(before));
        let before = before.filter(|before| before.start_unix_ns <= start_ns);
        let after = self.slots.get(last + 1).filter(|after| end_ns <= after.end_unix_ns);
        let is_last = last + 1 == self.slots.len();
        let from_ns = before.map_or(start_ns, |before| before.end_unix_ns);
        let to_ns = match after {
            Some(after) => after.start_unix_ns.saturating_sub(1),
            None if is_last => end_ns.max(self.end_unix_ns),
            None => end_ns,
        };
        (from_ns, to_ns)
    }
}

impl Slot {
    fn empty(sources: usize) -> Self {
        let sources = (0..sources).map(|_| None).collect();
        Slot { start_unix_ns: u64::MAX, end_unix_ns: 0, sources, lost: BTreeMap::new() }
    }

    fn add_source(&mut self, SourceTick { number, found, snapshot }: SourceTick<'_>, look: &Overview) {
        // Timestamps in recordings have microseconds.
        let start_unix_ns = snapshot.start_unix_ns / 1_000 * 1_000;
        self.start_unix_ns = self.start_unix_ns.min(start_unix_ns);
        self.end_unix_ns = self.end_unix_ns.max(start_unix_ns.saturating_add(snapshot.duration_ns));
        let of = SourceSlot::new(found, look);
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

impl SourceSlot {
    /// Starts with an empty merger.
    fn new(found: SourceSummary<'static>, look: &Overview) -> Self {
        let headline = look.sources.iter().find(|headline| headline.source == found.card.name);
        let held_up = headline.and_then(|headline| headline.held_up.as_ref());
        let unexplained = found.unexplained();
        SourceSlot {
            merger: Merger::default(),
            late: headline.map_or(unexplained.events, |headline| headline.late),
            late_max_ns: headline.and_then(|headline| headline.late_of.as_ref()).map_or(0, |of| of.max_ns),
            held_up: held_up.map_or(0, |held_up| held_up.late),
            held_up_max_ns: held_up.map_or(0, |held_up| held_up.max_ns),
            late_ns: headline.map_or(unexplained.total_ns, |headline| headline.late_ns),
            found,
        }
    }

    fn add(&mut self, mut later: SourceSlot) {
        self.found.add(&later.found);
        later.merger.take().into_iter().for_each(|snapshot| self.merger.add(snapshot));
        self.late = self.late.saturating_add(later.late);
        self.late_max_ns = self.late_max_ns.max(later.late_max_ns);
        self.held_up = self.held_up.saturating_add(later.held_up);
        self.held_up_max_ns = self.held_up_max_ns.max(later.held_up_max_ns);
        self.late_ns = self.late_ns.saturating_add(later.late_ns);
    }
}

/// Returns the sum over all slots of a source.
pub fn whole<'a>(card: &Card, slots: impl Iterator<Item = &'a Slot>) -> Option<SourceSummary<'static>> {
    let mut whole: Option<SourceSummary<'static>> = None;
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
        let found = SourceSummary::of_part(&WQ, &mut snapshot);
        slots.add(vec![SourceTick { number: 0, found, snapshot: &snapshot }], &Overview::default(), lost, 1);
    }

    fn slots(ticks: u64) -> Slots {
        let mut slots = Slots::default();
        for second in 0..ticks {
            add(&mut slots, second, [("torn".to_owned(), 1)].into());
        }
        slots
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn slots_preserve_totals_of_ticks(ticks in 1u64..6_000) {
            let mut slots = slots(ticks);
            prop_assert!(slots.len() <= 2 * MAX_SLOTS);
            slots.coarsen_if_too_many();
            prop_assert!(slots.len() <= MAX_SLOTS);
            let (counted, each) = slots.ticks();
            prop_assert!(counted == ticks && each.is_power_of_two());
            prop_assert_eq!(slots.len() as u64, ticks.div_ceil(each));
            let found = whole(&WQ, slots.iter()).expect("it is there");
            prop_assert_eq!((found.figures().count(), found.duration_ns), (2 * ticks, ticks * SECOND_NS));
            prop_assert_eq!(slots.iter().map(|slot| slot.lost["torn"]).sum::<u64>(), ticks);
            let merged = slots.merged();
            let counts = merged.iter().flatten().flatten().map(|snapshot| snapshot.total("latency").count());
            prop_assert_eq!(counts.sum::<u64>(), 2 * ticks);
            prop_assert!(merged.iter().flatten().flatten().all(|snapshot| snapshot.series.len() <= 3));
        }
    }

    #[test]
    fn replayed_span_matches_slots() {
        let slots = slots(10);
        let (from_ns, to_ns) = slots.span_unix_ns(3, 5);
        let replayed = (0..10).filter(|second| (second + 1) * SECOND_NS > from_ns && second * SECOND_NS <= to_ns);
        assert_eq!(replayed.collect::<Vec<u64>>(), [3, 4, 5]);
        assert_eq!(slots.span_unix_ns(0, 9), (0, 10 * SECOND_NS));
    }

    #[test]
    fn replayed_span_matches_slots_after_clock_step() {
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
