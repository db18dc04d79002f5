// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs and folders of the machine this runs on.

use std::env;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The root of the work tree.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Where cargo builds.
pub fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// Runs a program to its end; what it prints goes to standard error, which is for people.
pub fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let outcome = command.stdin(Stdio::null()).stdout(io::stderr()).status();
    match outcome {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("{name} failed ({status}): see its message above"),
        Err(error) => Err(cannot_run(&name, error)),
    }
}

/// What a program prints, when it succeeds.
pub fn output_of(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| cannot_run(&name, error))?;
    if !output.status.success() {
        bail!("{name} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{name} printed something else than text"))
}

/// Why a program does not even start.
pub fn cannot_run(name: &str, error: io::Error) -> anyhow::Error {
    if error.kind() == ErrorKind::NotFound {
        anyhow::anyhow!("{name} is not installed: `scripts/install-deps vm tracers arm64` installs what is missing")
    } else {
        anyhow::Error::new(error).context(format!("cannot run {name}"))
    }
}

/// A program on the search path.
pub fn which(name: &OsStr) -> Option<PathBuf> {
    // Debian keeps some tools where only root looks.
    let folders = env::var_os("PATH").unwrap_or_default();
    let also = ["/usr/local/bin", "/usr/bin", "/usr/sbin", "/bin", "/sbin"].map(PathBuf::from);
    env::split_paths(&folders).chain(also).map(|folder| folder.join(name)).find(|path| path.is_file())
}
