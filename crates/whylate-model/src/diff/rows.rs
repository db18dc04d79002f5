// SPDX-License-Identifier: MIT OR Apache-2.0
//! Computes the compared quantities and decides which of them differ.

use std::collections::{BTreeMap, HashMap};

use super::block::{Block, PER_SECOND, Sample, SourceBlocks};
use super::key::{Key, Keys, Quantity, What};
use super::rank::{Verdict, benjamini_hochberg, mann_whitney, surely_changed};
use super::{FALSE_SHARE, MIN_BLOCKS, MIN_CHANGE, Measure, Outcome, Row, Unit};
use crate::sources::{Card, Merging};
use crate::{CauseKind, Histogram};

/// Minimum number of late events, and of other events, on both sides together for a verdict.
const MIN_LATE: u64 = 5;
const MIN_EVENTS: u64 = 10;
/// Minimum share of all delays for a culprit, and of all thread time for a stack, to be compared.
const MIN_DELAY_SHARE: f64 = 0.005;
const MIN_STACK_SHARE: f64 = 0.001;
/// Minimum share of the time for which a program was held up on one side, and minimum change of it.
const MIN_HELD_UP_SHARE: f64 = 0.05;
/// Culprits with delays below both limits, in total nanoseconds per second and in nanoseconds per delay, are ranked
/// last: they are a part of other delays, as the timer's interrupt is.
const MIN_DELAY_PER_S: f64 = 200_000.0;
const MIN_DELAY_EACH: f64 = 1_000_000.0;
/// Maximum delay by whylate's own threads, in nanoseconds per second: they measure on both sides, and work more where
/// more happens.
const MAX_OWN: f64 = 10_000_000.0;
/// Ranks of culprits, and of negligible ones.
const FIRST_TIER: u8 = 0;
const SLIGHT_TIER: u8 = 4;
/// Minimum number of values for a median or 99th percentile: neighboring blocks are merged up to this number, so that
/// the values of both sides scatter equally, however many there are.
const VALUES_OF_MEDIAN: u64 = 10;
const VALUES_OF_P99: u64 = 100;

/// One side's values.
struct Side<'a> {
    sources: &'a [SourceBlocks],
    /// Total snapshot time of each source, in nanoseconds.
    covered_ns: Vec<f64>,
    waiting_ns: Vec<f64>,
    programs_ns: Vec<f64>,
    delayed_per_s: f64,
    /// Blocks of sources with causes, by block number: (card index, block index).
    cells: BTreeMap<u64, Vec<(usize, usize)>>,
    /// A block with less snapshot time is discarded.
    least_ns: u64,
}

/// One side's samples of a key: (card index, block index, sample).
type Samples<'a> = Vec<(usize, usize, &'a Sample)>;

/// A row and what its rank depends on.
struct Candidate {
    row: Row,
    tier: u8,
    verdict: Option<Verdict>,
    /// Minimum change in nanoseconds per second.
    weight: f64,
    /// Minimum absolute change.
    least_change: f64,
}

