// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accuracy of `whylate sqpoll` on loads with a known share of work and beside fio's, and its cost for the measured
//! rings and on a machine with many processes, compared with the kernel's fdinfo. In a virtual machine: accuracy of
//! `--precise`, compared with the function_graph tracer, by a long kernel test.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use io_uring::{IoUring, opcode};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use serde_json::Value;
use whylate_model::Series;
use whylate_model::sqpoll::is_thread;
use whylate_sources::inject::sqpoll::{Done, Load, Plan};
use whylate_sources::kernel::clock::thread_cpu_ns;
use whylate_sources::sqpoll::{AttachedSqpoll, SqpollOptions};
use whylate_sources::{AttachError, Attached as _, Measuring, Session, Threads};

use crate::drivers::{Rounds, in_rounds};
use crate::machine::{pin_to, two_cpus};
use crate::results::{Arguments, Section};
use crate::table::{Figure, Show, column, grid, lines, max, median};
use crate::workloads::{self, Workload};
use crate::{child, machine, vm};

pub fn run(arguments: &Arguments) -> Result<bool> {
    let Some(program) = arguments.prepare("bench-sqpoll", &[])? else { return Ok(true) };
    let (app_cpu, sq_cpu) = two_cpus()?;
    let duty = duty(app_cpu, sq_cpu)?;
    let stall = in_thread(|| stall(app_cpu, sq_cpu, arguments.rounds))?;
    let (crowd, own_descriptors) = crowd(arguments.rounds)?;
    let fio = if machine::has("fio") { Some(fio(&program, app_cpu, sq_cpu)?) } else { None };
    let section = Section::new(arguments, "sqpoll").values(&[("app_cpu", &app_cpu), ("sq_cpu", &sq_cpu)]);
    let section = report_crowd(report_stall(duty.report(section), &stall), &crowd, own_descriptors);
    match fio {
        Some(measured) => report_fio(section, &measured).publish(),
        None => section.add("fio", "Not measured here: no fio.").publish(),
    }
}

/// Returns the options of a source with this backend that measures the threads of this process.
fn options(backend: &str) -> SqpollOptions {
    SqpollOptions {
        backend: Some(backend.to_owned()),
        threads: Threads::of_process(process::id()),
        ..SqpollOptions::default()
    }
}

const DUTIES: [f64; 4] = [0.01, 0.10, 0.37, 0.99];
const INTERVALS: usize = 10;
/// As a share of time: if other tasks or the hypervisor took more of an interval, the truth is unknown.
const MAX_UNSURE: f64 = 0.005;

struct Way {
    name: &'static str,
    source: Measuring<AttachedSqpoll>,
    /// The load's account and the stolen time at the previous snapshot.
    before: (Done, f64),
    /// Limit of the error, in percentage points.
    limit: Option<f64>,
    /// Errors by duty, one per interval, in percentage points.
    errors: [Vec<f64>; DUTIES.len()],
    blind: usize,
}

/// Errors of all ways, the number of intervals of unknown truth, and why a way is missing.
struct Duty {
    ways: Vec<Way>,
    unsure: usize,
    notes: Vec<String>,
}

/// Measures all ways on the same loads in the same intervals.
fn duty(app_cpu: usize, sq_cpu: usize) -> Result<Duty> {
    let (mut ways, notes) = ways()?;
    let mut unsure = 0;
    for (index, duty) in DUTIES.into_iter().enumerate() {
        eprintln!("duty {duty}");
        let [app_cpu, sq_cpu] = [app_cpu, sq_cpu].map(|cpu| Some(cpu as u32));
        let load = Load::start(&Plan { duty, sq_cpu, app_cpu, urgent: true, ..Plan::default() })?;
        // The load calibrates the duration of a request.
        thread::sleep(Duration::from_millis(500));
        for number in 0..=INTERVALS {
            for way in &mut ways {
                // Snapshots take time too, so each way is compared over its own interval.
                let snapshot = way.source.snapshot()?;
                let now = (load.done()?, stolen_s());
                let (before, stolen_before) = mem::replace(&mut way.before, now);
                if number == 0 {
                    continue;
                }
                let done = now.0.since(&before);
                let share = |ns: u64| ns as f64 / done.at_ns as f64;
                let tid = load.tid().to_string();
                let is_load = |series: &&Series| is_thread(series) && series.labels.get("tid") == Some(&tid);
                let series = snapshot.series.iter().find(is_load).context("the thread was not seen")?;
                if share(done.uncertain_ns) > MAX_UNSURE || now.1 - stolen_before > MAX_UNSURE {
                    unsure += 1;
                } else if let Some(working) = series.values.get("working") {
                    way.errors[index].push((working - share(done.busy_ns)) * 100.0);
                } else {
                    way.blind += 1;
                }
            }
            if number < INTERVALS {
                thread::sleep(Duration::from_secs(1));
            }
        }
    }
    Ok(Duty { ways, unsure, notes })
}

