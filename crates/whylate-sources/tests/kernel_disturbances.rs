// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares injected disturbances with the kernel's own tracepoints on that CPU.

mod support;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use whylate_sources::AttachError;
use whylate_sources::inject::disturbance::{Disturbance, Kind, Plan, Policy, Report, run};

use support::machine::lock::{MachineLock, lock_machine_to_inject};
use support::oracles::chance::in_rounds;
use support::oracles::trace::{Trace, TraceLine};

const MS_NS: u64 = 1_000_000;
/// Tolerance in microseconds: the trace is rounded to the nearest one, and its clock may differ slightly from the one
/// that BPF reads.
const ROUNDING_US: u64 = 2;

/// Longer than the tick period of any kernel: an interrupt becomes due in each disturbance.
fn plan(kind: Kind, cpu: u32) -> Plan {
    Plan { kind, length_ns: 25 * MS_NS, times: 10, every_ns: 60 * MS_NS, cpu: Some(cpu) }
}

/// Waits for this test's turn. Returns `None`, and prints why, if the machine cannot make this disturbance.
fn lock_to_disturb(kind: Kind) -> Option<MachineLock> {
    let lock = lock_machine_to_inject()?;
    let outcome = run(&Plan { length_ns: 1_000, times: 1, ..plan(kind, 0) }, &AtomicBool::new(false), &mut |_| Ok(()));
    match outcome {
        Err(error @ (AttachError::NotPermitted | AttachError::Unsupported(_))) => {
            println!("skipped: {error}");
            None
        }
        // Any other error is for the test to find.
        _ => Some(lock),
    }
}

fn traced(plan: &Plan, stop: &AtomicBool, events: &[&str]) -> Result<(Report, Vec<TraceLine>)> {
    let trace = Trace::record(events)?;
    let mut callbacks = Vec::new();
    let report = run(plan, stop, &mut |one| {
        callbacks.push(*one);
        Ok(())
    })?;
    let lines = trace.finish_lines()?;
    ensure!(callbacks == report.made, "{callbacks:?} is not {report:?}");
    Ok((report, lines.into_iter().filter(|line| Some(line.cpu) == plan.cpu).collect()))
}

fn ensure_as_planned(plan: &Plan, report: &Report) -> Result<()> {
    ensure!(report.complete, "not all were made: {report:?}");
    ensure!((Some(report.cpu), report.made.len() as u64) == (plan.cpu, plan.times), "{report:?}");
    ensure!(report.made.iter().all(|one| one.length_ns >= plan.length_ns && Some(one.cpu) == plan.cpu), "{report:?}");
    for pair in report.made.windows(2) {
        let apart_ns = pair[1].start.monotonic_ns - pair[0].start.monotonic_ns;
        // A disturbance that is scheduled ahead may come a little early; none comes twice.
        ensure!(apart_ns + MS_NS >= plan.every_ns, "{apart_ns} ns apart");
    }
    Ok(())
}

/// Returns its start and end in microseconds, by the disturbance's own record.
fn span_us(one: &Disturbance) -> (u64, u64) {
    (one.start.monotonic_ns / 1000, (one.start.monotonic_ns + one.length_ns) / 1000)
}

#[test]
fn pending_tick_comes_when_interrupts_are_enabled() -> Result<()> {
    let Some(_lock) = lock_to_disturb(Kind::IrqsOff) else { return Ok(()) };
    let plan = plan(Kind::IrqsOff, 1);
    let events = ["irq_vectors", "irq", "sched/sched_switch", "timer"];
    in_rounds(|| {
        let (report, lines) = traced(&plan, &AtomicBool::new(false), &events)?;
        ensure_as_planned(&plan, &report)?;
        for one in &report.made {
            let (start_us, end_us) = span_us(one);
            let is_within =
                |line: &&TraceLine| start_us + ROUNDING_US < line.at_us && line.at_us + ROUNDING_US < end_us;
            let within: Vec<&TraceLine> = lines.iter().filter(is_within).collect();
            ensure!(within.is_empty(), "interrupts were not off: {within:?}");
            // A pending interrupt comes in as soon as the thread enables interrupts again.
            let next = lines.iter().find(|line| line.at_us + ROUNDING_US >= end_us).context("nothing came after it")?;
            ensure!(next.event.ends_with("_entry") && next.thread == Kind::IrqsOff.thread(), "{next:?}");
        }
        Ok(())
    })
}

