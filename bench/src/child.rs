// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands that run to their end, and tools that run while they are measured.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::kernel;

/// How long a tool may take to start, and to end.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);

/// Runs a command to its end. Fails with its standard error if the command does.
pub fn run(command: &mut Command) -> Result<Output> {
    let output = kernel::die_with_parent(command.stdin(Stdio::null())).output();
    let name = command.get_program().display();
    let output = output.with_context(|| format!("cannot run {name}"))?;
    // Some explain on standard output what went wrong.
    let errors = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    let (status, errors) = (output.status, String::from_utf8_lossy(errors));
    ensure!(status.success(), "{name} failed, {status}: {}", errors.trim());
    Ok(output)
}

/// Runs a command to its end, and returns its CPU time too, with that of its children.
pub fn run_for_cpu(command: &mut Command) -> Result<(Output, Duration)> {
    let before = kernel::usage_of_children()?.cpu;
    let output = run(command)?;
    Ok((output, kernel::usage_of_children()?.cpu - before))
}

/// Runs a command to its end, and parses the JSON on its standard output.
pub fn json(command: &mut Command) -> Result<serde_json::Value> {
    let output = run(command)?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{} printed no JSON", command.get_program().display()))
}

/// Runs a command to its end without reading its output, and returns how long it took and its peak memory in KiB.
pub fn run_for_peak(command: &mut Command) -> Result<(Duration, f64)> {
    let (began, mut peak) = (Instant::now(), 0.0_f64);
    let mut child = spawn(command.stdin(Stdio::null()).stdout(Stdio::null()))?;
    let status = loop {
        peak = peak.max(status_kib(child.0.id(), PEAK).unwrap_or(0.0));
        if let Some(status) = child.0.try_wait()? {
            break status;
        }
        thread::sleep(Duration::from_millis(20));
    };
    ensure!(status.success(), "{} failed, {status}", command.get_program().display());
    Ok((began.elapsed(), peak))
}

pub struct KilledOnDrop(pub Child);

pub fn spawn(command: &mut Command) -> Result<KilledOnDrop> {
    let child = kernel::die_with_parent(command).spawn();
    child.map(KilledOnDrop).with_context(|| format!("cannot start {}", command.get_program().display()))
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Without effect on a child that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running tool, killed on drop: nothing stays attached, even after an error.
pub struct Tool {
    child: KilledOnDrop,
    spawned: Instant,
    first_output: Receiver<Instant>,
    errors: File,
}

impl Tool {
    pub fn start(program: impl AsRef<OsStr>, arguments: &[&str]) -> Result<Self> {
        let errors = tempfile::tempfile().context("cannot make a file")?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors.try_clone()?);
        let spawned = Instant::now();
        let mut child = spawn(&mut command)?;
        let mut output = child.0.stdout.take().context("the tool has no output")?;
        let (first, first_output) = mpsc::channel();
        // Read to the end, so that the tool never waits for its reader.
        thread::spawn(move || {
            let mut bytes = [0; 65536];
            while output.read(&mut bytes).is_ok_and(|length| length > 0) {
                // After the first time the receiver may be gone.
                let _ = first.send(Instant::now());
            }
        });
        Ok(Self { child, spawned, first_output, errors })
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
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
        match self.child.0.try_wait()? {
            Some(status) => Err(self.failure(&format!("ended too early, {status}"))),
            None => Ok(()),
        }
    }

    /// Ends it with SIGINT, and returns its standard error.
    pub fn end(mut self) -> Result<String> {
        self.expect_running()?;
        kill_process(Pid::from_child(&self.child.0), Signal::INT).context("cannot end a tool")?;
        wait_until("a tool did not end", || Ok(self.child.0.try_wait()?.is_some()))?;
        let status = self.child.0.wait()?;
        // Some tools clean up and then let the signal end them.
        let is_ended = status.success() || status.signal() == Some(Signal::INT.as_raw());
        if is_ended { self.read_errors() } else { Err(self.failure(&format!("failed, {status}"))) }
    }

    fn failure(&mut self, what: &str) -> Error {
        anyhow!("the tool {what}: {}", self.read_errors().unwrap_or_default())
    }

    fn read_errors(&mut self) -> Result<String> {
        let mut bytes = Vec::new();
        self.errors.rewind()?;
        self.errors.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }
}

/// The peak memory in a process's status.
pub const PEAK: &str = "VmHWM:";

/// Returns a field of a process's status in KiB (proc_pid_status(5)).
pub fn status_kib(pid: u32, field: &str) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the process has ended")?;
    find_kib(&status, field).with_context(|| format!("the kernel does not show {field} of a process"))
}

fn find_kib(status: &str, field: &str) -> Option<f64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(field))?;
    rest.trim().strip_suffix(" kB")?.parse().ok()
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
#[path = "../unit/child.rs"]
mod tests;
