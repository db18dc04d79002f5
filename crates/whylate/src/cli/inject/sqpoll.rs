// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate inject sqpoll`: a submission thread with a known share of work.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use whylate_model::sources::SQPOLL;
use whylate_sources::inject::sqpoll::{Load, MAX_RINGS, Plan};

use crate::cli::values::duration_ns;
use crate::json::write_line;

/// Poll interval for signals.
const POLLED_EVERY: Duration = Duration::from_millis(20);

/// Keep an io_uring submission thread busy for a known share of the time.
///
/// Requests read random bytes, which the thread itself generates. The share of work is the time in which the
/// application sees requests outstanding, minus the time for which the thread waited for a CPU.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # works 37 % of the time and spins otherwise
    whylate inject sqpoll --duty 37 --for 10s
    # sleeps in between
    whylate inject sqpoll --duty 5 --idle 1ms --every 100ms
    # three rings share the thread
    whylate inject sqpoll --rings 3 --json")]
pub struct Arguments {
    /// Percent of the time in which the thread has work.
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, value_parser = duty)]
    duty: f64,
    /// Duration of the load.
    #[arg(long = "for", value_name = "DURATION", default_value = "10s", value_parser = duration_ns)]
    length_ns: u64,
    /// Time from the start of one batch of requests to the start of the next.
    #[arg(long = "every", value_name = "DURATION", default_value = "10ms", value_parser = duration_ns)]
    every_ns: u64,
    /// How long the thread spins before it sleeps (sq_thread_idle).
    #[arg(long = "idle", value_name = "DURATION", default_value = "2s", value_parser = duration_ns)]
    idle_ns: u64,
    /// Rings that share the thread.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=MAX_RINGS as i64))]
    rings: u8,
    /// The CPU of the submission thread (sq_thread_cpu).
    #[arg(long, value_name = "N")]
    cpu: Option<u32>,
    /// Print one JSON object on one line, at the end.
    #[arg(long)]
    json: bool,
}

fn duty(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent),
        _ => Err("it is from 0 to 100".to_owned()),
    }
}

#[derive(Serialize)]
struct Record {
    kind: &'static str,
    pid: u32,
    tid: u32,
    wanted_duty: f64,
    duration_ns: u64,
    busy_ns: u64,
    uncertain_ns: u64,
    requests: u64,
    complete: bool,
}

pub fn run(arguments: &Arguments, stop: &AtomicBool) -> anyhow::Result<()> {
    let plan = Plan {
        duty: arguments.duty / 100.0,
        period: Duration::from_nanos(arguments.every_ns),
        rings: arguments.rings.into(),
        idle_ms: u32::try_from(arguments.idle_ns.div_ceil(1_000_000)).unwrap_or(u32::MAX),
        sq_cpu: arguments.cpu,
        ..Plan::default()
    };
    plan.check()?;
    let load = Load::start(&plan).context("cannot inject sqpoll")?;
    let mut out = io::stdout().lock();
    if !arguments.json {
        writeln!(out, "submission thread {} of process {} has work", load.tid(), std::process::id())?;
        out.flush()?;
    }
    let before = load.done()?;
    let end = Instant::now() + Duration::from_nanos(arguments.length_ns);
    while !stop.load(Ordering::Relaxed) && Instant::now() < end {
        thread::sleep(POLLED_EVERY.min(end.saturating_duration_since(Instant::now())));
    }
    let done = load.done().context("the load has failed")?.since(&before);
    let complete = !stop.load(Ordering::Relaxed);
    if arguments.json {
        let record = Record {
            kind: SQPOLL.name,
            pid: std::process::id(),
            tid: load.tid(),
            wanted_duty: plan.duty,
            duration_ns: done.at_ns,
            busy_ns: done.busy_ns,
            uncertain_ns: done.uncertain_ns,
            requests: done.requests,
            complete,
        };
        write_line(&mut out, &record)?;
    } else {
        let percent = |ns: u64| ns as f64 * 100.0 / done.at_ns.max(1) as f64;
        let (busy, unsure) = (percent(done.busy_ns), percent(done.uncertain_ns));
        writeln!(
            out,
            "it had work for {busy:.2}% of the time ({unsure:.2}% of the time are uncertain): {} requests",
            done.requests
        )?;
    }
    out.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duty_is_a_percentage() {
        assert_eq!(duty("37.5"), Ok(37.5));
        assert!(duty("-1").is_err() && duty("101").is_err() && duty("NaN").is_err() && duty("x").is_err());
    }
}
