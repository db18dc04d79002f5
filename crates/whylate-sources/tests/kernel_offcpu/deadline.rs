// SPDX-License-Identifier: MIT OR Apache-2.0
//! A SCHED_DEADLINE thread that has used up its budget of a period, or has yielded the rest of it.
#![allow(unsafe_code)]

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use whylate_model::{Cause, CauseKind, LateEvent};
use whylate_sources::kernel::clock;
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::support::is_emulated;
use crate::support::machine::lock::lock_machine;
use crate::support::oracles::chance::{Unjudged, in_rounds};

const KIND: &str = "WHYLATE_DEADLINE";
/// CPU time per period that the thread may use, and the part that it uses before it yields the rest.
const BUDGET: Duration = Duration::from_millis(6);
const RUNS: Duration = Duration::from_millis(3);
const PERIOD: Duration = Duration::from_millis(20);
const LATE_NS: u64 = 8_000_000;
const WATCHED: Duration = Duration::from_secs(1);

/// `struct sched_attr` (include/uapi/linux/sched/types.h), first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

fn become_deadline_thread() -> std::io::Result<()> {
    const SCHED_DEADLINE: u32 = 6;
    let period_ns = PERIOD.as_nanos() as u64;
    let attributes = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: SCHED_DEADLINE,
        runtime_ns: BUDGET.as_nanos() as u64,
        deadline_ns: period_ns,
        period_ns,
        ..Attributes::default()
    };
    // SAFETY: the structure is as long as it says, and the call reads it only.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn deadline_process() {
    let Ok(kind) = std::env::var(KIND) else { return };
    if become_deadline_thread().is_err() {
        return;
    }
    loop {
        let began = Instant::now();
        while kind == "spins" || began.elapsed() < RUNS {
            std::hint::spin_loop();
        }
        std::thread::yield_now();
    }
}

/// The process, killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn check(kind: &str) -> Result<Option<()>> {
    let mut process = Running(
        Command::new(std::env::current_exe()?)
            .args(["--exact", "deadline::deadline_process", "--test-threads=1"])
            .env(KIND, kind)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?,
    );
    sleep(Duration::from_millis(200));
    if process.0.try_wait()?.is_some() {
        println!("skipped: no thread may have a deadline here");
        return Ok(None);
    }
    let threads = Threads::of_process(process.0.id());
    let mut source = OffcpuOptions { threads, explain_over_ns: Some(LATE_NS), ..OffcpuOptions::default() }
        .attach(&Session::of_one())?;
    let attached_ns = clock::monotonic_ns();
    sleep(WATCHED);
    let mut events: Vec<LateEvent> = Vec::new();
    source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
    // Attaching programs interrupts every CPU.
    events.retain(|event| event.at_ns.saturating_sub(event.latency_ns) > attached_ns);
    let periods = WATCHED.as_millis() as usize / PERIOD.as_millis() as usize;
    let are_few = events.len() * 2 <= periods;
    if are_few && is_emulated() {
        return Err(Unjudged(format!("{} waits in {periods} periods", events.len())).into());
    }
    ensure!(!are_few, "{} waits in {periods} periods", events.len());
    let (mut by_budget_ns, mut by_threads_ns) = (0, 0);
    for event in &events {
        let sum: u64 = event.causes.iter().map(|cause| cause.ns).sum();
        ensure!(sum == event.latency_ns, "{kind}: the causes of {} ns add up to {sum}", event.latency_ns);
        let who = format!("deadline of {}:{}", event.labels["thread"], event.labels["tid"]);
        let of_budget = |cause: &&Cause| cause.kind == CauseKind::Throttled && cause.who == who;
        let ns = event.causes.iter().find(of_budget).with_context(|| format!("no budget is blamed: {event:?}"))?.ns;
        by_budget_ns += ns;
        by_threads_ns +=
            event.causes.iter().filter(|cause| cause.kind == CauseKind::Thread).map(|cause| cause.ns).sum::<u64>();
        // An idle emulated CPU resumes a thread some milliseconds after its budget is refilled.
        ensure!(is_emulated() || ns + 2_000_000 > event.latency_ns, "{kind}: {event:?}");
    }
    let all_ns: u64 = events.iter().map(|event| event.latency_ns).sum();
    let summary = format!("{kind}: {by_budget_ns} of {all_ns} ns by the budget, {by_threads_ns} by other threads");
    ensure!(by_budget_ns * 2 > all_ns && by_threads_ns * 4 < by_budget_ns, "{summary}");
    println!("{summary}, in {} waits and {periods} periods", events.len());
    Ok(Some(()))
}

#[test]
fn deadline_budget_is_the_only_cause() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for kind in ["yields", "spins"] {
        in_rounds(|| check(kind).map(drop))?;
    }
    Ok(())
}
