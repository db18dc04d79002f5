// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lateness of every hrtimer, by function and CPU.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::Link;
use libbpf_rs::skel::{Skel as _, SkelBuilder as _};
use whylate_model::{Histogram, Labels, LateEvent, Series, Snapshot};

use self::skel::types::{bss, bucket_page, timer_key, timer_limits, timer_series, timers_lost};
use super::INFO;
use crate::kernel::attach::{self, Meter};
use crate::kernel::distribution::{DistributionOffsets, Distributions, MAX_PAGES};
use crate::kernel::elements::Elements;
use crate::kernel::mapped::MappedArray;
use crate::kernel::symbols::KernelSymbols;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/irqsoff/timers.skel.rs"));
}

pub(super) const TIMERS: &str = "timers";
/// Eight pages of histogram buckets for each function on a CPU.
const PAGES: u32 = 8 * timer_limits::MAX_TIMER_SERIES.0;
const _: () = assert!(PAGES <= MAX_PAGES, "a page has a number of 16 bits");
/// Reasons for lost events and their names in the output. `timers.bpf.c` describes them.
const LOST: [(timers_lost, &str); 3] = [
    (timers_lost::TIMERS_SERIES_FULL, "series_full"),
    (timers_lost::TIMERS_BUCKETS_FULL, "buckets_full"),
    (timers_lost::TIMERS_UNMATCHED, "unmatched"),
];

pub(super) struct AttachedTimers {
    /// Dropped first, so that no program runs while the rest is dropped.
    _links: Vec<Link>,
    skeleton: skel::TimersSkel<'static>,
    cpus: Vec<u32>,
    series: Elements,
    /// Counters since the last snapshot.
    taken: BTreeMap<Timer, TimerStats>,
    lost: MappedArray,
    latency: Distributions,
    runtime: Distributions,
    symbols: KernelSymbols,
    span: Span,
    meter: Meter,
}

impl AttachedTimers {
    /// Measures the timers of `cpus`, or of all CPUs if empty.
    pub(super) fn new(cpus: &[u32], session: &Session) -> Result<Self, AttachError> {
        attach::require_btf()?;
        attach::silence_libbpf();
        let mut open = skel::TimersSkelBuilder::default().open(attach::open_object())?;
        open.maps.rodata_data.as_mut().context("the BPF object has no settings")?.page_limit = PAGES;
        open.maps.bucket_pages.set_max_entries(PAGES)?;
        let skeleton = attach::load(open)?;
        let maps = &skeleton.maps;
        let series = timer_limits::MAX_TIMER_SERIES.0 as usize;
        let series = MappedArray::new(maps.timer_series_by_id.as_fd(), series, size_of::<timer_series>());
        let key = offset_of!(timer_series, key)..offset_of!(timer_series, key) + size_of::<timer_key>();
        let (series, limit) = (series.context("cannot map the series")?, timer_limits::MAX_TIMER_SERIES.0);
        let series = Elements::new(series, key, limit, &maps.timer_series_id_by_key);
        let pages = MappedArray::new(maps.bucket_pages.as_fd(), PAGES as usize, size_of::<bucket_page>());
        let pages = Rc::new(pages.context("cannot map the histograms")?);
        let lost = MappedArray::inside(maps.bss.as_fd(), offset_of!(bss, lost_by_reason), LOST.len(), size_of::<u64>());
        // The exit program first, so that no function is seen starting without its end.
        let links =
            vec![skeleton.progs.on_hrtimer_expire_exit.attach()?, skeleton.progs.on_hrtimer_expire_entry.attach()?];
        Ok(AttachedTimers {
            _links: links,
            cpus: cpus.to_vec(),
            series: series.context("cannot open the table of series")?,
            taken: BTreeMap::new(),
            lost: lost.context("cannot map the counts of lost events")?,
            latency: Distributions::new(Rc::clone(&pages), DistributionOffsets::new(offset_of!(timer_series, latency))),
            runtime: Distributions::new(pages, DistributionOffsets::new(offset_of!(timer_series, runtime))),
            symbols: session.symbols(),
            span: Span::begin(INFO.card, session),
            meter: Meter::default(),
            skeleton,
        })
    }

