// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the mapped arrays of the BPF programs to series.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use anyhow::Context as _;
use whylate_model::{Histogram, Labels, Series};

use super::skel::WqSkel;
use super::skel::types::{
    bucket_page, distribution, distribution_kind, key_mark, series, series_group, series_slot, series_use,
};
use super::unfinished::{Counts, Unfinished};
use super::{By, WqOptions};
use crate::kernel::attach;
use crate::kernel::distribution::{DistributionOffsets, Distributions, PAGES};
use crate::kernel::mapped::MappedArray;
use crate::source::AttachError;

const KINDS: usize = distribution_kind::DISTRIBUTION_KINDS.0 as usize;

/// Pages for every bucket of every distribution of one series, and page 0, which stands for none.
pub(super) const PAGES_OF_ONE_SERIES: u32 = (KINDS * PAGES + 1) as u32;

/// Returns whether there is one series per CPU, without a key.
pub(super) fn per_cpu(options: &WqOptions) -> bool {
    options.by == By::Nothing && options.only.is_none()
}

pub(super) struct SeriesCounts {
    by: By,
    is_per_cpu: bool,
    phases: bool,
    index: MappedArray,
    series: MappedArray,
    /// Distributions by kind.
    kinds: Vec<Distributions>,
    unfinished: Unfinished,
}

impl SeriesCounts {
    pub(super) fn new(skeleton: &WqSkel<'_>, options: &WqOptions) -> Result<Self, AttachError> {
        use libbpf_rs::MapCore as _;
        let maps = &skeleton.maps;
        let entries = |map: &libbpf_rs::MapMut<'_>| map.max_entries() as usize;
        let pages = MappedArray::new(maps.bucket_pages.as_fd(), entries(&maps.bucket_pages), size_of::<bucket_page>());
        let pages = Rc::new(pages.context("cannot map the histograms")?);
        let is_per_cpu = per_cpu(options);
        let kind = |kind: usize| {
            let at = offset_of!(series, distributions) + kind * size_of::<distribution>();
            let distributions = Distributions::new(Rc::clone(&pages), DistributionOffsets::new(at));
            if is_per_cpu { distributions.without_writing() } else { distributions }
        };
        Ok(SeriesCounts {
            by: options.by,
            is_per_cpu,
            phases: options.phases,
            index: MappedArray::new(maps.series_index.as_fd(), entries(&maps.series_index), size_of::<series_group>())
                .context("cannot map the index of series")?,
            series: MappedArray::new(maps.series_by_id.as_fd(), entries(&maps.series_by_id), size_of::<series>())
                .context("cannot map the series")?,
            kinds: (0..KINDS).map(kind).collect(),
            unfinished: Unfinished::new(skeleton)?,
        })
    }

    /// Takes all counts since the last call: series with equal labels are merged, empty ones are omitted.
    pub(super) fn take_series(&mut self, now_ns: u64) -> Vec<Series> {
        let mut by_labels: BTreeMap<Labels, Series> = BTreeMap::new();
        let unfinished = self.unfinished.by_series(now_ns);
        if self.is_per_cpu {
            for cpu in 0..self.series.entries() {
                let mut taken = self.take_one(cpu, Labels::new());
                add_values(&mut taken, unfinished.get(&cpu));
                by_labels.entry(Labels::new()).or_default().absorb(&taken);
            }
        } else {
            let mut add = |taken: Series| {
                if !taken.values.is_empty() || !taken.histograms.values().all(Histogram::is_empty) {
                    let into = by_labels
                        .entry(taken.labels.clone())
                        .or_insert_with_key(|labels| Series { labels: labels.clone(), ..Series::default() });
                    into.absorb(&taken);
                }
            };
            let mut retired_series = Vec::new();
            for (id, handler, retired) in self.ids_in_use() {
                if let Some(mut taken) = self.take_counting(id) {
                    add_values(&mut taken, unfinished.get(&id));
                    add(taken);
                }
                if retired {
                    retired_series.push((id, handler));
                }
            }
            if !retired_series.is_empty() {
                attach::wait_for_programs();
            }
            for (id, handler) in retired_series {
                self.take_counting(id).into_iter().for_each(&mut add);
                self.recycle(id, handler);
            }
        }
        by_labels.into_values().collect()
    }

