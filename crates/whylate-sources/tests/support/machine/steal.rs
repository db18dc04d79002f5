// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU time stolen by the hypervisor, by the kernel's count.

use std::fs;
use std::time::Duration;

/// Maximum stolen share: a failed comparison is not judged if more than this, and more than a tick, was stolen during
/// it.
const TAKEN: f64 = 0.01;
const TICK: Duration = Duration::from_millis(10);

/// Returns the time stolen from all CPUs since boot (proc_stat(5)).
pub fn stolen() -> Duration {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks =
        text.lines().next().and_then(|line| line.split_whitespace().nth(8)).and_then(|ticks| ticks.parse().ok());
    TICK.saturating_mul(ticks.unwrap_or(0))
}

/// Returns whether too much was stolen to judge a measurement of this length.
pub fn is_too_much(stolen: Duration, elapsed: Duration) -> bool {
    stolen > TICK && stolen.as_secs_f64() > TAKEN * elapsed.as_secs_f64()
}
