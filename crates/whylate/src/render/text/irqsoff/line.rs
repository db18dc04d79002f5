// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders sections with interrupts off, and interrupts that were late for other reasons.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::irqsoff::NO_RESCHEDULE_POINT;
use whylate_model::units::{format_ns, printable};
use whylate_model::{Labels, LateEvent};

use crate::render::text::time_of_day::time_of_day;
use crate::render::text::why;

pub fn write_heading(out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{:<15} {:>3} {:>8} {:>8}  {:<14} {:<24} WHO", "TIME", "CPU", "AT-LEAST", "AT-MOST", "KIND", "TASK")
}

fn write_line(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone) -> io::Result<()> {
    let overruns = event.labels.get("overruns").map(|count| format!(" ({} overruns)", printable(count)));
    writeln!(
        out,
        "{:<15} {:>3} {:>8} {:>8}  {:<14} {:<24} {}{}",
        time_of_day(event.at_unix_ns, zone),
        event.cpu,
        format_ns(event.latency_ns),
        event.at_most_ns.map_or_else(|| "-".to_owned(), format_ns),
        kind(&event.labels),
        printable(event.label("task")),
        printable(&who(&event.labels)),
        overruns.unwrap_or_default(),
    )
}

/// Writes a late event and its causes, with the innermost frames of their stacks, and the stack inside the section.
pub fn write(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone) -> io::Result<()> {
    write_line(out, event, zone)?;
    why::write_causes(out, event)?;
    write_inside(out, event)
}

/// Writes a late event with whole stacks.
pub fn write_whole(out: &mut dyn Write, event: &LateEvent, zone: &TimeZone) -> io::Result<()> {
    write_line(out, event, zone)?;
    for frame in &event.stack {
        writeln!(out, "    {}", printable(frame))?;
    }
    write_inside(out, event)
}

/// Writes the stack sampled within the section, before interrupts were enabled.
fn write_inside(out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
    if !event.inside.is_empty() {
        writeln!(out, "  inside:")?;
    }
    event.inside.iter().try_for_each(|frame| writeln!(out, "    {}", printable(frame)))
}

pub fn kind(labels: &Labels) -> String {
    match labels.get("kind").map_or("", String::as_str) {
        "irqs_off" => "interrupts off".to_owned(),
        "preempt_off" => "preemption off".to_owned(),
        NO_RESCHEDULE_POINT => "no reschedule point".to_owned(),
        "irq" => "handler".to_owned(),
        "idle_exit" => "idle exit".to_owned(),
        kind => kind.to_owned(),
    }
}

/// Renders the culprit: the function that enabled interrupts again with its caller, or a handler.
pub fn who(labels: &Labels) -> String {
    let label = |name: &str| labels.get(name).map(String::as_str);
    match (label("function"), label("caller").or(label("disabled_by")), label("handler")) {
        (Some(function), Some(caller), _) => format!("{function} < {caller}"),
        (Some(name), None, _) | (None, _, Some(name)) => name.to_owned(),
        (None, _, None) => match label("kind") {
            Some("steal") => "the hypervisor".to_owned(),
            Some("idle_exit") => "an idle state".to_owned(),
            Some("unknown") => "user code ran: firmware, or a hypervisor that reports no steal time".to_owned(),
            _ => "unknown".to_owned(),
        },
    }
}
