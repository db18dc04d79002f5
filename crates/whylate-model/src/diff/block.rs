// SPDX-License-Identifier: MIT OR Apache-2.0
//! Values of one source in one block of time.

use std::collections::HashMap;

use crate::Histogram;
use crate::merge::Merger;

/// Suffix of the names of rates per second.
pub(super) const PER_SECOND: &str = "_per_s";

/// Value of one quantity in one block.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Number of events, values, or samples.
    pub count: u64,
    /// Nanoseconds, or another additive amount.
    pub amount: f64,
    pub histogram: Option<Box<Histogram>>,
}

impl Sample {
    pub fn add(&mut self, other: &Sample) {
        self.count += other.count;
        self.amount += other.amount;
        if let Some(histogram) = &other.histogram {
            self.histogram.get_or_insert_default().merge(histogram);
        }
    }
}

/// One source's values in one block.
#[derive(Clone, Debug, Default)]
pub(super) struct Block {
    pub number: u64,
    /// Total duration of its snapshots.
    pub covered_ns: u64,
    /// Thread time of all stacks, in nanoseconds.
    pub waiting_ns: f64,
    /// Delay that all culprits caused, in nanoseconds.
    pub delayed_ns: f64,
    /// Time that was read of the programs, in nanoseconds.
    pub programs_ns: u64,
    pub samples: HashMap<u32, Sample>,
}

/// A block that is being filled.
#[derive(Debug, Default)]
pub(super) struct OpenBlock {
    pub block: Block,
    pub merger: Merger,
}

/// Blocks of one source on one side.
#[derive(Debug, Default)]
pub(super) struct SourceBlocks {
    pub open: Option<OpenBlock>,
    pub blocks: Vec<Block>,
}
