// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the counts of the BPF programs to series.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Context as _;
use whylate_model::{Histogram, Labels, Series, thread};

use super::By;
use super::names::{RequestNames, operation_name};
use super::skel::BlockSkel;
use super::skel::types::{block_key, bucket_page, distribution, distribution_kind, request_facts, series};
use crate::kernel::attach;
use crate::kernel::distribution::{DistributionOffsets, Distributions};
use crate::kernel::elements::Elements;
use crate::kernel::mapped::MappedArray;
use crate::source::AttachError;

/// Distributions in the order of the phases.
const KINDS: [(distribution_kind, &str); 5] = [
    (distribution_kind::LATENCY, "latency"),
    (distribution_kind::THROTTLED, "throttled"),
    (distribution_kind::QUEUED, "queued"),
    (distribution_kind::DEVICE, "device"),
    (distribution_kind::COMPLETION, "completion"),
];

/// Maximum number of series with labels of their own per snapshot; further requests count as those of `OTHERS`.
const MAX_LABELED_SERIES: usize = 16_384;
/// Label of requests beyond the limit.
const OTHERS: &str = "others";

pub(super) struct SeriesCounts {
    by: By,
    elements: Elements,
    kinds: Vec<(&'static str, Distributions)>,
    /// Series read since the last snapshot: those with equal labels are merged.
    taken: BTreeMap<Labels, Series>,
}

impl SeriesCounts {
    pub fn new(skeleton: &BlockSkel<'_>, by: By, limit: u32) -> Result<Self, AttachError> {
        use libbpf_rs::MapCore as _;
        let maps = &skeleton.maps;
        let entries = maps.bucket_pages.max_entries() as usize;
        let pages = MappedArray::new(maps.bucket_pages.as_fd(), entries, size_of::<bucket_page>());
        let pages = Rc::new(pages.context("cannot map the histograms")?);
        let series = MappedArray::new(maps.series_by_id.as_fd(), limit as usize, size_of::<series>());
        let key = offset_of!(series, key);
        let key = key..key + size_of::<block_key>();
        let elements = Elements::new(series.context("cannot map the series")?, key, limit, &maps.series_by_key);
        let kinds = KINDS.map(|(kind, name)| {
            let at = offset_of!(series, distributions) + kind.0 as usize * size_of::<distribution>();
            (name, Distributions::new(Rc::clone(&pages), DistributionOffsets::new(at)))
        });
        let elements = elements.context("cannot open the table of series")?.with_pages(pages);
        Ok(SeriesCounts { by, elements, kinds: kinds.into(), taken: BTreeMap::new() })
    }

    /// Takes all counts since the last call, without series that counted nothing.
    pub fn take(&mut self, names: &mut RequestNames) -> Vec<Series> {
        self.read(names);
        std::mem::take(&mut self.taken).into_values().collect()
    }

    /// Frees series that counted nothing if the table is half full or half of the pages are used, and all series if it
    /// is nearly full. Their counts are in the next snapshot.
    pub fn make_room(&mut self, names: &mut RequestNames) {
        if self.elements.is_half_full() {
            self.read(names);
        }
    }

    fn read(&mut self, names: &mut RequestNames) {
        let mut counting = self.elements.counting();
        let mut quiet = HashSet::new();
        for &id in &counting {
            let take = |distributions: &mut Distributions| distributions.take(&self.elements.array, id);
            let histograms = histograms(&mut self.kinds, take);
            if histograms.is_empty() {
                quiet.insert(id);
            } else {
                self.add(id, histograms, names);
            }
        }
        if self.elements.is_half_full() {
            if !self.elements.is_nearly_full() {
                counting.retain(|id| quiet.contains(id));
            }
            self.free(&counting, names);
        }
    }

    fn free(&mut self, ids: &[usize], names: &mut RequestNames) {
        let labels: HashMap<usize, Labels> = ids.iter().map(|&id| (id, self.labels(id, names))).collect();
        let SeriesCounts { elements, kinds, taken, .. } = self;
        elements.free(ids, |series, id| {
            let histograms = histograms(kinds, |distributions| distributions.release(series, id));
            let values = values(series, id);
            if let Some(labels) = labels.get(&id)
                && (!histograms.is_empty() || values.values().any(|&value| value > 0.0))
            {
                add(taken, labels.clone(), histograms, values);
            }
        });
    }

