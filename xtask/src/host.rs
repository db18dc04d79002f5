// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs and directories of the host.

use std::env;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Returns the root of the work tree.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Returns cargo's build directory.
pub fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => root().join(directory),
        None => root().join("target"),
    }
}

/// Runs a program to its end, with its output on standard error, for people.
pub fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let outcome = command.stdin(Stdio::null()).stdout(io::stderr()).status();
    match outcome {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("{name} failed ({status}): see its message above"),
        Err(error) => Err(cannot_run(&name, error)),
    }
}

/// Returns what a program prints. Fails if the program does.
pub fn output_of(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| cannot_run(&name, error))?;
    if !output.status.success() {
        bail!("{name} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{name} printed something else than text"))
}

/// Explains why a program did not start.
pub fn cannot_run(name: &str, error: io::Error) -> anyhow::Error {
    if error.kind() == ErrorKind::NotFound {
        anyhow::anyhow!("{name} is not installed: `scripts/install-deps vm tracers arm64` installs what is missing")
    } else {
        anyhow::Error::new(error).context(format!("cannot run {name}"))
    }
}

/// Finds a program on the search path.
pub fn which(name: &OsStr) -> Option<PathBuf> {
    // Debian keeps some tools in directories on root's path only.
    let paths = env::var_os("PATH").unwrap_or_default();
    let also = ["/usr/local/bin", "/usr/bin", "/usr/sbin", "/bin", "/sbin"].map(PathBuf::from);
    env::split_paths(&paths).chain(also).map(|directory| directory.join(name)).find(|path| path.is_file())
}
