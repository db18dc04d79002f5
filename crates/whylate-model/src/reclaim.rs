// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory stalls: the time in which threads reclaimed or compacted memory, as they needed some.
//!
//! While a thread reclaims, it may run, wait for a CPU, and sleep. So this time is part of the other parts of its time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{ActorName, Histogram};

/// Maximum number of processes that are named for each reason.
const MAX_RECLAIMERS: usize = 3;

/// Kind of reclaim, by what is short of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReclaimKind {
    /// Memory of a cgroup that is at its limit (`memory.max` or `memory.high`).
    #[default]
    Cgroup,
    /// Memory of the machine: little is free (direct reclaim).
    Direct,
    /// Memory is moved, so that contiguous pages become free.
    Compaction,
}

/// Reason for which memory is reclaimed: the kind, and the ID of the cgroup at its limit if it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReclaimReason {
    /// Kind of reclaim.
    pub kind: ReclaimKind,
    /// ID of the cgroup.
    pub cgroup: Option<u64>,
}

/// A span of time in which a thread reclaimed memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimSpan {
    /// TID as shown.
    pub tid: u32,
    /// Start (CLOCK_MONOTONIC).
    pub from_ns: u64,
    /// End (CLOCK_MONOTONIC).
    pub to_ns: u64,
    /// Why memory was reclaimed.
    pub reason: ReclaimReason,
}

/// PID as shown, and name of a process.
pub type Process = (u32, String);

/// Number of pages that processes freed, by reason.
pub type FreedPages = HashMap<ReclaimReason, HashMap<Process, u64>>;

/// What was recorded of all threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimRecords {
    /// Spans by thread and time. Those of one thread do not overlap.
    spans: Vec<ReclaimSpan>,
    freed: FreedPages,
    /// Paths of cgroups, by ID.
    cgroups: HashMap<u64, String>,
}

impl ReclaimRecords {
    /// Sorts spans. Those of one thread must not overlap.
    pub fn new(mut spans: Vec<ReclaimSpan>, freed: FreedPages, cgroups: HashMap<u64, String>) -> Self {
        spans.retain(|span| span.from_ns < span.to_ns);
        spans.sort_unstable_by_key(|span| (span.tid, span.to_ns));
        ReclaimRecords { spans, freed, cgroups }
    }

    /// Returns the indexes of a thread's spans that overlap with a span of time.
    fn indexes_of_thread(&self, tid: u32, time: &Range<u64>) -> Range<usize> {
        if time.is_empty() {
            return 0..0;
        }
        let first = self.spans.partition_point(|span| (span.tid, span.to_ns) <= (tid, time.start));
        let count = self.spans[first..].partition_point(|span| (span.tid, span.from_ns) < (tid, time.end));
        first..first + count
    }
}

/// A process that reclaimed memory. When a cgroup is full, the thread that takes a page has to reclaim, so this is usually the
/// process that takes most.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Reclaimer {
    /// Name and PID.
    pub who: String,
    /// Number of pages that the process freed.
    pub pages: u64,
}

/// Time of threads in which they reclaimed memory for one reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Reclaim {
    /// Kind of reclaim.
    pub kind: ReclaimKind,
    /// Path of the cgroup at its limit; none if no limit is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Time in nanoseconds.
    pub ns: u64,
    /// Part of this time in which the threads were on a CPU.
    pub on_cpu_ns: u64,
    /// Distribution of the durations, as far as they are part of the time.
    pub latency: Histogram,
    /// Number of pages that all processes freed for this reason while whylate recorded.
    pub pages: u64,
    /// Processes that freed most of these pages, in descending order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reclaimers: Vec<Reclaimer>,
}

/// Adds up the time in which threads reclaimed memory.
#[derive(Debug)]
pub(crate) struct ReclaimCounter<'a> {
    records: &'a ReclaimRecords,
    /// Time of each span that counts, and the part of it on a CPU, by index.
    by_span: BTreeMap<usize, (u64, u64)>,
}

impl<'a> ReclaimCounter<'a> {
    pub(crate) fn new(records: &'a ReclaimRecords) -> Self {
        ReclaimCounter { records, by_span: BTreeMap::new() }
    }

    /// Adds time of a thread, on a CPU or not. No time may be added twice.
    pub(crate) fn add(&mut self, tid: u32, time: Range<u64>, is_on_cpu: bool) {
        for index in self.records.indexes_of_thread(tid, &time) {
            let span = &self.records.spans[index];
            let ns = span.to_ns.min(time.end).saturating_sub(span.from_ns.max(time.start));
            let (all_ns, on_cpu_ns) = self.by_span.entry(index).or_default();
            *all_ns += ns;
            *on_cpu_ns += if is_on_cpu { ns } else { 0 };
        }
    }

