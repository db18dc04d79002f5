// SPDX-License-Identifier: MIT OR Apache-2.0
//! System calls without a safe wrapper elsewhere.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use libbpf_rs::libbpf_sys::{BPF_STATS_RUN_TIME, bpf_enable_stats};
use rustix::process::{Signal, set_parent_process_death_signal};

/// Has the kernel count runs and run time of BPF programs until the descriptor is closed, however this process ends.
/// `kernel.bpf_stats_enabled` stays unchanged.
pub fn count_run_times() -> Result<OwnedFd> {
    // SAFETY: the call takes a number and gives a descriptor, or a negative error.
    let fd = unsafe { bpf_enable_stats(BPF_STATS_RUN_TIME) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd)).context("the kernel does not count run times of BPF programs");
    }
    // SAFETY: a descriptor that the call above made, and that is used nowhere else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Kills the child when the thread that starts it ends, so that nothing stays attached.
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec there is one system call, which takes no lock and no memory.
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) }
}

/// Starts a thread with a single memory mapping, unlike a Rust thread: there is room for 30,000 of them.
pub fn begin_thread(
    begin: extern "C" fn(*mut c_void) -> *mut c_void,
    number: usize,
    stack_bytes: usize,
) -> io::Result<()> {
    let checked = |error| if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) };
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: the call fills the structure.
    checked(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
    let attributes = attributes.as_mut_ptr();
    let mut thread = 0;
    // SAFETY: the attributes have been made; the calls change them, and read them.
    unsafe {
        checked(libc::pthread_attr_setstacksize(attributes, stack_bytes))?;
        checked(libc::pthread_attr_setguardsize(attributes, 0))?;
        checked(libc::pthread_attr_setdetachstate(attributes, libc::PTHREAD_CREATE_DETACHED))?;
        // A number is passed as an address, which is never read.
        checked(libc::pthread_create(&raw mut thread, attributes, begin, number as *mut c_void))
    }
}

/// Resources used by ended children of this process, and theirs.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub cpu: Duration,
    /// Context switches, voluntary and involuntary.
    pub switches: u64,
}

pub fn usage_of_children() -> io::Result<Usage> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the pointer is valid for a write of the structure, which the call fills when it succeeds.
    if unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above has succeeded.
    let usage = unsafe { usage.assume_init() };
    let duration = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    let switches = usage.ru_nvcsw.unsigned_abs() + usage.ru_nivcsw.unsigned_abs();
    Ok(Usage { cpu: duration(usage.ru_utime) + duration(usage.ru_stime), switches })
}

/// Starts a process that sleeps and ends with this one. Only for single-threaded programs.
pub fn fork_sleeper() -> io::Result<()> {
    // SAFETY: this process has one thread, so the child may do anything; it only makes system calls.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            loop {
                // SAFETY: the call takes nothing and waits for a signal.
                unsafe { libc::pause() };
            }
        }
        _ => Ok(()),
    }
}
