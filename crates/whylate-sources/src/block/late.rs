// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts late requests to late events, and finds the requests that competed with them at the device.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::fence;

use anyhow::Context as _;
use whylate_model::blame::{OtherRequests, RequestEvidence, request_causes};
use whylate_model::{Labels, LateEvent, Occupancy, thread};

use super::names::{RequestNames, error_name, flags, operation_name, plural};
use super::skel::BlockSkel;
use super::skel::types::{
    block_request, done_request, kept_request, operation, request_facts, request_flag, request_limits, signaled_by,
};
use crate::kernel::attach::{self, PlainData};
use crate::kernel::clock;
use crate::kernel::mapped::MappedArray;
use crate::source::AttachError;

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for done_request {}
// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for kept_request {}
// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for block_request {}

/// Maximum number of competitors (processes, work functions, …) with an entry of their own.
const MAX_COMPETITORS: usize = 128;
/// Size of a set of request addresses.
const SET_BYTES: usize = request_limits::SLOTS_PER_SET.0 as usize * size_of::<u64>();
/// End time of a competing request that is still in progress.
const NOT_DONE: u64 = u64::MAX;
/// Maximum number of completed requests that are kept; a device that served more gave each less than 2 % of the time.
const MAX_DONE: usize = 65_536;

/// Number of similar requests before a late one from which the usual device time is computed.
const MAX_SIMILAR: usize = 64;

/// Returns the late event of a completed request, without causes.
pub(super) fn event_of(late: &done_request, names: &mut RequestNames) -> LateEvent {
    let done_request { request, signaled_ns, completed_ns, .. } = late;
    let facts = &request.facts;
    let mut labels = Labels::new();
    labels.insert("device".to_owned(), names.device(facts.device));
    labels.insert("operation".to_owned(), operation_name(facts.operation).to_owned());
    labels.insert("flags".to_owned(), flags(facts));
    labels.insert("submitter".to_owned(), names.submitter(facts).to_string());
    labels.insert("submitter_thread".to_owned(), attach::text(&facts.comm));
    labels.insert("submitter_tid".to_owned(), thread::number(facts.tid));
    labels.insert("submitter_pid".to_owned(), thread::number(facts.pid));
    labels.insert("sector".to_owned(), facts.sector.to_string());
    labels.insert("bytes".to_owned(), facts.bytes.to_string());
    if let Some(cgroup) = names.cgroup(facts.cgroup) {
        labels.insert("charged_to".to_owned(), cgroup);
    }
    if let Some(error) = error_name(late.error) {
        labels.insert("error".to_owned(), error.to_owned());
    }
    let phases = [
        ("throttled", request.allocated_ns.saturating_sub(request.submitted_ns)),
        ("queued", request.issued_ns.saturating_sub(request.allocated_ns)),
        ("device", signaled_ns.saturating_sub(request.issued_ns)),
        ("completion", completed_ns.saturating_sub(*signaled_ns)),
    ];
    LateEvent {
        subject: format!("{} of {}", plural(facts.operation), names.device(facts.device)),
        labels,
        at_unix_ns: clock::unix_ns_of(*completed_ns),
        at_ns: *completed_ns,
        latency_ns: completed_ns.saturating_sub(request.submitted_ns),
        cpu: late.cpu,
        phases: phases.map(|(name, ns)| (name.to_owned(), ns)).into(),
        ..LateEvent::default()
    }
}

/// Occupancy of the CPUs that completed a request, if there is a CPU account.
#[derive(Default)]
pub(super) struct Cpus {
    /// Median device time of similar requests, in ns; 0 if unknown.
    pub usual_device_ns: u64,
    /// Occupancy of the completing CPU, since the completion interrupt.
    pub ended_on: Option<Occupancy>,
    /// Occupancy of the CPU that the device interrupts, since the request was issued.
    pub interrupted: Option<Occupancy>,
}

