// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of explaining a command's time (`whylate run`), and of following a late wait along its wakeup edges.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde_json::Value;

use crate::child::{Tool, peak_kib, wait_until};
use crate::figures::{Check, median, median_interval, median_of};
use crate::occupancy::loads::Load;
use crate::{figures, kernel, machine, programs, results, whylate};

/// Limit of how much longer a build may take.
const SLOWER_PERCENT: f64 = 2.0;
/// Limit of how much longer a pipe may take with wakeup edges than with the account of the CPUs only.
const EDGES_PERCENT: f64 = 5.0;
/// Minimum number of the account's programs: from then on all are there soon.
const PROGRAMS: usize = 10;
/// Time until whylate surely watches, and after its end until the kernel has patched its code back.
const SETTLE: Duration = Duration::from_millis(1_500);
const ACCOUNT: usize = 0;
const EDGES: usize = 1;
/// Commands that keep the account only, and wakeup edges too.
const SUBJECTS: [&str; 2] = ["wq", "offcpu"];
/// Memory limit of `run` for a command that makes a CPU switch 100,000 times a second.
const MEMORY_MB: f64 = 256.0;
const LOOKUP_MS: f64 = 1.0;
/// Files that a build compiles.
const FILES: usize = 300;
/// A process that repeatedly waits for children that sleep.
const WAITS: &str = "while :; do sleep 0.002; done";
const WATCHED: Duration = Duration::from_secs(5);

/// Arguments of the benchmark.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// How long the command runs whose memory is measured.
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    if machine::is_skipped(&[("gcc", "no gcc to build something with"), ("make", "no make")]) {
        return Ok(true);
    }
    let program = whylate::build("bench-run")?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let rounds = arguments.results.rounds;
    let builds = builds(&program, directory.path(), rounds)?;
    let pipes = if machine::is_skipped(&[("perf", "no perf to measure a pipe with")]) {
        Vec::new()
    } else {
        pipes(&program, rounds)?
    };
    let lookup_ms = (0..rounds).map(|_| lookup_ms(&program)).collect::<Result<Vec<_>>>()?;
    let long = long_command(&program, arguments.seconds)?;

    let slower = |build: &Build| 100.0 * (2.0 * build.watched_s / (build.before_s + build.after_s) - 1.0);
    let slowdowns: Vec<f64> = builds.iter().map(slower).collect();
    let more_cpu = |build: &Build| 100.0 * (2.0 * build.watched_cpu_s / (build.before_cpu_s + build.after_cpu_s) - 1.0);
    let with_edges: Vec<f64> = pipes.iter().map(|seconds| 100.0 * (seconds[EDGES] / seconds[ACCOUNT] - 1.0)).collect();
    let checks = [
        Check::new("a build under `whylate run` takes longer by (%)", median(&slowdowns), "", SLOWER_PERCENT),
        Check::new(
            "CPU time of the process `offcpu --why` for a late wait and its chain (ms)",
            median(&lookup_ms),
            "",
            LOOKUP_MS,
        ),
        Check::new(
            format!(
                "peak memory of `whylate run` in {:.0} s of {:.0} switches a second (MB)",
                long.elapsed_s, long.rate
            ),
            long.peak_mb,
            "",
            MEMORY_MB,
        ),
    ];
    let of_edges = "a pinned pipe takes longer with who woke whom than with who has each CPU alone (%)";
    let of_edges = (!with_edges.is_empty()).then(|| Check::new(of_edges, median(&with_edges), "", EDGES_PERCENT));
    let checks: Vec<Check> = checks.into_iter().chain(of_edges).collect();
    let options = format!("run --rounds {rounds} --seconds {}", arguments.seconds);
    let mut text = results::heading("What `whylate run` and a wait's chain cost", "bench-run", &options);
    text += &figures::table(&checks, [2, 0]);
    let interval = |of: &[f64]| {
        median_interval(of)
            .map_or_else(|| "too few rounds".to_owned(), |(low, high)| format!("{low:.2} to {high:.2} %"))
    };
    for (what, value) in [
        ("the median of the first lies, by a confidence of 95 % (sign test), in", interval(&slowdowns)),
        ("that of the last", interval(&with_edges)),
        (
            "CPU time of that build and of `run`, less that of `run -- true`, is more by (%)",
            format!("{:.2}", median_of(&builds, more_cpu)),
        ),
        ("a build that nobody watches (s)", format!("{:.2}", median_of(&builds, |build| build.before_s))),
        ("`run` takes before and after the command (s)", format!("{:.2}", median_of(&builds, |build| build.around_s))),
        ("the same after the long command (s)", format!("{:.2}", long.around_s)),
        ("time of the long command that is `unknown` (%)", format!("{:.2}", long.unknown_percent)),
    ] {
        text += &format!("| {what} | {value} | | |\n");
    }
    text += &format!(
        "\nMedians of {rounds} rounds. A build is `make -j2` of {FILES} C files; each watched one lies between two that nobody watches, and takes \
         as long as `run` says. The pipe is the fastest of six runs of `perf bench sched pipe` in a row, with each of the two by turns. A late wait is one of 2 ms for a child that sleeps: CPU time of whylate's process, less that of a run that explains \
         none, for each wait that is told. The long command is two threads that take turns on one CPU, with a pause each second.\n"
    );
    arguments.results.publish("run", &text)?;
    Ok(checks.iter().all(Check::is_within))
}

