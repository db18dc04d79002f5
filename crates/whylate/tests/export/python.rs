// SPDX-License-Identifier: MIT OR Apache-2.0
//! Python with the packages that read exports and pages, fetched once into the build directory.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::Result;

/// Pinned, as newer versions may print differently.
const PACKAGES: [&str; 2] = ["duckdb==2.0.0", "perfetto==0.59.1"];

pub struct Python(PathBuf);

impl Python {
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.0.join("bin/python"));
        command.stdin(Stdio::null());
        command
    }
}

/// Returns a Python with the packages that read exports; `None` with a printed reason if they are not available.
pub fn python() -> Result<Option<Python>> {
    python_with("python", &PACKAGES)
}

/// Returns a Python with these packages, installed in a directory of that name.
pub fn python_with(name: &str, packages: &[&str]) -> Result<Option<Python>> {
    // Tests are threads of one process.
    static FETCHING: Mutex<Option<String>> = Mutex::new(None);
    let mut failed = FETCHING.lock().map_err(|_| anyhow::anyhow!("another test has failed"))?;
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let (ready, wanted) = (directory.join("ready"), packages.join(" "));
    if fs::read_to_string(&ready).is_ok_and(|is| is == wanted) {
        return Ok(Some(Python(directory)));
    }
    if failed.is_none() {
        *failed = fetch(&directory, packages).err();
    }
    if let Some(reason) = &*failed {
        println!("skipped: {reason}");
        return Ok(None);
    }
    fs::write(&ready, wanted)?;
    Ok(Some(Python(directory)))
}

fn fetch(directory: &Path, packages: &[&str]) -> Result<(), String> {
    let run = |command: &mut Command, what: &str| match command.stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{what}: {}", said.lines().last().unwrap_or_default()))
        }
        Err(error) => Err(format!("{what}: {error}")),
    };
    let what = "no Python with venv (install python3-venv)";
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(directory), what)?;
    let options = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"];
    let patience = ["--timeout", "15", "--retries", "1"];
    let mut pip = Command::new(directory.join("bin/python"));
    run(pip.args(options).args(patience).args(packages), "PyPI cannot be reached")
}
