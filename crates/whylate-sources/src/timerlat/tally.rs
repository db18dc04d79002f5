// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the measured thread of a CPU has counted: written by that thread alone, without a lock or an allocation, and read by another one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::skel::types::irq_times;
use whylate_model::histogram::{FINE_BUCKETS, fine_bucket_of};
use whylate_model::{Histogram, Steps};

/// How wide the steps are that are counted too, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepWidth {
    /// Width of a step.
    pub step_ns: u64,
    /// Steps, from 0 on.
    pub steps: usize,
}

/// Latencies of one kind.
#[derive(Debug)]
pub(super) struct Distribution {
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
    min_ns: AtomicU64,
    max_ns: AtomicU64,
    last_ns: AtomicU64,
    step_ns: u64,
    /// The last one counts what lies beyond the steps; empty where none are asked for.
    steps: Box<[AtomicU64]>,
}

impl Distribution {
    pub(super) fn new(width: Option<StepWidth>) -> Self {
        Self {
            counts: (0..FINE_BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            sum_ns: AtomicU64::new(0),
            min_ns: AtomicU64::new(u64::MAX),
            max_ns: AtomicU64::new(0),
            last_ns: AtomicU64::new(0),
            step_ns: width.map_or(1, |width| width.step_ns.max(1)),
            steps: (0..width.map_or(0, |width| width.steps + 1)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Counts one latency. Several threads may take counts out meanwhile, but only one may count.
    pub(super) fn count(&self, ns: u64) {
        // Whoever takes out does so with an exchange, hence no plain store of a sum.
        self.counts[fine_bucket_of(ns)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
        self.min_ns.fetch_min(ns, Ordering::Relaxed);
        self.max_ns.fetch_max(ns, Ordering::Relaxed);
        self.last_ns.store(ns, Ordering::Relaxed);
        if let Some(over) = self.steps.len().checked_sub(1) {
            let step = usize::try_from(ns / self.step_ns).unwrap_or(over).min(over);
            self.steps[step].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Everything counted since the last call.
    pub(super) fn take(&self) -> Histogram {
        let max_ns = self.max_ns.swap(0, Ordering::Relaxed);
        let min_ns = self.min_ns.swap(u64::MAX, Ordering::Relaxed);
        let sum_ns = self.sum_ns.swap(0, Ordering::Relaxed);
        let counts = (0..).zip(self.counts.iter()).map(|(index, count)| (index, count.swap(0, Ordering::Relaxed)));
        // The indices ascend and lie within the layout.
        Histogram::from_fine_buckets(counts, sum_ns, min_ns, max_ns).unwrap_or_default()
    }

    /// The same by steps, where they are asked for.
    pub(super) fn take_steps(&self) -> Option<Steps> {
        let mut counts: Vec<u64> = self.steps.iter().map(|count| count.swap(0, Ordering::Relaxed)).collect();
        let over = counts.pop()?;
        Some(Steps { step_ns: self.step_ns, counts, over })
    }

    /// The latency that was counted last.
    pub(super) fn last_ns(&self) -> u64 {
        self.last_ns.load(Ordering::Relaxed)
    }
}

/// In place of an interrupt's time, from the programs.
const ARMED_LATE: u64 = irq_times::ARMED_LATE.0 as u64;

/// Of one CPU.
#[derive(Debug)]
pub(super) struct Tally {
    /// From when the timer was due to its interrupt's function.
    pub irq: Distribution,
    /// From when the timer was due to when the thread got the CPU.
    pub thread: Distribution,
    /// From when the timer was due to when the thread was back in user space.
    pub user: Distribution,
    /// The thread's latency as every period would have seen it: one that is missed began to wait when it was due.
    pub corrected: Distribution,
    /// Periods in which the thread was still late for an earlier one.
    pub missed: AtomicU64,
    /// Activations whose times were not seen by the programs.
    pub unseen: AtomicU64,
    /// Activations whose timer was set when it was due already, because the thread was stopped or preempted.
    pub armed_late: AtomicU64,
}

impl Tally {
    pub(super) fn new(width: Option<StepWidth>) -> Self {
        Self {
            irq: Distribution::new(width),
            thread: Distribution::new(width),
            user: Distribution::new(width),
            corrected: Distribution::new(None),
            missed: AtomicU64::new(0),
            unseen: AtomicU64::new(0),
            armed_late: AtomicU64::new(0),
        }
    }

    /// Counts an activation and the periods that it made the thread miss.
    pub(super) fn activation(&self, times: Times, period_ns: u64) {
        let since_due = |ns: u64| ns.saturating_sub(times.due_ns);
        if times.irq_ns == ARMED_LATE {
            self.armed_late.fetch_add(1, Ordering::Relaxed);
        } else if times.irq_ns < times.due_ns || times.thread_ns < times.irq_ns {
            self.unseen.fetch_add(1, Ordering::Relaxed);
        } else {
            self.irq.count(since_due(times.irq_ns));
            self.thread.count(since_due(times.thread_ns));
            self.corrected.count(since_due(times.thread_ns));
        }
        // A period that is missed began to wait when it was due, and the thread is there for it when it is back in user space.
        let mut waits_ns = since_due(times.user_ns);
        while waits_ns >= period_ns {
            waits_ns -= period_ns;
            self.corrected.count(waits_ns);
        }
        self.user.count(since_due(times.user_ns));
        let missed = since_due(times.user_ns) / period_ns;
        self.missed.fetch_add(missed, Ordering::Relaxed);
    }
}

/// Two tallies of one CPU: the measured thread fills one while the other is taken, so that what is taken is of whole activations.
#[derive(Debug)]
pub(super) struct Tallies {
    both: [Tally; 2],
    /// The one to fill from the next activation on.
    filled: AtomicUsize,
    /// The one that is being filled plus one; 0 between activations.
    in_use: AtomicUsize,
}

/// How long an activation takes to count, far more than enough.
const COUNTED: Duration = Duration::from_micros(50);

impl Tallies {
    pub(super) fn new(width: Option<StepWidth>) -> Self {
        let both = [Tally::new(width), Tally::new(width)];
        Self { both, filled: AtomicUsize::new(0), in_use: AtomicUsize::new(0) }
    }

    /// Counts an activation; never waits. For the measured thread alone.
    pub(super) fn activation(&self, times: Times, period_ns: u64) {
        let which = loop {
            let which = self.filled.load(Ordering::SeqCst);
            self.in_use.store(which + 1, Ordering::SeqCst);
            // Whoever changes over after this sees that it is in use.
            if self.filled.load(Ordering::SeqCst) == which {
                break which;
            }
        };
        self.both[which].activation(times, period_ns);
        self.in_use.store(0, Ordering::SeqCst);
    }

    /// From the next activation on the other one is filled, which was taken before. Returns what has been counted until now. For one
    /// thread alone.
    pub(super) fn change_over(&self) -> &Tally {
        let which = self.filled.load(Ordering::SeqCst);
        self.filled.store(1 - which, Ordering::SeqCst);
        while self.in_use.load(Ordering::SeqCst) == which + 1 {
            thread::sleep(COUNTED);
        }
        &self.both[which]
    }
}

/// Of one activation, on CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub due_ns: u64,
    pub irq_ns: u64,
    pub thread_ns: u64,
    pub user_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS_NS: u64 = 1_000_000;

    #[test]
    fn a_thread_that_is_late_for_a_second_misses_a_thousand_periods() {
        let tally = Tally::new(None);
        let late = Times { due_ns: 5, irq_ns: 6, thread_ns: 5 + 1_000 * MS_NS, user_ns: 7 + 1_000 * MS_NS };
        tally.activation(late, MS_NS);
        for number in 0..3_000 {
            let due_ns = late.user_ns + number * MS_NS;
            tally.activation(Times { due_ns, irq_ns: due_ns + 1, thread_ns: due_ns + 5, user_ns: due_ns + 9 }, MS_NS);
        }
        assert_eq!(tally.missed.load(Ordering::Relaxed), 1_000);
        let (raw, corrected) = (tally.thread.take(), tally.corrected.take());
        assert_eq!((raw.count(), corrected.count()), (3_001, 4_001));
        assert_eq!(raw.quantile_ns(0.99), 5);
        let p99_ns = corrected.quantile_ns(0.99) as f64;
        assert!((p99_ns / 960e6 - 1.0).abs() < 0.02, "{p99_ns}");
    }

    #[test]
    fn a_thread_that_does_not_come_back_in_time_misses_periods_too() {
        let tally = Tally::new(None);
        tally.activation(Times { due_ns: 5, irq_ns: 6, thread_ns: 7, user_ns: 5 + 3 * MS_NS }, MS_NS);
        let corrected = tally.corrected.take();
        assert_eq!((tally.missed.load(Ordering::Relaxed), corrected.count(), corrected.max_ns()), (3, 4, 2 * MS_NS));
    }

    #[test]
    fn what_is_taken_while_a_thread_counts_is_of_whole_activations() {
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
                // Both, after the last activation.
                rest -= over.load(Ordering::SeqCst);
                let tally = tallies.change_over();
                let counts = [&tally.irq, &tally.thread, &tally.user, &tally.corrected].map(|kind| kind.take().count());
                assert_eq!(counts, [counts[0]; 4]);
                taken += counts[0];
            }
        });
        assert_eq!(taken, activations);
    }

    #[test]
    fn what_is_taken_out_is_not_there_any_more() {
        let distribution = Distribution::new(Some(StepWidth { step_ns: 1_000, steps: 2 }));
        [3, 1_000, 70_000].iter().for_each(|&ns| distribution.count(ns));
        let taken = distribution.take();
        assert_eq!((taken.count(), taken.sum_ns(), taken.min_ns(), taken.max_ns()), (3, 71_003, 3, 70_000));
        assert!(distribution.take().is_empty());
        let steps = Steps { step_ns: 1_000, counts: vec![1, 1], over: 1 };
        assert_eq!(distribution.take_steps(), Some(steps));
        assert!(Distribution::new(None).take_steps().is_none());
        assert_eq!(distribution.last_ns(), 70_000);
    }

    #[test]
    fn times_in_the_wrong_order_are_not_counted_as_latencies() {
        let tally = Tally::new(None);
        tally.activation(Times { due_ns: 100, irq_ns: 0, thread_ns: 0, user_ns: 140 }, MS_NS);
        tally.activation(Times { due_ns: 100, irq_ns: ARMED_LATE, thread_ns: 0, user_ns: 140 }, MS_NS);
        assert_eq!((tally.unseen.load(Ordering::Relaxed), tally.armed_late.load(Ordering::Relaxed)), (1, 1));
        assert!(tally.irq.take().is_empty() && tally.thread.take().is_empty());
        assert_eq!(tally.user.take().max_ns(), 40);
    }
}
