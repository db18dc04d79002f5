// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders late activations, with their causes.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::LateEvent;
use whylate_model::units::{format_ns, printable};

use crate::render::text::time_of_day::time_of_day;
use crate::render::text::why;

pub fn write_heading(out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{:<15} {:>3} {:>8} {:>8} {:>8}", "TIME", "CPU", "LATENCY", "IRQ", "THREAD")
}

/// Writes a late activation, its causes, and the stack that the timer interrupted, if it was requested.
pub fn write(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone) -> io::Result<()> {
    let phase = |name: &str| format_ns(event.phase_ns(name).unwrap_or(0));
    writeln!(
        out,
        "{:<15} {:>3} {:>8} {:>8} {:>8}",
        time_of_day(event.at_unix_ns, zone),
        event.cpu,
        format_ns(event.latency_ns),
        phase("irq"),
        phase("wakeup"),
    )?;
    why::write_causes(out, event)?;
    if !event.stack.is_empty() {
        writeln!(out, "    interrupted")?;
    }
    for frame in &event.stack {
        writeln!(out, "        {}", printable(frame))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use whylate_model::{Cause, CauseKind};

    use super::*;

    #[test]
    fn line_has_time_cpu_latency_and_causes() {
        let cause = |kind, who: &str, ns| Cause::new(kind, who, ns);
        let event = LateEvent {
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns: 2_345_678,
            cpu: 1,
            phases: vec![("irq".to_owned(), 2_000_000), ("wakeup".to_owned(), 345_678)],
            causes: vec![
                cause(CauseKind::IrqsOff, "dd\x1b[2J:4242", 2_000_000),
                cause(CauseKind::Irq, "local_timer", 345_678),
            ],
            stack: vec!["_raw_spin_unlock_irqrestore".to_owned()],
            ..LateEvent::default()
        };
        insta::assert_snapshot!(crate::render::text::text_of(|out| {
            write_heading(out)?;
            write(out, &event, &TimeZone::UTC)
        }));
    }
}
