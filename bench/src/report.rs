// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate report` on a recording of a day: a minute of this machine, repeated with later times.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::child::peak_kib;
use crate::figures::{self, Check};
use crate::{hours, machine, results, whylate};

/// Limits for a report of a day.
const SECONDS: f64 = 20.0;
const MEMORY_MB: f64 = 512.0;
const PAGE_MB: f64 = 8.0;
/// Sampling interval of its memory.
const POLL: Duration = Duration::from_millis(20);

/// Arguments of the benchmark.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    pub results: results::Arguments,
    /// How many hours long the recording is.
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=24))]
    pub hours: u64,
    /// How long this machine is recorded.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub seconds: u64,
}

struct Taken {
    seconds: f64,
    peak_mb: f64,
    page_mb: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    if machine::is_skipped(&[]) {
        return Ok(true);
    }
    let program = whylate::build("bench-report")?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let [minute, day, page] = ["minute.whylate", "day.whylate", "day.html"].map(|name| directory.path().join(name));
    let seconds = arguments.seconds.to_string();
    let status = Command::new(&program)
        .args(["record", "-d", &format!("{seconds}s"), "-o"])
        .arg(&minute)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("cannot run whylate")?;
    ensure!(status.success(), "whylate record failed");
    let ticks = hours::lengthen(&minute, &day, arguments.hours * 3600)?;
    let day_mb = fs::metadata(&day)?.len() as f64 / 1e6;
    let rounds = arguments.results.rounds;
    let all: Vec<Taken> = (0..rounds).map(|_| report(&program, &day, &page)).collect::<Result<_>>()?;
    let of = |figure: fn(&Taken) -> f64| figures::median_of(&all, figure);
    let checks = [
        Check::new("time (s)", of(|taken| taken.seconds), "", SECONDS),
        Check::new("peak memory (MB)", of(|taken| taken.peak_mb), "", MEMORY_MB),
        Check::new("page (MB)", of(|taken| taken.page_mb), "", PAGE_MB),
    ];
    let options = format!("report --rounds {rounds} --hours {} --seconds {}", arguments.hours, arguments.seconds);
    let mut text = results::heading("What `whylate report` takes", "bench-report", &options);
    text += &figures::table(&checks, [1, 0]);
    text += &format!(
        "\nMedians of {rounds} rounds, of a recording of {} hours with a snapshot a second ({ticks} moments, {day_mb:.0} MB): {seconds} s of this machine, \
         recorded with all sources and repeated with later times. A day of a machine on which more changes has more different stacks.\n",
        arguments.hours
    );
    arguments.results.publish("report", &text)?;
    Ok(checks.iter().all(Check::is_within))
}

fn report(program: &Path, day: &Path, page: &Path) -> Result<Taken> {
    let began = Instant::now();
    let mut child = Command::new(program)
        .arg("report")
        .arg(day)
        .arg("-o")
        .arg(page)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot run whylate")?;
    let mut peak = 0.0_f64;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let process_status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        peak = peak.max(peak_kib(&process_status).unwrap_or(0.0));
        std::thread::sleep(POLL);
    };
    ensure!(status.success(), "whylate report failed");
    let page_mb = fs::metadata(page)?.len() as f64 / 1e6;
    Ok(Taken { seconds: began.elapsed().as_secs_f64(), peak_mb: peak / 1e3, page_mb })
}