/// Returns all rows, differences first.
pub(super) fn rows(
    cards: &[&'static Card],
    with_causes: &[bool],
    sides: &[Vec<SourceBlocks>; 2],
    keys: Keys,
    block_ns: u64,
) -> Vec<Row> {
    let mut by_key: HashMap<u32, [Samples<'_>; 2]> = HashMap::new();
    for (side, sources) in sides.iter().enumerate() {
        for (card, of) in sources.iter().enumerate() {
            for (at, block) in of.blocks.iter().enumerate() {
                for (&key, sample) in &block.samples {
                    by_key.entry(key).or_default()[side].push((card, at, sample));
                }
            }
        }
    }
    let both = [0, 1].map(|side| Side::new(&sides[side], with_causes, block_ns));
    let mut candidates = Vec::new();
    for (key, number) in keys.sorted() {
        if let Some(samples) = by_key.remove(&number) {
            let source = key.card.map_or("", |card| cards[card].name);
            candidates.extend(rows_of_key(&both, source, &key, &samples));
        }
    }
    judge(candidates)
}

impl<'a> Side<'a> {
    fn new(sources: &'a [SourceBlocks], with_causes: &[bool], block_ns: u64) -> Self {
        let mut cells: BTreeMap<u64, Vec<(usize, usize)>> = BTreeMap::new();
        let mut delayed_per_s = 0.0;
        let sum = |of: &SourceBlocks| of.blocks.iter().map(|block| block.covered_ns as f64).sum::<f64>();
        for (card, of) in sources.iter().enumerate().filter(|&(card, _)| with_causes[card]) {
            let delayed_ns: f64 = of.blocks.iter().map(|block| block.delayed_ns).sum();
            delayed_per_s += per_second(delayed_ns, sum(of));
            for (at, block) in of.blocks.iter().enumerate() {
                cells.entry(block.number).or_default().push((card, at));
            }
        }
        let least_ns = block_ns / 2;
        cells.retain(|_, of| of.iter().any(|&(card, at)| sources[card].blocks[at].covered_ns >= least_ns));
        Side {
            sources,
            covered_ns: sources.iter().map(sum).collect(),
            waiting_ns: sources.iter().map(|of| of.blocks.iter().map(|block| block.waiting_ns).sum()).collect(),
            programs_ns: sources
                .iter()
                .map(|of| of.blocks.iter().map(|block| block.programs_ns as f64).sum())
                .collect(),
            delayed_per_s,
            cells,
            least_ns,
        }
    }

    /// Returns the value of each block of a source, in order of time.
    fn values(&self, card: usize, samples: &Samples<'_>, value: impl Fn(&Block, &Sample) -> f64) -> Vec<f64> {
        let blocks = &self.sources[card].blocks;
        let mut by_block: Vec<Option<&Sample>> = vec![None; blocks.len()];
        samples.iter().for_each(|&(_, at, sample)| by_block[at] = Some(sample));
        let nothing = Sample::default();
        let usable = blocks.iter().zip(by_block).filter(|(block, _)| block.covered_ns >= self.least_ns);
        usable.map(|(block, sample)| value(block, sample.unwrap_or(&nothing))).collect()
    }

    /// Returns the sum over all sources with causes of an additive value, per block.
    fn values_of_all(&self, samples: &Samples<'_>, value: fn(&Sample) -> f64) -> Vec<f64> {
        let amounts: HashMap<(usize, usize), f64> =
            samples.iter().map(|&(card, at, sample)| ((card, at), value(sample))).collect();
        let cell = |of: &Vec<(usize, usize)>| {
            let rates = of.iter().map(|place @ &(card, at)| {
                let amount = amounts.get(place).copied().unwrap_or(0.0);
                per_second(amount, self.sources[card].blocks[at].covered_ns as f64)
            });
            rates.sum::<f64>()
        };
        self.cells.values().map(cell).collect()
    }
}

fn per_second(amount: f64, ns: f64) -> f64 {
    if ns > 0.0 { amount * 1e9 / ns } else { 0.0 }
}

/// Returns the rows of one key.
fn rows_of_key(sides: &[Side<'_>; 2], source: &str, key: &Key, samples: &[Samples<'_>; 2]) -> Vec<Candidate> {
    let total = |side: usize| {
        let mut sum = Sample::default();
        samples[side].iter().for_each(|(_, _, sample)| sum.add(sample));
        sum
    };
    let totals = [total(0), total(1)];
    let row = |figure: &str, distribution: &str, unit, [before, after]: [Measure; 2]| Row {
        source: source.to_owned(),
        what: key.what.clone(),
        figure: figure.to_owned(),
        distribution: distribution.to_owned(),
        unit,
        before,
        after,
        outcome: Outcome::TooLittle,
        p: None,
        q: None,
    };
    let count = totals[0].count + totals[1].count;
    let both = |value: &dyn Fn(usize) -> f64| {
        [0, 1].map(|side| Measure { count: totals[side].count, value: Some(value(side)), share: None })
    };
    let Some(card) = key.card else {
        // A culprit's delay, summed over the sources.
        let per_s = |side: usize| {
            let rates = samples[side].iter().map(|&(card, _, of)| per_second(of.amount, sides[side].covered_ns[card]));
            // An empty sum is -0.0.
            rates.sum::<f64>() + 0.0
        };
        let shares = [0, 1].map(|side| per_s(side) / sides[side].delayed_per_s.max(f64::MIN_POSITIVE));
        let mut measures = both(&per_s);
        measures.iter_mut().zip(shares).for_each(|(measure, share)| measure.share = Some(share));
        let values = |value| [0, 1].map(|side| sides[side].values_of_all(&samples[side], value));
        let is_enough = count >= MIN_LATE && shares[0].max(shares[1]) >= MIN_DELAY_SHARE;
        let row = row("delay", "", Unit::NsPerSecond, measures);
        // Slowly growing delays are as autocorrelated as a burst. Their count is not.
        let counts = values(|sample| sample.count as f64);
        let amount: f64 = samples.iter().flatten().map(|(.., of)| of.amount).sum();
        let (max_per_s, each) = (per_s(0).max(per_s(1)), amount / count.max(1) as f64);
        let is_own = matches!(&key.what, What::Culprit { who, .. } if who.is_own());
        let is_slight = max_per_s < MIN_DELAY_PER_S && each < MIN_DELAY_EACH || is_own && max_per_s < MAX_OWN;
        let mut tested = with_presence(values(|sample| sample.amount));
        tested.push(counts);
        let mut candidate = Candidate::new(row, is_enough, tested, None);
        if is_slight && candidate.tier == FIRST_TIER {
            candidate.tier = SLIGHT_TIER;
        }
        return vec![candidate];
    };
    let covered_s = |side: usize| (sides[side].covered_ns[card] / 1e9).max(f64::MIN_POSITIVE);
    let values = |value: fn(&Block, &Sample) -> f64| [0, 1].map(|side| sides[side].values(card, &samples[side], value));
    let counts_per_s = || values(|block, sample| per_second(sample.count as f64, block.covered_ns as f64));
    let ns_per_s = || values(|block, sample| per_second(sample.amount, block.covered_ns as f64));
    match (&key.of, &key.what) {
        (Quantity::Events, What::Stack { .. }) => {
            let share = |side: usize| totals[side].amount / sides[side].waiting_ns[card].max(f64::MIN_POSITIVE);
            let is_enough = count >= MIN_EVENTS && share(0).max(share(1)) >= MIN_STACK_SHARE;
            let shares = values(|block, sample| sample.amount / block.waiting_ns.max(f64::MIN_POSITIVE));
            let row = row("share", "", Unit::Share, both(&share));
            vec![Candidate { least_change: MIN_STACK_SHARE, ..Candidate::new(row, is_enough, vec![shares], None) }]
        }
        (Quantity::Events, What::HeldUp { .. }) => {
            let covered_ns = [0, 1].map(|side| sides[side].programs_ns[card]);
            if covered_ns.contains(&0.0) {
                return Vec::new();
            }
            let share = |side: usize| totals[side].amount / covered_ns[side];
            let is_enough = count >= MIN_LATE && share(0).max(share(1)) >= MIN_HELD_UP_SHARE;
            // Blocks of which nothing was read have no share.
            let shares = values(|block, sample| match block.programs_ns {
                0 => f64::NAN,
                ns => sample.amount / ns as f64,
            });
            let shares = shares.map(|shares| shares.into_iter().filter(|share| !share.is_nan()).collect());
            let row = row("held_up", "", Unit::Share, both(&share));
            let candidate = Candidate::new(row, is_enough, with_presence(shares), Some(ns_per_s()));
            vec![Candidate { least_change: MIN_HELD_UP_SHARE, ..candidate }]
        }
        (Quantity::Events, _) => {
            let row =
                row("late", "", Unit::PerHour, both(&|side| totals[side].count as f64 * 3600.0 / covered_s(side)));
            vec![Candidate::new(row, count >= MIN_LATE, with_presence(counts_per_s()), Some(ns_per_s()))]
        }
        (Quantity::Count, _) => {
            let row = row("rate", "", Unit::PerSecond, both(&|side| totals[side].count as f64 / covered_s(side)));
            vec![Candidate::new(row, count >= MIN_EVENTS, with_presence(counts_per_s()), Some(ns_per_s()))]
        }
        (Quantity::Value(name), _) => {
            let is_rate = name.ends_with(PER_SECOND) || is_count(source, name);
            let (unit, scale) = if is_rate { (Unit::PerSecond, 1.0) } else { (Unit::Share, 1e-9) };
            let row = row(name, "", unit, both(&|side| totals[side].amount * scale / covered_s(side)));
            // A share of time is nanoseconds per second.
            let weight = Some(if is_rate { [Vec::new(), Vec::new()] } else { ns_per_s() });
            vec![Candidate::new(row, count >= MIN_BLOCKS as u64, with_presence(ns_per_s()), weight)]
        }
        (Quantity::Histogram(name), _) => {
            let histograms = totals.each_ref().map(|total| total.histogram.clone().unwrap_or_default());
            let mut joint = histograms[0].clone();
            joint.merge(&histograms[1]);
            let measures = |value: fn(&Histogram) -> u64| {
                histograms.each_ref().map(|histogram| Measure {
                    count: histogram.count(),
                    value: (!histogram.is_empty()).then(|| value(histogram) as f64),
                    share: None,
                })
            };
            let quantile = |figure, of: f64, at_least, measures| {
                let shares = samples.each_ref().map(|samples| shares_above(samples, joint.quantile_ns(of), at_least));
                Candidate::new(row(figure, name, Unit::Ns, measures), true, vec![shares], Some(ns_per_s()))
            };
            let max = row("max", name, Unit::Ns, measures(Histogram::max_ns));
            let max = Candidate::new(Row { outcome: Outcome::Untested, ..max }, false, Vec::new(), None);
            vec![
                quantile("p50", 0.5, VALUES_OF_MEDIAN, measures(|histogram| histogram.printed_quantile_ns(0.5))),
                quantile("p99", 0.99, VALUES_OF_P99, measures(|histogram| histogram.printed_quantile_ns(0.99))),
                max,
            ]
        }
    }
}

/// Returns whether a figure is a count.
fn is_count(source: &str, name: &str) -> bool {
    let card = crate::sources::named(source);
    card.is_none_or(|card| matches!((card.merging)(name), Merging::Sum))
}

/// Returns the share of values above `ns` in each run of blocks with at least `at_least` values. Values in the bucket
/// of `ns` count half, so that a value common to most blocks has an effect.
fn shares_above(samples: &Samples<'_>, ns: u64, at_least: u64) -> Vec<f64> {
    let mut shares = Vec::new();
    let (mut above, mut all) = (0.0, 0);
    for histogram in samples.iter().filter_map(|(_, _, sample)| sample.histogram.as_ref()) {
        for (range, count) in histogram.iter() {
            let weight = if *range.start() > ns { 1.0 } else { 0.5 * f64::from(u8::from(*range.end() >= ns)) };
            above += weight * count as f64;
            all += count;
        }
        if all >= at_least {
            shares.push(above / all as f64);
            (above, all) = (0.0, 0);
        }
    }
    shares
}

/// Returns the values of blocks and, if only one side has any, whether each block has one. A new quantity that
/// decreases over time is as autocorrelated as a burst; its presence is not.
fn with_presence(values: [Vec<f64>; 2]) -> Vec<[Vec<f64>; 2]> {
    let is_there = |values: &Vec<f64>| values.iter().any(|&value| value != 0.0);
    if is_there(&values[0]) == is_there(&values[1]) {
        return vec![values];
    }
    let presence = values.each_ref().map(|values| values.iter().map(|&value| f64::from(value != 0.0)).collect());
    vec![values, presence]
}

impl Candidate {
    /// Creates a candidate with tests of several quantities. It differs if any of them does, so each p-value is
    /// multiplied by their number (Bonferroni). Its rank depends on `weighing`, or on the first test without it.
    fn new(row: Row, is_enough: bool, tested: Vec<[Vec<f64>; 2]>, weighing: Option<[Vec<f64>; 2]>) -> Self {
        let tier = match &row.what {
            // No culprit, or none on this machine.
            What::Culprit {
                kind: CauseKind::Unknown | CauseKind::Wakeup | CauseKind::IdleExit | CauseKind::Steal,
                ..
            } => 1,
            What::Culprit { .. } => FIRST_TIER,
            // Says what was slow, not why.
            What::HeldUp { .. } => 1,
            What::Series { .. } => 2,
            // Says that something was late, not what or why.
            What::Late { .. } => 3,
            What::Total => 5,
            What::Stack { .. } => 6,
        };
        let is_long = |[before, after]: &&[Vec<f64>; 2]| before.len().min(after.len()) >= MIN_BLOCKS;
        let verdicts =
            tested.iter().filter(|_| is_enough).filter(is_long).map(|[before, after]| mann_whitney(before, after));
        let clearest = verdicts.min_by(|one, other| one.p.total_cmp(&other.p));
        let verdict = clearest.map(|verdict| Verdict { p: (verdict.p * tested.len() as f64).min(1.0), ..verdict });
        let weight = match weighing.as_ref().or(tested.first()) {
            Some([before, after]) if !before.is_empty() && !after.is_empty() => {
                surely_changed(before, after, verdict.map_or(1.0, |verdict| verdict.widened))
            }
            _ => 0.0,
        };
        Candidate { row, tier, verdict, weight, least_change: 0.0 }
    }

    fn judge(&mut self, q: f64) {
        let Some(verdict) = self.verdict else { return };
        (self.row.p, self.row.q) = (Some(verdict.p), Some(q));
        self.row.outcome = Outcome::NoDifference;
        let (Some(before), Some(after)) = (self.row.before.value, self.row.after.value) else { return };
        let change = after - before;
        let least = (MIN_CHANGE * before.max(after)).max(self.least_change);
        // No verdict if a few outliers move the mean one way and all other blocks differ the other way.
        if q <= FALSE_SHARE && change.abs() >= least && change * verdict.z > 0.0 {
            self.row.outcome = if change > 0.0 { Outcome::More } else { Outcome::Less };
        }
    }
}

/// Ranks increases first, then decreases.
fn group(verdict: Outcome) -> u8 {
    match verdict {
        Outcome::More => 0,
        Outcome::Less => 1,
        Outcome::NoDifference | Outcome::TooLittle | Outcome::Untested => 2,
    }
}

/// Decides which candidates differ, over all rows, and sorts them.
fn judge(mut candidates: Vec<Candidate>) -> Vec<Row> {
    let tested: Vec<usize> = (0..candidates.len()).filter(|&at| candidates[at].verdict.is_some()).collect();
    let probabilities: Vec<f64> =
        tested.iter().filter_map(|&at| candidates[at].verdict).map(|verdict| verdict.p).collect();
    for (&at, q) in tested.iter().zip(benjamini_hochberg(&probabilities)) {
        candidates[at].judge(q);
    }
    // Equal candidates stay in order of their names.
    candidates.sort_by(|a, b| {
        let order = |candidate: &Candidate| (group(candidate.row.outcome), candidate.tier, candidate.row.outcome);
        let strength = |candidate: &Candidate| {
            let differs = candidate.row.outcome.differs();
            let z = candidate.verdict.map_or(0.0, |verdict| verdict.z.abs());
            if differs { (candidate.weight.abs(), z) } else { (0.0, 0.0) }
        };
        let (strong, other) = (strength(a), strength(b));
        order(a).cmp(&order(b)).then(other.0.total_cmp(&strong.0)).then(other.1.total_cmp(&strong.1))
    });
    candidates.into_iter().map(|candidate| candidate.row).collect()
}
