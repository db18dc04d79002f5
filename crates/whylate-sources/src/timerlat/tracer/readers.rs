// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads in user space that the kernel's tracer measures: each reads its CPU's `timerlat_fd`, which returns in the
//! next period. They are processes, because a restart of the tracer kills whoever reads (kernel/trace/trace_osnoise.c),
//! and with a thread its process.
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

/// What a reader does before it reads, which may fail.
const STEPS: [&str; 4] = [
    "keep a reader on its CPU",
    "give a reader its priority (run as root, or grant CAP_SYS_NICE)",
    "close what a reader does not need",
    "open the tracer's file for a reader: another program reads it",
];
/// In place of the number of a step: the reader reads.
const READS: u8 = u8::MAX;
/// Where a reader has the pipe to its parent.
const REPORT: RawFd = 3;

/// A process that reads, until it is dropped.
#[derive(Debug)]
pub(super) struct Reader {
    pid: Pid,
    has_ended: bool,
}

impl Reader {
    /// Starts it; returns when it reads.
    pub(super) fn start(cpu: u32, file: &Path, policy: Policy) -> anyhow::Result<Self> {
        let file = CString::new(file.as_os_str().as_bytes()).context("the name of the tracer's file has a zero")?;
        let name = CString::new(format!("timerlatu/{cpu}")).context("a CPU's number has a zero")?;
        let mut set = CpuSet::new();
        set.set(cpu as usize);
        let is_deadline = matches!(policy, Policy::Deadline { .. });
        let (attributes, parent) = (threads::attributes_of(policy), rustix::process::getpid());
        let orders = Orders { set, attributes, is_deadline, file, name, parent };
        let (mut reports, report) = io::pipe().context("cannot make a pipe")?;
        // SAFETY: the child calls only what is safe after a fork with threads, allocates nothing, and never returns.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()).context("cannot start a reader"),
            0 => {
                let error = read(&orders, report.as_raw_fd());
                // SAFETY: the call ends this process at once, without what the parent would do at its end.
                unsafe { libc::_exit(error) }
            }
            pid => {
                let pid = Pid::from_raw(pid).context("a child has no number")?;
                let reader = Reader { pid, has_ended: false };
                drop(report);
                wait_for(&mut reports)?;
                Ok(reader)
            }
        }
    }
}

fn wait_for(reports: &mut PipeReader) -> anyhow::Result<()> {
    let mut told = [0; 5];
    match reports.read_exact(&mut told) {
        Ok(()) if told[0] == READS => Ok(()),
        Ok(()) => {
            let [step, error @ ..] = told;
            let step = STEPS.get(usize::from(step)).copied().unwrap_or("start a reader");
            Err(io::Error::from_raw_os_error(i32::from_ne_bytes(error))).with_context(|| format!("cannot {step}"))
        }
        Err(_) => bail!("a reader ended before it read"),
    }
}

impl Reader {
    /// Fails where it has ended, which it does not by itself.
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
        // Nobody has waited for it, so no other process has its number.
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

struct Orders {
    set: CpuSet,
    attributes: SchedAttr,
    is_deadline: bool,
    file: CString,
    name: CString,
    parent: Pid,
}

/// The reader: system calls alone. Returns when reading fails.
fn read(orders: &Orders, report: RawFd) -> i32 {
    let tell = |step: u8, error: i32| {
        let [a, b, c, d] = error.to_ne_bytes();
        let told = [step, a, b, c, d];
        // SAFETY: the bytes are valid for the call, which only reads them. If nobody listens, that is known soon.
        unsafe { libc::write(REPORT, told.as_ptr().cast(), told.len()) };
    };
    let failed = |step: u8| {
        let error = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        tell(step, error);
        1
    };
    // SAFETY: system calls, whose pointers are valid for the call and only read; `fork()` has copied what they point
    // to. No descriptor that is closed is used after.
    unsafe {
        // What is meant for the parent is not for its children: Ctrl-C, and handlers that write to its pipes.
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        // It ends with the parent, also if that is killed.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() != orders.parent.as_raw_nonzero().get() {
            return 1;
        }
        libc::dup2(report, REPORT);
        libc::prctl(libc::PR_SET_NAME, orders.name.as_ptr());
        // Pages stay once they are there; those that only the parent uses are not copied.
        libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT);
        let this_thread = 0;
        let set_policy = || libc::syscall(libc::SYS_sched_setattr, this_thread, &raw const orders.attributes, 0);
        // On its CPU there may be somebody more urgent than it is yet.
        if !orders.is_deadline && set_policy() < 0 {
            return failed(1);
        }
        if libc::syscall(libc::SYS_sched_setaffinity, this_thread, size_of::<CpuSet>(), &raw const orders.set) < 0 {
            return failed(0);
        }
        // Where a deadline thread may be is settled before.
        if orders.is_deadline && set_policy() < 0 {
            return failed(1);
        }
        if libc::syscall(libc::SYS_close_range, REPORT + 1, libc::c_int::MAX, 0) < 0 {
            return failed(2);
        }
        let file = libc::open(orders.file.as_ptr(), libc::O_RDONLY);
        if file < 0 {
            return failed(3);
        }
        tell(READS, 0);
        libc::close(REPORT);
        let mut nothing = 0_u8;
        // Each returns no byte, in the next period.
        while libc::read(file, (&raw mut nothing).cast(), 1) >= 0 {}
    }
    1
}
