// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injected work items, compared with the kernel's own tracepoints in a tracefs instance.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use whylate_sources::AttachError;
use whylate_sources::inject::work::{HANDLER, MAX_AT_ONCE, Moment, Plan, Report, run};

const TRACEFS: &str = "/sys/kernel/tracing";
/// All tests queue items of the same handler: one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn plan(items: u64) -> Plan {
    Plan { items, at_once: MAX_AT_ONCE, delay: Duration::ZERO, busy_ns: 0, cpu: None, load: false }
}

/// `None`, and a line that says why, where the machine cannot run these tests.
fn turn() -> Option<MutexGuard<'static, ()>> {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let reason = match run(&plan(1), &AtomicBool::new(false)) {
        Err(error @ (AttachError::NotPermitted | AttachError::Unsupported(_))) => error.to_string(),
        _ if !Path::new(TRACEFS).join("instances").exists() => format!("no tracefs in {TRACEFS}"),
        _ => return Some(guard),
    };
    println!("skipped: {reason}");
    None
}

/// A tracefs instance of our own that records every work item.
struct Trace {
    folder: PathBuf,
}

impl Trace {
    fn start() -> Result<Self> {
        let folder = Path::new(TRACEFS).join(format!("instances/whylate-test-inject-{}", std::process::id()));
        fs::create_dir(&folder).context("cannot create a tracefs instance")?;
        let trace = Self { folder };
        for (file, value) in [
            ("buffer_size_kb", "16384"),
            ("trace_clock", "mono"),
            ("events/workqueue/workqueue_queue_work/enable", "1"),
            ("events/workqueue/workqueue_execute_start/enable", "1"),
        ] {
            fs::write(trace.folder.join(file), value).with_context(|| format!("cannot write {file}"))?;
        }
        Ok(trace)
    }

    /// Times in microseconds of the events of the injected handler: queued and started.
    fn finish(self) -> Result<(Vec<u64>, Vec<u64>)> {
        fs::write(self.folder.join("tracing_on"), "0")?;
        let text = fs::read_to_string(self.folder.join("trace"))?;
        let times = |event: &str| {
            let ours = |line: &&str| {
                line.contains(event) && line.split(' ').any(|word| word.trim_start_matches("function=") == HANDLER)
            };
            text.lines().filter(ours).filter_map(time_us).collect()
        };
        Ok((times(" workqueue_queue_work: "), times(" workqueue_execute_start: ")))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

/// The stamp of ` kworker/1:1-24536   [001] .....  4035.327833: workqueue_execute_start: …`
fn time_us(line: &str) -> Option<u64> {
    let word = line.split(' ').find(|word| word.ends_with(':') && word.contains('.'))?;
    let (seconds, fraction) = word.trim_end_matches(':').split_once('.')?;
    Some(seconds.parse::<u64>().ok()? * 1_000_000 + fraction.parse::<u64>().ok()?)
}

fn traced(plan: &Plan, stop: &AtomicBool) -> Result<(Report, Vec<u64>, Vec<u64>)> {
    let trace = Trace::start()?;
    let report = run(plan, stop)?;
    let (queued, started) = trace.finish()?;
    Ok((report, queued, started))
}

/// No event is outside of the times that the report states. The trace is rounded to the nearest microsecond.
fn assert_within(report: &Report, queued: &[u64], started: &[u64]) {
    let stated_us = |moment: Option<Moment>| moment.map_or(0, |moment| moment.monotonic_ns / 1000);
    assert!(queued.iter().all(|&us| us >= stated_us(report.first_queue)), "an item was queued earlier than reported");
    assert!(queued.iter().all(|&us| us <= stated_us(report.last_queue) + 1), "an item was queued later than reported");
    assert!(started.iter().all(|&us| us <= stated_us(report.last_end) + 1), "an item started later than reported");
}

#[test]
fn ten_thousand_items_run_ten_thousand_times() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    let (report, queued, started) = traced(&plan(10_000), &AtomicBool::new(false))?;
    assert_eq!((report.queued, report.executed, report.complete), (10_000, 10_000, true));
    assert_eq!((queued.len(), started.len()), (10_000, 10_000));
    assert_within(&report, &queued, &started);
    Ok(())
}

#[test]
fn items_that_are_used_again_are_not_lost() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    // More than exist at the same time, on a loaded machine.
    let (report, queued, started) = traced(&Plan { load: true, ..plan(50_000) }, &AtomicBool::new(false))?;
    assert_eq!((report.queued, report.executed, report.complete), (50_000, 50_000, true));
    assert_eq!((queued.len(), started.len()), (50_000, 50_000));
    assert_within(&report, &queued, &started);
    Ok(())
}

#[test]
fn a_busy_item_delays_those_behind_it() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    const BUSY_US: u64 = 5_000;
    let busy = Plan { busy_ns: BUSY_US * 1000, cpu: Some(0), ..plan(20) };
    // Other work on the machine can only make a wait longer, so the best of a few runs is the truth.
    let mut best_error_us = u64::MAX;
    for _ in 0..3 {
        let (report, queued, started) = traced(&busy, &AtomicBool::new(false))?;
        assert_eq!((report.cpu, report.at_once, queued.len(), started.len()), (0, 20, 20, 20));
        assert!(report.busy_total_ns >= 20 * busy.busy_ns);
        let waits = queued.iter().zip(&started).map(|(queued, started)| started - queued);
        let errors = waits.zip(0..).map(|(wait_us, place)| wait_us.abs_diff(place * BUSY_US));
        best_error_us = best_error_us.min(errors.max().unwrap_or(u64::MAX));
    }
    assert!(best_error_us < 1_000, "the waits are {best_error_us} us off");
    Ok(())
}

#[test]
fn told_to_stop_it_ends_soon_and_accounts_for_every_item() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    let stop = AtomicBool::new(false);
    let (report, queued, started) = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(500));
            stop.store(true, Ordering::Relaxed);
        });
        let began = Instant::now();
        let outcome = traced(&Plan { busy_ns: 50_000_000, ..plan(1_000) }, &stop);
        assert!(began.elapsed() < Duration::from_secs(3));
        outcome
    })?;
    assert!(!report.complete);
    assert_eq!(report.queued, report.executed);
    assert_eq!((queued.len() as u64, started.len() as u64), (report.queued, report.executed));
    Ok(())
}

#[test]
fn a_cpu_that_is_not_there_is_refused() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    let outcome = run(&Plan { cpu: Some(1_000_000), ..plan(1) }, &AtomicBool::new(false));
    let error = outcome.err().ok_or_else(|| io::Error::other("it ran"))?;
    assert!(error.to_string().starts_with("CPU 1000000 is offline or not ours to use"), "{error}");
    Ok(())
}
