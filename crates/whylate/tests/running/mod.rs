// SPDX-License-Identifier: MIT OR Apache-2.0
//! A running `whylate` that tests observe and send signals to; killed on drop. Not every test program uses everything.
#![allow(dead_code)]

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Timeout, far above what any step takes.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);

/// Path of the built program.
pub fn whylate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_whylate"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Copies a program under that name into a directory that every user can read. cp(1) writes the copy: a file that this
/// process has open for writing leaks into processes that other tests fork, and cannot be executed until they exit.
pub fn copied(program: &str, name: &str) -> Result<TempDir> {
    let directory = tempfile::tempdir()?;
    fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
    let copy = directory.path().join(name);
    let status = Command::new("cp").arg(program).arg(&copy).status()?;
    ensure!(status.success(), "cp cannot copy {program}");
    fs::set_permissions(&copy, Permissions::from_mode(0o755))?;
    Ok(directory)
}

/// Returns whether a process catches a signal.
fn catches(pid: u32, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(caught.trim(), 16).is_ok_and(|caught| caught & 1 << (signal.as_raw() - 1) != 0)
}

pub struct Running(Child);

impl Running {
    pub fn start(arguments: &[&str]) -> Result<Self> {
        Self::of(&mut whylate(arguments))
    }

    /// Builds a command that runs the copy.
    pub fn of(command: &mut Command) -> Result<Self> {
        Ok(Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn stdout(&mut self) -> Result<ChildStdout> {
        self.0.stdout.take().context("its output is in use")
    }

    pub fn stderr(&mut self) -> Result<ChildStderr> {
        self.0.stderr.take().context("its messages are in use")
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), signal)?)
    }

    pub fn is_alive(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_none())
    }

    /// Waits until the process catches the signal.
    pub fn wait_until_it_catches(&mut self, signal: Signal) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while !catches(self.pid(), signal) {
            ensure!(self.is_alive()?, "it ends before it catches {signal:?}");
            ensure!(Instant::now() < deadline, "it does not catch {signal:?}");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits until everything is attached: it holds kernel objects, and waits for the end of its span. Signals are
    /// caught long before.
    pub fn wait_until_it_measures(&mut self) -> Result<()> {
        // poll(2) or ppoll(2), of which the generic table has only the latter.
        let polls: &[&str] = if cfg!(target_arch = "x86_64") { &["7 ", "271 "] } else { &["73 "] };
        let deadline = Instant::now() + TIMEOUT;
        loop {
            ensure!(self.is_alive()?, "it ends before it measures");
            let call = self.proc("syscall").unwrap_or_default();
            let open = fs::read_dir(format!("/proc/{}/fd", self.pid()))?.flatten();
            let mut targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
            let is_object = |target: std::path::PathBuf| {
                ["bpf", "perf_event"].iter().any(|name| target.to_string_lossy().contains(name))
            };
            if targets.any(is_object) && polls.iter().any(|poll| call.starts_with(poll)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "it does not measure");
            thread::sleep(POLL);
        }
    }

    /// Waits for the exit and returns the status and standard error.
    pub fn end(&mut self) -> Result<(ExitStatus, String)> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.0.try_wait()? {
                let mut stderr = String::new();
                self.0.stderr.take().context("it has no standard error")?.read_to_string(&mut stderr)?;
                return Ok((status, stderr));
            }
            if Instant::now() >= deadline {
                bail!("it does not end");
            }
            thread::sleep(POLL);
        }
    }

    /// Returns true if the process is blocked writing to a full pipe.
    pub fn is_stuck_writing(&self) -> Result<bool> {
        let state = self.proc("status")?;
        let is_asleep = state.lines().any(|line| line.starts_with("State:") && line.contains('S'));
        // System call number of write: 1 on x86-64, 64 in the generic table.
        let call = self.proc("syscall")?;
        Ok(is_asleep && ["1 0x1 ", "64 0x1 "].iter().any(|write| call.starts_with(write)))
    }

    /// Waits until the signal is no longer pending.
    pub fn wait_until_delivered(&self, signal: Signal) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        let bit = 1_u64 << (signal.as_raw() - 1);
        while Instant::now() < deadline {
            let status = self.proc("status")?;
            let pending = |name: &str| {
                let mask = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0").trim();
                u64::from_str_radix(mask, 16).is_ok_and(|mask| mask & bit != 0)
            };
            if !pending("SigPnd:") && !pending("ShdPnd:") && self.is_stuck_writing()? {
                return Ok(());
            }
            thread::sleep(POLL);
        }
        bail!("the signal is not delivered")
    }

    /// Returns the memory that the process has allocated, in KiB: pages of its program and of BPF maps are left out.
    pub fn allocated_kb(&self) -> Result<u64> {
        let status = self.proc("status")?;
        let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("it has ended")?;
        Ok(anonymous.trim().trim_end_matches(" kB").parse()?)
    }

    fn proc(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.pid());
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
