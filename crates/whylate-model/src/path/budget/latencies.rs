// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latencies that become a histogram many at a time.

use crate::Histogram;

/// How many are counted at once.
const AT_ONCE: usize = 1_024;

/// Latencies, of which not all are counted yet.
#[derive(Debug, Default)]
pub(super) struct Latencies {
    counted: Histogram,
    loose: Vec<u64>,
}

impl Latencies {
    /// Adds one.
    pub fn add(&mut self, ns: u64) {
        self.loose.push(ns);
        if self.loose.len() >= AT_ONCE {
            self.count();
        }
    }

    fn count(&mut self) {
        self.counted.merge(&self.loose.drain(..).collect());
    }

    /// All of them.
    pub fn finish(mut self) -> Histogram {
        self.count();
        self.counted
    }
}