fn ways() -> Result<(Vec<Way>, Vec<String>)> {
    let (mut ways, mut notes) = (Vec::new(), Vec::new());
    for (name, options, limit) in [
        ("bpf", options("bpf"), Some(2.0)),
        ("bpf, as before 6.9 (samples)", SqpollOptions { sampled: true, ..options("bpf") }, Some(2.0)),
        ("bpf --precise", SqpollOptions { precise: true, ..options("bpf") }, Some(1.0)),
        ("fdinfo", options("fdinfo"), None),
    ] {
        match options.start(&Session::of_one()) {
            Ok(source) => {
                ways.push(Way {
                    name,
                    source,
                    before: Default::default(),
                    limit,
                    errors: Default::default(),
                    blind: 0,
                });
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
    fn report<'a>(&self, section: Section<'a>) -> Section<'a> {
        let absolute = |errors: &Vec<f64>| errors.iter().map(|error| error.abs()).collect::<Vec<_>>();
        let limited = self.ways.iter().filter_map(|way| Some((way, way.limit?)));
        let figures = limited.map(|(way, limit)| {
            let what = format!("working share by {}, largest error of an interval", way.name);
            Figure::new(what, max(&way.errors.each_ref().map(absolute).concat()), 2).unit("points").at_most(limit)
        });
        let rows = self.ways.iter().map(|way| {
            let errors = way.errors.each_ref().map(absolute);
            let cells =
                errors.map(|errors| [Show::Mean(2), Show::Max(2)].map(|show| show.cell(&errors, "")).join(", "));
            format!("{} | {} | {}", way.name, cells.join(" | "), way.blind)
        });
        let heads = DUTIES.map(|duty| format!(">{:.0} %", duty * 100.0)).join(" | ");
        let (count, points) = (INTERVALS * DUTIES.len() * self.ways.len(), MAX_UNSURE * 100.0);
        let section = section
            .figures(figures)
            .values(&[("intervals", &INTERVALS), ("unsure", &self.unsure), ("duty_figures", &count)])
            .values(&[("unsure_points", &points)])
            .add("duty", lines(&format!("work measured by | {heads} | >no result"), rows));
        self.notes.iter().fold(section, |section, note| section.add("duty", note))
    }
}

const ENTRIES: u32 = 32_768;
/// Interval of snapshots, and of requests.
const SNAPSHOT_EVERY: Duration = Duration::from_millis(20);
const SUBMIT_EVERY: Duration = Duration::from_micros(200);
/// How long to spin before sleeping.
const SPIN: Duration = Duration::from_micros(50);
const RUN: Duration = Duration::from_secs(2);
const WATCHERS: [&str; 3] = ["nothing", "bpf", "fdinfo"];

/// Times that requests waited until the submission thread took them.
struct Stall {
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

/// Measures requests of a ring with many unreaped completions while a watcher takes snapshots.
fn stall(app_cpu: usize, sq_cpu: usize, rounds: u32) -> Result<Rounds<Stall>> {
    pin_to(app_cpu)?;
    let mut builder = IoUring::builder();
    builder.setup_sqpoll(5_000).setup_sqpoll_cpu(sq_cpu as u32);
    let mut ring: IoUring = builder.build(ENTRIES)?;
    for _ in 0..ENTRIES {
        push(&mut ring)?;
    }
    wait_until_taken(&mut ring)?;
    in_rounds("a watched ring", (rounds, false), &WATCHERS, |which| {
        let (over, ready) = (AtomicBool::new(false), Barrier::new(2));
        thread::scope(|scope| {
            // It inherits the affinity.
            let watching = scope.spawn(|| take_snapshots(WATCHERS[which], &over, &ready));
            ready.wait();
            let outcome = in_thread(|| requests(&mut ring));
            over.store(true, Ordering::Relaxed);
            watching.join().unwrap_or_else(|_| Err(anyhow!("the watcher panicked")))?;
            outcome
        })
    })
}

/// Runs something in a thread of its own, which may become real-time and pinned.
fn in_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|_| Err(anyhow!("the load panicked"))))
}

