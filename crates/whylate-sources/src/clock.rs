// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's clocks.

use std::sync::OnceLock;

use rustix::time::{ClockId, clock_gettime};

/// Now on the machine's CLOCK_MONOTONIC, which `bpf_ktime_get_ns()` reads too, also in a time namespace.
pub fn monotonic_ns() -> u64 {
    now_ns(ClockId::Monotonic).saturating_add_signed(-offsets_ns().0)
}

/// Now on the machine's CLOCK_BOOTTIME, which goes on while it is suspended.
pub fn boot_ns() -> u64 {
    now_ns(ClockId::Boottime).saturating_add_signed(-offsets_ns().1)
}

/// When the machine was started, in nanoseconds since 1970 (UTC), as /proc counts from there for this process.
pub(crate) fn boot_unix_ns() -> u64 {
    unix_ns().saturating_sub(now_ns(ClockId::Boottime))
}

/// That moment of [`monotonic_ns`] as system calls of this process take it, which add the time namespace's offset.
pub(crate) fn as_called_ns(monotonic_ns: u64) -> u64 {
    monotonic_ns.saturating_add_signed(offsets_ns().0)
}

/// By how much this process's time namespace shifts CLOCK_MONOTONIC and CLOCK_BOOTTIME (time_namespaces(7), Linux 5.6),
/// which is settled before its first process begins.
fn offsets_ns() -> (i64, i64) {
    static OFFSETS: OnceLock<(i64, i64)> = OnceLock::new();
    *OFFSETS.get_or_init(|| {
        let namespace = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
        // The file tells of the namespace that children get.
        if namespace("time") != namespace("time_for_children") {
            return (0, 0);
        }
        let text = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        (offset_ns(&text, "monotonic"), offset_ns(&text, "boottime"))
    })
}

/// Seconds, which may be negative, and nanoseconds.
pub(crate) fn offset_ns(text: &str, clock: &str) -> i64 {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(clock)).unwrap_or_default();
    let mut numbers = line.split_whitespace().map(|number| number.parse().unwrap_or(0_i64));
    let (seconds, nanoseconds) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_namespace_shifts_its_clocks() {
        let text = "monotonic      100000         5\nboottime           -2 500000000\n";
        assert_eq!((offset_ns(text, "monotonic"), offset_ns(text, "boottime")), (100_000_000_000_005, -1_500_000_000));
        assert_eq!(offset_ns("", "monotonic"), 0);
    }
}