struct Build {
    before_s: f64,
    watched_s: f64,
    after_s: f64,
    /// CPU time, including what whylate takes during and after it.
    before_cpu_s: f64,
    watched_cpu_s: f64,
    after_cpu_s: f64,
    /// Time of `run` itself, before and after the command.
    around_s: f64,
}

fn builds(program: &Path, directory: &Path, rounds: u32) -> Result<Vec<Build>> {
    let objects: Vec<String> = (0..FILES).map(|number| format!("f{number}.o")).collect();
    fs::write(directory.join("Makefile"), format!("all: {}\n%.o: %.c\n\tgcc -O1 -c -o $@ $<\n", objects.join(" ")))?;
    for number in 0..FILES {
        let text =
            format!("#include <stdio.h>\n#include <stdlib.h>\nint f{number}(int a) {{ return printf(\"%d\", a); }}\n");
        fs::write(directory.join(format!("f{number}.c")), text)?;
    }
    let clean = || objects.iter().try_for_each(|object| fs::remove_file(directory.join(object)));
    let directory_text = directory.to_string_lossy();
    let make = ["make", "-s", "-j2", "-C", &directory_text];
    let cpu_s = || -> Result<f64> { Ok(kernel::usage_of_children()?.cpu.as_secs_f64()) };
    let plain = || -> Result<(f64, f64)> {
        let (began, before_cpu_s) = (Instant::now(), cpu_s()?);
        let status = Command::new(make[0]).args(&make[1..]).status().context("cannot run make")?;
        let took_s = began.elapsed().as_secs_f64();
        ensure!(status.success(), "make ends with {status}");
        clean()?;
        Ok((took_s, cpu_s()? - before_cpu_s))
    };
    plain()?;
    let mut builds = Vec::new();
    let (mut before_s, mut before_cpu_s) = plain()?;
    for round in 1..=rounds {
        eprintln!("build: round {round} of {rounds}");
        let nothing_cpu_s = -cpu_s()?;
        let nothing = Command::new(program).args(["run", "--json", "--", "true"]).output();
        ensure!(nothing.is_ok_and(|output| output.status.success()), "whylate cannot run true");
        let nothing_cpu_s = nothing_cpu_s + cpu_s()?;
        let (began, before_watched_s) = (Instant::now(), cpu_s()?);
        let output = Command::new(program).args(["run", "--json", "--"]).args(make).output();
        let output = output.context("cannot run whylate")?;
        let (all_s, watched_cpu_s) = (began.elapsed().as_secs_f64(), cpu_s()? - before_watched_s - nothing_cpu_s);
        ensure!(output.status.success(), "whylate run ends with {}", output.status);
        clean()?;
        let watched_s = elapsed_s(&parse_report(&output.stderr)?)?;
        let (after_s, after_cpu_s) = plain()?;
        let around_s = all_s - watched_s;
        builds.push(Build { before_s, watched_s, after_s, before_cpu_s, watched_cpu_s, after_cpu_s, around_s });
        (before_s, before_cpu_s) = (after_s, after_cpu_s);
    }
    Ok(builds)
}

/// Returns the seconds of the fastest run, by round and subject. Subjects take turns at being first.
fn pipes(program: &Path, rounds: u32) -> Result<Vec<[f64; 2]>> {
    let load = Load::short_pipes();
    let watched = |source: &str| -> Result<f64> {
        let tool = Tool::start(program, &[source, "--why", "1h", "-d", "1h"])?;
        wait_until("it does not watch", || Ok(programs::of_process(tool.pid())?.len() >= PROGRAMS))?;
        thread::sleep(SETTLE);
        let run = load.run()?;
        tool.end()?;
        thread::sleep(SETTLE);
        Ok(run.fastest_s())
    };
    let of_round = |round| {
        eprintln!("pipe: round {} of {rounds}", round + 1);
        let mut fastest_s = [0.0; 2];
        for turn in 0..fastest_s.len() {
            let which = (round as usize + turn) % fastest_s.len();
            fastest_s[which] = watched(SUBJECTS[which])?;
        }
        Ok(fastest_s)
    };
    (0..rounds).map(of_round).collect()
}

