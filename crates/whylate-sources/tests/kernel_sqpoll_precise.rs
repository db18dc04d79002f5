// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--precise` beside the kernel's function_graph tracer, recording the functions that a submission thread works in. An
//! application on an emulated CPU sees too coarsely when requests are done; the tracer's stamps are the thread's own.

mod kernel;

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kernel::chance::in_rounds;
use kernel::functions::{Calls, FunctionTrace};
use kernel::late::Places;
use kernel::paced::Paced;
use kernel::turn::turn_to_measure;
use kernel::urgent::patching;
use whylate_model::sqpoll::is_thread;
use whylate_sources::clock::monotonic_ns;
use whylate_sources::sqpoll::{AttachedSqpoll, SqpollOptions};
use whylate_sources::{AttachError, Attached as _, Session, Threads};

const DUTIES: [f64; 4] = [0.01, 0.10, 0.37, 0.99];
const INTERVAL: Duration = Duration::from_secs(1);
/// Of so many milliseconds one percent is a few requests, also where they take a hundred times as long. The longer it is,
/// the fewer calls there are, which may hide something; but one period's requests have to fit into the ring.
fn period_of(duty: f64) -> Duration {
    Duration::from_millis(if duty < 0.5 { 100 } else { 50 })
}
/// To find out what to ask the load for.
const TRIES: u32 = 5;
/// What a share of work may be off by, as a share of the time.
const OFF: f64 = 0.01;
/// Where requests and completions are carried out.
const WORK: [&str; 3] = ["io_submit_sqes", "io_do_iopoll", "io_handle_tw_list"];

/// Intervals of each duty; more for whoever wants to publish figures.
fn intervals() -> Result<usize> {
    match std::env::var("WHYLATE_INTERVALS") {
        Ok(text) => text.parse().context("WHYLATE_INTERVALS is a number"),
        Err(_) => Ok(3),
    }
}

/// Both are on the same functions, and the kernel calls one within the other. The inner one's own time, and the way
/// from one to the other, the outer one counts as work, in each call: it takes no longer than the shortest calls do.
/// With its share of an interval added to the difference, neither order can hide that the tool is wrong.
#[test]
fn precise_shares_of_work_are_those_of_the_function_tracer() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let options = SqpollOptions {
        backend: Some("bpf".to_owned()),
        threads: Threads::of(std::process::id()),
        precise: true,
        ..SqpollOptions::default()
    };
    for duty in DUTIES {
        // Whoever runs the emulator may stop a CPU of it just between the two.
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
            ensure!(source.way() == "functions", "work is told by {}", source.way());
            let outcome = measure(duty, places, &mut source, &trace);
            // The load has ended: these would wait for a thread that spins.
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

fn measure(duty: f64, places: Places, source: &mut AttachedSqpoll, trace: &FunctionTrace) -> Result<()> {
    let (load, short_ns) = load_of(duty, places, trace)?;
    let (intervals, tid) = (intervals()?, load.tid());
    trace.take(tid)?;
    // Calls that have begun before the record, or end after it, are not in it.
    thread::sleep(INTERVAL / 2);
    let mut looks = vec![Look::take(source, tid)?];
    while looks.len() <= intervals {
        thread::sleep(INTERVAL);
        looks.push(Look::take(source, tid)?);
    }
    thread::sleep(INTERVAL / 2);
    compare(duty, &looks, &trace.take(tid)?, short_ns)
}

/// A load whose thread is in the functions for that share of the time, and how long a call takes that does nothing.
fn load_of(duty: f64, places: Places, trace: &FunctionTrace) -> Result<(Paced, u64)> {
    let period = period_of(duty);
    let mut requests = 5;
    let mut short_ns = None;
    for attempt in 1.. {
        let load = Paced::start(requests, period, places.tool, places.disturbed)?;
        thread::sleep(INTERVAL / 4);
        trace.take(load.tid())?;
        let began_ns = monotonic_ns();
        thread::sleep(INTERVAL);
        let ended_ns = monotonic_ns();
        let calls = trace.take(load.tid())?;
        // Half of the first load's do nothing. Later they may become one with those before.
        let short_ns = *short_ns.get_or_insert(calls.quarter_ns().context("the tracer saw no call")?);
        let reached = calls.busy_between(began_ns, ended_ns) as f64 / (ended_ns - began_ns) as f64;
        println!("duty {duty}: {requests} requests each {period:?} make {reached:.4}");
        // Where they take longer at one time than at another it comes no nearer; the truth is what was done.
        if is_near(reached, duty) || attempt == TRIES {
            return Ok((load, short_ns));
        }
        ensure!(reached > 0.0, "the load does nothing");
        requests = (requests as f64 * duty / reached).round().max(1.0) as u64;
    }
    bail!("there was no load")
}

/// Others, and whoever runs an emulator, make requests take longer at times.
fn is_near(reached: f64, duty: f64) -> bool {
    (reached - duty).abs() <= 0.005 + 0.15 * duty.min(0.3)
}

/// One look of the tool, which happened between two times.
struct Look {
    began_ns: u64,
    ended_ns: u64,
    /// The share since the look before.
    working: f64,
}

impl Look {
    fn take(source: &mut AttachedSqpoll, tid: u32) -> Result<Look> {
        let began_ns = monotonic_ns();
        let snapshot = source.snapshot()?;
        let ended_ns = monotonic_ns();
        let tid = tid.to_string();
        let mut threads = snapshot.series.iter().filter(|series| is_thread(series) && series.labels["tid"] == tid);
        let working = threads.next().and_then(|series| series.values.get("working").copied());
        let working = working.with_context(|| format!("thread {tid} is not in {:?}", snapshot.series))?;
        let lost = snapshot.lost.values().sum::<u64>();
        ensure!(lost == 0, "the tool has lost something: {:?}", snapshot.lost);
        Ok(Look { began_ns, ended_ns, working })
    }

    /// When it looked at the thread: it writes that record first.
    fn at_ns(&self, calls: &Calls) -> Result<u64> {
        let mut records_ns = calls.records_ns.iter().filter(|at_ns| (self.began_ns..self.ended_ns).contains(at_ns));
        records_ns.next().copied().context("the tracer has not seen the tool look")
    }
}

/// Each interval by itself.
fn compare(duty: f64, looks: &[Look], calls: &Calls, short_ns: u64) -> Result<()> {
    for pair in looks.windows(2) {
        let [from, until] = pair else { continue };
        let (from_ns, until_ns) = (from.at_ns(calls)?, until.at_ns(calls)?);
        let share = |ns: u64| ns as f64 / (until_ns - from_ns) as f64;
        let (working, truth) = (until.working, share(calls.busy_between(from_ns, until_ns)));
        let count = calls.count_between(from_ns, until_ns);
        let hidden = share(count * short_ns);
        println!(
            "duty {duty}: by functions {truth:.4}, told {working:.4}: off by {:+.3} points; {count} calls, of which each may hide {short_ns} ns, in all \
             {:.3} points",
            (working - truth) * 100.0,
            hidden * 100.0
        );
        ensure!((truth - duty).abs() <= 0.03 + duty.min(0.3), "the load is far from {duty}: {truth}");
        ensure!(
            (working - truth).abs() + hidden <= OFF,
            "duty {duty}: by functions {truth}, told {working}, and {hidden} may be hidden"
        );
    }
    Ok(())
}
