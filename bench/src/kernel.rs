// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests to the kernel that have no safe function elsewhere.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use libbpf_rs::libbpf_sys::{BPF_STATS_RUN_TIME, bpf_enable_stats};
use rustix::process::{Signal, set_parent_process_death_signal};

/// Has the kernel count the runs and the run time of BPF programs, until the descriptor is closed, however this process ends.
/// `kernel.bpf_stats_enabled` stays as it is.
pub fn count_run_times() -> io::Result<OwnedFd> {
    // SAFETY: the call takes a number and gives a descriptor, or a negative error.
    let fd = unsafe { bpf_enable_stats(BPF_STATS_RUN_TIME) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: a descriptor that the call above made, and that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The child does not outlive the thread that starts it, so nothing stays attached.
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec there is one system call, which takes no lock and no memory.
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) }
}
