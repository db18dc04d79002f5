// SPDX-License-Identifier: MIT OR Apache-2.0
//! Holders that blocked threads wait for, from the owner fields of the kernel's locks.

use std::collections::HashMap;

use anyhow::Context as _;
use libbpf_rs::{Btf, Link, MapCore};
use whylate_model::ActorName;
use whylate_model::holders::{Chain, Holder, Lock, MAX_LINKS, Thread, chain};

use super::skel::OffcpuSkel;
use super::skel::types::{holder_now, holders_walk, lock_kind, rodata};
use super::stack::plain;
use super::state;
use crate::kernel::attach::{self, read_plain};
use crate::kernel::lock_owners::{has_mutex_in_blocked_on, target_of};
use crate::kernel::symbols::{self, KernelSymbols};
use crate::kernel::syscalls;
use crate::kernel::thread_iterator::iterate;
use crate::source::AttachError;

/// Function of the work item that wakes a thread in `flush_work()`.
const BARRIER: [&str; 1] = ["wq_barrier_func"];

/// The locks of which this kernel records the owner, besides PI futexes and rt_mutexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordedOwners {
    All,
    Mutexes,
    Neither,
}

impl RecordedOwners {
    /// Returns the limitation of this kernel, if it has one.
    pub(super) fn limitation(self) -> Option<&'static str> {
        match self {
            RecordedOwners::All => None,
            RecordedOwners::Mutexes => Some(
                "this kernel does not record who holds its semaphores (rwsems included): use Linux 6.17 or later with CONFIG_DETECT_HUNG_TASK_BLOCKER to see their holders",
            ),
            RecordedOwners::Neither => Some(
                "this kernel does not record who holds its mutexes and semaphores, only holders of PI futexes and rt_mutexes, and workers: use Linux 6.17 or later with CONFIG_DETECT_HUNG_TASK_BLOCKER to see the others",
            ),
        }
    }
}

/// Returns the locks of which this kernel records the owner.
pub(super) fn recorded_owners() -> Result<RecordedOwners, AttachError> {
    let types = Btf::from_vmlinux()?;
    let has = |of: &str, field: &str| target_of(&types, of, field).is_some();
    Ok(if has("task_struct", "blocker") || !has("mutex", "owner") {
        // With PREEMPT_RT mutexes and semaphores contain an rt_mutex.
        RecordedOwners::All
    } else if has("task_struct", "blocker_mutex") || has_mutex_in_blocked_on()? {
        RecordedOwners::Mutexes
    } else {
        RecordedOwners::Neither
    })
}

/// Sets the constants of the BPF programs that depend on this kernel.
pub(super) fn configure(settings: &mut rodata) -> Result<(), AttachError> {
    if let [Some(code)] = symbols::code_of(BARRIER) {
        settings.barrier_function = code.start;
    }
    settings.has_mutex_in_blocked_on = has_mutex_in_blocked_on()?;
    Ok(())
}

/// Walks over all threads three times (`holders.bpf.h`), or once if no thread waits for a holder.
pub(super) fn walk(skeleton: &mut OffcpuSkel<'_>, link: &Link) -> anyhow::Result<Vec<holder_now>> {
    let maps = &skeleton.maps;
    for thread in maps.wait_by_thread.keys().collect::<Vec<_>>() {
        maps.wait_by_thread.delete(&thread)?;
    }
    let mut threads = Vec::new();
    for pass in [holders_walk::HOLDERS_FIND, holders_walk::HOLDERS_CONFIRM, holders_walk::HOLDERS_REPORT] {
        let variables = skeleton.maps.bss_data.as_deref_mut().context("the BPF object has no variables")?;
        variables.holders_walk = pass.0;
        iterate(link, |bytes| {
            threads.extend(bytes.chunks_exact(size_of::<holder_now>()).filter_map(read_plain::<holder_now>));
        })?;
        if skeleton.maps.wait_by_thread.keys().next().is_none() {
            break;
        }
    }
    Ok(threads)
}

/// Maximum number of links of all chains of a snapshot, some twenty megabytes. Further chains have one link, marked as
/// cut.
const MAX_LINKS_OF_SNAPSHOT: usize = 100_000;

