// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands that run to their end, tools that run while they are measured, and workloads that this program is itself.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::kernel;

/// How long a tool may take to start, and to end.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Polling interval.
const POLL: Duration = Duration::from_millis(5);

/// Runs a command to its end. Fails with its standard error if the command does.
pub fn run(command: &mut Command) -> Result<Output> {
    let output = kernel::die_with_parent(command.stdin(Stdio::null())).output();
    let output = output.with_context(|| format!("cannot run {}", command.get_program().display()))?;
    // Some say on standard output what went wrong.
    let said = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    let (status, said) = (output.status, String::from_utf8_lossy(said));
    ensure!(status.success(), "{} failed, {status}: {}", command.get_program().display(), said.trim());
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
    let began = Instant::now();
    let child = kernel::die_with_parent(command.stdin(Stdio::null()).stdout(Stdio::null())).spawn();
    let mut child = KilledOnDrop(child.with_context(|| format!("cannot run {}", command.get_program().display()))?);
    let mut peak = 0.0_f64;
    let status = loop {
        peak = peak.max(peak_kib(child.0.id()).unwrap_or(0.0));
        if let Some(status) = child.0.try_wait()? {
            break status;
        }
        thread::sleep(Duration::from_millis(20));
    };
    ensure!(status.success(), "{} failed, {status}", command.get_program().display());
    Ok((began.elapsed(), peak))
}

/// Returns a command that runs this program with these words as arguments.
pub fn ourselves(words: &str) -> Result<Vec<String>> {
    let ours = env::current_exe().context("the path of this program is unknown")?;
    Ok([ours.to_string_lossy().as_ref()].into_iter().chain(words.split(' ')).map(str::to_owned).collect())
}

/// A child, killed on drop.
pub struct KilledOnDrop(pub Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Without effect on a child that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A workload in a process of its own, which is this program with other arguments: it prints [`READY`] when it has
/// started, and again for each line of input that it has carried out.
pub struct Workload {
    child: KilledOnDrop,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

const READY: &str = "ready";

impl Workload {
    /// Starts it, and waits until it is ready.
    pub fn start(words: &str) -> Result<Self> {
        let ours = ourselves(words)?;
        let mut command = Command::new(&ours[0]);
        command.args(&ours[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = kernel::die_with_parent(&mut command).spawn().context("cannot start the workload")?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("the workload has no output")?);
        let mut workload = Self { child: KilledOnDrop(child), input, output };
        workload.wait()?;
        Ok(workload)
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Has it carry out its work once more, and waits until that is done.
    pub fn repeat(&mut self) -> Result<()> {
        let input = self.input.as_mut().context("the workload has no input")?;
        input.write_all(b"\n").context("the workload has ended")?;
        self.wait()
    }

    fn wait(&mut self) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(line.trim() == READY, "the workload has ended");
        Ok(())
    }

    /// Reports to the parent of this process, which is a workload, that it is ready.
    pub fn report_ready() -> Result<()> {
        println!("{READY}");
        Ok(std::io::stdout().flush()?)
    }
}

/// A running tool, killed on drop: nothing stays attached, even after an error.
pub struct Tool {
    child: KilledOnDrop,
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
        Ok(Self { child: KilledOnDrop(child), spawned, first_output, stderr_reader: Some(stderr_reader) })
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Returns the peak memory in KiB.
    pub fn peak_kib(&self) -> Result<f64> {
        peak_kib(self.pid())
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
        match self.wait()? {
            // Some tools clean up and then let the signal end them.
            Some(status) if status.success() || status.signal() == Some(Signal::INT.as_raw()) => Ok(self.stderr()),
            Some(status) => Err(self.failure(&format!("failed, {status}"))),
            None => Err(self.failure("did not end")),
        }
    }

    /// Kills it, and returns an error with its standard error.
    fn failure(&mut self, what: &str) -> Error {
        let _ = self.child.0.kill();
        anyhow!("the tool {what}: {}", self.stderr())
    }

    /// Returns its standard error, once it ends.
    fn stderr(&mut self) -> String {
        self.stderr_reader.take().and_then(|stderr_reader| stderr_reader.join().ok()).unwrap_or_default()
    }

    fn wait(&mut self) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.0.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(POLL);
        }
        Ok(None)
    }
}

/// Returns the peak memory of a process in KiB.
pub fn peak_kib(pid: u32) -> Result<f64> {
    status_kib(pid, "VmHWM:")
}

/// Returns a field of a process's status (proc_pid_status(5)).
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
mod tests {
    use super::*;

    #[test]
    fn finds_peak_memory() {
        assert_eq!(find_kib("VmPeak:\t   9999 kB\nVmHWM:\t    5120 kB\n", "VmHWM:"), Some(5120.0));
        assert_eq!(find_kib("Name:\tkthreadd\n", "VmHWM:"), None);
    }
}
