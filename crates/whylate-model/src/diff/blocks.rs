// SPDX-License-Identifier: MIT OR Apache-2.0
//! Splits the snapshots of both sides into blocks of time.

use std::collections::BTreeMap;

use super::block::{Block, OpenBlock, PER_SECOND, Sample, SourceBlocks};
use super::key::{Key, Keys, Quantity, What};
use super::rows::rows;
use super::{About, Diff, Test};
use crate::folded::{Root, frames, waiting};
use crate::late::LateKind;
use crate::programs::Programs;
use crate::recording::{Header, Measured, Unmeasured};
use crate::sources::{Card, Merging, PRESENT, named};
use crate::units::format_ns;
use crate::{Histogram, LateEvent, Snapshot};

/// Number of blocks of the shorter side, if its snapshots are short enough.
const BLOCKS: u64 = 30;
/// Maximum number of blocks of the longer side.
const MAX_BLOCKS: u64 = 300;

/// Durations of the snapshots of one side.
#[derive(Clone, Debug, Default)]
pub struct Lengths {
    by_source: BTreeMap<String, (u64, u64)>,
}

impl Lengths {
    /// Adds a snapshot.
    pub fn add(&mut self, snapshot: &Snapshot) {
        let (count, sum_ns) = self.by_source.entry(snapshot.source.clone()).or_default();
        *count += 1;
        *sum_ns = sum_ns.saturating_add(snapshot.duration_ns);
    }

    /// Returns the total snapshot time of the source with the longest one.
    pub fn covered_ns(&self) -> u64 {
        self.by_source.values().map(|&(_, sum_ns)| sum_ns).max().unwrap_or(0)
    }

    /// Returns the mean length of a snapshot, of the source with the longest ones.
    fn usual_ns(&self) -> u64 {
        self.by_source.values().map(|&(count, sum_ns)| sum_ns / count.max(1)).max().unwrap_or(0)
    }
}

/// Returns the length of a block for two sides with snapshots of these lengths.
pub fn block_ns(sides: [&Lengths; 2]) -> u64 {
    let [before, after] = sides.map(Lengths::covered_ns);
    let usual_ns = sides.map(Lengths::usual_ns).into_iter().max().unwrap_or(0);
    (before.min(after) / BLOCKS).max(before.max(after) / MAX_BLOCKS).max(usual_ns).max(1)
}

/// Thresholds from which events of a source are compared; the list has `None` where one side recorded none.
#[derive(Clone, Copy, Debug)]
struct LateThresholds {
    events_ns: u64,
    held_up_ns: u64,
    /// Whether both sides used the same threshold.
    is_same: bool,
}

/// Collects the snapshots of both sides.
#[derive(Debug)]
pub struct Comparison {
    pub(super) cards: Vec<&'static Card>,
    late_from: Vec<Option<LateThresholds>>,
    block_ns: u64,
    keys: Keys,
    /// Blocks of the sides before and after, by index of the card.
    sides: [Vec<SourceBlocks>; 2],
    not_compared: Vec<Unmeasured>,
}

impl Comparison {
    /// Creates a comparison of two sides that measured these sources.
    pub fn new(measured: [&[Measured]; 2], block_ns: u64) -> Self {
        let mut comparison = Comparison {
            cards: Vec::new(),
            late_from: Vec::new(),
            block_ns: block_ns.max(1),
            keys: Keys::default(),
            sides: [Vec::new(), Vec::new()],
            not_compared: Vec::new(),
        };
        for (mine, others, side) in [(0, 1, "before"), (1, 0, "after")] {
            for one in measured[mine] {
                match (measured[others].iter().find(|other| other.source == one.source), named(&one.source)) {
                    (None, _) => comparison.exclude(&one.source, &format!("it was measured only {side}")),
                    (_, None) => comparison.exclude(&one.source, "this version does not know it"),
                    (Some(other), Some(card)) if mine == 0 => comparison.compare(card, [one, other]),
                    (Some(_), Some(_)) => {}
                }
            }
        }
        comparison
    }

