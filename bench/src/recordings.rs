// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate record` in disk space, CPU time and memory, of `whylate top` on the same sources, and of
//! `whylate report` and `top` on recordings of hours, which repeat a minute of this machine with later times.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use whylate_model::recording::{End, Frame, Line, Reader};

use crate::child::{self, Tool, wait_until};
use crate::results::{self, Section};
use crate::table::{Figure, median_of};

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// How long each is measured.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

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
    // Until it has attached, and the follow-up work of that is done.
    thread::sleep(Duration::from_secs(5));
    tool.expect_running()?;
    let (began, before_ns, bytes) = (Instant::now(), cpu_ns(pid)?, size()?);
    thread::sleep(length);
    let took_s = began.elapsed().as_secs_f64();
    Ok(Usage {
        cpu_percent: (cpu_ns(pid)? - before_ns) as f64 / took_s / 1e7,
        bytes_per_s: (size()? - bytes) as f64 / took_s,
        peak_mb: child::status_kib(pid, child::PEAK)? / 1e3,
    })
}

fn usage_of_whylate(program: &Path, options: &[&str], file: Option<&Path>, length: Duration) -> Result<Usage> {
    let mut tool = Tool::start(program, options)?;
    let pid = tool.pid();
    let usage = usage(&mut tool, pid, file, length)?;
    tool.end()?;
    Ok(usage)
}

pub fn cpu_ns(pid: u32) -> Result<u64> {
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
    /// Of all CPUs, during `perf sched record`.
    switches_per_s: f64,
}

pub fn run_record(arguments: &Arguments) -> Result<bool> {
    let tools = [("perf", "no perf to record switches with")];
    let Some(program) = arguments.results.prepare("bench-record", &tools)? else { return Ok(true) };
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let (rounds, seconds) = (arguments.results.rounds, arguments.seconds);
    let all = (0..rounds).map(|_| record_round(&program, directory.path(), seconds)).collect::<Result<Vec<_>>>()?;
    let more = |round: &RecordRound| round.record.cpu_percent - round.overview.cpu_percent;
    Section::new(&arguments.results, "record")
        .values(&[("seconds", &seconds)])
        .figures([
            Figure::median("CPU of a recorder beyond an overview (%)", 2, &all, more).at_most(0.2),
            Figure::median("per day (MB)", 2, &all, |round| round.record.bytes_per_s * 86_400.0 / 1e6).at_most(300.0),
            Figure::median("CPU of an overview (%)", 2, &all, |round| round.overview.cpu_percent),
            Figure::median("CPU of a recorder (%)", 2, &all, |round| round.record.cpu_percent),
            Figure::median("growth of `perf sched record` (bytes/s)", 0, &all, |round| round.perf_bytes_per_s),
            Figure::median("switches during perf (1/s)", 0, &all, |round| round.switches_per_s),
            Figure::median("peak memory of an overview (MB)", 1, &all, |round| round.overview.peak_mb),
            Figure::median("peak memory of a recorder (MB)", 1, &all, |round| round.record.peak_mb),
        ])
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

pub fn run_report(arguments: &ReportArguments) -> Result<bool> {
    let Some(program) = arguments.results.prepare("bench-report", &[])? else { return Ok(true) };
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let [minute, day, page] = ["minute.whylate", "day.whylate", "day.html"].map(|name| directory.path().join(name));
    let (rounds, hours, seconds) = (arguments.results.rounds, arguments.hours, arguments.seconds);
    record(&program, &minute, seconds)?;
    let ticks = lengthen(&minute, &day, hours * 3600)?;
    let day_mb = fs::metadata(&day)?.len() as f64 / 1e6;
    let report = |_| {
        let mut command = Command::new(&program);
        command.arg("report").arg(&day).arg("-o").arg(&page).stderr(Stdio::null());
        let (took, peak_kib) = child::run_for_peak(&mut command)?;
        Ok([took.as_secs_f64(), peak_kib / 1e3, fs::metadata(&page)?.len() as f64 / 1e6])
    };
    let all = (0..rounds).map(report).collect::<Result<Vec<_>>>()?;
    Section::new(&arguments.results, "report")
        .values(&[("hours", &hours), ("seconds", &seconds), ("ticks", &ticks), ("day_mb", &format!("{day_mb:.0}"))])
        .figures([
            Figure::median("time (s)", 1, &all, |round| round[0]).at_most(20.0),
            Figure::median("peak memory (MB)", 1, &all, |round| round[1]).at_most(512.0),
            Figure::median("page (MB)", 1, &all, |round| round[2]).at_most(8.0),
        ])
        .publish()
}

fn record(program: &Path, to: &Path, seconds: u64) -> Result<()> {
    child::run(Command::new(program).args(["record", "-d", &format!("{seconds}s"), "-o"]).arg(to)).map(drop)
}

/// Repeats a recording's contents, each time later, up to this length. Returns the number of ticks.
fn lengthen(from: &Path, to: &Path, length_s: u64) -> Result<usize> {
    let mut reader = Reader::new(File::open(from)?).context("nothing was recorded")?;
    let header = Line::Header(reader.header().clone());
    let (mut ticks, mut first): (Vec<Vec<Line>>, _) = (Vec::new(), None);
    while let Some(line) = reader.next_line()? {
        if let Line::Snapshot(snapshot) = &line
            && snapshot.source == *first.get_or_insert_with(|| snapshot.source.clone())
        {
            ticks.push(Vec::new());
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
            frame.add(&[serde_json::to_vec(line)?, vec![b'\n']].concat(), line.span_unix_ns())?;
        }
        let (bytes, index) = frame.finish()?;
        out.write_all(&index.to_bytes())?;
        Ok(out.write_all(&bytes)?)
    };
    write(&[header])?;
    let (mut count, mut later_ns) = (0, 0);
    while later_ns < length_s * 1_000_000_000 {
        // As many a frame as `record` writes.
        for frame in ticks.chunks(16) {
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
    Section::new(&arguments.results, "top")
        .values(&[("seconds", &seconds)])
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
    // The heading of a column that appears as soon as a source has figures.
    wait_until("it shows no figures", || screen.shows("VERDICT"))?;
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
    let cpu_ns_in_a_second = || -> Result<u64> {
        let before_ns = cpu_ns(screen.pid)?;
        thread::sleep(Duration::from_secs(1));
        Ok(cpu_ns(screen.pid)?.saturating_sub(before_ns))
    };
    // It has read all of the recording when it is idle.
    while cpu_ns_in_a_second()? >= 20_000_000 {
        ensure!(began.elapsed().as_secs() < 900, "the screen does not come to the end of the recording");
    }
    screen.terminal.expect_running()?;
    let kib = child::status_kib(screen.pid, "VmRSS:")?;
    // Redrawn text may lack spaces.
    ensure!(screen.shows("dropped")? || !is_full, "the history of the screen is not full");
    screen.end()?;
    Ok(kib * 1024.0 / 1e6)
}
