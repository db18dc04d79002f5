// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate offcpu` per thread and switch, compared with other means, and its time to the flame graph.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use libbpf_rs::{Iter, Link};
use whylate_model::Snapshot;
use whylate_sources::kernel::clock::{process_cpu_ns, thread_cpu_ns};
use whylate_sources::kernel::symbols::KernelSymbols;
use whylate_sources::offcpu::{AttachedOffcpu, Choice, OffcpuOptions, Often};
use whylate_sources::{Attached, Measuring, Session, Threads};

use crate::child::Tool;
use crate::drivers::{Slowdown, slowdowns};
use crate::loads::Load;
use crate::results::{self, Section};
use crate::subject::{Ready, Subject};
use crate::table::{Figure, Show, column, grid, median_of};
use crate::workloads::{Sleepers, Workload};
use crate::{machine, programs};

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// Only one part of it; each has a section of its own.
    #[arg(long, value_enum)]
    part: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The cost of visiting a thread.
    Walks,
    /// The time to a flame graph, and to the names of addresses.
    Names,
    /// The cost of watched switches.
    Switches,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let Some(program) = arguments.results.prepare("bench-offcpu", &[])? else { return Ok(true) };
    let mut are_within = true;
    for &part in Part::value_variants() {
        if arguments.part.is_none_or(|wanted| wanted == part) {
            are_within &= match part {
                Part::Walks => walks(&arguments.results)?,
                Part::Names => names(&arguments.results, &program)?,
                Part::Switches => switches(&arguments.results, &program)?,
            };
        }
    }
    Ok(are_within)
}

/// Numbers of threads of the process, in addition to the machine's.
const THREADS: [u32; 4] = [100, 1_000, 10_000, 30_000];
/// A walk over fewer threads takes less than a millisecond, so one interrupt matters: the rounds are multiplied.
const MANY: u32 = 1_000;
const ROUNDS_OF_FEW: u32 = 4;
/// Depth of the process's own functions: 12 user frames together with those that start a thread.
const DESCENTS: u32 = 8;
/// Call sites with stacks of equal shape, so that a thread's stack differs from the previous thread's.
const CALL_SITES: u32 = 16;
/// Maximum number of tries, as a walk of its own may come in between, and other threads run.
const MAX_TRIES: usize = 50;
/// Threads that are sampled at the usual rate, and for how long.
const STEADY_THREADS: u32 = 10_000;
const STEADY: Duration = Duration::from_secs(5);

/// CPU time per thread and walk, in nanoseconds.
struct Cost {
    threads: u64,
    unchanged_ns: f64,
    changed_ns: f64,
    /// Part of `changed_ns` for the user stack.
    user_stack_ns: f64,
    user_frames: f64,
    plain_ns: f64,
    proc_ns: f64,
}

fn walks(arguments: &results::Arguments) -> Result<bool> {
    let costs = THREADS.iter().map(|&threads| costs(threads, arguments.rounds)).collect::<Result<Vec<_>>>()?;
    let mut figures = Vec::new();
    for samples in &costs {
        let (threads, frames) = (samples[0].threads, samples[0].user_frames);
        let not_run = format!("a thread that has not run, {threads} threads (ns)");
        let as_part = format!("a thread that has not run, as a part of /proc/PID/task/TID/stack, {threads} threads");
        let stack = format!("a user stack of {frames:.0} frames, {threads} threads (ns)");
        let part = median_of(samples, |cost| cost.unchanged_ns) / median_of(samples, |cost| cost.proc_ns);
        figures.push(Figure::median(not_run, 0, samples, |cost| cost.unchanged_ns).at_most(400.0));
        figures.push(Figure::new(as_part, part, 3).at_most(1.0 / 30.0));
        figures.push(Figure::median(stack, 0, samples, |cost| cost.user_stack_ns).at_most(2_000.0));
    }
    figures.extend(steady()?);
    let columns = [
        column("unchanged", Show::Median(0), "", |cost: &Cost| cost.unchanged_ns),
        column("changed", Show::Median(0), "", |cost| cost.changed_ns),
        column("of that, user stack", Show::Median(0), "", |cost| cost.user_stack_ns),
        column("plain iterator", Show::Median(0), "", |cost| cost.plain_ns),
        column("/proc/PID/task/TID/stack", Show::Median(0), "", |cost| cost.proc_ns),
        column("unchanged is cheaper by", Show::Median(0), " x", |cost| cost.proc_ns / cost.unchanged_ns),
    ];
    let rows = costs.iter().map(|samples| (samples[0].threads.to_string(), samples.iter().collect()));
    Section::new(arguments, "offcpu-walks")
        .figures(figures)
        .values(&[("call_sites", &CALL_SITES), ("table", &grid("threads", &columns, rows))])
        .publish()
}

