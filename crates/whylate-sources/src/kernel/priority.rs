// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scheduling policies and CPU affinity of threads (sched(7)).
#![allow(unsafe_code)]

use std::io;

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::kernel::credentials::may_raise_priority;

fn set_policy(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    // SAFETY: `sched_param` is made of integers, for which zero is a value.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = priority;
    // SAFETY: the pointer is to a live `sched_param`, which the call only reads; thread 0 is the caller.
    match unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the calling thread a real-time priority.
pub(crate) fn become_fifo(priority: u8) -> io::Result<()> {
    set_policy(libc::SCHED_FIFO, priority.into())
}

/// Returns the remedy if the kernel does not permit a real-time priority: a cgroup may have no runtime for such threads
/// (CONFIG_RT_GROUP_SCHED), whatever the privileges.
pub(crate) fn remedy() -> &'static str {
    if may_raise_priority() {
        "the cgroup has no time for real-time threads: raise its cpu.rt_runtime_us or run in the root cgroup"
    } else {
        "run as root or grant CAP_SYS_NICE"
    }
}

/// Gives a thread, 0 for the calling one, the highest weight of a normal thread.
pub(crate) fn favour(tid: u32) -> io::Result<()> {
    // SAFETY: the call takes numbers.
    match unsafe { libc::setpriority(libc::PRIO_PROCESS, tid, -20) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a higher weight than that of a normal thread from the calling one.
pub(crate) fn favour_no_more() {
    // SAFETY: both calls take numbers. The weight of a thread may always be lowered.
    let _ = unsafe {
        if libc::getpriority(libc::PRIO_PROCESS, 0) < 0 { libc::setpriority(libc::PRIO_PROCESS, 0, 0) } else { 0 }
    };
}

/// Gives the calling thread the default policy.
pub(crate) fn become_normal() -> io::Result<()> {
    set_policy(libc::SCHED_OTHER, 0)
}

/// Restricts the calling thread to these CPUs. Fails if there is no such CPU.
pub(crate) fn run_on(cpus: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        let index = usize::try_from(cpu).ok().filter(|&index| index < CpuSet::MAX_CPU);
        set.set(index.ok_or(io::ErrorKind::InvalidInput)?);
    }
    Ok(sched_setaffinity(None, &set)?)
}
