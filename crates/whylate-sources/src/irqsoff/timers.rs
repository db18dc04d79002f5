// SPDX-License-Identifier: MIT OR Apache-2.0
//! How late every hrtimer is, by its function and CPU.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
use whylate_model::{Histogram, Labels, LateEvent, Series, Snapshot};

use self::skel::types::{bucket_page, distribution, timer_key, timer_limits, timer_series, timers_lost};
use super::INFO;
use crate::attach::{self, Meter};
use crate::distribution::{Distributions, Places};
use crate::mapped::MappedArray;
use crate::session::{Session, Span};
use crate::source::{AttachError, Attached};
use crate::symbols::KernelSymbols;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/irqsoff/timers.skel.rs"));
}

pub(super) const TIMERS: &str = "timers";
/// Eight pages of buckets for each function on a CPU.
const PAGES: u32 = 8 * timer_limits::MAX_TIMER_SERIES.0;
/// Every reason for a lost event, with its name in the output. What it means stands at the enum.
const LOST: [(timers_lost, &str); 3] = [
    (timers_lost::TIMERS_SERIES_FULL, "series_full"),
    (timers_lost::TIMERS_BUCKETS_FULL, "buckets_full"),
    (timers_lost::TIMERS_UNMATCHED, "unmatched"),
];

pub(super) struct AttachedTimers {
    /// First, so that no program runs while the rest goes.
    _links: Vec<Link>,
    skeleton: skel::TimersSkel<'static>,
    cpus: Vec<u32>,
    series: MappedArray,
    lost: MappedArray,
    latency: Distributions,
    runtime: Distributions,
    symbols: KernelSymbols,
    span: Span,
    meter: Meter,
}

impl AttachedTimers {
    /// Of these CPUs; of all where there are none.
    pub(super) fn new(cpus: &[u32], session: &Session) -> Result<Self, AttachError> {
        attach::require_btf()?;
        attach::silence_libbpf();
        let mut open = skel::TimersSkelBuilder::default().open(attach::open_object())?;
        open.maps.rodata_data.as_mut().context("the BPF object has no settings")?.page_limit = PAGES;
        open.maps.bucket_pages.set_max_entries(PAGES)?;
        let skeleton = open.load()?;
        let maps = &skeleton.maps;
        let series = timer_limits::MAX_TIMER_SERIES.0 as usize;
        let series = MappedArray::new(maps.timer_series_by_id.as_fd(), series, size_of::<timer_series>());
        let pages = MappedArray::new(maps.bucket_pages.as_fd(), PAGES as usize, size_of::<bucket_page>());
        let pages = Rc::new(pages.context("cannot map the histograms")?);
        let lost = MappedArray::new(maps.lost_by_reason.as_fd(), LOST.len(), size_of::<u64>());
        // The end of a function first, so that none is seen being called whose end is not.
        let links =
            vec![skeleton.progs.on_hrtimer_expire_exit.attach()?, skeleton.progs.on_hrtimer_expire_entry.attach()?];
        Ok(AttachedTimers {
            _links: links,
            cpus: cpus.to_vec(),
            series: series.context("cannot map the series")?,
            lost: lost.context("cannot map the counts of lost events")?,
            latency: Distributions::new(Rc::clone(&pages), places(offset_of!(timer_series, latency))),
            runtime: Distributions::new(pages, places(offset_of!(timer_series, runtime))),
            symbols: session.symbols(),
            span: Span::begin(INFO.card, session),
            meter: Meter::default(),
            skeleton,
        })
    }

    /// What was counted since the last call, all at once: reading the kernel's symbols to name functions takes a while.
    fn take_all(&mut self) -> Vec<Taken> {
        let given = self.skeleton.maps.bss_data.as_deref().map_or(0, |data| data.timer_series_count);
        let ids = 0..given.min(timer_limits::MAX_TIMER_SERIES.0) as usize;
        ids.map(|id| self.take_one(id)).collect()
    }

    /// Functions on CPUs. Those that have got two numbers are added up.
    fn series(&mut self, taken: Vec<Taken>) -> Vec<Series> {
        let mut by_labels: BTreeMap<Labels, Series> = BTreeMap::new();
        for one in taken {
            let is_measured = self.cpus.is_empty() || self.cpus.contains(&one.cpu);
            if (one.latency.is_empty() && one.runtime.is_empty()) || !is_measured {
                continue;
            }
            let labels = labels(self.symbols.name(one.function), one.cpu, one.is_soft);
            let mut values = BTreeMap::from([("overruns".to_owned(), one.overruns as f64)]);
            if one.period_ns > 0 {
                values.insert("period_ns".to_owned(), one.period_ns as f64);
            }
            let histograms = [("latency".to_owned(), one.latency), ("runtime".to_owned(), one.runtime)].into();
            let series = Series { histograms, values, ..Series::default() };
            let into = by_labels
                .entry(labels)
                .or_insert_with_key(|labels| Series { labels: labels.clone(), ..Series::default() });
            into.absorb(&series);
        }
        by_labels.into_values().collect()
    }

    fn take_one(&mut self, id: usize) -> Taken {
        let key_at = offset_of!(timer_series, key);
        let number = |offset| self.series.u32_at(id, key_at + offset).load(Ordering::Relaxed);
        let counter = |offset| self.series.u64_at(id, offset);
        Taken {
            function: counter(key_at + offset_of!(timer_key, function)).load(Ordering::Relaxed),
            cpu: number(offset_of!(timer_key, cpu)),
            is_soft: number(offset_of!(timer_key, is_soft)) != 0,
            period_ns: counter(offset_of!(timer_series, period_ns)).load(Ordering::Relaxed),
            overruns: counter(offset_of!(timer_series, overruns)).swap(0, Ordering::Relaxed),
            latency: self.latency.take(&self.series, id),
            runtime: self.runtime.take(&self.series, id),
        }
    }
}

/// What was counted of one function on one CPU.
struct Taken {
    function: u64,
    cpu: u32,
    is_soft: bool,
    period_ns: u64,
    overruns: u64,
    latency: Histogram,
    runtime: Histogram,
}

fn labels(callback: &str, cpu: u32, is_soft: bool) -> Labels {
    let mode = if is_soft { "soft" } else { "hard" };
    let pairs = [("callback", callback.to_owned()), ("cpu", cpu.to_string()), ("mode", mode.to_owned())];
    pairs.map(|(name, value)| (name.to_owned(), value)).into()
}

fn places(at: usize) -> Places {
    Places {
        sum_ns: at + offset_of!(distribution, sum_ns),
        max_ns: at + offset_of!(distribution, max_ns),
        inverted_min_ns: at + offset_of!(distribution, inverted_min_ns),
        pages: at + offset_of!(distribution, pages),
    }
}

impl Attached for AttachedTimers {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let taken = self.take_all();
        let lost = LOST
            .map(|(reason, name)| (name.to_owned(), self.lost.u64_at(reason.0 as usize, 0).swap(0, Ordering::Relaxed)));
        // Once all is read: reading it the first time takes longest.
        let mut snapshot = self.span.end(TIMERS);
        snapshot.series = self.series(taken);
        snapshot.lost.extend(lost);
        let statistics = attach::statistics(self.skeleton.object().progs());
        self.meter.tell(statistics, &mut snapshot);
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, _each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        // There are none.
        std::thread::sleep(wait);
        Ok(())
    }
}
