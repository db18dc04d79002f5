// SPDX-License-Identifier: MIT OR Apache-2.0
//! Missed periods: those in which the thread of a CPU was still late for an earlier one. Like activations, they count
//! in the span in which they were due, so that the counts of a span match its schedule.

/// Returns when a thread that was due, and ready at `ready_ns`, is due next: it skips elapsed periods, as
/// `wait_next_period()` does (kernel/trace/trace_osnoise.c).
pub(super) fn due_after(due_ns: u64, ready_ns: u64, period_ns: u64) -> u64 {
    match ready_ns.saturating_sub(due_ns) {
        // Avoids a slow division.
        late_ns if late_ns < period_ns => due_ns + period_ns,
        late_ns => due_ns + (late_ns / period_ns + 1) * period_ns,
    }
}

/// Returns the number of periods due from `next_due_ns` to `until_ns`.
pub(super) fn overdue(next_due_ns: u64, until_ns: u64, period_ns: u64) -> u64 {
    until_ns.checked_sub(next_due_ns).map_or(0, |late_ns| late_ns / period_ns + 1)
}

/// Missed periods that are not counted yet, because they were due after the span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Missed {
    next_due_ns: u64,
    left: u64,
    /// Time at which the thread was ready again, after all missed due times.
    ready_ns: u64,
}

impl Missed {
    /// Returns the periods that the thread missed because of the activation that was due at `due_ns`. The thread was ready
    /// again in user space, at `user_ns`.
    pub(super) fn after(due_ns: u64, user_ns: u64, period_ns: u64) -> Self {
        let mut missed = Missed::default();
        let late_ns = user_ns.saturating_sub(due_ns);
        if late_ns >= period_ns {
            missed.add(due_ns + period_ns, late_ns / period_ns, user_ns);
        }
        missed
    }

    /// Sets the missed periods. Earlier ones are counted already: the thread's next activation is due after them.
    pub(super) fn add(&mut self, next_due_ns: u64, left: u64, ready_ns: u64) {
        *self = Missed { next_due_ns, left, ready_ns };
    }

    /// Passes the periods due in this span to `each`, with the time from the expiry until the thread was ready; drops
    /// those due earlier.
    pub(super) fn count(&mut self, from_ns: u64, until_ns: u64, period_ns: u64, mut each: impl FnMut(u64)) {
        let before = from_ns.saturating_sub(self.next_due_ns).div_ceil(period_ns).min(self.left);
        self.next_due_ns += before * period_ns;
        self.left -= before;
        while self.left > 0 && self.next_due_ns <= until_ns {
            each(self.ready_ns.saturating_sub(self.next_due_ns));
            self.next_due_ns += period_ns;
            self.left -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many periods of a span were missed, and the longest lateness.
    fn missed(periods: &mut Missed, from_ns: u64, until_ns: u64) -> (usize, u64) {
        let mut late_ns = Vec::new();
        periods.count(from_ns, until_ns, 10, |ns| late_ns.push(ns));
        (late_ns.len(), late_ns.into_iter().max().unwrap_or(0))
    }

    #[test]
    fn counts_periods_in_span_of_due_time() {
        let mut periods = Missed::default();
        periods.add(110, 5, 155);
        assert_eq!(missed(&mut periods, 115, 130), (2, 35));
        assert_eq!(missed(&mut periods, 115, 139), (0, 0));
        assert_eq!(missed(&mut periods, 115, 1_000), (2, 15));
        assert_eq!(missed(&mut periods, 115, 2_000), (0, 0));
        // Any number of periods before the span is skipped in constant time.
        periods.add(10, u64::MAX / 20, 9_000_000_000_000_000_055);
        assert_eq!(missed(&mut periods, 9_000_000_000_000_000_000, 9_000_000_000_000_000_020), (3, 55));
    }

    #[test]
    fn skips_elapsed_periods() {
        let due = |ready_ns| due_after(100, ready_ns, 10);
        assert_eq!([99, 100, 109, 110, 137].map(due), [110, 110, 110, 120, 140]);
        let overdue = |until_ns| overdue(110, until_ns, 10);
        assert_eq!([109, 110, 119, 120, 137].map(overdue), [0, 1, 1, 2, 3]);
    }
}
