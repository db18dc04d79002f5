// SPDX-License-Identifier: MIT OR Apache-2.0
//! A timer on each CPU whose interrupt is due once in a period: when it comes late, interrupts were off. For the account of CPUs it rests
//! while the CPU changes hands often.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use libbpf_rs::libbpf_sys::{PERF_COUNT_SW_CPU_CLOCK, PERF_FLAG_FD_CLOEXEC, PERF_TYPE_SOFTWARE, perf_event_attr};

use crate::symbols::address_of;

/// How often it is due for the account. Interrupts that are off for longer are seen; of their length at most this much is not.
pub(crate) const PERIOD_NS: u64 = 1_000_000;
/// The kernel's function that the timer calls (kernel/events/core.c). It sets the timer anew for times to come only.
pub(crate) const FUNCTION: &str = "perf_swevent_hrtimer";

/// How often it is decided whether a CPU's timer rests.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Intervals in that time from which on it rests: 20,000 a second. Each end of one shows that interrupts were on, and the tick still tells
/// when they were not; in a virtual machine a timer's interrupt may cost 20 µs.
const REST_FROM: u32 = 400;
/// How many times in a row fewer must be found until it beats again.
const CALM_LOOKS: u32 = 5;

/// The timers of all CPUs, until it is dropped.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    /// Address of the timers' function.
    pub function: u64,
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
        let beats = cpus
            .iter()
            .map(|&cpu| Ok(Beat { cpu, event: start_on(cpu, period_ns)?, rests: 0, seen: 0 }))
            .collect::<io::Result<_>>()?;
        Ok(Heartbeats { function, beats, pace: None })
    }

    /// Each CPU with the kernel's number of its event, by which a program knows it in every namespace.
    pub(crate) fn ids(&self) -> io::Result<Vec<(u32, u64)>> {
        self.beats.iter().map(|beat| Ok((beat.cpu, beat.id()?))).collect()
    }

    /// Starts the timer of a CPU anew, whose old one went when the CPU did. Returns the number of its event.
    pub(crate) fn restart(&mut self, cpu: u32, period_ns: u64) -> io::Result<u64> {
        let beat = Beat { cpu, event: start_on(cpu, period_ns)?, rests: 0, seen: 0 };
        let id = beat.id()?;
        self.beats.retain(|beat| beat.cpu != cpu);
        self.beats.push(beat);
        Ok(id)
    }

    /// From now on lets timers rest on CPUs of which `written` tells many intervals. It gets the number of a CPU and returns how many
    /// intervals that has had, wrapping.
    pub(crate) fn keep_pace(&mut self, written: impl Fn(u32) -> u32 + Send + 'static) -> io::Result<()> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let mut beats = std::mem::take(&mut self.beats);
        let thread = thread::Builder::new().name("heartbeats".to_owned()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                thread::park_timeout(LOOK_EVERY);
                for beat in &mut beats {
                    beat.adapt(written(beat.cpu));
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
    fn id(&self) -> io::Result<u64> {
        let mut id = 0_u64;
        // SAFETY: the request writes one number of 64 bits, for which the pointer is valid; the descriptor is that of a perf event.
        match unsafe { libc::ioctl(self.event.as_raw_fd(), PERF_EVENT_IOC_ID, &raw mut id) } {
            0 => Ok(id),
            _ => Err(io::Error::last_os_error()),
        }
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
        // SAFETY: the request takes no memory, and the descriptor is that of a perf event.
        if unsafe { libc::ioctl(self.event.as_raw_fd(), request, 0) } == 0 {
            self.rests = rests;
        }
    }
}

/// `_IO('$', 0)` and `_IO('$', 1)` of include/uapi/linux/perf_event.h.
const PERF_EVENT_IOC_ENABLE: libc::Ioctl = 0x2400;
const PERF_EVENT_IOC_DISABLE: libc::Ioctl = 0x2401;
/// `_IOR('$', 7, __u64 *)`, whose size is that of a pointer.
const PERF_EVENT_IOC_ID: libc::Ioctl = 0x8000_2407 | ((size_of::<*const u64>() as libc::Ioctl) << 16);

fn start_on(cpu: u32, period_ns: u64) -> io::Result<OwnedFd> {
    let every_process = -1;
    start_timer(every_process, cpu as libc::c_int, period_ns)
}

/// Starts a timer of a thread or of a CPU (-1: of any), which goes with the descriptor.
pub(crate) fn start_timer(tid: libc::pid_t, cpu: libc::c_int, period_ns: u64) -> io::Result<OwnedFd> {
    let mut attributes = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config: PERF_COUNT_SW_CPU_CLOCK.into(),
        ..perf_event_attr::default()
    };
    attributes.__bindgen_anon_1.sample_period = period_ns;
    let no_group = -1;
    // SAFETY: the attributes are valid for the call, which only reads them.
    let event = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw const attributes, tid, cpu, no_group, PERF_FLAG_FD_CLOEXEC)
    };
    if event < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(event as i32) })
}

/// How many looks are left until a timer beats again, after one that has found so many intervals.
fn looks_left(before: u32, intervals: u32) -> u32 {
    if intervals >= REST_FROM { CALM_LOOKS } else { before.saturating_sub(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
