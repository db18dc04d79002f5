// SPDX-License-Identifier: MIT OR Apache-2.0
//! The services of systemd under the system call filters of their units. Runs as root.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::client::{Served, get};
use crate::live::recordings;
use crate::lock::lock_machine;

/// Becomes a program under the filter of a unit.
const FILTER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/filter.py");
/// Directory that the units let the services write to.
const STATE: &str = "/var/lib/whylate";

/// A service to be started as its unit does.
struct Service {
    command: Command,
    /// Directory that replaces [`STATE`].
    state: TempDir,
    /// Socket to which the service sends that it is ready.
    notified: UnixDatagram,
}

impl Service {
    /// Returns the command of a unit in `packaging`, with more options.
    fn from_unit(unit: &str, options: &[&str]) -> Result<Self> {
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(unit);
        let text = fs::read_to_string(&unit)?;
        let line =
            text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/whylate ")).context("a command")?;
        let words = line.split(' ').filter(|word| *word != "$OPTIONS").chain(options.iter().copied());
        let state = tempfile::tempdir()?;
        let own = state.path().to_string_lossy().into_owned();
        let socket = state.path().join("notify");
        let notified = UnixDatagram::bind(&socket)?;
        // What was sent before is there.
        notified.set_nonblocking(true)?;
        let mut command = Command::new("python3");
        command.arg(FILTER).arg(unit).arg(env!("CARGO_BIN_EXE_whylate"));
        command.args(words.map(|word| word.replace(STATE, &own)));
        command.env("NOTIFY_SOCKET", socket).stdin(Stdio::null());
        Ok(Service { command, state, notified })
    }

    /// Fails if the service has not said that it is ready.
    fn check_ready(&self) -> Result<()> {
        let mut message = [0; 64];
        let length = self.notified.recv(&mut message).context("it is not said to be ready")?;
        ensure!(message.starts_with(b"READY=1"), "{:?}", String::from_utf8_lossy(&message[..length]));
        Ok(())
    }

    fn recordings(&self) -> Vec<PathBuf> {
        recordings(self.state.path())
    }
}

/// Returns whether there is what the filter needs.
fn can_filter() -> bool {
    for program in ["python3", "systemd-analyze"] {
        if !Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()) {
            println!("skipped: there is no {program}");
            return false;
        }
    }
    true
}

#[test]
fn recorder_makes_no_call_that_its_unit_refuses() -> Result<()> {
    if !can_filter() {
        return Ok(());
    }
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let mut service = Service::from_unit("whylate-recorder.service", &["-d", "1s"])?;
    let output = service.command.output()?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    service.check_ready()?;
    ensure!(service.recordings().len() == 1, "{:?}", service.recordings());
    Ok(())
}

#[test]
fn exporter_makes_no_call_that_its_unit_refuses() -> Result<()> {
    if !can_filter() {
        return Ok(());
    }
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let record = format!("--record={STATE}/");
    let mut service = Service::from_unit("whylate-exporter.service", &["--every=500ms", &record])?;
    let mut served = Served::of(&mut service.command)?;
    service.check_ready()?;
    for path in ["/debug/pprof/offcpu?seconds=1", "/debug/report?seconds=1"] {
        let made = get(&served, path, "")?;
        ensure!(made.status == 200, "{path}: {:.200}", made.text());
    }
    ensure!(served.running.is_alive()?, "the exporter was killed");
    served.stop()?;
    ensure!(service.recordings().len() == 1, "{:?}", service.recordings());
    Ok(())
}
