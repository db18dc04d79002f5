// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backend `fdinfo`: comm, schedstat and fdinfo in `/proc`.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use whylate_model::sqpoll::{Counters, SqThread};

use super::fdinfo::{self, RingText};
use super::states::{RingState, ThreadState, ThreadStates};
use crate::kernel::clock;
use crate::kernel::proc::{self, numbers};

/// Prefix of a submission thread's name (5.12).
pub(super) const NAME: &str = "iou-sqp-";
/// Link target of a ring's descriptor.
const RING: &str = "anon_inode:[io_uring]";
/// Maximum time for which one read of all rings waits for busy ones.
const MAX_WAITED: Duration = Duration::from_millis(200);
/// Pause between two reads of a busy ring; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_micros(250);
const TRIES: u32 = 8;
/// Error of times that are counted by ticks.
const TICKS_NS: u64 = 20_000_000;

#[derive(Debug)]
pub(super) struct FdinfoBackend {
    pid: Option<u32>,
    /// Rings that stayed busy at every read, or reported no thread while a thread is left without a ring.
    busy: u64,
    /// Processes with descriptors that whylate may not read, since the last report.
    denied: HashSet<u32>,
    /// Rings, by process and inode, that have never reported a submission thread: they most probably have none.
    without: HashSet<(u32, u64)>,
    /// Time for which the current read has waited for busy rings.
    waited: Duration,
    has_work_times: Option<bool>,
    /// Whether work is counted by the system time of the whole process, as some kernels from 6.9 to 6.17 do.
    is_of_process: bool,
}

/// Result of reading a ring's descriptor.
enum RingRead {
    Ring(RingText),
    /// A ring (by its inode) that reports no submission thread.
    NoThread(Option<u64>),
    /// Already known, closed or busy.
    Nothing,
}

/// Scheduler statistics of a thread.
struct Scheduled {
    running_ns: u64,
    waited_ns: u64,
    cpu: u32,
    /// Start time, in USER_HZ ticks since boot.
    born: u64,
}

impl FdinfoBackend {
    pub(super) fn new(pid: Option<u32>) -> Self {
        FdinfoBackend {
            pid,
            busy: 0,
            denied: HashSet::new(),
            without: HashSet::new(),
            waited: Duration::ZERO,
            has_work_times: None,
            is_of_process: false,
        }
    }

    pub(super) fn limitations(&self) -> Option<&str> {
        match self.has_work_times {
            Some(false) => {
                Some("this kernel does not count work before Linux 6.9: only whether a thread is on a CPU is reported")
            }
            _ if self.is_of_process => Some(
                "this kernel counts the system time of a whole process as its thread's work (Linux 6.9 to 6.17): only whether a thread is on a CPU is reported",
            ),
            _ => Some(super::INFO.backends.last()?.limitations),
        }
    }