/// Parses the JSON of `run`, which follows the command's standard error.
fn parse_report(stderr: &[u8]) -> Result<Value> {
    let last = stderr.trim_ascii_end().rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
    serde_json::from_slice(last).context("`run` tells no JSON")
}

fn elapsed_s(report: &Value) -> Result<f64> {
    Ok(report["elapsed_ns"].as_u64().context("`run` reports no elapsed time")? as f64 / 1e9)
}

/// A child, killed on drop.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the CPU time in milliseconds per wait, of a process that waits several hundred times a second.
fn lookup_ms(program: &Path) -> Result<f64> {
    let waits = KilledOnDrop(kernel::die_with_parent(Command::new("sh").args(["-c", WAITS])).spawn()?);
    let pid = waits.0.id().to_string();
    let watched = format!("{}s", WATCHED.as_secs());
    let measure = |over: &str| -> Result<(f64, usize)> {
        let before = kernel::usage_of_children()?.cpu;
        let options = ["offcpu", "--json", "--idle", "--worst", "10000", "--why", over, "-p", &pid, "-d", &watched];
        let output = Command::new(program).args(options).stderr(Stdio::null()).output()?;
        let cpu = kernel::usage_of_children()?.cpu - before;
        ensure!(output.status.success(), "whylate offcpu ends with {}", output.status);
        let report: Value = serde_json::from_slice(&output.stdout).context("`offcpu` prints no JSON")?;
        let late = report["late"].as_array().map_or(0, Vec::len);
        Ok((cpu.as_secs_f64(), late))
    };
    let (without_s, none) = measure("1h")?;
    let (with_s, late) = measure("1ms")?;
    ensure!(none == 0 && late >= 100, "{late} waits were late, and {none} that could not be");
    Ok(1_000.0 * (with_s - without_s) / late as f64)
}

struct Long {
    elapsed_s: f64,
    /// Switches per second.
    rate: f64,
    peak_mb: f64,
    around_s: f64,
    unknown_percent: f64,
}

/// Runs two threads that switch all the time.
fn long_command(program: &Path, seconds: u64) -> Result<Long> {
    let load = Load::paced_for(Duration::from_secs(seconds))?;
    let before = kernel::usage_of_children()?;
    let began = Instant::now();
    let mut command = Command::new(program);
    let stderr = tempfile::tempfile()?;
    command.args(["run", "--json", "--"]).args(&load);
    command.stdout(Stdio::null()).stderr(stderr.try_clone()?);
    let mut running = KilledOnDrop(kernel::die_with_parent(&mut command).spawn()?);
    let mut peak = 0.0_f64;
    let status = loop {
        let status = fs::read_to_string(format!("/proc/{}/status", running.0.id())).unwrap_or_default();
        peak = peak.max(peak_kib(&status).unwrap_or(0.0));
        if let Some(status) = running.0.try_wait()? {
            break status;
        }
        thread::sleep(Duration::from_millis(20));
    };
    let all_s = began.elapsed().as_secs_f64();
    ensure!(status.success(), "whylate run ends with {status}");
    let mut stderr_text = Vec::new();
    (&stderr).seek(SeekFrom::Start(0))?;
    (&stderr).read_to_end(&mut stderr_text)?;
    let report = parse_report(&stderr_text)?;
    let elapsed_s = elapsed_s(&report)?;
    let parts = report["path"].as_array().context("`run` reports no path")?;
    let unknown = parts.iter().filter(|part| part["kind"] == "unknown").filter_map(|part| part["ns"].as_u64());
    let unknown_ns: u64 = unknown.sum();
    let switches = kernel::usage_of_children()?.switches - before.switches;
    ensure!(switches as f64 > 50_000.0 * elapsed_s, "the load made {switches} switches in {elapsed_s:.0} s");
    Ok(Long {
        elapsed_s,
        rate: switches as f64 / elapsed_s,
        peak_mb: peak / 1024.0,
        around_s: all_s - elapsed_s,
        unknown_percent: unknown_ns as f64 / elapsed_s / 1e7,
    })
}
