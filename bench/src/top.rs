// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate top`, compared with an overview, which measures as much and draws nothing; its time to first
//! figures, and its memory after hours.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::child::{Tool, wait_until};
use crate::figures::{Check, median_of};
use crate::record::{Arguments, Taken, taken};
use crate::{figures, hours, machine, results, whylate};

/// Limit of CPU time beyond that of an overview.
const MORE_PERCENT: f64 = 1.0;
/// Limit of the time to first figures.
const FIRST_S: f64 = 1.0;
/// Limit of additional memory with a full history.
const MEMORY_MB: f64 = 96.0;
/// Limit of the growth after twice as long.
const GROWTH: f64 = 1.05;
/// The heading of a column that appears as soon as a source has figures.
const FIGURES: &[u8] = b"VERDICT";

struct Round {
    overview: Taken,
    top: Taken,
    first_s: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    if machine::is_skipped(&[("script", "no script(1) to give it a terminal")]) {
        return Ok(true);
    }
    let program = whylate::build("bench-top")?;
    let (rounds, length) = (arguments.results.rounds, Duration::from_secs(arguments.seconds));
    let all: Vec<Round> = (0..rounds).map(|_| round(&program, length)).collect::<Result<_>>()?;
    let of = |figure: fn(&Round) -> f64| median_of(&all, figure);
    let [full_mb, longer_mb] = after_hours(&program)?;
    let checks = [
        Check::new(
            "CPU of the screen beyond a look (%)",
            of(|round| round.top.cpu_percent - round.overview.cpu_percent),
            "",
            MORE_PERCENT,
        ),
        Check::new("first figures after (s)", of(|round| round.first_s), "", FIRST_S),
        Check::new(
            "memory beyond a look after 8 hours, history full (MB)",
            of(|round| round.top.peak_mb - round.overview.peak_mb) + full_mb,
            "",
            MEMORY_MB,
        ),
        Check::new("growth from 1 minute to 16 hours, as a multiple of that to 8", longer_mb / full_mb, "", GROWTH),
    ];
    let options = format!("top --rounds {rounds} --seconds {}", arguments.seconds);
    let mut text = results::heading("What `whylate top` costs", "bench-top", &options);
    text += &figures::table(&checks, [2, 1]);
    for (what, value, digits) in [
        ("CPU of a look (%)", of(|round| round.overview.cpu_percent), 2),
        ("CPU of the screen (%)", of(|round| round.top.cpu_percent), 2),
        ("growth from 1 minute to 8 hours (MB)", full_mb, 1),
        ("peak memory of a look (MB)", of(|round| round.overview.peak_mb), 1),
        ("peak memory of the screen (MB)", of(|round| round.top.peak_mb), 1),
    ] {
        text += &format!("| {what} | {value:.digits$} | | |\n");
    }
    text += &format!(
        "\nMedians of {rounds} rounds of {} s each, all sources with causes, a snapshot a second, on a terminal of 140 columns and 40 rows; \
         the first row is the median of the differences within each round. CPU time as for `bench-record`. The hours are of a recording that was made by repeating \
         a minute of this machine; the screen reads it as fast as it can, and has no source attached.\n",
        arguments.seconds
    );
    arguments.results.publish("top", &text)?;
    Ok(checks.iter().all(Check::is_within))
}

fn round(program: &Path, length: Duration) -> Result<Round> {
    let mut overview = Tool::start(program, &["-d", "1h"])?;
    let pid = overview.pid();
    let of_overview = taken(&mut overview, pid, None, length)?;
    overview.end()?;
    let output = tempfile::NamedTempFile::new().context("cannot make a file")?;
    let name = output.path().to_str().context("a plain name")?;
    // The shell becomes the program.
    let command = format!("stty rows 40 cols 140; exec '{}' top", program.display());
    let mut terminal = Tool::start("script", &["-qfc", &command, name])?;
    let began = std::time::Instant::now();
    wait_until("it shows no figures", || Ok(fs::read(name)?.windows(FIGURES.len()).any(|bytes| bytes == FIGURES)))?;
    let first_s = began.elapsed().as_secs_f64();
    let pid = child_of(terminal.pid())?;
    let top = taken(&mut terminal, pid, None, length)?;
    end(pid)?;
    Ok(Round { overview: of_overview, top, first_s })
}

/// Returns the memory of `top` after eight and after sixteen hours, beyond that after a minute.
fn after_hours(program: &Path) -> Result<[f64; 2]> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let [minute, long] = ["minute.whylate", "hours.whylate"].map(|name| directory.path().join(name));
    let name = minute.to_str().context("a plain name")?;
    let status = Command::new(program).args(["record", "-d", "1m", "-o", name]).stderr(Stdio::null()).status()?;
    ensure!(status.success(), "whylate record failed");
    let after = |hours: u64| {
        hours::lengthen(&minute, &long, hours * 3_600)?;
        hours::resident_mb(program, &long, true)
    };
    let empty_mb = hours::resident_mb(program, &minute, false)?;
    Ok([after(8)? - empty_mb, after(16)? - empty_mb])
}

/// Ends a `top`.
pub fn end(pid: u32) -> Result<()> {
    kill_process(Pid::from_raw(pid as i32).context("a PID")?, Signal::TERM).context("it has ended")?;
    // So that the next measurement is undisturbed.
    wait_until("it does not end", || Ok(!fs::exists(format!("/proc/{pid}"))?))
}

/// Returns the only child of a process.
pub fn child_of(pid: u32) -> Result<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).context("the terminal has ended")?;
    children.split_whitespace().next().context("it runs nothing")?.parse().context("the kernel tells no number")
}
