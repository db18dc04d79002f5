// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the hypervisor takes, by the kernel's count.

use std::fs;
use std::time::Duration;

/// A comparison that fails is not judged where the hypervisor took more of a CPU meanwhile than this share, and than a tick.
const TAKEN: f64 = 0.01;
const TICK: Duration = Duration::from_millis(10);

/// What the hypervisor has taken from all CPUs (proc_stat(5)).
pub fn stolen() -> Duration {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks =
        text.lines().next().and_then(|line| line.split_whitespace().nth(8)).and_then(|ticks| ticks.parse().ok());
    TICK.saturating_mul(ticks.unwrap_or(0))
}

/// Whether that is too much to judge what was measured in so long.
pub fn is_too_much(stolen: Duration, elapsed: Duration) -> bool {
    stolen > TICK && stolen.as_secs_f64() > TAKEN * elapsed.as_secs_f64()
}