fn take_snapshots(watcher: &str, over: &AtomicBool, ready: &Barrier) -> Result<()> {
    let source = (watcher != WATCHERS[0]).then(|| options(watcher).start(&Session::of_one())).transpose();
    ready.wait();
    let mut source = source?;
    while !over.load(Ordering::Relaxed) {
        if let Some(source) = &mut source {
            source.snapshot()?;
        }
        thread::sleep(SNAPSHOT_EVERY);
    }
    Ok(())
}

/// Submits one request after another; each makes a completion, and one is reaped for it.
fn requests(ring: &mut IoUring) -> Result<Stall> {
    // It comes before the watcher.
    child::run(Command::new("chrt").args(["-f", "-p", "1", &gettid().as_raw_nonzero().to_string()]))?;
    let mut taken_us = Vec::new();
    let began = Instant::now();
    while began.elapsed() < RUN {
        let submitted = Instant::now();
        push(ring)?;
        wait_until_taken(ring)?;
        taken_us.push(submitted.elapsed().as_secs_f64() * 1e6);
        ring.completion().next();
        thread::sleep(SUBMIT_EVERY);
    }
    taken_us.sort_by(f64::total_cmp);
    let at = |share: f64| taken_us.get((taken_us.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    Ok(Stall { p50_us: at(0.5), p99_us: at(0.99), max_us: max(&taken_us) })
}

fn push(ring: &mut IoUring) -> Result<()> {
    // SAFETY: the request has no buffer.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.context("the ring is full")?;
    ring.submit()?;
    Ok(())
}

fn wait_until_taken(ring: &mut IoUring) -> Result<()> {
    let began = Instant::now();
    while !ring.submission().is_empty() {
        let elapsed = began.elapsed();
        ensure!(elapsed < Duration::from_secs(5), "the submission thread takes no requests");
        // The watcher may hold the ring's lock, and needs this CPU to release it.
        if elapsed > SPIN { thread::sleep(SPIN) } else { std::hint::spin_loop() }
    }
    Ok(())
}

fn report_stall<'a>(section: Section<'a>, measured: &Rounds<Stall>) -> Section<'a> {
    let p99 = |which| measured.median(which, |sample| sample.p99_us);
    let what = "from submission to taken, p99 with 50 snapshots a second by bpf (the limit is 105 % of the unwatched p99, and 1 us)";
    let columns = [
        column("p50 us", Show::Median(2), "", |sample: &Stall| sample.p50_us),
        column("p99 us", Show::Median(2), "", |sample| sample.p99_us),
        column("max us", Show::Median(1), "", |sample| sample.max_us),
    ];
    section
        .figures([Figure::new(what, p99(1), 2).unit("us").at_most(p99(0) * 1.05 + 1.0)])
        .values(&[
            ("entries", &ENTRIES),
            ("snapshot_every", &format!("{SNAPSHOT_EVERY:?}")),
            ("run", &format!("{RUN:?}")),
        ])
        .add("stall", grid("watcher", &columns, measured.rows(WATCHERS.map(str::to_owned))))
}

const PROCESSES: u32 = 5_000;
const DESCRIPTORS: u32 = 100_000;
/// Descriptors that this process needs for other purposes.
const SPARE: u32 = 1_000;
const BACKENDS: [&str; 2] = ["bpf", "fdinfo"];

/// Measures the CPU times of snapshots by backend, in milliseconds. The process with the ring has as many of the
/// descriptors as it may, which are returned too, and the crowd has the others.
fn crowd(rounds: u32) -> Result<([Vec<f64>; BACKENDS.len()], u32)> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let own = limit.maximum.map_or(DESCRIPTORS, |most| u32::try_from(most).unwrap_or(u32::MAX).saturating_sub(SPARE));
    let own = own.min(DESCRIPTORS);
    let each = (DESCRIPTORS - own).div_ceil(PROCESSES);
    let _crowd = Workload::start(&format!("crowd --processes {PROCESSES} --descriptors {each}"))?;
    let _descriptors = workloads::descriptors(own)?;
    let _load = Load::start(&Plan { duty: 0.05, ..Plan::default() })?;
    let mut cpu_ms: [Vec<f64>; BACKENDS.len()] = Default::default();
    for (backend, cpu_ms) in BACKENDS.into_iter().zip(&mut cpu_ms) {
        eprintln!("{rounds} snapshots of {PROCESSES} processes by {backend}");
        let mut source = SqpollOptions { threads: Threads::default(), ..options(backend) }.start(&Session::of_one())?;
        for _ in 0..rounds {
            thread::sleep(Duration::from_millis(50));
            let before_ns = thread_cpu_ns();
            let snapshot = source.snapshot()?;
            cpu_ms.push((thread_cpu_ns() - before_ns) as f64 / 1e6);
            ensure!(!snapshot.series.is_empty(), "the thread was not seen");
        }
    }
    Ok((cpu_ms, own))
}