#[test]
fn preemption_off_allows_interrupts_but_no_switches() -> Result<()> {
    let Some(_lock) = lock_to_disturb(Kind::PreemptOff) else { return Ok(()) };
    let plan = plan(Kind::PreemptOff, 1);
    in_rounds(|| {
        let (report, lines) = traced(&plan, &AtomicBool::new(false), &["irq_vectors", "irq", "sched/sched_switch"])?;
        ensure_as_planned(&plan, &report)?;
        for one in &report.made {
            let (start_us, end_us) = span_us(one);
            let is_within =
                |line: &&TraceLine| start_us + ROUNDING_US < line.at_us && line.at_us + ROUNDING_US < end_us;
            let within: Vec<&TraceLine> = lines.iter().filter(is_within).collect();
            let switched = within.iter().find(|line| line.event == "sched_switch");
            ensure!(switched.is_none(), "preemption was not off: {switched:?}");
            ensure!(within.iter().any(|line| line.event.ends_with("_entry")), "no interrupt came in: {within:?}");
        }
        Ok(())
    })
}

#[test]
fn softirq_disturbance_takes_interrupts() -> Result<()> {
    let Some(_lock) = lock_to_disturb(Kind::Softirq) else { return Ok(()) };
    let plan = plan(Kind::Softirq, 1);
    // A trace may lack events in the context of threads that the machine hides.
    in_rounds(|| {
        let (report, lines) = traced(&plan, &AtomicBool::new(false), &["irq_vectors", "irq", "sched/sched_switch"])?;
        ensure_as_planned(&plan, &report)?;
        let mut extra_us = Vec::new();
        for one in &report.made {
            let (start_us, end_us) = span_us(one);
            let is_edge =
                |line: &TraceLine, event: &str| line.event == event && line.fields.contains("[action=HRTIMER]");
            let is_before = |line: &TraceLine| line.at_us <= start_us + ROUNDING_US;
            let entry = lines.iter().rposition(|line| is_edge(line, "softirq_entry") && is_before(line));
            let entry = entry.context("no softirq was entered before it")?;
            let exit = lines[entry..].iter().position(|line| is_edge(line, "softirq_exit"));
            let inside = &lines[entry..=entry + exit.context("the softirq did not end")?];
            let (entered_us, left_us) = (inside[0].at_us, inside[inside.len() - 1].at_us);
            ensure!(left_us + ROUNDING_US >= end_us, "the softirq ended at {left_us} us, and it at {end_us} us");
            ensure!(!inside.iter().any(|line| line.event == "sched_switch"), "{inside:?}");
            ensure!(inside.iter().any(|line| line.event == "local_timer_entry"), "no tick came in: {inside:?}");
            extra_us.push((left_us - entered_us).saturating_sub(end_us - start_us));
        }
        extra_us.sort_unstable();
        println!("the softirqs took longer than reported by, in us: {extra_us:?}");
        Ok(())
    })
}

/// Returns when the thread was switched in and out, in microseconds.
fn spans_on_cpu_us(lines: &[TraceLine], thread: &str) -> Vec<(u64, u64)> {
    // By TID, as its first switch-in is under the name of its creator.
    let name = format!("prev_comm={thread} ");
    // The last one, as an earlier hog may have ended after the trace began.
    let tid = lines.iter().rfind(|line| line.fields.starts_with(&name)).and_then(|line| value_of(line, "prev_pid"));
    let mut spans = Vec::new();
    let (mut since_us, mut before_us) = (None, 0);
    for line in lines.iter().filter(|line| line.event == "sched_switch" && tid.is_some()) {
        if value_of(line, "next_pid") == tid {
            since_us = Some(line.at_us);
        } else if value_of(line, "prev_pid") == tid {
            // Some machines hide their own threads from every trace: switches to these are missing.
            spans.push((since_us.take().unwrap_or(before_us), line.at_us));
        }
        before_us = line.at_us;
    }
    // The trace may end before the thread has exited.
    spans.extend(since_us.map(|since_us| (since_us, u64::MAX)));
    spans
}

