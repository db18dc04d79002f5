// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wait-free latency counters of a CPU, which another thread reads without a lock.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::missed::Missed;
use super::skel::types::irq_times;
use whylate_model::histogram::{FINE_BUCKETS, fine_bucket_of};
use whylate_model::{Histogram, Series, Steps};

/// Width and number of the linear buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepWidth {
    /// Width of a bucket, in ns.
    pub step_ns: u64,
    /// Number of buckets, from 0 on.
    pub steps: usize,
}

/// Kinds of latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Time from the timer's expiry to its handler.
    Irq,
    /// Time from the timer's expiry to the switch-in of the thread.
    Thread,
    /// Time from the timer's expiry to the thread's return to user space.
    User,
    /// Time from the expiry of a missed period until the thread was ready again.
    Missed,
}

impl Kind {
    /// Latencies of activations, in the order of the enumeration.
    const REAL: [Kind; 3] = [Kind::Irq, Kind::Thread, Kind::User];
    const ALL: usize = 4;

    fn name(self) -> &'static str {
        match self {
            Kind::Irq => "irq",
            Kind::Thread => "thread",
            Kind::User => "user",
            Kind::Missed => "missed",
        }
    }
}

#[derive(Debug)]
struct Summary {
    sum_ns: AtomicU64,
    min_ns: AtomicU64,
    max_ns: AtomicU64,
    last_ns: AtomicU64,
}

impl Summary {
    fn new() -> Self {
        let [sum_ns, max_ns, last_ns] = [const { AtomicU64::new(0) }; 3];
        Self { sum_ns, min_ns: AtomicU64::new(u64::MAX), max_ns, last_ns }
    }
}

/// Special value of an interrupt's timestamp, from the BPF programs.
const ARMED_LATE: u64 = irq_times::ARMED_LATE.0 as u64;

/// Counters of one CPU. The kinds of one bucket are adjacent: an activation's latencies are close to each other. Only
/// one thread uses it at a time, so no atomic read-modify-write is needed.
#[derive(Debug)]
pub(super) struct Tally {
    counts: Box<[[AtomicU64; Kind::ALL]]>,
    summary: [Summary; Kind::ALL],
    step_ns: u64,
    /// The last one counts latencies beyond the linear buckets; empty unless they are wanted.
    steps: Box<[[AtomicU64; Kind::REAL.len()]]>,
    /// Periods in which the thread was still late for an earlier one.
    missed: AtomicU64,
    /// Activations without timestamps.
    unseen: AtomicU64,
    /// Activations of which the timer was armed after its expiry, because the thread was stopped or preempted.
    armed_late: AtomicU64,
}

