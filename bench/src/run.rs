// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of explaining a command's time (`whylate run`), and of following a late wait along its wakeup edges.

use std::fs;
use std::io::{Read as _, Seek as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde_json::Value;

use crate::child;
use crate::drivers::{Slowdown, in_rounds};
use crate::loads::{Load, Run};
use crate::results::{self, Section};
use crate::subject::{Ready, Subject};
use crate::table::{Figure, Show, median, min};
use crate::{kernel, machine};

/// Minimum number of the account's programs: from then on all are there soon.
const PROGRAMS: usize = 10;
/// Files that a build compiles.
const FILES: usize = 300;
/// A process that repeatedly waits for children that sleep.
const WAITS: &str = "while :; do sleep 0.002; done";
const WATCHED: &str = "5s";

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// How long the command runs for the measurement of memory.
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let tools = [("gcc", "no gcc to build something with"), ("make", "no make")];
    let Some(program) = arguments.results.prepare("bench-run", &tools)? else { return Ok(true) };
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let rounds = arguments.results.rounds;
    let builds = builds(&program, directory.path(), rounds)?;
    let has_pipes = !machine::is_skipped(&[("perf", "no perf to measure a pipe with")]);
    let pipes = if has_pipes { pipes(&program, rounds)? } else { Vec::new() };
    let lookups_ms = (0..rounds).map(|_| lookup_ms(&program)).collect::<Result<Vec<_>>>()?;
    let [memory, around, unknown] = long_command(&program, arguments.seconds)?;

    let slowdowns: Vec<f64> = builds.iter().map(|build| build.0.percent()).collect();
    let interval = |values: &[f64]| Show::Interval(2).cell(values, " %");
    let mut figures = vec![
        Figure::new("a build under `whylate run` takes longer by (%)", median(&slowdowns), 2).at_most(2.0),
        Figure::text("95 % confidence interval of that (sign test)", interval(&slowdowns)),
        Figure::median("CPU time of `offcpu --why` for a late wait and its chain (ms)", 2, &lookups_ms, |ms| *ms)
            .at_most(1.0),
        memory,
    ];
    if has_pipes {
        let what = "a pinned pipe takes longer with wakeup edges than with the CPU account alone (%)";
        figures.push(Figure::new(what, median(&pipes), 2).at_most(5.0));
        figures.push(Figure::text("95 % confidence interval of that", interval(&pipes)));
    }
    let more_cpu = "CPU time of that build and of `run`, less that of `run -- true`, is more by (%)";
    figures.extend([
        Figure::median(more_cpu, 2, &builds, |build| build.0.cpu_percent()),
        Figure::median("an unwatched build (s)", 2, &builds, |build| build.0.before.mean_s()),
        Figure::median("`run` takes before and after the command (s)", 2, &builds, |build| build.1),
        around,
        unknown,
    ]);
    Section::new(&arguments.results, "run")
        .figures(figures)
        .values(&[("seconds", &arguments.seconds), ("files", &FILES)])
        .publish()
}

/// Measures builds under `run` between unwatched ones. Returns the seconds of `run` before and after the command too.
/// CPU times include what whylate takes during and after it.
fn builds(program: &Path, directory: &Path, rounds: u32) -> Result<Vec<(Slowdown, f64)>> {
    let objects: Vec<String> = (0..FILES).map(|number| format!("f{number}.o")).collect();
    fs::write(directory.join("Makefile"), format!("all: {}\n%.o: %.c\n\tgcc -O1 -c -o $@ $<\n", objects.join(" ")))?;
    for number in 0..FILES {
        let head = "#include <stdio.h>\n#include <stdlib.h>\n";
        let text = format!("{head}int f{number}(int a) {{ return printf(\"%d\", a); }}\n");
        fs::write(directory.join(format!("f{number}.c")), text)?;
    }
    let make = ["make", "-s", "-j2", "-C", &directory.to_string_lossy()].map(str::to_owned);
    let timed = |command: &mut Command| -> Result<(Run, Vec<u8>)> {
        let began = Instant::now();
        let (output, cpu) = child::run_for_cpu(command)?;
        let elapsed_s = vec![began.elapsed().as_secs_f64()];
        Ok((Run { elapsed_s, cpu_s: cpu.as_secs_f64(), switches: 0, lost_percent: f64::NAN }, output.stderr))
    };
    let clean = || objects.iter().try_for_each(|object| fs::remove_file(directory.join(object)));
    let plain = || -> Result<Run> {
        let (run, _) = timed(Command::new(&make[0]).args(&make[1..]))?;
        clean()?;
        Ok(run)
    };
    plain()?;
    let mut before = plain()?;
    let build = |round| {
        eprintln!("build: round {round} of {rounds}");
        let (nothing, _) = timed(Command::new(program).args(["run", "--json", "--", "true"]))?;
        let (mut watched, errors) = timed(Command::new(program).args(["run", "--json", "--"]).args(&make))?;
        clean()?;
        let command_s = elapsed_s(&parse_report(&errors)?)?;
        let around_s = watched.mean_s() - command_s;
        (watched.elapsed_s, watched.cpu_s) = (vec![command_s], watched.cpu_s - nothing.cpu_s);
        let after = plain()?;
        Ok((Slowdown { before: std::mem::replace(&mut before, after.clone()), watched, after }, around_s))
    };
    (1..=rounds).map(build).collect()
}

