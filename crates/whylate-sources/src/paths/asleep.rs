// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that are asleep in a system call, now or when the recording started.

use std::collections::HashMap;

use anyhow::Context as _;
use libbpf_rs::Link;
use libbpf_rs::skel::SkelBuilder as _;
use whylate_model::holders::Lock;
use whylate_model::object::ObjectKind;
use whylate_model::path::history::{Name, RunSlice, SwitchIn};

use self::skel::types::{lock_kind, lock_of, thread_asleep};
use self::skel::{AsleepSkel, AsleepSkelBuilder};
use crate::kernel::attach::{self, PlainData};
use crate::kernel::clock;
use crate::kernel::lock_owners::has_mutex_in_blocked_on;
use crate::kernel::pid_namespace;
use crate::kernel::thread_iterator::iterate;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/paths/asleep.skel.rs"));
}

/// Maximum number of threads.
const THREADS: usize = 1 << 16;

/// Operations of futex(2), and their flags.
const FUTEX_LOCK_PI: u32 = 6;
const FUTEX_LOCK_PI2: u32 = 13;
const FUTEX_PRIVATE: u32 = 128;
const FUTEX_CLOCK_REALTIME: u32 = 256;

/// System calls by thread and the time at which its sleep ended.
pub(super) type Calls = HashMap<(u32, u64), i32>;

/// Threads that were asleep.
#[derive(Debug, Default)]
pub(super) struct Asleep {
    /// Start and end of the walk over the threads, in nanoseconds.
    began_ns: u64,
    ended_ns: u64,
    threads: HashMap<u32, Thread>,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    syscall: i32,
    /// Time of the first wakeup since then.
    woken_ns: Option<u64>,
}

/// A thread that is asleep in a system call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sleeper {
    pub tid: u32,
    pub name: Name,
    /// PID of its process.
    pub process: u32,
    /// PID of the process that created its process; 0 if unknown.
    pub parent: u32,
    /// Number of its context switches so far.
    pub switches: u32,
    /// Number of the system call; negative outside system calls.
    pub syscall: i32,
    /// The kernel lock that it waits for, if the kernel records the owner of the lock.
    pub lock: Option<WaitedLock>,
    /// The thread executes a program, in execve(2) or execveat(2). Until then, most files of `/proc` about its process wait
    /// for `exec_update_lock`, for as long as a file takes to close (FUSE).
    pub in_exec: bool,
}

/// What a walk has found.
#[derive(Debug, Default)]
pub(super) struct Walk {
    pub found: Vec<Sleeper>,
    /// Number of threads beyond the limit.
    pub cut: u64,
}

/// A kernel lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitedLock {
    pub kind: ObjectKind,
    pub lock: Lock,
    /// TID of the holder, if certain.
    pub holder: Option<u32>,
}

impl WaitedLock {
    fn new(of: &thread_asleep) -> Option<Self> {
        let lock = match lock_kind(of.lock) {
            lock_kind::LOCK_MUTEX => Lock::Mutex,
            lock_kind::LOCK_SEMAPHORE => Lock::Semaphore,
            lock_kind::LOCK_RWSEM => Lock::Rwsem,
            lock_kind::LOCK_RWSEM_READERS => Lock::RwsemReaders,
            lock_kind::LOCK_RT_MUTEX if locks_pi_futex(of.syscall, of.operation) => Lock::PiFutex,
            lock_kind::LOCK_RT_MUTEX => Lock::RtMutex,
            _ => return None,
        };
        let kind = match lock_of(of.lock_of) {
            lock_of::LOCK_OF_MEMORY => ObjectKind::MemoryLock,
            lock_of::LOCK_OF_DESCRIPTOR => ObjectKind::InodeLock,
            _ => ObjectKind::KernelLock,
        };
        Some(WaitedLock { kind, lock, holder: Some(of.holder).filter(|&tid| tid != 0) })
    }
}

/// Returns whether a call locks a PI futex. With PREEMPT_RT, the kernel's own locks in any other operation are rt_mutexes as
/// well.
fn locks_pi_futex(syscall: i32, operation: u32) -> bool {
    let operation = operation & !(FUTEX_PRIVATE | FUTEX_CLOCK_REALTIME);
    i64::from(syscall) == libc::SYS_futex && (operation == FUTEX_LOCK_PI || operation == FUTEX_LOCK_PI2)
}

/// Returns whether a call executes a program.
fn executes(syscall: i32) -> bool {
    [libc::SYS_execve, libc::SYS_execveat].contains(&i64::from(syscall))
}

/// Walks over the threads that are asleep in a system call.
pub(super) struct Sleepers {
    link: Link,
    _skeleton: AsleepSkel<'static>,
}

