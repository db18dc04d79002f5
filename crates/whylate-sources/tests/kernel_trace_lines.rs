// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares each source with raw trace lines, as far as the kernel's tracepoints reach (work items: `kernel_wq`).

#[path = "../../whylate-model/tests/forward/mod.rs"]
mod forward;
mod support;

#[allow(dead_code)]
#[path = "support/workloads/sleepers.rs"]
mod sleepers;

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sleepers::Sleepers;
use support::is_emulated;
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::{by_chance, in_rounds};
use support::oracles::trace::{Trace, TraceLine};
use whylate_model::blame::Evidence;
use whylate_model::ftrace::timeline::Trace as Imported;
use whylate_model::path::history::SwitchIn;
use whylate_model::sqpoll::is_thread;
use whylate_model::{CauseKind, Histogram, Snapshot, Stack, WaitClass};
use whylate_sources::inject::sqpoll::{Load, Plan};
use whylate_sources::irqsoff::IrqsoffOptions;
use whylate_sources::kernel::clock::unix_ns_of;
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::timerlat::TimerlatOptions;
use whylate_sources::{Attached as _, Session, Source as _, Threads};

const MS_NS: u64 = 1_000_000;
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time between a BPF program and the kernel's trace of one event, in microseconds.
const APART_US: u64 = 50;
/// Maximum error, as a share of the time.
const MAX_ERROR: f64 = 0.03;

/// Checks that almost every timestamp has a trace line close to it. The host may stop a CPU in between: one of fifty
/// times at most, and one of four on an emulator.
fn ensure_in_trace(what: &str, timestamps_ns: &[u64], lines: &[u64]) -> Result<()> {
    let apart_us = |at_us: u64| {
        let after = lines.partition_point(|&line| line < at_us);
        let beside = [after.checked_sub(1), Some(after)];
        beside.into_iter().flatten().filter_map(|index| lines.get(index)).map(|line| line.abs_diff(at_us)).min()
    };
    let all: Vec<u64> = timestamps_ns.iter().map(|ns| apart_us(ns / 1_000).unwrap_or(u64::MAX)).collect();
    let apart = all.iter().filter(|&&apart_us| apart_us > APART_US).count();
    println!("{what}: {} timestamps, {apart} more than {APART_US} us from {} trace lines", all.len(), lines.len());
    let tolerated = by_chance(all.len(), if is_emulated() { 0.25 } else { 0.02 });
    ensure!(all.len() >= 20 && apart <= tolerated, "{what}: {apart} of {} are not in the trace: {all:?}", all.len());
    Ok(())
}

/// Returns the span of a snapshot, on the trace's clock.
fn span_us(snapshot: &Snapshot) -> Range<u64> {
    let began_ns = snapshot.start_unix_ns - unix_ns_of(0);
    began_ns / 1_000..(began_ns + snapshot.duration_ns) / 1_000
}

fn at_us(lines: &[TraceLine], is_it: impl Fn(&TraceLine) -> bool) -> Vec<u64> {
    lines.iter().filter(|line| is_it(line)).map(|line| line.at_us).collect()
}

fn has(line: &TraceLine, word: &str) -> bool {
    line.fields.split_whitespace().any(|other| other == word)
}

#[test]
fn timerlat_activations_are_in_the_trace() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let options = TimerlatOptions {
        backend: Some("bpf".to_owned()),
        cpus: vec![test_cpus.disturbed],
        period_ns: 5 * MS_NS,
        explain_over_ns: Some(1),
        keep_evidence: true,
        ..TimerlatOptions::default()
    };
    in_rounds(|| {
        let trace = Trace::record(&["timer/hrtimer_expire_entry", "sched/sched_switch", "sched/sched_waking"])?;
        let mut source = patching(|| options.start(&Session::of_one()))?;
        thread::sleep(INTERVAL);
        let mut seen = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| {
            if let Some(Evidence::Timer(of)) = event.evidence.as_deref() {
                seen.push((of.irq_ns, of.thread_ns, of.tid));
            }
        })?;
        patching(|| drop(source));
        let lines = trace.finish_lines()?;
        let tid = seen.first().context("no activation is reported")?.2;
        let there = |line: &TraceLine| line.cpu == test_cpus.disturbed;
        let timers = at_us(&lines, |line| there(line) && line.event == "hrtimer_expire_entry");
        // Some machines hide switches from the idle thread. The thread's wakeup is shortly before, its next switch-out
        // shortly after.
        let words = ["next_pid", "prev_pid", "pid"].map(|key| format!("{key}={tid}"));
        let switches = at_us(&lines, |line| there(line) && words.iter().any(|word| has(line, word)));
        ensure_in_trace("timers", &seen.iter().map(|of| of.0).collect::<Vec<_>>(), &timers)?;
        ensure_in_trace("threads", &seen.iter().map(|of| of.1).collect::<Vec<_>>(), &switches)
    })
}

