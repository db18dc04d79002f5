// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that share a CPU: how long each of them had it and waited for it, beside the scheduler's own count.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use whylate_model::{Snapshot, Stack, WaitClass};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::kernel::is_emulated;
use crate::kernel::turn::turn_to_measure;
use crate::sleepers::{Sleepers, last_of};

const RATE_HZ: u32 = 499;

const SPAN: Duration = Duration::from_secs(2);

/// How many times in all the kernel and a sample are compared.
const COMPARISONS: f64 = 10.0;

/// The kernel adds up the time of a thread that runs at its ticks.
const TICKS: f64 = 0.02;

/// The time of a thread that had a CPU, and that waited for one (Documentation/scheduler/sched-stats.rst).
fn schedstat(pid: u32, tid: &str) -> Result<[f64; 2]> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat"))?;
    let mut fields = text.split_whitespace().map(|field| field.parse::<f64>().map(|ns| ns / 1e9));
    Ok([fields.next().context("no time on CPUs")??, fields.next().context("no time of waiting")??])
}

/// The same, of a thread that sleeps now and then while it sleeps: a wait that goes on is not counted yet.
fn counted(pid: u32, tid: &str) -> Result<[f64; 2]> {
    let switches = || -> Result<String> {
        let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"))?;
        let told = status.lines().filter(|line| line.contains("State:") || line.contains("ctxt_switches:"));
        Ok(told.collect::<Vec<_>>().join(" "))
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

/// How far a sampled time may be from the true one: by Bernstein's inequality, all comparisons together fail once in
/// 10,000 runs at most where looks are independent. Their random distances are below a thread's turn on a CPU: the sum
/// gets more exact; the tenth is for distances that differ. Missing looks leave their time to others, at worst all.
fn apart(truth: f64, span: f64, looks: f64) -> f64 {
    let log = (2.0 * COMPARISONS / 1e-4).ln();
    let share = (truth / span).clamp(0.0, 1.0);
    let missing = (span - looks / f64::from(RATE_HZ)).max(0.0);
    missing + 1.1 * span * ((2.0 * share * (1.0 - share) * log / looks).sqrt() + 2.0 * log / (3.0 * looks))
}

/// What a backend tells of each thread in a class, and the kernel's count of the same time, both in seconds.
struct Compared {
    span: f64,
    /// How much of it, and of the time between the kernel's counts, may not be in the other.
    uncertain: f64,
    looks: f64,
    threads: Vec<(String, [f64; 2])>,
}

fn compared(sleepers: &Sleepers, backend: &str, rate_hz: u32, class: WaitClass) -> Result<Compared> {
    let options = OffcpuOptions {
        threads: Threads::of(sleepers.pid()),
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
    let begun = Instant::now();
    sleep(SPAN);
    let ending = Instant::now();
    let after = count()?;
    let (window, longest) = ((ending - begun).as_secs_f64(), began.elapsed().as_secs_f64());
    let snapshot = source.snapshot()?;
    let span = snapshot.duration_ns as f64 / 1e9;
    // Where switches are traced, nothing is sampled.
    let looks = match backend {
        "trace" => f64::INFINITY,
        _ => snapshot.series[0].values["walks"],
    };
    let both = |(index, tid): (usize, String)| {
        let [on_cpu, waited] = [0, 1].map(|field| after[index][field] - before[index][field]);
        let truth = match class {
            WaitClass::OnCpu => on_cpu,
            // The kernel counts a wait when it ends, which of those that never sleep may be later.
            _ if spins(sleepers.pid(), &tid) => window - on_cpu,
            _ => waited,
        };
        let told = seconds(&snapshot, &tid, class);
        println!("{backend} {tid} {class:?}: told {told:.3}, true {truth:.3} of {span:.3} s in {looks} looks");
        (tid, [told, truth])
    };
    Ok(Compared {
        span,
        uncertain: (span - window).max(longest - window),
        looks,
        threads: threads.into_iter().enumerate().map(both).collect(),
    })
}

/// Does it on these CPUs; threads that are born meanwhile stay there.
fn on<T>(cpus: &CpuSet, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = sched_getaffinity(None)?;
    sched_setaffinity(None, cpus)?;
    let outcome = work();
    sched_setaffinity(None, &before)?;
    outcome
}

#[test]
fn waiting_for_a_cpu_is_as_long_as_the_kernel_counts() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let cpus = sched_getaffinity(None)?;
    if is_emulated() || cpus.count() < 2 {
        println!("skipped: it needs two CPUs that are not emulated");
        return Ok(());
    }
    let sleepers = Sleepers::start("crowded", 2)?;
    // A sampler that waits for the same CPU would look when one of them has just lost it.
    let mut others = cpus;
    (0..CpuSet::MAX_CPU)
        .filter(|&cpu| last_of(&cpus).is_ok_and(|last| last.is_set(cpu)))
        .for_each(|cpu| others.unset(cpu));
    for backend in ["sample", "trace"] {
        let Compared { span, uncertain, looks, threads } =
            on(&others, || compared(&sleepers, backend, RATE_HZ, WaitClass::Cpu))?;
        for (tid, [told, truth]) in threads {
            let sampled = if looks.is_finite() { apart(truth, span, looks) } else { 0.0 };
            let apart = TICKS + uncertain + sampled;
            ensure!(
                (told - truth).abs() <= apart,
                "{backend}: thread {tid}: {told:.3} s, and not {truth:.3} +- {apart:.3}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_thread_that_gives_way_to_the_sampler_has_its_cpu() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU stops at any time");
        return Ok(());
    }
    let sleepers = Sleepers::start("crowded", 1)?;
    let last = last_of(&sched_getaffinity(None)?)?;
    let Compared { span, looks, threads, .. } = on(&last, || compared(&sleepers, "sample", 97, WaitClass::OnCpu))?;
    // Without it none is ever seen on the sampler's own CPU. Where a busy machine gives the thread its CPU at few
    // looks, that tells nothing: of twenty expected at least, less than two would be seen once in ten million runs.
    for (tid, [told, truth]) in threads.into_iter().filter(|(_, [_, truth])| truth / span * looks >= 20.0) {
        ensure!(told > truth / 20.0, "thread {tid} had its CPU for {truth:.3} s, and {told:.3} s are told");
    }
    Ok(())
}