impl Sleepers {
    pub(super) fn load() -> anyhow::Result<Self> {
        let mut open = AsleepSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_deref_mut().context("the BPF object has no settings")?;
        settings.own_namespace = pid_namespace::as_setting();
        settings.has_mutex_in_blocked_on = has_mutex_in_blocked_on()?;
        let skeleton = attach::load(open)?;
        let link = skeleton.progs.on_each_thread.attach()?;
        Ok(Sleepers { link, _skeleton: skeleton })
    }

    /// Returns the threads that are asleep now, up to a limit.
    pub(super) fn walk(&self) -> anyhow::Result<Walk> {
        let Walk { mut found, mut cut } = Walk::default();
        iterate(&self.link, |bytes| {
            let records = bytes.chunks_exact(size_of::<thread_asleep>());
            for of in records.filter_map(attach::read_plain::<thread_asleep>) {
                if found.len() >= THREADS {
                    cut += 1;
                    continue;
                }
                let thread_asleep { tid, process, parent, syscall, switches, .. } = of;
                let (lock, in_exec) = (WaitedLock::new(&of), of.in_exec != 0 || executes(syscall));
                found.push(Sleeper { tid, name: Name(of.name), process, parent, switches, syscall, lock, in_exec });
            }
        })?;
        Ok(Walk { found, cut })
    }
}

impl Asleep {
    /// Collects the threads that were found by a walk that began at `began_ns` and has just ended.
    pub(super) fn new(began_ns: u64, found: &[Sleeper]) -> Self {
        let thread = |of: &Sleeper| (of.tid, Thread { syscall: of.syscall, woken_ns: None });
        let threads = found.iter().filter(|of| of.syscall >= 0).map(thread).collect();
        Asleep { began_ns, ended_ns: clock::monotonic_ns(), threads }
    }

    /// Adds a later run slice of a thread. Slices are in order of time only within each CPU.
    pub(super) fn add(&mut self, slice: &RunSlice) {
        let (SwitchIn::Woken { at_ns, .. }, Some(tid)) = (slice.entry, slice.holder.tid()) else { return };
        if at_ns < self.began_ns {
            return;
        }
        let Some(thread) = self.threads.get_mut(&tid) else { return };
        if at_ns <= self.ended_ns {
            // It may have been looked at before that or after it.
            self.threads.remove(&tid);
        } else {
            thread.woken_ns = Some(thread.woken_ns.map_or(at_ns, |first_ns| first_ns.min(at_ns)));
        }
    }

    /// Returns the system calls of the threads that have been woken.
    pub(super) fn calls(self) -> Calls {
        let woken = |(tid, thread): (u32, Thread)| Some(((tid, thread.woken_ns?), thread.syscall));
        self.threads.into_iter().filter_map(woken).collect()
    }
}

#[allow(unsafe_code)]
// SAFETY: integers, and an array of integers.
unsafe impl PlainData for thread_asleep {}

#[cfg(test)]
mod tests {
    use whylate_model::path::history::{Holder, Waker};

    use super::*;

    #[test]
    fn only_the_locking_of_a_pi_futex_waits_for_one() {
        let is_pi = |operation| locks_pi_futex(libc::SYS_futex as i32, operation);
        assert!(is_pi(FUTEX_LOCK_PI) && is_pi(FUTEX_LOCK_PI | FUTEX_PRIVATE) && is_pi(FUTEX_LOCK_PI2 | 128 | 256));
        // FUTEX_WAIT, FUTEX_WAKE and FUTEX_WAIT_BITSET.
        assert!(![0, 1, 9, 128, 137, u32::MAX].into_iter().any(is_pi));
        assert!(!locks_pi_futex(libc::SYS_read as i32, FUTEX_LOCK_PI) && !locks_pi_futex(-1, FUTEX_LOCK_PI));
        assert!(executes(libc::SYS_execveat as i32) && !executes(libc::SYS_read as i32) && !executes(-1));
    }

    #[test]
    fn only_the_first_waking_ends_a_sleep_that_was_seen() {
        let thread = Thread { syscall: 35, woken_ns: None };
        let mut asleep = Asleep { began_ns: 10, ended_ns: 20, threads: (1..=3).map(|tid| (tid, thread)).collect() };
        for (tid, at_ns) in [(1, 9), (1, 40), (1, 30), (2, 15), (2, 50), (4, 60)] {
            let entry = SwitchIn::Woken { at_ns, by: Waker::Irq, cpu: 0 };
            asleep.add(&RunSlice { holder: Holder::Thread(tid), entry, ..RunSlice::default() });
        }
        // Thread 3 sleeps on, and of thread 2 it is not known which sleep was seen.
        assert_eq!(asleep.calls(), Calls::from([((1, 30), 35)]));
    }
}
