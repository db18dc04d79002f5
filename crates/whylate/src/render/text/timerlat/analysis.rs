// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders why an activation was late, in the layout of rtla's auto-analysis. The percentages add up to 100.

use std::io::{self, Write};

use clap::ValueEnum;
use whylate_model::blame::timer_analysis;
use whylate_model::units::printable;
use whylate_model::{Cause, CauseKind, TimerAnalysis, TimerEvidence};

use crate::render::text::pad::{Right, Spaces};
use crate::render::text::why::{actor, word};

/// Column where figures end.
const FIGURES: usize = 63;
/// Column where names of culprits begin.
const NAMES: usize = 23;
/// Minimum idle exit latency that is printed, in nanoseconds.
const IDLE_NS: u64 = 10_000;

/// Rendering of functions without a known name in a stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum StackFormat {
    /// The stack ends before the first unknown function.
    #[default]
    Truncate,
    /// Unknown functions are left out.
    Skip,
    /// Addresses of unknown functions.
    Full,
}

impl StackFormat {
    fn shown(self, frames: &[String]) -> Vec<&str> {
        // No function name begins with a digit.
        let is_known = |frame: &&str| !frame.starts_with("0x");
        let frames = frames.iter().map(String::as_str);
        match self {
            StackFormat::Truncate => frames.take_while(is_known).collect(),
            StackFormat::Skip => frames.filter(is_known).collect(),
            StackFormat::Full => frames.collect(),
        }
    }
}

/// Writes the analysis of what stopped the measurement on a CPU.
pub fn write(out: &mut dyn Write, cpu: u32, evidence: &TimerEvidence, format: StackFormat) -> io::Result<()> {
    writeln!(out, "## CPU {cpu} hit stop tracing, analyzing it ##")?;
    write_parts(out, evidence, format)
}

/// Writes the parts of an activation.
pub fn write_parts(out: &mut dyn Write, evidence: &TimerEvidence, format: StackFormat) -> io::Result<()> {
    let analysis = timer_analysis(evidence);
    let whole_ns = analysis.thread_latency_ns;
    let previous: Vec<&Cause> = analysis.previous_irqs().collect();
    if !previous.is_empty() {
        let ns = previous.iter().map(|cause| cause.ns).sum();
        writeln!(out, "{}", part("Previous IRQ interference:", ns, Some(whole_ns)))?;
        details(out, previous.into_iter())?;
    }
    let idle = if analysis.exit_from_idle_ns() >= IDLE_NS { " (exit from idle)" } else { "" };
    let delay_ns = sum_ns(analysis.irq_delay.iter().filter(|cause| cause.kind != CauseKind::Irq));
    writeln!(out, "{}", part(&format!("IRQ handler delay:{idle}"), delay_ns, Some(whole_ns)))?;
    for cause in analysis.irq_delay.iter().filter(|cause| cause.kind != CauseKind::Irq) {
        detail(out, cause)?;
        stack(out, "Stack that enabled interrupts", &format.shown(&cause.stack))?;
    }
    writeln!(out, "{}", part("IRQ latency:", analysis.irq_latency_ns, None))?;
    writeln!(out, "{}", part("Timerlat IRQ duration:", analysis.irq_duration_ns, Some(whole_ns)))?;
    writeln!(out, "{}", part("Blocking thread:", sum_ns(&analysis.blocking), Some(whole_ns)))?;
    details(out, analysis.blocking.iter())?;
    stack(out, "Blocking thread stacktrace", &format.shown(&evidence.stack))?;
    interference(out, &analysis, whole_ns)?;
    writeln!(out, "{}", "-".repeat(72))?;
    let figure = us(analysis.thread_latency_ns);
    let figure = Right(&figure, FIGURES + 1 - "  Thread latency:".len());
    writeln!(out, "  Thread latency:{figure} us (100%)")
}

fn interference(out: &mut dyn Write, analysis: &TimerAnalysis, whole_ns: u64) -> io::Result<()> {
    let parts = [
        ("NMI interference", &analysis.nmi),
        ("IRQ interference", &analysis.irq),
        ("Softirq interference", &analysis.softirq),
        ("Thread interference", &analysis.thread),
        ("Other", &analysis.other),
    ];
    for (name, causes) in parts.into_iter().filter(|(_, causes)| !causes.is_empty()) {
        writeln!(out, "{}", part(name, sum_ns(causes), Some(whole_ns)))?;
        details(out, causes.iter())?;
    }
    Ok(())
}

/// Renders a line for a part of the latency, with its share of the whole.
fn part(name: &str, ns: u64, whole_ns: Option<u64>) -> String {
    let figure = us(ns);
    let line = format!("{name}{} us", Right(&figure, FIGURES.saturating_sub(name.len())));
    match whole_ns {
        Some(whole_ns) => format!("{line} ({:.2} %)", ns as f64 * 100.0 / whole_ns.max(1) as f64),
        None => line,
    }
}

fn details<'a>(out: &mut dyn Write, causes: impl Iterator<Item = &'a Cause>) -> io::Result<()> {
    for cause in causes {
        detail(out, cause)?;
    }
    Ok(())
}

