// SPDX-License-Identifier: MIT OR Apache-2.0
//! Histogram with equal steps, as rtla has them.

use serde::{Deserialize, Serialize};

/// Number of values in each step of one width: linear, unlike the buckets of [`Histogram`](crate::Histogram).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Steps {
    /// Width of a step in nanoseconds; 0 if nothing was added yet.
    pub step_ns: u64,
    /// Counts; step `i` holds values from `i * step_ns` on.
    pub counts: Vec<u64>,
    /// Number of values beyond the last step.
    pub over: u64,
}

impl Steps {
    /// Adds the counts of `other`; returns `false` and adds nothing if the step widths differ.
    pub fn merge(&mut self, other: &Steps) -> bool {
        if self.step_ns == 0 {
            *self = other.clone();
            return true;
        }
        if (self.step_ns, self.counts.len()) != (other.step_ns, other.counts.len()) {
            return other.step_ns == 0;
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, other)| *mine = mine.saturating_add(*other));
        self.over = self.over.saturating_add(other.over);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_only_equal_step_widths() {
        let mut sum = Steps::default();
        let one = Steps { step_ns: 1_000, counts: vec![1, 2, 0], over: 4 };
        assert!(sum.merge(&one) && sum.merge(&one) && sum.merge(&Steps::default()));
        assert_eq!(sum, Steps { step_ns: 1_000, counts: vec![2, 4, 0], over: 8 });
        assert!(!sum.merge(&Steps { step_ns: 2_000, ..one }));
        assert_eq!(sum.over, 8);
    }
}
