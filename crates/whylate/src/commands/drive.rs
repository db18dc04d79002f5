// SPDX-License-Identifier: MIT OR Apache-2.0
//! What commands that print at intervals have in common: what they say at the start, and the loop that waits, shows late events meanwhile,
//! and prints a snapshot.

use std::io::Write;
use std::time::{Duration, Instant};

use whylate_model::{Card, Snapshot};
use whylate_sources::Attached;

use super::watch::{Ended, Watch};
use crate::output::Output;

/// When to print.
#[derive(Clone, Copy, Debug, Default)]
pub struct Schedule {
    /// From one output to the next; without it there is one, at the end.
    pub interval_ns: Option<u64>,
    /// How many outputs.
    pub count: Option<u64>,
    /// When to end.
    pub duration_ns: Option<u64>,
}

/// Says on standard error which backend is in use if it is not the best one, what is told less well here than it could be, and what was chosen for
/// this machine.
pub fn say_what_is_weaker(card: &Card, source: &dyn Attached) {
    if let Some(reason) = source.backend().fallback_reason {
        eprintln!("whylate: {} uses the {} backend: {reason}", card.name, source.backend().name);
    }
    if let Some(weaker) = source.weaker() {
        eprintln!("whylate: {weaker}");
    }
    if let Some(chosen) = source.chosen() {
        eprintln!("whylate: {chosen}");
    }
}

/// Begins the output, prints at each interval, and once more at the end. `seen` gets each snapshot before it is printed.
///
/// # Errors
/// When the source fails, or the output cannot be written.
pub fn drive(
    source: &mut dyn Attached,
    watch: &Watch,
    schedule: Schedule,
    has_late_events: bool,
    (output, out): (&mut dyn Output, &mut dyn Write),
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<()> {
    output.begin(out)?;
    out.flush()?;
    let started = Instant::now();
    let interval = schedule.interval_ns.map(Duration::from_nanos);
    let end = schedule.duration_ns.and_then(|ns| started.checked_add(Duration::from_nanos(ns)));
    for number in 1.. {
        // A fixed schedule: an output that takes long does not shift the ones after it.
        let due = interval.and_then(|interval| started.checked_add(interval.saturating_mul(number)));
        let until = [due, end].into_iter().flatten().min();
        let ended = if has_late_events {
            wait_for_late_events(source, watch, until, output, out)?
        } else {
            watch.until(until)?
        };
        if ended == Ended::OutputClosed {
            return Ok(());
        }
        let snapshot = source.snapshot()?;
        seen(&snapshot);
        output.snapshot(out, snapshot)?;
        out.flush()?;
        let last = ended == Ended::Signal
            || interval.is_none()
            || end.is_some_and(|end| Instant::now() >= end)
            || schedule.count.is_some_and(|count| u64::from(number) >= count);
        if last {
            break;
        }
    }
    Ok(())
}

/// Waits until the next output, and shows late events meanwhile.
fn wait_for_late_events(
    source: &mut dyn Attached,
    watch: &Watch,
    until: Option<Instant>,
    output: &mut dyn Output,
    out: &mut dyn Write,
) -> anyhow::Result<Ended> {
    loop {
        // Ten times a second is at once for a person, and little work.
        let soon = Instant::now() + Duration::from_millis(100);
        let ended = watch.until(Some(until.map_or(soon, |until| until.min(soon))))?;
        let mut written = Ok(());
        source.drain_late(Duration::ZERO, &mut |event| {
            if written.is_ok() {
                written = output.late(out, event);
            }
        })?;
        written?;
        out.flush()?;
        if ended != Ended::Time || until.is_some_and(|until| Instant::now() >= until) {
            return Ok(ended);
        }
    }
}
