// SPDX-License-Identifier: MIT OR Apache-2.0
//! A timer on each CPU whose interrupt is due once in a period: when it comes late, interrupts were off. For the
//! account of CPUs it rests while the CPU changes hands often, and comes back with a CPU that was offline.

mod cost;
mod period;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::cpus::{self, Choice};
use crate::perf_event::{self, EVERY_THREAD, PERF_EVENT_IOC_DISABLE, PERF_EVENT_IOC_ENABLE};
use crate::symbols::address_of;

use cost::interrupt_ns;
pub use period::DEFAULT_PERIODS_NS;
pub(crate) use period::Period;

/// How often it is due for the account. Longer times with interrupts off are seen, short of at most this much.
pub(crate) const PERIOD_NS: u64 = 1_000_000;
/// The kernel's function that the timer calls (kernel/events/core.c). It sets the timer anew for times to come only.
pub(crate) const FUNCTION: &str = "perf_swevent_hrtimer";

/// How often it is decided whether a CPU's timer rests.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Intervals in that time from which on it rests: 20,000 a second. Each end of one shows that interrupts were on, and
/// the tick still tells when they were not; in a virtual machine a timer's interrupt may cost 20 µs.
const REST_FROM: u32 = 400;
/// How many times in a row fewer must be found until it beats again.
const CALM_LOOKS: u32 = 5;
/// Looks until it is asked which timers have gone with their CPU: a second.
const LOOKS_AT_CPUS: u32 = 50;

/// The timers of all CPUs, until it is dropped.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    /// Address of the timers' function.
    pub function: u64,
    period_ns: u64,
    beats: Vec<Beat>,
    pace: Option<Pace>,
}

/// The timer of one CPU.
#[derive(Debug)]
struct Beat {
    cpu: u32,
    event: OwnedFd,
    /// Looks until it beats again; 0 while it does.
    rests: u32,
    /// Intervals of the CPU when it was looked at the last time.
    seen: u32,
    /// What the event had counted when it was last asked whether it goes on.
    counted: u64,
}

/// The thread that lets timers rest.
#[derive(Debug)]
struct Pace {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Heartbeats {
    /// Starts a timer on each of the CPUs. Nobody reads its samples: only its interrupt matters.
    pub(crate) fn start(cpus: &[u32], period_ns: u64) -> io::Result<Self> {
        let function = address_of(FUNCTION)?;
        let beats = cpus.iter().map(|&cpu| Beat::start(cpu, period_ns)).collect::<io::Result<_>>()?;
        Ok(Heartbeats { function, period_ns, beats, pace: None })
    }

    /// Each CPU with the kernel's number of its event, by which a program knows it in every namespace.
    pub(crate) fn ids(&self) -> io::Result<Vec<(u32, u64)>> {
        self.beats.iter().map(|beat| Ok((beat.cpu, beat.id()?))).collect()
    }

    /// Starts the timer of a CPU anew, whose old one went when the CPU did. Returns the number of its event.
    pub(crate) fn restart(&mut self, cpu: u32, period_ns: u64) -> io::Result<u64> {
        let beat = Beat::start(cpu, period_ns)?;
        let id = beat.id()?;
        self.beats.retain(|beat| beat.cpu != cpu);
        self.beats.push(beat);
        Ok(id)
    }

    /// Holds the timers back, or lets them go on.
    #[cfg(test)]
    pub(crate) fn hold_back(&self, is_held: bool) -> io::Result<()> {
        let request = if is_held { PERF_EVENT_IOC_DISABLE } else { PERF_EVENT_IOC_ENABLE };
        self.beats.iter().try_for_each(|beat| perf_event::request(&beat.event, request))
    }

    /// From now on lets timers rest on CPUs of which `written` tells many intervals, and starts them on CPUs that come
    /// online and are to be measured. `written` gets the number of a CPU and returns how many intervals that has had,
    /// wrapping.
    pub(crate) fn keep_pace(
        &mut self,
        choice: Choice,
        written: impl Fn(u32) -> u32 + Send + 'static,
    ) -> io::Result<()> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (mut beats, period_ns) = (std::mem::take(&mut self.beats), self.period_ns);
        let thread = thread::Builder::new().name("heartbeats".to_owned()).spawn(move || {
            let mut looks = 0;
            while !stopped.load(Ordering::Relaxed) {
                thread::park_timeout(LOOK_EVERY);
                for beat in &mut beats {
                    beat.adapt(written(beat.cpu));
                }
                looks = (looks + 1) % LOOKS_AT_CPUS;
                if looks == 0 {
                    follow_cpus(&mut beats, &choice, period_ns);
                }
            }
        })?;
        self.pace = Some(Pace { stop, thread });
        Ok(())
    }
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        if let Some(pace) = self.pace.take() {
            pace.stop.store(true, Ordering::Relaxed);
            pace.thread.thread().unpark();
            // It cannot panic, and its timers end with it.
            let _ = pace.thread.join();
        }
    }
}