/// Returns for how many microseconds of the disturbance the thread ran.
fn on_cpu_us(one: &Disturbance, spans: &[(u64, u64)]) -> u64 {
    let (start_us, end_us) = span_us(one);
    spans.iter().map(|&(from, to)| to.min(end_us).saturating_sub(from.max(start_us))).sum()
}

/// Compares the hogs' reported CPU time with the trace. The scheduler's account and its tracepoint are not
/// simultaneous, and the account leaves out stolen time.
fn ensure_cpu_time_matches_trace(report: &Report, spans: &[(u64, u64)]) -> Result<()> {
    let (mut reported_us, mut traced_us, mut excess_us) = (0, 0, 0);
    for one in &report.made {
        let on_cpu_ns = one.on_cpu_ns.context("its CPU time is not reported")?;
        ensure!(on_cpu_ns <= one.length_ns, "{one:?}");
        let (reported, traced) = (on_cpu_ns / 1000, on_cpu_us(one, spans));
        excess_us = excess_us.max(reported.saturating_sub(traced));
        reported_us += reported;
        traced_us += traced;
    }
    println!("{reported_us} us on the CPU are reported, {traced_us} us traced; at most {excess_us} us more for one");
    ensure!(excess_us < 200, "{excess_us} us more are reported than traced");
    ensure!(reported_us >= traced_us / 2, "far less is reported than traced");
    Ok(())
}

fn value_of<'a>(line: &'a TraceLine, key: &str) -> Option<&'a str> {
    line.fields.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

#[test]
fn fifo_hog_is_preempted_only_by_higher_priority() -> Result<()> {
    const PRIORITY: u8 = 50;
    let kind = Kind::Hog(Policy::Fifo(PRIORITY));
    let Some(_lock) = lock_to_disturb(kind) else { return Ok(()) };
    let plan = plan(kind, 1);
    in_rounds(|| {
        let (report, lines) = traced(&plan, &AtomicBool::new(false), &["sched/sched_switch"])?;
        ensure_as_planned(&plan, &report)?;
        let spans = spans_on_cpu_us(&lines, kind.thread());
        for one in &report.made {
            let (start_us, end_us) = span_us(one);
            let is_in_time = |&(from_us, _): &(u64, u64)| from_us <= start_us + ROUNDING_US;
            ensure!(spans.iter().any(is_in_time), "it was not switched to before it began");
            for line in
                lines.iter().filter(|line| start_us + ROUNDING_US < line.at_us && line.at_us + ROUNDING_US < end_us)
            {
                // The kernel's internal priorities of real-time threads run from 99 down to 0, the most urgent.
                let priority: i32 = value_of(line, "next_prio").context("a switch without a priority")?.parse()?;
                let is_back = line.fields.contains(&format!("next_comm={} ", kind.thread()));
                ensure!(is_back || priority < 99 - i32::from(PRIORITY), "{line:?}");
            }
        }
        ensure_cpu_time_matches_trace(&report, &spans)
    })
}

