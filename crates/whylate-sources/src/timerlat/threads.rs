// SPDX-License-Identifier: MIT OR Apache-2.0
//! The measured threads of this process: one on each CPU, which sleeps until the next period in a loop.
#![allow(unsafe_code)]

use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::{Context, anyhow};

use super::activation::Activation;
use super::activation_queue::{self, Counter, Producer};
use super::latest::Latest;
use super::locked::Locked;
use super::tally::{StepWidth, Times};
use crate::AttachError;
use crate::kernel::clock::{as_called_ns, monotonic_ns};
use crate::kernel::mapped::MappedArray;
use crate::kernel::priority::{remedy, run_on};

/// Scheduling policy of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// SCHED_OTHER with a nice value.
    Other(i32),
    /// SCHED_RR with a priority from 1 to 99.
    RoundRobin(u8),
    /// SCHED_FIFO with a priority from 1 to 99.
    Fifo(u8),
    /// SCHED_DEADLINE.
    Deadline {
        /// Runtime in each period.
        runtime_ns: u64,
        /// The period.
        period_ns: u64,
    },
}

/// A measured thread, stopped on drop.
#[derive(Debug)]
pub(super) struct Measured {
    pub cpu: u32,
    pub counter: Counter,
    stopped: Arc<StopState>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

#[derive(Debug)]
pub(super) struct ThreadConfig {
    pub cpu: u32,
    pub period_ns: u64,
    /// Phase of the activations: they are due at multiples of the period from this time; `None` for any phase.
    pub due_with_ns: Option<u64>,
    pub policy: Policy,
    pub map: Arc<MappedArray>,
    pub width: Option<StepWidth>,
    /// Interval at which activations are counted, at least.
    pub counted_every_ns: u64,
    pub stop: Stop,
    pub stopped: Arc<StopState>,
    /// Number of latest activations to keep.
    pub recorded: usize,
}

/// Latencies at which measurement stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stop {
    /// Latency of the interrupt.
    pub irq_ns: Option<u64>,
    /// Latency of the thread, and of its return to user space.
    pub thread_ns: Option<u64>,
}

impl Stop {
    fn is_hit(&self, times: Times) -> bool {
        let since_due = |ns: u64| ns.saturating_sub(times.due_ns);
        self.irq_ns.is_some_and(|limit_ns| since_due(times.irq_ns) >= limit_ns)
            || self.thread_ns.is_some_and(|limit_ns| since_due(times.thread_ns.max(times.user_ns)) >= limit_ns)
    }
}

/// Returns the thread that runs on each CPU.
type Tasks = Box<dyn Fn() -> Vec<(u32, String)> + Send + Sync>;

/// The CPU that has stopped measurement, for all threads. The fields that they read per activation share a cache line.
#[repr(C, align(64))]
pub(super) struct StopState {
    /// CPU number plus one; 0 while measuring, and [`SETTLING`] before.
    by: AtomicU32,
    /// Makes threads end.
    is_over: AtomicBool,
    /// Activations due before this do not count.
    from_ns: AtomicU64,
    /// Time at which measurement stopped, on CLOCK_MONOTONIC.
    at_ns: AtomicU64,
    /// Due time of the activation that stopped measurement.
    due_ns: AtomicU64,
    /// Time of its thread's switch-in; 0 if unknown.
    thread_ns: AtomicU64,
    tasks: Option<Tasks>,
    tasks_then: Mutex<Vec<(u32, String)>>,
}

/// Threads run, but do not count yet: their first page faults and cache misses may take milliseconds.
const SETTLING: u32 = u32::MAX;

impl StopState {
    pub(super) fn new(tasks: Option<Tasks>) -> Self {
        let [at_ns, due_ns, thread_ns, from_ns] = [const { AtomicU64::new(0) }; 4];
        let (by, is_over) = (AtomicU32::new(SETTLING), AtomicBool::new(false));
        Self { by, at_ns, due_ns, thread_ns, from_ns, is_over, tasks, tasks_then: Mutex::default() }
    }

    pub(super) fn by(&self) -> Option<u32> {
        self.by.load(Ordering::Acquire).checked_sub(1).filter(|&cpu| cpu < SETTLING - 1)
    }

    /// Returns the end of the activation that stopped the measurement; no later one counts.
    pub(super) fn until_ns(&self) -> u64 {
        if self.measures() { u64::MAX } else { self.at_ns.load(Ordering::Acquire) }
    }

    pub(super) fn began_ns(&self) -> u64 {
        self.from_ns.load(Ordering::Acquire)
    }

    fn measures(&self) -> bool {
        self.by.load(Ordering::Acquire) == 0
    }

    /// Makes activations count that are due from `from_ns` on.
    pub(super) fn resume(&self, from_ns: u64) {
        self.at_ns.store(0, Ordering::Release);
        self.from_ns.store(from_ns, Ordering::Release);
        self.by.store(0, Ordering::Release);
    }

    pub(super) fn tasks(&self) -> Vec<(u32, String)> {
        self.tasks_then.lock().map(|tasks| tasks.clone()).unwrap_or_default()
    }