    pub(super) fn take_lost(&mut self) -> [(&'static str, u64); 2] {
        let unread = std::mem::take(&mut self.denied).len() as u64;
        [("busy_rings", std::mem::take(&mut self.busy)), ("unread_processes", unread)]
    }

    pub(super) fn read(&mut self) -> anyhow::Result<ThreadStates> {
        self.waited = Duration::ZERO;
        let processes = match self.pid {
            Some(pid) => vec![pid],
            None => numbers(Path::new("/proc")).context("cannot list processes")?,
        };
        let mut states = ThreadStates::new();
        for pid in processes {
            // A process that has exited has no threads.
            let tasks = numbers(Path::new(&format!("/proc/{pid}/task"))).unwrap_or_default();
            let is_sq_thread = |&&tid: &&u32| read(pid, tid, "comm").is_some_and(|name| name.starts_with(NAME));
            let threads: Vec<u32> = tasks.iter().filter(is_sq_thread).copied().collect();
            if !threads.is_empty() {
                self.read_process(pid, &tasks, &threads, &mut states);
            }
        }
        Ok(states)
    }

    fn read_process(&mut self, pid: u32, tasks: &[u32], threads: &[u32], states: &mut ThreadStates) {
        let (mut rings, silent) = self.rings(pid);
        let mut without_ring = false;
        let is_named = rings.iter().any(|(_, ring)| ring.thread.is_some_and(|tid| threads.contains(&tid)));
        for &tid in threads {
            let process = proc::text(format!("/proc/{pid}/comm")).unwrap_or_default();
            let of_thread = |ring: &RingText| thread_of(ring, tasks, threads, is_named) == Some(tid);
            let ours: Vec<(u32, RingText)> = rings.extract_if(.., |(_, ring)| of_thread(ring)).collect();
            without_ring |= ours.is_empty();
            // All rings of a thread print the same times; one is read together with the scheduler's.
            let times = ours.first().and_then(|(fd, ring)| self.times(pid, *fd, ring));
            let Some(scheduled) = scheduled(pid, tid) else { continue };
            let at_ns = clock::monotonic_ns();
            if !ours.is_empty() {
                self.has_work_times = Some(ours.iter().any(|(_, ring)| ring.work_us.is_some()));
            }
            self.is_of_process |=
                times.is_some_and(|(_, total_us)| total_us * 1_000 > scheduled.running_ns / 20 * 21 + TICKS_NS);
            let work_us = times.map(|(work_us, _)| work_us).filter(|_| !self.is_of_process);
            let counters = Counters {
                at_ns,
                running_ns: scheduled.running_ns,
                working_ns: work_us.map(|us| us * 1_000),
                starved_ns: scheduled.waited_ns,
                sqes: None,
                wakeups: None,
                behind_ns: BTreeMap::new(),
                throttled_ns: BTreeMap::new(),
            };
            let seen = ThreadState {
                process: process.trim_end().to_owned(),
                cpu: Some(scheduled.cpu),
                idle_ms: None,
                zero_ns: monotonic_ns_of(scheduled.born),
                counters,
                has_ended: false,
                rings: ours.iter().map(|(fd, ring)| ring_of(*fd, ring)).collect(),
            };
            states.insert(SqThread { pid, tid, born: scheduled.born }, seen);
        }
        if without_ring {
            // Before 6.7 a ring names its thread only while that sleeps, by its TID in the initial PID namespace.
            self.busy += silent + rings.len() as u64;
            self.without.retain(|(of, _)| *of != pid);
        }
    }

    /// Returns each ring of a process once, by its first descriptor, and the number of rings that name no submission
    /// thread.
    fn rings(&mut self, pid: u32) -> (Vec<(u32, RingText)>, u64) {
        let mut rings: Vec<(u32, RingText)> = Vec::new();
        let mut silent = HashSet::new();
        let mut descriptors = match numbers(Path::new(&format!("/proc/{pid}/fd"))) {
            Ok(descriptors) => descriptors,
            Err(error) => {
                self.note_if_denied(pid, &error);
                Vec::new()
            }
        };
        descriptors.sort_unstable();
        for fd in descriptors {
            let leads_to = fs::read_link(format!("/proc/{pid}/fd/{fd}"));
            match leads_to {
                Ok(path) if path.as_os_str() == RING => {}
                Ok(_) => continue,
                // The process's own user may list descriptors, but needs more privileges to read their targets.
                Err(error) => {
                    self.note_if_denied(pid, &error);
                    continue;
                }
            }
            match self.ring(pid, fd, &rings) {
                RingRead::Ring(ring) => rings.push((fd, ring)),
                RingRead::NoThread(inode) => drop(silent.insert(inode)),
                RingRead::Nothing => {}
            }
        }
        (rings, silent.len() as u64)
    }

    fn note_if_denied(&mut self, pid: u32, error: &io::Error) {
        if error.kind() == io::ErrorKind::PermissionDenied {
            self.denied.insert(pid);
        }
    }

    /// Reads work and total time of a ring that has reported them, now.
    fn times(&mut self, pid: u32, fd: u32, reported: &RingText) -> Option<(u64, u64)> {
        reported.work_us?;
        let mut pause = FIRST_PAUSE;
        for _ in 0..TRIES {
            let ring = fdinfo::parse(&proc::text(format!("/proc/{pid}/fdinfo/{fd}")).ok()?);
            if let (Some(work_us), Some(total_us)) = (ring.work_us, ring.total_us) {
                return Some((work_us, total_us));
            }
            if !self.wait(pause) {
                break;
            }
            pause *= 2;
        }
        self.busy += 1;
        None
    }

    /// Waits for a busy ring; returns false if this read has waited for long enough: any user may have a thousand rings.
    fn wait(&mut self, pause: Duration) -> bool {
        if self.waited >= MAX_WAITED {
            return false;
        }
        self.waited += pause;
        thread::sleep(pause);
        true
    }

    /// Reads a ring until it is not busy.
    fn ring(&mut self, pid: u32, fd: u32, known: &[(u32, RingText)]) -> RingRead {
        let mut pause = FIRST_PAUSE;
        let mut inode = None;
        let mut is_busy = false;
        for _ in 0..TRIES {
            let Ok(text) = proc::text(format!("/proc/{pid}/fdinfo/{fd}")) else { return RingRead::Nothing };
            let ring = fdinfo::parse(&text);
            inode = ring.inode;
            if inode.is_some() && known.iter().any(|(_, other)| other.inode == inode) {
                return RingRead::Nothing;
            }
            if ring.thread.is_some() {
                self.without.remove(&(pid, inode.unwrap_or(0)));
                return RingRead::Ring(ring);
            }
            // From 6.15 on, a busy ring prints nothing; before, it prints what a ring without a submission thread
            // always prints.
            is_busy = ring.sq_head.is_none();
            if !is_busy && self.without.contains(&(pid, inode.unwrap_or(0))) {
                break;
            }
            if !self.wait(pause) {
                is_busy = true;
                break;
            }
            pause *= 2;
        }
        if is_busy {
            self.busy += 1;
            return RingRead::Nothing;
        }
        self.without.insert((pid, inode.unwrap_or(0)));
        RingRead::NoThread(inode)
    }
}

/// Returns the thread of a ring. The ring has its TID in the initial PID namespace, and the creator's until the thread
/// has first run. A ring inherited from the parent, or another process, has a thread of that one: if a ring names a
/// thread of this process (`is_named`), TIDs are those of this namespace.
fn thread_of(ring: &RingText, tasks: &[u32], threads: &[u32], is_named: bool) -> Option<u32> {
    let tid = ring.thread?;
    match threads {
        _ if threads.contains(&tid) => Some(tid),
        [only] if !is_named && !tasks.contains(&tid) && !is_sq_thread_elsewhere(tid) => Some(*only),
        _ => None,
    }
}

fn is_sq_thread_elsewhere(tid: u32) -> bool {
    proc::text(format!("/proc/{tid}/comm")).is_ok_and(|name| name.starts_with(NAME))
}

fn ring_of(fd: u32, ring: &RingText) -> RingState {
    RingState {
        key: (0, ring.inode.unwrap_or(u64::from(fd))),
        name: format!("fd {fd}"),
        sq_head: ring.sq_head,
        sq_tail: ring.sq_tail.unwrap_or(0),
        sq_entries: ring.sq_mask.map_or(0, |mask| mask + 1),
        kinds: Vec::new(),
    }
}

fn read(pid: u32, tid: u32, file: &str) -> Option<String> {
    proc::text(format!("/proc/{pid}/task/{tid}/{file}")).ok()
}

fn scheduled(pid: u32, tid: u32) -> Option<Scheduled> {
    let schedstat = read(pid, tid, "schedstat")?;
    let mut times = schedstat.split_whitespace().map_while(|word| word.parse().ok());
    let (running_ns, waited_ns) = (times.next()?, times.next()?);
    let stat = read(pid, tid, "stat")?;
    // The name may have blanks and parentheses in it (proc_pid_stat(5)); the third field comes after it.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    Some(Scheduled {
        running_ns,
        waited_ns,
        cpu: fields.get(36)?.trim().parse().ok()?,
        born: fields.get(19)?.parse().ok()?,
    })
}

