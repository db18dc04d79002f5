// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders late work items, with their causes.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::LateEvent;
use whylate_model::units::{format_ns, printable};

use crate::render::text::latency::other_phases;
use crate::render::text::pad::Spaces;
use crate::render::text::time_of_day::time_of_day;
use crate::render::text::why;

/// Writes the heading of late items; with `is_verbose`, of all that is known of them.
pub fn write_heading(out: &mut dyn Write, is_verbose: bool) -> io::Result<()> {
    write!(out, "{:<15} {:>8} {:>3}", "TIME", "LATENCY", "CPU")?;
    if is_verbose {
        write!(out, " {:>8} {:>8}  {:<20} {:<16}", "ACTIVATE", "POOL", "WORKQUEUE", "WORKER")?;
    }
    writeln!(out, "  {:<28} QUEUED BY", "HANDLER")
}

/// Renders the queuer of an item. Interrupts have no PID.
fn queuer(name: &str, pid: &str) -> String {
    if pid == "0" { name.to_owned() } else { format!("{name}:{pid}") }
}

/// Writes a late item, and its causes and the stack of its queuer if they are known.
pub fn write(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone, is_verbose: bool) -> io::Result<()> {
    let label = |name: &str| printable(event.label(name));
    let phase = |name: &str| event.phase_ns(name).map_or_else(|| "-".to_owned(), format_ns);
    let (time, latency) = (time_of_day(event.at_unix_ns, zone), format_ns(event.latency_ns));
    write!(out, "{time:<15} {latency:>8} {:>3}", event.cpu)?;
    let mut others = String::new();
    if is_verbose {
        let (activate, pool) = (phase("activate"), phase("pool"));
        write!(out, " {activate:>8} {pool:>8}  {:<20} {:<16}", label("workqueue"), label("worker"))?;
    } else {
        others = other_phases(event, &["activate"]);
    }
    writeln!(out, "  {:<28} {}{others}", label("handler"), queuer(&label("queued_by"), &label("queued_by_pid")))?;
    why::write_causes(out, event)?;
    // The causes may have stacks too.
    let indent = if event.causes.is_empty() || event.stack.is_empty() {
        4
    } else {
        writeln!(out, "    queued from")?;
        8
    };
    for frame in &event.stack {
        writeln!(out, "{}{}", Spaces(indent), printable(frame))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupt_has_no_pid() {
        assert_eq!([queuer("dd", "42"), queuer("softirq", "0")], ["dd:42", "softirq"]);
    }

    #[test]
    fn line_has_handler_wait_and_queuer() {
        let labels = [
            ("handler", "wb_workfn"),
            ("workqueue", "writeback"),
            ("worker", "kworker/u4:1"),
            ("queued_by", "dd\x1b[2J"),
            ("queued_by_pid", "4242"),
        ];
        let event = LateEvent {
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns: 12_345_678,
            cpu: 1,
            phases: vec![("activate".to_owned(), 345_678), ("pool".to_owned(), 12_000_000)],
            stack: vec!["__queue_work".to_owned(), "wb_wakeup".to_owned()],
            ..LateEvent::default()
        };
        for is_verbose in [false, true] {
            insta::assert_snapshot!(crate::render::text::text_of(|out| {
                write_heading(out, is_verbose)?;
                write(out, &event, &TimeZone::UTC, is_verbose)
            }));
        }
    }
}
