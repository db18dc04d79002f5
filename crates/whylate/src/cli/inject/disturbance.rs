// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate inject irqs-off`, `softirq` and `hog`: known disturbances of one CPU.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use whylate_model::units::{format_ns, rfc3339};
use whylate_sources::inject::disturbance::{
    self, Disturbance, Kind, MAX_LENGTH_NS, MAX_PRIORITY, MAX_TIMES, Plan, Report,
};

use crate::cli::UsageError;
use crate::cli::values::duration_ns;
use crate::json::write_line;

/// The middle of the real-time priorities, which is also that of threaded interrupts.
const DEFAULT_PRIORITY: u8 = 50;

/// Options that all disturbances have in common.
#[derive(Debug, Args)]
pub struct Common {
    /// Length of each disturbance, 50ms at most.
    #[arg(long = "for", value_name = "DURATION", default_value = "10ms", value_parser = length_ns)]
    length_ns: u64,
    /// Number of disturbances.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=MAX_TIMES))]
    times: u64,
    /// Interval between the starts of two disturbances, at least twice --for.
    #[arg(long = "every", value_name = "DURATION", default_value = "200ms", value_parser = duration_ns)]
    every_ns: u64,
    /// Disturb this CPU instead of the current one.
    #[arg(long, value_name = "N")]
    cpu: Option<u32>,
    /// Print one JSON object on one line, at the end.
    #[arg(long)]
    json: bool,
}

/// Keep one CPU busy with a thread for a known time.
///
/// The thread is named whylate-hog. With --policy fifo, all normal threads of that CPU wait; with --policy normal, it
/// shares the CPU with them and needs no privileges. The length is wall-clock time; the time that the thread actually
/// ran is also reported.
///
/// Only one CPU is disturbed at a time (a second `whylate inject` is refused), so that the other CPUs can go on.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # 5 times 10 ms, one every 200 ms, on the current CPU
    whylate inject hog
    # keep 40 % of a CPU from normal threads for 5 s
    whylate inject hog --for 40ms --every 100ms --times 50
    # delay the threads of cyclictest and timerlat too
    whylate inject hog --priority 97
    # a thread like others
    whylate inject hog --policy normal")]
pub struct HogArguments {
    #[command(flatten)]
    common: Common,
    /// The scheduling policy of the thread.
    #[arg(long, value_enum, default_value_t = Policy::Fifo)]
    policy: Policy,
    /// Real-time priority of the thread, 1 to 98 (default: 50).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_PRIORITY)))]
    priority: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// Before all normal threads.
    Fifo,
    /// Like any other thread.
    Normal,
}

fn length_ns(text: &str) -> Result<u64, String> {
    match duration_ns(text)? {
        ns if ns > MAX_LENGTH_NS => Err(format!("it may be {} ms at most", MAX_LENGTH_NS / 1_000_000)),
        ns => Ok(ns),
    }
}

pub fn hog(arguments: &HogArguments, stop: &AtomicBool) -> anyhow::Result<()> {
    let policy = match (arguments.policy, arguments.priority) {
        (Policy::Fifo, priority) => disturbance::Policy::Fifo(priority.unwrap_or(DEFAULT_PRIORITY)),
        (Policy::Normal, None) => disturbance::Policy::Normal,
        (Policy::Normal, Some(_)) => {
            let reason = "a normal thread has no real-time priority: leave out --priority, or choose --policy fifo";
            return Err(UsageError(anyhow!(reason)).into());
        }
    };
    run(&arguments.common, Kind::Hog(policy), stop)
}

