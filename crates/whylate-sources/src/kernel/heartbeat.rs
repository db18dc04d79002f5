// SPDX-License-Identifier: MIT OR Apache-2.0
//! A heartbeat timer on each CPU: if its interrupt comes late, interrupts were off. For the CPU account it pauses while
//! the CPU switches often, and restarts with a CPU that was offline.

mod cost;
mod period;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::kernel::cpu_choice::Choice;
use crate::kernel::cpus;
use crate::kernel::perf_event::{self, EVERY_THREAD, PERF_EVENT_IOC_DISABLE, PERF_EVENT_IOC_ENABLE};
use crate::kernel::symbols::address_of;

use cost::interrupt_ns;
pub use period::DEFAULT_PERIODS_NS;
pub(crate) use period::Period;

/// Period for the account, in nanoseconds. A section with interrupts off is underestimated by at most this much.
pub(crate) const PERIOD_NS: u64 = 1_000_000;
/// Kernel function of the timer (kernel/events/core.c). It rearms the timer only for the future.
pub(crate) const FUNCTION: &str = "perf_swevent_hrtimer";

/// Poll period of the decision which CPU's timer pauses.
const POLL_PERIOD: Duration = Duration::from_millis(20);
/// Number of intervals per poll from which on the timer pauses: 20,000 a second. Each end of one shows that interrupts
/// were on, and the tick still shows when they were not; in a virtual machine a timer's interrupt may cost 20 us.
const PAUSE_FROM: u32 = 400;
/// Number of successive polls below `PAUSE_FROM` until the timer restarts.
const CALM_POLLS: u32 = 5;
/// Number of polls between checks for timers that were lost with their CPU: a second.
const POLLS_PER_CPU_CHECK: u32 = 50;

/// Timers of all CPUs; they run until dropped.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    /// Address of the timers' function.
    pub function: u64,
    period_ns: u64,
    timers: Vec<CpuTimer>,
    limiter: Option<RateLimiter>,
}

/// Timer of one CPU.
#[derive(Debug)]
struct CpuTimer {
    cpu: u32,
    event: OwnedFd,
    /// Polls until the timer restarts; 0 while it runs.
    paused_polls: u32,
    /// Number of the CPU's intervals at the last poll.
    seen: u32,
    /// Count of the event at the last liveness check.
    counted: u64,
}

/// Thread that pauses timers.
#[derive(Debug)]
struct RateLimiter {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Heartbeats {
    /// Starts a timer on each of the CPUs. Its samples are not read: only its interrupt matters.
    pub(crate) fn start(cpus: &[u32], period_ns: u64) -> io::Result<Self> {
        let function = address_of(FUNCTION)?;
        let timers = cpus.iter().map(|&cpu| CpuTimer::start(cpu, period_ns)).collect::<io::Result<_>>()?;
        Ok(Heartbeats { function, period_ns, timers, limiter: None })
    }

    /// Returns each CPU with the ID of its perf event, by which a program identifies it in every namespace.
    pub(crate) fn ids(&self) -> io::Result<Vec<(u32, u64)>> {
        self.timers.iter().map(|timer| Ok((timer.cpu, timer.id()?))).collect()
    }

    /// Starts a new timer on a CPU that lost its timer by going offline. Returns the ID of its event.
    pub(crate) fn restart(&mut self, cpu: u32, period_ns: u64) -> io::Result<u64> {
        let timer = CpuTimer::start(cpu, period_ns)?;
        let id = timer.id()?;
        self.timers.retain(|timer| timer.cpu != cpu);
        self.timers.push(timer);
        Ok(id)
    }

    /// Pauses all timers, or restarts them.
    #[cfg(test)]
    pub(crate) fn hold_back(&self, is_held: bool) -> io::Result<()> {
        let request = if is_held { PERF_EVENT_IOC_DISABLE } else { PERF_EVENT_IOC_ENABLE };
        self.timers.iter().try_for_each(|timer| perf_event::request(&timer.event, request))
    }

    /// Starts a thread that pauses timers of CPUs with many intervals, and starts timers on measured CPUs that come
    /// online. `written` returns the number of a CPU's intervals so far, wrapping.
    pub(crate) fn limit_rate(
        &mut self,
        choice: Choice,
        written: impl Fn(u32) -> u32 + Send + 'static,
    ) -> io::Result<()> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (mut timers, period_ns) = (std::mem::take(&mut self.timers), self.period_ns);
        let thread = thread::Builder::new().name("heartbeats".to_owned()).spawn(move || {
            let mut polls = 0;
            while !stopped.load(Ordering::Relaxed) {
                thread::park_timeout(POLL_PERIOD);
                for timer in &mut timers {
                    timer.adapt(written(timer.cpu));
                }
                polls = (polls + 1) % POLLS_PER_CPU_CHECK;
                if polls == 0 {
                    follow_cpus(&mut timers, &choice, period_ns);
                }
            }
        })?;
        self.limiter = Some(RateLimiter { stop, thread });
        Ok(())
    }
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        if let Some(limiter) = self.limiter.take() {
            limiter.stop.store(true, Ordering::Relaxed);
            limiter.thread.thread().unpark();
            // The thread does not panic, and its timers end with it.
            let _ = limiter.thread.join();
        }
    }
}

