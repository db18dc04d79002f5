// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds threads that block attaching programs to kernel functions: the kernel changes a function only after each
//! thread has slept once (RCU tasks), waits for that uninterruptibly, and does so again when the programs are detached.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::fdinfo_backend::NAME;
use crate::kernel::proc::{self, numbers};

/// A thread that does not sleep within this time is spinning.
const SPIN_TIME: Duration = Duration::from_secs(1);
const POLL_PERIOD: Duration = Duration::from_millis(20);

/// Returns the TID of a submission thread, of any process, that spins: the kernel waits until each thread has slept.
pub(super) fn find() -> Option<u32> {
    let mut awake = Vec::new();
    for pid in numbers(Path::new("/proc")).unwrap_or_default() {
        for tid in numbers(Path::new(&format!("/proc/{pid}/task"))).unwrap_or_default() {
            let status = format!("/proc/{pid}/task/{tid}/status");
            let is_sq_thread =
                proc::text(format!("/proc/{pid}/task/{tid}/comm")).is_ok_and(|name| name.starts_with(NAME));
            if is_sq_thread && let Some(slept) = slept(&status).filter(|slept| !slept.is_asleep) {
                awake.push((tid, status, slept.times));
            }
        }
    }
    let began = Instant::now();
    while began.elapsed() < SPIN_TIME && !awake.is_empty() {
        thread::sleep(POLL_PERIOD);
        // A thread that has exited blocks nothing.
        awake.retain(|(_, status, times)| slept(status).is_some_and(|now| !now.is_asleep && now.times == *times));
    }
    awake.first().map(|(tid, _, _)| *tid)
}

struct SleepState {
    is_asleep: bool,
    times: u64,
}

fn slept(status: &str) -> Option<SleepState> {
    let text = proc::text(status).ok()?;
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    Some(SleepState {
        is_asleep: !value("State:")?.starts_with('R'),
        times: value("voluntary_ctxt_switches:")?.parse().ok()?,
    })
}
