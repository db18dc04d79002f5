// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums by slot of time: of stacks, chains of waits, and culprits.

use std::collections::HashMap;

use whylate_model::folded::Frame;
use whylate_model::recording::Repeated;
use whylate_model::{ActorName, CauseKind, Stack};

/// Maximum number of stacks and size of their names per source, and number of chains. The time of others is added up.
const MAX_STACKS: usize = 10_000;
const MAX_STACK_BYTES: usize = 64 << 20;
const MAX_CHAINS: usize = 10_000;
/// Maximum number of culprits by slot. The delay by others is added up.
const MAX_CULPRITS: usize = 10_000;

/// A quantity that adds up over time.
pub trait Sum: Default {
    fn add(&mut self, other: &Self);
}

/// Sums by row: for each, the slots in which it is not empty, in order.
#[derive(Debug, Default)]
pub struct BySlot<S> {
    rows: Vec<Vec<(u32, S)>>,
}

impl<S: Sum> BySlot<S> {
    /// Adds to a row. Slots come in order.
    pub fn add(&mut self, row: usize, slot: u32, sum: &S) {
        if self.rows.len() <= row {
            self.rows.resize_with(row + 1, Vec::new);
        }
        let row_slots = &mut self.rows[row];
        match row_slots.last_mut() {
            Some((last, into)) if *last == slot => into.add(sum),
            _ => {
                let mut new = S::default();
                new.add(sum);
                row_slots.push((slot, new));
            }
        }
    }

    /// Merges pairs of neighboring slots.
    pub fn coarsen(&mut self) {
        for row_slots in &mut self.rows {
            let mut merged: Vec<(u32, S)> = Vec::with_capacity(row_slots.len());
            for (slot, sum) in row_slots.drain(..) {
                match merged.last_mut() {
                    Some((last, into)) if *last == slot / 2 => into.add(&sum),
                    _ => merged.push((slot / 2, sum)),
                }
            }
            merged.shrink_to_fit();
            *row_slots = merged;
        }
    }

    pub fn row(&self, row: usize) -> &[(u32, S)] {
        self.rows.get(row).map_or(&[], Vec::as_slice)
    }

    /// Returns the sum of a row over all slots.
    pub fn total(&self, row: usize) -> S {
        let mut total = S::default();
        self.row(row).iter().for_each(|(_, sum)| total.add(sum));
        total
    }
}

/// Nanoseconds.
impl Sum for u64 {
    fn add(&mut self, other: &Self) {
        *self = self.saturating_add(*other);
    }
}

/// Sums of a stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackSums {
    pub samples: u64,
    pub weight_ns: u64,
    pub waits: u64,
}

impl Sum for StackSums {
    fn add(&mut self, other: &Self) {
        self.samples.add(&other.samples);
        self.weight_ns.add(&other.weight_ns);
        self.waits.add(&other.waits);
    }
}

/// The stacks of one source.
#[derive(Debug, Default)]
pub struct Stacks {
    known: HashMap<u64, Vec<u32>>,
    /// Stacks without their sums.
    stacks: Vec<Stack>,
    /// Total size of the names.
    bytes: usize,
    /// Row of each stack that the reader of a recording has numbered. `None` for stacks beyond the limit.
    by_number: HashMap<usize, Option<u32>>,
    sums: BySlot<StackSums>,
    /// Sums of stacks beyond the limit.
    beyond: BySlot<StackSums>,
}

impl Stacks {
    pub fn add(&mut self, slot: u32, stack: &Stack) {
        let row = self.row(stack);
        self.add_to(row, slot, &StackSums { samples: stack.samples, weight_ns: stack.weight_ns, waits: stack.waits });
    }

    /// Adds a stack that the reader of a recording has numbered.
    pub fn add_repeated(&mut self, slot: u32, of: &Repeated) {
        let row = match self.by_number.get(&of.place.number) {
            Some(&row) => row,
            None => {
                let row = self.row(&of.place.stack);
                // The reader sometimes forgets its stacks and numbers them anew.
                if self.by_number.len() >= 2 * MAX_STACKS {
                    self.by_number.clear();
                }
                self.by_number.insert(of.place.number, row);
                row
            }
        };
        self.add_to(row, slot, &StackSums { samples: of.samples, weight_ns: of.weight_ns, waits: of.waits });
    }