    fn take_counting(&mut self, id: usize) -> Option<Series> {
        let counts = self.series.u32_at(id, offset_of!(series, r#use)).load(Acquire) == series_use::SERIES_COUNTS.0;
        counts.then(|| self.take_one(id, self.labels(id)))
    }

    /// Lists every series with a key: its ID, the position of its slot, and whether it is retired.
    fn ids_in_use(&self) -> Vec<(usize, (usize, usize), bool)> {
        let slots = size_of::<series_group>() / size_of::<series_slot>();
        let mut ids = Vec::new();
        for group in 0..self.index.entries() {
            for slot in 0..slots {
                let offset = slot * size_of::<series_slot>() + offset_of!(series_slot, handler);
                let mark = self.index.u64_at(group, offset).load(Acquire);
                if mark != u64::from(key_mark::SLOT_FREE.0) && mark != u64::from(key_mark::SLOT_CLAIMED.0) {
                    let id = group * slots + slot;
                    ids.push((id, (group, offset), mark == u64::from(key_mark::SLOT_RETIRED.0)));
                }
            }
        }
        ids
    }

    /// Frees the slot and pages of a destroyed workqueue, after its counts are taken.
    fn recycle(&mut self, id: usize, (group, offset): (usize, usize)) {
        for distributions in &mut self.kinds {
            distributions.release(&self.series, id);
        }
        self.series.u32_at(id, offset_of!(series, r#use)).store(series_use::SERIES_UNUSED.0, Relaxed);
        self.index.u64_at(group, offset).store(key_mark::SLOT_FREE.0.into(), std::sync::atomic::Ordering::Release);
    }

    fn take_one(&mut self, id: usize, labels: Labels) -> Series {
        let phases = self.phases;
        let mut take = |kind: distribution_kind| self.kinds[kind.0 as usize].take(&self.series, id);
        let mut histograms = BTreeMap::new();
        let immediate = take(distribution_kind::LATENCY_OF_IMMEDIATE);
        if phases {
            // An item that max_active did not hold back was activated at once, and only waited for a worker.
            let deferred = take(distribution_kind::LATENCY_OF_DEFERRED);
            let activate = take(distribution_kind::ACTIVATE_OF_DEFERRED);
            let pool = take(distribution_kind::POOL_OF_DEFERRED);
            histograms.insert("activate", sum(Histogram::zeros(immediate.count()), &activate));
            histograms.insert("pool", sum(immediate.clone(), &pool));
            histograms.insert("latency", sum(immediate, &deferred));
            // A worker that was never switched out was on-CPU all the time.
            let steady = take(distribution_kind::RUNTIME_OF_STEADY);
            let switched = take(distribution_kind::RUNTIME_OF_SWITCHED);
            let none = Histogram::zeros(steady.count());
            histograms.insert("asleep", sum(none.clone(), &take(distribution_kind::ASLEEP_OF_SWITCHED)));
            histograms.insert("ready", sum(none, &take(distribution_kind::READY_OF_SWITCHED)));
            histograms.insert("on_cpu", sum(steady.clone(), &take(distribution_kind::ON_CPU_OF_SWITCHED)));
            histograms.insert("runtime", sum(steady, &switched));
        } else {
            histograms.insert("latency", immediate);
        }
        let histograms = histograms.into_iter().map(|(name, histogram)| (name.to_owned(), histogram)).collect();
        Series { labels, histograms, ..Series::default() }
    }

    fn labels(&self, id: usize) -> Labels {
        let number = |offset: usize| self.series.u32_at(id, offset).load(Relaxed);
        let text_at = |offset: usize, length: usize| {
            let bytes: Vec<u8> = (0..length).map(|i| self.series.u8_at(id, offset + i).load(Relaxed)).collect();
            text_until_nul(&bytes)
        };
        let mut labels = Labels::new();
        let workqueue = || text_at(offset_of!(series, workqueue), size_of_val(&series::default().workqueue));
        match self.by {
            By::Nothing => {}
            By::Handler => {
                handler_labels(
                    &text_at(offset_of!(series, handler), size_of_val(&series::default().handler)),
                    &mut labels,
                );
                labels.insert("workqueue".to_owned(), workqueue());
            }
            By::Workqueue => {
                labels.insert("workqueue".to_owned(), workqueue());
            }
            By::Cpu => {
                labels.insert("cpu".to_owned(), number(offset_of!(series, cpu)).to_string());
            }
            By::Pool => {
                let pool = Pool {
                    id: number(offset_of!(series, pool_id)) as i32,
                    cpu: number(offset_of!(series, pool_cpu)) as i32,
                    nice: number(offset_of!(series, pool_nice)) as i32,
                    is_bh: self.series.u8_at(id, offset_of!(series, pool_is_bh)).load(Relaxed) != 0,
                };
                labels.insert("pool".to_owned(), pool.name());
            }
        }
        labels
    }
}

/// Adds the values of items that have not started or not ended, if there are any.
fn add_values(series: &mut Series, counts: Option<&Counts>) {
    let Some(counts) = counts else { return };
    for (name, oldest, (count, oldest_ns)) in
        [("queued", "oldest_queued_ns", counts.queued), ("running", "oldest_running_ns", counts.running)]
    {
        if count > 0 {
            series.values.insert(name.to_owned(), count as f64);
            series.values.insert(oldest.to_owned(), oldest_ns as f64);
        }
    }
}

/// A worker pool.
struct Pool {
    id: i32,
    /// Negative if its workers are not bound to a CPU.
    cpu: i32,
    nice: i32,
    is_bh: bool,
}

impl Pool {
    /// Formats the name like those of its kworkers: `cpu1`, `cpu1 highpri`, `cpu1 bh`, or `unbound 8`.
    fn name(&self) -> String {
        let affinity = if self.cpu >= 0 { format!("cpu{}", self.cpu) } else { format!("unbound {}", self.id) };
        let kind = match (self.is_bh, self.nice) {
            (true, 0) => " bh",
            (true, _) => " bh highpri",
            (false, nice) if nice < 0 => " highpri",
            (false, _) => "",
        };
        affinity + kind
    }
}

fn sum(mut into: Histogram, other: &Histogram) -> Histogram {
    into.merge(other);
    into
}

/// Splits `function [module]` into labels.
pub(super) fn handler_labels(symbol: &str, labels: &mut Labels) {
    let (handler, module) = symbol.split_once(' ').unwrap_or((symbol, ""));
    labels.insert("handler".to_owned(), handler.to_owned());
    let module = module.trim_start_matches('[').trim_end_matches(']');
    if !module.is_empty() {
        labels.insert("module".to_owned(), module.to_owned());
    }
}

fn text_until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_handler_and_module() {
        let mut labels = Labels::new();
        handler_labels("nvme_scan_work [nvme_core]", &mut labels);
        assert_eq!(labels["handler"], "nvme_scan_work");
        assert_eq!(labels["module"], "nvme_core");
        let mut labels = Labels::new();
        handler_labels("vmstat_update", &mut labels);
        assert_eq!(labels.len(), 1);
    }

    #[test]
    fn names_pools_like_kworkers() {
        let pool = |cpu, nice, is_bh| Pool { id: 8, cpu, nice, is_bh }.name();
        assert_eq!(pool(1, 0, false), "cpu1");
        assert_eq!(pool(1, -20, false), "cpu1 highpri");
        assert_eq!(pool(0, 0, true), "cpu0 bh");
        assert_eq!(pool(-1, 0, false), "unbound 8");
    }

    #[test]
    fn offsets_are_those_of_the_programs() {
        let DistributionOffsets { sum_ns, max_ns, inverted_min_ns, pages } = DistributionOffsets::new(0);
        let expected = [
            offset_of!(distribution, sum_ns),
            offset_of!(distribution, max_ns),
            offset_of!(distribution, inverted_min_ns),
            offset_of!(distribution, pages),
        ];
        assert_eq!([sum_ns, max_ns, inverted_min_ns, pages], expected);
        assert_eq!(PAGES * size_of::<bucket_page>() / size_of::<u64>(), whylate_model::histogram::BUCKETS);
        // The last element of the array is padding.
        assert!(distribution::default().pages.len() >= PAGES);
    }
}
