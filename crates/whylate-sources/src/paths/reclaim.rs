// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records when threads reclaim memory, for which cgroup, and how many pages each process frees.

use std::collections::{BTreeMap, HashMap};
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
use libbpf_rs::{Link, MapCore as _, MapFlags};
use whylate_model::path::history::Name;
use whylate_model::reclaim::{FreedPages, ReclaimKind, ReclaimReason, ReclaimRecords, ReclaimSpan};

use self::skel::types::{bss, lost_reclaim, reclaim_kind, reclaim_span};
use self::skel::{ReclaimSkel, ReclaimSkelBuilder};
use crate::cpu_account::disable_missing_tracepoints;
use crate::kernel::attach::{self, Loading, PlainData};
use crate::kernel::cgroups::Cgroups;
use crate::kernel::mapped::MappedArray;
use crate::kernel::pid_namespace;
use crate::kernel::records::Records;
use crate::source::AttachError;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/paths/reclaim.skel.rs"));
}

/// Maximum number of spans that are kept, and of those of one process: another one may reclaim all the time.
const MAX_SPANS: usize = 400_000;
const MAX_SPANS_OF_PROCESS: usize = 100_000;
/// Maximum number of processes that are known, and of spans that are not over.
const MAX_KNOWN: usize = 16_384;
/// Maximum number of cgroups that are named.
const MAX_CGROUPS: usize = 1_024;

/// Records when threads reclaim memory, until dropped or finished.
pub(super) struct ReclaimRecorder {
    records: Records,
    lost: MappedArray,
    spans: Vec<ReclaimSpan>,
    spans_of_process: HashMap<u32, usize>,
    /// Number of spans beyond a maximum.
    cut: u64,
    freed: FreedPages,
    cgroups: Cgroups,
    /// Path of each cgroup, by its ID; `None` if it was not found.
    paths: HashMap<u64, Option<String>>,
    _links: Vec<Link>,
    skeleton: ReclaimSkel<'static>,
}

