// SPDX-License-Identifier: MIT OR Apache-2.0
//! Capabilities of a run without an end: once everything is attached, all threads drop those that measuring does not
//! need. Each thread has its own sets, and only the thread itself can change them: a signal handler does.

#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, configure_capability_in_ambient_set, set_capabilities,
};

use crate::kernel::{pid_namespace, proc};

/// What measuring needs: timers and programs for CPUs that come online (BPF, PERFMON), the kernel's symbols after a
/// module was loaded (SYSLOG), and the mappings and programs of processes that start later.
const MEASURING: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYSLOG)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::CHECKPOINT_RESTORE)
    .union(CapabilitySet::DAC_READ_SEARCH);
/// What attaching needs besides: a profile or report in a second process, and restoring settings at the end.
const ATTACHING: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_NICE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_RESOURCE);
/// What files in directories of other users need, for a recording.
const FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// Time in which all threads have to react.
const TIMEOUT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(1);
/// Version 3 of capget(2) and capset(2).
const VERSION_3: u32 = 0x2008_0522;

/// Sets that the handler leaves to a thread.
static EFFECTIVE: AtomicU64 = AtomicU64::new(0);
static PERMITTED: AtomicU64 = AtomicU64::new(0);

/// Capabilities that stay reduced until the value is dropped. The thread that drops it gets back those that attaching needs.
#[derive(Debug)]
pub struct ReducedCapabilities(());

