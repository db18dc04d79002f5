// SPDX-License-Identifier: MIT OR Apache-2.0
//! Late activations with everything that happened on their CPU meanwhile, as a text file.

use std::io::{self, Write};

use whylate_model::blame::Evidence;
use whylate_model::units::{printable, rfc3339};
use whylate_model::{Interval, LateEvent, Occupant, TimerEvidence};

use super::analysis;

/// Writes one block for each activation.
///
/// # Errors
/// Those of the writer.
pub fn write(out: &mut dyn Write, late: &[LateEvent]) -> io::Result<()> {
    writeln!(out, "# {} late activations; times in microseconds since the timer was due", late.len())?;
    for event in late {
        writeln!(out, "\n# CPU {}, {}", event.cpu, rfc3339::format(event.at_unix_ns))?;
        if let Some(Evidence::Timer(evidence)) = event.evidence.as_deref() {
            analysis::write_parts(out, evidence)?;
            intervals(out, evidence)?;
        }
    }
    Ok(())
}

fn intervals(out: &mut dyn Write, evidence: &TimerEvidence) -> io::Result<()> {
    writeln!(out, "{:>12} {:>12}  WHO HAD THE CPU", "SINCE DUE", "FOR")?;
    let since_due = |ns: u64| (ns as f64 - evidence.due_ns as f64) / 1_000.0;
    if let Some(merged) = &evidence.occupancy.merged {
        let ns = merged.end_ns.saturating_sub(merged.start_ns);
        let (at, long) = (since_due(merged.start_ns), ns as f64 / 1_000.0);
        writeln!(out, "{at:>12.2} {long:>12.2}  {} occupants, merged", merged.parts.len())?;
    }
    for Interval { start_ns, end_ns, occupant, late_ns, .. } in &evidence.occupancy.intervals {
        let (at, long) = (since_due(*start_ns), end_ns.saturating_sub(*start_ns) as f64 / 1_000.0);
        let late = if *late_ns > 0 { format!(", {:.2} late", *late_ns as f64 / 1_000.0) } else { String::new() };
        writeln!(out, "{at:>12.2} {long:>12.2}  {}{late}", who(occupant))?;
    }
    let marks = [("timer's function", evidence.irq_ns), ("thread", evidence.thread_ns)];
    for (name, ns) in marks {
        writeln!(out, "{:>12.2} {:>12}  {name}", since_due(ns), "-")?;
    }
    Ok(())
}

fn who(occupant: &Occupant) -> String {
    printable(&match occupant {
        Occupant::Idle => "idle".to_owned(),
        Occupant::Thread { tid, name } => format!("{name}:{tid}"),
        Occupant::Work { handler, tid, name } => format!("{handler} in {name}:{tid}"),
        Occupant::Irq { name } => format!("interrupt {name}"),
        Occupant::Softirq { name } => format!("softirq {name}"),
    })
}