#[test]
fn irqsoff_ticks_match_trace() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let options = IrqsoffOptions {
        backend: Some("ticks".to_owned()),
        cpus: vec![test_cpus.disturbed],
        period_ns: Some(if is_emulated() { 20 * MS_NS } else { MS_NS }),
        // Counts ticks that are in time too.
        timer_test: true,
        ..IrqsoffOptions::default()
    };
    in_rounds(|| {
        pin_to(test_cpus.tool)?;
        let trace = Trace::record(&["timer/hrtimer_expire_entry"])?;
        let mut source = patching(|| options.attach(&Session::of_one()))?;
        source.snapshot()?;
        thread::sleep(INTERVAL);
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        let is_heartbeat =
            |line: &TraceLine| line.cpu == test_cpus.disturbed && has(line, "function=perf_swevent_hrtimer");
        let span_us = span_us(&snapshot);
        let traced =
            at_us(&trace.finish_lines()?, is_heartbeat).iter().filter(|at| span_us.contains(at)).count() as u64;
        let reported: u64 =
            snapshot.series.iter().filter_map(|of| of.histograms.get("lateness")).map(Histogram::count).sum();
        println!("{reported} ticks, {traced} in the trace; lost: {:?}", snapshot.lost);
        // Both ends of the span lie within a snapshot's duration.
        ensure!(
            reported.abs_diff(traced) <= 3 + snapshot.lost["unseen"] && traced > 20,
            "{reported} ticks, {traced} traced"
        );
        Ok(())
    })
}

/// A thread's times in a span, by the trace.
#[derive(Debug, Default)]
struct Traced {
    on_cpu_ns: u64,
    /// From switch-out to wakeup.
    asleep_ns: u64,
    left: u64,
}

fn traced(lines: &[TraceLine], tid: u32, span_ns: Range<u64>) -> Traced {
    let mut traced = Traced::default();
    let [comes, leaves, wakes] = ["next_pid", "prev_pid", "pid"].map(|key| format!("{key}={tid}"));
    let (mut on_cpu_since, mut asleep_since, mut woken) = (None, None, None);
    let part = |since: Option<u64>, until_ns: u64| {
        since.map_or(0, |since: u64| until_ns.min(span_ns.end).saturating_sub(since.max(span_ns.start)))
    };
    for line in lines {
        let at_ns = line.at_us * 1_000;
        if line.event == "sched_waking" && has(line, &wakes) {
            traced.asleep_ns += part(asleep_since.take(), at_ns);
            woken = Some(at_ns);
        } else if line.event == "sched_switch" && has(line, &comes) {
            on_cpu_since = Some(at_ns);
        } else if line.event == "sched_switch" && has(line, &leaves) {
            // Some machines hide switches away from the idle thread: then it was switched in at its wakeup.
            traced.on_cpu_ns += part(on_cpu_since.take().or(woken), at_ns);
            woken = None;
            traced.left += u64::from(span_ns.contains(&at_ns));
            asleep_since = (!line.fields.contains("prev_state=R")).then_some(at_ns);
        }
    }
    traced.on_cpu_ns += part(on_cpu_since, span_ns.end);
    traced.asleep_ns += part(asleep_since, span_ns.end);
    traced
}

