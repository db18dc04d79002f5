// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums of many things by slot of time: of stacks, of chains of waits, and of culprits.

use std::collections::HashMap;

use whylate_model::folded::Frame;
use whylate_model::recording::Repeated;
use whylate_model::{CauseKind, Stack};

/// So many stacks of a source are told apart, with so many bytes of names, and so many chains; the time of others is summed up.
const MOST_STACKS: usize = 10_000;
const MOST_STACK_BYTES: usize = 64 << 20;
const MOST_CHAINS: usize = 10_000;
/// So many culprits are told apart by slot; what others did is summed up.
const MOST_CULPRITS: usize = 10_000;

/// What adds up over time.
pub trait Sum: Default {
    fn add(&mut self, other: &Self);
}

/// Of each row, the slots in which it has something, in order.
#[derive(Debug, Default)]
pub struct BySlot<S> {
    rows: Vec<Vec<(u32, S)>>,
}

impl<S: Sum> BySlot<S> {
    /// Adds to a row; slots come in order.
    pub fn add(&mut self, row: usize, slot: u32, sum: &S) {
        if self.rows.len() <= row {
            self.rows.resize_with(row + 1, Vec::new);
        }
        let of_row = &mut self.rows[row];
        match of_row.last_mut() {
            Some((last, into)) if *last == slot => into.add(sum),
            _ => {
                let mut new = S::default();
                new.add(sum);
                of_row.push((slot, new));
            }
        }
    }

    /// Two neighbouring slots become one.
    pub fn coarsen(&mut self) {
        for of_row in &mut self.rows {
            let mut kept: Vec<(u32, S)> = Vec::with_capacity(of_row.len());
            for (slot, sum) in of_row.drain(..) {
                match kept.last_mut() {
                    Some((last, into)) if *last == slot / 2 => into.add(&sum),
                    _ => kept.push((slot / 2, sum)),
                }
            }
            kept.shrink_to_fit();
            *of_row = kept;
        }
    }

    pub fn row(&self, row: usize) -> &[(u32, S)] {
        self.rows.get(row).map_or(&[], Vec::as_slice)
    }

    /// A row over all slots.
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

/// What was seen at a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub samples: u64,
    pub weight_ns: u64,
    pub waits: u64,
}

impl Sum for Seen {
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
    /// Without what was seen.
    places: Vec<Stack>,
    /// Of their names.
    bytes: usize,
    /// The row of each place that the reader of a recording knows; `None` where there was no room.
    by_number: HashMap<usize, Option<u32>>,
    seen: BySlot<Seen>,
    /// What there was no room for.
    beyond: BySlot<Seen>,
}

impl Stacks {
    pub fn add(&mut self, slot: u32, stack: &Stack) {
        let row = self.row(stack);
        self.add_to(row, slot, &Seen { samples: stack.samples, weight_ns: stack.weight_ns, waits: stack.waits });
    }

    /// The same of a stack that the reader of a recording knows.
    pub fn add_repeated(&mut self, slot: u32, of: &Repeated) {
        let row = match self.by_number.get(&of.place.number) {
            Some(&row) => row,
            None => {
                let row = self.row(&of.place.stack);
                // The reader forgets them now and then, and gives them new numbers.
                if self.by_number.len() >= 2 * MOST_STACKS {
                    self.by_number.clear();
                }
                self.by_number.insert(of.place.number, row);
                row
            }
        };
        self.add_to(row, slot, &Seen { samples: of.samples, weight_ns: of.weight_ns, waits: of.waits });
    }

    fn add_to(&mut self, row: Option<u32>, slot: u32, seen: &Seen) {
        match row {
            Some(row) => self.seen.add(row as usize, slot, seen),
            None => self.beyond.add(0, slot, seen),
        }
    }

    /// Its row; `None` where there is no room for one.
    fn row(&mut self, stack: &Stack) -> Option<u32> {
        let alike = self.known.entry(stack.place_hash()).or_default();
        let known = alike.iter().copied().find(|&at| self.places[at as usize].is_same_place(stack));
        if known.is_some() || self.places.len() >= MOST_STACKS || self.bytes >= MOST_STACK_BYTES {
            return known;
        }
        self.bytes +=
            stack.kernel.iter().chain(&stack.user).chain(stack.labels.values()).map(String::len).sum::<usize>();
        let row = self.places.len() as u32;
        alike.push(row);
        let (age, waits_for) = Default::default();
        self.places.push(Stack { samples: 0, weight_ns: 0, waits: 0, age, waits_for, ..stack.clone() });
        Some(row)
    }