pub fn run(common: &Common, kind: Kind, stop: &AtomicBool) -> anyhow::Result<()> {
    let plan =
        Plan { kind, length_ns: common.length_ns, times: common.times, every_ns: common.every_ns, cpu: common.cpu };
    plan.check().map_err(UsageError)?;
    let mut number = 0;
    let report = disturbance::run(&plan, stop, &mut |one| {
        number += 1;
        if !common.json {
            // Each disturbance is printed when it is over.
            io::stdout().write_all(line(&plan, number, one).as_bytes()).context("cannot write")?;
        }
        Ok(())
    });
    let report = report.with_context(|| format!("cannot inject {}", name(kind)))?;
    let mut out = io::stdout().lock();
    if common.json {
        write_line(&mut out, &Record::new(&plan, &report))?;
    } else {
        write!(out, "{}", summary(&plan, &report))?;
    }
    out.flush()?;
    // An interrupted run is not an error: the output has the number of disturbances.
    if report.complete || stop.load(Ordering::Relaxed) {
        return Ok(());
    }
    bail!("only {} of {} disturbances were made in full: try again", in_full(&plan, &report), plan.times)
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::IrqsOff => "irqs-off",
        Kind::PreemptOff => "preempt-off",
        Kind::Softirq => "softirq",
        Kind::Hog(_) => "hog",
    }
}

fn in_full(plan: &Plan, report: &Report) -> usize {
    report.made.iter().filter(|one| !is_cut_short(plan, one)).count()
}

fn is_cut_short(plan: &Plan, one: &Disturbance) -> bool {
    one.length_ns < plan.length_ns
}

/// Renders a time with more digits than elsewhere: measurements are compared with it.
fn exact(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{:.3} us", ns as f64 / 1e3),
        _ => format!("{:.3} ms", ns as f64 / 1e6),
    }
}

fn line(plan: &Plan, number: u64, one: &Disturbance) -> String {
    let start = rfc3339::format(one.start.unix_ns);
    let mut line = format!("#{number}  CPU {}  start {start}  length {}", one.cpu, exact(one.length_ns));
    if let Some(on_cpu_ns) = one.on_cpu_ns {
        line += &format!("  running {}", exact(on_cpu_ns));
    }
    if is_cut_short(plan, one) {
        line += "  cut short";
    }
    line.push('\n');
    line
}

/// Renders a summary line.
fn summary(plan: &Plan, report: &Report) -> String {
    let what = match plan.kind {
        Kind::IrqsOff => "kept interrupts off on".to_owned(),
        Kind::PreemptOff => "kept preemption off on".to_owned(),
        Kind::Softirq => "kept softirq HRTIMER running on".to_owned(),
        Kind::Hog(disturbance::Policy::Fifo(priority)) => format!("a FIFO thread of priority {priority} kept busy"),
        Kind::Hog(disturbance::Policy::Normal) => "a normal thread kept busy".to_owned(),
    };
    let mut text = format!(
        "{what} CPU {} for {}, {} of {} times",
        report.cpu,
        format_ns(plan.length_ns),
        report.made.len(),
        plan.times
    );
    let mut lengths_ns: Vec<u64> = report.made.iter().map(|one| one.length_ns).collect();
    lengths_ns.sort_unstable();
    if let (Some(&min_ns), Some(&max_ns)) = (lengths_ns.first(), lengths_ns.last()) {
        let median_ns = lengths_ns[lengths_ns.len() / 2];
        text += &format!(": {} at least, median {}, {} at most", exact(min_ns), exact(median_ns), exact(max_ns));
    }
    text.push('\n');
    text
}

#[derive(Serialize)]
struct Record {
    kind: &'static str,
    cpu: u32,
    wanted_ns: u64,
    every_ns: u64,
    times: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<u8>,
    disturbances: Vec<DisturbanceRecord>,
    complete: bool,
}

#[derive(Serialize)]
struct DisturbanceRecord {
    start: String,
    start_monotonic_ns: u64,
    ns: u64,
    cpu: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    on_cpu_ns: Option<u64>,
}

