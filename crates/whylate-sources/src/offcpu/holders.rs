// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whom threads that wait now wait for, as the kernel's locks tell.

use std::collections::HashMap;

use anyhow::Context as _;
use libbpf_rs::btf::types::{Ptr, Struct};
use libbpf_rs::{Btf, Link, MapCore, ReferencesType as _};
use whylate_model::holders::{Chain, Holder, Lock, MOST_LINKS, Thread, chain};
use whylate_model::thread::called;

use super::attached::plain;
use super::sampler::iterate;
use super::skel::OffcpuSkel;
use super::skel::types::{holder_now, holders_walk, lock_kind, rodata};
use super::state;
use crate::attach::{self, read_plain};
use crate::source::AttachError;
use crate::symbols::{self, KernelSymbols};
use crate::syscalls;

/// What wakes who flushes a work item.
const BARRIER: [&str; 1] = ["wq_barrier_func"];

/// The locks of which this kernel tells who has them, besides PI futexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    All,
    Mutexes,
    Neither,
}

impl Told {
    /// What is not told.
    pub(super) fn weaker(self) -> Option<&'static str> {
        match self {
            Told::All => None,
            Told::Mutexes => Some(
                "this kernel does not tell who holds its semaphores (rwsems included): use Linux 6.17 or later with CONFIG_DETECT_HUNG_TASK_BLOCKER to see their holders",
            ),
            Told::Neither => Some(
                "this kernel does not tell who holds its mutexes and semaphores, only holders of PI futexes and rt_mutexes, and workers: use Linux 6.17 or later with CONFIG_DETECT_HUNG_TASK_BLOCKER to see the others",
            ),
        }
    }
}

/// What this kernel tells.
pub(super) fn told_here() -> Result<Told, AttachError> {
    let types = Btf::from_vmlinux()?;
    let has = |of: &str, field: &str| target_of(&types, of, field).is_some();
    Ok(if has("task_struct", "blocker") || !has("mutex", "owner") {
        // With PREEMPT_RT there is an rt_mutex in each of them.
        Told::All
    } else if has("task_struct", "blocker_mutex") || has_mutex_in_blocked_on(&types) {
        Told::Mutexes
    } else {
        Told::Neither
    })
}

/// Sets what the program has to know of this kernel.
pub(super) fn configure(settings: &mut rodata) -> Result<(), AttachError> {
    if let [Some(code)] = symbols::code_of(BARRIER) {
        settings.barrier_function = code.start;
    }
    settings.has_mutex_in_blocked_on = has_mutex_in_blocked_on(&Btf::from_vmlinux()?);
    Ok(())
}

/// Up to 6.16 kernels for debugging have a field of that name, which is for something else.
fn has_mutex_in_blocked_on(types: &Btf<'_>) -> bool {
    target_of(types, "task_struct", "blocked_on").is_some_and(|target| target == "mutex")
}

/// The structure that a field points to, or nothing for another field; `None` where there is no such field.
fn target_of(types: &Btf<'_>, of: &str, field: &str) -> Option<String> {
    let of: Struct<'_> = types.type_by_name(of)?;
    let ty = of.iter().find(|member| member.name.is_some_and(|name| name == field))?.ty;
    let target = types.type_by_id::<Ptr<'_>>(ty).map(|pointer| pointer.referenced_type().skip_mods_and_typedefs());
    Some(target.and_then(|target| Some(target.name()?.to_string_lossy().into_owned())).unwrap_or_default())
}

/// Walks over all threads three times (`holders.bpf.h`), or once where nobody waits for anybody.
pub(super) fn look(skeleton: &mut OffcpuSkel<'_>, link: &Link) -> anyhow::Result<Vec<holder_now>> {
    let maps = &skeleton.maps;
    for thread in maps.wait_by_thread.keys().collect::<Vec<_>>() {
        maps.wait_by_thread.delete(&thread)?;
    }
    let mut threads = Vec::new();
    for walk in [holders_walk::HOLDERS_FIND, holders_walk::HOLDERS_CONFIRM, holders_walk::HOLDERS_TELL] {
        let variables = skeleton.maps.bss_data.as_deref_mut().context("the BPF object has no variables")?;
        variables.holders_walk = walk.0;
        iterate(link, |bytes| {
            threads.extend(bytes.chunks_exact(size_of::<holder_now>()).filter_map(read_plain::<holder_now>));
        })?;
        if skeleton.maps.wait_by_thread.keys().next().is_none() {
            break;
        }
    }
    Ok(threads)
}

/// In a snapshot, some twenty megabytes. Further chains have one link, and say that they go on.
const MOST_LINKS_IN_ALL: usize = 100_000;

/// All threads that wait or are waited for, and how they hang together.
pub(super) struct Holders {
    threads: HashMap<u64, Thread>,
    links: usize,
    /// By the kernel's number those whose wait is the one that the walk has met.
    waiters: HashMap<u32, u64>,
}

impl Holders {
    pub(super) fn of(told: &[holder_now], names: &mut KernelSymbols) -> Self {
        let mut holders = Holders { threads: HashMap::new(), links: 0, waiters: HashMap::new() };
        let handlers: HashMap<u64, u64> = told.iter().map(|thread| (thread.thread, thread.handler)).collect();
        // Between the walks a worker may have come to its next item.
        let is_over = |thread: &holder_now| {
            thread.kind == lock_kind::LOCK_WORK_ITEM.0 && handlers.get(&thread.holder) != Some(&thread.flushed)
        };
        for thread in told {
            let mut handler = (thread.handler != 0).then(|| plain(names.name(thread.handler)).to_owned());
            if handler.as_deref() == Some(BARRIER[0]) {
                handler = None;
            }
            let now = Holder {
                who: called(&attach::text(&thread.comm), thread.shown),
                state: state::of(thread.state as u8).letter().to_string(),
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

    /// An rt_mutex that a thread in futex(2) sleeps for is that of a futex, which is what its user knows.
    fn name_futexes(&mut self) {
        for thread in self.threads.values_mut() {
            // With PREEMPT_RT locks within that system call are rt_mutexes too, for which it sleeps uninterruptibly.
            let is_in_futex =
                thread.now.state == "S" && thread.now.syscall.as_deref().is_some_and(|call| call.starts_with("futex"));
            if let Some((lock @ Lock::RtMutex, _)) = thread.waits.as_mut().filter(|_| is_in_futex) {
                *lock = Lock::PiFutex;
            }
        }
    }

    /// Whom the thread of this number waits for.
    pub(super) fn chain_of(&mut self, tid: u32) -> Option<Chain> {
        let most_links = if self.links < MOST_LINKS_IN_ALL { MOST_LINKS } else { 1 };
        let chain = chain(&self.threads, *self.waiters.get(&tid)?, most_links)?;
        self.links += chain.links.len();
        Some(chain)
    }

    /// Its lock names a thread that the walk has not met: a reader that has ended, or one outside this PID namespace,
    /// of which the kernel shows none here.
    pub(super) fn is_holder_unmet(&self, tid: u32) -> bool {
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
    use crate::attach::PlainData;

    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for holder_now {}
}
