// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the CPU time and the run-queue wait of threads that share a CPU with the scheduler's own count.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use whylate_model::{Snapshot, Stack, WaitClass};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::sleepers::{Sleepers, last_of};
use crate::support::is_emulated;
use crate::support::machine::lock::lock_machine;
use crate::support::oracles::chance::in_rounds;

const RATE_HZ: u32 = 499;

const SPAN: Duration = Duration::from_secs(2);

/// Total number of comparisons between the kernel and a sample.
const COMPARISONS: f64 = 10.0;

/// Seconds: the kernel updates a running thread's time at ticks.
const TICKS: f64 = 0.02;

/// Returns a thread's CPU time and its run-queue wait in seconds (Documentation/scheduler/sched-stats.rst).
fn schedstat(pid: u32, tid: &str) -> Result<[f64; 2]> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat"))?;
    let mut fields = text.split_whitespace().map(|field| field.parse::<f64>().map(|ns| ns / 1e9));
    Ok([fields.next().context("no time on CPUs")??, fields.next().context("no time of waiting")??])
}

/// Like [`schedstat`]; a thread that sleeps now and then is read while it sleeps, as an unfinished wait is not counted
/// yet.
fn counted(pid: u32, tid: &str) -> Result<[f64; 2]> {
    let switches = || -> Result<String> {
        let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"))?;
        let switches = status.lines().filter(|line| line.contains("State:") || line.contains("ctxt_switches:"));
        Ok(switches.collect::<Vec<_>>().join(" "))
    };
    for _ in 0..2000 {
        let before = switches()?;
        let counts = schedstat(pid, tid)?;
        if spins(pid, tid) || (before.contains("(sleeping)") && switches()? == before) {
            return Ok(counts);
        }
        sleep(Duration::from_millis(1));
    }
    bail!("thread {tid} does not sleep")
}

fn spins(pid: u32, tid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).is_ok_and(|name| name.trim_end() == "spins")
}

fn seconds(snapshot: &Snapshot, tid: &str, class: WaitClass) -> f64 {
    let is_it =
        |stack: &&Stack| stack.labels["tid"] == tid && stack.wait.as_ref().is_some_and(|wait| wait.class == class);
    snapshot.stacks.iter().filter(is_it).map(|stack| stack.weight_ns as f64 / 1e9).sum()
}

/// Returns the maximum error of a sampled time: by Bernstein's inequality, all comparisons together fail in at most one
/// of 10,000 runs if samples are independent. Their random distances are shorter than a thread's turn on a CPU, which
/// makes the sum more exact; the factor 1.1 allows for unequal distances. Missing samples give their time to others, at
/// worst all of it.
fn apart(truth: f64, span: f64, samples: f64) -> f64 {
    let log = (2.0 * COMPARISONS / 1e-4).ln();
    let share = (truth / span).clamp(0.0, 1.0);
    let missing = (span - samples / f64::from(RATE_HZ)).max(0.0);
    missing + 1.1 * span * ((2.0 * share * (1.0 - share) * log / samples).sqrt() + 2.0 * log / (3.0 * samples))
}

/// Each thread's time in a class by a backend, and by the kernel's count, in seconds.
struct Compared {
    span: f64,
    /// How much of the span, and of the time between the kernel's counts, may not be in the other.
    uncertain: f64,
    samples: f64,
    threads: Vec<(String, [f64; 2])>,
}

