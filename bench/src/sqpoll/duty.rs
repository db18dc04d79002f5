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

use super::cpus;
use crate::results::Section;
use crate::table::{Figure, max};

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

/// Errors of all ways, the number of intervals of unknown truth, and why a way is missing.
pub struct Duty {
    ways: Vec<Way>,
    unsure: usize,
    notes: Vec<String>,
}

/// Measures all ways on the same loads in the same intervals.
pub fn measure() -> Result<Duty> {
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
    Ok(Duty { ways, unsure, notes })
}

fn ways() -> Result<(Vec<Way>, Vec<String>)> {
    let own = SqpollOptions { threads: Threads::of(std::process::id()), ..SqpollOptions::default() };
    let with = |backend: &str| SqpollOptions { backend: Some(backend.to_owned()), ..own.clone() };
    let (mut ways, mut notes) = (Vec::new(), Vec::new());
    for (name, options, limit) in [
        ("bpf", with("bpf"), Some(LIMIT)),
        ("bpf, as before 6.9 (samples)", SqpollOptions { sampled: true, ..with("bpf") }, Some(LIMIT)),
        ("bpf --precise", SqpollOptions { precise: true, ..with("bpf") }, Some(PRECISE_LIMIT)),
        ("fdinfo", with("fdinfo"), None),
    ] {
        match options.start(&Session::of_one()) {
            Ok(source) => {
                ways.push(Way { name, source, before: Default::default(), limit, errors: Default::default(), blind: 0 })
            }
            Err(AttachError::Unsupported(reason)) => notes.push(format!("Not measured here: {name}: {reason}.")),
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

impl Duty {
    pub fn report<'a>(&self, mut section: Section<'a>) -> Section<'a> {
        let largest = |errors: &[f64]| max(&errors.iter().map(|error| error.abs()).collect::<Vec<_>>());
        let limited = self.ways.iter().filter_map(|way| Some((way, way.limit?)));
        section = section.figures(limited.map(|(way, limit)| {
            let what = format!("working share by {}, largest error of an interval", way.name);
            Figure::new(what, way.errors.iter().map(|errors| largest(errors)).fold(0.0, f64::max), 2)
                .unit("points")
                .at_most(limit)
        }));
        let rows = self.ways.iter().map(|way| {
            let cells = way.errors.each_ref().map(|errors| {
                let mean = errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len() as f64;
                if errors.is_empty() { "–".to_owned() } else { format!("{mean:.2}, {:.2}", largest(errors)) }
            });
            format!("{} | {} | {}", way.name, cells.join(" | "), way.blind)
        });
        let heads = DUTIES.map(|duty| format!(">{:.0} %", duty * 100.0)).join(" | ");
        section = section
            .text("### Loads of known work")
            .text(&format!(
                "A submission thread has work for a share of the time (`whylate inject sqpoll`), {INTERVALS} intervals of 1 s \
                 each; all ways measure the same ones. The truth is the time for which requests that the thread carries out itself were outstanding \
                 between its polls. Left out are {} of {} figures, in which the hypervisor or other threads on the application's CPU took more than \
                 {} points. Errors in points: the mean of the absolute errors, and the largest.",
                self.unsure,
                INTERVALS * DUTIES.len() * self.ways.len(),
                MAX_UNSURE * 100.0
            ))
            .lines(&format!("work measured by | {heads} | >no result"), rows);
        self.notes.iter().fold(section, |section, note| section.text(note))
    }
}