    fn add_to(&mut self, row: Option<u32>, slot: u32, sums: &StackSums) {
        match row {
            Some(row) => self.sums.add(row as usize, slot, sums),
            None => self.beyond.add(0, slot, sums),
        }
    }

    /// Returns the row of a stack. `None` beyond the limit.
    fn row(&mut self, stack: &Stack) -> Option<u32> {
        let candidates = self.known.entry(stack.place_hash()).or_default();
        let known = candidates.iter().copied().find(|&index| self.stacks[index as usize].is_same_place(stack));
        if known.is_some() || self.stacks.len() >= MAX_STACKS || self.bytes >= MAX_STACK_BYTES {
            return known;
        }
        self.bytes +=
            stack.kernel.iter().chain(&stack.user).chain(stack.labels.values()).map(String::len).sum::<usize>();
        let row = self.stacks.len() as u32;
        candidates.push(row);
        let (age, waits_for, object) = Default::default();
        self.stacks.push(Stack { samples: 0, weight_ns: 0, waits: 0, age, waits_for, object, ..stack.clone() });
        Some(row)
    }

    pub fn coarsen(&mut self) {
        self.sums.coarsen();
        self.beyond.coarsen();
    }

    /// Returns each stack with its sums by slot.
    pub fn iter(&self) -> impl Iterator<Item = (&Stack, &[(u32, StackSums)])> {
        self.stacks.iter().enumerate().map(|(index, stack)| (stack, self.sums.row(index)))
    }

    /// Returns the time of stacks beyond the limit.
    pub fn beyond_ns(&self) -> u64 {
        self.beyond.total(0).weight_ns
    }
}

/// Frames of a chain, and its nanoseconds by slot.
pub type Chain<'a> = (&'a [Frame], &'a [(u32, u64)]);

/// Chains of waits, with their nanoseconds.
#[derive(Debug, Default)]
pub struct Chains {
    known: HashMap<Vec<Frame>, usize>,
    ns: BySlot<u64>,
    beyond_ns: u64,
}

impl Chains {
    pub fn add(&mut self, slot: u32, frames: Vec<Frame>, ns: u64) {
        let next = self.known.len();
        let row = match self.known.get(&frames) {
            Some(&row) => row,
            None if next >= MAX_CHAINS => return self.beyond_ns.add(&ns),
            None => *self.known.entry(frames).or_insert(next),
        };
        self.ns.add(row, slot, &ns);
    }

    pub fn coarsen(&mut self) {
        self.ns.coarsen();
    }

    /// Returns each chain with its nanoseconds by slot, in a fixed order.
    pub fn iter(&self) -> Vec<Chain<'_>> {
        let mut all: Vec<_> = self.known.iter().map(|(frames, &row)| (frames.as_slice(), self.ns.row(row))).collect();
        all.sort_by(|a, b| a.0.cmp(b.0));
        all
    }

    /// Returns the time of chains beyond the limit.
    pub fn beyond_ns(&self) -> u64 {
        self.beyond_ns
    }
}

/// Delay of the events of one source by a culprit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delay {
    pub events: u64,
    pub total_ns: u64,
    pub worst_ns: u64,
}

impl Sum for Delay {
    fn add(&mut self, other: &Self) {
        self.events.add(&other.events);
        self.total_ns.add(&other.total_ns);
        self.worst_ns = self.worst_ns.max(other.worst_ns);
    }
}

/// Delays by culprit and source.
#[derive(Debug, Default)]
pub struct Culprits {
    known: HashMap<(CauseKind, ActorName), HashMap<String, usize>>,
    rows: usize,
    delays: BySlot<Delay>,
    beyond: BySlot<Delay>,
}

impl Culprits {
    pub fn add(&mut self, slot: u32, kind: CauseKind, who: &ActorName, source: &str, delay: Delay) {
        let key = (kind, who.clone());
        if self.known.len() >= MAX_CULPRITS && !self.known.contains_key(&key) {
            return self.beyond.add(0, slot, &delay);
        }
        let by_source = self.known.entry(key).or_default();
        let row = *by_source.entry(source.to_owned()).or_insert_with(|| {
            self.rows += 1;
            self.rows - 1
        });
        self.delays.add(row, slot, &delay);
    }