#[test]
fn off_cpu_time_matches_trace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let sleepers = Sleepers::start("regular", 1)?;
    let tid = sleepers.thread("regular")?;
    let options = OffcpuOptions {
        threads: Threads::of_process(sleepers.pid()),
        by_thread: true,
        backend: Some("trace".to_owned()),
        ..OffcpuOptions::default()
    };
    in_rounds(|| {
        let trace = Trace::record(&["sched/sched_switch", "sched/sched_waking"])?;
        let mut source = patching(|| options.attach(&Session::of_one()))?;
        source.snapshot()?;
        thread::sleep(INTERVAL);
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        let span_us = span_us(&snapshot);
        let traced = traced(&trace.finish_lines()?, tid, span_us.start * 1_000..span_us.end * 1_000);
        let is_off = |stack: &&Stack| stack.wait.as_ref().is_some_and(|wait| wait.class != WaitClass::OnCpu);
        let mine = || snapshot.stacks.iter().filter(|stack| stack.labels["tid"] == tid.to_string()).filter(is_off);
        let reported_ns: u64 = mine().map(|stack| stack.weight_ns).sum();
        let waits: u64 = mine().map(|stack| stack.waits).sum();
        let share = |ns: u64| ns as f64 / snapshot.duration_ns as f64;
        let (reported, truth) = (share(reported_ns), 1.0 - share(traced.on_cpu_ns));
        println!("off its CPU {reported:.4}, by the trace {truth:.4}; {waits} waits, {} switches", traced.left);
        ensure!((reported - truth).abs() < MAX_ERROR, "off its CPU for {reported}, by the trace {truth}");
        ensure!(waits.abs_diff(traced.left) <= 3 && waits > 20, "{waits} waits, {} switches", traced.left);
        Ok(())
    })
}

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn sleepers_process() -> Result<()> {
    sleepers::run_if_asked()
}

#[test]
fn submission_thread_sleep_matches_trace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let plan = Plan { duty: 0.1, period: Duration::from_millis(100), idle_ms: 10, ..Plan::default() };
    let options = SqpollOptions {
        backend: Some("bpf".to_owned()),
        threads: Threads::of_process(std::process::id()),
        ..SqpollOptions::default()
    };
    in_rounds(|| {
        let mut source = patching(|| options.start(&Session::of_one()))?;
        let load = Load::start(&plan)?;
        let trace = Trace::record(&["sched/sched_switch", "sched/sched_waking"])?;
        // The first lines show the thread's state.
        thread::sleep(INTERVAL / 4);
        source.snapshot()?;
        // A snapshot takes long on a slow machine, and the thread's interval ends somewhere in it.
        thread::sleep(if is_emulated() { 3 * INTERVAL } else { INTERVAL });
        let snapshot = source.snapshot()?;
        let span_us = span_us(&snapshot);
        let traced = traced(&trace.finish_lines()?, load.tid(), span_us.start * 1_000..span_us.end * 1_000);
        let tid = load.tid().to_string();
        drop(load);
        patching(|| drop(source));
        let mut series = snapshot.series.iter().filter(|series| is_thread(series) && series.labels["tid"] == tid);
        let series = series.next().context("the thread was not seen")?;
        let (reported, truth) = (series.values["sleeping"], traced.asleep_ns as f64 / snapshot.duration_ns as f64);
        println!("asleep {reported:.4}, by the trace {truth:.4}: {:?}", series.values);
        let most = if is_emulated() { 2.0 * MAX_ERROR } else { MAX_ERROR };
        ensure!((reported - truth).abs() < most, "asleep for {reported}, by the trace {truth}");
        ensure!(truth > 0.1, "it does not sleep: {truth}");
        Ok(())
    })
}

const OF_PATHS: [&str; 11] = [
    "sched/sched_switch",
    "sched/sched_waking",
    "sched/sched_wakeup",
    "sched/sched_wakeup_new",
    "irq",
    "irq_vectors/local_timer_entry",
    "irq_vectors/local_timer_exit",
    "timer/hrtimer_expire_entry",
    "workqueue/workqueue_queue_work",
    "workqueue/workqueue_execute_start",
    "workqueue/workqueue_execute_end",
];
const SLEEP: Duration = Duration::from_millis(30);

/// Maximum number of traces, until one of them is complete.
const MAX_TRIES: u32 = 8;

/// A thread waits for another one, which sleeps, and then works for a measured time.
#[test]
fn traced_path_shows_sleep_and_work_of_peer() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU stops at any time");
        return Ok(());
    }
    // This thread may be preempted before it waits, while the other one sleeps already.
    in_rounds(path_shows_sleep_and_work)
}