impl ReclaimRecorder {
    /// Begins to load the programs on a thread.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub(super) fn load() -> Result<Loading<ReclaimSkel<'static>>, AttachError> {
        let loading = Loading::begin(|| {
            let mut open = ReclaimSkelBuilder::default().open(attach::open_object())?;
            let settings = open.maps.rodata_data.as_deref_mut().context("the BPF object has no settings")?;
            settings.own_namespace = pid_namespace::as_setting();
            disable_missing_tracepoints(open.open_object_mut())?;
            Ok(attach::load(open)?)
        });
        Ok(loading.context("cannot start a thread")?)
    }

    /// Starts recording.
    ///
    /// # Errors
    /// Fails if the kernel has refused a BPF program.
    pub(super) fn attach(loading: Loading<ReclaimSkel<'static>>) -> Result<Self, AttachError> {
        let mut skeleton = loading.wait()?;
        let records = Records::new(&skeleton.maps.reclaim_spans)?;
        let reasons = lost_reclaim::LOST_RECLAIM_REASONS.0 as usize;
        let lost =
            MappedArray::inside(skeleton.maps.bss.as_fd(), offset_of!(bss, lost_by_reason), reasons, size_of::<u64>());
        let lost = lost.context("cannot map what the programs write")?;
        let mut programs: Vec<_> = skeleton.object_mut().progs_mut().filter(|program| program.autoload()).collect();
        // Attaches the programs for ends first: an end is recorded for each span that begins after this.
        programs.sort_by_key(|program| !program.name().as_encoded_bytes().ends_with(b"_end"));
        let links = programs.iter_mut().map(|program| program.attach()).collect::<Result<_, _>>()?;
        Ok(ReclaimRecorder {
            records,
            lost,
            spans: Vec::new(),
            spans_of_process: HashMap::new(),
            cut: 0,
            freed: FreedPages::new(),
            cgroups: Cgroups::of_memory(),
            paths: HashMap::new(),
            _links: links,
            skeleton,
        })
    }

    /// Reads new spans.
    pub(super) fn take_in(&mut self) {
        // An error that persists shows as lost spans.
        let _ = self.records.poll(Duration::ZERO);
        while let Some(record) = self.records.next() {
            if let Some(span) = attach::read_plain::<reclaim_span>(&record) {
                self.add(&span);
            }
        }
    }

    fn add(&mut self, span: &reclaim_span) {
        let reason = match reclaim_kind(span.kind) {
            reclaim_kind::RECLAIM_OF_CGROUP => {
                ReclaimReason { kind: ReclaimKind::Cgroup, cgroup: Some(span.cgroup).filter(|&id| id != 0) }
            }
            reclaim_kind::RECLAIM_COMPACTION => ReclaimReason { kind: ReclaimKind::Compaction, cgroup: None },
            _ => ReclaimReason { kind: ReclaimKind::Direct, cgroup: None },
        };
        if let Some(id) = reason.cgroup.filter(|id| !self.paths.contains_key(id) && self.paths.len() < MAX_CGROUPS) {
            // Looked up while the cgroup exists.
            self.paths.insert(id, self.cgroups.path(id));
        }
        if self.freed.contains_key(&reason) || self.freed.len() < MAX_CGROUPS {
            let by_process = self.freed.entry(reason).or_default();
            let process = (span.process, Name(span.name).text());
            if by_process.contains_key(&process) || by_process.len() < MAX_CGROUPS {
                *by_process.entry(process).or_default() += span.pages;
            }
        }
        let &reclaim_span { tid, from_ns, to_ns, .. } = span;
        let is_known = self.spans_of_process.contains_key(&span.process);
        if self.spans.len() >= MAX_SPANS || !is_known && self.spans_of_process.len() >= MAX_KNOWN {
            self.cut += 1;
            return;
        }
        let of_process = self.spans_of_process.entry(span.process).or_default();
        if *of_process >= MAX_SPANS_OF_PROCESS {
            self.cut += 1;
            return;
        }
        *of_process += 1;
        self.spans.push(ReclaimSpan { tid, from_ns, to_ns, reason });
    }

    /// Returns what was recorded up to a time, and adds what was lost to `lost`. Spans that are not over end there.
    pub(super) fn finish(mut self, until_ns: u64, lost: &mut BTreeMap<String, u64>) -> ReclaimRecords {
        self.take_in();
        let unfinished = |key: Vec<u8>| {
            let value = self.skeleton.maps.reclaiming_by_tid.lookup(&key, MapFlags::ANY).ok().flatten()?;
            attach::read_plain::<reclaim_span>(&value)
        };
        let unfinished: Vec<reclaim_span> =
            self.skeleton.maps.reclaiming_by_tid.keys().take(MAX_KNOWN).filter_map(unfinished).collect();
        for mut span in unfinished.into_iter().filter(|span| (1..until_ns).contains(&span.from_ns)) {
            span.to_ns = until_ns;
            self.add(&span);
        }
        let in_kernel = |reason: lost_reclaim| self.lost.u64_at(reason.0 as usize, 0).load(Relaxed);
        lost.insert("reclaim_full".to_owned(), self.cut + in_kernel(lost_reclaim::LOST_RECLAIM_FULL));
        lost.insert("reclaim_began_earlier".to_owned(), in_kernel(lost_reclaim::LOST_RECLAIM_BEGAN_EARLIER));
        let cgroups = &mut self.cgroups;
        // A walk over the cgroups may not have been due before.
        let path = |(id, path): (u64, Option<String>)| {
            (id, path.or_else(|| cgroups.path_or_placeholder(id)).unwrap_or_else(|| format!("unknown:{id}")))
        };
        let paths = self.paths.into_iter().map(path).collect();
        ReclaimRecords::new(self.spans, self.freed, paths)
    }
}

#[allow(unsafe_code)]
// SAFETY: integers, and an array of integers.
unsafe impl PlainData for reclaim_span {}
