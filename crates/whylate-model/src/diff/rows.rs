// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is compared, and what differs of it.

use std::collections::{BTreeMap, HashMap};

use super::blocks::{Block, OfSource, PER_SECOND, Sample};
use super::key::{Key, Keys, Of, What};
use super::rank::{Verdict, benjamini_hochberg, mann_whitney, surely_changed};
use super::{FALSE_SHARE, LEAST_BLOCKS, LEAST_CHANGE, Measure, Row, Told, Unit};
use crate::sources::Card;
use crate::{CauseKind, Histogram};

/// Fewer events on both sides together tell too little of who was late and who made it late, and of how many there are.
const LEAST_LATE: u64 = 5;
const LEAST_EVENTS: u64 = 10;
/// A culprit with a smaller share of all delays, and a stack with a smaller one of all thread-seconds, is not compared.
const LEAST_DELAY: f64 = 0.005;
const LEAST_STACK: f64 = 0.001;
/// A culprit that delays all others together by less, in nanoseconds a second, and each by less, is felt by nobody: it is a
/// part of others' delays, as the timer's interrupt is.
const LEAST_FELT: f64 = 200_000.0;
const LEAST_FELT_EACH: f64 = 1_000_000.0;
/// What whylate's threads are called. Those that measure do so on both sides, have more to do where more happens, and take
/// less than that.
const OWN: &str = "whylate";
const MOST_OWN: f64 = 10_000_000.0;
/// The places of culprits, and of those that nobody feels.
const FIRST_TIER: u8 = 0;
const SLIGHT_TIER: u8 = 4;
/// How many values make a value of their own: neighbouring blocks with fewer of them are taken together. So the values
/// of both sides spread as wide, however many there are.
const VALUES_OF_MEDIAN: u64 = 10;
const VALUES_OF_P99: u64 = 100;

/// A side as it is compared.
struct Side<'a> {
    sources: &'a [OfSource],
    /// How long the snapshots of each source are in all.
    covered_ns: Vec<f64>,
    waiting_ns: Vec<f64>,
    delayed_per_s: f64,
    /// By the number of a block, the sources with causes that have it: their numbers and those of the block among theirs.
    cells: BTreeMap<u64, Vec<(usize, usize)>>,
    /// A block that is covered for less is too short to be one.
    least_ns: u64,
}

/// What one side has of a key: the source, the block among its own, and what it has.
type Samples<'a> = Vec<(usize, usize, &'a Sample)>;

/// A row, and what its place among others depends on.
struct Candidate {
    row: Row,
    tier: u8,
    verdict: Option<Verdict>,
    /// How many nanoseconds a second it adds at least, or takes away.
    weight: f64,
    /// What may be too small a change.
    least_change: f64,
}

/// All rows, what differs first.
pub(super) fn rows(
    cards: &[&'static Card],
    with_causes: &[bool],
    sides: &[Vec<OfSource>; 2],
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
            candidates.extend(of_key(&both, source, &key, &samples));
        }
    }
    judge(candidates)
}

impl<'a> Side<'a> {
    fn new(sources: &'a [OfSource], with_causes: &[bool], block_ns: u64) -> Self {
        let mut cells: BTreeMap<u64, Vec<(usize, usize)>> = BTreeMap::new();
        let mut delayed_per_s = 0.0;
        let sum = |of: &OfSource| of.blocks.iter().map(|block| block.covered_ns as f64).sum::<f64>();
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
            delayed_per_s,
            cells,
            least_ns,
        }
    }

    /// The value of each block of a source, in order of time.
    fn values(&self, card: usize, samples: &Samples<'_>, value: impl Fn(&Block, &Sample) -> f64) -> Vec<f64> {
        let blocks = &self.sources[card].blocks;
        let mut by_block: Vec<Option<&Sample>> = vec![None; blocks.len()];
        samples.iter().for_each(|&(_, at, sample)| by_block[at] = Some(sample));
        let nothing = Sample::default();
        let usable = blocks.iter().zip(by_block).filter(|(block, _)| block.covered_ns >= self.least_ns);
        usable.map(|(block, sample)| value(block, sample.unwrap_or(&nothing))).collect()
    }

    /// The same of all sources with causes together, of what adds up over time.
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

