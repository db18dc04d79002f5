// SPDX-License-Identifier: MIT OR Apache-2.0
//! From the kernel's record of a late request to a late event, and what else the device had meanwhile.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::fence;

use anyhow::Context as _;
use whylate_model::blame::{OtherRequests, RequestEvidence, request_causes};
use whylate_model::{Labels, LateEvent, Occupancy, thread};

use super::names::{Names, error_name, flags, operation_name, plural};
use super::skel::BlockSkel;
use super::skel::types::{
    block_request, done_request, operation, request_facts, request_flag, request_limits, told_by,
};
use crate::attach::{self, PlainData};
use crate::clock;
use crate::mapped::MappedArray;
use crate::source::AttachError;

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for done_request {}
// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for block_request {}

/// Whose requests are told apart: so many, and all others together.
const WHOSE: usize = 128;
/// A set of addresses in the kernel.
const SET_BYTES: usize = request_limits::SLOTS_A_SET.0 as usize * size_of::<u64>();
/// Another request that is not done is at its device until then.
const NOT_DONE: u64 = u64::MAX;
/// So many others of one late request are told apart; a device that had more has served them in less than 2 % each.
const OTHERS: usize = 65_536;

/// So many such requests before a late one tell how long they take.
const LOOKED_AT: usize = 64;