/// Converts USER_HZ ticks since boot, which include suspended time, to CLOCK_MONOTONIC.
fn monotonic_ns_of(born: u64) -> u64 {
    let ticks_a_second = rustix::param::clock_ticks_per_second().max(1);
    let born_ns = born.saturating_mul(1_000_000_000 / ticks_a_second);
    let suspended_ns = clock::boot_ns().saturating_sub(clock::monotonic_ns());
    born_ns.saturating_sub(suspended_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(thread: Option<u32>) -> RingText {
        RingText { thread, ..RingText::default() }
    }

    #[test]
    fn creators_tid_is_not_a_submission_thread() {
        let (tasks, threads) = ([10, 11, 12], [12]);
        assert_eq!(thread_of(&ring(Some(12)), &tasks, &threads, true), Some(12));
        assert_eq!(thread_of(&ring(Some(11)), &tasks, &threads, true), None);
        assert_eq!(thread_of(&ring(None), &tasks, &threads, true), None);
    }

    #[test]
    fn tid_of_other_namespace_maps_to_only_thread() {
        assert_eq!(thread_of(&ring(Some(4_000_711)), &[10, 12], &[12], false), Some(12));
        // Its own ring names it, so the other one is its parent's.
        assert_eq!(thread_of(&ring(Some(4_000_711)), &[10, 12], &[12], true), None);
        assert_eq!(thread_of(&ring(Some(4_000_711)), &[10, 12, 13], &[12, 13], false), None);
    }

    #[test]
    fn reads_schedstat_of_own_thread() {
        let pid = std::process::id();
        let scheduled = scheduled(pid, pid).expect("every process has a first thread");
        assert!(scheduled.running_ns > 0);
        assert!(monotonic_ns_of(scheduled.born) < clock::monotonic_ns());
    }
}