/// Writes the culprit, with its kind if the line does not name it.
fn detail(out: &mut dyn Write, cause: &Cause) -> io::Result<()> {
    let who = actor(&cause.who);
    let who = match cause.kind {
        CauseKind::Thread | CauseKind::Work | CauseKind::Irq | CauseKind::Softirq | CauseKind::Nmi => who,
        kind => format!("{}: {who}", word(kind)),
    };
    let figure = us(cause.ns);
    let width = FIGURES.saturating_sub(NAMES + who.chars().count()).max(figure.len() + 1);
    writeln!(out, "{}{who}{} us", Spaces(NAMES), Right(&figure, width))
}

fn stack(out: &mut dyn Write, name: &str, frames: &[&str]) -> io::Result<()> {
    if !frames.is_empty() {
        writeln!(out, "  {name}")?;
    }
    for frame in frames {
        writeln!(out, "              -> {}", printable(frame))?;
    }
    Ok(())
}

/// Renders microseconds, rounded to two decimals.
fn us(ns: u64) -> String {
    format!("{:.2}", ns as f64 / 1_000.0)
}

fn sum_ns<'a>(causes: impl IntoIterator<Item = &'a Cause>) -> u64 {
    causes.into_iter().map(|cause| cause.ns).sum()
}

#[cfg(test)]
mod tests {
    use whylate_model::{Interval, Occupancy, Occupant};

    use super::*;
    use crate::render::text::text_of;

    fn evidence() -> TimerEvidence {
        let objtool = Occupant::Thread { tid: 49256, name: "obj\x1btool".to_owned(), cgroup: None };
        let timer = Occupant::Irq { name: "local_timer".to_owned() };
        let network = Occupant::Softirq { name: "net_rx".to_owned() };
        let frames = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let parts = [
            (0, objtool.clone(), 0),
            (30_000, Occupant::Irq { name: "eth0".to_owned() }, 0),
            (31_000, objtool.clone(), 0),
            (37_490, timer, 17_490),
            (47_000, objtool.clone(), 0),
            (49_000, network, 0),
            (50_000, objtool, 0),
        ];
        let ends = parts.iter().skip(1).map(|part| part.0).chain([51_960]);
        let intervals = parts.iter().zip(ends).map(|((start_ns, occupant, late_ns), end_ns)| Interval {
            start_ns: *start_ns,
            end_ns,
            occupant: occupant.clone(),
            late_ns: *late_ns,
            stack: if *late_ns > 0 {
                frames(&["_raw_spin_unlock_irqrestore", "cgroup_rstat_flush"])
            } else {
                Vec::new()
            },
            ..Interval::default()
        });
        let occupancy = Occupancy { cpu: 23, intervals: intervals.collect(), ..Occupancy::default() };
        let stack = frames(&["timerlat_irq", "__hrtimer_run_queues"]);
        TimerEvidence { due_ns: 10_000, irq_ns: 38_130, thread_ns: 51_960, tid: 99, occupancy, stack }
    }

    #[test]
    fn the_analysis_has_rtlas_lines_and_adds_up() {
        let text = text_of(|out| write(out, 23, &evidence(), StackFormat::Truncate));
        let shares = text.lines().filter_map(|line| line.split('(').nth(1)?.strip_suffix(" %)")?.parse::<f64>().ok());
        let sum: f64 = shares.sum();
        assert!((sum - 100.0).abs() < 0.05, "{sum}: {text}");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn functions_without_a_name_are_shown_as_asked() {
        let mut evidence = evidence();
        evidence.stack = ["timer", "0xffffffffc0001234", "write"].map(str::to_owned).to_vec();
        evidence.occupancy.intervals.iter_mut().for_each(|interval| interval.stack.clear());
        let frames = |format| {
            let text = text_of(|out| write(out, 0, &evidence, format));
            let frames = text.lines().filter_map(|line| Some(line.split_once("-> ")?.1.to_owned()));
            frames.collect::<Vec<_>>()
        };
        assert_eq!(frames(StackFormat::Truncate), ["timer"]);
        assert_eq!(frames(StackFormat::Skip), ["timer", "write"]);
        assert_eq!(frames(StackFormat::Full), ["timer", "0xffffffffc0001234", "write"]);
    }

    #[test]
    fn whylate_is_named_as_itself() {
        let mut evidence = evidence();
        for interval in &mut evidence.occupancy.intervals {
            if let Occupant::Thread { name, .. } = &mut interval.occupant {
                "whylate".clone_into(name);
            }
        }
        let text = text_of(|out| write(out, 0, &evidence, StackFormat::Truncate));
        assert!(text.contains("whylate:49256 (whylate itself) "), "{text}");
    }

    #[test]
    fn renders_idle_exit() {
        let mut evidence = evidence();
        evidence.occupancy.intervals[0].occupant = Occupant::Idle;
        evidence.occupancy.intervals[2].occupant = Occupant::Idle;
        let text = text_of(|out| write_parts(out, &evidence, StackFormat::Truncate));
        assert!(text.contains("IRQ handler delay: (exit from idle)"), "{text}");
    }
}
