// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backend `bpf`: converts the programs' records into thread states.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use whylate_model::ActorName;
use whylate_model::sqpoll::{Counters, SqThread};

use super::SqpollOptions;
use super::iterators::{self, Records};
use super::programs::{Programs, Way};
use super::skel::types::{ring_record, sq_lost, sq_thread, thread_record, uring_setup};
use super::states::{RingState, ThreadState, ThreadStates};
use crate::kernel::attach::text;
use crate::kernel::cgroups::Cgroups;
use crate::kernel::symbols::KernelSymbols;
use crate::runnable;
use crate::source::AttachError;
use crate::source::session::Session;

/// Possible tick rates of kernels.
const TICKS_A_SECOND: [u64; 4] = [100, 250, 300, 1000];
/// Minimum distance of two reads from which the tick rate is derived.
const MIN_DISTANCE_NS: u64 = 90_000_000;

pub(super) struct BpfBackend {
    pub programs: Programs,
    pid: Option<u32>,
    keep_evidence: bool,
    symbols: KernelSymbols,
    /// Timestamp and tick count of the first read.
    first: Option<(u64, u64)>,
    ticks_a_second: Option<u64>,
    /// Threads that exited unseen.
    unseen: u64,
    /// Processes with rings that could not be read.
    unread: u64,
    /// Process names of the threads at the last read, for threads that exit later.
    processes: BTreeMap<u32, String>,
    cgroups: Cgroups,
}

impl BpfBackend {
    pub(super) fn attach(options: &SqpollOptions, session: &Session) -> Result<Self, AttachError> {
        Ok(BpfBackend {
            programs: Programs::attach(options, session)?,
            pid: options.threads.process,
            keep_evidence: options.keep_evidence,
            symbols: session.symbols(),
            first: None,
            ticks_a_second: None,
            unseen: 0,
            unread: 0,
            processes: BTreeMap::new(),
            cgroups: Cgroups::default(),
        })
    }

    pub(super) fn way(&self) -> Way {
        self.programs.way
    }

    pub(super) fn read(&mut self) -> anyhow::Result<ThreadStates> {
        let records = iterators::read_all(&self.programs, self.pid)?;
        self.learn_tick(&records);
        self.unseen += records.unseen;
        self.unread += records.unread;
        let seen = thread_states(&records, &self.processes, self.ticks_a_second, &mut self.cgroups);
        self.processes = records.threads.iter().map(|record| (record.thread.own_tgid, text(&record.process))).collect();
        Ok(seen)
    }