    /// Stops measurement because of an activation. The first call wins. May be slow: nothing is measured any more.
    pub(super) fn stop(&self, cpu: u32, due_ns: u64, thread_ns: u64, at_ns: u64) {
        if self.at_ns.compare_exchange(0, at_ns, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        self.due_ns.store(due_ns, Ordering::Relaxed);
        self.thread_ns.store(thread_ns, Ordering::Relaxed);
        let is_first = self.by.compare_exchange(0, cpu + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if let (true, Some(tasks), Ok(mut then)) = (is_first, &self.tasks, self.tasks_then.lock()) {
            *then = tasks();
        }
    }

    /// Returns, in nanoseconds since it was due, when the thread of the activation that stopped measurement was switched
    /// in and when it returned to user space; `None` if one of the times is unknown.
    pub(super) fn thread_times(&self) -> Option<(u64, u64)> {
        self.by()?;
        let [due_ns, thread_ns, at_ns] =
            [&self.due_ns, &self.thread_ns, &self.at_ns].map(|time| time.load(Ordering::Relaxed));
        Some((thread_ns.checked_sub(due_ns)?, at_ns.checked_sub(due_ns)?)).filter(|_| due_ns > 0)
    }

    /// Returns whether this activation stopped measurement.
    pub(super) fn is_by(&self, cpu: u32, due_ns: u64) -> bool {
        self.by() == Some(cpu) && self.due_ns.load(Ordering::Relaxed) == due_ns
    }
}

impl std::fmt::Debug for StopState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StopState").field("by", &self.by).finish_non_exhaustive()
    }
}

impl Measured {
    /// Starts a thread; returns when it is about to sleep for the first time.
    pub(super) fn start(config: ThreadConfig) -> Result<Self, AttachError> {
        let (mut producer, mut counter) =
            activation_queue::queue(config.period_ns, config.counted_every_ns, config.width);
        counter.latest = Latest::new(config.recorded);
        let (ready, is_ready) = std::sync::mpsc::sync_channel(1);
        let (cpu, stopped) = (config.cpu, Arc::clone(&config.stopped));
        let thread = thread::Builder::new().name(format!("timerlat/{cpu}")).spawn(move || {
            let code = [repeat as *const (), libc::syscall as *const (), libc::clock_gettime as *const ()];
            let code = code.map(|function| Locked::code(function.addr()));
            let _locked = (Locked::stack(), Locked::memory(producer.slots()), code);
            let prepared = prepare(&config);
            let may_go = prepared.is_ok();
            // The starter waits for this.
            let _ = ready.send(prepared);
            if may_go { repeat(&config, &mut producer) } else { Ok(()) }
        });
        let thread = thread.context("cannot start a measured thread")?;
        let measured = Measured { cpu, counter, stopped, thread: Some(thread) };
        is_ready.recv().map_err(|_| anyhow!("the measured thread of CPU {cpu} failed"))??;
        Ok(measured)
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        // Threads are never measured without the others.
        self.stopped.is_over.store(true, Ordering::Relaxed);
        // The thread ends within a period.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Explains an error of setting the policy. A policy without privilege needs none.
fn explain_policy_error(error: io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => AttachError::Unsupported(format!(
            "not permitted to give the measured threads their priority ({}, or choose -P o:0)",
            remedy()
        )),
        _ => anyhow!(error).context("cannot give the measured threads their priority").into(),
    }
}

fn prepare(config: &ThreadConfig) -> Result<(), AttachError> {
    let bind_to_cpu = || run_on(&[config.cpu]).with_context(|| format!("cannot run a thread on CPU {}", config.cpu));
    let this_thread = 0;
    match config.policy {
        // The affinity of a deadline thread must be set before the policy.
        Policy::Deadline { .. } => {
            bind_to_cpu()?;
            set_policy(this_thread, config.policy).context(
                "cannot make the measured threads deadline threads, which the kernel keeps on one CPU only where that is a cpuset partition \
                 of its own (choose another -P)",
            )?;
        }
        // The other way around, a thread of higher priority on the CPU could keep this one from ever setting its own.
        _ => {
            set_policy(this_thread, config.policy).map_err(explain_policy_error)?;
            bind_to_cpu()?;
        }
    }
    // Timers of non-real-time threads have a slack, 50 us by default; those of real-time threads have none.
    let slack = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    Ok(slack.context("cannot set the slack of a thread's timers")?)
}

/// Measures in a loop. Allocates nothing and takes no lock: waiting for one would be measured too.
fn repeat(config: &ThreadConfig, producer: &mut Producer) -> anyhow::Result<()> {
    // Caches are cold after a sleep, so everything is looked up before.
    let (cpu, period_ns, stop, stopped) = (config.cpu, config.period_ns, config.stop, &*config.stopped);
    let activation = Activation::on_cpu(&config.map, cpu);
    activation.measure(true);
    let mut due_ns = first_due(monotonic_ns() + period_ns, period_ns, config.due_with_ns);
    while !stopped.is_over.load(Ordering::Relaxed) {
        activation.expect(due_ns);
        sleep_until(due_ns)?;
        let user_ns = monotonic_ns();
        let times = activation.times(due_ns, user_ns);
        // For an activation due before counting starts, only the periods that it made the thread miss count.
        let from_ns = stopped.from_ns.load(Ordering::Relaxed);
        if stopped.measures() && user_ns >= from_ns {
            producer.push(times);
            if due_ns >= from_ns && stop.is_hit(times) {
                stopped.stop(cpu, due_ns, times.thread_ns, user_ns);
            }
        }
        due_ns += period_ns;
        if due_ns <= user_ns {
            due_ns += ((user_ns - due_ns) / period_ns + 1) * period_ns;
        }
    }
    activation.measure(false);
    Ok(())
}

/// Returns the first time from `from_ns` on that is a whole number of periods from `due_with_ns`.
fn first_due(from_ns: u64, period_ns: u64, due_with_ns: Option<u64>) -> u64 {
    let Some(with_ns) = due_with_ns else { return from_ns };
    from_ns + (with_ns % period_ns + period_ns - from_ns % period_ns) % period_ns
}

fn sleep_until(due_ns: u64) -> io::Result<()> {
    let due_ns = as_called_ns(due_ns);
    let due = libc::timespec {
        tv_sec: (due_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (due_ns % 1_000_000_000) as libc::c_long,
    };
    loop {
        let no_rest = std::ptr::null_mut::<libc::timespec>();
        // libc's own function is a cancellation point, which costs two atomic exchanges.
        // SAFETY: the time is valid for the call, which only reads it; there is no remaining time to write.
        let result = unsafe {
            let (clock, flags) = (libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME);
            libc::syscall(libc::SYS_clock_nanosleep, clock, flags, &raw const due, no_rest)
        };
        if result == 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => {}
            error => return Err(error),
        }
    }
}

/// The kernel's `struct sched_attr` in its first version (48 bytes, include/uapi/linux/sched/types.h).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SchedAttr {
    size: u32,
    sched_policy: u32,
    sched_flags: u64,
    sched_nice: i32,
    sched_priority: u32,
    sched_runtime: u64,
    sched_deadline: u64,
    sched_period: u64,
}

