// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate record` in disk space, CPU time and memory, of `whylate top` on the same sources, and of
//! `whylate report` and `top` on recordings of hours, which repeat a minute of this machine with later times.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use whylate_model::recording::{End, Frame, Line, Reader};

use crate::child::{self, Tool, wait_until};
use crate::results::{self, Section};
use crate::table::{Figure, median_of};

/// Time until it has attached, and until the follow-up work of that is done.
const SETTLE: Duration = Duration::from_secs(5);
/// The heading of a column that appears as soon as a source has figures.
const FIGURES: &str = "VERDICT";
/// A word on the screen when the history is full; redrawn text may lack spaces.
const FULL: &str = "dropped";
/// `top` has read all of a recording when it uses less CPU time per second than this.
const IDLE_NS: u64 = 20_000_000;
/// How long `top` may take to read all of a recording.
const TIMEOUT: Duration = Duration::from_secs(900);
/// Ticks per frame, as `record` writes them.
const TICKS_PER_FRAME: usize = 16;

/// Arguments of the benchmarks of `record` and `top`.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// How long each is measured.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

/// Arguments of the benchmark of `report`.
#[derive(Debug, Args)]
pub struct ReportArguments {
    #[command(flatten)]
    results: results::Arguments,
    /// How many hours long the recording is.
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=24))]
    hours: u64,
    /// How long this machine is recorded.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..=3600))]
    seconds: u64,
}

/// Resources of one program while it runs.
struct Usage {
    cpu_percent: f64,
    bytes_per_s: f64,
    peak_mb: f64,
}

/// Measures a process of a tool, and the growth of its file.
fn usage(tool: &mut Tool, pid: u32, file: Option<&Path>, length: Duration) -> Result<Usage> {
    let size = || file.map_or(Ok(0), |file| fs::metadata(file).map(|about| about.len()));
    thread::sleep(SETTLE);
    tool.expect_running()?;
    let (began, before_ns, bytes) = (Instant::now(), cpu_ns(pid)?, size()?);
    thread::sleep(length);
    let took_s = began.elapsed().as_secs_f64();
    Ok(Usage {
        cpu_percent: (cpu_ns(pid)? - before_ns) as f64 / took_s / 1e7,
        bytes_per_s: (size()? - bytes) as f64 / took_s,
        peak_mb: child::peak_kib(pid)? / 1e3,
    })
}

/// Measures whylate with these options.
fn usage_of_whylate(program: &Path, options: &[&str], file: Option<&Path>, length: Duration) -> Result<Usage> {
    let mut tool = Tool::start(program, options)?;
    let pid = tool.pid();
    let usage = usage(&mut tool, pid, file, length)?;
    tool.end()?;
    Ok(usage)
}

/// Returns the CPU time of a process's threads.
fn cpu_ns(pid: u32) -> Result<u64> {
    let mut sum_ns = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("the tool has ended")? {
        // The thread may have ended since.
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let first = text.split(' ').next().context("the kernel shows no CPU time")?;
        sum_ns += first.parse::<u64>().context("the kernel shows no number")?;
    }
    Ok(sum_ns)
}

struct RecordRound {
    overview: Usage,
    record: Usage,
    perf_bytes_per_s: f64,
    /// Context switches of all CPUs during `perf sched record`.
    switches_per_s: f64,
}

pub fn run_record(arguments: &Arguments) -> Result<bool> {
    let tools = [("perf", "no perf to record switches with")];
    let Some(program) = arguments.results.prepare("bench-record", &tools)? else { return Ok(true) };
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let (rounds, seconds) = (arguments.results.rounds, arguments.seconds);
    let all = (0..rounds).map(|_| record_round(&program, directory.path(), seconds)).collect::<Result<Vec<_>>>()?;
    let more = |round: &RecordRound| round.record.cpu_percent - round.overview.cpu_percent;
    let command = format!("record --rounds {rounds} --seconds {seconds}");
    Section::new(&arguments.results, "record", "Cost of `whylate record`", "bench-record", &command)
        .figures([
            Figure::median("CPU of a recorder beyond an overview (%)", 2, &all, more).at_most(0.2),
            Figure::median("per day (MB)", 2, &all, |round| round.record.bytes_per_s * 86_400.0 / 1e6).at_most(300.0),
            Figure::median("CPU of an overview (%)", 2, &all, |round| round.overview.cpu_percent),
            Figure::median("CPU of a recorder (%)", 2, &all, |round| round.record.cpu_percent),
            Figure::median("growth of a recording (bytes/s)", 0, &all, |round| round.record.bytes_per_s),
            Figure::median("growth of `perf sched record` (bytes/s)", 0, &all, |round| round.perf_bytes_per_s),
            Figure::median("switches during perf (1/s)", 0, &all, |round| round.switches_per_s),
            Figure::median("peak memory of an overview (MB)", 1, &all, |round| round.overview.peak_mb),
            Figure::median("peak memory of a recorder (MB)", 1, &all, |round| round.record.peak_mb),
        ])
        .text(&format!(
            "Medians of {rounds} rounds of {seconds} s each, all sources with causes, a snapshot a second, under whatever load there was; the first row is the median \
             of the differences within each round. CPU time is that of the process's threads (`/proc/PID/task/*/schedstat`), without BPF programs, which are equal for \
             both (see `bench-why`)."
        ))
        .publish()
}

