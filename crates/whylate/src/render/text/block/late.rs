// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders late requests, with their causes.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::LateEvent;
use whylate_model::units::{format_ns, printable};

use crate::render::text::time_of_day::time_of_day;
use crate::render::text::why;

pub fn write_heading(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "{:<15} {:<8} {:<7} {:<6} {:>8} {:>9} {:>8} {:>8} {:>10}  {:>8} {:>12}  SUBMITTED BY",
        "TIME", "DISK", "OP", "FLAGS", "LATENCY", "THROTTLED", "QUEUED", "DEVICE", "COMPLETION", "BYTES", "SECTOR"
    )
}

/// Writes a late request, and its causes if they are known.
pub fn write(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone) -> io::Result<()> {
    let label = |name: &str| printable(event.label(name));
    let phase = |name: &str| format_ns(event.phase_ns(name).unwrap_or(0));
    let error = event.labels.get("error").map(|number| format!(" ({})", printable(number))).unwrap_or_default();
    writeln!(
        out,
        "{:<15} {:<8} {:<7} {:<6} {:>8} {:>9} {:>8} {:>8} {:>10}  {:>8} {:>12}  {}{error}",
        time_of_day(event.at_unix_ns, zone),
        label("device"),
        label("operation"),
        label("flags"),
        format_ns(event.latency_ns),
        phase("throttled"),
        phase("queued"),
        phase("device"),
        phase("completion"),
        label("bytes"),
        label("sector"),
        label("submitter"),
    )?;
    why::write_causes(out, event)
}