    pub fn coarsen(&mut self) {
        self.delays.coarsen();
        self.beyond.coarsen();
    }

    /// Returns nanoseconds by culprit and slot. Culprits beyond the limit are `None`.
    pub fn by_slot(&self) -> impl Iterator<Item = (Option<(CauseKind, &ActorName)>, u32, u64)> {
        let slot_ns =
            |slots: &'_ [(u32, Delay)]| slots.iter().map(|(slot, delay)| (*slot, delay.total_ns)).collect::<Vec<_>>();
        let named = self.known.iter().flat_map(move |((kind, who), by_source)| {
            let slots = by_source.values().flat_map(move |&row| slot_ns(self.delays.row(row)));
            slots.map(move |(slot, ns)| (Some((*kind, who)), slot, ns))
        });
        named.chain(slot_ns(self.beyond.row(0)).into_iter().map(|(slot, ns)| (None, slot, ns)))
    }

    /// Returns the delays by a culprit: by source and slot.
    pub fn delays_by(&self, kind: CauseKind, who: &ActorName) -> Vec<(&str, &[(u32, Delay)])> {
        // Ranked by name, delays are kept without the TID that a single thread of the name is shown with.
        let known = |who: ActorName| self.known.get(&(kind, who));
        let by_source = known(who.clone()).or_else(|| known(who.by_name()));
        let mut all: Vec<_> =
            by_source.into_iter().flatten().map(|(source, &row)| (source.as_str(), self.delays.row(row))).collect();
        all.sort_by_key(|(source, _)| *source);
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn coarsening_preserves_row_totals(added in prop::collection::vec((0usize..5, 0u64..1000), 0..200), times in 0usize..6) {
            let mut rows: BySlot<u64> = BySlot::default();
            for (slot, (row, ns)) in added.iter().enumerate() {
                rows.add(*row, slot as u32 / 3, ns);
            }
            (0..times).for_each(|_| rows.coarsen());
            for row in 0..5 {
                let expected: u64 = added.iter().filter(|(of, _)| *of == row).map(|(_, ns)| ns).sum();
                prop_assert_eq!(rows.total(row), expected);
                prop_assert!(rows.row(row).is_sorted_by(|a, b| a.0 < b.0));
            }
        }
    }

    #[test]
    fn bounds_stacks_by_size_of_names() {
        let mut stacks = Stacks::default();
        for number in 0..100 {
            let kernel = vec![format!("{number}{}", "f".repeat(1_000_000))];
            stacks.add(0, &Stack { kernel, weight_ns: 1, ..Stack::default() });
        }
        let kept = stacks.iter().count() as u64;
        assert!((60..70).contains(&kept), "{kept}");
        assert_eq!(stacks.beyond_ns(), 100 - kept);
    }

    #[test]
    fn merged_slots_keep_the_maximum() {
        let (mut culprits, hog) = (Culprits::default(), ActorName::thread("hog", 7));
        for (slot, ns) in [(0, 5), (1, 7), (2, 1)] {
            let delay = Delay { events: 1, total_ns: ns, worst_ns: ns };
            culprits.add(slot, CauseKind::Thread, &hog, "wq", delay);
        }
        culprits.coarsen();
        let delays =
            [(0, Delay { events: 2, total_ns: 12, worst_ns: 7 }), (1, Delay { events: 1, total_ns: 1, worst_ns: 1 })];
        assert_eq!(culprits.delays_by(CauseKind::Thread, &hog), [("wq", &delays[..])]);
        assert!(culprits.delays_by(CauseKind::Work, &hog).is_empty());
    }

    #[test]
    fn adds_up_culprits_beyond_limit() {
        let mut culprits = Culprits::default();
        for number in 0..MAX_CULPRITS + 5 {
            for source in ["wq", "offcpu"] {
                let delay = Delay { events: 1, total_ns: 3, worst_ns: 3 };
                culprits.add(0, CauseKind::Thread, &ActorName::thread("a", number as u32), source, delay);
            }
        }
        let sum = |is_named: bool| -> u64 {
            culprits.by_slot().filter(|(who, ..)| who.is_some() == is_named).map(|(.., ns)| ns).sum()
        };
        assert_eq!((sum(true), sum(false)), (MAX_CULPRITS as u64 * 6, 30));
    }
}