/// The rows of one key.
fn of_key(sides: &[Side<'_>; 2], source: &str, key: &Key, samples: &[Samples<'_>; 2]) -> Vec<Candidate> {
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
        told: Told::TooLittle,
        p: None,
        q: None,
    };
    let count = totals[0].count + totals[1].count;
    let both = |value: &dyn Fn(usize) -> f64| {
        [0, 1].map(|side| Measure { count: totals[side].count, value: Some(value(side)), share: None })
    };
    let Some(card) = key.card else {
        // A culprit's delay, over the sources.
        let per_s = |side: usize| {
            let rates = samples[side].iter().map(|&(card, _, of)| per_second(of.amount, sides[side].covered_ns[card]));
            // The sum of nothing has a sign.
            rates.sum::<f64>() + 0.0
        };
        let shares = [0, 1].map(|side| per_s(side) / sides[side].delayed_per_s.max(f64::MIN_POSITIVE));
        let mut measures = both(&per_s);
        measures.iter_mut().zip(shares).for_each(|(measure, share)| measure.share = Some(share));
        let values = |value| [0, 1].map(|side| sides[side].values_of_all(&samples[side], value));
        let is_enough = count >= LEAST_LATE && shares[0].max(shares[1]) >= LEAST_DELAY;
        let row = row("delay", "", Unit::NsPerSecond, measures);
        // Delays that grow slowly all the time are as alike as those of a burst. How many there are is not.
        let counts = values(|sample| sample.count as f64);
        let amount: f64 = samples.iter().flatten().map(|(.., of)| of.amount).sum();
        let (most_per_s, each) = (per_s(0).max(per_s(1)), amount / count.max(1) as f64);
        let is_own = matches!(&key.what, What::Culprit { who, .. } if who.starts_with(OWN));
        let is_slight = most_per_s < LEAST_FELT && each < LEAST_FELT_EACH || is_own && most_per_s < MOST_OWN;
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
        (Of::Events, What::Stack { .. }) => {
            let share = |side: usize| totals[side].amount / sides[side].waiting_ns[card].max(f64::MIN_POSITIVE);
            let is_enough = count >= LEAST_EVENTS && share(0).max(share(1)) >= LEAST_STACK;
            let shares = values(|block, sample| sample.amount / block.waiting_ns.max(f64::MIN_POSITIVE));
            let row = row("share", "", Unit::Share, both(&share));
            vec![Candidate { least_change: LEAST_STACK, ..Candidate::new(row, is_enough, vec![shares], None) }]
        }
        (Of::Events, _) => {
            let row =
                row("late", "", Unit::PerHour, both(&|side| totals[side].count as f64 * 3600.0 / covered_s(side)));
            vec![Candidate::new(row, count >= LEAST_LATE, with_presence(counts_per_s()), Some(ns_per_s()))]
        }
        (Of::Count, _) => {
            let row = row("rate", "", Unit::PerSecond, both(&|side| totals[side].count as f64 / covered_s(side)));
            vec![Candidate::new(row, count >= LEAST_EVENTS, with_presence(counts_per_s()), Some(ns_per_s()))]
        }
        (Of::Value(name), _) => {
            let is_rate = name.ends_with(PER_SECOND) || cards_sum(source, name);
            let (unit, scale) = if is_rate { (Unit::PerSecond, 1.0) } else { (Unit::Share, 1e-9) };
            let row = row(name, "", unit, both(&|side| totals[side].amount * scale / covered_s(side)));
            // A share of the time is so many nanoseconds of each second.
            let weight = Some(if is_rate { [Vec::new(), Vec::new()] } else { ns_per_s() });
            vec![Candidate::new(row, count >= LEAST_BLOCKS as u64, with_presence(ns_per_s()), weight)]
        }
        (Of::Histogram(name), _) => {
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
            let max = Candidate::new(Row { told: Told::Untested, ..max }, false, Vec::new(), None);
            vec![
                quantile("p50", 0.5, VALUES_OF_MEDIAN, measures(|histogram| histogram.quantile_ns(0.5))),
                quantile("p99", 0.99, VALUES_OF_P99, measures(|histogram| histogram.quantile_ns(0.99))),
                max,
            ]
        }
    }
}