    fn add(&mut self, id: usize, histograms: BTreeMap<String, Histogram>, names: &mut RequestNames) {
        let (values, labels) = (values(&self.elements.array, id), self.labels(id, names));
        add(&mut self.taken, labels, histograms, values);
    }

    fn labels(&self, id: usize, names: &mut RequestNames) -> Labels {
        let key = offset_of!(series, key);
        let device = self.elements.array.u32_at(id, key + offset_of!(block_key, device)).load(Relaxed);
        let operation = self.elements.array.u32_at(id, key + offset_of!(block_key, operation)).load(Relaxed);
        let owner = self.elements.array.u64_at(id, key + offset_of!(block_key, owner)).load(Relaxed);
        let mut labels = Labels::new();
        labels.insert("device".to_owned(), names.device(device));
        labels.insert("operation".to_owned(), operation_name(operation).to_owned());
        match self.by {
            By::Device => {}
            By::Process | By::Thread => {
                let comm = offset_of!(series, comm);
                let length = size_of_val(&request_facts::default().comm);
                let name: Vec<i8> =
                    (0..length).map(|at| self.elements.array.u8_at(id, comm + at).load(Relaxed) as i8).collect();
                let (called, number) = if self.by == By::Process { ("process", "pid") } else { ("thread", "tid") };
                labels.insert(called.to_owned(), attach::text(&name));
                labels.insert(number.to_owned(), thread::number(owner as u32));
            }
            By::Cgroup => {
                labels.insert("cgroup".to_owned(), names.cgroup(owner).unwrap_or_else(|| "unknown".to_owned()));
            }
        }
        labels
    }
}

fn histograms(
    kinds: &mut [(&'static str, Distributions)],
    mut take: impl FnMut(&mut Distributions) -> Histogram,
) -> BTreeMap<String, Histogram> {
    let taken = kinds.iter_mut().map(|(name, distributions)| ((*name).to_owned(), take(distributions)));
    taken.filter(|(_, histogram)| !histogram.is_empty()).collect()
}

fn values(series: &MappedArray, id: usize) -> BTreeMap<String, f64> {
    let take = |offset| series.u64_at(id, offset).swap(0, Relaxed) as f64;
    let bytes = ("bytes".to_owned(), take(offset_of!(series, bytes)));
    [bytes, ("errors".to_owned(), take(offset_of!(series, errors)))].into()
}

/// Merges into the series with these labels, or into that of all others.
fn add(
    taken: &mut BTreeMap<Labels, Series>,
    mut labels: Labels,
    histograms: BTreeMap<String, Histogram>,
    values: BTreeMap<String, f64>,
) {
    if taken.len() >= MAX_LABELED_SERIES && !taken.contains_key(&labels) {
        for name in ["process", "thread", "cgroup"] {
            labels.entry(name.to_owned()).and_modify(|label| OTHERS.clone_into(label));
        }
        for number in ["pid", "tid"] {
            labels.entry(number.to_owned()).and_modify(|label| "0".clone_into(label));
        }
    }
    let into = taken.entry(labels).or_insert_with_key(|labels| Series { labels: labels.clone(), ..Series::default() });
    into.absorb(&Series { labels: into.labels.clone(), histograms, values, ..Series::default() });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_series_beyond_the_limit_into_others() {
        let mut taken = BTreeMap::new();
        let labels = |pid: usize| {
            let pairs = [("device", "vda"), ("operation", "read"), ("process", "dd"), ("pid", &pid.to_string())];
            pairs.map(|(name, label)| (name.to_owned(), label.to_owned())).into()
        };
        for pid in (1..=MAX_LABELED_SERIES + 5).chain([1]) {
            let histograms = [("latency".to_owned(), Histogram::zeros(1))].into();
            add(&mut taken, labels(pid), histograms, [("bytes".to_owned(), 4096.0)].into());
        }
        let count = |labels: &Labels| taken[labels].histograms["latency"].count();
        let others: Vec<&Labels> = taken.keys().filter(|labels| labels["process"] == OTHERS).collect();
        assert_eq!(others.len(), 1);
        assert_eq!((count(others[0]), count(&labels(1)), others[0]["pid"].as_str()), (5, 2, "0"));
        assert_eq!(
            taken.values().map(|series| series.values["bytes"]).sum::<f64>(),
            4096.0 * (MAX_LABELED_SERIES + 6) as f64
        );
    }
}