fn costs(threads: u32, rounds: u32) -> Result<Vec<Cost>> {
    let mut sleepers = Sleepers::start(threads, DESCENTS, CALL_SITES)?;
    let plain = programs::attach_to_threads().context("cannot attach the plain iterator")?;
    let mut all = attach(None, true)?;
    let mut whole = attach(Some(sleepers.pid()), true)?;
    let mut kernel_only = attach(Some(sleepers.pid()), false)?;
    all.snapshot()?;
    kernel_only.snapshot()?;
    let (user_frames, seen) = sleeping_stacks(&whole.snapshot()?, sleepers.pid());
    ensure!(seen > 0, "the threads were not seen");
    let rounds = rounds * if threads < MANY { ROUNDS_OF_FEW } else { 1 };
    let cost = |_| {
        let unchanged_ns = unchanged_ns(&mut all)?;
        let changed_ns = changed_ns(&mut whole, &mut sleepers, threads, unchanged_ns)?;
        let kernel_ns = self::changed_ns(&mut kernel_only, &mut sleepers, threads, unchanged_ns)?;
        Ok(Cost {
            threads: all.met().threads,
            unchanged_ns,
            changed_ns,
            user_stack_ns: changed_ns - kernel_ns,
            user_frames,
            plain_ns: plain_ns(&plain)?,
            proc_ns: proc_ns(sleepers.pid())?,
        })
    };
    (0..rounds).map(cost).collect()
}

fn attach(process: Option<u32>, user_stacks: bool) -> Result<Measuring<AttachedOffcpu>> {
    // Its own periodic walks are not counted, and are rare enough not to disturb.
    let threads = Threads { process, ..Threads::default() };
    let options = OffcpuOptions { rate_hz: 1, threads, user_stacks, ..OffcpuOptions::default() };
    options.start(&Session::of_one()).context("cannot attach offcpu")
}

/// Measures a walk in which hardly any thread has run.
fn unchanged_ns(source: &mut AttachedOffcpu) -> Result<f64> {
    for _ in 0..MAX_TRIES {
        // The first one covers what has run in between.
        source.snapshot()?;
        source.snapshot()?;
        let met = source.met();
        if met.changed * 100 < met.threads {
            return Ok(met.cpu_ns as f64 / met.threads as f64);
        }
    }
    bail!("too many other threads run on this machine");
}

/// Returns the cost of a thread that has run, from a walk in which all threads of the process have; the cost of the
/// process's other threads is subtracted. Threads of other processes are excluded: their stacks have other depths, and
/// a new call site needs a second pass, which matters with few threads.
fn changed_ns(source: &mut AttachedOffcpu, sleepers: &mut Workload, threads: u32, unchanged_ns: f64) -> Result<f64> {
    for _ in 0..MAX_TRIES {
        source.snapshot()?;
        sleepers.repeat()?;
        source.snapshot()?;
        let met = source.met();
        if met.changed >= threads.into() {
            let others_ns = unchanged_ns * (met.threads - met.changed) as f64;
            return Ok((met.cpu_ns as f64 - others_ns) / met.changed as f64);
        }
    }
    bail!("another walk always came in between")
}