impl Record {
    fn new(plan: &Plan, report: &Report) -> Self {
        // Names of causes of late events, if there is one.
        let (kind, policy, priority) = match plan.kind {
            Kind::IrqsOff => ("irqs_off", None, None),
            Kind::PreemptOff => ("preempt_off", None, None),
            Kind::Softirq => ("softirq", None, None),
            Kind::Hog(disturbance::Policy::Fifo(priority)) => ("hog", Some("fifo"), Some(priority)),
            Kind::Hog(disturbance::Policy::Normal) => ("hog", Some("normal"), None),
        };
        let disturbances = report.made.iter().map(|one| DisturbanceRecord {
            start: rfc3339::format(one.start.unix_ns),
            start_monotonic_ns: one.start.monotonic_ns,
            ns: one.length_ns,
            cpu: one.cpu,
            on_cpu_ns: one.on_cpu_ns,
        });
        Self {
            kind,
            cpu: report.cpu,
            wanted_ns: plan.length_ns,
            every_ns: plan.every_ns,
            times: plan.times,
            policy,
            priority,
            disturbances: disturbances.collect(),
            complete: report.complete,
        }
    }
}

#[cfg(test)]
mod tests {
    use whylate_sources::inject::Timestamp;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;
    const FIFO: Kind = Kind::Hog(disturbance::Policy::Fifo(50));

    fn plan(kind: Kind) -> Plan {
        Plan { kind, length_ns: 10_000_000, times: 3, every_ns: 200_000_000, cpu: Some(1) }
    }

    fn one(length_ns: u64, on_cpu_ns: Option<u64>) -> Disturbance {
        let start = Timestamp { monotonic_ns: SECOND_NS, unix_ns: 1_795_252_440 * SECOND_NS };
        Disturbance { start, length_ns, cpu: 1, on_cpu_ns }
    }

    #[test]
    fn line_has_time_cpu_and_length() {
        assert_eq!(
            line(&plan(Kind::IrqsOff), 1, &one(10_002_345, None)),
            "#1  CPU 1  start 2026-11-21T09:14:00.000000Z  length 10.002 ms\n"
        );
        assert_eq!(
            line(&plan(FIFO), 2, &one(400_000, Some(399_000))),
            "#2  CPU 1  start 2026-11-21T09:14:00.000000Z  length 400.000 us  running 399.000 us  cut short\n"
        );
    }

    #[test]
    fn summary_has_counts() {
        let made = [10_000_100, 10_002_000, 10_001_000].map(|ns| one(ns, None)).to_vec();
        assert_eq!(
            summary(&plan(Kind::IrqsOff), &Report { cpu: 1, made, complete: true }),
            "kept interrupts off on CPU 1 for 10.0ms, 3 of 3 times: 10.000 ms at least, median 10.001 ms, 10.002 ms at most\n"
        );
        assert_eq!(
            summary(&plan(FIFO), &Report { cpu: 1, made: Vec::new(), complete: false }),
            "a FIFO thread of priority 50 kept busy CPU 1 for 10.0ms, 0 of 3 times\n"
        );
    }

    #[test]
    fn json_has_both_clocks_and_omits_unknown_fields() -> Result<(), serde_json::Error> {
        let report = |on_cpu_ns| Report { cpu: 1, made: vec![one(10_000_100, on_cpu_ns)], complete: false };
        let irqs_off = serde_json::to_value(Record::new(&plan(Kind::IrqsOff), &report(None)))?;
        assert_eq!(
            irqs_off,
            serde_json::json!({
                "kind": "irqs_off", "cpu": 1, "wanted_ns": 10_000_000, "every_ns": 200_000_000, "times": 3,
                "disturbances": [{
                    "start": "2026-11-21T09:14:00.000000Z", "start_monotonic_ns": SECOND_NS, "ns": 10_000_100, "cpu": 1
                }],
                "complete": false
            })
        );
        let hog = serde_json::to_value(Record::new(&plan(FIFO), &report(Some(9_000_000))))?;
        assert_eq!((&hog["policy"], &hog["priority"]), (&"fifo".into(), &50.into()));
        assert_eq!(hog["disturbances"][0]["on_cpu_ns"], 9_000_000);
        Ok(())
    }

    #[test]
    fn rejects_long_disturbance() {
        assert_eq!(length_ns("50ms"), Ok(50_000_000));
        assert!(length_ns("50.1ms").is_err() && length_ns("0").is_err() && length_ns("5 parsecs").is_err());
    }
}
