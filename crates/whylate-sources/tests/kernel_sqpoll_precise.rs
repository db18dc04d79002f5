// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares `--precise` with the kernel's function_graph tracer, which records the functions in which a submission
//! thread works. An application on an emulated CPU sees completions too late; the tracer's timestamps are the thread's
//! own.

mod support;

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use support::machine::cpus::TestCpus;
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::in_rounds;
use support::oracles::function_graph::{Calls, FunctionTrace};
use support::workloads::paced_ring::Paced;
use whylate_model::sqpoll::is_thread;
use whylate_sources::kernel::clock::monotonic_ns;
use whylate_sources::sqpoll::{AttachedSqpoll, SqpollOptions};
use whylate_sources::{AttachError, Attached as _, Session, Threads};

const DUTIES: [f64; 4] = [0.01, 0.10, 0.37, 0.99];
const INTERVAL: Duration = Duration::from_secs(1);
/// Returns the period of the load: long enough that one percent is a few requests, also if they take a hundred times as
/// long. Longer periods have fewer calls, and each call may hide something; but one period's requests have to fit into
/// the ring.
fn period_of(duty: f64) -> Duration {
    Duration::from_millis(if duty < 0.5 { 100 } else { 50 })
}
/// Maximum number of loads to approach the duty.
const MAX_TRIES: u32 = 5;
/// Maximum error of a share of work, as a share of the time.
const MAX_ERROR: f64 = 0.01;
/// Functions that submit requests and complete them.
const WORK: [&str; 3] = ["io_submit_sqes", "io_do_iopoll", "io_handle_tw_list"];

/// Returns the number of intervals per duty: more by request, for figures to publish.
fn intervals() -> Result<usize> {
    match std::env::var("WHYLATE_INTERVALS") {
        Ok(text) => text.parse().context("WHYLATE_INTERVALS is a number"),
        Err(_) => Ok(3),
    }
}

/// The tool and the tracer hook the same functions, one within the other. The outer one counts the inner one's overhead
/// as work in each call, which is no longer than the shortest calls are. With that share of an interval added to the
/// difference, neither order can hide an error of the tool.
#[test]
fn precise_work_share_matches_function_graph() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let options = SqpollOptions {
        backend: Some("bpf".to_owned()),
        threads: Threads::of_process(std::process::id()),
        precise: true,
        ..SqpollOptions::default()
    };
    for duty in DUTIES {
        // The host may stop an emulated CPU between the two.
        let mut is_possible = true;
        in_rounds(|| {
            let trace = match FunctionTrace::start(&WORK)? {
                Ok(trace) => trace,
                Err(reason) => {
                    println!("skipped: {reason}");
                    is_possible = false;
                    return Ok(());
                }
            };
            let mut source = match patching(|| options.start(&Session::of_one())) {
                Err(AttachError::Unsupported(reason)) => {
                    println!("skipped: {reason}");
                    is_possible = false;
                    return Ok(());
                }
                source => source?,
            };
            ensure!(source.way() == "functions", "work is measured by {}", source.way());
            let outcome = measure(duty, test_cpus, &mut source, &trace);
            // After the load has ended, as detaching would wait for a thread that spins.
            patching(|| drop(source));
            drop(trace);
            outcome
        })?;
        if !is_possible {
            break;
        }
    }
    Ok(())
}

fn measure(duty: f64, test_cpus: TestCpus, source: &mut AttachedSqpoll, trace: &FunctionTrace) -> Result<()> {
    let (load, short_ns) = load_of(duty, test_cpus, trace)?;
    let (intervals, tid) = (intervals()?, load.tid());
    trace.take(tid)?;
    // Calls across the start or the end of the trace are not in it.
    thread::sleep(INTERVAL / 2);
    let mut snapshots = vec![TimedSnapshot::take(source, tid)?];
    while snapshots.len() <= intervals {
        thread::sleep(INTERVAL);
        snapshots.push(TimedSnapshot::take(source, tid)?);
    }
    thread::sleep(INTERVAL / 2);
    compare(duty, &snapshots, &trace.take(tid)?, short_ns)
}