    /// Adds a note on each source that left CPUs out on one side only, and on another number of online CPUs.
    pub fn compare_cpus(&mut self, sides: [&Header; 2]) {
        let [before, after] = sides.map(|side| side.cpus);
        if before != after && before > 0 && after > 0 {
            self.exclude("all", &format!("compared, though {before} CPUs were online before and {after} after"));
        }
        let names: Vec<&str> = self.cards.iter().map(|card| card.name).collect();
        for name in names {
            let [before, after] =
                sides.map(|side| side.limitations.iter().any(|one| one.source == name && one.is_about_cpus()));
            if before != after {
                let side = if before { "before" } else { "after" };
                self.exclude(name, &format!("compared, though it left CPUs out only {side}"));
            }
        }
    }

    fn exclude(&mut self, source: &str, reason: &str) {
        let (source, reason) = (source.to_owned(), reason.to_owned());
        if !self.not_compared.iter().any(|known| known.source == source && known.reason == reason) {
            self.not_compared.push(Unmeasured::new(source, reason));
        }
    }

    fn compare(&mut self, card: &'static Card, sides: [&Measured; 2]) {
        if self.cards.iter().any(|known| known.name == card.name) {
            return;
        }
        if sides[0].backend != sides[1].backend {
            let reason =
                format!("compared, though measured by {} before and by {} after", sides[0].backend, sides[1].backend);
            self.exclude(card.name, &reason);
        }
        let late_from = match sides.map(|side| side.late_from_ns) {
            [Some(before_ns), Some(after_ns)] => {
                // A recorder has one threshold for all sources, or the own one of each.
                let own_ns = card.events().late_from_ns;
                let held_up_ns = |ns| match card.held_up {
                    Some(judged) if ns == own_ns => judged.late_from_ns,
                    _ => ns,
                };
                Some(LateThresholds {
                    events_ns: before_ns.max(after_ns),
                    held_up_ns: held_up_ns(before_ns).max(held_up_ns(after_ns)),
                    is_same: before_ns == after_ns,
                })
            }
            _ => None,
        };
        match late_from {
            None => self.exclude(card.name, "late events are not compared: one side did not record any"),
            Some(LateThresholds { is_same: false, events_ns, .. }) => {
                let from = format_ns(events_ns);
                self.exclude(
                    card.name,
                    &format!("late events are compared from {from} on, as one side recorded no shorter ones"),
                );
            }
            Some(_) => {}
        }
        self.cards.push(card);
        self.late_from.push(late_from);
        self.sides.iter_mut().for_each(|side| side.push(SourceBlocks::default()));
    }

    /// Adds a snapshot of the earlier side (0) or of the later one (1). Its middle is `middle_ns` after that side's
    /// start. Snapshots of one source come in order.
    pub fn add(&mut self, side: usize, middle_ns: u64, mut snapshot: Snapshot) {
        let Some(card) = self.cards.iter().position(|card| card.name == snapshot.source) else { return };
        let number = middle_ns / self.block_ns;
        if self.sides[side][card].open.as_ref().is_some_and(|open| open.block.number != number) {
            self.close(side, card);
        }
        let mut open = self.sides[side][card].open.take().unwrap_or_default();
        open.block.number = number;
        let unexplained = std::mem::take(&mut snapshot.unexplained);
        for event in std::mem::take(&mut snapshot.late) {
            self.add_late(&mut open.block, card, &event);
        }
        if self.late_from[card].is_some_and(|from| from.is_same) && unexplained.events > 0 {
            let what = What::late(self.cards[card].events());
            let late = Sample { count: unexplained.events, amount: unexplained.total_ns as f64, histogram: None };
            self.put(&mut open.block, Key { card: Some(card), what, of: Quantity::Events }, &late);
        }
        open.merger.add(snapshot);
        self.sides[side][card].open = Some(open);
    }

