// SPDX-License-Identifier: MIT OR Apache-2.0
//! User threads that the kernel's tracer measures: each reads its CPU's `timerlat_fd`, which returns in the next
//! period. They are separate processes, because a restart of the tracer kills the readers
//! (kernel/trace/trace_osnoise.c), and with a thread its whole process.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io::{self, PipeReader, Read as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::CpuSet;

use super::super::Policy;
use super::super::threads::{self, SchedAttr};
use crate::kernel::least_privilege::drop_capabilities;

/// Steps of a reader before it reads, each of which may fail.
const STEPS: [&str; 5] = [
    "keep a reader on its CPU",
    "give a reader its priority (run as root, or grant CAP_SYS_NICE)",
    "close what a reader does not need",
    "open the tracer's file for a reader: another program reads it",
    "drop a reader's capabilities",
];
/// Stands in for a step's index: the reader is reading.
const READS: u8 = u8::MAX;
/// Descriptor of the pipe to the parent, in the reader.
const REPORT: RawFd = 3;

/// A reading process, killed on drop.
#[derive(Debug)]
pub(super) struct Reader {
    pid: Pid,
    has_ended: bool,
}

impl Reader {
    /// Starts a reader; returns when it reads.
    pub(super) fn start(cpu: u32, file: &Path, policy: Policy) -> anyhow::Result<Self> {
        let file = CString::new(file.as_os_str().as_bytes()).context("the name of the tracer's file has a zero")?;
        let name = CString::new(format!("timerlatu/{cpu}")).context("a CPU's number has a zero")?;
        let mut set = CpuSet::new();
        set.set(cpu as usize);
        let is_deadline = matches!(policy, Policy::Deadline { .. });
        let (attributes, parent) = (threads::attributes_of(policy), rustix::process::getpid());
        let config = ReaderConfig { set, attributes, is_deadline, file, name, parent };
        let (mut reports, report) = io::pipe().context("cannot make a pipe")?;
        // SAFETY: the child calls only what is safe after a fork with threads, allocates nothing, and never returns.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()).context("cannot start a reader"),
            0 => {
                let error = read(&config, report.as_raw_fd());
                // SAFETY: the call ends this process at once, without what the parent would do at its end.
                unsafe { libc::_exit(error) }
            }
            pid => {
                let pid = Pid::from_raw(pid).context("a child has no number")?;
                let reader = Reader { pid, has_ended: false };
                drop(report);
                wait_until_reading(&mut reports)?;
                Ok(reader)
            }
        }
    }
}

fn wait_until_reading(reports: &mut PipeReader) -> anyhow::Result<()> {
    let mut message = [0; 5];
    match reports.read_exact(&mut message) {
        Ok(()) if message[0] == READS => Ok(()),
        Ok(()) => {
            let [step, error @ ..] = message;
            let step = STEPS.get(usize::from(step)).copied().unwrap_or("start a reader");
            Err(io::Error::from_raw_os_error(i32::from_ne_bytes(error))).with_context(|| format!("cannot {step}"))
        }
        Err(_) => bail!("a reader ended before it read"),
    }
}

impl Reader {
    /// Fails if the reader has exited, which it never does by itself.
    pub(super) fn is_alive(&mut self) -> anyhow::Result<()> {
        if waitpid(Some(self.pid), WaitOptions::NOHANG).context("cannot look after a reader")?.is_some() {
            self.has_ended = true;
            bail!(
                "the kernel has ended a measured thread: another program has changed the settings of the timerlat tracer (measure again)"
            );
        }
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        // The process was not reaped, so its PID was not reused.
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

struct ReaderConfig {
    set: CpuSet,
    attributes: SchedAttr,
    is_deadline: bool,
    file: CString,
    name: CString,
    parent: Pid,
}

/// Runs the reader, with system calls only. Returns when reading fails.
fn read(config: &ReaderConfig, report: RawFd) -> i32 {
    let send = |step: u8, error: i32| {
        let [a, b, c, d] = error.to_ne_bytes();
        let message = [step, a, b, c, d];
        // SAFETY: the bytes are valid for the call, which only reads them. A missing listener shows up elsewhere.
        unsafe { libc::write(REPORT, message.as_ptr().cast(), message.len()) };
    };
    let failed = |step: u8| {
        let error = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        send(step, error);
        1
    };
    // SAFETY: system calls with pointers that are valid for the call and only read; `fork()` has copied what they point
    // to. No closed descriptor is used.
    unsafe {
        // Signals for the parent must not reach its children: Ctrl-C, and handlers that write to its pipes.
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        // The reader ends with the parent, even if that is killed.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() != config.parent.as_raw_nonzero().get() {
            return 1;
        }
        libc::dup2(report, REPORT);
        libc::prctl(libc::PR_SET_NAME, config.name.as_ptr());
        // Keeps pages in memory once they are touched; pages that only the parent uses are not copied.
        libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT);
        let this_thread = 0;
        let set_policy = || libc::syscall(libc::SYS_sched_setattr, this_thread, &raw const config.attributes, 0);
        // The other way around, a thread of higher priority on the CPU could keep this one from ever setting its own.
        if !config.is_deadline && set_policy() < 0 {
            return failed(1);
        }
        if libc::syscall(libc::SYS_sched_setaffinity, this_thread, size_of::<CpuSet>(), &raw const config.set) < 0 {
            return failed(0);
        }
        // The affinity of a deadline thread must be set before the policy.
        if config.is_deadline && set_policy() < 0 {
            return failed(1);
        }
        if libc::syscall(libc::SYS_close_range, REPORT + 1, libc::c_int::MAX, 0) < 0 {
            return failed(2);
        }
        let file = libc::open(config.file.as_ptr(), libc::O_RDONLY);
        if file < 0 {
            return failed(3);
        }
        // Reading needs no capabilities. Dropping them does not clear the signal at the end of the parent.
        if drop_capabilities() < 0 {
            return failed(4);
        }
        send(READS, 0);
        libc::close(REPORT);
        let mut nothing = 0_u8;
        // Each read returns no byte, in the next period.
        while libc::read(file, (&raw mut nothing).cast(), 1) >= 0 {}
    }
    1
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn reader_has_no_capabilities_while_it_reads() {
        let directory = tempfile::tempdir().expect("a directory");
        // A FIFO whose writer is silent, in place of the tracer's file.
        let path = directory.path().join("timerlat_fd");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
        let _writer = fs::OpenOptions::new().read(true).write(true).open(&path).expect("opened");
        let cpu = rustix::thread::sched_getcpu();
        let mut reader = Reader::start(cpu as u32, &path, Policy::Other(0)).expect("it reads");
        let pid = reader.pid.as_raw_nonzero();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("there");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            let mask = status.lines().find_map(|line| line.strip_prefix(set)).expect("a set");
            assert_eq!(u64::from_str_radix(mask.trim(), 16), Ok(0), "{status}");
        }
        reader.is_alive().expect("it still reads");
    }
}
