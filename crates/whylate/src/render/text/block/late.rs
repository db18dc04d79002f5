// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders late requests, with their causes.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::LateEvent;
use whylate_model::units::{format_ns, printable};

use crate::render::text::time_of_day::time_of_day;
use crate::render::text::why;

/// Writes the heading of late requests; with `is_verbose`, of all that is known of them.
pub fn write_heading(out: &mut dyn Write, is_verbose: bool) -> io::Result<()> {
    write!(out, "{:<15} {:>8} {:<8} {:<7}", "TIME", "LATENCY", "DISK", "OP")?;
    if is_verbose {
        write!(out, " {:>9} {:>8} {:>8} {:>10}", "THROTTLED", "QUEUED", "DEVICE", "COMPLETION")?;
        write!(out, " {:>8} {:<6} {:>12}", "BYTES", "FLAGS", "SECTOR")?;
    } else {
        write!(out, " {:>7} {:>7} {:>8}", "QUEUED", "DEVICE", "BYTES")?;
    }
    writeln!(out, "  SUBMITTED BY")
}

/// Writes a late request, and its causes if they are known.
pub fn write(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone, is_verbose: bool) -> io::Result<()> {
    let label = |name: &str| printable(event.label(name));
    let phase = |name: &str| format_ns(event.phase_ns(name).unwrap_or(0));
    let (time, latency) = (time_of_day(event.at_unix_ns, zone), format_ns(event.latency_ns));
    write!(out, "{time:<15} {latency:>8} {:<8} {:<7}", label("device"), label("operation"))?;
    let (queued, device) = (phase("queued"), phase("device"));
    if is_verbose {
        let (throttled, completion) = (phase("throttled"), phase("completion"));
        write!(out, " {throttled:>9} {queued:>8} {device:>8} {completion:>10}")?;
        write!(out, " {:>8} {:<6} {:>12}", label("bytes"), label("flags"), label("sector"))?;
    } else {
        write!(out, " {queued:>7} {device:>7} {:>8}", label("bytes"))?;
    }
    let error = event.labels.get("error").map(|number| format!(" ({})", printable(number))).unwrap_or_default();
    writeln!(out, "  {}{error}", label("submitter"))?;
    why::write_causes(out, event)
}
