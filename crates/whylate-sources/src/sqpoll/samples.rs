// SPDX-License-Identifier: MIT OR Apache-2.0
//! A timer for each submission thread, which runs while the thread has a CPU and has a program look where it is. No
//! code of the kernel changes, so it waits for nobody, and a kernel that is locked down allows it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use rustix::thread::{CpuSet, Pid, sched_getaffinity};

use super::skel::SqpollSkel;
use super::skel::types::sq_thread;
use crate::attach;
use crate::cpus::Choice;
use crate::perf_event::{run_at, start_timer};
use crate::source::AttachError;

/// Of a thread's time on a CPU, some 4,000 times a second. No period of 1, 2, 4, 5, 10 or 20 ms is near a multiple of
/// it: samples fall everywhere in what an application does that often.
const PERIOD_NS: u64 = 241_663;
/// How often new threads are looked for; what a thread does before counts as what its first sample shows.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// They are taken until it is dropped.
pub(super) struct Samples {
    stop: Arc<AtomicBool>,
    failed: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Samples {
    /// No timer runs on CPUs that are left out, whose threads are counted as not sampled.
    pub(super) fn start(skeleton: &SqpollSkel<'_>, choice: Rc<Choice>) -> Result<Self, AttachError> {
        let program = skeleton.progs.on_sample.as_fd().try_clone_to_owned().context("cannot keep a program")?;
        // The caller's own, for a moment, tells whether threads can be sampled at all.
        sample(0, &program).map_err(|error| {
            AttachError::Unsupported(format!("threads cannot be sampled (perf_event_open): {error}"))
        })?;
        let threads = MapHandle::try_from(&skeleton.maps.sq_thread_by_identity)?;
        let (stop, failed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, failures, choice) = (Arc::clone(&stop), Arc::clone(&failed), (*choice).clone());
        let thread = thread::Builder::new().name("sq-samples".to_owned()).spawn(move || {
            let mut timers = HashMap::new();
            while !stopped.load(Ordering::Relaxed) {
                failures.fetch_add(follow(&threads, &program, &choice, &mut timers), Ordering::Relaxed);
                thread::park_timeout(LOOK_EVERY);
            }
        });
        Ok(Samples { stop, failed, thread: Some(thread.context("cannot start a thread")?) })
    }

    /// How many threads could not be sampled, of those that came since the last time.
    pub(super) fn take_failed(&self) -> u64 {
        self.failed.swap(0, Ordering::Relaxed)
    }
}

impl Drop for Samples {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Its timers end with it.
            let _ = thread.join();
        }
    }
}

/// Starts timers for threads that are new, ends those of threads that are gone. Returns how many could not be started.
fn follow(threads: &MapHandle, program: &OwnedFd, choice: &Choice, timers: &mut HashMap<Vec<u8>, OwnedFd>) -> u64 {
    let there: Vec<Vec<u8>> = threads.keys().collect();
    timers.retain(|key, _| there.contains(key));
    let mut failed = 0;
    for key in there {
        if timers.contains_key(&key) {
            continue;
        }
        // One that is gone meanwhile needs none.
        let Ok(Some(bytes)) = threads.lookup(&key, MapFlags::ANY) else { continue };
        let Some(thread) = attach::read_plain::<sq_thread>(&bytes).filter(|thread| thread.own_tid != 0) else {
            continue;
        };
        if !may_be_sampled(thread.own_tid, choice) {
            failed += 1;
            continue;
        }
        match sample(thread.own_tid as libc::pid_t, program) {
            Ok(timer) => drop(timers.insert(key, timer)),
            // It is tried again, and counted each time: the thread has no samples meanwhile.
            Err(error) => failed += u64::from(error.raw_os_error() != Some(libc::ESRCH)),
        }
    }
    failed
}

/// Whether a thread may run on a CPU that is measured: its timer goes where it does.
fn may_be_sampled(tid: u32, choice: &Choice) -> bool {
    let affinity = Pid::from_raw(tid as i32).and_then(|tid| sched_getaffinity(Some(tid)).ok());
    // A thread that is gone is told by its timer.
    affinity.is_none_or(|set| (0..CpuSet::MAX_CPU).any(|cpu| set.is_set(cpu) && choice.takes(cpu as u32)))
}

/// Has the program look at a thread (0: the caller) until the descriptor is closed.
fn sample(tid: libc::pid_t, program: &OwnedFd) -> io::Result<OwnedFd> {
    let any_cpu = -1;
    let timer = start_timer(tid, any_cpu, PERIOD_NS)?;
    run_at(&timer, program.as_fd())?;
    Ok(timer)
}
