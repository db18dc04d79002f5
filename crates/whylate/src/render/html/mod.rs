// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports: one self-contained HTML file, which needs neither a network nor whylate.
//!
//! [`ReportBuilder`] takes the ticks of a recording, or of this machine, one by one, and keeps none of them: [`slots`]
//! merges them into a few hundred slots of time, and [`listed`] chooses the late events that are shown. The overview
//! is that of `whylate replay`, by the same code. [`page`] writes the file: tables and pictures are drawn in Rust, so
//! that they need no scripts. The script draws them again for a span that the user selects, from [`data`].
//!
//! Flame graphs are drawn in Rust ([`flame`]) and not by inferno: its script finds elements by document-wide IDs, so
//! that each of several graphs would need its own frame; it runs from event attributes, which a strict
//! Content-Security-Policy forbids; and its graphs could not follow a selected span.

mod compare;
mod data;
mod event;
mod flame;
mod headline;
mod listed;
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
use whylate_model::overview::{Gatherer, Overview, SourceSummary, not_recorded};
use whylate_model::recording::{Header, Line};
use whylate_model::sources::named;
use whylate_model::{Card, LateEvent, Merger, Snapshot, Stack};

pub use compare::Compared;
pub use page::{Made, write};
pub use read::recorded;

use crate::engine::ticks::{Tick, add_lost};
use crate::render::text::offcpu::chains::parts_of;
use crate::store::play::{gap_message, kept_message};
use headline::{Victim, Victims};
use listed::{ListedEvent, ListedEvents};
use raw::{Embedded, Raw, Thinned};
use rows::{Chains, Culprits, Delay, Stacks};
use slots::{Slots, SourceTick};

/// Maximum number of gaps that are listed.
const GAPS: usize = 20;

/// Builds a report from ticks. Memory is bounded, however many there are.
pub struct ReportBuilder {
    header: Header,
    cards: Vec<&'static Card>,
    slots: Slots,
    rank_by: By,
    gatherer: Gatherer,
    listed: ListedEvents,
    victims: Victims,
    culprits: Culprits,
    /// Stacks by source; the fields that follow are by source too.
    stacks: Vec<Stacks>,
    chains: Vec<Chains>,
    /// Stacks of the newest snapshot. `None` if its line has them, which the reader keeps.
    last_stacks: Vec<Option<Vec<Stack>>>,
    /// Events lost by shared parts of the sources, by reason: in total, and since the last tick.
    lost: BTreeMap<String, u64>,
    lost_since: BTreeMap<String, u64>,
    raw: Raw,
    missing: Vec<String>,
    /// Why the recording was written.
    kept: Vec<String>,
}

/// The content of a page.
pub struct Report {
    pub header: Header,
    pub cards: Vec<&'static Card>,
    pub look: Overview,
    pub slots: Slots,
    /// Snapshots by slot and source.
    pub merged: Vec<Vec<Option<Snapshot>>>,
    /// Snapshots by source, merged over all slots, with the threads that wait at the end.
    pub whole: Vec<Option<Snapshot>>,
    pub found: Vec<SourceSummary<'static>>,
    pub stacks: Vec<Stacks>,
    pub chains: Vec<Chains>,
    pub culprits: Culprits,
    /// How culprits are ranked.
    pub rank_by: By,
    pub late: Vec<ListedEvent>,
    /// Number of late events, including those that are not shown.
    pub late_count: u64,
    /// The victim with the longest total wait.
    pub victim: Option<Victim>,
    pub embedded: Embedded,
    /// A message for each part of the span that is missing.
    pub missing: Vec<String>,
    /// A message for each reason why the recording was written.
    pub kept: Vec<String>,
    /// Time zone of the recorded machine.
    pub zone: TimeZone,
}

impl Report {
    /// Returns the sources with their numbers, in the order of the overview of `first`: those that were late come first.
    fn ordered_as(&self, first: &Report) -> Vec<(usize, &'static Card)> {
        let place = |card: &Card| first.look.sources.iter().position(|of| of.source == card.name);
        let mut order: Vec<(usize, &'static Card)> = self.cards.iter().copied().enumerate().collect();
        order.sort_by_key(|(_, card)| place(card).unwrap_or(usize::MAX));
        order
    }

    /// Returns the snapshot of a source over all slots, and those of each slot: what is known at the end of a slot may
    /// be gone at the end of all.
    pub fn snapshots(&self, number: usize) -> impl Iterator<Item = &Snapshot> {
        self.whole[number].iter().chain(self.merged.iter().flat_map(move |of| &of[number]))
    }
}

impl ReportBuilder {
    /// Starts a report of a recording with this header, with culprits ranked by `rank_by`.
    ///
    /// # Errors
    /// Fails if memory is exhausted.
    pub fn new(header: Header, rank_by: By) -> anyhow::Result<Self> {
        let cards: Vec<&'static Card> = header.sources.iter().filter_map(|of| named(&of.source)).collect();
        Ok(ReportBuilder {
            slots: Slots::default(),
            rank_by,
            gatherer: Gatherer::for_cards(cards.clone(), rank_by),
            listed: ListedEvents::default(),
            victims: Victims::ranked_by(rank_by),
            culprits: Culprits::default(),
            stacks: cards.iter().map(|_| Stacks::default()).collect(),
            chains: cards.iter().map(|_| Chains::default()).collect(),
            last_stacks: cards.iter().map(|_| Some(Vec::new())).collect(),
            lost: BTreeMap::new(),
            lost_since: BTreeMap::new(),
            raw: Raw::begin(&header)?,
            missing: Vec::new(),
            kept: Vec::new(),
            cards,
            header,
        })
    }

