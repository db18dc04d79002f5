// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single-producer queue of activations from a measured thread to the counter. The thread wakes with cold caches, so it
//! touches little memory; counting a hundred activations at once takes a fraction of the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::latest::Latest;
use super::missed::{Missed, due_after, overdue};
use super::tally::{StepWidth, TakenCounts, Tallies, Tally, Times};

/// One activation, in half a cache line.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct Slot {
    due_ns: AtomicU64,
    irq_ns: AtomicU64,
    thread_ns: AtomicU64,
    /// 0: the slot is free.
    user_ns: AtomicU64,
}

/// Producer side, owned by the measured thread.
#[derive(Debug)]
pub(super) struct Producer {
    slots: Arc<[Slot]>,
    next: usize,
    /// Lower bound of `counted` as last read. The slots themselves are in the cache of the counter.
    known: usize,
    counted: Arc<AtomicUsize>,
    period_ns: u64,
    /// Counts activations that find no free slot, as the counter is delayed.
    rest: Arc<Tallies>,
}

/// Consumer side.
#[derive(Debug)]
pub(super) struct Counter {
    slots: Arc<[Slot]>,
    next: usize,
    counted: Arc<AtomicUsize>,
    period_ns: u64,
    rest: Arc<Tallies>,
    tally: Tally,
    /// Due time of the activation after the last counted one; 0: unknown.
    next_due_ns: u64,
    missed: Missed,
    pub latest: Latest,
}

/// Creates both ends for a thread with this period, of which activations are counted every `counted_every_ns`.
pub(super) fn queue(period_ns: u64, counted_every_ns: u64, width: Option<StepWidth>) -> (Producer, Counter) {
    // Sized for twice the interval: the counter may be late too.
    let slots = (2 * counted_every_ns / period_ns.max(1)).clamp(64, 8_192).next_power_of_two();
    let slots: Arc<[Slot]> = (0..slots).map(|_| Slot::default()).collect();
    let rest = Arc::new(Tallies::new(width));
    let counted = Arc::new(AtomicUsize::new(0));
    let (slots_too, counted_too, rest_too) = (Arc::clone(&slots), Arc::clone(&counted), Arc::clone(&rest));
    let producer = Producer { slots: slots_too, next: 0, known: 0, counted: counted_too, period_ns, rest: rest_too };
    let (tally, missed) = (Tally::new(width), Missed::default());
    let latest = Latest::new(0);
    (producer, Counter { slots, next: 0, counted, period_ns, rest, tally, next_due_ns: 0, missed, latest })
}

impl Producer {
    /// Returns the slots, which the thread writes.
    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Enqueues an activation. Never blocks.
    pub(super) fn push(&mut self, times: Times) {
        if self.next.wrapping_sub(self.known) >= self.slots.len() {
            self.known = self.counted.load(Ordering::Acquire);
            if self.next.wrapping_sub(self.known) >= self.slots.len() {
                self.rest.activation(times, self.period_ns);
                return;
            }
        }
        let slot = &self.slots[self.next & (self.slots.len() - 1)];
        slot.due_ns.store(times.due_ns, Ordering::Relaxed);
        slot.irq_ns.store(times.irq_ns, Ordering::Relaxed);
        slot.thread_ns.store(times.thread_ns, Ordering::Relaxed);
        // Publishes the slot to the counter.
        slot.user_ns.store(times.user_ns, Ordering::Release);
        self.next = self.next.wrapping_add(1);
    }
}

impl Counter {
    /// Counts activations due in this span, and periods missed in it. Those due earlier are dropped.
    pub(super) fn count(&mut self, from_ns: u64, until_ns: u64) {
        self.missed.count(from_ns, until_ns, self.period_ns, |late_ns| self.tally.missed_period(late_ns));
        self.count_given(from_ns, until_ns);
        // Releases the slots.
        self.counted.store(self.next, Ordering::Release);
    }

    fn count_given(&mut self, from_ns: u64, until_ns: u64) {
        loop {
            let slot = &self.slots[self.next & (self.slots.len() - 1)];
            let user_ns = slot.user_ns.load(Ordering::Acquire);
            let due_ns = slot.due_ns.load(Ordering::Relaxed);
            if user_ns == 0 || due_ns > until_ns {
                return;
            }
            let [irq_ns, thread_ns] = [&slot.irq_ns, &slot.thread_ns].map(|time| time.load(Ordering::Relaxed));
            slot.user_ns.store(0, Ordering::Relaxed);
            self.next = self.next.wrapping_add(1);
            let times = Times { due_ns, irq_ns, thread_ns, user_ns };
            if due_ns >= from_ns {
                self.tally.activation(times);
                self.latest.add(times);
            }
            self.next_due_ns = due_after(due_ns, user_ns, self.period_ns);
            if self.next_due_ns - due_ns > self.period_ns {
                self.missed = Missed::after(times.due_ns, times.user_ns, self.period_ns);
                self.missed.count(from_ns, until_ns, self.period_ns, |late_ns| self.tally.missed_period(late_ns));
            }
        }
    }

