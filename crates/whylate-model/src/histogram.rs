// SPDX-License-Identifier: MIT OR Apache-2.0
//! Histogram of latencies in nanoseconds.
//!
//! The buckets are those of the `histogram` crate with [`GROUPING_POWER`]: every power of two is cut into eight equal
//! parts, so a bucket is at most 12.5 % wide. The BPF programs count into the same layout (`bpf/histogram.bpf.h`), and
//! a property test compares the two. Sources that count in user space have the room for [`FINE_GROUPING_POWER`], with
//! buckets of at most 1.6 %. Count, sum, minimum and maximum are exact; percentiles are bucket bounds.

use std::ops::RangeInclusive;

use histogram::{Config, Histogram as DenseHistogram, SparseHistogram};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Each power of two is cut into `2^GROUPING_POWER` buckets.
pub const GROUPING_POWER: u8 = 3;

/// Grouping power of the fine layout.
pub const FINE_GROUPING_POWER: u8 = 6;

/// Maximum value as a power of two: every `u64` has a bucket.
pub const MAX_VALUE_POWER: u8 = 64;

const LAYOUT: Config = layout(GROUPING_POWER);
const FINE_LAYOUT: Config = layout(FINE_GROUPING_POWER);

const fn layout(grouping_power: u8) -> Config {
    match Config::new(grouping_power, MAX_VALUE_POWER) {
        Ok(layout) => layout,
        Err(_) => panic!("the histogram layout is valid"),
    }
}

/// Number of buckets in the layout.
pub const BUCKETS: usize = LAYOUT.total_buckets();
/// Number of buckets in the fine layout.
pub const FINE_BUCKETS: usize = FINE_LAYOUT.total_buckets();

/// Returns the index of a value's bucket in the layout, as `bpf/histogram.bpf.h` computes it.
pub fn bucket_of(ns: u64) -> usize {
    bucket_in(GROUPING_POWER, ns)
}

/// Returns the index of a value's bucket in the fine layout.
pub fn fine_bucket_of(ns: u64) -> usize {
    bucket_in(FINE_GROUPING_POWER, ns)
}

fn bucket_in(grouping_power: u8, ns: u64) -> usize {
    let exact_below = 1 << (grouping_power + 1);
    if ns < exact_below {
        return ns as usize;
    }
    let power = ns.ilog2();
    let parts = 1 << grouping_power;
    // The bits below the highest one.
    let within = (ns >> (power - u32::from(grouping_power))) as usize & (parts - 1);
    ((power as usize - usize::from(grouping_power) + 1) << grouping_power) + within
}

/// Number of occurrences of each latency.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    buckets: SparseHistogram,
    /// 128 bits: 2^64 values of 2^64 ns cannot overflow it.
    sum_ns: u128,
    min_ns: u64,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: SparseHistogram::with_config(&LAYOUT), sum_ns: 0, min_ns: u64::MAX, max_ns: 0 }
    }
}

impl Histogram {
    /// Creates a histogram from counts by bucket index, ascending and unique, as a BPF program counts them.
    ///
    /// A reader of live counters may see a value in its bucket and not yet in the sum or the extremes, or the reverse.
    /// These are clamped to the bounds that the buckets imply. Empty buckets are skipped. Returns `None` if the indices
    /// are not ascending or are outside the layout.
    pub fn from_buckets(
        counts: impl IntoIterator<Item = (u32, u64)>,
        sum_ns: u64,
        min_ns: u64,
        max_ns: u64,
    ) -> Option<Self> {
        Self::from_layout(LAYOUT, counts, sum_ns, min_ns, max_ns)
    }

    /// Creates a histogram from counts by bucket index of the fine layout.
    pub fn from_fine_buckets(
        counts: impl IntoIterator<Item = (u32, u64)>,
        sum_ns: u64,
        min_ns: u64,
        max_ns: u64,
    ) -> Option<Self> {
        Self::from_layout(FINE_LAYOUT, counts, sum_ns, min_ns, max_ns)
    }