    fn put(&mut self, block: &mut Block, key: Key, sample: &Sample) {
        if let Some(number) = self.keys.number(key) {
            block.samples.entry(number).or_default().add(sample);
        }
    }

    fn add_late(&mut self, block: &mut Block, card: usize, event: &LateEvent) {
        let Some(from) = self.late_from[card] else { return };
        let judged = self.cards[card].judges(event);
        let is_held_up = self.cards[card].held_up.is_some() && event.kind != LateKind::Latency;
        let from_ns = if is_held_up { from.held_up_ns } else { from.events_ns };
        if event.latency_ns < from_ns
            || event.kind == LateKind::TimerWait
            || !self.cards[card].counts(event, &self.cards)
        {
            return;
        }
        let late = Sample { count: 1, amount: event.latency_ns as f64, histogram: None };
        let what = What::late(judged);
        self.put(block, Key { card: Some(card), what, of: Quantity::Events }, &late);
        let mut by_culprit: BTreeMap<What, u64> = BTreeMap::new();
        for cause in &event.causes {
            let ns = by_culprit.entry(What::culprit(cause)).or_default();
            *ns = ns.saturating_add(cause.ns);
        }
        for (what, ns) in by_culprit {
            block.delayed_ns += ns as f64;
            let delay = Sample { count: 1, amount: ns as f64, histogram: None };
            self.put(block, Key { card: None, what, of: Quantity::Events }, &delay);
        }
    }

    /// Closes the source's block that is being filled.
    fn close(&mut self, side: usize, card: usize) {
        let Some(OpenBlock { mut block, mut merger }) = self.sides[side][card].open.take() else { return };
        let Some(snapshot) = merger.take() else { return };
        block.covered_ns = snapshot.duration_ns;
        self.add_series(&mut block, card, &snapshot);
        self.add_programs(&mut block, card, &snapshot.programs);
        for stack in waiting(&snapshot, false) {
            block.waiting_ns += stack.weight_ns as f64;
            let names: Vec<String> = frames(stack, Root::Process).into_iter().map(|frame| frame.name).collect();
            let key = Key { card: Some(card), what: What::Stack { frames: names.join(";") }, of: Quantity::Events };
            let sample = Sample { count: stack.samples, amount: stack.weight_ns as f64, histogram: None };
            self.put(&mut block, key, &sample);
        }
        self.sides[side][card].blocks.push(block);
    }

    /// Adds the share of the time for which each program was held up. Of several threads of one name, the one that was held
    /// up most stands for the program.
    fn add_programs(&mut self, block: &mut Block, card: usize, programs: &Programs) {
        block.programs_ns = programs.covered_ns;
        let mut by_name: BTreeMap<What, Sample> = BTreeMap::new();
        for program in &programs.held_up {
            let sample = by_name.entry(What::held_up(program.program())).or_default();
            sample.count += program.parts.iter().map(|part| part.latency.count()).sum::<u64>();
            sample.amount = sample.amount.max(program.share(programs.covered_ns) * programs.covered_ns as f64);
        }
        for (what, sample) in by_name {
            self.put(block, Key { card: Some(card), what, of: Quantity::Events }, &sample);
        }
    }