fn add(to: &AtomicU64, value: u64) {
    to.store(to.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

fn take(from: &AtomicU64) -> u64 {
    let value = from.load(Ordering::Relaxed);
    if value > 0 {
        from.store(0, Ordering::Relaxed);
    }
    value
}

impl Tally {
    pub(super) fn new(width: Option<StepWidth>) -> Self {
        let [missed, unseen, armed_late] = [const { AtomicU64::new(0) }; 3];
        Self {
            counts: (0..FINE_BUCKETS).map(|_| [const { AtomicU64::new(0) }; Kind::ALL]).collect(),
            summary: [(); Kind::ALL].map(|()| Summary::new()),
            step_ns: width.map_or(1, |width| width.step_ns.max(1)),
            steps: (0..width.map_or(0, |width| width.steps + 1))
                .map(|_| [const { AtomicU64::new(0) }; Kind::REAL.len()])
                .collect(),
            missed,
            unseen,
            armed_late,
        }
    }

    pub(super) fn count(&self, kind: Kind, ns: u64) {
        let (summary, index) = (&self.summary[kind as usize], kind as usize);
        add(&self.counts[fine_bucket_of(ns)][index], 1);
        add(&summary.sum_ns, ns);
        if ns < summary.min_ns.load(Ordering::Relaxed) {
            summary.min_ns.store(ns, Ordering::Relaxed);
        }
        if ns > summary.max_ns.load(Ordering::Relaxed) {
            summary.max_ns.store(ns, Ordering::Relaxed);
        }
        summary.last_ns.store(ns, Ordering::Relaxed);
        if let (Some(over), true) = (self.steps.len().checked_sub(1), index < Kind::REAL.len()) {
            // 32-bit division takes half the time.
            let step = match (u32::try_from(ns), u32::try_from(self.step_ns)) {
                (Ok(ns), Ok(step_ns)) => (ns / step_ns) as usize,
                _ => usize::try_from(ns / self.step_ns).unwrap_or(over),
            };
            let step = step.min(over);
            add(&self.steps[step][index], 1);
        }
    }

    /// Counts the latencies of an activation.
    pub(super) fn activation(&self, times: Times) {
        if times.irq_ns == ARMED_LATE {
            add(&self.armed_late, 1);
        } else if let Some((irq_ns, thread_ns)) = times.seen_ns() {
            self.count(Kind::Irq, irq_ns);
            self.count(Kind::Thread, thread_ns);
        } else {
            self.count_unseen();
        }
        self.count(Kind::User, times.user_ns.saturating_sub(times.due_ns));
    }

    /// Counts an activation without timestamps.
    pub(super) fn count_unseen(&self) {
        add(&self.unseen, 1);
    }

    /// Counts a missed period, with the time from its expiry until the thread was ready.
    pub(super) fn missed_period(&self, late_ns: u64) {
        add(&self.missed, 1);
        self.count(Kind::Missed, late_ns);
    }

    /// Moves the counts of another tally here.
    pub(super) fn absorb(&self, other: &Tally) {
        // Every activation has a latency of this kind.
        if other.summary[Kind::User as usize].min_ns.load(Ordering::Relaxed) == u64::MAX {
            return;
        }
        let move_all =
            |to: &[AtomicU64], from: &[AtomicU64]| to.iter().zip(from).for_each(|(to, from)| add(to, take(from)));
        self.counts.iter().zip(&other.counts).for_each(|(to, from)| move_all(to, from));
        self.steps.iter().zip(&other.steps).for_each(|(to, from)| move_all(to, from));
        for (to, from) in self.summary.iter().zip(&other.summary) {
            add(&to.sum_ns, take(&from.sum_ns));
            to.min_ns.fetch_min(from.min_ns.swap(u64::MAX, Ordering::Relaxed), Ordering::Relaxed);
            to.max_ns.fetch_max(take(&from.max_ns), Ordering::Relaxed);
            to.last_ns.store(from.last_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        for (to, from) in
            [(&self.missed, &other.missed), (&self.unseen, &other.unseen), (&self.armed_late, &other.armed_late)]
        {
            add(to, take(from));
        }
    }

    /// Takes all counts since the last call: a series and the losses. Includes user latencies if `has_user`.
    pub(super) fn take(&self, has_user: bool) -> TakenCounts {
        let mut series = Series::default();
        let kinds = if has_user { &Kind::REAL[..] } else { &Kind::REAL[..2] };
        for &kind in kinds {
            if let Some(steps) = self.take_steps(kind) {
                series.steps.insert(kind.name().to_owned(), steps);
            }
            series.histograms.insert(kind.name().to_owned(), self.take_kind(kind));
            let last_ns = self.summary[kind as usize].last_ns.load(Ordering::Relaxed);
            series.values.insert(format!("{}_last_ns", kind.name()), last_ns as f64);
        }
        // Thread latency corrected for coordinated omission: as every period would have seen it.
        let mut corrected = series.histograms[Kind::Thread.name()].clone();
        corrected.merge(&self.take_kind(Kind::Missed));
        series.histograms.insert("thread_corrected".to_owned(), corrected);
        series.values.insert("missed".to_owned(), take(&self.missed) as f64);
        TakenCounts { series, unseen: take(&self.unseen), armed_late: take(&self.armed_late) }
    }

    fn take_kind(&self, kind: Kind) -> Histogram {
        let summary = &self.summary[kind as usize];
        let (sum_ns, max_ns) = (take(&summary.sum_ns), take(&summary.max_ns));
        let min_ns = summary.min_ns.load(Ordering::Relaxed);
        summary.min_ns.store(u64::MAX, Ordering::Relaxed);
        let counts = (0..).zip(&self.counts).map(|(index, count)| (index, take(&count[kind as usize])));
        // The indexes ascend and lie within the layout.
        Histogram::from_fine_buckets(counts, sum_ns, min_ns, max_ns).unwrap_or_default()
    }

    /// Takes the linear buckets, if they are wanted.
    fn take_steps(&self, kind: Kind) -> Option<Steps> {
        let mut counts: Vec<u64> = self.steps.iter().map(|step| take(&step[kind as usize])).collect();
        let over = counts.pop()?;
        Some(Steps { step_ns: self.step_ns, counts, over })
    }
}

/// Counts of one CPU in a span of time.
#[derive(Debug, Default)]
pub(super) struct TakenCounts {
    /// Series without labels.
    pub series: Series,
    pub unseen: u64,
    pub armed_late: u64,
}

/// Two tallies of one CPU: a thread fills one while the other is read, so that every read has whole activations.
#[derive(Debug)]
pub(super) struct Tallies {
    both: [Tally; 2],
    /// Index of the tally to fill from the next activation on.
    filled: AtomicUsize,
    /// Index plus one of the tally being filled; 0 between activations.
    in_use: AtomicUsize,
}

/// Poll interval while an activation is being counted, far longer than that takes.
const COUNT_POLL: Duration = Duration::from_micros(50);

impl Tallies {
    pub(super) fn new(width: Option<StepWidth>) -> Self {
        let both = [Tally::new(width), Tally::new(width)];
        Self { both, filled: AtomicUsize::new(0), in_use: AtomicUsize::new(0) }
    }

    /// Counts an activation and the periods that it made the thread miss, whenever due. Wait-free; for a single thread.
    pub(super) fn activation(&self, times: Times, period_ns: u64) {
        let which = loop {
            let which = self.filled.load(Ordering::SeqCst);
            self.in_use.store(which + 1, Ordering::SeqCst);
            // A reader that swaps after this sees that the tally is in use.
            if self.filled.load(Ordering::SeqCst) == which {
                break which;
            }
        };
        self.both[which].activation(times);
        let mut missed = Missed::after(times.due_ns, times.user_ns, period_ns);
        missed.count(0, u64::MAX, period_ns, |late_ns| self.both[which].missed_period(late_ns));
        self.in_use.store(0, Ordering::Release);
    }

    /// Swaps the tallies, and returns the one filled so far. Only one thread may call it.
    pub(super) fn swap(&self) -> &Tally {
        let which = self.filled.load(Ordering::SeqCst);
        self.filled.store(1 - which, Ordering::SeqCst);
        while self.in_use.load(Ordering::SeqCst) == which + 1 {
            thread::sleep(COUNT_POLL);
        }
        &self.both[which]
    }
}

/// Timestamps of one activation, on CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub due_ns: u64,
    pub irq_ns: u64,
    pub thread_ns: u64,
    pub user_ns: u64,
}

impl Times {
    /// Returns the latencies of the interrupt and of the thread, if both were seen.
    pub(super) fn seen_ns(&self) -> Option<(u64, u64)> {
        let is_seen = self.irq_ns >= self.due_ns && self.thread_ns >= self.irq_ns;
        is_seen.then(|| (self.irq_ns - self.due_ns, self.thread_ns - self.due_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS_NS: u64 = 1_000_000;

    /// Returns counts of interrupt, thread, return to user space, corrected and missed.
    fn counts(taken: &TakenCounts) -> [u64; 5] {
        let [irq, thread, user, corrected] =
            ["irq", "thread", "user", "thread_corrected"].map(|kind| taken.series.histograms[kind].count());
        [irq, thread, user, corrected, taken.series.values["missed"] as u64]
    }

    #[test]
    fn late_thread_misses_periods() {
        let tallies = Tallies::new(None);
        let late = Times { due_ns: 5, irq_ns: 6, thread_ns: 5 + 1_000 * MS_NS, user_ns: 7 + 1_000 * MS_NS };
        tallies.activation(late, MS_NS);
        for number in 0..3_000 {
            let due_ns = late.user_ns + number * MS_NS;
            tallies.activation(Times { due_ns, irq_ns: due_ns + 1, thread_ns: due_ns + 5, user_ns: due_ns + 9 }, MS_NS);
        }
        let taken = tallies.swap().take(true);
        assert_eq!(counts(&taken), [3_001, 3_001, 3_001, 4_001, 1_000]);
        assert_eq!(taken.series.histograms["thread"].quantile_ns(0.99), 5);
        let p99_ns = taken.series.histograms["thread_corrected"].quantile_ns(0.99) as f64;
        assert!((p99_ns / 960e6 - 1.0).abs() < 0.02, "{p99_ns}");
    }

    #[test]
    fn late_return_to_user_misses_periods() {
        let tallies = Tallies::new(None);
        tallies.activation(Times { due_ns: 5, irq_ns: 6, thread_ns: 7, user_ns: 5 + 3 * MS_NS }, MS_NS);
        let taken = tallies.swap().take(true);
        assert_eq!(counts(&taken), [1, 1, 1, 4, 3]);
        assert_eq!(taken.series.histograms["thread_corrected"].max_ns(), 2 * MS_NS);
    }

    #[test]
    fn concurrent_take_sees_whole_activations() {
        let tallies = Tallies::new(None);
        let activations = 200_000;
        let (over, mut taken) = (AtomicUsize::new(0), 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..activations {
                    let due_ns = 5 + number * MS_NS;
                    let times = Times { due_ns, irq_ns: due_ns + 1, thread_ns: due_ns + 2, user_ns: due_ns + 3 };
                    tallies.activation(times, MS_NS);
                }
                over.store(1, Ordering::SeqCst);
            });
            let mut rest = 2;
            while rest > 0 {
                // Reads both tallies after the last activation.
                rest -= over.load(Ordering::SeqCst);
                let span = tallies.swap().take(true);
                let [irq, ..] = counts(&span);
                assert_eq!(counts(&span), [irq, irq, irq, irq, 0]);
                assert_eq!(span.series.histograms["user"].sum_ns(), u128::from(3 * irq));
                taken += irq;
            }
        });
        assert_eq!(taken, activations);
    }

    #[test]
    fn take_resets_counts() {
        let tally = Tally::new(Some(StepWidth { step_ns: 1_000, steps: 2 }));
        [3, 1_000, 70_000].iter().for_each(|&ns| tally.count(Kind::Irq, ns));
        let series = tally.take(true).series;
        let irq = &series.histograms["irq"];
        assert_eq!((irq.count(), irq.sum_ns(), irq.min_ns(), irq.max_ns()), (3, 71_003, 3, 70_000));
        assert_eq!(series.steps["irq"], Steps { step_ns: 1_000, counts: vec![1, 1], over: 1 });
        assert_eq!(series.values["irq_last_ns"], 70_000.0);
        let after = tally.take(true).series;
        assert!(after.histograms["irq"].is_empty());
        assert_eq!(after.steps["irq"], Steps { step_ns: 1_000, counts: vec![0, 0], over: 0 });
        assert!(Tally::new(None).take(true).series.steps.is_empty());
    }

    #[test]
    fn kernel_threads_have_no_user_latency() {
        let series = Tally::new(Some(StepWidth { step_ns: 1_000, steps: 2 })).take(false).series;
        assert!(!series.histograms.contains_key("user") && !series.steps.contains_key("user"));
        assert!(series.histograms.contains_key("irq") && series.histograms.contains_key("thread_corrected"));
    }

    #[test]
    fn counts_unordered_timestamps_as_unseen() {
        let tally = Tally::new(None);
        tally.activation(Times { due_ns: 100, irq_ns: 0, thread_ns: 0, user_ns: 140 });
        tally.activation(Times { due_ns: 100, irq_ns: ARMED_LATE, thread_ns: 0, user_ns: 140 });
        let taken = tally.take(true);
        assert_eq!((taken.unseen, taken.armed_late, counts(&taken)), (1, 1, [0, 0, 2, 0, 0]));
        assert_eq!(taken.series.histograms["user"].max_ns(), 40);
    }
}
