// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts of latencies by equal steps, as rtla's histograms have them.

use serde::{Deserialize, Serialize};

/// How many values lie in each step of one width. Exact, where [`Histogram`](crate::Histogram) has buckets that grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steps {
    /// Width of a step; 0 in one that has never been added to.
    pub step_ns: u64,
    /// Step `i` holds values from `i * step_ns` on.
    pub counts: Vec<u64>,
    /// Values beyond the last step.
    pub over: u64,
}

impl Steps {
    /// Adds the counts of another one of the same steps; returns `false` and adds nothing where the steps differ.
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
    fn only_counts_of_the_same_steps_are_added() {
        let mut sum = Steps::default();
        let one = Steps { step_ns: 1_000, counts: vec![1, 2, 0], over: 4 };
        assert!(sum.merge(&one) && sum.merge(&one) && sum.merge(&Steps::default()));
        assert_eq!(sum, Steps { step_ns: 1_000, counts: vec![2, 4, 0], over: 8 });
        assert!(!sum.merge(&Steps { step_ns: 2_000, ..one }));
        assert_eq!(sum.over, 8);
    }
}