impl Beat {
    fn start(cpu: u32, period_ns: u64) -> io::Result<Self> {
        let event = perf_event::start_timer(EVERY_THREAD, cpu as libc::c_int, period_ns)?;
        Ok(Beat { cpu, event, rests: 0, seen: 0, counted: 0 })
    }

    /// Whether it has counted since the last time it was asked; the event of a CPU that went counts no more.
    fn goes_on(&mut self) -> bool {
        let Ok(counted) = perf_event::count(&self.event) else { return false };
        std::mem::replace(&mut self.counted, counted) != counted
    }

    fn id(&self) -> io::Result<u64> {
        perf_event::id(&self.event)
    }

    fn adapt(&mut self, written: u32) {
        let since = written.wrapping_sub(self.seen);
        self.seen = written;
        let rests = looks_left(self.rests, since);
        let request = match (self.rests, rests) {
            (0, 1..) => PERF_EVENT_IOC_DISABLE,
            (1.., 0) => PERF_EVENT_IOC_ENABLE,
            _ => {
                self.rests = rests;
                return;
            }
        };
        if perf_event::request(&self.event, request).is_ok() {
            self.rests = rests;
        }
    }
}

/// A CPU that goes takes its timer with it. Where none can be started it is tried again the next time.
fn follow_cpus(beats: &mut Vec<Beat>, choice: &Choice, period_ns: u64) {
    for cpu in cpus::online().unwrap_or_default().into_iter().filter(|&cpu| choice.takes(cpu)) {
        match beats.iter_mut().find(|beat| beat.cpu == cpu) {
            Some(beat) => {
                let is_gone = beat.rests == 0 && !beat.goes_on();
                if is_gone && let Ok(Beat { event, .. }) = Beat::start(cpu, period_ns) {
                    beat.event = event;
                }
            }
            None => beats.extend(Beat::start(cpu, period_ns)),
        }
    }
}

/// How many looks are left until a timer beats again, after one that has found so many intervals.
fn looks_left(before: u32, intervals: u32) -> u32 {
    if intervals >= REST_FROM { CALM_LOOKS } else { before.saturating_sub(1) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn a_timer_that_has_gone_with_its_cpu_is_started_again() {
        let choice = Choice::here(&[]).expect("the kernel lists its CPUs");
        let cpu = *choice.measured.last().expect("one runs this");
        let Ok(beat) = Beat::start(cpu, PERIOD_NS) else {
            println!("skipped: this user may have no timer on a CPU");
            return;
        };
        let mut beats = vec![beat];
        let follow_cpus = |beats: &mut Vec<Beat>| follow_cpus(beats, &choice, PERIOD_NS);
        follow_cpus(&mut beats);
        let first = beats.iter().position(|beat| beat.cpu == cpu).expect("it is still there");
        let event = |beats: &[Beat]| beats[first].event.as_raw_fd();
        let before = event(&beats);
        thread::sleep(Duration::from_millis(5));
        follow_cpus(&mut beats);
        assert_eq!(event(&beats), before, "it goes on");
        // As when the CPU has gone: it is there, and counts no more.
        perf_event::request(&beats[first].event, PERF_EVENT_IOC_DISABLE).expect("it may be held back");
        follow_cpus(&mut beats);
        thread::sleep(Duration::from_millis(5));
        follow_cpus(&mut beats);
        thread::sleep(Duration::from_millis(5));
        assert!(beats[first].goes_on(), "another one counts");
        let mut all: Vec<u32> = beats.iter().map(|beat| beat.cpu).collect();
        all.sort_unstable();
        assert_eq!(all, choice.measured, "each CPU has one");
    }

    #[test]
    fn no_timer_is_started_on_a_cpu_that_is_left_out() {
        let online = cpus::online().expect("the kernel lists its CPUs");
        let (asked, left_out) = online.split_at(1);
        let choice = Choice::here(asked).expect("it is online");
        let mut beats = Vec::new();
        follow_cpus(&mut beats, &choice, PERIOD_NS);
        assert!(beats.iter().all(|beat| asked.contains(&beat.cpu)), "{beats:?}, left out {left_out:?}");
    }

    #[test]
    fn a_timer_rests_at_once_and_beats_again_when_it_stays_calm() {
        let mut rests = 0;
        let found = [10, REST_FROM, 10, 10, 10, 10, REST_FROM - 1, 10];
        let told = found.map(|intervals| {
            rests = looks_left(rests, intervals);
            rests > 0
        });
        assert_eq!(told, [false, true, true, true, true, true, false, false]);
    }
}