fn compared(sleepers: &Sleepers, backend: &str, rate_hz: u32, class: WaitClass) -> Result<Compared> {
    let options = OffcpuOptions {
        threads: Threads::of_process(sleepers.pid()),
        backend: Some(backend.to_owned()),
        rate_hz,
        by_thread: true,
        ..OffcpuOptions::default()
    };
    let mut source = options.attach(&Session::of_one())?;
    let threads: Vec<String> = sleepers.threads()?.into_iter().collect();
    let count = || -> Result<Vec<[f64; 2]>> { threads.iter().map(|tid| counted(sleepers.pid(), tid)).collect() };
    let began = Instant::now();
    let before = count()?;
    let started = Instant::now();
    sleep(SPAN);
    let ending = Instant::now();
    let after = count()?;
    let (window, longest) = ((ending - started).as_secs_f64(), began.elapsed().as_secs_f64());
    let snapshot = source.snapshot()?;
    let span = snapshot.duration_ns as f64 / 1e9;
    // Tracing takes no samples.
    let samples = match backend {
        "trace" => f64::INFINITY,
        _ => snapshot.series[0].values["walks"],
    };
    let both = |(index, tid): (usize, String)| {
        let [on_cpu, waited] = [0, 1].map(|field| after[index][field] - before[index][field]);
        let truth = match class {
            WaitClass::OnCpu => on_cpu,
            // The kernel counts a wait when it ends, which may be later for a thread that never sleeps.
            _ if spins(sleepers.pid(), &tid) => window - on_cpu,
            _ => waited,
        };
        let reported_s = seconds(&snapshot, &tid, class);
        println!(
            "{backend} {tid} {class:?}: reported {reported_s:.3}, true {truth:.3} of {span:.3} s in {samples} samples"
        );
        (tid, [reported_s, truth])
    };
    Ok(Compared {
        span,
        uncertain: (span - window).max(longest - window),
        samples,
        threads: threads.into_iter().enumerate().map(both).collect(),
    })
}

/// Runs `work` on these CPUs; threads that are created by it keep them.
fn on<T>(cpus: &CpuSet, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = sched_getaffinity(None)?;
    sched_setaffinity(None, cpus)?;
    let outcome = work();
    sched_setaffinity(None, &before)?;
    outcome
}

#[test]
fn run_queue_wait_matches_schedstat() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let cpus = sched_getaffinity(None)?;
    if is_emulated() || cpus.count() < 2 {
        println!("skipped: it needs two CPUs that are not emulated");
        return Ok(());
    }
    let sleepers = Sleepers::start("crowded", 2)?;
    // A sampler that waits for the same CPU would sample just after one of them was preempted.
    let mut others = cpus;
    (0..CpuSet::MAX_CPU)
        .filter(|&cpu| last_of(&cpus).is_ok_and(|last| last.is_set(cpu)))
        .for_each(|cpu| others.unset(cpu));
    for backend in ["sample", "trace"] {
        // The kernel may count stolen time as neither running nor waiting.
        in_rounds(|| {
            let Compared { span, uncertain, samples, threads } =
                on(&others, || compared(&sleepers, backend, RATE_HZ, WaitClass::Cpu))?;
            for (tid, [reported_s, truth]) in threads {
                let sampled = if samples.is_finite() { apart(truth, span, samples) } else { 0.0 };
                let apart = TICKS + uncertain + sampled;
                ensure!(
                    (reported_s - truth).abs() <= apart,
                    "{backend}: thread {tid}: {reported_s:.3} s, and not {truth:.3} +- {apart:.3}"
                );
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn thread_preempted_by_sampler_counts_as_running() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU stops at any time");
        return Ok(());
    }
    let sleepers = Sleepers::start("crowded", 1)?;
    let last = last_of(&sched_getaffinity(None)?)?;
    let Compared { span, samples, threads, .. } = on(&last, || compared(&sleepers, "sample", 97, WaitClass::OnCpu))?;
    // Without the correction no thread is ever seen on the sampler's own CPU. If a busy machine lets the thread run at
    // few samples, the check is void: of at least twenty expected, less than two would be seen once in ten million
    // runs.
    for (tid, [reported_s, truth]) in threads.into_iter().filter(|(_, [_, truth])| truth / span * samples >= 20.0) {
        ensure!(reported_s > truth / 20.0, "thread {tid} ran for {truth:.3} s, and {reported_s:.3} s are reported");
    }
    Ok(())
}
