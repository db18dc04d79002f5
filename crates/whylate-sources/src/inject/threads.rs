// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU affinity and policy of the calling thread, and threads that keep every CPU busy.
#![allow(unsafe_code)]

use std::hint;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::kernel::cpus::list;
use crate::kernel::priority::{become_fifo, become_normal, run_on};
use crate::source::AttachError;

/// Time limit for the busy threads to start.
const LOAD_START: Duration = Duration::from_secs(2);
/// Rounds of spinning between two reads of the clock, some microseconds.
const SPINS: u32 = 10_000;

/// Returns the online CPUs that the calling thread may run on. Leaves its affinity at all of them.
fn usable_cpus() -> io::Result<Vec<u32>> {
    let mut every = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| every.set(cpu));
    // The kernel removes CPUs that the cgroup's cpuset forbids, and offline ones on reading.
    sched_setaffinity(None, &every)?;
    let usable = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).filter_map(|cpu| u32::try_from(cpu).ok()).collect())
}

/// Returns the calling thread's current CPU.
pub(super) fn current_cpu() -> anyhow::Result<u32> {
    u32::try_from(sched_getcpu()).context("the current CPU is unknown")
}

/// Pins the calling thread to this CPU. Returns it, and the others that the thread could run on.
pub(super) fn move_to(cpu: u32) -> Result<(u32, Vec<u32>), AttachError> {
    let cpus = usable_cpus().context("cannot list the CPUs")?;
    if !cpus.contains(&cpu) {
        let message = format!("CPU {cpu} is offline or not ours to use: choose from {}", list(&cpus));
        return Err(AttachError::Contradiction(message));
    }
    run_on(&[cpu]).with_context(|| format!("cannot move to CPU {cpu}"))?;
    Ok((cpu, cpus.into_iter().filter(|&other| other != cpu).collect()))
}

/// Restricts the calling thread to the given CPUs while it lives.
pub(super) struct Away {
    before: CpuSet,
}

impl Away {
    pub(super) fn to(cpus: &[u32]) -> io::Result<Self> {
        let away = Self { before: sched_getaffinity(None)? };
        run_on(cpus)?;
        Ok(away)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Makes the calling thread real-time while it lives, so that no normal thread, in particular no worker, preempts it
/// while it queues a batch of items. Without the privilege the batch may be interrupted.
pub(super) struct Urgent(());

impl Urgent {
    pub(super) fn new() -> Self {
        let _ = become_fifo(1);
        Self(())
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        let _ = become_normal();
    }
}

/// A busy thread of normal priority on each CPU, until dropped or timed out.
pub(super) struct Load {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Returns once the threads run, which a loaded machine may delay.
    pub(super) fn start(cpus: &[u32], at_most: Duration) -> io::Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let running = Arc::new(AtomicUsize::new(0));
        let mut load = Self { over: Arc::clone(&over), threads: Vec::with_capacity(cpus.len()) };
        let deadline = Instant::now() + at_most;
        for &cpu in cpus {
            let (over, running) = (Arc::clone(&over), Arc::clone(&running));
            let thread = thread::Builder::new().name("whylate-load".to_owned());
            load.threads.push(thread.spawn(move || {
                // A thread inherits its creator's policy. A busy real-time thread on every CPU would stall the machine.
                if become_normal().is_err() || run_on(&[cpu]).is_err() {
                    return;
                }
                running.fetch_add(1, Ordering::Relaxed);
                while !over.load(Ordering::Relaxed) && Instant::now() < deadline {
                    (0..SPINS).for_each(|spin| {
                        hint::black_box(spin);
                    });
                }
            })?);
        }
        let started = Instant::now();
        while running.load(Ordering::Relaxed) < cpus.len() {
            if started.elapsed() > LOAD_START {
                return Err(io::Error::other("the busy threads did not start"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