    /// Returns the number of activations due in this span that have not arrived, with the periods after them.
    pub(super) fn overdue(&self, from_ns: u64, until_ns: u64) -> u64 {
        let slot = &self.slots[self.next & (self.slots.len() - 1)];
        // The next activation has arrived, and was due later than the last counted one.
        if slot.user_ns.load(Ordering::Acquire) > 0 {
            return 0;
        }
        // If none has arrived yet, the first one may be due up to a period later.
        overdue(self.next_due_ns.max(from_ns + self.period_ns), until_ns, self.period_ns)
    }

    /// Takes the counts since the last call.
    pub(super) fn take(&mut self) -> TakenCounts {
        self.tally.absorb(self.rest.swap());
        self.tally.take(true)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    const MS_NS: u64 = 1_000_000;

    fn times(number: u64) -> Times {
        let due_ns = 5 + number * MS_NS;
        Times { due_ns, irq_ns: due_ns + 1, thread_ns: due_ns + 2, user_ns: due_ns + 3 }
    }

    /// Returns counts of interrupt, thread, return to user space and corrected latencies; the sum of the return
    /// latencies.
    fn counts(taken: &TakenCounts) -> ([u64; 4], u128) {
        let histograms = &taken.series.histograms;
        let counts = ["irq", "thread", "user", "thread_corrected"].map(|kind| histograms[kind].count());
        (counts, histograms["user"].sum_ns())
    }

    #[test]
    fn counts_activations_without_free_slot() {
        let (mut producer, mut counter) = queue(MS_NS, MS_NS, Some(StepWidth { step_ns: 1, steps: 3 }));
        (0..100).for_each(|number| producer.push(times(number)));
        counter.count(0, u64::MAX);
        (100..150).for_each(|number| producer.push(times(number)));
        counter.count(0, u64::MAX);
        let taken = counter.take();
        assert_eq!(counts(&taken), ([150; 4], 450));
        assert_eq!(taken.series.steps["thread"].counts, vec![0, 0, 150]);
        assert_eq!(taken.series.steps["user"].over, 150);
        assert_eq!(counts(&counter.take()), ([0; 4], 0));
    }

    #[test]
    fn counts_later_activations_in_next_span() {
        let (mut producer, mut counter) = queue(MS_NS, MS_NS, None);
        (0..10).for_each(|number| producer.push(times(number)));
        counter.count(0, times(3).due_ns);
        assert_eq!(counts(&counter.take()), ([4; 4], 12));
        assert_eq!(counter.overdue(0, times(3).due_ns), 0);
        counter.count(0, u64::MAX);
        assert_eq!(counts(&counter.take()), ([6; 4], 18));
    }

    #[test]
    fn counts_missed_periods_by_due_time() {
        let (mut producer, mut counter) = queue(MS_NS, MS_NS, None);
        let (due_ns, ended_ns) = (5 + 2 * MS_NS, 5 + 2 * MS_NS + 500);
        // Due before the measurement started, and back after its first span.
        producer.push(Times { due_ns: 5, irq_ns: 6, thread_ns: 7, user_ns: 9 + 4 * MS_NS });
        producer.push(times(5));
        counter.count(due_ns, ended_ns);
        let taken = counter.take();
        assert_eq!((counts(&taken), taken.series.values["missed"]), (([0, 0, 0, 1], 0), 1.0));
        counter.count(due_ns, u64::MAX);
        let taken = counter.take();
        assert_eq!((counts(&taken), taken.series.values["missed"]), (([1, 1, 1, 3], 3), 2.0));
    }

    #[test]
    fn reports_overdue_periods() {
        let (mut producer, mut counter) = queue(MS_NS, MS_NS, None);
        assert_eq!(counter.overdue(5, 5 + MS_NS - 1), 0);
        assert_eq!(counter.overdue(5, 5 + 2 * MS_NS), 2);
        producer.push(times(0));
        counter.count(0, u64::MAX);
        assert_eq!(counter.overdue(0, times(1).due_ns - 1), 0);
        assert_eq!(counter.overdue(0, times(1).due_ns), 1);
        assert_eq!(counter.overdue(0, times(3).due_ns), 3);
        producer.push(times(1));
        assert_eq!(counter.overdue(0, times(1).due_ns), 0);
    }

    #[test]
    fn concurrent_take_sees_whole_activations() {
        let (mut producer, mut counter) = queue(MS_NS, 100 * MS_NS, None);
        let (activations, over) = (200_000, AtomicBool::new(false));
        let mut seen = 0;
        thread::scope(|scope| {
            scope.spawn(|| {
                (0..activations).for_each(|number| producer.push(times(number)));
                over.store(true, Ordering::Release);
            });
            let mut is_last = false;
            while !is_last {
                is_last = over.load(Ordering::Acquire);
                // Twice after the last one, as the thread may have filled either tally.
                for _ in 0..2 {
                    counter.count(0, u64::MAX);
                    let taken = counter.take();
                    let (counts, sum_ns) = counts(&taken);
                    assert_eq!((counts, sum_ns), ([counts[0]; 4], u128::from(3 * counts[0])));
                    seen += counts[0];
                }
            }
        });
        assert_eq!(seen, activations);
    }
}