impl ReducedCapabilities {
    /// Leaves to all threads the capabilities that measuring needs, and permits those that attaching needs. With
    /// `writes_files`, keeps those to write a recording.
    ///
    /// # Errors
    /// Fails if the threads cannot be listed, or one does not react. Some have dropped capabilities then.
    pub fn reduce(writes_files: bool) -> anyhow::Result<Self> {
        let reduced = ReducedCapabilities(());
        let files = if writes_files { FILES } else { CapabilitySet::empty() };
        let effective = MEASURING | files;
        EFFECTIVE.store(effective.bits(), Ordering::Relaxed);
        PERMITTED.store((effective | ATTACHING).bits(), Ordering::Relaxed);
        // The numbers of threads in /proc are those of the signals.
        if let Some(reason) = pid_namespace::lacks_proc() {
            bail!("{reason}");
        }
        let _handler = Handler::install().context("cannot install a signal handler")?;
        let deadline = Instant::now() + TIMEOUT;
        let mut asked = Vec::new();
        loop {
            let too_many = threads_beyond(effective.bits()).context("cannot read the capabilities of threads")?;
            if too_many.is_empty() {
                return Ok(reduced);
            }
            if Instant::now() >= deadline {
                bail!("{} of whylate's threads still have capabilities that are not needed", too_many.len());
            }
            for tid in too_many.into_iter().filter(|tid| !asked.contains(tid)).collect::<Vec<_>>() {
                ask(tid)?;
                asked.push(tid);
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for ReducedCapabilities {
    fn drop(&mut self) {
        // What cannot be restored now is restored by the next start.
        if let Ok(sets) = capabilities(None) {
            let _ = set_capabilities(None, CapabilitySets { effective: sets.permitted, ..sets });
        }
    }
}

/// Has the programs that this thread executes get its permitted capabilities, whatever its user.
///
/// # Errors
/// Fails if the kernel refuses it.
pub fn pass_capabilities_on() -> io::Result<()> {
    let sets = capabilities(None)?;
    set_capabilities(None, CapabilitySets { inheritable: sets.permitted, ..sets })?;
    for capability in sets.permitted.iter() {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Returns the threads of this process with other effective capabilities than these.
fn threads_beyond(effective: u64) -> io::Result<Vec<libc::pid_t>> {
    let mut beyond = Vec::new();
    for entry in fs::read_dir("/proc/self/task")? {
        let entry = entry?;
        // A thread may have ended by now.
        let Ok(status) = proc::text(entry.path().join("status")) else { continue };
        let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
        let tid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (Some(mask), Some(tid)) = (mask, tid)
            && mask & !effective != 0
        {
            beyond.push(tid);
        }
    }
    Ok(beyond)
}

/// Sends the signal to a thread of this process.
fn ask(tid: libc::pid_t) -> io::Result<()> {
    // SAFETY: system calls without pointers.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, signal()) };
    match io::Error::last_os_error() {
        // The thread has ended.
        error if sent != 0 && error.raw_os_error() != Some(libc::ESRCH) => Err(error),
        _ => Ok(()),
    }
}

/// A real-time signal that nothing else here uses.
fn signal() -> libc::c_int {
    libc::SIGRTMAX() - 1
}

/// The installed handler. After it is dropped, the signal is ignored: a thread may receive it late.
struct Handler;

impl Handler {
    fn install() -> io::Result<Self> {
        set_action(give_up as extern "C" fn(libc::c_int) as libc::sighandler_t).map(|()| Handler)
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // Only an invalid signal is refused.
        let _ = set_action(libc::SIG_IGN);
    }
}

fn set_action(to: libc::sighandler_t) -> io::Result<()> {
    // SAFETY: all zeros are a valid `sigaction`, with an empty mask. It is valid for the call, and the handler is
    // async-signal-safe.
    let outcome = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (to, libc::SA_RESTART);
        libc::sigaction(signal(), &raw const action, null_mut())
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The kernel's `struct __user_cap_header_struct`.
#[repr(C)]
struct Head {
    version: u32,
    pid: libc::c_int,
}

/// The kernel's `struct __user_cap_data_struct`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Half {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Drops capabilities of the current thread, also for programs that it executes. Makes a system call for each
/// capability, allocates nothing, and takes no lock.
extern "C" fn give_up(_signal: libc::c_int) {
    let [effective, permitted] = [&EFFECTIVE, &PERMITTED].map(|set| set.load(Ordering::Relaxed));
    let mut head = Head { version: VERSION_3, pid: 0 };
    let mut halves = [Half::default(); 2];
    // SAFETY: the pointers are valid for the calls, and of the kernel's types. `errno` of the interrupted code is
    // restored.
    unsafe {
        let errno = *libc::__errno_location();
        // Programs that root executes get all of this set. Fails without SETPCAP, and beyond the last capability.
        for capability in (0..CapabilitySet::all().bits().count_ones()).filter(|bit| permitted >> bit & 1 == 0) {
            libc::syscall(libc::SYS_prctl, libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        if libc::syscall(libc::SYS_capget, &raw mut head, halves.as_mut_ptr()) == 0 {
            for (half, shift) in halves.iter_mut().zip([0, 32]) {
                half.permitted &= (permitted >> shift) as u32;
                half.effective &= (effective >> shift) as u32;
                half.inheritable = 0;
            }
            libc::syscall(libc::SYS_capset, &raw mut head, halves.as_ptr());
        }
        *libc::__errno_location() = errno;
    }
}

/// Drops the effective capabilities of the current thread. Programs that its threads execute can still get those that are
/// permitted, with [`pass_capabilities_on`].
///
/// # Errors
/// Fails if capset(2) fails.
pub fn drop_effective_capabilities() -> io::Result<()> {
    let sets = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { effective: CapabilitySet::empty(), ..sets })?)
}

/// Drops all capabilities of the current thread, and returns what capset(2) does. Makes one system call, allocates
/// nothing, and takes no lock: safe in a process that was forked from one with threads.
pub fn drop_capabilities() -> libc::c_long {
    let mut head = Head { version: VERSION_3, pid: 0 };
    let halves = [Half::default(); 2];
    // SAFETY: the pointers are valid for the call, and of the kernel's types.
    unsafe { libc::syscall(libc::SYS_capset, &raw mut head, halves.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Capabilities of this thread, as the kernel shows them.
    fn shown() -> String {
        let status = fs::read_to_string("/proc/thread-self/status").expect("it is readable");
        status.lines().filter(|line| line.starts_with("Cap")).collect()
    }

    #[test]
    fn threads_give_up_what_is_not_needed_and_can_pass_on_the_rest() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        // In a process of its own: dropped capabilities do not come back.
        let name = "kernel::least_privilege::tests::threads_give_up_what_is_not_needed_and_can_pass_on_the_rest";
        if std::env::var_os("WHYLATE_GIVES_UP").is_none() {
            let mut itself = std::process::Command::new(std::env::current_exe().expect("a path"));
            let status = itself.args(["--exact", name]).env("WHYLATE_GIVES_UP", "1").status();
            assert!(status.expect("it runs").success());
            return;
        }
        let before = capabilities(None).expect("they are known");
        let (go, goes) = channel::<()>();
        let other = thread::spawn(move || {
            goes.recv().expect("it goes on");
            capabilities(None).expect("they are known")
        });
        let reduced = ReducedCapabilities::reduce(false).expect("the threads react");
        go.send(()).expect("it waits");
        for sets in [other.join().expect("no panic"), capabilities(None).expect("they are known")] {
            assert_eq!(sets.effective, before.effective & MEASURING);
            assert_eq!(sets.permitted, before.permitted & (MEASURING | ATTACHING));
            assert!(!sets.permitted.contains(CapabilitySet::SYS_MODULE), "{}", shown());
        }
        let bounding = shown()
            .rsplit("CapBnd:")
            .next()
            .and_then(|rest| u64::from_str_radix(rest.split("CapAmb:").next()?.trim(), 16).ok());
        let is_bounded = bounding.is_some_and(|mask| mask & !(MEASURING | ATTACHING).bits() == 0);
        assert!(is_bounded || !before.effective.contains(CapabilitySet::SETPCAP), "{}", shown());
        drop(reduced);
        let after = capabilities(None).expect("they are known");
        assert_eq!(after.effective, before.permitted & (MEASURING | ATTACHING));
        pass_capabilities_on().expect("the kernel permits it");
        let ambient = shown().rsplit("CapAmb:").next().and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        assert_eq!(ambient, Some(after.permitted.bits()));
    }
}
