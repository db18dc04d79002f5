// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs scripts in a virtual machine.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::child;

/// The beginning of a script that keeps the code of tracepoints unchanged.
pub const KEEP_ENABLED: &str = include_str!("../../xtask/keep-enabled.sh");

/// Returns what a script prints on that kernel. `before`: options of `cargo xtask vm`, `--`, and variables for the
/// script.
pub fn run(kernel: &str, before: &[&str], script: &str, arguments: &[&str]) -> Result<String> {
    let mut vm = Command::new("cargo");
    vm.args(["xtask", "vm", kernel, "--no-tools"]).args(before).args(["sh", "-ec", script, "sh"]).args(arguments);
    let output = child::run(vm.stderr(Stdio::inherit())).context("the virtual machine failed")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the words of each line `@ ...`, and the text after it.
pub fn parts(text: &str) -> impl Iterator<Item = (Vec<&str>, &str)> {
    text.split("\n@ ").map(|part| {
        let part = part.trim_start_matches("@ ");
        let (head, rest) = part.split_once('\n').unwrap_or((part, ""));
        (head.split_whitespace().collect(), rest)
    })
}