    fn from_layout(
        layout: Config,
        counts: impl IntoIterator<Item = (u32, u64)>,
        sum_ns: u64,
        min_ns: u64,
        max_ns: u64,
    ) -> Option<Self> {
        let (index, count): (Vec<u32>, Vec<u64>) = counts.into_iter().filter(|&(_, n)| n > 0).unzip();
        if index.is_empty() {
            return Some(Histogram::default());
        }
        let buckets = SparseHistogram::from_parts(layout, index, count).ok()?;
        let bound = |value: fn(&histogram::Bucket) -> u64| {
            buckets.iter().map(|bucket| u128::from(value(&bucket)) * u128::from(bucket.count())).sum::<u128>()
        };
        let (lowest_sum, highest_sum) = (bound(histogram::Bucket::start), bound(histogram::Bucket::end));
        let first = buckets.iter().next()?.range();
        let last = buckets.iter().last()?.range();
        Some(Histogram {
            sum_ns: u128::from(sum_ns).clamp(lowest_sum, highest_sum),
            min_ns: min_ns.clamp(*first.start(), *first.end()),
            max_ns: max_ns.clamp(*last.start(), *last.end()),
            buckets,
        })
    }

    /// Replaces the contents by a printed histogram: upper bounds with their counts, in the layout of this grouping
    /// power.
    pub(crate) fn set_from_printed(
        &mut self,
        grouping_power: u8,
        buckets: &[(u64, u64)],
        sum_ns: u64,
        min_ns: u64,
        max_ns: u64,
    ) {
        let was = std::mem::take(self);
        let (_, index, count) = was.buckets.into_parts();
        let layout = if grouping_power == FINE_GROUPING_POWER { FINE_LAYOUT } else { LAYOUT };
        let buckets = sparse(layout, buckets, (index, count));
        if !buckets.is_empty() {
            *self = Histogram { buckets, sum_ns: sum_ns.into(), min_ns, max_ns };
        }
    }

    /// Returns a histogram of `count` zeros.
    pub fn zeros(count: u64) -> Self {
        Histogram::from_buckets([(0, count)], 0, 0, 0).unwrap_or_default()
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.buckets.count().iter().sum()
    }

    /// Returns whether no value was recorded.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Returns the sum of all values.
    pub fn sum_ns(&self) -> u128 {
        self.sum_ns
    }

    /// Returns the smallest value, exact; 0 when empty.
    pub fn min_ns(&self) -> u64 {
        if self.is_empty() { 0 } else { self.min_ns }
    }

    /// Returns the largest value, exact; 0 when empty.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// Returns the number of values of `ns` or more: a lower bound, as a bucket that begins below may have some too, but
    /// at least 1 if the largest is one.
    pub fn count_from(&self, ns: u64) -> u64 {
        let counted = self.iter().filter(|(of, _)| *of.start() >= ns).map(|(_, count)| count).sum::<u64>();
        counted.max(u64::from(!self.is_empty() && self.max_ns >= ns))
    }

    /// Returns the arithmetic mean, exact up to the nanosecond below; 0 when empty.
    pub fn mean_ns(&self) -> u64 {
        let mean = self.sum_ns.checked_div(self.count().into()).unwrap_or(0);
        u64::try_from(mean).unwrap_or(u64::MAX)
    }