    /// Adds a tick: takes late events and stacks out of its lines, and leaves the rest so that its memory can be reused.
    ///
    /// # Errors
    /// When memory is exhausted.
    pub fn tick(&mut self, Tick { lines, repeated, .. }: &mut Tick) -> anyhow::Result<()> {
        self.raw.tick(lines)?;
        let slot = self.slots.next();
        // The account is read after the snapshots, when the next ones have started. A replay counts it with the next
        // ones.
        let lost = std::mem::take(&mut self.lost_since);
        let mut tick_gatherer = Gatherer::for_cards(self.cards.clone(), self.rank_by);
        let (mut found, mut snapshots, mut has_late) = (Vec::new(), Vec::new(), false);
        for line in lines {
            match line {
                Line::Snapshot(snapshot) => {
                    let Some(number) = self.cards.iter().position(|card| card.name == snapshot.source) else {
                        continue;
                    };
                    for event in std::mem::take(&mut snapshot.late) {
                        has_late = true;
                        self.late(slot, number, event, &mut tick_gatherer);
                    }
                    found.push(SourceSummary::of_part(self.cards[number], snapshot));
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
                Line::Kept(kept) if self.kept.len() < GAPS => self.kept.push(kept_message(kept)),
                _ => {}
            }
        }
        if found.is_empty() {
            add_lost(&mut self.lost_since, lost);
            return Ok(());
        }
        // Most ticks have no late event.
        let look = if has_late { tick_gatherer.finish_with(&found, Vec::new()) } else { Overview::default() };
        for culprit in &look.culprits {
            for of in &culprit.victims {
                let delay = Delay { events: of.events, total_ns: of.total_ns, worst_ns: of.worst_ns };
                // In each tick, a single thread of a name has its TID.
                let by_name = (self.rank_by == By::Name).then(|| culprit.who.by_name());
                self.culprits.add(slot, culprit.kind, by_name.as_ref().unwrap_or(&culprit.who), &of.source, delay);
            }
        }
        let parts = found.into_iter().zip(snapshots);
        let parts = parts.map(|(found, (number, snapshot))| SourceTick { number, found, snapshot }).collect();
        if self.slots.add(parts, &look, lost, self.cards.len()) {
            self.coarsen();
        }
        Ok(())
    }

    fn late(&mut self, slot: u32, number: usize, event: LateEvent, tick_gatherer: &mut Gatherer) {
        let card = self.cards[number];
        tick_gatherer.add_kept(card, &event);
        self.gatherer.add_kept(card, &event);
        if !card.is_late(&event, &self.cards) {
            return;
        }
        // Only sources that follow waits know their chains.
        if card.held_up.is_some() {
            for (frames, ns) in parts_of(&event, Root::Process) {
                self.chains[number].add(slot, frames, ns);
            }
        }
        self.victims.add(card, &event);
        self.listed.add(slot, card, event);
    }

    /// Merges pairs of neighboring slots.
    fn coarsen(&mut self) {
        self.listed.coarsen();
        self.culprits.coarsen();
        self.stacks.iter_mut().for_each(Stacks::coarsen);
        self.chains.iter_mut().for_each(Chains::coarsen);
    }

    /// Returns whether the embedded recording has only a part of the data.
    pub fn is_thinned(&self) -> bool {
        self.raw.is_thinned()
    }

    /// Returns whether there was no snapshot.
    pub fn is_empty(&self) -> bool {
        self.slots.len() == 0
    }

    /// Adds messages about missing data.
    pub fn add_missing(&mut self, missing: impl IntoIterator<Item = String>) {
        self.missing.extend(missing);
    }

    /// Takes the stacks of the newest snapshots that came without them from their lines.
    fn add_last_lines(&mut self, lines: &BTreeMap<String, Vec<u8>>) {
        for (card, last) in self.cards.iter().zip(&mut self.last_stacks).filter(|(_, last)| last.is_none()) {
            if let Some(Ok(Line::Snapshot(snapshot))) = lines.get(card.name).map(|text| Line::parse(text)) {
                *last = Some(snapshot.stacks);
            }
        }
    }

    /// Drops the messages about gaps, for callers that add those of the reader.
    pub fn clear_missing(&mut self) {
        self.missing.clear();
    }

    /// Finishes the report.
    ///
    /// # Errors
    /// Fails if memory is exhausted.
    pub fn finish(mut self) -> anyhow::Result<Report> {
        while self.slots.coarsen_if_too_many() {
            self.coarsen();
        }
        let lost_since = std::mem::take(&mut self.lost_since);
        self.slots.end(self.raw.last_unix_ns(), lost_since);
        let merged = self.slots.merged();
        let (late, late_count) = self.listed.finish();
        let last_stacks: Vec<Vec<Stack>> = self.last_stacks.into_iter().map(Option::unwrap_or_default).collect();
        let embedded = self.raw.end(&Thinned {
            header: &self.header,
            slots: &self.slots,
            cards: &self.cards,
            merged: &merged,
            stacks: &self.stacks,
            last_stacks: &last_stacks,
            late: &late,
            more_late: late_count - late.len() as u64,
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
        unmeasured.extend(SourceSummary::set_aside(&mut found, &self.header.sources));
        let mut limitations = self.header.limitations.clone();
        limitations.extend(not_recorded(&self.header.sources));
        let look = Overview { limitations, lost: self.lost, ..self.gatherer.finish_with(&found, unmeasured) };
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
            rank_by: self.rank_by,
            late,
            late_count,
            victim: self.victims.first(),
            embedded,
            missing: self.missing,
            kept: self.kept,
            zone,
        })
    }
}
