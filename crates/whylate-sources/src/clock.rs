// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's clocks.

use rustix::time::{ClockId, clock_gettime};

/// Now on CLOCK_MONOTONIC, which `bpf_ktime_get_ns()` reads too.
pub fn monotonic_ns() -> u64 {
    now_ns(ClockId::Monotonic)
}

/// Now on CLOCK_BOOTTIME, which goes on while the machine is suspended.
pub fn boot_ns() -> u64 {
    now_ns(ClockId::Boottime)
}

/// What the calling thread has had of all CPUs.
pub fn thread_cpu_ns() -> u64 {
    now_ns(ClockId::ThreadCPUTime)
}

/// What this process has had of all CPUs.
pub fn process_cpu_ns() -> u64 {
    now_ns(ClockId::ProcessCPUTime)
}

/// Now in nanoseconds since 1970 (UTC).
pub fn unix_ns() -> u64 {
    now_ns(ClockId::Realtime)
}

/// The wall-clock time of a past moment on CLOCK_MONOTONIC, as long as nobody sets the clock in between.
pub fn unix_ns_of(moment_monotonic_ns: u64) -> u64 {
    let ago_ns = monotonic_ns().saturating_sub(moment_monotonic_ns);
    unix_ns().saturating_sub(ago_ns)
}

fn now_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    // All of them are after their zero and nanoseconds are below a second.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
