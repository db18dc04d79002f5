// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares injected work items with the kernel's own tracepoints.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use whylate_sources::inject::Timestamp;
use whylate_sources::inject::work::{HANDLER, Plan, Report, run};

use support::machine::lock::{lock_machine_to_inject, plan};
use support::oracles::chance::{in_rounds, waited_for_a_cpu};
use support::oracles::trace::{Kind, Trace, times_us};

/// Workers of the first CPU, which other threads may preempt.
const WORKERS: &str = "kworker/0";

fn traced(plan: &Plan, stop: &AtomicBool) -> Result<(Report, Vec<u64>, Vec<u64>)> {
    let trace = Trace::start()?;
    let report = run(plan, stop)?;
    let (queued, started) = times_us(&trace.finish()?, HANDLER);
    Ok((report, queued, started))
}

/// Checks that no event is outside of the report's times. The trace is rounded to the nearest microsecond.
fn assert_within(report: &Report, queued: &[u64], started: &[u64]) {
    let stated_us = |time: Option<Timestamp>| time.map_or(0, |time| time.monotonic_ns / 1000);
    assert!(queued.iter().all(|&us| us >= stated_us(report.first_queue)), "an item was queued earlier than reported");
    assert!(queued.iter().all(|&us| us <= stated_us(report.last_queue) + 1), "an item was queued later than reported");
    assert!(started.iter().all(|&us| us <= stated_us(report.last_end) + 1), "an item started later than reported");
}

#[test]
fn ten_thousand_items_run_ten_thousand_times() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let (report, queued, started) = traced(&plan(10_000), &AtomicBool::new(false))?;
    assert_eq!((report.queued, report.executed, report.complete), (10_000, 10_000, true));
    assert_eq!((queued.len(), started.len()), (10_000, 10_000));
    assert_within(&report, &queued, &started);
    Ok(())
}

#[test]
fn reused_items_are_not_lost() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    // More items than exist at a time, on a loaded machine.
    let (report, queued, started) = traced(&Plan { load: true, ..plan(50_000) }, &AtomicBool::new(false))?;
    assert_eq!((report.queued, report.executed, report.complete), (50_000, 50_000, true));
    assert_eq!((queued.len(), started.len()), (50_000, 50_000));
    assert_within(&report, &queued, &started);
    Ok(())
}

#[test]
fn busy_item_delays_later_ones() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    const BUSY_US: u64 = 5_000;
    let busy = Plan { busy_ns: BUSY_US * 1000, cpu: Some(0), ..plan(20) };
    in_rounds(|| {
        let before = waited_for_a_cpu(WORKERS)?;
        let trace = Trace::start()?;
        let report = run(&busy, &AtomicBool::new(false))?;
        let events = trace.finish()?;
        let (queued, started) = times_us(&events, HANDLER);
        let after = waited_for_a_cpu(WORKERS)?;
        let workers: BTreeSet<u32> =
            events.iter().filter(|of| of.kind == Kind::Start && of.handler == HANDLER).map(|of| of.tid).collect();
        let of = |waited: &BTreeMap<u32, Duration>, tid| waited.get(&tid).copied().unwrap_or_default();
        let waited = workers.iter().map(|&tid| of(&after, tid).saturating_sub(of(&before, tid)));
        let waited_us = waited.sum::<Duration>().as_micros() as u64;
        assert_eq!((report.cpu, report.at_once, queued.len(), started.len()), (0, 20, 20, 20));
        assert!(report.busy_total_ns >= 20 * busy.busy_ns);
        let waits = queued.iter().zip(&started).map(|(queued, started)| started - queued);
        let mut worst_us = 0;
        for ((wait_us, index), started_us) in waits.zip(0..).zip(&started) {
            // However busy the machine is, an item cannot start before the earlier ones have ended.
            assert!(started_us + 1 >= started[0] + index * BUSY_US, "item {index} started too early");
            worst_us = worst_us.max(wait_us.abs_diff(index * BUSY_US));
        }
        println!("the waits are at most {worst_us} us off; their workers have waited for a CPU for {waited_us} us");
        ensure!(worst_us < 1_000 + waited_us, "the waits are {worst_us} us off, {waited_us} of them explained");
        Ok(())
    })
}

#[test]
fn stop_ends_soon_and_accounts_for_every_item() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let stop = AtomicBool::new(false);
    let trace = Trace::start()?;
    let (report, since_stop) = thread::scope(|scope| {
        let stopped = scope.spawn(|| {
            thread::sleep(Duration::from_millis(500));
            stop.store(true, Ordering::Relaxed);
            Instant::now()
        });
        let report = run(&Plan { busy_ns: 50_000_000, ..plan(1_000) }, &stop);
        let ended = Instant::now();
        report.map(|report| (report, ended.duration_since(stopped.join().expect("it does not panic"))))
    })?;
    let (queued, started) = times_us(&trace.finish()?, HANDLER);
    assert!(since_stop < Duration::from_secs(3), "it ends {since_stop:?} after the stop");
    assert!(!report.complete);
    assert_eq!(report.queued, report.executed);
    assert_eq!((queued.len() as u64, started.len() as u64), (report.queued, report.executed));
    Ok(())
}

#[test]
fn rejects_nonexistent_cpu() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let outcome = run(&Plan { cpu: Some(1_000_000), ..plan(1) }, &AtomicBool::new(false));
    let error = outcome.err().ok_or_else(|| io::Error::other("it ran"))?;
    assert!(error.to_string().starts_with("CPU 1000000 is offline or not ours to use"), "{error}");
    Ok(())
}
