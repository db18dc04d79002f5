// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs scripts in a virtual machine.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use crate::kernel;

/// Returns what a script prints on that kernel. `before`: options of `cargo xtask vm`, `--`, and variables for the
/// script.
pub fn run(kernel: &str, before: &[&str], script: &str, arguments: &[&str]) -> Result<String> {
    let mut vm = Command::new("cargo");
    vm.args(["xtask", "vm", kernel, "--no-tools"]).args(before).args(["sh", "-ec", script, "sh"]).args(arguments);
    let output = kernel::die_with_parent(vm.stdin(Stdio::null()).stderr(Stdio::inherit())).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "the virtual machine failed, {}: {text}", output.status);
    Ok(text)
}

/// Returns the words of each line `@ ...`, and the text after it.
pub fn parts(text: &str) -> impl Iterator<Item = (Vec<&str>, &str)> {
    text.split("\n@ ").map(|part| {
        let part = part.trim_start_matches("@ ");
        let (head, rest) = part.split_once('\n').unwrap_or((part, ""));
        (head.split_whitespace().collect(), rest)
    })
}
