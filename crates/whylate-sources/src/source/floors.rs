// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency thresholds of the worst activations of each CPU, so that the programs send no others.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// The worst latencies of each CPU so far.
#[derive(Debug)]
pub(crate) struct Floors {
    limit: usize,
    worst_ns: BTreeMap<u32, BinaryHeap<Reverse<u64>>>,
}

impl Floors {
    /// Keeps the worst `limit` latencies of each CPU.
    pub(crate) fn new(limit: usize) -> Self {
        Floors { limit, worst_ns: BTreeMap::new() }
    }

    pub(crate) fn forget(&mut self) {
        self.worst_ns.clear();
    }

    /// Adds a latency. Returns the minimum of further worst ones, once there are `limit` latencies.
    pub(crate) fn add(&mut self, cpu: u32, latency_ns: u64) -> Option<u64> {
        let worst_ns = self.worst_ns.entry(cpu).or_default();
        worst_ns.push(Reverse(latency_ns));
        if worst_ns.len() > self.limit {
            worst_ns.pop();
        }
        let &Reverse(smallest_ns) = worst_ns.peek().filter(|_| worst_ns.len() == self.limit)?;
        Some(smallest_ns + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floor_rises_to_smallest_of_worst() {
        let mut floors = Floors::new(2);
        assert_eq!(floors.add(0, 50), None);
        assert_eq!(floors.add(0, 10), Some(11));
        assert_eq!(floors.add(0, 30), Some(31));
        assert_eq!(floors.add(0, 20), Some(31));
        assert_eq!(floors.add(1, 5), None);
    }
}