    /// Returns the sums, the longest time first.
    pub(crate) fn finish(self) -> Vec<Reclaim> {
        let mut by_reason: BTreeMap<ReclaimReason, (u64, u64, Vec<u64>)> = BTreeMap::new();
        for (index, (ns, on_cpu_ns)) in self.by_span {
            let (all_ns, all_on_cpu_ns, durations) = by_reason.entry(self.records.spans[index].reason).or_default();
            (*all_ns, *all_on_cpu_ns) = (*all_ns + ns, *all_on_cpu_ns + on_cpu_ns);
            durations.push(ns);
        }
        let sum = |(reason, (ns, on_cpu_ns, durations)): (ReclaimReason, (u64, u64, Vec<u64>))| {
            let freed = self.records.freed.get(&reason);
            let reclaimer = |((pid, name), &pages): (&Process, &u64)| Reclaimer {
                who: ActorName::thread(name.as_str(), *pid).to_string(),
                pages,
            };
            let mut reclaimers: Vec<Reclaimer> =
                freed.into_iter().flatten().filter(|(_, pages)| **pages > 0).map(reclaimer).collect();
            let pages = reclaimers.iter().map(|reclaimer| reclaimer.pages).sum();
            reclaimers.sort_by(|a, b| (b.pages, &a.who).cmp(&(a.pages, &b.who)));
            reclaimers.truncate(MAX_RECLAIMERS);
            let cgroup = reason.cgroup.and_then(|id| self.records.cgroups.get(&id)).cloned();
            let latency = durations.into_iter().collect();
            Reclaim { kind: reason.kind, cgroup, ns, on_cpu_ns, latency, pages, reclaimers }
        };
        let mut sums: Vec<Reclaim> = by_reason.into_iter().map(sum).collect();
        sums.sort_by_key(|sum| Reverse(sum.ns));
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: ReclaimReason = ReclaimReason { kind: ReclaimKind::Cgroup, cgroup: Some(9) };
    const DIRECT: ReclaimReason = ReclaimReason { kind: ReclaimKind::Direct, cgroup: None };

    fn span(tid: u32, from_ns: u64, to_ns: u64, reason: ReclaimReason) -> ReclaimSpan {
        ReclaimSpan { tid, from_ns, to_ns, reason }
    }

    fn records(spans: Vec<ReclaimSpan>) -> ReclaimRecords {
        let process = |name: &str, pid| (pid, name.to_owned());
        let of_web = [(process("victim", 7), 16), (process("writer", 8), 64), (process("idle", 9), 0)].into();
        let freed = [(WEB, of_web)].into();
        ReclaimRecords::new(spans, freed, [(9, "/web".to_owned())].into())
    }

    #[test]
    fn time_within_spans_is_added_up() {
        let spans = vec![span(8, 0, 60, WEB), span(7, 90, 95, DIRECT), span(7, 40, 70, WEB), span(7, 10, 20, WEB)];
        let records = records(spans);
        let mut counter = ReclaimCounter::new(&records);
        // Parts of the thread's time, two of which meet within the second span. The first span began before the time.
        counter.add(7, 15..50, false);
        counter.add(7, 50..92, true);
        counter.add(7, 92..100, false);
        let found = counter.finish();
        let figures = |sum: &Reclaim| (sum.kind, sum.ns, sum.on_cpu_ns, sum.latency.count(), sum.latency.max_ns());
        let figures: Vec<_> = found.iter().map(figures).collect();
        assert_eq!(figures, [(ReclaimKind::Cgroup, 35, 20, 2, 30), (ReclaimKind::Direct, 5, 2, 1, 5)]);
        let of_web: Vec<_> = found[0].reclaimers.iter().map(|of| (of.who.as_str(), of.pages)).collect();
        assert_eq!((found[0].cgroup.as_deref(), found[0].pages), (Some("/web"), 80));
        assert_eq!(of_web, [("writer:8", 64), ("victim:7", 16)]);
    }

    #[test]
    fn threads_without_spans_have_no_sums() {
        let records = records(vec![span(8, 0, 60, WEB), span(8, 70, 70, WEB)]);
        let mut counter = ReclaimCounter::new(&records);
        counter.add(7, 0..100, true);
        counter.add(8, 60..100, true);
        // A query that ends before it starts.
        counter.add(8, std::ops::Range { start: 50, end: 10 }, true);
        assert_eq!(counter.finish(), []);
    }
}
