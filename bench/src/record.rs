// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate record` in disk space, CPU time and memory, compared with an overview that records nothing, and
//! with `perf sched record`, which keeps every switch.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::child::{Tool, peak_kib};
use crate::figures::{Check, median_of};
use crate::{figures, machine, results, whylate};

/// Limit of CPU time beyond that of an overview.
const MORE_PERCENT: f64 = 0.2;
/// Limit of disk space per day.
const DAY_MB: f64 = 300.0;
/// Time until it has attached, and until the follow-up work of that is done.
const SETTLE: Duration = Duration::from_secs(5);
const DAY_S: f64 = 86_400.0;

/// Arguments of the benchmark.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    pub results: results::Arguments,
    /// How long each is measured.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: u64,
}

/// Resources of one program while it runs.
pub struct Taken {
    pub cpu_percent: f64,
    bytes_per_s: f64,
    pub peak_mb: f64,
}

struct Round {
    overview: Taken,
    record: Taken,
    perf_bytes_per_s: f64,
    /// Context switches of all CPUs during `perf sched record`.
    switches_per_s: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    if machine::is_skipped(&[("perf", "no perf to record switches with")]) {
        return Ok(true);
    }
    let program = whylate::build("bench-record")?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let (rounds, length) = (arguments.results.rounds, Duration::from_secs(arguments.seconds));
    let rounds_of_all: Vec<Round> =
        (0..rounds).map(|_| round(&program, directory.path(), length)).collect::<Result<_>>()?;

    let of = |figure: fn(&Round) -> f64| median_of(&rounds_of_all, figure);
    let checks = [
        Check::new(
            "CPU of a recorder beyond a look (%)",
            of(|round| round.record.cpu_percent - round.overview.cpu_percent),
            "",
            MORE_PERCENT,
        ),
        Check::new("per day (MB)", of(|round| round.record.bytes_per_s * DAY_S / 1e6), "", DAY_MB),
    ];
    let options = format!("record --rounds {rounds} --seconds {}", arguments.seconds);
    let mut text = results::heading("What `whylate record` costs", "bench-record", &options);
    text += &figures::table(&checks, [2, 1]);
    for (what, value, digits) in [
        ("CPU of a look (%)", of(|round| round.overview.cpu_percent), 2),
        ("CPU of a recorder (%)", of(|round| round.record.cpu_percent), 2),
        ("growth of a recording (bytes/s)", of(|round| round.record.bytes_per_s), 0),
        ("growth of `perf sched record` (bytes/s)", of(|round| round.perf_bytes_per_s), 0),
        ("switches during perf (1/s)", of(|round| round.switches_per_s), 0),
        ("peak memory of a look (MB)", of(|round| round.overview.peak_mb), 1),
        ("peak memory of a recorder (MB)", of(|round| round.record.peak_mb), 1),
    ] {
        text += &format!("| {what} | {value:.digits$} | | |\n");
    }
    text += &format!(
        "\nMedians of {rounds} rounds of {} s each, all sources with causes, a snapshot a second, under whatever load there was; the first row is the median of the differences within each round. CPU time is \
         that of the process's threads (`/proc/PID/task/*/schedstat`), without BPF programs, which are the same for both (see `bench-why`).\n",
        arguments.seconds
    );
    arguments.results.publish("record", &text)?;
    Ok(checks.iter().all(Check::is_within))
}

fn round(program: &Path, directory: &Path, length: Duration) -> Result<Round> {
    let path = directory.join("a.whylate");
    let name = path.to_str().context("a plain name")?;
    let tool = |words: &[&str], file: Option<&Path>| {
        let mut tool = Tool::start(program, words)?;
        let pid = tool.pid();
        let taken = taken(&mut tool, pid, file, length)?;
        tool.end()?;
        Ok::<_, anyhow::Error>(taken)
    };
    let overview = tool(&["-d", "1h"], None)?;
    let record = tool(&["record", "-d", "1h", "-o", name], Some(&path))?;
    fs::remove_file(&path).context("nothing was recorded")?;
    let perf = directory.join("perf.data");
    let before = switches()?;
    let began = Instant::now();
    let seconds = length.as_secs().min(10).to_string();
    let status = Command::new("perf")
        .args(["sched", "record", "-q", "-o"])
        .arg(&perf)
        .args(["sleep", &seconds])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("cannot run perf")?;
    ensure!(status.success(), "perf sched record failed");
    let took_s = began.elapsed().as_secs_f64();
    let perf_bytes_per_s = fs::metadata(&perf)?.len() as f64 / took_s;
    Ok(Round { overview, record, perf_bytes_per_s, switches_per_s: (switches()? - before) as f64 / took_s })
}

/// Measures a process of a tool, and the growth of its file.
pub fn taken(tool: &mut Tool, pid: u32, file: Option<&Path>, length: Duration) -> Result<Taken> {
    let size = || file.map_or(Ok(0), |file| fs::metadata(file).map(|about| about.len()));
    thread::sleep(SETTLE);
    tool.expect_running()?;
    let (began, cpu_ns, bytes) = (Instant::now(), cpu_ns(pid)?, size()?);
    thread::sleep(length);
    let took_s = began.elapsed().as_secs_f64();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the tool has ended")?;
    Ok(Taken {
        cpu_percent: (self::cpu_ns(pid)? - cpu_ns) as f64 / took_s / 1e7,
        bytes_per_s: (size()? - bytes) as f64 / took_s,
        peak_mb: peak_kib(&status).context("the kernel does not tell the peak of a process's memory")? / 1e3,
    })
}

/// Returns the CPU time of its threads.
pub fn cpu_ns(pid: u32) -> Result<u64> {
    let mut sum_ns = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("the tool has ended")? {
        // The thread may have ended since.
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let first = text.split(' ').next().context("the kernel tells nothing")?;
        sum_ns += first.parse::<u64>().context("the kernel tells no number")?;
    }
    Ok(sum_ns)
}

/// Returns the context switches of all CPUs since boot.
fn switches() -> Result<u64> {
    let text = fs::read_to_string("/proc/stat")?;
    let count = text.lines().find_map(|line| line.strip_prefix("ctxt ")).context("the kernel counts no switches")?;
    Ok(count.trim().parse()?)
}
