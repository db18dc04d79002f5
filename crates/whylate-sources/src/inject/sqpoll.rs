// SPDX-License-Identifier: MIT OR Apache-2.0
//! A load for an io_uring submission thread with a share of work that is known from outside: the thread works as long
//! as requests are outstanding that it carries out itself.
//!
//! Each request reads random bytes, which the thread generates at once in some microseconds. The application polls the
//! ring without a pause, so it knows to the microsecond when the last request completes. The thread's run delay, as
//! counted by the scheduler, is subtracted; if the application itself was off-CPU at the end, that time is uncertain.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use crate::kernel::clock::monotonic_ns;
use crate::kernel::cpus::all_online;
use crate::kernel::priority::{become_fifo, favour, remedy, run_on};
use crate::kernel::proc;
use crate::source::AttachError;

/// Maximum number of rings that share one submission thread.
pub const MAX_RINGS: usize = 8;
const ENTRIES: u32 = 2048;
/// Bytes read by a request: some 10 us of a CPU, so that half a ring of them fills a default period.
pub const READ_BYTES: usize = 16 << 10;
/// io_uring carries out requests inline if they cannot wait: the file says so by being opened as non-blocking.
const RANDOM: &str = "/dev/urandom";
/// Minimum gap between two polls by which the application may have missed the end.
const GAP_NS: u64 = 20_000;
/// Real-time priority of an urgent application: the lowest.
const PRIORITY: u8 = 1;
/// Duty above which the application is not real-time: the kernel withholds the CPU from real-time threads for 50 ms of
/// each second in which others want it (`sched_rt_runtime_us`; the fair server from 6.12), and then the ring would not
/// be polled.
pub const MAX_URGENT: f64 = 0.9;
/// Time limit of a batch.
const TIMEOUT_NS: u64 = 5_000_000_000;

/// The load to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Share of time in which requests are outstanding, from 0 to 1.
    pub duty: f64,
    /// Interval from the start of one batch to the start of the next.
    pub period: Duration,
    /// Number of rings that share the thread.
    pub rings: usize,
    /// `sq_thread_idle`: how long the thread spins before it sleeps.
    pub idle_ms: u32,
    /// The CPU of the submission thread.
    pub sq_cpu: Option<u32>,
    /// The CPU of the application.
    pub app_cpu: Option<u32>,
    /// Run the application before all normal threads while it polls, which takes privileges.
    pub urgent: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            duty: 0.1,
            period: Duration::from_millis(10),
            rings: 1,
            idle_ms: 2_000,
            sq_cpu: None,
            app_cpu: None,
            urgent: false,
        }
    }
}

impl Plan {
    /// Refuses CPUs that are not online.
    ///
    /// # Errors
    /// Fails if a CPU of the plan is not online.
    pub fn check(&self) -> Result<(), AttachError> {
        let cpus: Vec<u32> = self.sq_cpu.into_iter().chain(self.app_cpu).collect();
        all_online(&cpus)
    }
}

/// Work done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Time of the reading (CLOCK_MONOTONIC).
    pub at_ns: u64,
    /// Time for which requests were outstanding while their thread did not wait for a CPU.
    pub busy_ns: u64,
    /// Part of `busy_ns` that may have been after the last completion, as the application did not poll.
    pub uncertain_ns: u64,
    /// Number of completed requests.
    pub requests: u64,
}

#[derive(Debug, Default)]
struct State {
    done: Done,
    /// Start of the outstanding batch, and its thread's run delay by then.
    since: Option<(u64, u64)>,
    error: Option<io::Error>,
}

