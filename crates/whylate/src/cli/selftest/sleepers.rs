// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process of threads that sleep at known call sites, as `offcpu` leaves out its own process.

use std::io::{Read as _, Write as _, stdin, stdout};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Number of sleeping threads.
pub(super) const SLEEPERS: u64 = 3;
/// Names of the sleeping threads, and of the one that waits for another thread.
pub(super) const NAPS: &str = "whylate-nap";
pub(super) const WAITS: &str = "whylate-lock";
/// Sleep time, far longer than the check.
const NAP: Duration = Duration::from_secs(600);

/// The process, which ends on drop, and with its parent.
pub(super) struct Sleepers(Child);

impl Sleepers {
    /// Starts the process, and waits until all threads are started.
    pub(super) fn start() -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's executable")?;
        let mut command = Command::new(program);
        command.args(["selftest", "--sleepers"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut sleepers = Sleepers(command.spawn().context("cannot start a process that sleeps")?);
        let out = sleepers.0.stdout.as_mut().context("it has no output")?;
        out.read_exact(&mut [0; 1]).context("the process that sleeps has ended")?;
        Ok(sleepers)
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs as the process of sleeping threads, until standard input is closed.
///
/// # Errors
/// Fails if a thread cannot be started.
pub(super) fn be() -> Result<()> {
    let (sender, receiver) = mpsc::channel::<()>();
    for _ in 0..SLEEPERS {
        thread::Builder::new().name(NAPS.to_owned()).spawn(|| thread::sleep(NAP))?;
    }
    thread::Builder::new().name(WAITS.to_owned()).spawn(move || receiver.recv().is_ok())?;
    stdout().write_all(b"\n")?;
    stdout().flush()?;
    stdin().read_to_end(&mut Vec::new())?;
    drop(sender);
    Ok(())
}
