// SPDX-License-Identifier: MIT OR Apache-2.0
//! Merges the snapshots of consecutive spans into one, as if the source had been read once.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};

use crate::sources::{Card, Merging, PRESENT, named, sum_all};
use crate::{Labels, Series, Snapshot, Stack};

/// Maximum number of distinct series in a merged snapshot, and of stacks.
const MAX_ENTRIES: usize = 1 << 18;

/// Merges the snapshots of one source, in the order of their spans. Late events are left to the caller: there may be
/// many.
///
/// Merging is associative: (a + b) + c is a + (b + c), except for the last digits of averages. So neighbors that are
/// sums of equally many snapshots are merged first, and each snapshot is visited at most log2(n) times.
#[derive(Debug, Default)]
pub struct Merger {
    /// Sums of 2^n snapshots, where n is the first field.
    sums: Vec<(u32, Snapshot)>,
}

impl Merger {
    /// Returns the total duration of the snapshots that were added.
    pub fn duration_ns(&self) -> u64 {
        self.sums.iter().fold(0, |all, (_, sum)| all.saturating_add(sum.duration_ns))
    }

    /// Returns the number of series, which take most of the memory.
    pub fn series(&self) -> usize {
        self.sums.iter().map(|(_, sum)| sum.series.len()).sum()
    }

    /// Adds the snapshot of the next span, without its late events.
    pub fn add(&mut self, next: Snapshot) {
        if !self.add_to_one(&next) {
            self.sums.push((0, Snapshot { late: Vec::new(), ..next }));
        }
    }

    /// Adds a copy of the snapshot of the next span, without its late events.
    pub fn add_copy(&mut self, next: &Snapshot) {
        if !self.add_to_one(next) {
            let mut copy = next.clone();
            copy.late.clear();
            self.sums.push((0, copy));
        }
    }

    /// Adds the snapshot to the previous one, if that is a single one.
    fn add_to_one(&mut self, next: &Snapshot) -> bool {
        let Some((power, one)) = self.sums.last_mut().filter(|(power, _)| *power == 0) else { return false };
        *power = 1;
        add(one, next);
        while let [.., (of_one, _), (of_other, _)] = self.sums[..]
            && of_one == of_other
        {
            self.add_last_two();
        }
        true
    }

    fn add_last_two(&mut self) {
        if let Some((power, last)) = self.sums.pop()
            && let Some((into, sum)) = self.sums.last_mut()
        {
            *into = power + 1;
            add(sum, &last);
        }
    }

    /// Returns the merged snapshot and resets the merger; `None` if nothing was added.
    pub fn take(&mut self) -> Option<Snapshot> {
        while self.sums.len() > 1 {
            self.add_last_two();
        }
        self.sums.pop().map(|(_, sum)| sum)
    }
}

/// Adds the snapshot of the next span.
fn add(sum: &mut Snapshot, next: &Snapshot) {
    let spans = (sum.duration_ns, next.duration_ns);
    sum.duration_ns = sum.duration_ns.saturating_add(next.duration_ns);
    sum.ended_ns = next.ended_ns;
    sum.uninterruptible.clone_from(&next.uninterruptible);
    if sum.backend != next.backend {
        sum.backend = "several".to_owned();
    }
    sum.probe.run_ns = sum.probe.run_ns.saturating_add(next.probe.run_ns);
    sum.probe.runs = sum.probe.runs.saturating_add(next.probe.runs);
    sum.unexplained.events = sum.unexplained.events.saturating_add(next.unexplained.events);
    sum.unexplained.total_ns = sum.unexplained.total_ns.saturating_add(next.unexplained.total_ns);
    for (reason, count) in &next.lost {
        match sum.lost.get_mut(reason) {
            Some(lost) => *lost = lost.saturating_add(*count),
            None => drop(sum.lost.insert(reason.clone(), *count)),
        }
    }
    let dropped =
        add_series(sum, &next.series, spans) + add_stacks(sum, &next.stacks) + sum.programs.add(&next.programs);
    if dropped > 0 {
        *sum.lost.entry("merged_full".to_owned()).or_default() += dropped;
    }
}

