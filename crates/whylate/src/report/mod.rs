// SPDX-License-Identifier: MIT OR Apache-2.0
//! A report: one HTML file with everything in it, which needs neither a network nor whylate.
//!
//! [`Gathering`] takes the moments of a recording, or of this machine, one by one, and keeps none of them: [`slots`] merges
//! them into a few hundred slots of time, and [`kept`] chooses the late events that are shown. The whole look is that of
//! `whylate replay`, by the same code. [`page`] writes the file: tables and pictures are made here, so that they are there
//! without scripts; the script makes them anew of a span that somebody selects, from [`data`].
//!
//! Flame graphs are drawn here ([`flame`]) and not by inferno: its script finds its parts by ids of the whole document, so that
//! several graphs would each need a frame of their own; it is called from event attributes, which a strict
//! Content-Security-Policy forbids; and its graphs could not follow a selected span.

mod compare;
mod data;
mod event;
mod flame;
mod headline;
mod kept;
mod markup;
mod page;
mod raw;
mod read;
mod rows;
mod series;
mod slots;
mod tables;
mod timeline;

use std::collections::BTreeMap;

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::folded::Root;
use whylate_model::look::{Found, Gatherer, Look};
use whylate_model::recording::{Header, Line, Repeated};
use whylate_model::sources::named;
use whylate_model::{Card, LateEvent, Merger, Snapshot, Stack};

pub use compare::Compared;
pub use page::{Made, write};
pub use read::recorded;

use crate::commands::look::not_recorded;
use crate::output::offcpu::chains::parts_of;
use crate::recording::play::gap_message;
use headline::{Victim, Victims};
use kept::{Kept, Late};
use raw::{Inside, Raw, Thinned};
use rows::{Chains, Culprits, Delay, Stacks};
use slots::{Part, Slots};

/// So many gaps are told one by one.
const GAPS: usize = 20;

/// Takes moments in. Memory is bounded, however many there are.
pub struct Gathering {
    header: Header,
    cards: Vec<&'static Card>,
    slots: Slots,
    gatherer: Gatherer,
    kept: Kept,
    victims: Victims,
    culprits: Culprits,
    /// By the number of the source, as all that follow.
    stacks: Vec<Stacks>,
    chains: Vec<Chains>,
    /// Of the newest snapshot; `None` where its line has them, which the reader keeps.
    last_stacks: Vec<Option<Vec<Stack>>>,
    /// What sources share has lost, in all and since the last moment.
    lost: BTreeMap<String, u64>,
    lost_since: BTreeMap<String, u64>,
    raw: Raw,
    missing: Vec<String>,
}

/// Everything that a page shows.
pub struct Report {
    pub header: Header,
    pub cards: Vec<&'static Card>,
    pub look: Look,
    pub slots: Slots,
    /// By slot and the number of the source.
    pub merged: Vec<Vec<Option<Snapshot>>>,
    /// By the number of the source: over all slots, with who waits at the end.
    pub whole: Vec<Option<Snapshot>>,
    pub found: Vec<Found<'static>>,
    pub stacks: Vec<Stacks>,
    pub chains: Vec<Chains>,
    pub culprits: Culprits,
    pub late: Vec<Late>,
    /// How many events were late, those that are not shown with them.
    pub counted: u64,
    /// Whose waits took most.
    pub victim: Option<Victim>,
    pub inside: Inside,
    /// What is missing of the span, a line each.
    pub missing: Vec<String>,
    /// Where the recording was made.
    pub zone: TimeZone,
}

fn add_lost(into: &mut BTreeMap<String, u64>, lost: BTreeMap<String, u64>) {
    for (reason, count) in lost {
        let all = into.entry(reason).or_default();
        *all = all.saturating_add(count);
    }
}

impl Report {
    /// What a source saw in all, and in each slot: what is known at the end of one may be gone at the end of all.
    pub fn snapshots(&self, number: usize) -> impl Iterator<Item = &Snapshot> {
        self.whole[number].iter().chain(self.merged.iter().flat_map(move |of| &of[number]))
    }
}