/// A running load. It ends when dropped.
#[derive(Debug)]
pub struct Load {
    state: Arc<Mutex<State>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    tid: u32,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Load {
    /// Creates the rings and starts the load.
    ///
    /// # Errors
    /// Fails if the kernel refuses a ring, as it does where io_uring is disabled (`kernel.io_uring_disabled`).
    pub fn start(plan: &Plan) -> io::Result<Load> {
        if !(0.0..=1.0).contains(&plan.duty) || plan.period.is_zero() || !(1..=MAX_RINGS).contains(&plan.rings) {
            return Err(io::Error::other(
                "a duty is from 0 to 1, a period is longer than 0, and there are 1 to 8 rings",
            ));
        }
        let existing = own_sq_threads()?;
        let rings = rings(plan)?;
        let tid = new_sq_thread(&existing)?;
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(RANDOM)?;
        let state = Arc::new(Mutex::new(State::default()));
        let over = Arc::new(AtomicBool::new(false));
        let mut worker = Worker {
            plan: *plan,
            rings,
            file,
            buffer: vec![0; READ_BYTES],
            state: Arc::clone(&state),
            over: Arc::clone(&over),
            tid,
        };
        let thread = thread::Builder::new().name("whylate-app".to_owned()).spawn(move || {
            if let Err(error) = worker.run() {
                lock(&worker.state).error = Some(error);
            }
        })?;
        Ok(Load { state, over, thread: Some(thread), tid })
    }

    /// Returns the TID of the submission thread.
    pub fn tid(&self) -> u32 {
        self.tid
    }

    /// Returns the work done so far.
    ///
    /// # Errors
    /// Fails if the load has failed.
    pub fn done(&self) -> io::Result<Done> {
        let mut state = lock(&self.state);
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        let at_ns = monotonic_ns();
        let open_ns = match state.since {
            Some((began_ns, waited_before_ns)) => {
                at_ns.saturating_sub(began_ns).saturating_sub(waited_ns(self.tid)?.saturating_sub(waited_before_ns))
            }
            None => 0,
        };
        Ok(Done { at_ns, busy_ns: state.done.busy_ns + open_ns, ..state.done })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Done {
    /// Returns the work done since `before`.
    pub fn since(&self, before: &Done) -> Done {
        Done {
            at_ns: self.at_ns.saturating_sub(before.at_ns),
            busy_ns: self.busy_ns.saturating_sub(before.busy_ns),
            uncertain_ns: self.uncertain_ns.saturating_sub(before.uncertain_ns),
            requests: self.requests.saturating_sub(before.requests),
        }
    }
}

fn rings(plan: &Plan) -> io::Result<Vec<IoUring>> {
    let mut rings: Vec<IoUring> = Vec::new();
    for _ in 0..plan.rings {
        let mut builder = IoUring::builder();
        builder.setup_sqpoll(plan.idle_ms);
        if let Some(cpu) = plan.sq_cpu {
            builder.setup_sqpoll_cpu(cpu);
        }
        if let Some(first) = rings.first() {
            builder.setup_attach_wq(first.as_raw_fd());
        }
        rings.push(builder.build(ENTRIES)?);
    }
    Ok(rings)
}

/// Returns the submission threads of this process. Each gets its name when it first runs.
fn own_sq_threads() -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?;
        let is_one = proc::text(task.path().join("comm")).is_ok_and(|name| name.starts_with("iou-sqp-"));
        found.extend(task.file_name().to_str().and_then(|tid| tid.parse::<u32>().ok()).filter(|_| is_one));
    }
    Ok(found)
}

fn new_sq_thread(existing: &BTreeSet<u32>) -> io::Result<u32> {
    let began_ns = monotonic_ns();
    while monotonic_ns() - began_ns < TIMEOUT_NS {
        if let Some(&tid) = own_sq_threads()?.difference(existing).next() {
            return Ok(tid);
        }
        thread::sleep(Duration::from_millis(1));
    }
    Err(io::Error::other("the kernel started no submission thread"))
}

/// Returns the run delay of a thread of this process, in nanoseconds.
fn waited_ns(tid: u32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat"))?;
    let waited_ns = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    waited_ns.ok_or_else(|| io::Error::other("the kernel does not count how long threads wait for a CPU"))
}

struct Worker {
    plan: Plan,
    rings: Vec<IoUring>,
    file: File,
    buffer: Vec<u8>,
    state: Arc<Mutex<State>>,
    over: Arc<AtomicBool>,
    tid: u32,
}

impl Worker {
    fn run(&mut self) -> io::Result<()> {
        if let Some(cpu) = self.plan.app_cpu {
            run_on(&[cpu])?;
        }
        match self.plan.urgent {
            // Both threads: the weights within a cgroup (or session) share its CPU time.
            true if self.plan.duty > MAX_URGENT => [0, self.tid].into_iter().try_for_each(favour)?,
            true => become_fifo(PRIORITY).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    io::Error::new(error.kind(), format!("not permitted to take a real-time priority ({})", remedy()))
                }
                _ => error,
            })?,
            false => {}
        }
        let period_ns = self.plan.period.as_nanos() as u64;
        let began_ns = monotonic_ns();
        let mut next_ns = began_ns;
        // Learned from batches without run delay: the recent minimum, as anything above it is not the request's.
        let mut request_ns = f64::INFINITY;
        while !self.over.load(Ordering::Relaxed) {
            let now_ns = monotonic_ns();
            let done = lock(&self.state).done;
            // Time missing until the end of this period for the average duty since the start.
            let until_ns = (now_ns - began_ns + period_ns) as f64;
            let owed_ns = (self.plan.duty * until_ns - done.busy_ns as f64).clamp(0.0, period_ns as f64);
            let requests = ((owed_ns / request_ns).round() as usize).max(1);
            if self.plan.duty > 0.0 {
                let (batch, waited_ns) = self.batch(requests.min(ENTRIES as usize * self.rings.len() / 2))?;
                if waited_ns * 10 <= batch.busy_ns {
                    request_ns = (1.05 * request_ns).min(batch.busy_ns as f64 / batch.requests.max(1) as f64);
                }
            }
            next_ns = (next_ns + period_ns).max(monotonic_ns());
            if self.plan.duty < 1.0 {
                let pause_ns = next_ns.saturating_sub(monotonic_ns());
                thread::sleep(Duration::from_nanos(pause_ns));
            }
        }
        Ok(())
    }

    /// Waits until the submission thread runs: a wait that started before a batch would count within it.
    fn wait_until_running(&mut self) -> io::Result<()> {
        let Some(ring) = self.rings.first_mut() else { return Ok(()) };
        // SAFETY: the request has no buffer.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }
            .map_err(|_| io::Error::other("the ring is full"))?;
        ring.submit()?;
        let began_ns = monotonic_ns();
        while ring.completion().next().is_none() {
            if monotonic_ns() - began_ns > TIMEOUT_NS {
                return Err(io::Error::other("the submission thread does not carry its requests out"));
            }
        }
        Ok(())
    }

    /// Submits `requests` at once and polls until they complete. Also returns their thread's run delay.
    fn batch(&mut self, requests: usize) -> io::Result<(Done, u64)> {
        self.wait_until_running()?;
        let each = requests.div_ceil(self.rings.len());
        let read = opcode::Read::new(types::Fd(self.file.as_raw_fd()), self.buffer.as_mut_ptr(), READ_BYTES as u32);
        let read = read.build();
        let mut queues: Vec<_> = self.rings.iter_mut().map(IoUring::submission).collect();
        for queue in &mut queues {
            for _ in 0..each {
                // SAFETY: the file and the buffer live as long as the rings, and the buffer is never read.
                unsafe { queue.push(&read) }.map_err(|_| io::Error::other("the ring is full"))?;
            }
        }
        let waited_before_ns = waited_ns(self.tid)?;
        let began_ns = monotonic_ns();
        lock(&self.state).since = Some((began_ns, waited_before_ns));
        // The thread sees the requests from here on.
        drop(queues);
        for ring in &self.rings {
            ring.submit()?;
        }
        let mut batch = Done { requests: (each * self.rings.len()) as u64, ..Done::default() };
        let mut left = batch.requests;
        let mut now_ns = began_ns;
        while left > 0 {
            for ring in &mut self.rings {
                for completion in ring.completion() {
                    if completion.result() < 0 {
                        return Err(io::Error::from_raw_os_error(-completion.result()));
                    }
                    left = left.saturating_sub(1);
                }
            }
            let before_ns = std::mem::replace(&mut now_ns, monotonic_ns());
            if left == 0 && now_ns - before_ns > GAP_NS {
                batch.uncertain_ns = now_ns - before_ns;
            }
            if now_ns - began_ns > TIMEOUT_NS {
                return Err(io::Error::other("the submission thread does not carry its requests out"));
            }
        }
        let waited_ns = waited_ns(self.tid)? - waited_before_ns;
        batch.busy_ns = (now_ns - began_ns).saturating_sub(waited_ns);
        let mut state = lock(&self.state);
        state.since = None;
        state.done.busy_ns += batch.busy_ns;
        state.done.uncertain_ns += batch.uncertain_ns;
        state.done.requests += batch.requests;
        Ok((batch, waited_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_invalid_plan() {
        for plan in [
            Plan { duty: 1.1, ..Plan::default() },
            Plan { duty: f64::NAN, ..Plan::default() },
            Plan { rings: 0, ..Plan::default() },
            Plan { period: Duration::ZERO, ..Plan::default() },
        ] {
            assert!(Load::start(&plan).is_err(), "{plan:?}");
        }
    }
}