/// Requests recorded by the BPF programs: completed ones, in a ring per CPU, and those in progress.
pub(super) struct RecordedRequests {
    done: MappedArray,
    done_by_cpu: usize,
    present: MappedArray,
    /// Sets of request addresses: which slots of `present` are in use.
    sets: MappedArray,
    /// Number of requests completed on each CPU.
    counts: MappedArray,
    /// Position of the next request to read, per CPU.
    read: Vec<u64>,
    /// Requests that were read, in the order of completion.
    known: VecDeque<done_request>,
    /// The longest device time of a completed request, in ns.
    longest_ns: u64,
    /// Requests in progress at the last reading.
    in_progress: Vec<block_request>,
    /// Time since which the record of completed requests has no gap.
    since_ns: u64,
    lost: u64,
}

impl RecordedRequests {
    pub fn new(skeleton: &BlockSkel<'_>, cpus: u32, done_by_cpu: u32) -> Result<Self, AttachError> {
        use libbpf_rs::MapCore as _;
        let maps = &skeleton.maps;
        let done =
            MappedArray::new(maps.done_by_position.as_fd(), (cpus * done_by_cpu) as usize, size_of::<kept_request>());
        let counts = MappedArray::new(maps.count_by_cpu.as_fd(), cpus as usize, size_of::<u64>());
        let slots = maps.request_by_slot.max_entries() as usize;
        let present = MappedArray::new(maps.request_by_slot.as_fd(), slots, size_of::<block_request>());
        let sets = maps.set_by_hash.max_entries() as usize;
        let sets = MappedArray::new(maps.set_by_hash.as_fd(), sets, SET_BYTES);
        Ok(RecordedRequests {
            done: done.context("cannot map the requests that are done")?,
            done_by_cpu: done_by_cpu as usize,
            present: present.context("cannot map the requests in progress")?,
            sets: sets.context("cannot map where requests in progress are")?,
            counts: counts.context("cannot map how many requests are done")?,
            read: vec![0; cpus as usize],
            known: VecDeque::new(),
            longest_ns: 0,
            in_progress: Vec::new(),
            since_ns: clock::monotonic_ns(),
            lost: 0,
        })
    }

    /// Reads requests completed since the last call, and drops those completed more than `keep_ns` ago.
    pub fn read(&mut self, keep_ns: u64) {
        let now_ns = clock::monotonic_ns();
        let mut new = Vec::new();
        for (cpu, read) in self.read.iter_mut().enumerate() {
            let written = self.counts.u64_at(cpu, 0).load(Acquire);
            let mut until = written;
            let oldest = written.saturating_sub(self.done_by_cpu as u64 - 1);
            if oldest > *read {
                self.lost += oldest - *read;
                *read = oldest;
                self.since_ns = now_ns;
            }
            for position in *read..written {
                let index = cpu * self.done_by_cpu + position as usize % self.done_by_cpu;
                let has = || self.done.u64_at(index, offset_of!(kept_request, position)).load(Acquire);
                let seen = has();
                if seen == !position || (seen < position) {
                    // A CPU is writing this entry, or about to: the next reading continues here.
                    until = position;
                    break;
                }
                let one: Option<kept_request> = if has() == position { self.done.copy(index) } else { None };
                fence(Acquire);
                match one.filter(|one| has() == position && one.completed_ns != 0) {
                    Some(one) => new.push(completed(&one)),
                    // The entry was overwritten by a newer one.
                    None => {
                        self.lost += 1;
                        self.since_ns = now_ns;
                    }
                }
            }
            *read = until;
        }
        let done: HashSet<(u64, u64)> = new.iter().map(|one| (one.request.request, one.request.issued_ns)).collect();
        self.in_progress.retain(|request| !done.contains(&(request.request, request.issued_ns)));
        new.sort_by_key(|one| one.completed_ns);
        let at_device_ns = |one: &done_request| one.completed_ns.saturating_sub(one.request.issued_ns);
        self.longest_ns = new.iter().map(at_device_ns).fold(self.longest_ns, u64::max);
        self.known.extend(new);
        // Older requests are not needed to explain late ones (`KEEP_NS`).
        let until_ns = now_ns.saturating_sub(keep_ns);
        while self.known.front().is_some_and(|one| one.completed_ns < until_ns) || self.known.len() > MAX_DONE {
            if let Some(dropped) = self.known.pop_front() {
                self.since_ns = self.since_ns.max(dropped.completed_ns);
            }
        }
    }

