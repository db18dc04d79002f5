// SPDX-License-Identifier: MIT OR Apache-2.0
//! A timer on each CPU whose interrupt is due every millisecond: when it comes late, interrupts were off.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys::{PERF_COUNT_SW_CPU_CLOCK, PERF_FLAG_FD_CLOEXEC, PERF_TYPE_SOFTWARE, perf_event_attr};

/// How often it is due. Interrupts that are off for longer are seen; of their length at most this much is not.
const PERIOD_NS: u64 = 1_000_000;
/// The kernel's function that the timer calls (kernel/events/core.c). It sets the timer anew for times to come only.
const FUNCTION: &str = "perf_swevent_hrtimer";

/// The timers of all CPUs, until it is dropped.
#[derive(Debug)]
pub(super) struct Heartbeats {
    /// Address of the timers' function.
    pub function: u64,
    _events: Vec<OwnedFd>,
}

impl Heartbeats {
    /// Starts a timer on each of the CPUs. Nobody reads its samples: only its interrupt matters.
    pub(super) fn start(cpus: &[u32]) -> io::Result<Self> {
        let function = address_of(FUNCTION)?;
        let events = cpus.iter().map(|&cpu| start_on(cpu)).collect::<io::Result<_>>()?;
        Ok(Heartbeats { function, _events: events })
    }
}

fn start_on(cpu: u32) -> io::Result<OwnedFd> {
    let mut attributes = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config: PERF_COUNT_SW_CPU_CLOCK.into(),
        ..perf_event_attr::default()
    };
    attributes.__bindgen_anon_1.sample_period = PERIOD_NS;
    let (every_process, no_group) = (-1, -1);
    // SAFETY: the attributes are valid for the call, which only reads them.
    let event = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            every_process,
            cpu,
            no_group,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    if event < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(event as i32) })
}

/// Where a kernel function is.
fn address_of(function: &str) -> io::Result<u64> {
    let symbols = std::fs::read_to_string("/proc/kallsyms")?;
    let line = symbols.lines().find(|line| line.split_ascii_whitespace().nth(2) == Some(function));
    let address = line.and_then(|line| u64::from_str_radix(line.split_ascii_whitespace().next()?, 16).ok());
    match address {
        Some(address) if address != 0 => Ok(address),
        _ => Err(io::Error::other(format!("/proc/kallsyms does not tell where {function} is"))),
    }
}
