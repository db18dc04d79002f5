// SPDX-License-Identifier: MIT OR Apache-2.0
//! Adds latencies to a histogram in batches.

use crate::Histogram;

/// Batch size.
const AT_ONCE: usize = 1_024;

/// A histogram with a batch of latencies that are not counted yet.
#[derive(Debug, Default)]
pub(super) struct Latencies {
    counted: Histogram,
    loose: Vec<u64>,
}

impl Latencies {
    /// Adds a latency in nanoseconds.
    pub fn add(&mut self, ns: u64) {
        self.loose.push(ns);
        if self.loose.len() >= AT_ONCE {
            self.count();
        }
    }

    fn count(&mut self) {
        self.counted.merge(&self.loose.drain(..).collect());
    }

    /// Returns the histogram of all latencies.
    pub fn finish(mut self) -> Histogram {
        self.count();
        self.counted
    }
}