/// Whether a figure counts what happens.
fn cards_sum(source: &str, name: &str) -> bool {
    let card = crate::sources::named(source);
    card.is_none_or(|card| matches!((card.merging)(name), crate::merge::Merging::Sum))
}

/// Which share of the values is above that one, in each run of blocks with that many of them. Those in its bucket are
/// above by half, so that a value that most have tells something as well.
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

/// Values of blocks and, where one side has none at all, whether each block has any. What comes and stays, but becomes less
/// and less, is as alike from block to block as a burst; that it is there is not.
fn with_presence(values: [Vec<f64>; 2]) -> Vec<[Vec<f64>; 2]> {
    let is_there = |values: &Vec<f64>| values.iter().any(|&value| value != 0.0);
    if is_there(&values[0]) == is_there(&values[1]) {
        return vec![values];
    }
    let presence = values.each_ref().map(|values| values.iter().map(|&value| f64::from(value != 0.0)).collect());
    vec![values, presence]
}

impl Candidate {
    /// Whose blocks have these values. It differs if any of them do, so each counts for so many less (Bonferroni). Its place
    /// depends on the first, or on `weighing`.
    fn new(row: Row, is_enough: bool, tested: Vec<[Vec<f64>; 2]>, weighing: Option<[Vec<f64>; 2]>) -> Self {
        let tier = match &row.what {
            // That is nobody, or nobody on this machine.
            What::Culprit {
                kind: CauseKind::Unknown | CauseKind::Wakeup | CauseKind::IdleExit | CauseKind::Steal,
                ..
            } => 1,
            What::Culprit { .. } => FIRST_TIER,
            What::Series { .. } => 2,
            // That something was late, and not who or what.
            What::Late { .. } => 3,
            What::Total => 5,
            What::Stack { .. } => 6,
        };
        let is_long = |[before, after]: &&[Vec<f64>; 2]| before.len().min(after.len()) >= LEAST_BLOCKS;
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
        self.row.told = Told::NoDifference;
        let (Some(before), Some(after)) = (self.row.before.value, self.row.after.value) else { return };
        let change = after - before;
        let least = (LEAST_CHANGE * before.max(after)).max(self.least_change);
        // Where a few blocks far away pull the mean to one side and all others lie on the other one, neither is told.
        if q <= FALSE_SHARE && change.abs() >= least && change * verdict.z > 0.0 {
            self.row.told = if change > 0.0 { Told::More } else { Told::Less };
        }
    }
}

/// What is new is asked for first, then what is gone.
fn group(told: Told) -> u8 {
    match told {
        Told::More => 0,
        Told::Less => 1,
        Told::NoDifference | Told::TooLittle | Told::Untested => 2,
    }
}

/// Decides what differs, over all rows, and puts them in order.
fn judge(mut candidates: Vec<Candidate>) -> Vec<Row> {
    let tested: Vec<usize> = (0..candidates.len()).filter(|&at| candidates[at].verdict.is_some()).collect();
    let probabilities: Vec<f64> =
        tested.iter().filter_map(|&at| candidates[at].verdict).map(|verdict| verdict.p).collect();
    for (&at, q) in tested.iter().zip(benjamini_hochberg(&probabilities)) {
        candidates[at].judge(q);
    }
    // What is equal stays in the order of its names.
    candidates.sort_by(|a, b| {
        let order = |candidate: &Candidate| (group(candidate.row.told), candidate.tier, candidate.row.told);
        let strength = |candidate: &Candidate| {
            let is_told = candidate.row.told.differs();
            let z = candidate.verdict.map_or(0.0, |verdict| verdict.z.abs());
            if is_told { (candidate.weight.abs(), z) } else { (0.0, 0.0) }
        };
        let (strong, other) = (strength(a), strength(b));
        order(a).cmp(&order(b)).then(other.0.total_cmp(&strong.0)).then(other.1.total_cmp(&strong.1))
    });
    candidates.into_iter().map(|candidate| candidate.row).collect()
}
