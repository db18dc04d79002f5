// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backend `bpf`: from the records of the programs to what was seen.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use whylate_model::sqpoll::{Counters, SqThread};
use whylate_model::thread::called;

use super::SqpollOptions;
use super::look::{self, Records};
use super::programs::{Programs, Way};
use super::seen::{Look, Seen, SeenRing};
use super::skel::types::{ring_record, sq_lost, sq_thread, thread_record, uring_setup};
use crate::attach::text;
use crate::runnable;
use crate::session::Session;
use crate::source::AttachError;
use crate::symbols::KernelSymbols;

/// What the kernel's tick can be.
const TICKS_A_SECOND: [u64; 4] = [100, 250, 300, 1000];
/// From which distance on two looks tell it.
const APART_NS: u64 = 90_000_000;

pub(super) struct OfKernel {
    pub programs: Programs,
    pid: Option<u32>,
    keep_evidence: bool,
    symbols: KernelSymbols,
    /// When, and how many ticks had been counted.
    first: Option<(u64, u64)>,
    ticks_a_second: Option<u64>,
    /// Of threads that ended unseen.
    unseen: u64,
    /// Of processes whose rings could not be looked at.
    unread: u64,
    /// Names of processes whose threads may end.
    processes: BTreeMap<u32, String>,
}

impl OfKernel {
    pub(super) fn attach(options: &SqpollOptions, session: &Session) -> Result<Self, AttachError> {
        Ok(OfKernel {
            programs: Programs::attach(options, session)?,
            pid: options.threads.process,
            keep_evidence: options.keep_evidence,
            symbols: session.symbols(),
            first: None,
            ticks_a_second: None,
            unseen: 0,
            unread: 0,
            processes: BTreeMap::new(),
        })
    }

    pub(super) fn way(&self) -> Way {
        self.programs.way
    }

    pub(super) fn look(&mut self) -> anyhow::Result<Look> {
        let records = look::look(&self.programs, self.pid)?;
        self.learn_tick(&records);
        self.unseen += records.unseen;
        self.unread += records.unread;
        let mut seen = Look::new();
        for thread in &records.ended {
            let process = self.processes.get(&thread.own_tgid).cloned().unwrap_or_else(|| "?".to_owned());
            seen.insert(identity(thread), ended(thread, process));
        }
        self.processes = records.threads.iter().map(|record| (record.thread.own_tgid, text(&record.process))).collect();
        for record in &records.threads {
            let rings: Vec<&ring_record> = records.rings.iter().filter(|ring| ring.task == record.task).collect();
            let idle_jiffies = rings.first().map(|ring| u64::from(ring.idle_jiffies));
            let ticks_a_second = self.ticks_a_second;
            seen.insert(
                identity(&record.thread),
                Seen {
                    process: text(&record.process),
                    cpu: Some(record.cpu),
                    idle_ms: idle_jiffies.and_then(|jiffies| Some(jiffies * 1000 / ticks_a_second?)),
                    zero_ns: record.thread.known_since_ns,
                    counters: counters(record),
                    has_ended: false,
                    rings: rings.into_iter().map(ring_of).collect(),
                },
            );
        }
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

    /// The next late event that has come in; those that make no sense are left out and counted.
    pub(super) fn take_late(&mut self) -> Option<whylate_model::LateEvent> {
        loop {
            let record = self.programs.take_record()?;
            let account = self.programs.account.as_mut()?;
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
        let apart_ns = now_ns.saturating_sub(then_ns);
        if self.ticks_a_second.is_none() && apart_ns >= APART_NS {
            let rate = u128::from(jiffies.wrapping_sub(before)) * 1_000_000_000 / u128::from(apart_ns);
            self.ticks_a_second = TICKS_A_SECOND.into_iter().min_by_key(|&ticks| u128::from(ticks).abs_diff(rate));
        }
    }
}

fn identity(thread: &sq_thread) -> SqThread {
    SqThread { pid: thread.own_tgid, tid: thread.own_tid, born: thread.born_ns }
}

/// As of the moment of the record: what goes on then belongs to what it has been so far.
fn counters(record: &thread_record) -> Counters {
    let thread = &record.thread;
    let mut open_ns = thread.round_ns;
    if thread.has_cpu != 0 {
        open_ns += record.now_ns.saturating_sub(thread.since_ns);
    }
    let working_ns = thread.working_ns + if thread.has_work != 0 { open_ns } else { 0 };
    Counters {
        at_ns: record.now_ns,
        running_ns: thread.working_ns + thread.spinning_ns + open_ns,
        working_ns: Some(working_ns),
        starved_ns: (record.run_delay_ns + record.waiting_ns)
            .saturating_sub(thread.first_run_delay_ns + thread.slept_delay_ns),
        sqes: Some(thread.submitted),
        wakeups: Some(thread.wakeups),
        behind_ns: behind(thread),
    }
}

fn ended(thread: &sq_thread, process: String) -> Seen {
    let counters = Counters {
        at_ns: thread.ended_ns,
        running_ns: thread.working_ns + thread.spinning_ns,
        working_ns: Some(thread.working_ns),
        starved_ns: thread.last_run_delay_ns.saturating_sub(thread.first_run_delay_ns + thread.slept_delay_ns),
        sqes: Some(thread.submitted),
        wakeups: Some(thread.wakeups),
        behind_ns: behind(thread),
    };
    Seen { process, zero_ns: thread.known_since_ns, counters, has_ended: true, ..Seen::default() }
}

fn behind(thread: &sq_thread) -> BTreeMap<String, u64> {
    let mut behind = BTreeMap::new();
    for one in thread.competitors.iter().filter(|one| one.tid != 0) {
        *behind.entry(called(&text(&one.name), one.shown_tid)).or_default() += one.waited_ns;
    }
    behind
}

fn ring_of(ring: &ring_record) -> SeenRing {
    let kind = if ring.is_registered != 0 { "registered" } else { "fd" };
    let has = |flag: uring_setup| ring.flags & flag.0 != 0;
    let kinds = [
        (has(uring_setup::IORING_SETUP_IOPOLL), "iopoll"),
        (has(uring_setup::IORING_SETUP_ATTACH_WQ), "attached"),
        (ring.polls_network != 0, "napi"),
    ];
    SeenRing {
        key: (ring.ring, ring.inode),
        name: format!("{kind} {}", ring.fd),
        sq_head: Some(ring.sq_head),
        sq_tail: ring.sq_tail,
        sq_entries: ring.sq_entries,
        kinds: kinds.into_iter().filter_map(|(is_so, name)| is_so.then_some(name)).collect(),
    }
}
