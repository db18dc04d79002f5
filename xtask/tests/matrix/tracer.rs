// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's timerlat tracer, where there is one: its options, and what is left of a run that is killed.

use anyhow::{Result, ensure};

use crate::{KEEP_ENABLED, Machine, words};

const SCRIPT: &str = include_str!("tracer.sh");

/// Every option that is for the tracer does what it says, and nothing is left behind.
pub fn options_are_honoured(machine: &Machine<'_>) -> Result<()> {
    for part in ["threads", "readers", "trace", "others", "killed"] {
        let output = machine.run(&[], &words(&["sh", "-ec", KEEP_ENABLED, "sh", "sh", "-c", SCRIPT, "sh", part]))?;
        ensure!(output.lines().last() == Some("0 wrong"), "{part}: {output}");
    }
    Ok(())
}
