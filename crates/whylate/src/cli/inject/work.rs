// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate inject work`: known work items.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;
use whylate_model::units::{format_ns, rfc3339};
use whylate_sources::inject::{Timestamp, work};

use crate::cli::UsageError;
use crate::cli::values::duration_ns;
use crate::json::write_line;

/// Queue work items that run for a known time; their handler is `bpf_wq_work`.
///
/// No kernel module is needed: a BPF program queues them all on one CPU (Linux 6.10 and later). An item that keeps the
/// CPU busy delays those behind it: of one batch with --busy 5ms the first item waits 0 ms, the second 5 ms, the third
/// 10 ms. After 10 ms the kernel may run other items alongside a busy one.
///
/// Items are freed at the end: `bpf_wq_delete_work` is queued once for each distinct item, at most 16,384 times.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # 10,000 at once, after 8 s in which you can start a tool
    whylate inject work --items 10000 --delay 8s
    # the same on a busy machine
    whylate inject work --items 10000 --delay 8s --load
    # 20 items, which wait for 0, 5, 10 ... 95 ms
    whylate inject work --items 20 --busy 5ms --cpu 1
    # as JSON, for a script
    whylate inject work --items 100 --json")]
pub struct Arguments {
    /// Number of items to run.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=work::MAX_ITEMS))]
    items: u64,
    /// Queue at most this many items at once; the rest follow in batches, a millisecond apart.
    #[arg(long, value_name = "N", default_value_t = work::MAX_AT_ONCE, value_parser = clap::value_parser!(u64).range(1..=work::MAX_AT_ONCE))]
    at_once: u64,
    /// Wait this long before queueing (default: not at all).
    #[arg(long, value_name = "DURATION", value_parser = duration_ns)]
    delay: Option<u64>,
    /// Each item keeps its CPU busy this long, 50ms at most (default: not at all).
    #[arg(long, value_name = "DURATION", value_parser = busy_ns)]
    busy: Option<u64>,
    /// Queue on this CPU instead of the current one.
    #[arg(long, value_name = "N")]
    cpu: Option<u32>,
    /// Also keep every CPU busy with a thread of normal priority.
    #[arg(long)]
    load: bool,
    /// Print one JSON object on one line.
    #[arg(long)]
    json: bool,
}

fn busy_ns(text: &str) -> Result<u64, String> {
    match duration_ns(text)? {
        ns if ns > work::MAX_BUSY_NS => Err(format!("it may be {} ms at most", work::MAX_BUSY_NS / 1_000_000)),
        ns => Ok(ns),
    }
}

pub fn run(arguments: &Arguments, stop: &AtomicBool) -> anyhow::Result<()> {
    let plan = work::Plan {
        items: arguments.items,
        at_once: arguments.at_once,
        delay: Duration::from_nanos(arguments.delay.unwrap_or(0)),
        busy_ns: arguments.busy.unwrap_or(0),
        cpu: arguments.cpu,
        load: arguments.load,
    };
    plan.check().map_err(UsageError)?;
    let report = work::run(&plan, stop).context("cannot inject work")?;
    let mut out = io::stdout().lock();
    if arguments.json {
        write_line(&mut out, &WorkRecord::new(&plan, &report))?;
    } else {
        write!(out, "{}", work_text(&plan, &report))?;
    }
    out.flush()?;
    // An interrupted run is not an error: the output has the numbers of queued and executed items.
    if report.complete || stop.load(Ordering::Relaxed) {
        return Ok(());
    }
    match report.executed == plan.items {
        true => bail!("the last items were cut short, as it took too long"),
        false => bail!("only {} of {} items were queued, and {} ran", report.queued, plan.items, report.executed),
    }
}

/// Renders the report in short lines.
fn work_text(plan: &work::Plan, report: &work::Report) -> String {
    let items = |n: u64| match plan.items {
        1 if n == 1 => "1 item".to_owned(),
        all if n == all => format!("{n} items"),
        all => format!("{n} of {all} items"),
    };
    let busy = match plan.busy_ns {
        0 => String::new(),
        ns => format!(", each busy for {}", format_ns(ns)),
    };
    let mut text = format!("queued {} of {} on CPU {}{busy}", items(report.queued), work::HANDLER, report.cpu);
    if report.queued > 1 {
        text += &format!(", {} of them waiting at once", report.at_once);
    }
    let cut_short = if report.complete || report.executed < plan.items { "" } else { ", the last ones cut short" };
    text += &format!(
        "\nran {}{cut_short}, kept the CPU busy for {} in total, {} at most\n",
        report.executed,
        format_ns(report.busy_total_ns),
        format_ns(report.busy_max_ns)
    );
    if let (Some(first), Some(last)) = (report.first_queue, report.last_queue) {
        let after_first = |timestamp: Timestamp| format_ns(timestamp.monotonic_ns.saturating_sub(first.monotonic_ns));
        text += &format!("first queued {}, last queued {} after it", rfc3339::format(first.unix_ns), after_first(last));
        if let Some(end) = report.last_end {
            text += &format!(", last ended {} after it", after_first(end));
        }
        text.push('\n');
    }
    text
}