    pub(super) fn take_lost(&mut self) -> [(&'static str, u64); 7] {
        let count = |reason: sq_lost| self.programs.lost.u64_at(reason.0 as usize, 0).swap(0, Ordering::Relaxed);
        [
            ("threads_full", count(sq_lost::SQ_LOST_THREADS)),
            ("late_events", count(sq_lost::SQ_LOST_LATE_EVENTS)),
            ("samples", count(sq_lost::SQ_LOST_SAMPLES) + self.programs.unsampled()),
            ("work_ends", count(sq_lost::SQ_LOST_EXITS)),
            ("unseen_wakeups", count(sq_lost::SQ_LOST_WAKEUPS)),
            ("ended_unseen", std::mem::take(&mut self.unseen)),
            ("unread_processes", std::mem::take(&mut self.unread)),
        ]
    }

    /// Returns the next late event. Invalid records are skipped and counted.
    pub(super) fn take_late(&mut self) -> Option<whylate_model::LateEvent> {
        loop {
            let record = self.programs.take_record()?;
            let account = self.programs.account.as_ref()?;
            match runnable::event_of(&record, account, &mut self.symbols, self.keep_evidence) {
                Some(event) if self.pid.is_none_or(|pid| event.labels.get("pid") == Some(&pid.to_string())) => {
                    return Some(event);
                }
                Some(_) => {}
                None => {
                    let lost = sq_lost::SQ_LOST_LATE_EVENTS.0 as usize;
                    self.programs.lost.u64_at(lost, 0).fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn learn_tick(&mut self, records: &Records) {
        let Some((now_ns, jiffies)) = records.threads.first().map(|record| (record.now_ns, record.jiffies)) else {
            return;
        };
        let (then_ns, before) = *self.first.get_or_insert((now_ns, jiffies));
        let distance_ns = now_ns.saturating_sub(then_ns);
        if self.ticks_a_second.is_none() && distance_ns >= MIN_DISTANCE_NS {
            let rate = u128::from(jiffies.wrapping_sub(before)) * 1_000_000_000 / u128::from(distance_ns);
            self.ticks_a_second = TICKS_A_SECOND.into_iter().min_by_key(|&ticks| u128::from(ticks).abs_diff(rate));
        }
    }
}

/// Converts records into thread states. For exited threads, only the name of their process is known.
pub(super) fn thread_states(
    records: &Records,
    processes: &BTreeMap<u32, String>,
    ticks_a_second: Option<u64>,
    cgroups: &mut Cgroups,
) -> ThreadStates {
    let mut seen = ThreadStates::new();
    for thread in &records.ended {
        let process = processes.get(&thread.own_tgid).cloned().unwrap_or_else(|| "?".to_owned());
        seen.insert(identity(thread), ended(thread, process, cgroups));
    }
    for record in &records.threads {
        let rings: Vec<&ring_record> = records.rings.iter().filter(|ring| ring.task == record.task).collect();
        let idle_jiffies = rings.first().map(|ring| u64::from(ring.idle_jiffies));
        seen.insert(
            identity(&record.thread),
            ThreadState {
                process: text(&record.process),
                cpu: Some(record.cpu),
                idle_ms: idle_jiffies.and_then(|jiffies| Some(jiffies * 1000 / ticks_a_second?)),
                zero_ns: record.thread.known_since_ns,
                counters: counters(record, cgroups),
                has_ended: false,
                rings: rings.into_iter().map(ring_of).collect(),
            },
        );
    }
    seen
}

fn identity(thread: &sq_thread) -> SqThread {
    SqThread { pid: thread.own_tgid, tid: thread.own_tid, born: thread.born_ns }
}

/// Counters as of the record's timestamp: the current on-CPU time counts as what the round has been so far.
fn counters(record: &thread_record, cgroups: &mut Cgroups) -> Counters {
    let thread = &record.thread;
    let mut open_ns = thread.round_ns;
    if thread.has_cpu != 0 {
        open_ns = open_ns.saturating_add(record.now_ns.saturating_sub(thread.since_ns));
    }
    let working_ns = thread.working_ns.saturating_add(if thread.has_work != 0 { open_ns } else { 0 });
    Counters {
        at_ns: record.now_ns,
        running_ns: thread.working_ns.saturating_add(thread.spinning_ns).saturating_add(open_ns),
        working_ns: Some(working_ns),
        starved_ns: starved_ns(thread, record.run_delay_ns.saturating_add(record.waiting_ns)),
        sqes: Some(thread.submitted),
        wakeups: Some(thread.wakeups),
        behind_ns: behind(thread),
        throttled_ns: throttled(thread, cgroups),
    }
}

fn ended(thread: &sq_thread, process: String, cgroups: &mut Cgroups) -> ThreadState {
    let counters = Counters {
        at_ns: thread.ended_ns,
        running_ns: thread.working_ns.saturating_add(thread.spinning_ns),
        working_ns: Some(thread.working_ns),
        starved_ns: starved_ns(thread, thread.last_run_delay_ns),
        sqes: Some(thread.submitted),
        wakeups: Some(thread.wakeups),
        behind_ns: behind(thread),
        throttled_ns: throttled(thread, cgroups),
    };
    ThreadState { process, zero_ns: thread.known_since_ns, counters, has_ended: true, ..ThreadState::default() }
}

/// Returns the run delay since the thread became known, without the part in which it slept.
fn starved_ns(thread: &sq_thread, run_delay_ns: u64) -> u64 {
    run_delay_ns.saturating_sub(thread.first_run_delay_ns).saturating_sub(thread.slept_delay_ns)
}

fn behind(thread: &sq_thread) -> BTreeMap<String, u64> {
    let mut behind = BTreeMap::new();
    for one in thread.competitors.iter().filter(|one| one.tid != 0) {
        let waited_ns: &mut u64 =
            behind.entry(ActorName::thread(text(&one.name), one.shown_tid).to_string()).or_default();
        *waited_ns = waited_ns.saturating_add(one.waited_ns);
    }
    behind
}

/// Returns the throttled time by the cgroup with the quota.
fn throttled(thread: &sq_thread, cgroups: &mut Cgroups) -> BTreeMap<String, u64> {
    let is_throttled = thread.throttled_ns > 0;
    is_throttled.then(|| (cgroups.label(thread.quota_cgroup), thread.throttled_ns)).into_iter().collect()
}

fn ring_of(ring: &ring_record) -> RingState {
    let kind = if ring.is_registered != 0 { "registered" } else { "fd" };
    let has = |flag: uring_setup| ring.flags & flag.0 != 0;
    let kinds = [
        (has(uring_setup::IORING_SETUP_IOPOLL), "iopoll"),
        (has(uring_setup::IORING_SETUP_ATTACH_WQ), "attached"),
        (ring.polls_network != 0, "napi"),
    ];
    RingState {
        key: (ring.ring, ring.inode),
        name: format!("{kind} {}", ring.fd),
        sq_head: Some(ring.sq_head),
        sq_tail: ring.sq_tail,
        sq_entries: ring.sq_entries,
        kinds: kinds.into_iter().filter_map(|(is_so, name)| is_so.then_some(name)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saturates_on_impossible_counters() {
        let mut thread =
            sq_thread { working_ns: u64::MAX, spinning_ns: 1, first_run_delay_ns: 1, ..sq_thread::default() };
        (thread.slept_delay_ns, thread.round_ns) = (u64::MAX, 1);
        thread.competitors[0].tid = 5;
        thread.competitors[1].tid = 6;
        thread.competitors[0].waited_ns = u64::MAX;
        thread.competitors[1].waited_ns = 1;
        let record = thread_record { run_delay_ns: u64::MAX, waiting_ns: 1, thread, ..thread_record::default() };
        let cgroups = &mut Cgroups::default();
        for counters in [counters(&record, cgroups), ended(&thread, String::new(), cgroups).counters] {
            assert_eq!((counters.running_ns, counters.working_ns, counters.starved_ns), (u64::MAX, Some(u64::MAX), 0));
            assert_eq!(counters.behind_ns.into_values().collect::<Vec<_>>(), [u64::MAX]);
        }
    }
}