fn report_crowd<'a>(section: Section<'a>, cpu_ms: &[Vec<f64>; 2], own: u32) -> Section<'a> {
    let columns =
        [column("median ms", Show::Median(1), "", |ms: &f64| *ms), column("max ms", Show::Max(1), "", |ms| *ms)];
    let rows = BACKENDS.iter().zip(cpu_ms).map(|(name, ms)| ((*name).to_owned(), ms.iter().collect()));
    section
        .figures([Figure::new("CPU time of one snapshot by bpf, the largest", max(&cpu_ms[0]), 2)
            .unit("ms")
            .at_most(100.0)])
        .values(&[("processes", &PROCESSES), ("descriptors", &DESCRIPTORS), ("own_descriptors", &own)])
        .add("crowd", grid("backend", &columns, rows))
}

const DEPTHS: [u32; 5] = [1, 4, 8, 16, 64];
/// Runs of each depth by each load, alternately: a shared disk's performance differs from second to second.
const FIO_ROUNDS: u32 = 21;
const RUNTIME: &str = "1s";

/// Figures of one sweep of a depth: utilization and share of time without a CPU in percent, and IOPS.
struct Sweep {
    utilisation: f64,
    starved: f64,
    iops: f64,
}

/// Measures sweeps with whylate's own load and with fio's, by depth.
fn fio(program: &Path, app_cpu: usize, sq_cpu: usize) -> Result<Vec<Rounds<Sweep>>> {
    // On a disk, not in memory: requests are direct I/O.
    let mut file = tempfile::NamedTempFile::new_in("/var/tmp")?;
    for _ in 0..256 {
        file.write_all(&[0x5a; 1 << 20])?;
    }
    file.as_file().sync_all()?;
    // fio inherits the affinity.
    pin_to(app_cpu)?;
    let sweeps = |depth: &u32| {
        let options = format!("sqpoll sweep --json --runtime {RUNTIME} --iodepth {depth} --sq-cpu {sq_cpu} --filename");
        in_rounds(&format!("beside fio, depth {depth}"), (FIO_ROUNDS, false), &["our own load", "fio"], |which| {
            let mut command = Command::new(program);
            let command = command.args(options.split(' ')).arg(file.path()).args([&[][..], &["--fio"]][which]);
            let line = child::json(command)?;
            let number = |value: &Value| value.as_f64().with_context(|| format!("incomplete: {line}"));
            Ok(Sweep {
                utilisation: number(&line["values"]["utilisation"])? * 100.0,
                starved: number(&line["values"]["starved"])? * 100.0,
                iops: number(&line["requests"])? * 1e9 / number(&line["duration_ns"])?,
            })
        })
    };
    let measured = DEPTHS.iter().map(sweeps).collect();
    let mut any = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| any.set(cpu));
    sched_setaffinity(None, &any)?;
    measured
}

fn report_fio<'a>(section: Section<'a>, measured: &[Rounds<Sweep>]) -> Section<'a> {
    // Of consecutive runs, so that the disk's performance is equal for both.
    let apart = |runs: &Rounds<Sweep>| {
        median(&runs.0.iter().map(|round| round[0].utilisation - round[1].utilisation).collect::<Vec<_>>())
    };
    let largest = max(&measured.iter().map(|runs| apart(runs).abs()).collect::<Vec<_>>());
    let what = "utilisation of our own load and of fio's, largest difference of a depth";
    let rows = DEPTHS.iter().zip(measured).map(|(depth, runs)| {
        let both = |digits, unit, figure: fn(&Sweep) -> f64| {
            [0, 1].map(|which| Show::Median(digits).cell(&runs.values(which, figure), unit)).join(" | ")
        };
        let utilisation = both(1, " %", |run| run.utilisation);
        let idle = both(1, " %", |run| 100.0 - run.utilisation);
        let (starved, iops) = (both(1, " %", |run| run.starved), both(0, "", |run| run.iops));
        format!("{depth} | {utilisation} | {:+.1} points | {idle} | {starved} | {iops}", apart(runs))
    });
    let heads = "iodepth | >utilisation, own load | >with fio | >difference | >idle, own load | >with fio | >starved, own load | >with fio | >IOPS, own load | >with fio";
    section.figures([Figure::new(what, largest, 2).unit("points").at_most(3.0)]).values(&[
        ("fio", &lines(heads, rows)),
        ("runtime", &RUNTIME),
        ("fio_rounds", &FIO_ROUNDS),
    ])
}

