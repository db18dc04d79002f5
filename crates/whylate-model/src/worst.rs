// SPDX-License-Identifier: MIT OR Apache-2.0
//! The longest of many late events.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::LateEvent;

/// Keeps the late events with the largest latencies; of equal ones those that came first.
#[derive(Debug)]
pub struct Worst {
    limit: usize,
    /// By latency and by number, so that the first one is the one to give up.
    events: BTreeMap<(u64, Reverse<u64>), LateEvent>,
    added: u64,
}

impl Worst {
    /// Keeps at most `limit`.
    pub fn new(limit: usize) -> Self {
        Worst { limit, events: BTreeMap::new(), added: 0 }
    }

    /// Keeps the event if it is among the worst.
    pub fn add(&mut self, event: LateEvent) {
        self.added += 1;
        self.events.insert((event.latency_ns, Reverse(self.added)), event);
        if self.events.len() > self.limit {
            self.events.pop_first();
        }
    }

    /// Whether one so long would be among them.
    pub fn takes(&self, latency_ns: u64) -> bool {
        let least = self.events.first_key_value().map(|((least, _), _)| *least);
        !self.is_full() || least.is_some_and(|least| latency_ns > least)
    }

    /// Whether another one is kept only instead of one that is there.
    pub fn is_full(&self) -> bool {
        self.events.len() >= self.limit
    }

    /// What is kept so far, worst first.
    pub fn iter(&self) -> impl Iterator<Item = &LateEvent> {
        self.events.values().rev()
    }

    /// Hands over what was kept, worst first, and begins anew.
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
        fn the_worst_are_kept_in_order(latencies_ns in prop::collection::vec(0u64..20, 0..60), limit in 0usize..10) {
            let mut worst = Worst::new(limit);
            for (cpu, &latency_ns) in (0..).zip(&latencies_ns) {
                worst.add(LateEvent { latency_ns, cpu, ..LateEvent::default() });
            }
            let kept: Vec<(u64, u32)> = worst.take().iter().map(|event| (event.latency_ns, event.cpu)).collect();
            let mut all: Vec<(u64, u32)> = latencies_ns.into_iter().zip(0..).collect();
            // Stable: equal ones stay in the order in which they came.
            all.sort_by_key(|&(latency_ns, _)| Reverse(latency_ns));
            all.truncate(limit);
            prop_assert_eq!(kept, all);
            prop_assert!(worst.take().is_empty());
        }
    }
}