fn record_round(program: &Path, directory: &Path, seconds: u64) -> Result<RecordRound> {
    let (path, length) = (directory.join("a.whylate"), Duration::from_secs(seconds));
    let overview = usage_of_whylate(program, &["-d", "1h"], None, length)?;
    let options = ["record", "-d", "1h", "-o", &path.to_string_lossy()];
    let record = usage_of_whylate(program, &options, Some(&path), length)?;
    fs::remove_file(&path).context("nothing was recorded")?;
    let perf = directory.join("perf.data");
    let switches = || -> Result<f64> {
        let text = fs::read_to_string("/proc/stat")?;
        let count =
            text.lines().find_map(|line| line.strip_prefix("ctxt ")).context("the kernel counts no switches")?;
        Ok(count.trim().parse()?)
    };
    let (before, began) = (switches()?, Instant::now());
    let mut command = Command::new("perf");
    command.args(["sched", "record", "-q", "-o"]).arg(&perf).args(["sleep", &seconds.min(10).to_string()]);
    child::run(&mut command)?;
    let took_s = began.elapsed().as_secs_f64();
    let perf_bytes_per_s = fs::metadata(&perf)?.len() as f64 / took_s;
    Ok(RecordRound { overview, record, perf_bytes_per_s, switches_per_s: (switches()? - before) / took_s })
}

struct ReportRound {
    seconds: f64,
    peak_mb: f64,
    page_mb: f64,
}

pub fn run_report(arguments: &ReportArguments) -> Result<bool> {
    let Some(program) = arguments.results.prepare("bench-report", &[])? else { return Ok(true) };
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let [minute, day, page] = ["minute.whylate", "day.whylate", "day.html"].map(|name| directory.path().join(name));
    let (rounds, hours, seconds) = (arguments.results.rounds, arguments.hours, arguments.seconds);
    record(&program, &minute, seconds)?;
    let ticks = lengthen(&minute, &day, hours * 3600)?;
    let day_mb = fs::metadata(&day)?.len() as f64 / 1e6;
    let report = |_| -> Result<ReportRound> {
        let mut command = Command::new(&program);
        let (took, peak_kib) = child::run_for_peak(command.arg("report").arg(&day).arg("-o").arg(&page))?;
        let page_mb = fs::metadata(&page)?.len() as f64 / 1e6;
        Ok(ReportRound { seconds: took.as_secs_f64(), peak_mb: peak_kib / 1e3, page_mb })
    };
    let all = (0..rounds).map(report).collect::<Result<Vec<_>>>()?;
    let command = format!("report --rounds {rounds} --hours {hours} --seconds {seconds}");
    Section::new(&arguments.results, "report", "Cost of `whylate report`", "bench-report", &command)
        .figures([
            Figure::median("time (s)", 1, &all, |round| round.seconds).at_most(20.0),
            Figure::median("peak memory (MB)", 1, &all, |round| round.peak_mb).at_most(512.0),
            Figure::median("page (MB)", 1, &all, |round| round.page_mb).at_most(8.0),
        ])
        .text(&format!(
            "Medians of {rounds} rounds, of a recording of {hours} hours with a snapshot a second ({ticks} ticks, {day_mb:.0} MB): {seconds} s of this machine, \
             recorded with all sources and repeated with later times. A day of a machine on which more changes has more different stacks."
        ))
        .publish()
}

