// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process of threads that sleep in known places: `offcpu` leaves its own process out.

use std::io::{Read as _, Write as _, stdin, stdout};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// How many sleep.
pub(super) const SLEEPERS: u64 = 3;
/// Their name, and that of the one that waits for another thread.
pub(super) const NAPS: &str = "whylate-nap";
pub(super) const WAITS: &str = "whylate-lock";
/// For far longer than anybody looks.
const NAP: Duration = Duration::from_secs(600);

/// It ends when it is dropped, and with its parent.
pub(super) struct Sleepers(Child);

impl Sleepers {
    /// Returns when all threads are there.
    pub(super) fn start() -> Result<Self> {
        let program = std::env::current_exe().context("cannot tell where this program is")?;
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

/// Is that process.
///
/// # Errors
/// When there can be no more threads.
pub(super) fn be() -> Result<()> {
    let (tell, told) = mpsc::channel::<()>();
    for _ in 0..SLEEPERS {
        thread::Builder::new().name(NAPS.to_owned()).spawn(|| thread::sleep(NAP))?;
    }
    thread::Builder::new().name(WAITS.to_owned()).spawn(move || told.recv().is_ok())?;
    stdout().write_all(b"\n")?;
    stdout().flush()?;
    stdin().read_to_end(&mut Vec::new())?;
    drop(tell);
    Ok(())
}
