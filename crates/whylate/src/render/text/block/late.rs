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
    let label = |name: &str| printable(event.labels.get(name).map_or("", String::as_str));
    let phase = |name: &str| event.phases.iter().find(|(phase, _)| phase == name).map_or(0, |(_, ns)| *ns);
    let error = event.labels.get("error").map(|number| format!(" ({})", printable(number))).unwrap_or_default();
    writeln!(
        out,
        "{:<15} {:<8} {:<7} {:<6} {:>8} {:>9} {:>8} {:>8} {:>10}  {:>8} {:>12}  {}{error}",
        time_of_day(event.at_unix_ns, zone),
        label("device"),
        label("operation"),
        label("flags"),
        format_ns(event.latency_ns),
        format_ns(phase("throttled")),
        format_ns(phase("queued")),
        format_ns(phase("device")),
        format_ns(phase("completion")),
        label("bytes"),
        label("sector"),
        label("submitter"),
    )?;
    why::write_causes(out, event)
}
