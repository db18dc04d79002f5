// SPDX-License-Identifier: MIT OR Apache-2.0
//! Actions when a threshold is hit, and at the end.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, getppid, kill_process};
use whylate_sources::kernel::credentials::run_as_real_user;

use super::values::Action;
use crate::files;

/// Saves a trace to a file, and prints that.
pub type Save<'a> = dyn FnMut(&Path, &mut dyn Write) -> anyhow::Result<()> + 'a;

/// Performs actions in order, up to the first that fails; `save` saves traces. Returns whether to continue measuring.
///
/// # Errors
/// Fails if an action or the writer does.
pub fn perform(actions: &[Action], out: &mut dyn Write, save: &mut Save<'_>) -> anyhow::Result<bool> {
    let mut goes_on = false;
    for action in actions {
        // Commands write to standard output too.
        out.flush()?;
        match action {
            Action::Trace(path) => save(path, out)?,
            Action::Signal { number, pid } => signal(*number, *pid)?,
            Action::Shell(command) => shell(command)?,
            Action::Continue => goes_on = true,
        }
    }
    Ok(goes_on)
}

/// Writes a file that only its owner can read.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn save<T>(path: &Path, write: impl FnOnce(&mut dyn Write) -> anyhow::Result<T>) -> anyhow::Result<T> {
    files::write(path, write).map_err(|error| error.context(format!("cannot save to {}", path.display())))
}

fn signal(number: i32, pid: Option<i32>) -> anyhow::Result<()> {
    let target = pid.map_or_else(getppid, Pid::from_raw).context("there is no process to send a signal to")?;
    let signal = Signal::from_named_raw(number).context("no signal has this number")?;
    kill_process(target, signal)
        .with_context(|| format!("cannot send signal {number} to process {}", target.as_raw_nonzero()))
}

fn shell(command: &str) -> anyhow::Result<()> {
    let mut shell = Command::new("/bin/sh");
    run_as_real_user(shell.arg("-c").arg(command));
    let status = shell.status().context("cannot start a shell")?;
    if !status.success() {
        bail!("`{command}` failed, {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::{fs, io};

    use super::*;

    #[test]
    fn actions_stop_at_first_failure() {
        let directory = tempfile::tempdir().expect("a directory");
        let shell = |command: &str| Action::Shell(format!("cd {} && {command}", directory.path().display()));
        let (out, nothing) = (&mut io::sink(), &mut |_: &Path, _: &mut dyn Write| Ok(()));
        assert!(!perform(&[shell("touch a,b")], out, nothing).expect("performed"));
        assert!(directory.path().join("a,b").exists());
        assert!(perform(&[Action::Continue, shell("touch c")], out, nothing).expect("performed"));
        assert!(perform(&[shell("false"), shell("touch never")], out, nothing).is_err());
        assert!(directory.path().join("c").exists() && !directory.path().join("never").exists());
    }

    #[test]
    fn trace_file_is_private_and_refuses_links() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("trace.txt");
        let write = |out: &mut dyn Write| Ok(out.write_all(b"late")?);
        perform(&[Action::Trace(path.clone())], &mut io::sink(), &mut |path, _| save(path, write)).expect("saved");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("linked");
        assert!(save(&link, write).is_err());
    }

    #[test]
    fn a_signal_reaches_its_process() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("started");
        let pid = i32::try_from(child.id()).expect("a process id");
        let signal = [Action::Signal { number: 15, pid: Some(pid) }];
        perform(&signal, &mut io::sink(), &mut |_, _| Ok(())).expect("sent");
        assert!(!child.wait().expect("ended").success());
        assert!(perform(&signal, &mut io::sink(), &mut |_, _| Ok(())).is_err());
    }
}
