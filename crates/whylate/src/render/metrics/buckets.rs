// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buckets of Prometheus' histograms, from those of a latency histogram.

use std::collections::BTreeMap;

use whylate_model::Histogram;

/// Schema of native histograms: each power of two is cut into `2^SCHEMA` buckets.
pub const SCHEMA: i32 = 3;
/// Powers of two at which a classic bucket ends, just below, in nanoseconds: 1 us to 17 s.
const CLASSIC_POWERS: std::ops::RangeInclusive<u32> = 10..=34;

/// Sparse buckets of a native histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Native {
    /// Distance from the previous span, and length, of runs of buckets that follow each other.
    pub spans: Vec<(i32, u32)>,
    /// Difference of each bucket's count from the previous one's.
    pub deltas: Vec<i64>,
    /// Number of latencies of zero.
    pub zeros: u64,
}

impl Native {
    /// Returns the buckets. The count of a bucket goes to the native bucket of its geometric middle as a whole: a
    /// latency is at most 12.5 % off, and no bucket's count ever falls.
    pub fn new(histogram: &Histogram) -> Self {
        let mut native = Native::default();
        let mut counts: BTreeMap<i32, u64> = BTreeMap::new();
        for (range, count) in histogram.iter() {
            let middle_ns = (*range.start() as f64 * *range.end() as f64).sqrt();
            if middle_ns == 0.0 {
                native.zeros += count;
            } else {
                // Bucket i ends at 2^(i / 2^SCHEMA) seconds, inclusive.
                let index = ((middle_ns / 1e9).log2() * f64::from(1 << SCHEMA)).ceil() as i32;
                *counts.entry(index).or_default() += count;
            }
        }
        let (mut next, mut previous) = (0, 0_u64);
        for (index, count) in counts {
            match native.spans.last_mut() {
                Some((_, length)) if index == next => *length += 1,
                _ => native.spans.push((index - next, 1)),
            }
            native.deltas.push(count.wrapping_sub(previous) as i64);
            (next, previous) = (index + 1, count);
        }
        native
    }
}

/// Returns the classic buckets: inclusive upper bounds in seconds with the number of latencies above the previous bound.
pub fn classic(histogram: &Histogram) -> Vec<(f64, u64)> {
    let mut buckets: Vec<(f64, u64)> =
        CLASSIC_POWERS.map(|power| (((1_u64 << power) - 1) as f64 / 1e9, 0)).chain([(f64::INFINITY, 0)]).collect();
    for (range, count) in histogram.iter() {
        buckets[classic_index(*range.end())].1 += count;
    }
    buckets
}

/// Returns the index of a latency's classic bucket.
pub fn classic_index(ns: u64) -> usize {
    let (first, last) = (*CLASSIC_POWERS.start(), *CLASSIC_POWERS.end());
    // The smallest power of two that is larger than the latency.
    let power = u64::BITS - ns.leading_zeros();
    (power.clamp(first, last + 1) - first) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[u64]) -> Histogram {
        let mut all = Histogram::default();
        for &ns in values {
            let bucket = [(whylate_model::histogram::bucket_of(ns) as u32, 1)];
            all.merge(&Histogram::from_buckets(bucket, ns, ns, ns).expect("one bucket"));
        }
        all
    }

    /// Returns the upper bound and count of each native bucket, ascending.
    fn unpacked(native: &Native) -> Vec<(f64, u64)> {
        let (mut index, mut count, mut deltas) = (0, 0_i64, native.deltas.iter());
        let mut buckets = Vec::new();
        for &(distance, length) in &native.spans {
            index += distance;
            for _ in 0..length {
                count += deltas.next().expect("a delta");
                buckets.push((2_f64.powf(f64::from(index) / 8.0), count as u64));
                index += 1;
            }
        }
        buckets
    }

    #[test]
    fn classic_bounds_are_those_of_powers_of_two() {
        let buckets = classic(&of(&[0, 1_023, 1_024, 1_000_000, u64::MAX]));
        assert_eq!(buckets[0], (1.023e-6, 2));
        assert_eq!(buckets[1], (2.047e-6, 1));
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, 1)));
        assert_eq!(buckets.iter().map(|(_, count)| count).sum::<u64>(), 5);
    }

    proptest! {
        #[test]
        fn native_buckets_have_all_latencies_within_an_eighth(
            values in proptest::collection::vec(0_u64..20_000_000_000, 1..200),
        ) {
            let native = Native::new(&of(&values));
            let buckets = unpacked(&native);
            prop_assert_eq!(buckets.iter().map(|(_, count)| count).sum::<u64>() + native.zeros, values.len() as u64);
            prop_assert!(buckets.windows(2).all(|pair| pair[0].0 < pair[1].0));
            // In order, each latency is in or near its bucket.
            let mut sorted: Vec<u64> = values.into_iter().filter(|&ns| ns > 0).collect();
            sorted.sort_unstable();
            let bounds = buckets.iter().flat_map(|&(bound, count)| std::iter::repeat_n(bound, count as usize));
            for (ns, bound) in sorted.into_iter().zip(bounds) {
                let seconds = ns as f64 / 1e9;
                let lower = bound / 2_f64.powf(0.125);
                prop_assert!(seconds <= bound * 1.125 && seconds >= lower * 0.875, "{seconds} in {lower}..{bound}");
            }
        }

        #[test]
        fn classic_bucket_has_latency(ns in any::<u64>()) {
            let bounds: Vec<f64> = classic(&Histogram::default()).iter().map(|(bound, _)| *bound).collect();
            let index = classic_index(ns);
            prop_assert!(ns as f64 / 1e9 <= bounds[index]);
            prop_assert!(index == 0 || ns as f64 / 1e9 > bounds[index - 1]);
        }
    }
}