/// Records this machine with all sources.
fn record(program: &Path, to: &Path, seconds: u64) -> Result<()> {
    child::run(Command::new(program).args(["record", "-d", &format!("{seconds}s"), "-o"]).arg(to))?;
    Ok(())
}

/// Repeats a recording's contents, each time later, up to this length. Returns the number of ticks.
fn lengthen(from: &Path, to: &Path, length_s: u64) -> Result<usize> {
    let mut reader = Reader::new(File::open(from)?).context("nothing was recorded")?;
    let header = Line::Header(reader.header().clone());
    let (mut ticks, mut first): (Vec<Vec<Line>>, _) = (Vec::new(), String::new());
    while let Some(line) = reader.next_line()? {
        if let Line::Snapshot(snapshot) = &line {
            if first.is_empty() {
                first.clone_from(&snapshot.source);
            }
            if snapshot.source == first {
                ticks.push(Vec::new());
            }
        }
        if let (Line::Snapshot(_) | Line::Account(_), Some(tick)) = (&line, ticks.last_mut()) {
            tick.push(line);
        }
    }
    ensure!(!ticks.is_empty(), "nothing was recorded");
    let spans = || ticks.iter().flatten().filter_map(Line::span_unix_ns);
    let begins_ns = spans().map(|(first_ns, _)| first_ns).min().unwrap_or(0);
    let each_ns = spans().map(|(_, last_ns)| last_ns).max().unwrap_or(0).saturating_sub(begins_ns);
    let mut out = BufWriter::new(File::create(to)?);
    let mut write = |lines: &[Line]| -> Result<()> {
        let mut frame = Frame::new()?;
        for line in lines {
            let mut text = serde_json::to_vec(line)?;
            text.push(b'\n');
            frame.add(&text, line.span_unix_ns())?;
        }
        let (bytes, index) = frame.finish()?;
        out.write_all(&index.to_bytes())?;
        Ok(out.write_all(&bytes)?)
    };
    write(&[header])?;
    let (mut count, mut later_ns) = (0, 0);
    while later_ns < length_s * 1_000_000_000 {
        for frame in ticks.chunks(TICKS_PER_FRAME) {
            let lines: Vec<Line> = frame.iter().flatten().map(|line| later(line, later_ns)).collect();
            write(&lines)?;
            count += frame.len();
        }
        later_ns += each_ns;
    }
    write(&[Line::End(End { at_unix_ns: begins_ns + later_ns })])?;
    out.flush()?;
    Ok(count)
}

fn later(line: &Line, by_ns: u64) -> Line {
    let mut line = line.clone();
    match &mut line {
        Line::Snapshot(snapshot) => {
            snapshot.start_unix_ns += by_ns;
            snapshot.late.iter_mut().for_each(|event| event.at_unix_ns += by_ns);
        }
        Line::Account(account) => account.at_unix_ns += by_ns,
        _ => {}
    }
    line
}

struct TopRound {
    overview: Usage,
    top: Usage,
    first_s: f64,
}

pub fn run_top(arguments: &Arguments) -> Result<bool> {
    let tools = [("script", "no script(1) to give it a terminal")];
    let Some(program) = arguments.results.prepare("bench-top", &tools)? else { return Ok(true) };
    let (rounds, seconds) = (arguments.results.rounds, arguments.seconds);
    let all = (0..rounds).map(|_| top_round(&program, seconds)).collect::<Result<Vec<_>>>()?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let [minute, long] = ["minute.whylate", "hours.whylate"].map(|name| directory.path().join(name));
    record(&program, &minute, 60)?;
    // The memory beyond that after a minute.
    let empty_mb = resident_mb(&program, &minute, false)?;
    let after = |hours: u64| {
        lengthen(&minute, &long, hours * 3_600)?;
        Ok::<_, anyhow::Error>(resident_mb(&program, &long, true)? - empty_mb)
    };
    let (full_mb, longer_mb) = (after(8)?, after(16)?);
    let more_cpu = |round: &TopRound| round.top.cpu_percent - round.overview.cpu_percent;
    let more_mb = median_of(&all, |round| round.top.peak_mb - round.overview.peak_mb) + full_mb;
    let growth = "growth from 1 minute to 16 hours, as a multiple of that to 8";
    let command = format!("top --rounds {rounds} --seconds {seconds}");
    Section::new(&arguments.results, "top", "Cost of `whylate top`", "bench-top", &command)
        .figures([
            Figure::median("CPU of the screen beyond an overview (%)", 2, &all, more_cpu).at_most(1.0),
            Figure::median("first figures after (s)", 2, &all, |round| round.first_s).at_most(1.0),
            Figure::new("memory beyond an overview after 8 hours, history full (MB)", more_mb, 2).at_most(96.0),
            Figure::new(growth, longer_mb / full_mb, 2).at_most(1.05),
            Figure::median("CPU of an overview (%)", 2, &all, |round| round.overview.cpu_percent),
            Figure::median("CPU of the screen (%)", 2, &all, |round| round.top.cpu_percent),
            Figure::new("growth from 1 minute to 8 hours (MB)", full_mb, 1),
            Figure::median("peak memory of an overview (MB)", 1, &all, |round| round.overview.peak_mb),
            Figure::median("peak memory of the screen (MB)", 1, &all, |round| round.top.peak_mb),
        ])
        .text(&format!(
            "Medians of {rounds} rounds of {seconds} s each, all sources with causes, a snapshot a second, on a terminal of 140 columns and 40 rows; \
             the first row is the median of the differences within each round. CPU time as for `bench-record`. The hours are of a recording that was made by repeating \
             a minute of this machine; the screen reads it as fast as it can, and has no source attached."
        ))
        .publish()
}

