// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of each way to measure work, on loads with a known share of work.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use whylate_model::Series;
use whylate_model::sqpoll::is_thread;
use whylate_sources::inject::sqpoll::{Done, Load, Plan};
use whylate_sources::sqpoll::{AttachedSqpoll, SqpollOptions};
use whylate_sources::{AttachError, Attached as _, Measuring, Session, Threads};

use super::{Part, cpus};
use crate::figures::Check;

const DUTIES: [f64; 4] = [0.01, 0.10, 0.37, 0.99];
const INTERVALS: usize = 10;
const INTERVAL: Duration = Duration::from_secs(1);
/// In percentage points.
const LIMIT: f64 = 2.0;
const PRECISE_LIMIT: f64 = 1.0;
/// As a share of time: if other tasks or the hypervisor took more of an interval, the truth is unknown.
const MAX_UNSURE: f64 = 0.005;

struct Way {
    name: &'static str,
    source: Measuring<AttachedSqpoll>,
    /// The load's account and the stolen time at the previous snapshot.
    before: (Done, f64),
    limit: Option<f64>,
    /// Errors by duty, one per interval, in percentage points.
    errors: [Vec<f64>; DUTIES.len()],
    /// Intervals without a result.
    blind: usize,
}

/// Measures all ways on the same loads in the same intervals.
pub fn measure() -> Result<Part> {
    let (app_cpu, sq_cpu) = cpus()?;
    let (mut ways, notes) = ways()?;
    let mut unsure = 0;
    for (index, duty) in DUTIES.into_iter().enumerate() {
        eprintln!("duty {duty}");
        let plan = Plan { duty, sq_cpu: Some(sq_cpu), app_cpu: Some(app_cpu), urgent: true, ..Plan::default() };
        let load = Load::start(&plan)?;
        // The load calibrates the duration of a request.
        thread::sleep(Duration::from_millis(500));
        for number in 0..=INTERVALS {
            for way in &mut ways {
                // Snapshots take time too, so each way is compared over its own interval.
                let snapshot = way.source.snapshot()?;
                let now = (load.done()?, stolen_s());
                let (before, stolen_before) = std::mem::replace(&mut way.before, now);
                if number == 0 {
                    continue;
                }
                let done = now.0.since(&before);
                let share = |ns: u64| ns as f64 / done.at_ns as f64;
                let is_of_load =
                    |series: &&Series| is_thread(series) && series.labels.get("tid") == Some(&load.tid().to_string());
                let series = snapshot.series.iter().find(is_of_load).context("the thread was not seen")?;
                if share(done.uncertain_ns) > MAX_UNSURE || now.1 - stolen_before > MAX_UNSURE {
                    unsure += 1;
                } else if let Some(working) = series.values.get("working") {
                    way.errors[index].push((working - share(done.busy_ns)) * 100.0);
                } else {
                    way.blind += 1;
                }
            }
            if number < INTERVALS {
                thread::sleep(INTERVAL);
            }
        }
    }
    Ok(report(&ways, unsure, &notes))
}

fn ways() -> Result<(Vec<Way>, String)> {
    let own = SqpollOptions { threads: Threads::of_process(std::process::id()), ..SqpollOptions::default() };
    let of = |backend: &str| SqpollOptions { backend: Some(backend.to_owned()), ..own.clone() };
    let mut ways = Vec::new();
    let mut notes = String::new();
    for (name, options, limit) in [
        ("bpf", of("bpf"), Some(LIMIT)),
        ("bpf, as before 6.9 (samples)", SqpollOptions { sampled: true, ..of("bpf") }, Some(LIMIT)),
        ("bpf --precise", SqpollOptions { precise: true, ..of("bpf") }, Some(PRECISE_LIMIT)),
        ("fdinfo", of("fdinfo"), None),
    ] {
        match options.start(&Session::of_one()) {
            Ok(source) => {
                ways.push(Way { name, source, before: Default::default(), limit, errors: Default::default(), blind: 0 })
            }
            Err(AttachError::Unsupported(reason)) => notes += &format!("\nNot measured here: {name}: {reason}.\n"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok((ways, notes))
}

/// Returns the time stolen from all CPUs (proc_stat(5)), in seconds.
fn stolen_s() -> f64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = text.lines().next().and_then(|line| line.split_whitespace().nth(8)?.parse::<f64>().ok());
    ticks.unwrap_or(0.0) / rustix::param::clock_ticks_per_second() as f64
}

fn report(ways: &[Way], unsure: usize, notes: &str) -> Part {
    let largest = |errors: &[f64]| errors.iter().fold(0.0, |largest: f64, error| largest.max(error.abs()));
    let mut checks = Vec::new();
    let mut text = format!(
        "### Loads of known work\n\nA submission thread has work for a share of the time (`whylate inject sqpoll`), {INTERVALS} intervals of 1 s \
         each; all ways look at the same ones. The truth is for how long requests that the thread carries out itself were outstanding between its looks. Left out \
         are {unsure} of {} figures, in which the hypervisor or others on the application's CPU took more than {} points. \
         Errors in points: mean of what it is off, and the largest.\n\n| work is told by | {} | told nothing |\n|---|{}--:|\n",
        INTERVALS * DUTIES.len() * ways.len(),
        MAX_UNSURE * 100.0,
        DUTIES.map(|duty| format!("{:.0} %", duty * 100.0)).join(" | "),
        "--:|".repeat(DUTIES.len()),
    );
    for way in ways {
        let cells = way.errors.each_ref().map(|errors| {
            if errors.is_empty() {
                return "-".to_owned();
            }
            let mean = errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len() as f64;
            format!("{mean:.2}, {:.2}", largest(errors))
        });
        text += &format!("| {} | {} | {} |\n", way.name, cells.join(" | "), way.blind);
        if let Some(limit) = way.limit {
            let value = way.errors.iter().map(|errors| largest(errors)).fold(0.0, f64::max);
            let what = format!("working share by {}, largest error of an interval", way.name);
            checks.push(Check::new(what, value, "points", limit));
        }
    }
    text += notes;
    Part { checks, text }
}
