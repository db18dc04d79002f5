// SPDX-License-Identifier: MIT OR Apache-2.0
//! The latest activations of a CPU, for a trace.

use std::collections::VecDeque;

use super::tally::Times;

/// Number of activations kept per CPU: a second with the default period.
pub(super) const MAX_KEPT: usize = 1_000;

/// One activation of a measured thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activated {
    /// CPU of the thread.
    pub cpu: u32,
    /// Due time of the timer, in nanoseconds since 1970 (UTC).
    pub due_unix_ns: u64,
    /// Latencies of the interrupt and of the thread; `None` if the interrupt or the switch-in was not seen.
    pub irq_and_thread_ns: Option<(u64, u64)>,
    /// Latency of the return to user space.
    pub user_ns: u64,
}

#[derive(Debug)]
pub(super) struct Latest {
    limit: usize,
    times: VecDeque<Times>,
}

impl Latest {
    /// Keeps the last `limit` activations; 0 for none.
    pub(super) fn new(limit: usize) -> Self {
        Latest { limit, times: VecDeque::with_capacity(limit) }
    }

    pub(super) fn add(&mut self, times: Times) {
        if self.times.len() >= self.limit {
            self.times.pop_front();
        }
        if self.limit > 0 {
            self.times.push_back(times);
        }
    }

    /// Returns activations due since `from_ns`. `to_unix_ns` is the offset from CLOCK_MONOTONIC to the time since 1970.
    pub(super) fn since(&self, from_ns: u64, cpu: u32, to_unix_ns: u64) -> impl Iterator<Item = Activated> {
        self.times.iter().filter(move |times| times.due_ns >= from_ns).map(move |times| Activated {
            cpu,
            due_unix_ns: times.due_ns + to_unix_ns,
            irq_and_thread_ns: times.seen_ns(),
            user_ns: times.user_ns.saturating_sub(times.due_ns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(number: u64) -> Times {
        let due_ns = number * 100;
        Times { due_ns, irq_ns: due_ns + 1, thread_ns: due_ns + 2, user_ns: due_ns + 3 }
    }

    #[test]
    fn keeps_latest_activations() {
        let mut latest = Latest::new(3);
        (1..=5).for_each(|number| latest.add(times(number)));
        latest.add(Times { irq_ns: 0, ..times(6) });
        let found: Vec<_> = latest.since(500, 7, 10_000).collect();
        let seen = Activated { cpu: 7, due_unix_ns: 10_500, irq_and_thread_ns: Some((1, 2)), user_ns: 3 };
        assert_eq!(found, [seen, Activated { due_unix_ns: 10_600, irq_and_thread_ns: None, ..seen }]);
        let mut none = Latest::new(0);
        none.add(times(1));
        assert_eq!(none.since(0, 0, 0).count(), 0);
    }
}
