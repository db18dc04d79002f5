// SPDX-License-Identifier: MIT OR Apache-2.0
//! Real-time threads, and patching of kernel code while no other emulated CPU runs it.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::support::is_emulated;
use crate::support::machine::cpus::pin_to;

/// Above the kernel's threads of normal priority, and below those that must always run.
const PRIORITY: i32 = 90;
/// Twice as long as attaching takes on an emulator; the limit for starving what those CPUs have to do.
const AT_MOST: Duration = Duration::from_secs(2);

/// Pins the calling thread to this CPU as SCHED_FIFO.
pub fn become_fifo_on(cpu: u32, priority: i32) -> Result<()> {
    pin_to(cpu)?;
    schedule_as(libc::SCHED_FIFO, priority).context("cannot become a real-time thread")
}

/// Pins the calling thread to this CPU as SCHED_IDLE.
pub fn become_idle_on(cpu: u32) -> Result<()> {
    pin_to(cpu)?;
    schedule_as(libc::SCHED_IDLE, 0).context("cannot give way to other threads")
}

fn schedule_as(policy: i32, priority: i32) -> io::Result<()> {
    // SAFETY: `sched_param` is made of integers, for which zero is a value.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = priority;
    // SAFETY: the pointer is to a live `sched_param`, which the call only reads; thread 0 is the caller.
    match unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs what patches kernel code, such as attaching. An emulated CPU of QEMU 7.2 that reaches the code at that time can
/// hit a breakpoint that the kernel has already removed, so the other emulated CPUs are kept in user space.
pub fn patching<T>(patch: impl FnOnce() -> T) -> T {
    if !is_emulated() {
        return patch();
    }
    let before = sched_getaffinity(None).expect("the affinity is readable");
    let here = sched_getcpu();
    pin_to(here as u32).expect("a thread may stay where it is");
    let (over, ready) = (AtomicBool::new(false), AtomicUsize::new(0));
    let others: Vec<u32> =
        (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu) && cpu != here).map(|cpu| cpu as u32).collect();
    let patched = thread::scope(|scope| {
        for &cpu in &others {
            let (over, ready) = (&over, &ready);
            scope.spawn(move || {
                become_fifo_on(cpu, PRIORITY).expect("root may have real-time threads");
                ready.fetch_add(1, Ordering::Relaxed);
                let began = Instant::now();
                while !over.load(Ordering::Relaxed) && began.elapsed() < AT_MOST {
                    std::hint::spin_loop();
                }
            });
        }
        while ready.load(Ordering::Relaxed) < others.len() {
            thread::yield_now();
        }
        let patched = patch();
        over.store(true, Ordering::Relaxed);
        patched
    });
    sched_setaffinity(None, &before).expect("a thread may go where it was");
    patched
}