/// Starts a load with a thread that is in the functions for that share of the time; also returns the duration of a call
/// without work.
fn load_of(duty: f64, test_cpus: TestCpus, trace: &FunctionTrace) -> Result<(Paced, u64)> {
    let period = period_of(duty);
    let mut requests = 5;
    let mut short_ns = None;
    for attempt in 1.. {
        let load = Paced::start(requests, period, test_cpus.tool, test_cpus.disturbed)?;
        thread::sleep(INTERVAL / 4);
        trace.take(load.tid())?;
        let began_ns = monotonic_ns();
        thread::sleep(INTERVAL);
        let ended_ns = monotonic_ns();
        let calls = trace.take(load.tid())?;
        // Half of the first load's calls have no work. Later ones may merge with earlier ones.
        let short_ns = *short_ns.get_or_insert(calls.quarter_ns().context("the tracer saw no call")?);
        let reached = calls.busy_between(began_ns, ended_ns) as f64 / (ended_ns - began_ns) as f64;
        println!("duty {duty}: {requests} requests each {period:?} make {reached:.4}");
        // If durations vary it comes no nearer; the truth is what was done.
        if is_near(reached, duty) || attempt == MAX_TRIES {
            return Ok((load, short_ns));
        }
        ensure!(reached > 0.0, "the load does nothing");
        requests = (requests as f64 * duty / reached).round().max(1.0) as u64;
    }
    bail!("there was no load")
}

/// Tolerates that other processes, and the host of an emulator, make requests slower at times.
fn is_near(reached: f64, duty: f64) -> bool {
    (reached - duty).abs() <= 0.005 + 0.15 * duty.min(0.3)
}

/// A snapshot, and the span in which it was taken.
struct TimedSnapshot {
    began_ns: u64,
    ended_ns: u64,
    /// Share of work since the previous snapshot.
    working: f64,
}

impl TimedSnapshot {
    fn take(source: &mut AttachedSqpoll, tid: u32) -> Result<TimedSnapshot> {
        let began_ns = monotonic_ns();
        let snapshot = source.snapshot()?;
        let ended_ns = monotonic_ns();
        let tid = tid.to_string();
        let mut threads = snapshot.series.iter().filter(|series| is_thread(series) && series.labels["tid"] == tid);
        let working = threads.next().and_then(|series| series.values.get("working").copied());
        let working = working.with_context(|| format!("thread {tid} is not in {:?}", snapshot.series))?;
        let lost = snapshot.lost.values().sum::<u64>();
        ensure!(lost == 0, "the tool has lost something: {:?}", snapshot.lost);
        Ok(TimedSnapshot { began_ns, ended_ns, working })
    }

    /// Returns when the thread was read: the thread's record is written first.
    fn at_ns(&self, calls: &Calls) -> Result<u64> {
        let mut records_ns = calls.records_ns.iter().filter(|at_ns| (self.began_ns..self.ended_ns).contains(at_ns));
        records_ns.next().copied().context("the tracer has not seen the tool's record")
    }
}

/// Compares each interval by itself.
fn compare(duty: f64, snapshots: &[TimedSnapshot], calls: &Calls, short_ns: u64) -> Result<()> {
    for pair in snapshots.windows(2) {
        let [from, until] = pair else { continue };
        let (from_ns, until_ns) = (from.at_ns(calls)?, until.at_ns(calls)?);
        let share = |ns: u64| ns as f64 / (until_ns - from_ns) as f64;
        let (working, truth) = (until.working, share(calls.busy_between(from_ns, until_ns)));
        let count = calls.count_between(from_ns, until_ns);
        let hidden = share(count * short_ns);
        println!(
            "duty {duty}: by functions {truth:.4}, reported {working:.4}: off by {:+.3} points; {count} calls, of which each may hide {short_ns} ns, in total \
             {:.3} points",
            (working - truth) * 100.0,
            hidden * 100.0
        );
        ensure!((truth - duty).abs() <= 0.03 + duty.min(0.3), "the load is far from {duty}: {truth}");
        ensure!(
            (working - truth).abs() + hidden <= MAX_ERROR,
            "duty {duty}: by functions {truth}, reported {working}, and {hidden} may be hidden"
        );
    }
    Ok(())
}
