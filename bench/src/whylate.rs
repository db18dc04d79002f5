// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program that is measured.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Builds what `make target` measures. Its path is beside this program, which has to be a build of the same profile.
pub fn build(target: &str) -> Result<PathBuf> {
    if cfg!(debug_assertions) {
        bail!("only a release build tells anything: run `make {target}`");
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--release", "--quiet", "-p", "whylate"])
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("cannot build whylate");
    }
    let ours = env::current_exe().context("the path of this program is unknown")?;
    Ok(ours.with_file_name("whylate"))
}
