// SPDX-License-Identifier: MIT OR Apache-2.0
//! Samples each submission thread by a timer that runs while the thread is on-CPU. No kernel code changes, so it waits
//! for no thread, and lockdown allows it.

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
use crate::kernel::attach;
use crate::kernel::cpu_choice::Choice;
use crate::kernel::perf_event::{run_at, start_timer};
use crate::source::AttachError;

/// Sampling period of a thread's on-CPU time, some 4,000 per second. No period of 1, 2, 4, 5, 10 or 20 ms is near a
/// multiple of it, so samples do not align with an application's period.
const PERIOD_NS: u64 = 241_663;
/// Poll period for new threads; a thread's time before its first sample counts as what that shows.
const POLL_PERIOD: Duration = Duration::from_millis(20);

/// Samples threads until dropped.
pub(super) struct Samples {
    stop: Arc<AtomicBool>,
    failed: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Samples {
    /// Starts sampling. Threads that may run only on excluded CPUs are not sampled, and counted.
    pub(super) fn start(skeleton: &SqpollSkel<'_>, choice: Rc<Choice>) -> Result<Self, AttachError> {
        let program = skeleton.progs.on_sample.as_fd().try_clone_to_owned().context("cannot keep a program")?;
        // Sampling the calling thread briefly shows whether it is possible at all.
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
                thread::park_timeout(POLL_PERIOD);
            }
        });
        Ok(Samples { stop, failed, thread: Some(thread.context("cannot start a thread")?) })
    }

    /// Returns the number of threads that could not be sampled since the last call.
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

/// Starts timers for new threads and ends those of exited ones. Returns the number of threads without a timer.
fn follow(threads: &MapHandle, program: &OwnedFd, choice: &Choice, timers: &mut HashMap<Vec<u8>, OwnedFd>) -> u64 {
    let present: Vec<Vec<u8>> = threads.keys().collect();
    timers.retain(|key, _| present.contains(key));
    let mut failed = 0;
    for key in present {
        if timers.contains_key(&key) {
            continue;
        }
        // The thread has exited.
        let Ok(Some(bytes)) = threads.lookup(&key, MapFlags::ANY) else { continue };
        let Some(thread) = attach::read_plain::<sq_thread>(&bytes).filter(|thread| thread.own_tid != 0) else {
            continue;
        };
        if !can_be_sampled(thread.own_tid, choice) {
            failed += 1;
            continue;
        }
        match sample(thread.own_tid as libc::pid_t, program) {
            Ok(timer) => drop(timers.insert(key, timer)),
            // Retried and counted at each poll: the thread has no samples until then.
            Err(error) => failed += u64::from(error.raw_os_error() != Some(libc::ESRCH)),
        }
    }
    failed
}

/// Tests whether a thread may run on a measured CPU: its timer follows it.
fn can_be_sampled(tid: u32, choice: &Choice) -> bool {
    let affinity = Pid::from_raw(tid as i32).and_then(|tid| sched_getaffinity(Some(tid)).ok());
    // An exited thread is detected by its timer.
    affinity.is_none_or(|set| (0..CpuSet::MAX_CPU).any(|cpu| set.is_set(cpu) && choice.takes(cpu as u32)))
}

/// Samples a thread (0: the caller) until the descriptor is closed.
fn sample(tid: libc::pid_t, program: &OwnedFd) -> io::Result<OwnedFd> {
    let any_cpu = -1;
    let timer = start_timer(tid, any_cpu, PERIOD_NS)?;
    run_at(&timer, program.as_fd())?;
    Ok(timer)
}
