// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a tool while it is measured.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, ensure};
use libbpf_rs::Link;
use rustix::process::{Pid, Signal, kill_process};

use crate::kernel;
use crate::programs::{self, Programs};

/// How long a tool may take to start, and to end.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Polling interval.
pub const POLL: Duration = Duration::from_millis(5);

/// A running tool, killed on drop: nothing stays attached, even after an error.
pub struct Tool {
    child: Child,
    spawned: Instant,
    first_output: Receiver<Instant>,
    /// Collects its standard error.
    stderr_reader: Option<JoinHandle<String>>,
}

impl Tool {
    pub fn start(program: impl AsRef<OsStr>, arguments: &[&str]) -> Result<Self> {
        let program = program.as_ref();
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let spawned = Instant::now();
        let mut child = kernel::die_with_parent(&mut command)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut output = child.stdout.take().context("the tool has no output")?;
        let (first, first_output) = mpsc::channel();
        // Read to the end, so that the tool never waits for its reader.
        thread::spawn(move || {
            let mut bytes = [0; 65536];
            while output.read(&mut bytes).is_ok_and(|length| length > 0) {
                // After the first time the receiver may be gone.
                let _ = first.send(Instant::now());
            }
        });
        let mut errors = child.stderr.take().context("the tool has no standard error")?;
        let stderr_reader = thread::spawn(move || {
            let mut bytes = Vec::new();
            // Output before a read error is useful too.
            let _ = errors.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).trim().to_owned()
        });
        Ok(Self { child, spawned, first_output, stderr_reader: Some(stderr_reader) })
    }

    /// Starts a command on one CPU, which applies to its user space.
    pub fn start_on(cpu: usize, command: &[&str]) -> Result<Self> {
        Self::start("taskset", &[&["-c", &cpu.to_string()], command].concat())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the peak memory in KiB.
    pub fn peak_kib(&self) -> Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).context("the tool has ended")?;
        peak_kib(&status).context("the kernel does not tell the peak of a process's memory")
    }

    /// Waits for the first byte of its output; returns the time since its start.
    pub fn first_output(&mut self) -> Result<Duration> {
        match self.first_output.recv_timeout(TIMEOUT) {
            Ok(at) => Ok(at - self.spawned),
            Err(_) => Err(self.failure("printed nothing")),
        }
    }

    /// Fails with its standard error if it has ended.
    pub fn expect_running(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            Some(status) => Err(self.failure(&format!("ended too early, {status}"))),
            None => Ok(()),
        }
    }

    /// Ends it with SIGINT, and returns its standard error.
    pub fn end(mut self) -> Result<String> {
        self.expect_running()?;
        kill_process(Pid::from_child(&self.child), Signal::INT).context("cannot end a tool")?;
        match self.wait()? {
            // Some tools clean up and then let the signal end them.
            Some(status) if status.success() || status.signal() == Some(Signal::INT.as_raw()) => Ok(self.stderr()),
            Some(status) => Err(self.failure(&format!("failed, {status}"))),
            None => Err(self.failure("did not end")),
        }
    }

    /// Kills it, and returns an error with its standard error.
    fn failure(&mut self, what: &str) -> Error {
        let _ = self.child.kill();
        anyhow!("the tool {what}: {}", self.stderr())
    }

    /// Returns its standard error, once it ends.
    fn stderr(&mut self) -> String {
        self.stderr_reader.take().and_then(|stderr_reader| stderr_reader.join().ok()).unwrap_or_default()
    }

    fn wait(&mut self) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(POLL);
        }
        Ok(None)
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        // Without effect on a tool that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the peak memory of a process in KiB, from its status (proc_pid_status(5)).
pub fn peak_kib(status: &str) -> Option<f64> {
    let rest = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    rest.trim().strip_suffix(" kB")?.parse().ok()
}

/// A running watcher, ended on drop.
pub enum Running {
    Ours { _links: Vec<Link> },
    Theirs(Tool),
}

impl Running {
    pub fn programs(&self) -> Result<Programs> {
        let pid = match self {
            Running::Ours { .. } => process::id(),
            Running::Theirs(tool) => tool.pid(),
        };
        programs::of_process(pid).context("the tool has ended")
    }

    pub fn end(self) -> Result<()> {
        if let Running::Theirs(tool) = self {
            tool.end()?;
        }
        Ok(())
    }
}

/// Polls until `is_so` holds. Fails with `complaint` after a timeout.
pub fn wait_until(complaint: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so()? {
        ensure!(Instant::now() <= deadline, "{complaint}");
        thread::sleep(POLL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_peak_memory() {
        assert_eq!(peak_kib("VmPeak:\t   9999 kB\nVmHWM:\t    5120 kB\n"), Some(5120.0));
        assert_eq!(peak_kib("Name:\tkthreadd\n"), None);
    }
}