    /// Reads the requests in progress.
    pub fn read_in_progress(&mut self) {
        self.in_progress.clear();
        for set in 0..self.sets.entries() {
            for way in 0..request_limits::SET_WAYS.0 as usize {
                if self.sets.u64_at(set, way * size_of::<u64>()).load(Relaxed) != 0 {
                    let slot = set * request_limits::SLOTS_PER_SET.0 as usize + way;
                    let request = self.present.copy::<block_request>(slot);
                    fence(Acquire);
                    let is_same = |request: &block_request| {
                        let now = |at| self.present.u64_at(slot, at).load(Relaxed);
                        request.request > 1
                            && now(offset_of!(block_request, request)) == request.request
                            && now(offset_of!(block_request, issued_ns)) == request.issued_ns
                    };
                    self.in_progress.extend(request.filter(is_same));
                }
            }
        }
    }

    /// Returns the number of requests that were overwritten before they were read, since the last call.
    pub fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    fn others(&self, late: &done_request, names: &mut RequestNames) -> Vec<OtherRequests> {
        let own = &late.request;
        // A request with a flush waits for the block layer's own flush, which does not compete with it.
        let flushes = request_flag::FLAG_PREFLUSH.0 | request_flag::FLAG_FUA.0;
        let waits_for_flush = own.facts.operation == operation::FLUSHES.0 || own.facts.flags & flushes != 0;
        let overlaps = |request: &block_request, completed_ns: u64| {
            request.facts.device == own.facts.device
                && request.issued_ns != 0
                && request.facts.flags & request_flag::FLAG_NOT_ISSUED.0 == 0
                && !(waits_for_flush && request.is_of_block_layer != 0)
                && request.issued_ns < late.completed_ns
                && completed_ns > own.submitted_ns
                && (request.request, request.issued_ns) != (own.request, own.issued_ns)
        };
        // Threads of one process with one comm count together. Requests of one competitor mostly come in a row.
        let mut index_by_owner = HashMap::new();
        let (mut last, mut all) = (None, Vec::<OtherRequests>::new());
        let mut other = |request: &block_request, completed_ns: u64| {
            if !overlaps(request, completed_ns) {
                return;
            }
            let facts = &request.facts;
            let is_of_block_layer = request.is_of_block_layer != 0;
            let is_own = !is_of_block_layer
                && (facts.tid, facts.handler, facts.comm) == (own.facts.tid, own.facts.handler, own.facts.comm);
            let key = (facts.pid, facts.handler, facts.operation, facts.cgroup, is_own, is_of_block_layer, facts.comm);
            let index = match last {
                Some((known, index)) if known == key => index,
                // All entries are in use.
                _ if all.len() > MAX_COMPETITORS && !index_by_owner.contains_key(&key) => MAX_COMPETITORS,
                _ => *index_by_owner.entry(key).or_insert_with(|| {
                    if all.len() == MAX_COMPETITORS {
                        all.push(OtherRequests { who: "other requests".into(), ..OtherRequests::default() });
                        return MAX_COMPETITORS;
                    }
                    all.push(OtherRequests {
                        who: if is_of_block_layer {
                            format!("flush of {}", names.device(facts.device)).into()
                        } else if is_own {
                            format!("its own {}", plural(facts.operation)).into()
                        } else {
                            names.process_of(facts).within("", &format!(" ({})", plural(facts.operation)))
                        },
                        cgroup: names.cgroup(facts.cgroup),
                        at_device_ns: Vec::new(),
                    });
                    all.len() - 1
                }),
            };
            last = Some((key, index));
            all[index].at_device_ns.push((request.issued_ns, completed_ns));
        };
        // A request completed later than this was issued after the late one completed.
        let until_ns = late.completed_ns.saturating_add(self.longest_ns);
        let from = self.known.partition_point(|done| done.completed_ns <= own.submitted_ns);
        let until = self.known.partition_point(|done| done.completed_ns <= until_ns);
        self.known.range(from..until.max(from)).for_each(|done| other(&done.request, done.completed_ns));
        self.in_progress.iter().for_each(|request| other(request, NOT_DONE));
        all
    }

