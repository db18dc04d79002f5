// SPDX-License-Identifier: MIT OR Apache-2.0
//! From the memory in which the programs count to series.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Context as _;
use whylate_model::{Histogram, Labels, Series, thread};

use super::By;
use super::names::{Names, operation_name};
use super::skel::BlockSkel;
use super::skel::types::{
    block_key, bucket_page, distribution, distribution_kind, request_facts, series, series_limits,
};
use crate::attach;
use crate::distribution::{Distributions, Places};
use crate::mapped::MappedArray;
use crate::source::AttachError;

/// In the order of the time that they take.
const KINDS: [(distribution_kind, &str); 5] = [
    (distribution_kind::LATENCY, "latency"),
    (distribution_kind::THROTTLED, "throttled"),
    (distribution_kind::QUEUED, "queued"),
    (distribution_kind::DEVICE, "device"),
    (distribution_kind::COMPLETION, "completion"),
];

pub(super) struct Gathered {
    by: By,
    series: MappedArray,
    kinds: Vec<(&'static str, Distributions)>,
}

impl Gathered {
    pub fn new(skeleton: &BlockSkel<'_>, by: By) -> Result<Self, AttachError> {
        use libbpf_rs::MapCore as _;
        let maps = &skeleton.maps;
        let entries = maps.bucket_pages.max_entries() as usize;
        let pages = MappedArray::new(maps.bucket_pages.as_fd(), entries, size_of::<bucket_page>());
        let pages = Rc::new(pages.context("cannot map the histograms")?);
        let entries = series_limits::MAX_SERIES.0 as usize;
        let series = MappedArray::new(maps.series_by_id.as_fd(), entries, size_of::<series>());
        let kinds = KINDS.map(|(kind, name)| {
            let at = offset_of!(series, distributions) + kind.0 as usize * size_of::<distribution>();
            let places = Places {
                sum_ns: at + offset_of!(distribution, sum_ns),
                max_ns: at + offset_of!(distribution, max_ns),
                inverted_min_ns: at + offset_of!(distribution, inverted_min_ns),
                pages: at + offset_of!(distribution, pages),
            };
            (name, Distributions::new(Rc::clone(&pages), places))
        });
        Ok(Gathered { by, series: series.context("cannot map the series")?, kinds: kinds.into() })
    }

    /// Takes out everything counted since the last time: series with the same labels added up, empty ones left out.
    pub fn take(&mut self, count: u32, names: &mut Names) -> Vec<Series> {
        let mut by_labels: BTreeMap<Labels, Series> = BTreeMap::new();
        for id in 0..(count as usize).min(self.series.entries()) {
            let mut histograms: BTreeMap<String, Histogram> = self
                .kinds
                .iter_mut()
                .map(|(name, distributions)| ((*name).to_owned(), distributions.take(&self.series, id)))
                .collect();
            histograms.retain(|_, histogram| !histogram.is_empty());
            if histograms.is_empty() {
                continue;
            }
            let take = |offset| self.series.u64_at(id, offset).swap(0, Relaxed) as f64;
            let values = [
                ("bytes".to_owned(), take(offset_of!(series, bytes))),
                ("errors".to_owned(), take(offset_of!(series, errors))),
            ];
            let labels = self.labels(id, names);
            let taken = Series { labels: labels.clone(), histograms, values: values.into(), ..Series::default() };
            let into = by_labels
                .entry(labels)
                .or_insert_with_key(|labels| Series { labels: labels.clone(), ..Series::default() });
            into.absorb(&taken);
        }
        by_labels.into_values().collect()
    }

    fn labels(&self, id: usize, names: &mut Names) -> Labels {
        let key = offset_of!(series, key);
        let device = self.series.u32_at(id, key + offset_of!(block_key, device)).load(Relaxed);
        let operation = self.series.u32_at(id, key + offset_of!(block_key, operation)).load(Relaxed);
        let whose = self.series.u64_at(id, key + offset_of!(block_key, whose)).load(Relaxed);
        let mut labels = Labels::new();
        labels.insert("device".to_owned(), names.device(device));
        labels.insert("operation".to_owned(), operation_name(operation).to_owned());
        match self.by {
            By::Device => {}
            By::Process | By::Thread => {
                let comm = offset_of!(series, comm);
                let length = size_of_val(&request_facts::default().comm);
                let name: Vec<i8> =
                    (0..length).map(|at| self.series.u8_at(id, comm + at).load(Relaxed) as i8).collect();
                let (called, number) = if self.by == By::Process { ("process", "pid") } else { ("thread", "tid") };
                labels.insert(called.to_owned(), attach::text(&name));
                labels.insert(number.to_owned(), thread::number(whose as u32));
            }
            By::Cgroup => {
                labels.insert("cgroup".to_owned(), names.cgroup(whose).unwrap_or_else(|| "unknown".to_owned()));
            }
        }
        labels
    }
}
