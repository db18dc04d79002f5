// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's clocks.

use std::sync::OnceLock;

use rustix::time::{ClockId, clock_gettime};

/// Returns the machine's CLOCK_MONOTONIC, as `bpf_ktime_get_ns()` does, also in a time namespace.
pub fn monotonic_ns() -> u64 {
    now_ns(ClockId::Monotonic).saturating_add_signed(-offsets_ns().0)
}

/// Returns the machine's CLOCK_BOOTTIME, which includes suspended time.
pub fn boot_ns() -> u64 {
    now_ns(ClockId::Boottime).saturating_add_signed(-offsets_ns().1)
}

/// Returns the boot time in nanoseconds since 1970 (UTC), as /proc counts from it for this process.
pub(crate) fn boot_unix_ns() -> u64 {
    unix_ns().saturating_sub(now_ns(ClockId::Boottime))
}

/// Converts [`monotonic_ns`] to the CLOCK_MONOTONIC of this process's system calls, which includes the time namespace's
/// offset.
pub(crate) fn as_called_ns(monotonic_ns: u64) -> u64 {
    monotonic_ns.saturating_add_signed(offsets_ns().0)
}

/// Returns the offsets of CLOCK_MONOTONIC and CLOCK_BOOTTIME in this process's time namespace (time_namespaces(7),
/// Linux 5.6), which are fixed before its first process starts.
fn offsets_ns() -> (i64, i64) {
    static OFFSETS: OnceLock<(i64, i64)> = OnceLock::new();
    *OFFSETS.get_or_init(|| {
        let namespace = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
        // The file has the offsets of the children's namespace.
        if namespace("time") != namespace("time_for_children") {
            return (0, 0);
        }
        let text = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        (offset_ns(&text, "monotonic"), offset_ns(&text, "boottime"))
    })
}

/// Parses an offset: seconds, which may be negative, and nanoseconds.
pub(crate) fn offset_ns(text: &str, clock: &str) -> i64 {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(clock)).unwrap_or_default();
    let mut numbers = line.split_whitespace().map(|number| number.parse().unwrap_or(0_i64));
    let (seconds, nanoseconds) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

/// Returns the CPU time of the calling thread.
pub fn thread_cpu_ns() -> u64 {
    now_ns(ClockId::ThreadCPUTime)
}

/// Returns the CPU time of this process.
pub fn process_cpu_ns() -> u64 {
    now_ns(ClockId::ProcessCPUTime)
}

/// Returns the wall-clock time in nanoseconds since 1970 (UTC).
pub fn unix_ns() -> u64 {
    now_ns(ClockId::Realtime)
}

/// Converts a past time on CLOCK_MONOTONIC to wall-clock time, provided that the clock is not set in between.
pub fn unix_ns_of(past_monotonic_ns: u64) -> u64 {
    let ago_ns = monotonic_ns().saturating_sub(past_monotonic_ns);
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
    fn parses_time_namespace_offsets() {
        let text = "monotonic      100000         5\nboottime           -2 500000000\n";
        assert_eq!((offset_ns(text, "monotonic"), offset_ns(text, "boottime")), (100_000_000_000_005, -1_500_000_000));
        assert_eq!(offset_ns("", "monotonic"), 0);
    }
}
