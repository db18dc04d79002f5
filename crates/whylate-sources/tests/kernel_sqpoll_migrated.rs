// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submission threads that are migrated while they sleep but are still queued (6.12, delayed dequeue): the kernel
//! counts part of that sleep as a run-queue wait.

mod support;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::in_rounds;
use support::oracles::trace::{Trace, TraceLine};
use whylate_model::sqpoll::is_thread;
use whylate_sources::inject::sqpoll::{Load, Plan};
use whylate_sources::kernel::clock::monotonic_ns;
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{Attached as _, Session, Threads};

const INTERVAL: Duration = Duration::from_secs(1);
/// Polling period of the thread's state.
const POLL_EVERY: Duration = Duration::from_micros(200);
/// Maximum error, as a share of the time.
const MAX_ERROR: f64 = 0.03;

#[test]
fn delayed_dequeue_does_not_count_as_starved() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let plan = Plan { duty: 0.2, period: Duration::from_millis(50), idle_ms: 1, ..Plan::default() };
    let options = SqpollOptions {
        backend: Some("bpf".to_owned()),
        threads: Threads::of_process(std::process::id()),
        explain_over_ns: Some(1_000_000),
        ..SqpollOptions::default()
    };
    in_rounds(|| {
        let mut source = patching(|| options.start(&Session::of_one()))?;
        let load = Load::start(&plan)?;
        let outcome = while_migrated(load.tid(), test_cpus, || {
            let trace = Trace::record(&["sched/sched_switch", "sched/sched_waking"])?;
            source.snapshot()?;
            let (began_ns, before_ns) = (monotonic_ns(), run_delay_ns(load.tid())?);
            thread::sleep(INTERVAL);
            let snapshot = source.snapshot()?;
            let (ended_ns, counted_ns) = (monotonic_ns(), run_delay_ns(load.tid())? - before_ns);
            let tid = load.tid().to_string();
            let mut series = snapshot.series.iter().filter(|series| is_thread(series) && series.labels["tid"] == tid);
            let series = series.next().context("the thread was not seen")?;
            let share = |ns: u64| ns as f64 / (ended_ns - began_ns) as f64;
            let truth = share(waited_ns(&trace.finish_lines()?, load.tid(), began_ns, ended_ns));
            let (starved, counted) = (series.values["starved"], share(counted_ns));
            let mut longest_ns = 0;
            source.drain_late(Duration::ZERO, &mut |event| longest_ns = longest_ns.max(event.latency_ns))?;
            println!(
                "starved {starved:.4}, by the trace {truth:.4}, by schedstat {counted:.4}; longest wait {longest_ns} ns; {:?}; {:?}",
                series.values, snapshot.lost
            );
            ensure!((starved - truth).abs() <= MAX_ERROR, "starved {starved}, by the trace {truth}");
            Ok(())
        });
        drop(load);
        patching(|| drop(source));
        outcome
    })
}

/// Returns a thread's run-queue wait in nanoseconds, by the scheduler's count.
fn run_delay_ns(tid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat"))?;
    Ok(text.split_whitespace().nth(1).context("schedstat has three fields")?.parse()?)
}

/// Returns the run-queue wait by the trace: from a wakeup or a preemption to the switch-in.
fn waited_ns(lines: &[TraceLine], tid: u32, began_ns: u64, ended_ns: u64) -> u64 {
    let mut since_ns = None;
    let mut sum_ns = 0;
    let mut end = |since_ns: Option<u64>, at_ns: u64| {
        let since_ns = since_ns.map_or(at_ns, |since_ns| since_ns.max(began_ns));
        sum_ns += at_ns.min(ended_ns).saturating_sub(since_ns);
    };
    let has = |line: &TraceLine, word: &str| line.fields.split_whitespace().any(|other| other == word);
    for line in lines {
        let at_ns = line.at_us * 1_000;
        if line.event == "sched_waking" && has(line, &format!("pid={tid}")) {
            since_ns = since_ns.or(Some(at_ns));
        } else if line.event == "sched_switch" && has(line, &format!("next_pid={tid}")) {
            end(since_ns.take(), at_ns);
        } else if line.event == "sched_switch" && has(line, &format!("prev_pid={tid}")) {
            let can_run = line.fields.contains("prev_state=R");
            since_ns = can_run.then_some(at_ns);
        }
    }
    end(since_ns, ended_ns);
    sum_ns
}

fn is_asleep(tid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" S"))
}

/// Runs `act` while one CPU is busy, and the thread is migrated between two CPUs each time it sleeps.
fn while_migrated<T>(tid: u32, test_cpus: TestCpus, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = &AtomicBool::new(false);
    let cpus = [test_cpus.tool, test_cpus.disturbed];
    thread::scope(|scope| {
        thread::Builder::new().name("test-hog".to_owned()).spawn_scoped(scope, move || {
            pin_to(test_cpus.disturbed).expect("a thread may go to a CPU");
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        })?;
        let thread = Pid::from_raw(tid as i32).context("a thread has a number")?;
        let mover = scope.spawn(move || -> Result<()> {
            for cpu in cpus.into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                while !is_asleep(tid) && !over.load(Ordering::Relaxed) {
                    thread::sleep(POLL_EVERY);
                }
                let mut only = CpuSet::new();
                only.set(cpu as usize);
                sched_setaffinity(Some(thread), &only)?;
                while is_asleep(tid) && !over.load(Ordering::Relaxed) {
                    thread::sleep(POLL_EVERY);
                }
            }
            Ok(())
        });
        let outcome = act();
        over.store(true, Ordering::Relaxed);
        mover.join().expect("moving does not panic").context("the thread cannot be moved")?;
        outcome
    })
}