/// Returns the mean number of user frames of the process's sleeping threads, and the number of these threads.
fn sleeping_stacks(snapshot: &Snapshot, pid: u32) -> (f64, u64) {
    let pid = pid.to_string();
    let stacks = snapshot.stacks.iter().filter(|stack| stack.labels.get("pid") == Some(&pid));
    // Not of the process's first thread.
    let stacks = stacks.filter(|stack| stack.user.iter().any(|frame| frame.contains("workloads::sleep")));
    let frames: Vec<f64> = stacks.clone().map(|stack| stack.user.len() as f64).collect();
    (frames.iter().sum::<f64>() / frames.len() as f64, stacks.map(|stack| stack.age.count()).sum())
}

fn plain_ns(link: &Link) -> Result<f64> {
    // It visits all threads of the machine.
    let threads = Choice::look(Often::RateHz(1)).context("cannot count threads")?.threads;
    let began_ns = thread_cpu_ns();
    let mut iterator = Iter::new(link)?;
    while iterator.read(&mut [0; 64])? > 0 {}
    Ok((thread_cpu_ns() - began_ns) as f64 / threads as f64)
}

fn proc_ns(pid: u32) -> Result<f64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?;
    let paths = tasks.map(|entry| Ok(entry?.path().join("stack"))).collect::<Result<Vec<_>>>()?;
    let mut bytes = vec![0; 64 << 10];
    let began_ns = thread_cpu_ns();
    for path in &paths {
        let _ = File::open(path)?.read(&mut bytes)?;
    }
    Ok((thread_cpu_ns() - began_ns) as f64 / paths.len() as f64)
}

/// Measures all CPU time of this process while it samples: nothing else runs in it.
fn steady() -> Result<[Figure; 3]> {
    let sleepers = Sleepers::start(STEADY_THREADS, DESCENTS, 1)?;
    let mut source = OffcpuOptions::default().start(&Session::of_one()).context("cannot attach offcpu")?;
    source.snapshot()?;
    let began_ns = process_cpu_ns();
    thread::sleep(STEADY);
    let cpu_percent = (process_cpu_ns() - began_ns) as f64 / STEADY.as_nanos() as f64 * 100.0;
    let snapshot = source.snapshot()?;
    let (_, seen) = sleeping_stacks(&snapshot, sleepers.pid());
    let (unseen, lost) = (f64::from(STEADY_THREADS) - seen as f64, snapshot.lost.values().sum::<u64>() as f64);
    Ok([
        Figure::new(format!("{STEADY_THREADS} sleeping threads at 9 Hz (% of a CPU)"), cpu_percent, 2).at_most(5.0),
        Figure::new("threads of those that are not in the result", unseen, 0).at_most(0.0),
        Figure::new("lost samples of those", lost, 0).at_most(0.0),
    ])
}

const GRAPH_THREADS: u32 = 10_000;
const GRAPH_CALL_SITES: u32 = 500;
/// Bits of a number below `GRAPH_CALL_SITES`.
const GRAPH_DESCENTS: u32 = 9;
/// Long enough to walk over all threads.
const SAMPLING: Duration = Duration::from_millis(1500);
const ADDRESSES: usize = 100_000;

fn names(arguments: &results::Arguments, program: &Path) -> Result<bool> {
    let names_ms = names_ms()?;
    let graphs = (0..arguments.rounds).map(|_| first_graph_ms(program)).collect::<Result<Vec<_>>>()?;
    let graph = format!("Ctrl-C to the flame graph of {GRAPH_THREADS} threads at {GRAPH_CALL_SITES} call sites (ms)");
    Section::new(arguments, "offcpu-names")
        .figures([
            Figure::median(graph, 0, &graphs, |ms| *ms).at_most(300.0),
            Figure::new(format!("names of {ADDRESSES} kernel addresses (ms)"), names_ms, 0).at_most(500.0),
        ])
        .publish()
}