/// Returns the number of series without room.
fn add_series(sum: &mut Snapshot, next: &[Series], spans: (u64, u64)) -> u64 {
    let merging = named(&sum.source).map_or(sum_all as fn(&str) -> Merging, |card: &Card| card.merging);
    let mut index: Option<SeriesIndex> = None;
    let mut later: Vec<Option<&Series>> = vec![None; sum.series.len()];
    let (mut dropped, mut expected) = (0, 0);
    for series in next {
        // Most snapshots have the same series as the one before, in the same order.
        let is_expected = sum.series.get(expected).is_some_and(|next| next.labels == series.labels);
        let known = match is_expected {
            true => Some(expected),
            false => index.get_or_insert_with(|| SeriesIndex::new(&sum.series)).find(&sum.series, &series.labels),
        };
        expected = known.map_or(expected, |at| at + 1);
        match known {
            Some(at) if later[at].is_none() => later[at] = Some(series),
            // The snapshot has two series with equal labels.
            Some(at) => sum.series[at].absorb(series),
            None if sum.series.len() >= MAX_ENTRIES => dropped += 1,
            None => {
                index.iter_mut().for_each(|index| index.add(sum.series.len(), &series.labels));
                let mut new = Series { labels: series.labels.clone(), ..Series::default() };
                if has_presence(merging) {
                    // The subject did not exist before.
                    new.values.insert(PRESENT.to_owned(), 0.0);
                }
                sum.series.push(new);
                later.push(Some(series));
            }
        }
    }
    for (series, later) in sum.series.iter_mut().zip(later) {
        merge_next(series, later, spans, merging);
    }
    dropped
}

/// Positions of series. Labels are hashed and not kept: a snapshot has hundreds, and a day of snapshots is merged.
struct SeriesIndex {
    hasher: RandomState,
    by_hash: HashMap<u64, Vec<usize>>,
}

impl SeriesIndex {
    fn new(series: &[Series]) -> Self {
        let mut index = SeriesIndex { hasher: RandomState::new(), by_hash: HashMap::new() };
        series.iter().enumerate().for_each(|(at, series)| index.add(at, &series.labels));
        index
    }

    fn add(&mut self, at: usize, labels: &Labels) {
        self.by_hash.entry(self.hasher.hash_one(labels)).or_default().push(at);
    }

    fn find(&self, series: &[Series], labels: &Labels) -> Option<usize> {
        let alike = self.by_hash.get(&self.hasher.hash_one(labels))?;
        alike.iter().copied().find(|&at| series[at].labels == *labels)
    }
}

/// Returns the number of stacks without room.
fn add_stacks(sum: &mut Snapshot, next: &[Stack]) -> u64 {
    let mut known: HashMap<u64, Vec<usize>> = HashMap::new();
    for (at, stack) in sum.stacks.iter_mut().enumerate() {
        // Ages, holders and objects are those of the threads at the end.
        stack.age = crate::Histogram::default();
        stack.waits_for = None;
        stack.object = None;
        known.entry(stack.place_hash()).or_default().push(at);
    }
    let mut dropped = 0;
    for stack in next {
        let alike = known.entry(stack.place_hash()).or_default();
        match alike.iter().copied().find(|&at| sum.stacks[at].is_same_place(stack)) {
            Some(at) => {
                let into = &mut sum.stacks[at];
                into.samples = into.samples.saturating_add(stack.samples);
                into.weight_ns = into.weight_ns.saturating_add(stack.weight_ns);
                into.waits = into.waits.saturating_add(stack.waits);
                into.age.merge(&stack.age);
                into.waits_for = stack.waits_for.clone().or(into.waits_for.take());
                into.object = stack.object.clone().or(into.object.take());
            }
            None if sum.stacks.len() >= MAX_ENTRIES => dropped += 1,
            None => {
                alike.push(sum.stacks.len());
                sum.stacks.push(stack.clone());
            }
        }
    }
    dropped
}

/// Returns whether the source reports for how long the subjects of its series exist.
fn has_presence(merging: fn(&str) -> Merging) -> bool {
    matches!(merging(PRESENT), Merging::OverPresence)
}