    fn add_series(&mut self, block: &mut Block, card: usize, snapshot: &Snapshot) {
        let mut totals: BTreeMap<&str, Histogram> = BTreeMap::new();
        for series in &snapshot.series {
            let what = What::series(&series.labels);
            let key = |of| Key { card: Some(card), what: what.clone(), of };
            for (name, histogram) in &series.histograms {
                totals.entry(name).or_default().merge(histogram);
                self.put(block, key(Quantity::Histogram(name.clone())), &histogram_sample(histogram));
            }
            let longest = series.histograms.values().max_by_key(|histogram| (histogram.count(), histogram.sum_ns()));
            if let Some(longest) = longest.filter(|longest| !longest.is_empty()) {
                let sample = Sample { histogram: None, ..histogram_sample(longest) };
                self.put(block, key(Quantity::Count), &sample);
                self.put(block, Key { card: Some(card), what: What::Total, of: Quantity::Count }, &sample);
            }
            if series.labels.is_empty() {
                // The figures of this series describe how it was measured.
                continue;
            }
            let present = series.values.get(PRESENT).copied().unwrap_or(1.0);
            let span_ns = snapshot.duration_ns as f64;
            for (name, &value) in series.values.iter().filter(|(name, value)| *name != PRESENT && value.is_finite()) {
                let is_rate = name.ends_with(PER_SECOND);
                let lasting = if is_rate { span_ns / 1e9 } else { span_ns };
                let amount = match (self.cards[card].merging)(name) {
                    Merging::Sum => value,
                    Merging::OverSpan => value * lasting,
                    Merging::OverPresence => value * present * lasting,
                    // These are of the end of the span, or derive from others.
                    Merging::Max | Merging::Latest | Merging::LastKnown | Merging::Derived(_) => continue,
                };
                let sample = Sample { count: u64::from(amount != 0.0), amount, histogram: None };
                self.put(block, key(Quantity::Value(name.clone())), &sample);
            }
        }
        for (name, histogram) in totals {
            let key = Key { card: Some(card), what: What::Total, of: Quantity::Histogram(name.to_owned()) };
            self.put(block, key, &histogram_sample(&histogram));
        }
    }

    /// Closes all blocks and compares the sides.
    pub fn finish(mut self, mut sides: [About; 2]) -> Diff {
        for (side, about) in sides.iter_mut().enumerate() {
            (0..self.cards.len()).for_each(|card| self.close(side, card));
            let covered = self.sides[side].iter().map(|of| of.blocks.iter().map(|block| block.covered_ns).sum());
            about.duration_ns = covered.max().unwrap_or(0);
        }
        let is_missing = |side: &Vec<SourceBlocks>, card: usize| side[card].blocks.is_empty();
        for card in 0..self.cards.len() {
            for (side, name) in [(0, "before"), (1, "after")] {
                if is_missing(&self.sides[side], card) && !is_missing(&self.sides[1 - side], card) {
                    self.exclude(self.cards[card].name, &format!("nothing of it was recorded {name}"));
                    // One side alone has nothing to be compared with.
                    self.sides[1 - side][card] = SourceBlocks::default();
                }
            }
        }
        for card in 0..self.cards.len() {
            let has_programs = |side: &Vec<SourceBlocks>| side[card].blocks.iter().any(|block| block.programs_ns > 0);
            let [before, after] = [has_programs(&self.sides[0]), has_programs(&self.sides[1])];
            if before != after {
                let side = if before { "before" } else { "after" };
                let reason = format!("programs held up are not compared: they were recorded only {side}");
                self.exclude(self.cards[card].name, &reason);
            }
        }
        if self.keys.dropped > 0 {
            let reason = format!("{} values were left out: there were too many different rows", self.keys.dropped);
            self.exclude("all", &reason);
        }
        let longest = |side: &Vec<SourceBlocks>| side.iter().map(|of| of.blocks.len()).max().unwrap_or(0);
        let test = Test::new(self.block_ns, [longest(&self.sides[0]), longest(&self.sides[1])]);
        let has_causes = |card: usize| self.late_from[card].is_some();
        let with_causes: Vec<bool> = (0..self.cards.len()).map(has_causes).collect();
        let rows = rows(&self.cards, &with_causes, &self.sides, self.keys, self.block_ns);
        Diff::new(sides, test, rows, self.not_compared)
    }
}

fn histogram_sample(histogram: &Histogram) -> Sample {
    Sample { count: histogram.count(), amount: histogram.sum_ns() as f64, histogram: Some(Box::new(histogram.clone())) }
}