/// Returns how much longer pipes take with wakeup edges than with the account of the CPUs only, in percent by round.
fn pipes(program: &Path, rounds: u32) -> Result<Vec<f64>> {
    let (load, program) = (Load::short_pipes(), program.to_string_lossy());
    // `wq` keeps the account only, `offcpu` wakeup edges too.
    let sources = ["wq", "offcpu"];
    let subjects = sources.map(|source| {
        Subject::new(source, "", &[&program, source, "--why", "1h", "-d", "1h"], Ready::Programs(PROGRAMS)).everywhere()
    });
    let fastest_s = in_rounds("pipe", (rounds, false), &sources, |which| {
        Ok(min(&subjects[which].watch(false, |_| load.run())?.0.elapsed_s))
    })?;
    Ok(fastest_s.0.iter().map(|round| 100.0 * (round[1] / round[0] - 1.0)).collect())
}

/// Parses the JSON of `run`, which follows the command's standard error.
fn parse_report(stderr: &[u8]) -> Result<Value> {
    let last = stderr.trim_ascii_end().rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
    serde_json::from_slice(last).context("`run` prints no JSON")
}

fn elapsed_s(report: &Value) -> Result<f64> {
    Ok(report["elapsed_ns"].as_u64().context("`run` reports no elapsed time")? as f64 / 1e9)
}

/// Returns the CPU time in milliseconds per wait, of a process that waits several hundred times a second.
fn lookup_ms(program: &Path) -> Result<f64> {
    let waits = child::spawn(Command::new("sh").args(["-c", WAITS]))?;
    let pid = waits.0.id().to_string();
    let measure = |over: &str| -> Result<(f64, usize)> {
        let options = ["offcpu", "--json", "--idle", "--worst", "10000", "--why", over, "-p", &pid, "-d", WATCHED];
        let (output, cpu) = child::run_for_cpu(Command::new(program).args(options))?;
        let report: Value = serde_json::from_slice(&output.stdout).context("`offcpu` prints no JSON")?;
        Ok((cpu.as_secs_f64(), report["late"].as_array().map_or(0, Vec::len)))
    };
    let ((without_s, none), (with_s, late)) = (measure("1h")?, measure("1ms")?);
    ensure!(none == 0 && late >= 100, "{late} waits were late, and {none} that could not be");
    Ok(1_000.0 * (with_s - without_s) / late as f64)
}

/// Runs two threads that switch all the time. The first figure is that of memory.
fn long_command(program: &Path, seconds: u64) -> Result<[Figure; 3]> {
    let script = Load::paced_for(Duration::from_secs(seconds))?;
    let before = kernel::usage_of_children()?;
    let (mut stderr, mut text) = (tempfile::tempfile()?, Vec::new());
    let mut command = Command::new(program);
    command.args(["run", "--json", "--", "sh", "-c", &script]).stderr(Stdio::from(stderr.try_clone()?));
    let (took, peak_kib) = child::run_for_peak(&mut command)?;
    stderr.rewind()?;
    stderr.read_to_end(&mut text)?;
    let report = parse_report(&text)?;
    let elapsed_s = elapsed_s(&report)?;
    let parts = report["path"].as_array().context("`run` reports no path")?;
    let unknown = parts.iter().filter(|part| part["kind"] == "unknown");
    let unknown_ns: u64 = unknown.filter_map(|part| part["ns"].as_u64()).sum();
    let rate = (kernel::usage_of_children()?.switches - before.switches) as f64 / elapsed_s;
    ensure!(rate > 50_000.0, "the load made {rate:.0} switches a second");
    let memory = format!("peak memory of `whylate run` in {elapsed_s:.0} s of {rate:.0} switches a second (MB)");
    let around_s = took.as_secs_f64() - elapsed_s;
    Ok([
        Figure::new(memory, peak_kib / 1024.0, 2).at_most(256.0),
        Figure::new("`run` takes before and after the long command (s)", around_s, 2),
        Figure::new("time of the long command that is `unknown` (%)", unknown_ns as f64 / elapsed_s / 1e7, 2),
    ])
}