#[derive(Serialize)]
struct WorkRecord {
    handler: &'static str,
    items: u64,
    queued: u64,
    executed: u64,
    at_once: u64,
    cpu: u32,
    load: bool,
    busy_ns: u64,
    busy_total_ns: u64,
    busy_max_ns: u64,
    first_queue: Option<String>,
    first_queue_monotonic_ns: Option<u64>,
    last_queue: Option<String>,
    last_queue_monotonic_ns: Option<u64>,
    first_start_monotonic_ns: Option<u64>,
    last_end_monotonic_ns: Option<u64>,
    complete: bool,
}

impl WorkRecord {
    fn new(plan: &work::Plan, report: &work::Report) -> Self {
        let wall = |timestamp: Option<Timestamp>| timestamp.map(|timestamp| rfc3339::format(timestamp.unix_ns));
        let monotonic_ns = |timestamp: Option<Timestamp>| timestamp.map(|timestamp| timestamp.monotonic_ns);
        Self {
            handler: work::HANDLER,
            items: plan.items,
            queued: report.queued,
            executed: report.executed,
            at_once: report.at_once,
            cpu: report.cpu,
            load: plan.load,
            busy_ns: plan.busy_ns,
            busy_total_ns: report.busy_total_ns,
            busy_max_ns: report.busy_max_ns,
            first_queue: wall(report.first_queue),
            first_queue_monotonic_ns: monotonic_ns(report.first_queue),
            last_queue: wall(report.last_queue),
            last_queue_monotonic_ns: monotonic_ns(report.last_queue),
            first_start_monotonic_ns: monotonic_ns(report.first_start),
            last_end_monotonic_ns: monotonic_ns(report.last_end),
            complete: report.complete,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn timestamp(after_ns: u64) -> Option<Timestamp> {
        Some(Timestamp { monotonic_ns: SECOND_NS + after_ns, unix_ns: 1_795_252_440 * SECOND_NS + after_ns })
    }

    fn plan() -> work::Plan {
        work::Plan {
            items: 20,
            at_once: work::MAX_AT_ONCE,
            delay: Duration::ZERO,
            busy_ns: 5_000_000,
            cpu: Some(1),
            load: false,
        }
    }

    fn report() -> work::Report {
        work::Report {
            queued: 20,
            executed: 20,
            cpu: 1,
            at_once: 20,
            wait_total_ns: 1_000_000_000,
            busy_total_ns: 100_004_000,
            busy_max_ns: 5_001_000,
            first_queue: timestamp(0),
            last_queue: timestamp(3_640),
            first_start: timestamp(9_000),
            last_end: timestamp(100_100_000),
            complete: true,
        }
    }

    #[test]
    fn renders_report() {
        assert_eq!(
            work_text(&plan(), &report()),
            "queued 20 items of bpf_wq_work on CPU 1, each busy for 5.00ms, 20 of them waiting at once\n\
             ran 20, kept the CPU busy for 100ms in total, 5.00ms at most\n\
             first queued 2026-11-21T09:14:00.000000Z, last queued 3.64us after it, last ended 100ms after it\n"
        );
        let nothing = work::Report { queued: 0, executed: 0, first_queue: None, last_queue: None, ..report() };
        let text = work_text(&plan(), &nothing);
        assert!(text.starts_with("queued 0 of 20 items of bpf_wq_work on CPU 1, each busy"), "{text}");
        let text = work_text(&plan(), &work::Report { complete: false, ..report() });
        assert!(text.contains("\nran 20, the last ones cut short, kept"), "{text}");
    }

    #[test]
    fn the_json_has_both_clocks() -> Result<(), serde_json::Error> {
        let json = serde_json::to_value(WorkRecord::new(&plan(), &report()))?;
        assert_eq!(json["first_queue"], "2026-11-21T09:14:00.000000Z");
        assert_eq!(json["last_queue_monotonic_ns"], SECOND_NS + 3_640);
        assert_eq!(json["handler"], "bpf_wq_work");
        Ok(())
    }

    #[test]
    fn rejects_long_busy_time() {
        assert_eq!(busy_ns("50ms"), Ok(50_000_000));
        assert!(busy_ns("50.1ms").is_err() && busy_ns("0").is_err() && busy_ns("5 parsecs").is_err());
    }
}
