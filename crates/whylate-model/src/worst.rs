// SPDX-License-Identifier: MIT OR Apache-2.0
//! Top-N list of the longest late events.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::LateEvent;

/// Keeps the late events with the largest latencies; of equal ones those that were added first.
#[derive(Debug)]
pub struct TopN {
    limit: usize,
    /// Events by latency and sequence number; the first entry is the next one to drop.
    events: BTreeMap<(u64, Reverse<u64>), LateEvent>,
    added: u64,
}

impl TopN {
    /// Creates a list of at most `limit` events.
    pub fn new(limit: usize) -> Self {
        TopN { limit, events: BTreeMap::new(), added: 0 }
    }

    /// Adds the event if it is among the longest.
    pub fn add(&mut self, event: LateEvent) {
        self.added += 1;
        self.events.insert((event.latency_ns, Reverse(self.added)), event);
        if self.events.len() > self.limit {
            self.events.pop_first();
        }
    }

    /// Returns whether an event of this latency would be kept.
    pub fn takes(&self, latency_ns: u64) -> bool {
        let least = self.events.first_key_value().map(|((least, _), _)| *least);
        !self.is_full() || least.is_some_and(|least| latency_ns > least)
    }

    /// Returns whether a further event would replace one.
    pub fn is_full(&self) -> bool {
        self.events.len() >= self.limit
    }

    /// Iterates over the events, longest first.
    pub fn iter(&self) -> impl Iterator<Item = &LateEvent> {
        self.events.values().rev()
    }

    /// Returns the events, longest first, and clears the list.
    pub fn take(&mut self) -> Vec<LateEvent> {
        std::mem::take(&mut self.events).into_values().rev().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn keeps_longest_events_sorted(latencies_ns in prop::collection::vec(0u64..20, 0..60), limit in 0usize..10) {
            let mut worst = TopN::new(limit);
            for (cpu, &latency_ns) in (0..).zip(&latencies_ns) {
                worst.add(LateEvent { latency_ns, cpu, ..LateEvent::default() });
            }
            let kept: Vec<(u64, u32)> = worst.take().iter().map(|event| (event.latency_ns, event.cpu)).collect();
            let mut all: Vec<(u64, u32)> = latencies_ns.into_iter().zip(0..).collect();
            // Stable: equal ones stay in the order in which they were added.
            all.sort_by_key(|&(latency_ns, _)| Reverse(latency_ns));
            all.truncate(limit);
            prop_assert_eq!(kept, all);
            prop_assert!(worst.take().is_empty());
        }
    }
}