    /// Returns the quantile (0 to 1) of the values: the upper bound of its bucket, but at most the maximum. It is at
    /// most 12.5 % above the true value (1.6 % in the fine layout), never below it; 0 when empty.
    pub fn quantile_ns(&self, quantile: f64) -> u64 {
        let total = self.count();
        // The smallest rank that covers the share; at least the first value.
        let rank = ((quantile.clamp(0.0, 1.0) * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        for (range, count) in self.iter() {
            seen += count;
            if seen >= rank {
                return (*range.end()).min(self.max_ns);
            }
        }
        0
    }

    /// Returns the quantile as JSON has it: rounded up to as many digits as the width of a bucket justifies, three, or
    /// four in the fine layout; at most the maximum, which is exact.
    pub fn printed_quantile_ns(&self, quantile: f64) -> u64 {
        let digits = if self.is_fine() { 4 } else { 3 };
        rounded_up(self.quantile_ns(quantile), digits).min(self.max_ns)
    }

    /// Iterates over the non-empty buckets, ascending: inclusive bounds in nanoseconds, and count.
    pub fn iter(&self) -> impl Iterator<Item = (RangeInclusive<u64>, u64)> + '_ {
        self.buckets.iter().map(|bucket| (bucket.range(), bucket.count()))
    }

    /// Adds all values of `other`. With different layouts, the result has the coarser one.
    pub fn merge(&mut self, other: &Histogram) {
        if other.is_empty() {
            return;
        }
        if self.is_empty() {
            *self = other.clone();
            return;
        }
        match self.buckets.config() == other.buckets.config() {
            true => add(&mut self.buckets, &other.buckets),
            false => {
                self.buckets = coarse(&self.buckets);
                add(&mut self.buckets, &coarse(&other.buckets));
            }
        }
        self.sum_ns += other.sum_ns;
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the histogram in the usual layout, with fewer buckets.
    pub fn coarse(&self) -> Histogram {
        if self.is_fine() { Histogram { buckets: coarse(&self.buckets), ..self.clone() } } else { self.clone() }
    }

    fn is_fine(&self) -> bool {
        self.buckets.config() == FINE_LAYOUT
    }
}

/// Rounds a number up to its first digits.
pub(crate) fn rounded_up(ns: u64, digits: u32) -> u64 {
    let unit = 10u64.pow(ns.checked_ilog10().map_or(0, |log| (log + 1).saturating_sub(digits)));
    ns.div_ceil(unit).saturating_mul(unit)
}

/// Converts fine buckets to coarse ones; each fine bucket is within one coarse bucket.
fn coarse(buckets: &SparseHistogram) -> SparseHistogram {
    SparseHistogram::from(&dense(LAYOUT, buckets.iter().map(|bucket| (bucket.end(), bucket.count()))))
}

/// Adds counts of one layout; they wrap at 2^64, as the kernel's do.
fn add(sum: &mut SparseHistogram, other: &SparseHistogram) {
    let (layout, mut index, mut count) = std::mem::replace(sum, SparseHistogram::with_config(&LAYOUT)).into_parts();
    let (mut at, mut missing) = (0, 0);
    for (&bucket, &more) in other.index().iter().zip(other.count()) {
        while index.get(at).is_some_and(|&known| known < bucket) {
            at += 1;
        }
        match index.get(at) {
            Some(&known) if known == bucket => count[at] = count[at].wrapping_add(more),
            _ => missing += 1,
        }
    }
    // Usually most buckets exist already. Missing ones are merged in from the end.
    let (mut from, mut to) = (index.len(), index.len() + missing);
    index.resize(to, 0);
    count.resize(to, 0);
    for (&bucket, &more) in other.index().iter().zip(other.count()).rev() {
        if from == to {
            break;
        }
        while from > 0 && index[from - 1] > bucket {
            (from, to) = (from - 1, to - 1);
            (index[to], count[to]) = (index[from], count[from]);
        }
        if from == 0 || index[from - 1] != bucket {
            to -= 1;
            (index[to], count[to]) = (bucket, more);
        }
    }
    if let Ok(added) = SparseHistogram::from_parts(layout, index, count) {
        *sum = added;
    }
}

/// Creates buckets from printed upper bounds, which ascend, and counts. Reuses `memory`.
fn sparse(layout: Config, counts: &[(u64, u64)], memory: (Vec<u32>, Vec<u64>)) -> SparseHistogram {
    let power = if layout == FINE_LAYOUT { FINE_GROUPING_POWER } else { GROUPING_POWER };
    let (mut index, mut count) = memory;
    index.clear();
    index.extend(counts.iter().map(|&(ns, _)| bucket_in(power, ns) as u32));
    let is_as_printed = index.is_sorted_by(|a, b| a < b) && counts.iter().all(|&(_, count)| count > 0);
    count.clear();
    count.extend(counts.iter().map(|&(_, count)| count));
    let buckets = is_as_printed.then(|| SparseHistogram::from_parts(layout, index, count).ok()).flatten();
    buckets.unwrap_or_else(|| SparseHistogram::from(&dense(layout, counts.iter().copied())))
}

fn dense(layout: Config, counts: impl Iterator<Item = (u64, u64)>) -> DenseHistogram {
    let mut dense = DenseHistogram::with_config(&layout);
    for (ns, count) in counts {
        // Every layout covers every u64.
        let _ = dense.add(ns, count);
    }
    dense
}

impl FromIterator<u64> for Histogram {
    fn from_iter<I: IntoIterator<Item = u64>>(values_ns: I) -> Self {
        let mut values_ns: Vec<u64> = values_ns.into_iter().collect();
        values_ns.sort_unstable();
        let (Some(&min_ns), Some(&max_ns)) = (values_ns.first(), values_ns.last()) else { return Histogram::default() };
        let alike = values_ns.chunk_by(|&one, &other| bucket_of(one) == bucket_of(other));
        let (index, count) = alike.map(|values| (bucket_of(values[0]) as u32, values.len() as u64)).unzip();
        let sum_ns = values_ns.iter().copied().map(u128::from).sum();
        // The indices ascend, and the layout covers every u64.
        let buckets = SparseHistogram::from_parts(LAYOUT, index, count);
        buckets.map_or_else(|_| Histogram::default(), |buckets| Histogram { buckets, sum_ns, min_ns, max_ns })
    }
}

/// A distribution as `--json` prints it.
#[derive(Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Printed {
    /// Number of values.
    count: u64,
    /// Smallest value, exact.
    min_ns: u64,
    /// Arithmetic mean, exact up to the nanosecond below.
    mean_ns: u64,
    /// Median: as each percentile the upper bound of its bucket, rounded up to the digits that the bucket justifies, and
    /// at most the maximum.
    p50_ns: u64,
    /// 90th percentile.
    p90_ns: u64,
    /// 99th percentile.
    p99_ns: u64,
    /// 99.9th percentile.
    p999_ns: u64,
    /// Largest value, exact.
    max_ns: u64,
    /// Grouping power of the layout of the buckets: 3 if absent, or 6.
    #[serde(default = "usual_power", skip_serializing_if = "is_usual")]
    grouping_power: u8,
    // From the mean, a reader could restore the sum only to within `count` nanoseconds.
    /// Sum of all values, exact.
    sum_ns: u64,
    /// Inclusive upper bound in nanoseconds, and count, of each bucket that is not empty.
    buckets: Vec<(u64, u64)>,
}

#[cfg(test)]
impl schemars::JsonSchema for Histogram {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Histogram".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        Printed::json_schema(generator)
    }
}