/// A `top` on a terminal, and the file with its output.
struct Screen {
    terminal: Tool,
    pid: u32,
    output: tempfile::NamedTempFile,
}

impl Screen {
    /// Starts `top` with these options, after which the shell that starts it is that process.
    fn start(program: &Path, columns: u32, options: &str) -> Result<Self> {
        let output = tempfile::NamedTempFile::new().context("cannot make a file")?;
        let command = format!("stty rows 40 cols {columns}; exec '{}' top {options}", program.display());
        let terminal = Tool::start("script", &["-qfc", &command, &output.path().to_string_lossy()])?;
        let mut pid = None;
        wait_until("the terminal runs nothing", || {
            let children = format!("/proc/{0}/task/{0}/children", terminal.pid());
            let children = fs::read_to_string(children).context("the terminal has ended")?;
            pid = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
            Ok(pid.is_some())
        })?;
        Ok(Self { terminal, pid: pid.context("the terminal runs nothing")?, output })
    }

    fn shows(&self, word: &str) -> Result<bool> {
        Ok(fs::read(self.output.path())?.windows(word.len()).any(|bytes| bytes == word.as_bytes()))
    }

    fn end(self) -> Result<()> {
        kill_process(Pid::from_raw(self.pid as i32).context("a PID")?, Signal::TERM).context("it has ended")?;
        // So that the next measurement is undisturbed.
        wait_until("it does not end", || Ok(!fs::exists(format!("/proc/{}", self.pid))?))
    }
}

fn top_round(program: &Path, seconds: u64) -> Result<TopRound> {
    let length = Duration::from_secs(seconds);
    let overview = usage_of_whylate(program, &["-d", "1h"], None, length)?;
    let began = Instant::now();
    let mut screen = Screen::start(program, 140, "")?;
    wait_until("it shows no figures", || screen.shows(FIGURES))?;
    let first_s = began.elapsed().as_secs_f64();
    let top = usage(&mut screen.terminal, screen.pid, None, length)?;
    screen.end()?;
    Ok(TopRound { overview, top, first_s })
}

/// Returns the resident memory in MB of `top` after it has read all of that recording. Fails if its history is not full
/// although `is_full` is set.
fn resident_mb(program: &Path, recording: &Path, is_full: bool) -> Result<f64> {
    let began = Instant::now();
    // Wide enough for all of its first line.
    let mut screen = Screen::start(program, 400, &format!("'{}'", recording.display()))?;
    thread::sleep(Duration::from_secs(2));
    loop {
        let before_ns = cpu_ns(screen.pid)?;
        thread::sleep(Duration::from_secs(1));
        if cpu_ns(screen.pid)?.saturating_sub(before_ns) < IDLE_NS {
            break;
        }
        ensure!(began.elapsed() < TIMEOUT, "the screen does not come to the end of the recording");
    }
    screen.terminal.expect_running()?;
    let kib = child::status_kib(screen.pid, "VmRSS:")?;
    ensure!(screen.shows(FULL)? || !is_full, "the history of the screen is not full");
    screen.end()?;
    Ok(kib * 1024.0 / 1e6)
}
