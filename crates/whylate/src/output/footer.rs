// SPDX-License-Identifier: MIT OR Apache-2.0
//! What stands below the figures: what was lost, and what measuring cost.

use std::io::{self, Write};

use whylate_model::Snapshot;
use whylate_model::units::format_ns;

/// Writes a line for lost events, if there are any, and one for the probes' run time, where the kernel counts it.
///
/// # Errors
/// Those of the writer.
pub fn write(out: &mut dyn Write, snapshot: &Snapshot) -> io::Result<()> {
    let lost: Vec<String> = snapshot
        .lost
        .iter()
        .filter(|&(_, &count)| count > 0)
        .map(|(reason, count)| format!("{count} {}", reason.replace('_', " ")))
        .collect();
    if !lost.is_empty() {
        writeln!(out, "lost: {}", lost.join(", "))?;
    }
    let probe = snapshot.probe;
    if let Some(each_ns) = probe.run_ns.checked_div(probe.runs) {
        writeln!(out, "probe: {} in {} runs, {each_ns} ns each", format_ns(probe.run_ns), probe.runs)?;
    }
    Ok(())
}