fn usual_power() -> u8 {
    GROUPING_POWER
}

fn is_usual(grouping_power: &u8) -> bool {
    *grouping_power == GROUPING_POWER
}

impl Serialize for Histogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Printed {
            count: self.count(),
            min_ns: self.min_ns(),
            mean_ns: self.mean_ns(),
            p50_ns: self.printed_quantile_ns(0.5),
            p90_ns: self.printed_quantile_ns(0.9),
            p99_ns: self.printed_quantile_ns(0.99),
            p999_ns: self.printed_quantile_ns(0.999),
            max_ns: self.max_ns(),
            grouping_power: if self.is_fine() { FINE_GROUPING_POWER } else { GROUPING_POWER },
            sum_ns: u64::try_from(self.sum_ns).unwrap_or(u64::MAX),
            buckets: self.iter().map(|(range, count)| (*range.end(), count)).collect(),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Histogram {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Printed { grouping_power, buckets, sum_ns, min_ns, max_ns, .. } = Printed::deserialize(deserializer)?;
        let mut read = Histogram::default();
        read.set_from_printed(grouping_power, &buckets, sum_ns, min_ns, max_ns);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn exact_quantile(sorted: &[u64], quantile: f64) -> u64 {
        let rank = ((quantile * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len());
        sorted[rank - 1]
    }

    #[test]
    fn empty_histogram_is_all_zero() {
        let empty = Histogram::default();
        assert_eq!(
            (empty.count(), empty.min_ns(), empty.mean_ns(), empty.max_ns(), empty.quantile_ns(0.99)),
            (0, 0, 0, 0, 0)
        );
    }

    #[test]
    fn layout_size_matches_bpf_header() {
        assert_eq!(BUCKETS, 496);
    }

    #[test]
    fn partly_counted_value_is_clamped_to_its_bucket() {
        let half = Histogram::from_buckets([(100, 1)], 0, u64::MAX, 0).expect("a valid bucket");
        let range = half.iter().next().expect("one bucket").0;
        for value_ns in [half.min_ns(), half.mean_ns(), half.max_ns(), half.quantile_ns(0.5)] {
            assert!(range.contains(&value_ns), "{value_ns} is outside {range:?}");
        }
    }

    #[test]
    fn printed_quantile_has_no_more_digits_than_its_bucket() {
        let printed = |values: &[u64]| values.iter().copied().collect::<Histogram>().printed_quantile_ns(0.5);
        // The buckets end at 12,884,901,887 and 13,311.
        assert_eq!(printed(&[12_345_678_901, 20_000_000_000]), 12_900_000_000);
        assert_eq!(printed(&[12_345, 100_000]), 13_400);
        assert_eq!(printed(&[7, 1_000]), 7);
        assert_eq!(printed(&[12_345]), 12_345, "the maximum is exact");
        assert_eq!(printed(&[u64::MAX - 1, u64::MAX]), u64::MAX);
        assert_eq!(Histogram::default().printed_quantile_ns(0.5), 0);
        let fine = Histogram::from_fine_buckets([(fine_bucket_of(12_345_678) as u32, 1), (2_000, 1)], 0, 0, u64::MAX);
        assert_eq!(fine.expect("two buckets").printed_quantile_ns(0.5), 12_460_000);
    }

    #[test]
    fn refuses_unordered_or_invalid_buckets() {
        assert!(Histogram::from_buckets([(5, 1), (4, 1)], 0, 0, 0).is_none());
        assert!(Histogram::from_buckets([(496, 1)], 0, 0, 0).is_none());
    }

    proptest! {
        #[test]
        fn value_is_within_its_bucket(power in 0u32..64, below in any::<u64>()) {
            for ns in [below >> (63 - power), (1u64 << power) - 1, 1 << power] {
                let one: Histogram = [ns].into_iter().collect();
                let named = Histogram::from_buckets([(bucket_of(ns) as u32, 1)], ns, ns, ns);
                prop_assert_eq!(Some(one), named);
                let fine = Histogram::from_fine_buckets([(fine_bucket_of(ns) as u32, 1)], 0, u64::MAX, 0).expect("a bucket");
                let range = fine.iter().next().expect("one bucket").0;
                prop_assert!(range.contains(&ns));
                prop_assert!((range.end() - range.start()) as f64 <= ns as f64 / 64.0);
            }
        }

        #[test]
        fn fine_histogram_round_trips_and_can_be_coarsened(values in prop::collection::vec(0u64..1 << 50, 1..100)) {
            let mut fine = Histogram::default();
            for &ns in &values {
                fine.merge(&Histogram::from_fine_buckets([(fine_bucket_of(ns) as u32, 1)], ns, ns, ns).expect("a bucket"));
            }
            let text = serde_json::to_string(&fine).expect("a histogram serialises");
            prop_assert_eq!(&serde_json::from_str::<Histogram>(&text).expect("and parses"), &fine);
            let mut coarse: Histogram = [7].into_iter().collect();
            coarse.merge(&fine);
            prop_assert_eq!(coarse, std::iter::once(7).chain(values).collect());
        }

        #[test]
        fn quantiles_are_in_bucket_of_true_value(
            mut values in prop::collection::vec(0u64..1 << 40, 1..300),
            quantile in 0.0f64..=1.0,
        ) {
            let histogram: Histogram = values.iter().copied().collect();
            values.sort_unstable();
            let exact = exact_quantile(&values, quantile);
            let measured = histogram.quantile_ns(quantile);
            prop_assert!(measured >= exact);
            prop_assert!(measured as f64 <= exact as f64 * 1.125 + 1.0);
            prop_assert!(measured <= histogram.max_ns());
            let printed = histogram.printed_quantile_ns(quantile);
            prop_assert!(measured <= printed && printed <= histogram.max_ns());
            prop_assert!(printed as f64 <= measured as f64 * 1.01);
        }

        #[test]
        fn merge_equals_recording_both(a in prop::collection::vec(any::<u64>(), 0..100), b in prop::collection::vec(any::<u64>(), 0..100)) {
            let mut merged: Histogram = a.iter().copied().collect();
            merged.merge(&b.iter().copied().collect());
            let together: Histogram = a.iter().chain(&b).copied().collect();
            prop_assert_eq!(merged, together);
        }

        #[test]
        fn histogram_survives_json(values in prop::collection::vec(0u64..1 << 50, 0..100)) {
            let histogram: Histogram = values.into_iter().collect();
            let text = serde_json::to_string(&histogram).expect("a histogram serialises");
            prop_assert_eq!(serde_json::from_str::<Histogram>(&text).expect("and parses"), histogram);
        }
    }
}