    pub fn coarsen(&mut self) {
        self.seen.coarsen();
        self.beyond.coarsen();
    }

    /// Each place with what was seen there, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (&Stack, &[(u32, Seen)])> {
        self.places.iter().enumerate().map(|(at, place)| (place, self.seen.row(at)))
    }

    /// What there was no room for.
    pub fn beyond_ns(&self) -> u64 {
        self.beyond.total(0).weight_ns
    }
}

/// Its frames, and its nanoseconds by slot.
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
            None if next >= MOST_CHAINS => return self.beyond_ns.add(&ns),
            None => *self.known.entry(frames).or_insert(next),
        };
        self.ns.add(row, slot, &ns);
    }

    pub fn coarsen(&mut self) {
        self.ns.coarsen();
    }

    /// Each chain with its nanoseconds by slot, always in the same order.
    pub fn iter(&self) -> Vec<Chain<'_>> {
        let mut all: Vec<_> = self.known.iter().map(|(frames, &row)| (frames.as_slice(), self.ns.row(row))).collect();
        all.sort_by(|a, b| a.0.cmp(b.0));
        all
    }

    /// What there was no room for.
    pub fn beyond_ns(&self) -> u64 {
        self.beyond_ns
    }
}

/// What a culprit did to the events of one source.
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

/// Who delayed the events of which source.
#[derive(Debug, Default)]
pub struct Culprits {
    known: HashMap<(CauseKind, String), HashMap<String, usize>>,
    rows: usize,
    delays: BySlot<Delay>,
    beyond: BySlot<Delay>,
}

impl Culprits {
    pub fn add(&mut self, slot: u32, kind: CauseKind, who: &str, source: &str, delay: Delay) {
        let key = (kind, who.to_owned());
        if self.known.len() >= MOST_CULPRITS && !self.known.contains_key(&key) {
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

    /// Everybody with their nanoseconds by slot, and those that there was no room for without a name.
    pub fn by_slot(&self) -> impl Iterator<Item = (Option<(CauseKind, &str)>, u32, u64)> {
        let told =
            |slots: &'_ [(u32, Delay)]| slots.iter().map(|(slot, delay)| (*slot, delay.total_ns)).collect::<Vec<_>>();
        let named = self.known.iter().flat_map(move |((kind, who), by_source)| {
            let slots = by_source.values().flat_map(move |&row| told(self.delays.row(row)));
            slots.map(move |(slot, ns)| (Some((*kind, who.as_str())), slot, ns))
        });
        named.chain(told(self.beyond.row(0)).into_iter().map(|(slot, ns)| (None, slot, ns)))
    }

    /// By source, what that one did in each slot.
    pub fn of(&self, kind: CauseKind, who: &str) -> Vec<(&str, &[(u32, Delay)])> {
        let by_source = self.known.get(&(kind, who.to_owned()));
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
        fn nothing_is_lost_where_slots_become_fewer(added in prop::collection::vec((0usize..5, 0u64..1000), 0..200), times in 0usize..6) {
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
    fn stacks_with_long_names_are_bounded_by_their_bytes() {
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
    fn the_worst_of_two_slots_is_the_worse_one() {
        let mut culprits = Culprits::default();
        for (slot, ns) in [(0, 5), (1, 7), (2, 1)] {
            let delay = Delay { events: 1, total_ns: ns, worst_ns: ns };
            culprits.add(slot, CauseKind::Thread, "hog:7", "wq", delay);
        }
        culprits.coarsen();
        let delays =
            [(0, Delay { events: 2, total_ns: 12, worst_ns: 7 }), (1, Delay { events: 1, total_ns: 1, worst_ns: 1 })];
        assert_eq!(culprits.of(CauseKind::Thread, "hog:7"), [("wq", &delays[..])]);
        assert!(culprits.of(CauseKind::Work, "hog:7").is_empty());
    }

    #[test]
    fn culprits_that_there_is_no_room_for_are_one_sum() {
        let mut culprits = Culprits::default();
        for number in 0..MOST_CULPRITS + 5 {
            for source in ["wq", "offcpu"] {
                let delay = Delay { events: 1, total_ns: 3, worst_ns: 3 };
                culprits.add(0, CauseKind::Thread, &format!("a:{number}"), source, delay);
            }
        }
        let sum = |is_named: bool| -> u64 {
            culprits.by_slot().filter(|(who, ..)| who.is_some() == is_named).map(|(.., ns)| ns).sum()
        };
        assert_eq!((sum(true), sum(false)), (MOST_CULPRITS as u64 * 6, 30));
    }
}
