// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the latest activations, and everything that ran on the CPU during late ones, as a text file.

use std::io::{self, Write};

use whylate_model::blame::Evidence;
use whylate_model::units::{printable, rfc3339};
use whylate_model::{ActorName, Interval, LateEvent, Occupant, TimerEvidence};
use whylate_sources::timerlat::Activated;

use super::analysis::{self, StackFormat};

/// Writes a block for each late activation, and a line for each of the latest activations.
pub fn write(out: &mut dyn Write, latest: &[Activated], late: &[LateEvent]) -> io::Result<()> {
    writeln!(
        out,
        "# {} activations, and what ran on the CPU; times in microseconds since the timer was due",
        late.len()
    )?;
    for event in late {
        writeln!(out, "\n# CPU {}, {}", event.cpu, rfc3339::format(event.at_unix_ns))?;
        if let Some(Evidence::Timer(evidence)) = event.evidence.as_deref() {
            analysis::write_parts(out, evidence, StackFormat::Full)?;
            intervals(out, evidence)?;
        }
    }
    writeln!(out, "\n# The latest {} activations; latencies in microseconds", latest.len())?;
    writeln!(out, "{:<27} {:>3} {:>10} {:>10} {:>10}", "DUE", "CPU", "IRQ", "THREAD", "USER")?;
    latest.iter().try_for_each(|activated| activation(out, activated))
}

fn activation(out: &mut dyn Write, activated: &Activated) -> io::Result<()> {
    let us = |ns: u64| format!("{:.2}", ns as f64 / 1_000.0);
    let due = rfc3339::format(activated.due_unix_ns);
    // Without both timestamps, the latencies are unknown.
    let seen = activated.irq_and_thread_ns.map(|(irq_ns, thread_ns)| [us(irq_ns), us(thread_ns)]);
    let [irq, thread] = seen.unwrap_or_else(|| ["-", "-"].map(str::to_owned));
    writeln!(out, "{due:<27} {:>3} {irq:>10} {thread:>10} {:>10}", activated.cpu, us(activated.user_ns))
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
        Occupant::Thread { tid, name, .. } => ActorName::thread(name.as_str(), *tid).to_string(),
        Occupant::Work { handler, tid, name } => format!("{handler} in {}", ActorName::thread(name.as_str(), *tid)),
        Occupant::Irq { name } => format!("interrupt {name}"),
        Occupant::Softirq { name } => format!("softirq {name}"),
    })
}

#[cfg(test)]
mod tests {
    use whylate_model::Occupancy;

    use super::*;

    #[test]
    fn trace_has_latest_activations_and_causes_of_late_ones() {
        let due_unix_ns = 1_795_252_440_123_456_789;
        let at = |cpu, number: u64, irq_and_thread_ns| Activated {
            cpu,
            due_unix_ns: due_unix_ns + number * 1_000_000,
            irq_and_thread_ns,
            user_ns: 20_500,
        };
        let latest = [at(0, 0, Some((4_900, 12_100))), at(1, 0, None), at(0, 1, Some((1_234_567, 2_345_678)))];
        let hog = Occupant::Thread { tid: 7, name: "evil\x1b[2J".to_owned(), cgroup: None };
        let interval = Interval { start_ns: 1_000, end_ns: 2_346_678, occupant: hog, ..Interval::default() };
        let occupancy = Occupancy { cpu: 0, intervals: vec![interval], ..Occupancy::default() };
        let evidence = TimerEvidence {
            due_ns: 1_000,
            irq_ns: 1_235_567,
            thread_ns: 2_346_678,
            occupancy,
            ..TimerEvidence::default()
        };
        let late =
            LateEvent { at_unix_ns: due_unix_ns, evidence: Some(Box::new(evidence.into())), ..LateEvent::default() };
        insta::assert_snapshot!(crate::render::text::text_of(|out| write(out, &latest, &[late])));
    }
}
