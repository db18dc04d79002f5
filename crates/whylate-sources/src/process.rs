// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of processes that stay theirs when their number is given to another one.

use std::fs;

/// A name that no other process has had or will have until a reboot; `None` without `/proc`.
pub(crate) fn this_process() -> Option<String> {
    let pid = std::process::id();
    Some(format!("{pid}-{}", started(pid)?))
}

/// Whether the process of such a name runs.
pub(crate) fn is_running(name: &str) -> bool {
    name.split_once('-').is_some_and(|(pid, start)| pid.parse().ok().and_then(started).is_some_and(|now| now == start))
}

/// When a process started, in the kernel's ticks (field 22 of proc_pid_stat(5)).
fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.split_whitespace().nth(19).map(str::to_owned)
}
