// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the lines below the figures: lost events, and the run time of the probes.

use std::io::{self, Write};

use whylate_model::Snapshot;
use whylate_model::sources;
use whylate_model::units::{format_ns, printable};

/// Minimum age, in nanoseconds, of an item that still waits or runs to be mentioned.
const STUCK_NS: f64 = 1e6;

/// Writes a line for items that still wait or run, one for lost events, if there are any, and one for the probes' run
/// time, where the kernel counts it.
pub fn write(out: &mut dyn Write, snapshot: &Snapshot) -> io::Result<()> {
    write_stuck(out, snapshot, "queued", "oldest_queued_ns")?;
    write_stuck(out, snapshot, "running", "oldest_running_ns")?;
    are_explained(snapshot);
    let lost: Vec<String> = snapshot
        .lost
        .iter()
        .filter(|&(_, &count)| count > 0)
        .map(|(reason, count)| format!("{count} {}", reason.replace('_', " ")))
        .collect();
    write_lost(out, &lost)?;
    let probe = snapshot.probe;
    if let Some(each_ns) = probe.run_ns.checked_div(probe.runs) {
        writeln!(out, "probe: {} in {} runs, {each_ns} ns each", format_ns(probe.run_ns), probe.runs)?;
    }
    Ok(())
}

/// Writes the lost events, if any, and the option that explains them.
pub fn write_lost(out: &mut dyn Write, lost: &[String]) -> io::Result<()> {
    if lost.is_empty() {
        return Ok(());
    }
    writeln!(out, "lost: {} (see whylate help lost)", printable(&lost.join(", ")))
}

/// Asserts, in debug builds, that the source's card explains each reason for lost events.
pub fn are_explained(snapshot: &Snapshot) {
    let card = sources::named(&snapshot.source);
    let is_explained = |reason: &String| card.is_some_and(|card| card.meaning(reason).is_some());
    debug_assert!(snapshot.lost.keys().all(is_explained), "of {}: {:?}", snapshot.source, snapshot.lost);
}

fn write_stuck(out: &mut dyn Write, snapshot: &Snapshot, count: &str, oldest: &str) -> io::Result<()> {
    let oldest_series = snapshot.series.iter().max_by(|a, b| a.value(oldest).total_cmp(&b.value(oldest)));
    let Some(series) = oldest_series.filter(|series| series.value(oldest) >= STUCK_NS) else {
        return Ok(());
    };
    let items: f64 = snapshot.series.iter().map(|series| series.value(count)).sum();
    let who = series.labels.values().next().map(|label| format!(" ({})", printable(label))).unwrap_or_default();
    writeln!(out, "still {count}: {items}, the oldest for {}{who}", format_ns(series.value(oldest) as u64))
}
