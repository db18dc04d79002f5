// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs that were held up for a large share of the time, a line each.

use whylate_model::Cause;
use whylate_model::object::Object;
use whylate_model::programs::{HeldUpBy, HeldUpPart, HeldUpProgram, Programs, Spawned};
use whylate_model::units::{format_ns, format_span, printable};

use crate::render::text::why;

/// Maximum number of parts, and minimum share of the held-up time for a second part.
const MAX_PARTS: usize = 2;
const MIN_SHARE: f64 = 0.25;

/// Renders a program, the share of its time for which it was held up, and by whom and in what.
pub fn line(programs: &Programs, of: &HeldUpProgram) -> String {
    let latency = of.latency();
    let (percent, span) = (of.share(programs.covered_ns) * 100.0, format_span(programs.covered_ns));
    let waits = why::counted(latency.count(), "wait");
    let (who, p50) = (printable(of.program()), format_ns(latency.printed_quantile_ns(0.5)));
    let others = if of.others > 0 { format!(" and {} more of that name", of.others) } else { String::new() };
    let all_ns = of.held_up_ns().max(1);
    let is_large = |part: &&HeldUpPart| part.ns as f64 >= MIN_SHARE * all_ns as f64;
    let parts = of.parts.iter().filter(is_large).take(MAX_PARTS);
    let parts: Vec<String> = parts.map(|part| part_text(programs, part)).collect();
    format!("{who}{others} held up {percent:.0}% of {span} ({waits}, p50 {p50}) {}", parts.join("; and "))
}

/// Renders a part after "held up".
fn part_text(programs: &Programs, part: &HeldUpPart) -> String {
    let by = part.causes.first().map(|cause| culprit(cause) + &runs(programs, cause));
    let by = by.map_or_else(|| format!("by {}", word(part.by)), |culprit| format!("by {culprit}"));
    let via = part.via.as_deref().map_or_else(String::new, |via| format!(", {}", printable(via)));
    let object = part.object.as_ref().map_or_else(String::new, |object| format!(" {}", name(object)));
    format!("{by}{via}{object}")
}

fn culprit(cause: &Cause) -> String {
    why::culprit(cause.kind, &cause.who)
}

/// Renders how often the culprit was started, and by whom, if it is one of many short-lived processes.
fn runs(programs: &Programs, cause: &Cause) -> String {
    let is_of = |of: &&Spawned| cause.who.tid().is_none() && cause.who.comm() == Some(of.name.as_str());
    let Some(of) = programs.spawned.iter().find(is_of) else { return String::new() };
    let a_second = of.runs as f64 * 1e9 / programs.covered_ns.max(1) as f64;
    format!(" ({a_second:.0} runs/s, started by {})", printable(&of.by))
}

/// Renders an object without its peers: they are among the culprits, or did something else than others.
fn name(object: &Object) -> String {
    Object { peers: Vec::new(), other_peers: 0, timeout_ns: None, expires_in_ns: None, ..object.clone() }.to_string()
}

fn word(by: HeldUpBy) -> &'static str {
    match by {
        HeldUpBy::RunQueue => "other threads on its CPU",
        HeldUpBy::Quota => "a CPU quota",
        HeldUpBy::Lock => "a lock",
        HeldUpBy::Disk => "a disk",
        HeldUpBy::Memory => "a lack of memory",
        HeldUpBy::Program => "another program",
        HeldUpBy::Unknown => "something unknown",
    }
}
