// SPDX-License-Identifier: MIT OR Apache-2.0
//! Histograms by labels, filled one value at a time.

use std::collections::{BTreeMap, HashMap};

use crate::histogram::bucket_of;
use crate::{Histogram, Labels, Series};

/// Maximum number of series, far above the number of functions that disable interrupts.
const MAX_SERIES: usize = 16 << 10;

/// A histogram being filled.
#[derive(Clone, Debug, Default)]
struct Distribution {
    counts: BTreeMap<u32, u64>,
    sum_ns: u64,
    min_ns: Option<u64>,
    max_ns: u64,
}

impl Distribution {
    fn add(&mut self, ns: u64) {
        *self.counts.entry(bucket_of(ns) as u32).or_default() += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.min_ns = Some(self.min_ns.map_or(ns, |min_ns| min_ns.min(ns)));
        self.max_ns = self.max_ns.max(ns);
    }

    fn histogram(&self) -> Histogram {
        let counts = self.counts.iter().map(|(&bucket, &count)| (bucket, count));
        // The indices ascend and are within the layout.
        Histogram::from_buckets(counts, self.sum_ns, self.min_ns.unwrap_or(0), self.max_ns).unwrap_or_default()
    }
}

/// Name of the histogram of section lengths.
pub(super) const LENGTH: &str = "length";
/// Name of the histogram of timer latenesses.
pub(super) const LATENESS: &str = "lateness";

#[derive(Clone, Debug, Default)]
struct OpenSeries {
    length: Distribution,
    lateness: Distribution,
    values: BTreeMap<&'static str, u64>,
}

/// Index of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeriesIndex(usize);

#[derive(Debug, Default)]
pub(super) struct AllSeries {
    by_labels: HashMap<Labels, SeriesIndex>,
    filled: Vec<OpenSeries>,
}

impl AllSeries {
    /// Returns the series with these labels; `None` if it would exceed the limit.
    pub(super) fn index(&mut self, labels: Labels) -> Option<SeriesIndex> {
        let next = SeriesIndex(self.filled.len());
        if self.filled.len() >= MAX_SERIES {
            return self.by_labels.get(&labels).copied();
        }
        let index = *self.by_labels.entry(labels).or_insert(next);
        if index == next {
            self.filled.push(OpenSeries::default());
        }
        Some(index)
    }

    pub(super) fn section(&mut self, index: SeriesIndex, length_ns: u64) {
        self.filled[index.0].length.add(length_ns);
    }

    pub(super) fn timer(&mut self, index: SeriesIndex, lateness_ns: u64) {
        self.filled[index.0].lateness.add(lateness_ns);
    }

    /// Adds to a value.
    pub(super) fn value(&mut self, index: SeriesIndex, name: &'static str, more: u64) {
        let value = self.filled[index.0].values.entry(name).or_default();
        *value = value.saturating_add(more);
    }

    /// Returns the series, sorted by labels.
    pub(super) fn into_series(self) -> Vec<Series> {
        let sorted: BTreeMap<Labels, SeriesIndex> = self.by_labels.into_iter().collect();
        let series = sorted.into_iter().map(|(labels, index)| {
            let filled = &self.filled[index.0];
            let named = [(LENGTH, &filled.length), (LATENESS, &filled.lateness)];
            let histograms = named.into_iter().filter(|(_, distribution)| !distribution.counts.is_empty());
            Series {
                labels,
                histograms: histograms
                    .map(|(name, distribution)| (name.to_owned(), distribution.histogram()))
                    .collect(),
                values: filled.values.iter().map(|(&name, &value)| (name.to_owned(), value as f64)).collect(),
                ..Series::default()
            }
        });
        series.collect()
    }
}