/// Returns the milliseconds from SIGINT to the end of `whylate offcpu -o x.svg`: the last walk, symbolization and the
/// graph.
fn first_graph_ms(whylate: &Path) -> Result<f64> {
    let _sleepers = Sleepers::start(GRAPH_THREADS, GRAPH_DESCENTS, GRAPH_CALL_SITES)?;
    let directory = tempfile::tempdir()?;
    let svg = directory.path().join("first.svg");
    let tool = Tool::start(whylate, &["offcpu", "-o", &svg.to_string_lossy()])?;
    thread::sleep(SAMPLING);
    let began = Instant::now();
    tool.end()?;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let drawn = fs::read_to_string(&svg).context("it wrote no flame graph")?;
    ensure!(drawn.contains("descend") || drawn.contains("::left"), "the threads are not in the flame graph");
    Ok(ms)
}

/// Returns the milliseconds to symbolize [`ADDRESSES`] in as many functions as possible, without a cache.
fn names_ms() -> Result<f64> {
    let symbols = fs::read_to_string("/proc/kallsyms")?;
    let function = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        matches!(words.next()?, "t" | "T").then_some(address)
    };
    let functions: BTreeSet<u64> = symbols.lines().filter_map(function).collect();
    ensure!(functions.len() > 10_000, "the kernel does not show the addresses of its functions");
    // Within functions, as return addresses are, and several per function if there are fewer functions than addresses.
    let wanted: BTreeSet<u64> =
        (1..).flat_map(|offset| functions.iter().map(move |at| at + offset)).take(ADDRESSES).collect();
    let mut names = KernelSymbols::default();
    let began = Instant::now();
    names.look_up_all(&wanted);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let unnamed = wanted.iter().filter(|&&at| names.name(at).starts_with("0x")).count();
    ensure!(unnamed * 100 < ADDRESSES, "{unnamed} addresses have no name");
    Ok(ms)
}

/// Measures the cost of watched switches, unless there is no load or no offcputime.
fn switches(arguments: &results::Arguments, program: &Path) -> Result<bool> {
    let tools = [("perf", "no perf: no load to watch"), ("offcputime", "no offcputime: nothing to compare with")];
    if machine::is_skipped(&tools) {
        return Ok(true);
    }
    let whylate = program.to_string_lossy();
    let ours = |name, options: &[&str]| {
        Subject::new(name, "", &[&[&*whylate, "offcpu", "--backend"], options].concat(), Ready::Programs(1))
    };
    let subjects = [
        ours("`whylate offcpu --backend sample`", &["sample"]),
        ours("`whylate offcpu --backend trace`", &["trace"]),
        // Takes the waker's stack in addition to the wakee's; offcputime has nothing like it.
        ours("`whylate offcpu --backend trace --wakers`", &["trace", "--wakers"]),
        Subject::offcputime(),
    ];
    let (load, theirs) = (Load::pipe(), subjects.len() - 1);
    let measured = slowdowns(&load, &subjects, arguments.rounds)?;
    let noise: Vec<f64> = measured.all().map(Slowdown::noise_percent).collect();
    let sampled = measured.median(0, Slowdown::cpu_percent);
    let [traced_ns, theirs_ns] = [1, theirs].map(|which| measured.median(which, Slowdown::added_ns_per_switch));
    let columns = [
        column("slowdown, elapsed", Show::Median(1), " %", Slowdown::percent),
        column("slowdown, CPU time", Show::Median(1), " %", Slowdown::cpu_percent),
        column("added CPU ns a switch", Show::Median(0), "", Slowdown::added_ns_per_switch),
    ];
    let added = "added to a switch by `trace` (ns; the limit is 70 % of offcputime's)";
    Section::new(arguments, "offcpu-switches")
        .figures([
            Figure::new("slowdown of the pipe by `sample` (%)", sampled, 2).at_most(3.0),
            Figure::new(added, traced_ns, 0).at_most(0.7 * theirs_ns),
        ])
        .values(&[("load", &load.name), ("noise", &Show::Median(1).cell(&noise, " %"))])
        .add("table", grid("subject", &columns, measured.rows(subjects.iter().map(Subject::name_only))))
        .publish()
}