    /// Collects all counters before functions are named, as reading the kernel's symbols takes a while. Frees unused
    /// series if the table is half full.
    fn gather(&mut self) {
        let mut unused = Vec::new();
        for id in self.series.counting() {
            let (timer, taken) = (self.timer(id), self.take_one(id));
            if taken.latency.is_empty() && taken.runtime.is_empty() {
                unused.push(id);
            } else {
                self.taken.entry(timer).or_default().add(taken);
            }
        }
        if !self.series.is_half_full() {
            return;
        }
        let timers: BTreeMap<usize, Timer> = unused.iter().map(|&id| (id, self.timer(id))).collect();
        let AttachedTimers { series, taken, latency, runtime, .. } = self;
        series.free(&unused, |series, id| {
            let rest = TimerStats {
                period_ns: series.u64_at(id, offset_of!(timer_series, period_ns)).swap(0, Ordering::Relaxed),
                overruns: series.u64_at(id, offset_of!(timer_series, overruns)).swap(0, Ordering::Relaxed),
                latency: latency.release(series, id),
                runtime: runtime.release(series, id),
            };
            if let (Some(timer), false) = (timers.get(&id), rest.latency.is_empty() && rest.runtime.is_empty()) {
                taken.entry(*timer).or_default().add(rest);
            }
        });
    }

    /// Makes one series of functions with the same name on a CPU.
    fn series(&mut self, taken: BTreeMap<Timer, TimerStats>) -> Vec<Series> {
        let mut by_labels: BTreeMap<Labels, Series> = BTreeMap::new();
        for (timer, one) in taken {
            if !self.cpus.is_empty() && !self.cpus.contains(&timer.cpu) {
                continue;
            }
            let labels = labels(self.symbols.name(timer.function), timer.cpu, timer.is_soft);
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

    fn timer(&self, id: usize) -> Timer {
        let key_at = offset_of!(timer_series, key);
        let number = |offset| self.series.array.u32_at(id, key_at + offset).load(Ordering::Relaxed);
        Timer {
            function: self.series.array.u64_at(id, key_at + offset_of!(timer_key, function)).load(Ordering::Relaxed),
            cpu: number(offset_of!(timer_key, cpu)),
            is_soft: number(offset_of!(timer_key, is_soft)) != 0,
        }
    }

    fn take_one(&mut self, id: usize) -> TimerStats {
        let series = &self.series.array;
        TimerStats {
            period_ns: series.u64_at(id, offset_of!(timer_series, period_ns)).load(Ordering::Relaxed),
            overruns: series.u64_at(id, offset_of!(timer_series, overruns)).swap(0, Ordering::Relaxed),
            latency: self.latency.take(series, id),
            runtime: self.runtime.take(series, id),
        }
    }
}

/// A timer function on one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    function: u64,
    cpu: u32,
    is_soft: bool,
}

/// Counters of one timer function.
#[derive(Default)]
struct TimerStats {
    period_ns: u64,
    overruns: u64,
    latency: Histogram,
    runtime: Histogram,
}

impl TimerStats {
    fn add(&mut self, later: TimerStats) {
        self.period_ns = if later.period_ns > 0 { later.period_ns } else { self.period_ns };
        self.overruns += later.overruns;
        self.latency.merge(&later.latency);
        self.runtime.merge(&later.runtime);
    }
}

fn labels(callback: &str, cpu: u32, is_soft: bool) -> Labels {
    let mode = if is_soft { "soft" } else { "hard" };
    let pairs = [("callback", callback.to_owned()), ("cpu", cpu.to_string()), ("mode", mode.to_owned())];
    pairs.map(|(name, value)| (name.to_owned(), value)).into()
}

impl Attached for AttachedTimers {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.gather();
        let taken = std::mem::take(&mut self.taken);
        let lost = LOST
            .map(|(reason, name)| (name.to_owned(), self.lost.u64_at(reason.0 as usize, 0).swap(0, Ordering::Relaxed)));
        // After all is read: the first read takes longest.
        let mut snapshot = self.span.end(TIMERS);
        snapshot.series = self.series(taken);
        snapshot.lost.extend(lost);
        let statistics = attach::statistics(self.skeleton.object().progs());
        self.meter.report(statistics, &mut snapshot);
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, _each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        if self.series.is_half_full() {
            self.gather();
        }
        // This mode has no late events.
        std::thread::sleep(wait);
        Ok(())
    }

    fn fills_between_snapshots(&self) -> bool {
        true
    }
}
