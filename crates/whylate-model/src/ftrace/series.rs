// SPDX-License-Identifier: MIT OR Apache-2.0
//! Distributions by label, filled one value at a time.

use std::collections::{BTreeMap, HashMap};

use crate::histogram::bucket_of;
use crate::{Histogram, Labels, Series};

/// No kernel has more places that disable interrupts than this.
const MOST: usize = 16 << 10;

/// A distribution that is being filled.
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
        // The indices ascend and lie within the layout.
        Histogram::from_buckets(counts, self.sum_ns, self.min_ns.unwrap_or(0), self.max_ns).unwrap_or_default()
    }
}

/// The name of a distribution of sections.
pub(super) const LENGTH: &str = "length";
/// The same of timers.
pub(super) const LATENESS: &str = "lateness";

#[derive(Clone, Debug, Default)]
struct Filled {
    length: Distribution,
    lateness: Distribution,
    values: BTreeMap<&'static str, u64>,
}

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeriesPlace(usize);

#[derive(Debug, Default)]
pub(super) struct AllSeries {
    by_labels: HashMap<Labels, SeriesPlace>,
    filled: Vec<Filled>,
}

impl AllSeries {
    /// That of these labels; `None` when there is no room for another one.
    pub(super) fn place(&mut self, labels: Labels) -> Option<SeriesPlace> {
        let next = SeriesPlace(self.filled.len());
        if self.filled.len() >= MOST {
            return self.by_labels.get(&labels).copied();
        }
        let place = *self.by_labels.entry(labels).or_insert(next);
        if place == next {
            self.filled.push(Filled::default());
        }
        Some(place)
    }

    pub(super) fn section(&mut self, place: SeriesPlace, length_ns: u64) {
        self.filled[place.0].length.add(length_ns);
    }

    pub(super) fn timer(&mut self, place: SeriesPlace, lateness_ns: u64) {
        self.filled[place.0].lateness.add(lateness_ns);
    }

    /// Adds to a figure.
    pub(super) fn value(&mut self, place: SeriesPlace, name: &'static str, more: u64) {
        let value = self.filled[place.0].values.entry(name).or_default();
        *value = value.saturating_add(more);
    }

    /// By label.
    pub(super) fn into_series(self) -> Vec<Series> {
        let sorted: BTreeMap<Labels, SeriesPlace> = self.by_labels.into_iter().collect();
        let series = sorted.into_iter().map(|(labels, place)| {
            let filled = &self.filled[place.0];
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