const KERNEL: &str = "6.12-cloud";
const TEST: &str = "kernel_sqpoll_precise";

/// Figures of one interval, in percent and percentage points.
struct Interval {
    truth: f64,
    reported: f64,
    hidden: f64,
}

/// Measurements of one duty, and the reasons of repeated tries.
#[derive(Default)]
struct VmDuty {
    samples: Vec<Interval>,
    tries: Vec<String>,
}

pub fn run_in_vm(arguments: &Arguments) -> Result<bool> {
    let program = test_program()?;
    let (program, intervals) = (program.to_string_lossy(), format!("WHYLATE_INTERVALS={INTERVALS}"));
    let before = ["--no-whylate", "--timeout", "900", "--with", &program, "--", "WHYLATE_EMULATED=1", &intervals];
    let script = [vm::KEEP_ENABLED, "exec \"$@\"\n"].concat();
    let text = vm::run(KERNEL, &before, &script, &[&program, "--nocapture"])?;
    let duties = duties(&text)?;
    ensure!(!duties.is_empty(), "it measured nothing: {text}");
    let largest = duties.values().flat_map(|duty| &duty.samples).map(Interval::off_at_most).fold(0.0, f64::max);
    let what = "working share, largest error of an interval with what may be hidden";
    let columns = [
        column("least work by the tracer", Show::Min(1), " %", |sample: &Interval| sample.truth),
        column("most", Show::Max(1), " %", |sample| sample.truth),
        column("mean error, points", Show::Mean(2), "", Interval::off),
        column("largest", Show::Max(2), "", Interval::off),
        column("with what may be hidden", Show::Max(2), "", Interval::off_at_most),
    ];
    let rows = duties.values().map(|duty| ((duty.tries.len() + 1).to_string(), duty.samples.iter().collect()));
    let section = Section::new(arguments, "sqpoll-vm")
        .figures([Figure::new(what, largest, 2).unit("points").at_most(1.0)])
        .values(&[("kernel", &KERNEL), ("intervals", &INTERVALS), ("table", &grid("tries", &columns, rows))]);
    let reasons = duties.values().flat_map(|duty| &duty.tries);
    reasons.fold(section, |section, reason| section.add("repeated", format!("Repeated: {reason}."))).publish()
}

/// Builds the test program, and returns its path.
fn test_program() -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--workspace", "--test", TEST, "--no-run", "--message-format=json"]);
    let text = String::from_utf8(child::run(cargo.stderr(Stdio::inherit()))?.stdout)?;
    let mut messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let built = messages.find(|message| message["target"]["name"] == TEST && message["executable"].is_string());
    Ok(PathBuf::from(built.context("cargo names no program")?["executable"].as_str().unwrap_or_default()))
}

/// Parses `duty 0.37: by functions 0.3052, reported 0.3038: off by -0.145 points; 61 calls, […], in total 0.313
/// points`.
fn duties(text: &str) -> Result<BTreeMap<String, VmDuty>> {
    let mut duties: BTreeMap<String, VmDuty> = BTreeMap::new();
    let mut last = String::new();
    for line in text.lines() {
        // A failed round is repeated (`in_rounds` in the test's `kernel/chance.rs`).
        if let Some(reason) = ["a round fails: ", "not judged, "].iter().find_map(|begin| line.strip_prefix(begin)) {
            let duty = duties.entry(last.clone()).or_default();
            duty.samples.clear();
            duty.tries.push(reason.to_owned());
            continue;
        }
        let Some((_, line)) = line.split_once("duty ") else { continue };
        let Some((duty, rest)) = line.split_once(": by functions ") else { continue };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let number = |word: Option<&&str>| -> Result<f64> {
            let word = word.with_context(|| format!("cannot read {line:?}"))?;
            Ok(word.trim_end_matches([',', ':', ';']).parse()?)
        };
        let hidden = number(words.len().checked_sub(2).and_then(|index| words.get(index)))?;
        let sample =
            Interval { truth: number(words.first())? * 100.0, reported: number(words.get(2))? * 100.0, hidden };
        duty.clone_into(&mut last);
        duties.entry(last.clone()).or_default().samples.push(sample);
    }
    Ok(duties)
}

impl Interval {
    fn off(&self) -> f64 {
        (self.reported - self.truth).abs()
    }

    fn off_at_most(&self) -> f64 {
        self.off() + self.hidden
    }
}

#[cfg(test)]
#[path = "../unit/sqpoll.rs"]
mod tests;