    /// Returns the median device time, in ns, of similar requests completed before this one was issued, so that a few
    /// late ones do not matter. 0 if there are none.
    pub fn usual_device_ns(&self, late: &done_request) -> u64 {
        let own = &late.request;
        let is_similar = |done: &&done_request| {
            let facts = &done.request.facts;
            (facts.device, facts.operation) == (own.facts.device, own.facts.operation)
                && facts.flags & request_flag::FLAG_NOT_ISSUED.0 == 0
        };
        let before = self.known.partition_point(|done| done.completed_ns <= own.issued_ns);
        let similar = self.known.range(..before).rev().filter(is_similar).take(MAX_SIMILAR);
        let mut took: Vec<u64> = similar.map(|done| done.signaled_ns.saturating_sub(done.request.issued_ns)).collect();
        let middle = took.len() / 2;
        if took.is_empty() { 0 } else { *took.select_nth_unstable(middle).1 }
    }

    /// Adds the causes to the event.
    pub fn explain(
        &self,
        late: &done_request,
        event: &mut LateEvent,
        names: &mut RequestNames,
        cpus: Cpus,
        keep_evidence: bool,
    ) {
        let request = &late.request;
        let device = names.device(request.facts.device);
        let evidence = RequestEvidence {
            limit: if request.released_ns == 0 { String::new() } else { names.limit_of(&request.facts) },
            limited_cgroup: names.cgroup(request.facts.cgroup),
            held_back_by: names.held_back_by(&request.facts),
            submitted_ns: request.submitted_ns,
            let_go_ns: request.released_ns,
            made_ns: request.allocated_ns,
            issued_ns: request.issued_ns,
            told_ns: late.signaled_ns,
            is_told_by_softirq: late.signaled_by == signaled_by::SIGNALED_BY_SOFTIRQ.0,
            completed_ns: late.completed_ns,
            others: self.others(late, names),
            known_since_ns: self.since_ns,
            usual_device_ns: cpus.usual_device_ns,
            ended_on: cpus.ended_on,
            interrupted: cpus.interrupted,
            device,
        };
        event.causes = request_causes(&evidence);
        event.evidence = keep_evidence.then(|| Box::new(evidence.into()));
    }
}

/// Returns a completed request with what is kept of it.
fn completed(kept: &kept_request) -> done_request {
    let facts = request_facts {
        cgroup: kept.cgroup,
        handler: kept.handler,
        device: kept.device,
        tid: kept.tid,
        pid: kept.pid,
        operation: kept.operation.into(),
        flags: kept.flags.into(),
        comm: kept.comm,
        ..request_facts::default()
    };
    let request = block_request {
        request: kept.request,
        issued_ns: kept.issued_ns,
        is_of_block_layer: kept.is_of_block_layer.into(),
        facts,
        ..block_request::default()
    };
    done_request { request, signaled_ns: kept.signaled_ns, completed_ns: kept.completed_ns, ..done_request::default() }
}

/// Maximum age of a completed request when a late one is explained: longer waits have causes of this time only.
pub(super) const KEEP_NS: u64 = 10_000_000_000;

const _: () = assert!(size_of::<request_facts>() == 88);
