// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate irqsoff` where a CPU goes and comes back, where it is killed, where others have the tracer, and where a console is slow.

use anyhow::{Result, ensure};

use crate::ensure_skipped_for;
use crate::machine::{KEEP_ENABLED, Machine, words};

const SCRIPT: &str = include_str!("irqsoff.sh");

/// By the backends that are named.
pub fn nothing_is_left_or_made_up(machine: &Machine<'_>, parts: &[&str], backends: &[&str]) -> Result<()> {
    for &part in parts {
        let command = [&["sh", "-ec", KEEP_ENABLED, "sh", "sh", "-c", SCRIPT, "sh", part], backends].concat();
        machine.part(&format!("irqsoff: {part}"), || {
            let output = machine.run(&[], &words(&command))?;
            ensure!(output.lines().last() == Some("0 wrong"), "something is wrong");
            Ok(())
        })?;
    }
    Ok(())
}

/// Each delay that the kernel's module makes is told, with its length and who made it.
pub fn delays_are_told(machine: &Machine<'_>) -> Result<()> {
    let output = machine.run_tests("kernel_irqsoff_delay")?;
    let rows = output.lines().filter(|line| line.starts_with("row | events | ")).count();
    // Four lengths in two modes.
    ensure!(rows >= 8, "{rows} rows");
    ensure_skipped_for(&output, &[])
}
