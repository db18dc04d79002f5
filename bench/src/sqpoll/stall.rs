// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost for a ring's owner: how long a request waits until the submission thread takes it, while a watcher takes 50
//! snapshots per second of a ring with many unreaped completions.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use io_uring::{IoUring, opcode};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{Attached as _, Session, Threads};

use super::{Part, cpus};
use crate::figures::{Check, median_of};
use crate::kernel;
use crate::machine::pin_to;

const ENTRIES: u32 = 32_768;
/// Interval of snapshots, and of requests.
const SNAPSHOT_EVERY: Duration = Duration::from_millis(20);
const SUBMIT_EVERY: Duration = Duration::from_micros(200);
/// How long to spin before sleeping.
const SPIN: Duration = Duration::from_micros(50);
const RUN: Duration = Duration::from_secs(2);
const TIMEOUT: Duration = Duration::from_secs(5);
const WATCHERS: [&str; 3] = ["nobody", "bpf", "fdinfo"];
/// Limit relative to the unwatched figure, and added to that.
const LIMIT: f64 = 1.05;
const LIMIT_US: f64 = 1.0;

#[derive(Clone, Copy, Default)]
struct Sample {
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

pub fn measure(rounds: u32) -> Result<Part> {
    let (app_cpu, sq_cpu) = cpus()?;
    // A thread of its own, which may be real-time and pinned.
    let samples = thread::scope(|scope| {
        scope
            .spawn(|| all_rounds(app_cpu, sq_cpu, rounds))
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the load panicked")))
    })?;
    let figure = |which: usize, of: fn(&Sample) -> f64| median_of(&samples[which], of);
    let p99 = |which| figure(which, |sample| sample.p99_us);
    let what = "from submission to taken, p99 while bpf looks at 50 Hz (the limit is 105 % of nobody's and 1 us)";
    let checks = vec![Check::new(what, p99(1), "us", p99(0) * LIMIT + LIMIT_US)];
    let mut text = format!(
        "### A ring that is looked at\n\nA ring of {ENTRIES} entries with as many completions that nobody has reaped; a look each {SNAPSHOT_EVERY:?}. The time is \
         from when a request is in the queue to when the submission thread, which spins on a CPU of its own, has taken it. The application comes \
         before whoever looks, on the other CPU. Medians of {rounds} rounds of {RUN:?} each, in turn.\n\n\
         | who looks | p50 us | p99 us | max us |\n|---|--:|--:|--:|\n"
    );
    for (which, name) in WATCHERS.into_iter().enumerate() {
        let (p50, max) = (figure(which, |sample| sample.p50_us), figure(which, |sample| sample.max_us));
        text += &format!("| {name} | {p50:.2} | {:.2} | {max:.1} |\n", p99(which));
    }
    Ok(Part { checks, text })
}

fn all_rounds(app_cpu: u32, sq_cpu: u32, rounds: u32) -> Result<[Vec<Sample>; WATCHERS.len()]> {
    pin_to(app_cpu as usize)?;
    let mut builder = IoUring::builder();
    builder.setup_sqpoll(5_000).setup_sqpoll_cpu(sq_cpu);
    let mut ring: IoUring = builder.build(ENTRIES)?;
    for _ in 0..ENTRIES {
        push(&mut ring)?;
    }
    wait_until_taken(&mut ring)?;
    let mut samples: [Vec<Sample>; WATCHERS.len()] = Default::default();
    for number in 0..rounds as usize {
        eprintln!("round {} of {rounds}: a ring that is looked at", number + 1);
        for turn in 0..WATCHERS.len() {
            let which = (turn + number) % WATCHERS.len();
            samples[which].push(watched(&mut ring, app_cpu, WATCHERS[which])?);
        }
    }
    Ok(samples)
}

fn watched(ring: &mut IoUring, app_cpu: u32, watcher: &str) -> Result<Sample> {
    let (over, ready) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let outcome = take_snapshots(app_cpu, watcher, &over, &ready);
            ready.store(true, Ordering::Relaxed);
            outcome
        });
        while !ready.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        let outcome =
            scope.spawn(|| requests(ring)).join().unwrap_or_else(|_| Err(anyhow::anyhow!("the load panicked")));
        over.store(true, Ordering::Relaxed);
        looking.join().unwrap_or_else(|_| Err(anyhow::anyhow!("whoever looks panicked")))?;
        outcome
    })
}

fn take_snapshots(cpu: u32, watcher: &str, over: &AtomicBool, ready: &AtomicBool) -> Result<()> {
    pin_to(cpu as usize)?;
    let options = SqpollOptions {
        backend: Some(watcher.to_owned()),
        threads: Threads::of_process(std::process::id()),
        ..SqpollOptions::default()
    };
    let mut source = (watcher != WATCHERS[0]).then(|| options.start(&Session::of_one())).transpose()?;
    ready.store(true, Ordering::Relaxed);
    while !over.load(Ordering::Relaxed) {
        if let Some(source) = &mut source {
            source.snapshot()?;
        }
        thread::sleep(SNAPSHOT_EVERY);
    }
    Ok(())
}

/// Submits one request after another; each makes a completion, and one is reaped for it.
fn requests(ring: &mut IoUring) -> Result<Sample> {
    kernel::become_fifo(1).context("cannot come before others")?;
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
    Ok(Sample { p50_us: at(0.5), p99_us: at(0.99), max_us: taken_us.last().copied().unwrap_or(f64::NAN) })
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
        ensure!(elapsed < TIMEOUT, "the submission thread takes no requests");
        // The watcher may hold the ring's lock, and needs this CPU to release it.
        if elapsed > SPIN { thread::sleep(SPIN) } else { std::hint::spin_loop() }
    }
    Ok(())
}
