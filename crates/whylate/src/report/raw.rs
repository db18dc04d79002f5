// SPDX-License-Identifier: MIT OR Apache-2.0
//! The recording inside a report: whole where it is small, and otherwise the merged snapshots of the slots, with the late
//! events that the report shows.

use std::collections::BTreeMap;
use std::io;

use whylate_model::recording::{Account, Gap, Header, Line};
use whylate_model::{Card, LateEvent, Merger, Snapshot, Stack};

use super::kept::Late;
use super::rows::{Seen, Stacks};
use super::slots::{Slot, Slots};
use crate::recording::packer::Packer;

/// No recording inside a report has more bytes: in base64 that is a third more.
const MOST_BYTES: usize = 2 << 20;
/// So many stacks of a source are in each of the merged snapshots at first; fewer where these become too large.
const STACKS: usize = 200;

/// The lines as they come, as long as there are not too many.
pub struct Raw {
    whole: Option<Packer<Vec<u8>>>,
    last_unix_ns: u64,
}

/// A recording as bytes.
#[derive(Debug, Default)]
pub struct Inside {
    pub bytes: Vec<u8>,
    /// All of it is there.
    pub is_whole: bool,
}

/// What slots have that is not in their snapshots.
pub struct Thinned<'a> {
    pub header: &'a Header,
    pub slots: &'a Slots,
    pub cards: &'a [&'static Card],
    pub merged: &'a [Vec<Option<Snapshot>>],
    /// By the number of the source.
    pub stacks: &'a [Stacks],
    pub last_stacks: &'a [Vec<Stack>],
    pub late: &'a [Late],
    /// How many late events are not among those.
    pub more_late: u64,
}

impl Raw {
    pub fn begin(header: &Header) -> io::Result<Self> {
        let whole = Packer::begin(Vec::new(), &[Line::Header(header.clone())])?;
        Ok(Raw { whole: Some(whole), last_unix_ns: header.start_unix_ns })
    }

    pub fn moment(&mut self, lines: &[Line]) -> io::Result<()> {
        let ends = lines.iter().filter_map(Line::span_unix_ns).map(|(_, last_ns)| last_ns);
        self.last_unix_ns = ends.max().unwrap_or(0).max(self.last_unix_ns);
        if let Some(whole) = &mut self.whole {
            whole.tick(lines)?;
            if whole.written().len() > MOST_BYTES {
                self.whole = None;
            }
        }
        Ok(())
    }

    /// Whether there are too many lines for all of them to be inside.
    pub fn is_thinned(&self) -> bool {
        self.whole.is_none()
    }

    /// When its last line ends.
    pub fn last_unix_ns(&self) -> u64 {
        self.last_unix_ns
    }

    /// The recording inside. Where it is thinned, each line of it is made of a slot.
    pub fn end(self, thinned: &Thinned<'_>) -> io::Result<Inside> {
        if let Some(whole) = self.whole {
            return Ok(Inside { bytes: whole.end(self.last_unix_ns)?, is_whole: true });
        }
        let (mut most, mut slots_each) = (STACKS, 1);
        loop {
            let bytes = thinned.pack(most, slots_each, self.last_unix_ns)?;
            if bytes.len() <= MOST_BYTES || slots_each >= thinned.slots.len() {
                return Ok(Inside { bytes, is_whole: false });
            }
            // To pack all of it takes long: it is not tried with a bit less.
            most /= 4;
            slots_each = (slots_each * 2).max(bytes.len().div_ceil(MOST_BYTES));
        }
    }
}

impl Thinned<'_> {
    /// With so many stacks of each source, and so many slots as one.
    fn pack(&self, most_stacks: usize, slots_each: usize, last_unix_ns: u64) -> io::Result<Vec<u8>> {
        let header = Header { every_ns: None, ..self.header.clone() };
        let mut packer = Packer::begin(Vec::new(), &[Line::Header(header)])?;
        let mut stacks: Vec<BTreeMap<u32, Vec<Stack>>> =
            self.stacks.iter().map(|of| heaviest(of, most_stacks)).collect();
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
                let is_of = |of: &&Late| numbers.contains(&(of.slot as usize)) && of.card.name == self.cards[card].name;
                let late: Vec<LateEvent> = self.late.iter().filter(is_of).map(|late| late.event.clone()).collect();
                lines.push(Line::Snapshot(Box::new(Snapshot { late, ..snapshot })));
            }
            let mut lost = BTreeMap::new();
            slots.iter().for_each(|slot| super::add_lost(&mut lost, slot.lost.clone()));
            if let Some(last) = slots.last().filter(|_| !lost.is_empty()) {
                // It is told before what follows begins, as in every recording.
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

/// The stacks with most time, by slot.
fn heaviest(of: &Stacks, most: usize) -> BTreeMap<u32, Vec<Stack>> {
    let mut all: Vec<(&Stack, &[(u32, Seen)])> = of.iter().collect();
    all.sort_by_key(|(_, seen)| std::cmp::Reverse(seen.iter().map(|(_, seen)| seen.weight_ns).sum::<u64>()));
    let mut by_slot: BTreeMap<u32, Vec<Stack>> = BTreeMap::new();
    for (place, seen) in all.into_iter().take(most) {
        for (slot, Seen { samples, weight_ns, waits }) in seen {
            let stack = Stack { samples: *samples, weight_ns: *weight_ns, waits: *waits, ..place.clone() };
            by_slot.entry(*slot).or_default().push(stack);
        }
    }
    by_slot
}

/// What is known of who is there at the end, which later merging needs.
fn with_ages(stacks: &mut Vec<Stack>, at_end: &[Stack]) {
    for last in at_end.iter().filter(|last| !last.age.is_empty()) {
        match stacks.iter_mut().find(|stack| stack.is_same_place(last)) {
            Some(stack) => stack.age = last.age.clone(),
            // It has no time that is not told elsewhere.
            None => stacks.push(Stack { samples: 0, weight_ns: 0, waits: 0, ..last.clone() }),
        }
    }
}
