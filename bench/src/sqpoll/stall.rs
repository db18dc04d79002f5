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

use super::cpus;
use crate::drivers::{Rounds, in_rounds};
use crate::kernel;
use crate::machine::pin_to;
use crate::results::Section;
use crate::table::{Figure, Show, column};

const ENTRIES: u32 = 32_768;
/// Interval of snapshots, and of requests.
const SNAPSHOT_EVERY: Duration = Duration::from_millis(20);
const SUBMIT_EVERY: Duration = Duration::from_micros(200);
/// How long to spin before sleeping.
const SPIN: Duration = Duration::from_micros(50);
const RUN: Duration = Duration::from_secs(2);
const TIMEOUT: Duration = Duration::from_secs(5);
const WATCHERS: [&str; 3] = ["nothing", "bpf", "fdinfo"];
/// Limit relative to the unwatched figure, and added to that.
const LIMIT: f64 = 1.05;
const LIMIT_US: f64 = 1.0;

#[derive(Clone, Copy, Default)]
pub struct Sample {
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

pub fn measure(rounds: u32) -> Result<Rounds<Sample>> {
    let (app_cpu, sq_cpu) = cpus()?;
    // A thread of its own, which may be real-time and pinned.
    in_thread(|| {
        pin_to(app_cpu as usize)?;
        let mut builder = IoUring::builder();
        builder.setup_sqpoll(5_000).setup_sqpoll_cpu(sq_cpu);
        let mut ring: IoUring = builder.build(ENTRIES)?;
        for _ in 0..ENTRIES {
            push(&mut ring)?;
        }
        wait_until_taken(&mut ring)?;
        in_rounds("a watched ring", (rounds, false), &WATCHERS, |which| watched(&mut ring, app_cpu, WATCHERS[which]))
    })
}

fn in_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|_| Err(anyhow::anyhow!("the load panicked"))))
}

pub fn report<'a>(section: Section<'a>, measured: &Rounds<Sample>) -> Section<'a> {
    let p99 = |which| measured.median(which, |sample| sample.p99_us);
    let what = "from submission to taken, p99 with 50 snapshots a second by bpf (the limit is 105 % of the unwatched p99, and 1 us)";
    let columns = [
        column("p50 us", Show::Median(2), "", |sample: &Sample| sample.p50_us),
        column("p99 us", Show::Median(2), "", |sample| sample.p99_us),
        column("max us", Show::Median(1), "", |sample| sample.max_us),
    ];
    section
        .figures([Figure::new(what, p99(1), 2).unit("us").at_most(p99(0) * LIMIT + LIMIT_US)])
        .text("### A ring that is watched")
        .text(&format!(
            "A ring of {ENTRIES} entries with as many unreaped completions; a snapshot each {SNAPSHOT_EVERY:?}. The time is \
             from when a request is in the queue to when the submission thread, which spins on a CPU of its own, has taken it. The application has \
             priority over the watcher, on the other CPU. Medians of {} rounds of {RUN:?} each, in turn.",
            measured.0.len()
        ))
        .grid("watcher", &columns, measured.rows(WATCHERS.map(str::to_owned)))
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
        let outcome = in_thread(|| requests(ring));
        over.store(true, Ordering::Relaxed);
        looking.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the watcher panicked")))?;
        outcome
    })
}

fn take_snapshots(cpu: u32, watcher: &str, over: &AtomicBool, ready: &AtomicBool) -> Result<()> {
    pin_to(cpu as usize)?;
    let options = SqpollOptions {
        backend: Some(watcher.to_owned()),
        threads: Threads::of(std::process::id()),
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
    kernel::become_fifo(1).context("cannot become a real-time thread")?;
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