impl CpuTimer {
    fn start(cpu: u32, period_ns: u64) -> io::Result<Self> {
        let event = perf_event::start_timer(EVERY_THREAD, cpu as libc::c_int, period_ns)?;
        Ok(CpuTimer { cpu, event, paused_polls: 0, seen: 0, counted: 0 })
    }

    /// Tests whether the event has counted since the last check; the event of an offline CPU does not.
    fn is_alive(&mut self) -> bool {
        let Ok(counted) = perf_event::count(&self.event) else { return false };
        std::mem::replace(&mut self.counted, counted) != counted
    }

    fn id(&self) -> io::Result<u64> {
        perf_event::id(&self.event)
    }

    fn adapt(&mut self, written: u32) {
        let since = written.wrapping_sub(self.seen);
        self.seen = written;
        let paused_polls = polls_left(self.paused_polls, since);
        let request = match (self.paused_polls, paused_polls) {
            (0, 1..) => PERF_EVENT_IOC_DISABLE,
            (1.., 0) => PERF_EVENT_IOC_ENABLE,
            _ => {
                self.paused_polls = paused_polls;
                return;
            }
        };
        if perf_event::request(&self.event, request).is_ok() {
            self.paused_polls = paused_polls;
        }
    }
}

/// Replaces timers of CPUs that were offline. If a timer cannot be started, the next check retries.
fn follow_cpus(timers: &mut Vec<CpuTimer>, choice: &Choice, period_ns: u64) {
    for cpu in cpus::online().unwrap_or_default().into_iter().filter(|&cpu| choice.takes(cpu)) {
        match timers.iter_mut().find(|timer| timer.cpu == cpu) {
            Some(timer) => {
                let is_gone = timer.paused_polls == 0 && !timer.is_alive();
                if is_gone && let Ok(CpuTimer { event, .. }) = CpuTimer::start(cpu, period_ns) {
                    timer.event = event;
                }
            }
            None => timers.extend(CpuTimer::start(cpu, period_ns)),
        }
    }
}

/// Returns the polls left until a timer restarts, after one that has found `intervals`.
fn polls_left(before: u32, intervals: u32) -> u32 {
    if intervals >= PAUSE_FROM { CALM_POLLS } else { before.saturating_sub(1) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn restarts_timer_lost_with_its_cpu() {
        let choice = Choice::here(&[]).expect("the kernel lists its CPUs");
        let cpu = *choice.measured.last().expect("one runs this");
        let Ok(timer) = CpuTimer::start(cpu, PERIOD_NS) else {
            println!("skipped: this user may have no timer on a CPU");
            return;
        };
        let mut timers = vec![timer];
        let follow_cpus = |timers: &mut Vec<CpuTimer>| follow_cpus(timers, &choice, PERIOD_NS);
        follow_cpus(&mut timers);
        let first = timers.iter().position(|timer| timer.cpu == cpu).expect("it is still there");
        let event = |timers: &[CpuTimer]| timers[first].event.as_raw_fd();
        let before = event(&timers);
        thread::sleep(Duration::from_millis(5));
        follow_cpus(&mut timers);
        assert_eq!(event(&timers), before, "it goes on");
        // As after the CPU was offline: the event exists, and does not count.
        perf_event::request(&timers[first].event, PERF_EVENT_IOC_DISABLE).expect("it may be held back");
        follow_cpus(&mut timers);
        thread::sleep(Duration::from_millis(5));
        follow_cpus(&mut timers);
        thread::sleep(Duration::from_millis(5));
        assert!(timers[first].is_alive(), "another one counts");
        let mut all: Vec<u32> = timers.iter().map(|timer| timer.cpu).collect();
        all.sort_unstable();
        assert_eq!(all, choice.measured, "each CPU has one");
    }

    #[test]
    fn starts_no_timer_on_excluded_cpu() {
        let online = cpus::online().expect("the kernel lists its CPUs");
        let (asked, left_out) = online.split_at(1);
        let choice = Choice::here(asked).expect("it is online");
        let mut timers = Vec::new();
        follow_cpus(&mut timers, &choice, PERIOD_NS);
        assert!(timers.iter().all(|timer| asked.contains(&timer.cpu)), "{timers:?}, left out {left_out:?}");
    }

    #[test]
    fn timer_pauses_at_once_and_restarts_after_calm_polls() {
        let mut paused_polls = 0;
        let found = [10, PAUSE_FROM, 10, 10, 10, 10, PAUSE_FROM - 1, 10];
        let is_paused = found.map(|intervals| {
            paused_polls = polls_left(paused_polls, intervals);
            paused_polls > 0
        });
        assert_eq!(is_paused, [false, true, true, true, true, true, false, false]);
    }
}