/// The late event of a request that is done, without causes.
pub(super) fn event_of(late: &done_request, names: &mut Names) -> LateEvent {
    let done_request { request, told_ns, completed_ns, .. } = late;
    let facts = &request.facts;
    let mut labels = Labels::new();
    labels.insert("device".to_owned(), names.device(facts.device));
    labels.insert("operation".to_owned(), operation_name(facts.operation).to_owned());
    labels.insert("flags".to_owned(), flags(facts));
    labels.insert("submitter".to_owned(), names.submitter(facts));
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
        ("throttled", request.made_ns.saturating_sub(request.submitted_ns)),
        ("queued", request.issued_ns.saturating_sub(request.made_ns)),
        ("device", told_ns.saturating_sub(request.issued_ns)),
        ("completion", completed_ns.saturating_sub(*told_ns)),
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

/// Who had the CPUs that ended a request, where their account is kept.
#[derive(Default)]
pub(super) struct Cpus {
    /// How long such requests take mostly; 0 where that is not known.
    pub usual_device_ns: u64,
    /// Of the one where it was done, since it was told of it.
    pub ended_on: Option<Occupancy>,
    /// Of the one with the device's interrupt, since it was issued.
    pub interrupted: Option<Occupancy>,
}

/// What the kernel keeps of requests: those that are done, of each CPU its own, and those in progress.
pub(super) struct Kept {
    done: MappedArray,
    done_by_cpu: usize,
    present: MappedArray,
    /// Which slots of that have a request.
    sets: MappedArray,
    /// How many were done on each CPU.
    counts: MappedArray,
    /// Where the next one of each CPU goes that has not been read.
    read: Vec<u64>,
    /// Those that were read, in the order in which they were done.
    known: VecDeque<done_request>,
    /// The longest that one of them was at its device.
    longest_ns: u64,
    /// Those that were not done at the last reading.
    in_progress: Vec<block_request>,
    /// Since when all are known.
    since_ns: u64,
    lost: u64,
}

impl Kept {
    pub fn new(skeleton: &BlockSkel<'_>, cpus: u32, done_by_cpu: u32) -> Result<Self, AttachError> {
        use libbpf_rs::MapCore as _;
        let maps = &skeleton.maps;
        let done =
            MappedArray::new(maps.done_by_position.as_fd(), (cpus * done_by_cpu) as usize, size_of::<done_request>());
        let counts = MappedArray::new(maps.count_by_cpu.as_fd(), cpus as usize, size_of::<u64>());
        let slots = maps.request_by_slot.max_entries() as usize;
        let present = MappedArray::new(maps.request_by_slot.as_fd(), slots, size_of::<block_request>());
        let sets = maps.set_by_hash.max_entries() as usize;
        let sets = MappedArray::new(maps.set_by_hash.as_fd(), sets, SET_BYTES);
        Ok(Kept {
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

    /// Reads what was done since the last time.
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
                let has = || self.done.u64_at(index, offset_of!(done_request, position)).load(Acquire);
                let seen = has();
                if seen == !position || (seen < position) {
                    // It is being written, or about to be: the next reading goes on from here.
                    until = position;
                    break;
                }
                let one: Option<done_request> = if has() == position { self.done.copy(index) } else { None };
                fence(Acquire);
                match one.filter(|one| has() == position && one.completed_ns != 0) {
                    Some(one) => new.push(one),
                    // Another one has taken its place.
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
        // From the device's first request that is older, nobody waits any more who is told.
        let until_ns = now_ns.saturating_sub(keep_ns);
        while self.known.front().is_some_and(|one| one.completed_ns < until_ns) || self.known.len() > OTHERS {
            if let Some(gone) = self.known.pop_front() {
                self.since_ns = self.since_ns.max(gone.completed_ns);
            }
        }
    }

    /// Reads what is in progress.
    pub fn read_in_progress(&mut self) {
        self.in_progress.clear();
        for set in 0..self.sets.entries() {
            for way in 0..request_limits::SET_WAYS.0 as usize {
                if self.sets.u64_at(set, way * size_of::<u64>()).load(Relaxed) != 0 {
                    let slot = set * request_limits::SLOTS_A_SET.0 as usize + way;
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

    /// Requests that were overwritten before they were read, since the last time.
    pub fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    fn others(&self, late: &done_request, names: &mut Names) -> Vec<OtherRequests> {
        let own = &late.request;
        // The block layer's own flush is what such a request waits for, not another one.
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
        // Threads of one process that have one name do one thing. Requests of one come together, mostly.
        let mut place_by_whom = HashMap::new();
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
            let place = match last {
                Some((known, place)) if known == key => place,
                // All that there is room for are told apart already.
                _ if all.len() > WHOSE && !place_by_whom.contains_key(&key) => WHOSE,
                _ => *place_by_whom.entry(key).or_insert_with(|| {
                    if all.len() == WHOSE {
                        all.push(OtherRequests { who: "other requests".to_owned(), ..OtherRequests::default() });
                        return WHOSE;
                    }
                    all.push(OtherRequests {
                        who: if is_of_block_layer {
                            format!("flush of {}", names.device(facts.device))
                        } else if is_own {
                            format!("its own {}", plural(facts.operation))
                        } else {
                            format!("{} ({})", names.process_of(facts), plural(facts.operation))
                        },
                        cgroup: names.cgroup(facts.cgroup),
                        at_device_ns: Vec::new(),
                    });
                    all.len() - 1
                }),
            };
            last = Some((key, place));
            all[place].at_device_ns.push((request.issued_ns, completed_ns));
        };
        // Whatever was done later than that was handed to the device after this one was done.
        let until_ns = late.completed_ns.saturating_add(self.longest_ns);
        let from = self.known.partition_point(|done| done.completed_ns <= own.submitted_ns);
        let until = self.known.partition_point(|done| done.completed_ns <= until_ns);
        self.known.range(from..until.max(from)).for_each(|done| other(&done.request, done.completed_ns));
        self.in_progress.iter().for_each(|request| other(request, NOT_DONE));
        all
    }

    /// How long such requests took that were done before this one was issued; in the middle, so that a few that were
    /// late as well change nothing. 0: there were none.
    pub fn usual_device_ns(&self, late: &done_request) -> u64 {
        let own = &late.request;
        let is_such = |done: &&done_request| {
            let facts = &done.request.facts;
            (facts.device, facts.operation) == (own.facts.device, own.facts.operation)
                && facts.flags & request_flag::FLAG_NOT_ISSUED.0 == 0
        };
        let before = self.known.partition_point(|done| done.completed_ns <= own.issued_ns);
        let such = self.known.range(..before).rev().filter(is_such).take(LOOKED_AT);
        let mut took: Vec<u64> = such.map(|done| done.told_ns.saturating_sub(done.request.issued_ns)).collect();
        let middle = took.len() / 2;
        if took.is_empty() { 0 } else { *took.select_nth_unstable(middle).1 }
    }

    /// Gives the event its causes.
    pub fn explain(
        &self,
        late: &done_request,
        event: &mut LateEvent,
        names: &mut Names,
        cpus: Cpus,
        keep_evidence: bool,
    ) {
        let request = &late.request;
        let device = names.device(request.facts.device);
        let evidence = RequestEvidence {
            limit: if request.let_go_ns == 0 { String::new() } else { names.limit_of(&request.facts) },
            limited_cgroup: names.cgroup(request.facts.cgroup),
            held_back_by: names.held_back_by(&request.facts),
            submitted_ns: request.submitted_ns,
            let_go_ns: request.let_go_ns,
            made_ns: request.made_ns,
            issued_ns: request.issued_ns,
            told_ns: late.told_ns,
            is_told_by_softirq: late.told_by == told_by::TOLD_BY_SOFTIRQ.0,
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

/// How long a record lies in the past at most when it is explained: those who wait longer have causes of this time.
pub(super) const KEEP_NS: u64 = 10_000_000_000;

const _: () = assert!(size_of::<request_facts>() == 88);
