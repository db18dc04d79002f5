// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that are migrated to another CPU while they block.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};

/// CPU time after which a thread exceeds its fair share. Since 6.12 it then stays queued for a while when it blocks
/// (delayed dequeue).
const MORE_THAN_ITS_SHARE: Duration = Duration::from_millis(3);
const ON_ITS_WAY: Duration = Duration::from_micros(50);
const HOGS: usize = 3;

pub fn start(threads: u64) -> Result<()> {
    let all = sched_getaffinity(None)?;
    let last = super::last_of(&all)?;
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).context("there is no CPU")?;
    let mut from = CpuSet::new();
    from.set(first);
    let over = Arc::new(AtomicBool::new(false));
    for _ in 0..HOGS {
        let over = over.clone();
        super::spawn("hog".to_owned(), move || {
            let _ = sched_setaffinity(None, &from);
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        })?;
    }
    sched_setaffinity(None, &last)?;
    for _ in 0..threads {
        let sleeps = Arc::new(AtomicI32::new(0));
        let sleeps_there = sleeps.clone();
        super::spawn("moved".to_owned(), move || {
            let _ = sched_setaffinity(None, &from);
            spin_for(MORE_THAN_ITS_SHARE);
            sleeps_there.store(gettid().as_raw_nonzero().get(), Ordering::Relaxed);
            super::sleep_in_nanosleep();
        })?;
        let tid = loop {
            match Pid::from_raw(sleeps.load(Ordering::Relaxed)) {
                Some(tid) => break tid,
                None => thread::yield_now(),
            }
        };
        spin_for(ON_ITS_WAY);
        sched_setaffinity(Some(tid), &last)?;
    }
    over.store(true, Ordering::Relaxed);
    super::wait_until_asleep(threads as usize)
}

/// Spins for this much CPU time.
fn spin_for(span: Duration) {
    let until = cpu_time() + span;
    while cpu_time() < until {
        std::hint::spin_loop();
    }
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
