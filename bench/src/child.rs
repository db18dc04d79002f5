// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tool that runs while it is measured.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process};

use crate::kernel;

/// How long a tool may take to start, and to end.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How often to look whether something has happened.
pub const POLL: Duration = Duration::from_millis(5);

/// Ends with its value: nothing stays attached, on an error neither.
pub struct Tool {
    child: Child,
    spawned: Instant,
    first_output: Receiver<Instant>,
    /// What it prints on standard error.
    complaints: Option<JoinHandle<String>>,
}

impl Tool {
    pub fn start(program: &OsStr, arguments: &[&str]) -> Result<Self> {
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
                // Nobody waits for it any more after the first time.
                let _ = first.send(Instant::now());
            }
        });
        let mut errors = child.stderr.take().context("the tool has no standard error")?;
        let complaints = thread::spawn(move || {
            let mut bytes = Vec::new();
            // What came before an error is of use too.
            let _ = errors.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).trim().to_owned()
        });
        Ok(Self { child, spawned, first_output, complaints: Some(complaints) })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the first byte of its output; returns how long after its start that came.
    pub fn first_output(&mut self) -> Result<Duration> {
        match self.first_output.recv_timeout(PATIENCE) {
            Ok(at) => Ok(at - self.spawned),
            Err(_) => Err(self.failure("printed nothing")),
        }
    }

    /// Ends it as Ctrl-C does. Returns what it has said on standard error.
    pub fn end(mut self) -> Result<String> {
        if let Some(status) = self.child.try_wait()? {
            return Err(self.failure(&format!("ended too early, {status}")));
        }
        kill_process(Pid::from_child(&self.child), Signal::INT).context("cannot end a tool")?;
        match self.wait()? {
            // Some tools tidy up and then let the signal end them.
            Some(status) if status.success() || status.signal() == Some(Signal::INT.as_raw()) => Ok(self.said()),
            Some(status) => Err(self.failure(&format!("failed, {status}"))),
            None => Err(self.failure("did not end")),
        }
    }

    /// Ends it at once, and tells what it had to say.
    fn failure(&mut self, what: &str) -> Error {
        let _ = self.child.kill();
        anyhow!("the tool {what}: {}", self.said())
    }

    /// What it has said on standard error, once it ends.
    fn said(&mut self) -> String {
        self.complaints.take().and_then(|complaints| complaints.join().ok()).unwrap_or_default()
    }

    fn wait(&mut self) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + PATIENCE;
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
        // Without effect on one that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