/// Merges the series of the next span, if it has one.
fn merge_next(series: &mut Series, later: Option<&Series>, spans: (u64, u64), merging: fn(&str) -> Merging) {
    let presence = |of: &Series, span_ns: u64| of.values.get(PRESENT).copied().unwrap_or(1.0) * span_ns as f64;
    let was_there = presence(series, spans.0);
    let is_there = later.map_or(0.0, |later| presence(later, spans.1));
    let nothing = Series::default();
    let later = later.unwrap_or(&nothing);
    for (name, histogram) in &later.histograms {
        match series.histograms.get_mut(name) {
            Some(sum) => sum.merge(histogram),
            None => drop(series.histograms.insert(name.clone(), histogram.clone())),
        }
    }
    for (name, steps) in &later.steps {
        series.steps.entry(name.clone()).or_default().merge(steps);
    }
    // Without figures there is nothing to merge.
    if series.values.is_empty() && later.values.is_empty() && !has_presence(merging) {
        return;
    }
    let merged = |rule: Merging, was: Option<f64>, is: Option<f64>| {
        let averaged = |of_was: f64, of_is: f64| {
            let all = of_was + of_is;
            (all > 0.0).then(|| (was.unwrap_or(0.0) * of_was + is.unwrap_or(0.0) * of_is) / all)
        };
        match rule {
            Merging::Sum => Some(was.unwrap_or(0.0) + is.unwrap_or(0.0)),
            Merging::Max => Some(was.unwrap_or(f64::MIN).max(is.unwrap_or(f64::MIN))),
            Merging::Latest => is,
            Merging::LastKnown => is.or(was),
            Merging::OverSpan => averaged(spans.0 as f64, spans.1 as f64),
            Merging::OverPresence => averaged(was_there, is_there),
            // Derived after the others.
            Merging::Derived(_) => was.or(is),
        }
    };
    let is_presence = |name: &str| name == PRESENT && has_presence(merging);
    series.values.retain(|name, value| {
        let is = later.values.get(name).copied();
        let merged = if is_presence(name) { Some(*value) } else { merged(merging(name), Some(*value), is) };
        merged.map(|merged| *value = merged).is_some()
    });
    for (name, is) in later.values.iter().filter(|(name, _)| !is_presence(name)) {
        if !series.values.contains_key(name) {
            let merged = merged(merging(name), None, Some(*is));
            series.values.extend(merged.map(|merged| (name.clone(), merged)));
        }
    }
    if has_presence(merging) {
        let whole_ns = spans.0 as f64 + spans.1 as f64;
        let present = if whole_ns > 0.0 { (was_there + is_there) / whole_ns } else { 1.0 };
        if present < 1.0 {
            series.values.insert(PRESENT.to_owned(), present);
        } else {
            series.values.remove(PRESENT);
        }
    }
    let is_derived = |name: &&String| matches!(merging(name), Merging::Derived(_));
    let derived: Vec<String> = series.values.keys().filter(is_derived).cloned().collect();
    for name in derived {
        let Merging::Derived(from_others) = merging(&name) else { continue };
        match from_others(series) {
            Some(value) => series.values.insert(name, value),
            None => series.values.remove(&name),
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sources::CARDS;

    fn merged(snapshots: impl IntoIterator<Item = Snapshot>) -> Snapshot {
        let mut merger = Merger::default();
        snapshots.into_iter().for_each(|snapshot| merger.add(snapshot));
        merger.take().expect("something was added")
    }

    fn close(one: &Snapshot, other: &Snapshot) -> bool {
        let is_near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0);
        let values_near = one.series.iter().zip(&other.series).all(|(one, other)| {
            one.values.len() == other.values.len()
                && one.values.iter().zip(&other.values).all(|((name, a), (of, b))| name == of && is_near(*a, *b))
        });
        let without = |snapshot: &Snapshot| {
            let mut rest = snapshot.clone();
            rest.series.iter_mut().for_each(|series| series.values.clear());
            rest
        };
        values_near && without(one) == without(other)
    }

    const NAMES: [&str; 10] =
        ["working", "spinning", "utilisation", "share", "queued", "missed", "cpu", PRESENT, "starved_by", "period_ns"];

    fn series() -> impl Strategy<Value = Series> {
        let values =
            prop::collection::btree_map(prop::sample::select(NAMES.map(str::to_owned).to_vec()), 0.0..1.0, 0..6);
        (0u8..3, values, prop::collection::vec(0u64..1 << 40, 0..4)).prop_map(|(label, values, latencies)| Series {
            labels: [("handler".to_owned(), label.to_string())].into(),
            histograms: [("latency".to_owned(), latencies.into_iter().collect())].into(),
            values,
            ..Series::default()
        })
    }

    fn stack() -> impl Strategy<Value = Stack> {
        (0u8..3, 0u64..9, prop::collection::vec(0u64..1 << 40, 0..3)).prop_map(|(label, samples, ages)| Stack {
            labels: [("process".to_owned(), label.to_string())].into(),
            samples,
            weight_ns: samples * 7,
            age: ages.into_iter().collect(),
            kernel: vec!["schedule".to_owned()],
            ..Stack::default()
        })
    }

    fn snapshot(source: &'static str) -> impl Strategy<Value = Snapshot> {
        let series = prop::collection::vec(series(), 0..4);
        let stacks = prop::collection::vec(stack(), 0..4);
        (series, stacks, 1u64..5_000_000_000, 0u64..9).prop_map(move |(mut series, mut stacks, duration_ns, lost)| {
            // A source reports each series once.
            series.sort_by(|a, b| a.labels.cmp(&b.labels));
            series.dedup_by(|a, b| a.labels == b.labels);
            // A derived figure exists wherever it can be derived, and nowhere else.
            let merging = named(source).map_or(sum_all as fn(&str) -> Merging, |card| card.merging);
            for series in &mut series {
                for name in NAMES {
                    let Merging::Derived(from) = merging(name) else { continue };
                    series.values.remove(name);
                    if let Some(value) = from(series) {
                        series.values.insert(name.to_owned(), value);
                    }
                }
            }
            stacks.sort_by(|a, b| a.labels.cmp(&b.labels));
            stacks.dedup_by(|a, b| a.labels == b.labels);
            let mut snapshot = Snapshot::new(source, "made", "host", 0);
            Snapshot {
                series,
                stacks,
                duration_ns,
                lost: [("unmatched".to_owned(), lost)].into(),
                ..std::mem::replace(&mut snapshot, Snapshot::new(source, "made", "host", 0))
            }
        })
    }

    proptest! {
        #[test]
        fn merging_is_associative(
            (a, b, c) in prop::sample::select(CARDS.map(|card| card.name).to_vec())
                .prop_flat_map(|source| (snapshot(source), snapshot(source), snapshot(source))),
        ) {
            let left = merged([merged([a.clone(), b.clone()]), c.clone()]);
            let right = merged([a.clone(), merged([b.clone(), c.clone()])]);
            prop_assert!(close(&left, &right), "{left:?}\n{right:?}");
            prop_assert_eq!(merged([a.clone()]), a);
        }
    }

    fn snapshot_of(source: &str, duration_ns: u64, values: &[(&str, f64)]) -> Snapshot {
        let mut snapshot = Snapshot::new(source, "made", "host", 0);
        snapshot.duration_ns = duration_ns;
        let values = values.iter().map(|&(name, value)| (name.to_owned(), value)).collect();
        snapshot.series.push(Series { values, ..Series::default() });
        snapshot
    }

    #[test]
    fn averages_are_weighted_by_span() {
        let [sqpoll, irqsoff, wq] = ["sqpoll", "irqsoff", "wq"];
        let share =
            merged([snapshot_of(irqsoff, 1_000, &[("share", 0.1)]), snapshot_of(irqsoff, 3_000, &[("share", 0.5)])]);
        assert!((share.series[0].values["share"] - 0.4).abs() < 1e-12);
        let gone = merged([
            snapshot_of(irqsoff, 1_000, &[("share", 0.4)]),
            Snapshot { series: Vec::new(), ..snapshot_of(irqsoff, 3_000, &[]) },
        ]);
        assert!((gone.series[0].values["share"] - 0.1).abs() < 1e-12);
        // A thread that worked half of its time, and existed for a quarter of the span.
        let worked = snapshot_of(sqpoll, 1_000, &[("working", 0.5), ("spinning", 0.5)]);
        let left = merged([worked, Snapshot { series: Vec::new(), ..snapshot_of(sqpoll, 3_000, &[]) }]);
        let values = &left.series[0].values;
        assert_eq!((values["working"], values[PRESENT]), (0.5, 0.25));
        // Items that are gone are not counted.
        let queued = merged([snapshot_of(wq, 1_000, &[("queued", 3.0)]), snapshot_of(wq, 1_000, &[])]);
        assert!(queued.series[0].values.is_empty());
    }
}