impl Gathering {
    /// Of what was recorded with that header.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(header: Header) -> anyhow::Result<Self> {
        let cards: Vec<&'static Card> = header.sources.iter().filter_map(|of| named(&of.source)).collect();
        Ok(Gathering {
            slots: Slots::default(),
            gatherer: Gatherer::of(cards.clone(), By::Culprit),
            kept: Kept::default(),
            victims: Victims::default(),
            culprits: Culprits::default(),
            stacks: cards.iter().map(|_| Stacks::default()).collect(),
            chains: cards.iter().map(|_| Chains::default()).collect(),
            last_stacks: cards.iter().map(|_| Some(Vec::new())).collect(),
            lost: BTreeMap::new(),
            lost_since: BTreeMap::new(),
            raw: Raw::begin(&header)?,
            missing: Vec::new(),
            cards,
            header,
        })
    }

    /// Takes in what all saw at one time: no source has two snapshots of it.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn moment(&mut self, mut lines: Vec<Line>) -> anyhow::Result<()> {
        self.moment_of(&mut lines, &BTreeMap::new())
    }

    /// The same, of snapshots of which some have their stacks here, by source. Takes late events and stacks out of the lines,
    /// and leaves the rest for whoever can use their memory again.
    fn moment_of(&mut self, lines: &mut [Line], repeated: &BTreeMap<String, Vec<Repeated>>) -> anyhow::Result<()> {
        self.raw.moment(lines)?;
        let slot = self.slots.next();
        // The account is asked after the snapshots, when the next ones have begun: a replay of these counts it.
        let lost = std::mem::take(&mut self.lost_since);
        let mut of_moment = Gatherer::of(self.cards.clone(), By::Culprit);
        let (mut found, mut snapshots, mut has_late) = (Vec::new(), Vec::new(), false);
        for line in lines {
            match line {
                Line::Snapshot(snapshot) => {
                    let Some(number) = self.cards.iter().position(|card| card.name == snapshot.source) else {
                        continue;
                    };
                    for event in std::mem::take(&mut snapshot.late) {
                        has_late = true;
                        self.late(slot, number, event, &mut of_moment);
                    }
                    found.push(Found::of_part(self.cards[number], snapshot));
                    let stacks = std::mem::take(&mut snapshot.stacks);
                    let of_source = &mut self.stacks[number];
                    self.last_stacks[number] = match repeated.get(self.cards[number].name) {
                        Some(repeated) => {
                            repeated.iter().for_each(|of| of_source.add_repeated(slot, of));
                            None
                        }
                        None => {
                            stacks.iter().for_each(|stack| of_source.add(slot, stack));
                            Some(stacks)
                        }
                    };
                    snapshots.push((number, &**snapshot));
                }
                Line::Account(account) => {
                    add_lost(&mut self.lost, account.lost.clone());
                    add_lost(&mut self.lost_since, account.lost.clone());
                }
                Line::Gap(gap) if self.missing.len() < GAPS => self.missing.push(gap_message(gap)),
                _ => {}
            }
        }
        if found.is_empty() {
            add_lost(&mut self.lost_since, lost);
            return Ok(());
        }
        // Nothing was late in most moments.
        let look = if has_late { of_moment.finish_with(&found, Vec::new()) } else { Look::default() };
        for culprit in &look.culprits {
            for of in &culprit.victims {
                let delay = Delay { events: of.events, total_ns: of.total_ns, worst_ns: of.worst_ns };
                self.culprits.add(slot, culprit.kind, &culprit.who, &of.source, delay);
            }
        }
        let parts = found.into_iter().zip(snapshots);
        let parts = parts.map(|(found, (number, snapshot))| Part { number, found, snapshot }).collect();
        if self.slots.add(parts, &look, lost, self.cards.len()) {
            self.coarsen();
        }
        Ok(())
    }

    fn late(&mut self, slot: u32, number: usize, event: LateEvent, of_moment: &mut Gatherer) {
        let card = self.cards[number];
        of_moment.add_kept(card, &event);
        self.gatherer.add_kept(card, &event);
        if !card.is_late(&event, &self.cards) {
            return;
        }
        // Only who follows waits tells in what each was.
        if card.held_up.is_some() {
            for (frames, ns) in parts_of(&event, Root::Process) {
                self.chains[number].add(slot, frames, ns);
            }
        }
        self.victims.add(card, &event);
        self.kept.add(slot, card, event);
    }

    /// Slots have become half as many.
    fn coarsen(&mut self) {
        self.kept.coarsen();
        self.culprits.coarsen();
        self.stacks.iter_mut().for_each(Stacks::coarsen);
        self.chains.iter_mut().for_each(Chains::coarsen);
    }

    /// Whether the recording inside has only a part of what was read.
    pub fn is_thinned(&self) -> bool {
        self.raw.is_thinned()
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.slots.len() == 0
    }

    /// Says that something is missing.
    pub fn tell(&mut self, missing: impl IntoIterator<Item = String>) {
        self.missing.extend(missing);
    }

    /// Takes the stacks of newest snapshots that came without them.
    fn last_lines(&mut self, lines: &BTreeMap<String, Vec<u8>>) {
        for (card, last) in self.cards.iter().zip(&mut self.last_stacks).filter(|(_, last)| last.is_none()) {
            if let Some(Ok(Line::Snapshot(snapshot))) = lines.get(card.name).map(|text| Line::parse(text)) {
                *last = Some(snapshot.stacks);
            }
        }
    }

    /// Forgets which gaps came by: whoever has read the recording tells of them himself.
    pub fn forget_gaps(&mut self) {
        self.missing.clear();
    }

    /// What a page shows of it.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn finish(mut self) -> anyhow::Result<Report> {
        while self.slots.narrow() {
            self.coarsen();
        }
        let lost_since = std::mem::take(&mut self.lost_since);
        self.slots.end(self.raw.last_unix_ns(), lost_since);
        let merged = self.slots.merged();
        let (late, counted) = self.kept.finish();
        let last_stacks: Vec<Vec<Stack>> = self.last_stacks.into_iter().map(Option::unwrap_or_default).collect();
        let inside = self.raw.end(&Thinned {
            header: &self.header,
            slots: &self.slots,
            cards: &self.cards,
            merged: &merged,
            stacks: &self.stacks,
            last_stacks: &last_stacks,
            late: &late,
            more_late: counted - late.len() as u64,
        })?;
        let (mut whole, mut found) = (Vec::new(), Vec::new());
        for (number, (card, stacks)) in self.cards.iter().zip(last_stacks).enumerate() {
            let mut merger = Merger::default();
            merged.iter().filter_map(|of| of[number].clone()).for_each(|snapshot| merger.add(snapshot));
            let snapshot = merger.take().map(|snapshot| Snapshot { stacks, ..snapshot });
            if let (Some(snapshot), Some(mut of)) = (&snapshot, slots::whole(card, self.slots.iter())) {
                of.backend.clone_from(&snapshot.backend);
                of.remark_on(snapshot);
                found.push(of);
            }
            whole.push(snapshot);
        }
        let mut unmeasured = self.header.unmeasured.clone();
        unmeasured.extend(Found::set_aside(&mut found, &self.header.sources));
        let mut weaker = self.header.weaker.clone();
        weaker.extend(not_recorded(&self.header.sources));
        let look = Look { weaker, lost: self.lost, ..self.gatherer.finish_with(&found, unmeasured) };
        let zone = TimeZone::get(&self.header.time_zone).unwrap_or_else(|_| TimeZone::system());
        Ok(Report {
            header: self.header,
            cards: self.cards,
            look,
            slots: self.slots,
            merged,
            whole,
            found,
            stacks: self.stacks,
            chains: self.chains,
            culprits: self.culprits,
            late,
            counted,
            victim: self.victims.first(),
            inside,
            missing: self.missing,
            zone,
        })
    }
}