/// All waiters and holders, and the edges between them.
pub(super) struct Holders {
    threads: HashMap<u64, Thread>,
    links: usize,
    /// Waiters by TID, if the sampling walk has seen the same wait.
    waiters: HashMap<u32, u64>,
}

impl Holders {
    pub(super) fn new(reported: &[holder_now], names: &mut KernelSymbols) -> Self {
        let mut holders = Holders { threads: HashMap::new(), links: 0, waiters: HashMap::new() };
        let handlers: HashMap<u64, u64> = reported.iter().map(|thread| (thread.thread, thread.handler)).collect();
        // Between the walks a worker may have started its next item.
        let is_over = |thread: &holder_now| {
            thread.kind == lock_kind::LOCK_WORK_ITEM.0 && handlers.get(&thread.holder) != Some(&thread.flushed)
        };
        for thread in reported {
            let mut handler = (thread.handler != 0).then(|| plain(names.name(thread.handler)).to_owned());
            if handler.as_deref() == Some(BARRIER[0]) {
                handler = None;
            }
            let now = Holder {
                who: ActorName::thread(attach::text(&thread.comm), thread.shown).to_string(),
                state: state::from_number(thread.state as u8).letter().to_string(),
                off_cpu_ns: thread.off_cpu_ns,
                syscall: syscalls::name(thread.syscall),
                handler,
            };
            let is_known = thread.holder != 0 && !is_over(thread);
            let waits = lock_of(thread.kind).filter(|_| is_known).map(|lock| (lock, thread.holder));
            if thread.is_as_walked != 0 && waits.is_some() {
                holders.waiters.insert(thread.tid, thread.thread);
            }
            holders.threads.insert(thread.thread, Thread { now, waits });
        }
        holders.name_futexes();
        holders
    }

    /// Marks an rt_mutex on which a thread blocks in futex(2) as a PI futex, the lock that its user knows.
    fn name_futexes(&mut self) {
        for thread in self.threads.values_mut() {
            // With PREEMPT_RT the kernel's own locks in futex(2) are rt_mutexes too, but block uninterruptibly.
            let is_in_futex =
                thread.now.state == "S" && thread.now.syscall.as_deref().is_some_and(|call| call.starts_with("futex"));
            if let Some((lock @ Lock::RtMutex, _)) = thread.waits.as_mut().filter(|_| is_in_futex) {
                *lock = Lock::PiFutex;
            }
        }
    }

    /// Returns the chain of holders that the thread waits for.
    pub(super) fn chain_of(&mut self, tid: u32) -> Option<Chain> {
        let max_links = if self.links < MAX_LINKS_OF_SNAPSHOT { MAX_LINKS } else { 1 };
        let chain = chain(&self.threads, *self.waiters.get(&tid)?, max_links)?;
        self.links += chain.links.len();
        Some(chain)
    }

    /// Returns whether the lock's owner is a thread that the walk has not seen: a reader that has exited, or a thread
    /// outside this PID namespace, which the iterator does not show.
    pub(super) fn is_holder_unseen(&self, tid: u32) -> bool {
        let waits = self.waiters.get(&tid).and_then(|waiter| self.threads.get(waiter)?.waits);
        waits.is_some_and(|(_, holder)| !self.threads.contains_key(&holder))
    }
}

fn lock_of(kind: u32) -> Option<Lock> {
    Some(match lock_kind(kind) {
        lock_kind::LOCK_MUTEX => Lock::Mutex,
        lock_kind::LOCK_SEMAPHORE => Lock::Semaphore,
        lock_kind::LOCK_RWSEM => Lock::Rwsem,
        lock_kind::LOCK_RWSEM_READERS => Lock::RwsemReaders,
        lock_kind::LOCK_RT_MUTEX => Lock::RtMutex,
        lock_kind::LOCK_WORK_ITEM => Lock::WorkItem,
        _ => return None,
    })
}

#[allow(unsafe_code)]
mod plain_data {
    use super::holder_now;
    use crate::kernel::attach::PlainData;

    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for holder_now {}
}