#[test]
fn normal_hog_reports_its_cpu_time() -> Result<()> {
    let kind = Kind::Hog(Policy::Normal);
    let Some(_lock) = lock_to_disturb(kind) else { return Ok(()) };
    let plan = plan(kind, 1);
    in_rounds(|| {
        // Another thread competes for that CPU.
        let over = AtomicBool::new(false);
        let (report, lines) = thread::scope(|scope| {
            scope.spawn(|| {
                let mut cpu = rustix::thread::CpuSet::new();
                cpu.set(1);
                rustix::thread::sched_setaffinity(None, &cpu).expect("a thread may be moved");
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let outcome = traced(&plan, &AtomicBool::new(false), &["sched/sched_switch"]);
            over.store(true, Ordering::Relaxed);
            outcome
        })?;
        ensure_as_planned(&plan, &report)?;
        let shares = report.made.iter().map(|one| one.on_cpu_ns.map(|ns| ns / 10_000 * 100 / (one.length_ns / 10_000)));
        println!("percent of the time on the CPU: {:?}", shares.flatten().collect::<Vec<_>>());
        ensure_cpu_time_matches_trace(&report, &spans_on_cpu_us(&lines, kind.thread()))
    })
}

#[test]
fn stop_cuts_current_disturbance_short() -> Result<()> {
    for kind in [Kind::IrqsOff, Kind::PreemptOff, Kind::Softirq, Kind::Hog(Policy::Fifo(50))] {
        let Some(_lock) = lock_to_disturb(kind) else { continue };
        let plan = Plan { length_ns: 50 * MS_NS, times: 100, every_ns: 100 * MS_NS, ..plan(kind, 1) };
        in_rounds(|| {
            let stop = AtomicBool::new(false);
            let report = thread::scope(|scope| {
                run(&plan, &stop, &mut |_| {
                    let stop = &stop;
                    // In the middle of the next disturbance: this one is reported half its length after its end.
                    scope.spawn(move || {
                        thread::sleep(Duration::from_millis(50));
                        stop.store(true, Ordering::Relaxed);
                    });
                    Ok(())
                })
            })?;
            assert!(!report.complete && (report.made.len() as u64) < plan.times, "{report:?}");
            let (last, others) = report.made.split_last().context("there is none")?;
            assert!(others.iter().all(|one| one.length_ns >= plan.length_ns), "{report:?}");
            ensure!(report.made.len() == 2 && last.length_ns < plan.length_ns, "it came between two: {report:?}");
            println!("{kind:?}: the one that was cut short took {} us", last.length_ns / 1000);
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn rejects_second_concurrent_disturbance() -> Result<()> {
    let kind = Kind::Hog(Policy::Fifo(1));
    let Some(_lock) = lock_to_disturb(kind) else { return Ok(()) };
    let once = |cpu| Plan { length_ns: MS_NS, times: 1, ..plan(kind, cpu) };
    let mut refused = None;
    run(&once(1), &AtomicBool::new(false), &mut |_| {
        refused = run(&once(0), &AtomicBool::new(false), &mut |_| Ok(())).err();
        Ok(())
    })?;
    let refused = refused.context("the second one was let through")?.to_string();
    assert_eq!(refused, "another whylate inject disturbs a CPU already: wait for it, or stop it");
    assert!(run(&once(0), &AtomicBool::new(false), &mut |_| Ok(()))?.complete);
    Ok(())
}

#[test]
fn caller_keeps_its_affinity_and_callback_error_ends_run() -> Result<()> {
    let kind = Kind::Hog(Policy::Normal);
    let Some(_lock) = lock_to_disturb(kind) else { return Ok(()) };
    let before = rustix::thread::sched_getaffinity(None)?;
    let mut calls = 0;
    let outcome = run(&plan(kind, 1), &AtomicBool::new(false), &mut |_| {
        calls += 1;
        ensure!(!rustix::thread::sched_getaffinity(None)?.is_set(1), "it is on the disturbed CPU");
        bail!("enough")
    });
    assert_eq!((outcome.map_err(|error| error.to_string()), calls), (Err("enough".to_owned()), 1));
    assert_eq!(rustix::thread::sched_getaffinity(None)?, before);
    Ok(())
}

#[test]
fn rejects_nonexistent_cpu() -> Result<()> {
    for kind in [Kind::IrqsOff, Kind::PreemptOff, Kind::Softirq, Kind::Hog(Policy::Normal)] {
        let Some(_lock) = lock_to_disturb(kind) else { continue };
        let outcome = run(&plan(kind, 1_000_000), &AtomicBool::new(false), &mut |_| Ok(()));
        let error = outcome.err().ok_or_else(|| io::Error::other("it ran"))?;
        assert!(error.to_string().starts_with("CPU 1000000 is offline or not ours to use"), "{error}");
    }
    Ok(())
}