fn path_shows_sleep_and_work() -> Result<()> {
    // If the machine hides switches of these threads, time is rightly unknown: another try may be complete.
    for _ in 0..MAX_TRIES {
        let trace = patching(|| Trace::record(&OF_PATHS))?;
        let (done, is_done) = std::sync::mpsc::channel();
        let server = thread::spawn(move || {
            // First lets the other thread block.
            thread::sleep(SLEEP);
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(20) {}
            let worked = began.elapsed();
            done.send(()).map(|()| worked)
        });
        is_done.recv()?;
        // Until the switches of the resumed thread are in the trace.
        thread::sleep(Duration::from_millis(5));
        let worked_ns = server.join().ok().context("it panicked")??.as_nanos() as u64;
        let trace = Imported::read(trace.finish_text()?.as_bytes())?;
        let waits = trace.late_waits(rustix::thread::gettid().as_raw_pid() as u32, 40 * MS_NS, 1);
        let Some(wait) = waits.first() else { continue };
        let sum = |is: &dyn Fn(&CauseKind) -> bool| {
            wait.path.segments.iter().filter(|part| is(&part.kind)).map(|part| part.ns).sum::<u64>()
        };
        let timer_ns = sum(&|&kind| kind == CauseKind::Timer);
        let unknown_ns = sum(&|&kind| kind == CauseKind::Unknown);
        println!("worked {worked_ns}, timer {timer_ns}, unknown {unknown_ns}: {:?}", wait.path.causes());
        ensure!(wait.path.total_ns() == wait.to_ns - wait.from_ns, "it does not add up");
        if unknown_ns > 0 {
            continue;
        }
        // The trace has whole microseconds, and the sleep's own system call takes some.
        ensure!(timer_ns + MS_NS / 2 >= SLEEP.as_nanos() as u64, "it slept for {timer_ns}");
        // The rest is its work, and what delayed it during and before the work.
        ensure!(wait.path.total_ns() - timer_ns + MS_NS / 2 >= worked_ns, "it worked for {worked_ns}");
        return Ok(());
    }
    println!("inconclusive: the machine hides switches in {MAX_TRIES} traces of {MAX_TRIES}");
    Ok(())
}

/// Maximum share of the time with another label.
const MAX_FORWARD_ERROR: f64 = 0.02;
/// Processes that wait for each other, for timers, and, where there is script(1), for the work items of a terminal.
const PIPES: &str = "for number in $(seq 30); do sleep 0.002 | cat; done
    ! command -v script >/dev/null || script -qec 'for number in $(seq 50); do echo; sleep 0.001; done' /dev/null </dev/null >/dev/null";

/// All waits of all threads in the trace.
#[test]
fn path_walk_matches_forward_oracle_on_a_trace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    in_rounds(path_walk_matches)
}

fn path_walk_matches() -> Result<()> {
    let trace = patching(|| Trace::record(&OF_PATHS))?;
    let status = std::process::Command::new("sh").args(["-c", PIPES]).status()?;
    let trace = Imported::read(trace.finish_text()?.as_bytes())?;
    ensure!(status.success(), "it ends with {status}");
    let agreement = forward::compare(trace.history());
    let (waits, off) = (agreement.waits, agreement.share(agreement.off_ns));
    let contradicted = agreement.share(agreement.contradicted_ns);
    let known = agreement.share(agreement.known_ns);
    println!(
        "{waits} waits of {} ns, {known:.3} of it known, {:.4} % labeled differently, {:.4} % where both know it; lost: {:?}",
        agreement.ns,
        off * 100.0,
        contradicted * 100.0,
        trace.lost
    );
    let slices = trace.history().cpus.iter().flatten();
    let queued = slices.filter(|slice| matches!(slice.entry, SwitchIn::Queued { .. })).count();
    println!("{queued} items with a queuer");
    ensure!(queued >= 10 || is_emulated(), "{queued} work items are too few");
    ensure!(waits >= 100 && known >= 0.3, "only {waits} waits, and {known:.3} of their time is known");
    // Some machines hide switches from tracing: then forward and backward walks lose different threads.
    let is_whole = !trace.lost.contains_key("unseen_switches");
    ensure!(
        contradicted <= MAX_FORWARD_ERROR && (off <= MAX_FORWARD_ERROR || !is_whole),
        "of the worst: {}",
        agreement.worst
    );
    Ok(())
}
