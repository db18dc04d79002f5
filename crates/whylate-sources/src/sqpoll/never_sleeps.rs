// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that keep programs from being attached to functions of the kernel: it changes a function only when each
//! thread has slept once (RCU tasks), waits for that uninterruptibly, and does so again when they are taken away.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::of_proc::{NAME, numbers};

/// A thread that has not slept in so long is one that spins.
const PATIENCE: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A submission thread that has not slept once, of any process: the kernel waits for all.
pub(super) fn find() -> Option<u32> {
    let mut awake = Vec::new();
    for pid in numbers(Path::new("/proc")).unwrap_or_default() {
        for tid in numbers(Path::new(&format!("/proc/{pid}/task"))).unwrap_or_default() {
            let status = format!("/proc/{pid}/task/{tid}/status");
            let is_sq_thread =
                fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).is_ok_and(|name| name.starts_with(NAME));
            if is_sq_thread && let Some(slept) = slept(&status).filter(|slept| !slept.is_asleep) {
                awake.push((tid, status, slept.times));
            }
        }
    }
    let began = Instant::now();
    while began.elapsed() < PATIENCE && !awake.is_empty() {
        thread::sleep(LOOK_EVERY);
        // One that is gone keeps nothing up.
        awake.retain(|(_, status, times)| slept(status).is_some_and(|now| !now.is_asleep && now.times == *times));
    }
    awake.first().map(|(tid, _, _)| *tid)
}

struct Slept {
    is_asleep: bool,
    times: u64,
}

fn slept(status: &str) -> Option<Slept> {
    let text = fs::read_to_string(status).ok()?;
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    Some(Slept {
        is_asleep: !value("State:")?.starts_with('R'),
        times: value("voluntary_ctxt_switches:")?.parse().ok()?,
    })
}
