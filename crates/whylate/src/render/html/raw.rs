// SPDX-License-Identifier: MIT OR Apache-2.0
//! The recording embedded in a report: all of it if it is small, or else the merged snapshots of the slots, with the
//! late events that the report lists.

use std::collections::BTreeMap;
use std::io;

use whylate_model::recording::{Account, Gap, Header, Line};
use whylate_model::{Card, LateEvent, Merger, Snapshot, Stack};

use super::listed::ListedEvent;
use super::rows::{StackSums, Stacks};
use super::slots::{Slot, Slots};
use crate::engine::ticks::add_lost;
use crate::store::packer::Packer;

/// Maximum size of an embedded recording. Base64 adds a third.
const MAX_BYTES: usize = 2 << 20;
/// Number of stacks per source in the merged snapshots at first. Fewer if these become too large.
const STACKS: usize = 200;

/// The packed lines, until there are too many.
pub struct Raw {
    whole: Option<Packer<Vec<u8>>>,
    last_unix_ns: u64,
}

/// An embedded recording.
#[derive(Debug, Default)]
pub struct Embedded {
    pub bytes: Vec<u8>,
    /// Whether the embedded recording has all lines.
    pub is_whole: bool,
}

/// The content of a thinned recording.
pub struct Thinned<'a> {
    pub header: &'a Header,
    pub slots: &'a Slots,
    pub cards: &'a [&'static Card],
    pub merged: &'a [Vec<Option<Snapshot>>],
    /// Stacks by source, like `last_stacks`.
    pub stacks: &'a [Stacks],
    pub last_stacks: &'a [Vec<Stack>],
    pub late: &'a [ListedEvent],
    /// Number of late events that are not in `late`.
    pub more_late: u64,
}

impl Raw {
    pub fn begin(header: &Header) -> io::Result<Self> {
        let whole = Packer::begin(Vec::new(), &[Line::Header(header.clone())])?;
        Ok(Raw { whole: Some(whole), last_unix_ns: header.start_unix_ns })
    }

    pub fn tick(&mut self, lines: &[Line]) -> io::Result<()> {
        let ends_ns = lines.iter().filter_map(Line::span_unix_ns).map(|(_, last_ns)| last_ns);
        self.last_unix_ns = ends_ns.max().unwrap_or(0).max(self.last_unix_ns);
        if let Some(whole) = &mut self.whole {
            whole.tick(lines)?;
            if whole.written().len() > MAX_BYTES {
                self.whole = None;
            }
        }
        Ok(())
    }

    /// Returns whether there are too many lines to embed all of them.
    pub fn is_thinned(&self) -> bool {
        self.whole.is_none()
    }

    /// Returns the end of the last line.
    pub fn last_unix_ns(&self) -> u64 {
        self.last_unix_ns
    }

    /// Returns the embedded recording. Each tick of a thinned one covers one or more slots.
    pub fn end(self, thinned: &Thinned<'_>) -> io::Result<Embedded> {
        if let Some(whole) = self.whole {
            return Ok(Embedded { bytes: whole.end(self.last_unix_ns)?, is_whole: true });
        }
        let (mut max_stacks, mut slots_each) = (STACKS, 1);
        loop {
            let bytes = thinned.pack(max_stacks, slots_each, self.last_unix_ns)?;
            if bytes.len() <= MAX_BYTES || slots_each >= thinned.slots.len() {
                return Ok(Embedded { bytes, is_whole: false });
            }
            // Packing takes long, so it makes a large step.
            max_stacks /= 4;
            slots_each = (slots_each * 2).max(bytes.len().div_ceil(MAX_BYTES));
        }
    }
}

impl Thinned<'_> {
    /// Packs the recording with at most this many stacks per source, merging `slots_each` slots at a time.
    fn pack(&self, max_stacks: usize, slots_each: usize, last_unix_ns: u64) -> io::Result<Vec<u8>> {
        let header = Header { every_ns: None, ..self.header.clone() };
        let mut packer = Packer::begin(Vec::new(), &[Line::Header(header)])?;
        let mut stacks: Vec<BTreeMap<u32, Vec<Stack>>> =
            self.stacks.iter().map(|of| heaviest(of, max_stacks)).collect();
        if let Some(last) = (self.slots.len() as u32).checked_sub(1) {
            for (of, at_end) in stacks.iter_mut().zip(self.last_stacks) {
                with_ages(of.entry(last).or_default(), at_end);
            }
        }
        let slots: Vec<&Slot> = self.slots.iter().collect();
        for (chunk, slots) in slots.chunks(slots_each).enumerate() {
            let numbers = chunk * slots_each..chunk * slots_each + slots.len();
            let mut lines = Vec::new();
            for (card, of_card) in stacks.iter_mut().enumerate() {
                let mut merger = Merger::default();
                for number in numbers.clone() {
                    let Some(Some(snapshot)) = self.merged.get(number).and_then(|of| of.get(card)) else { continue };
                    let stacks = of_card.remove(&(number as u32)).unwrap_or_default();
                    merger.add(Snapshot { stacks, ..snapshot.clone() });
                }
                let Some(snapshot) = merger.take() else { continue };
                let is_of =
                    |of: &&ListedEvent| numbers.contains(&(of.slot as usize)) && of.card.name == self.cards[card].name;
                let late: Vec<LateEvent> = self.late.iter().filter(is_of).map(|late| late.event.clone()).collect();
                lines.push(Line::Snapshot(Box::new(Snapshot { late, ..snapshot })));
            }
            let mut lost = BTreeMap::new();
            slots.iter().for_each(|slot| add_lost(&mut lost, slot.lost.clone()));
            if let Some(last) = slots.last().filter(|_| !lost.is_empty()) {
                // The account precedes the start of the next tick, as in every recording.
                lines.push(Line::Account(Account { at_unix_ns: last.end_unix_ns, lost }));
            }
            if let Some(first) = slots.first().filter(|_| chunk == 0 && self.more_late > 0) {
                let (start_unix_ns, reason) = (first.start_unix_ns, "late_events".to_owned());
                lines.push(Line::Gap(Gap { start_unix_ns, duration_ns: 0, reason, count: self.more_late }));
            }
            packer.tick(&lines)?;
        }
        packer.end(last_unix_ns)
    }
}

/// Returns the stacks with most time, by slot.
fn heaviest(of: &Stacks, max_stacks: usize) -> BTreeMap<u32, Vec<Stack>> {
    let mut all: Vec<(&Stack, &[(u32, StackSums)])> = of.iter().collect();
    all.sort_by_key(|(_, sums)| std::cmp::Reverse(sums.iter().map(|(_, sums)| sums.weight_ns).sum::<u64>()));
    let mut by_slot: BTreeMap<u32, Vec<Stack>> = BTreeMap::new();
    for (stack, sums) in all.into_iter().take(max_stacks) {
        for (slot, StackSums { samples, weight_ns, waits }) in sums {
            let stack = Stack { samples: *samples, weight_ns: *weight_ns, waits: *waits, ..stack.clone() };
            by_slot.entry(*slot).or_default().push(stack);
        }
    }
    by_slot
}

/// Adds the ages of the stacks at the end, which later merging needs.
fn with_ages(stacks: &mut Vec<Stack>, at_end: &[Stack]) {
    for last in at_end.iter().filter(|last| !last.age.is_empty()) {
        match stacks.iter_mut().find(|stack| stack.is_same_place(last)) {
            Some(stack) => stack.age = last.age.clone(),
            // Its time is already counted.
            None => stacks.push(Stack { samples: 0, weight_ns: 0, waits: 0, ..last.clone() }),
        }
    }
}