pub(super) fn attributes_of(policy: Policy) -> SchedAttr {
    let mut attributes = SchedAttr { size: size_of::<SchedAttr>() as u32, ..SchedAttr::default() };
    match policy {
        Policy::Other(nice) => {
            attributes.sched_policy = libc::SCHED_OTHER as u32;
            attributes.sched_nice = nice;
        }
        Policy::RoundRobin(priority) => {
            attributes.sched_policy = libc::SCHED_RR as u32;
            attributes.sched_priority = priority.into();
        }
        Policy::Fifo(priority) => {
            attributes.sched_policy = libc::SCHED_FIFO as u32;
            attributes.sched_priority = priority.into();
        }
        Policy::Deadline { runtime_ns, period_ns } => {
            attributes.sched_policy = libc::SCHED_DEADLINE as u32;
            attributes.sched_runtime = runtime_ns;
            attributes.sched_deadline = period_ns;
            attributes.sched_period = period_ns;
        }
    }
    attributes
}

/// Sets the scheduling policy of a thread; 0 is the calling one.
pub(super) fn set_policy(tid: u32, policy: Policy) -> io::Result<()> {
    let (attributes, no_flags) = (attributes_of(policy), 0);
    // SAFETY: the attributes are valid for the call, which only reads as much as their size says.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attributes, no_flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn aligns_first_activation() {
        assert_eq!(first_due(5_250, 1_000, None), 5_250);
        assert_eq!(first_due(5_250, 1_000, Some(250)), 5_250);
        assert_eq!(first_due(5_250, 1_000, Some(8_300)), 5_300);
        assert_eq!(first_due(5_250, 1_000, Some(200)), 6_200);
    }

    #[test]
    fn stop_has_the_times_of_its_thread() {
        let state = StopState::new(None);
        state.resume(0);
        assert_eq!(state.thread_times(), None);
        state.stop(3, 1_000, 1_063, 1_811);
        assert_eq!((state.by(), state.thread_times()), (Some(3), Some((63, 811))));
        for (due_ns, thread_ns) in [(1_000, 0), (0, 0)] {
            state.resume(0);
            assert_eq!(state.thread_times(), None);
            state.stop(3, due_ns, thread_ns, 1_811);
            assert_eq!(state.thread_times(), None, "{due_ns} {thread_ns}");
        }
    }

    proptest! {
        #[test]
        fn first_activation_is_within_a_period(from_ns in 0..1_u64 << 60, period_ns in 1..2_000_000_000_u64, with_ns in 0..1_u64 << 60) {
            let due_ns = first_due(from_ns, period_ns, Some(with_ns));
            prop_assert!(due_ns >= from_ns && due_ns - from_ns < period_ns);
            prop_assert_eq!(due_ns % period_ns, with_ns % period_ns);
        }
    }
}
