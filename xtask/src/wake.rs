// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wakes a machine that sleeps. Its own alarm may fire before it sleeps, and then nothing wakes it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Waits for a QEMU that is started with `-qmp unix:SOCKET`, and wakes its machine `asleep` after each suspend.
///
/// # Errors
///
/// Fails if the socket cannot be created.
pub fn wake_when_asleep(socket: &Path, asleep: Duration) -> Result<()> {
    let listener = UnixListener::bind(socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
    // The thread ends with QEMU.
    thread::spawn(move || {
        let attended = listener.accept().map_err(Into::into).and_then(|(machine, _)| attend(&machine, asleep));
        if let Err(error) = attended {
            eprintln!("xtask: a machine that sleeps is not woken any more: {error:#}");
        }
    });
    Ok(())
}

/// Speaks QMP, in which each message is a line.
fn attend(mut machine: &UnixStream, asleep: Duration) -> Result<()> {
    for message in BufReader::new(machine).lines() {
        let message: Value = serde_json::from_str(&message?)?;
        if message.get("QMP").is_some() {
            writeln!(machine, r#"{{"execute": "qmp_capabilities"}}"#)?;
        } else if message["event"] == "SUSPEND" {
            thread::sleep(asleep);
            writeln!(machine, r#"{{"execute": "system_wakeup"}}"#)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use anyhow::ensure;

    use super::*;

    #[test]
    fn suspended_machine_is_woken_once() -> Result<()> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("qmp");
        wake_when_asleep(&socket, Duration::ZERO)?;
        let mut machine = UnixStream::connect(&socket)?;
        machine.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut asked = BufReader::new(machine.try_clone()?).lines();
        writeln!(machine, r#"{{"QMP": {{"version": {{}}, "capabilities": []}}}}"#)?;
        ensure!(asked.next().is_some_and(|line| line.is_ok_and(|line| line.contains("qmp_capabilities"))));
        writeln!(machine, r#"{{"return": {{}}}}"#)?;
        writeln!(machine, r#"{{"timestamp": {{}}, "event": "WAKEUP"}}"#)?;
        writeln!(machine, r#"{{"timestamp": {{}}, "event": "SUSPEND"}}"#)?;
        ensure!(asked.next().is_some_and(|line| line.is_ok_and(|line| line.contains("system_wakeup"))));
        machine.shutdown(Shutdown::Write)?;
        ensure!(asked.next().is_none(), "it is woken twice");
        Ok(())
    }
}
