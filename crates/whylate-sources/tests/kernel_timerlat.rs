// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timers and the threads that they wake, against a schedule and known disturbances. Runs as root.

mod support;

use std::fs;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use support::fixtures::late_work::{blamed_ns, common_ns};
use support::fixtures::wq_session::append;
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::{Unjudged, by_chance, in_rounds};
use support::workloads::disturbances::{disturb, is, is_unsupported, while_loaded};
use support::{WRONG_BY_CHANCE, is_emulated, wanted_events};
use whylate_model::blame::Evidence;
use whylate_model::{Cause, CauseKind, LateEvent, Series, Snapshot, TimerEvidence};
use whylate_sources::inject::disturbance::{Kind, Policy as HogPolicy};
use whylate_sources::kernel::tracefs;
use whylate_sources::timerlat::{AttachedTimerlat, Stop, Threads, TimerlatOptions};
use whylate_sources::{Attached as _, Measuring, Session};

/// Returns the ways to measure that this kernel has: backends and kinds of threads.
fn ways() -> Vec<TimerlatOptions> {
    let way = |backend: &str, threads| TimerlatOptions {
        backend: Some(backend.to_owned()),
        threads,
        ..TimerlatOptions::default()
    };
    let mut ways = vec![way("bpf", Threads::Any)];
    let tracers =
        tracefs::find().map(|tracefs| fs::read_to_string(tracefs.join("available_tracers")).unwrap_or_default());
    if tracers.is_ok_and(|tracers| tracers.split_whitespace().any(|tracer| tracer == "timerlat")) {
        ways.extend([way("tracer", Threads::Kernel), way("tracer", Threads::User)]);
    }
    ways
}

const MS_NS: u64 = 1_000_000;
const TIMES: u64 = 60;
const DEADLINE: Duration = Duration::from_secs(120);

fn start(options: &TimerlatOptions) -> Result<Measuring<AttachedTimerlat>> {
    Ok(patching(|| options.start(&Session::of_one()))?)
}

fn evidence(event: &LateEvent) -> &TimerEvidence {
    match event.evidence.as_deref() {
        Some(Evidence::Timer(evidence)) => evidence,
        _ => panic!("the evidence was asked for"),
    }
}

fn of_cpu(snapshot: &Snapshot, cpu: u32) -> &Series {
    let found = snapshot.series.iter().find(|series| series.labels["cpu"] == cpu.to_string());
    found.expect("each measured CPU has a series")
}

#[test]
fn activations_and_missed_periods_add_up() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    for way in ways() {
        // An emulated CPU takes long to start and to stop.
        let periods_ns = if is_emulated() && way.threads != Threads::Any { &[MS_NS][..] } else { &[MS_NS, 5 * MS_NS] };
        for &period_ns in periods_ns {
            in_rounds(|| measures_its_schedule(test_cpus, period_ns, &way))?;
        }
    }
    Ok(())
}

fn measures_its_schedule(test_cpus: TestCpus, period_ns: u64, way: &TimerlatOptions) -> Result<()> {
    let cpus = vec![test_cpus.tool, test_cpus.disturbed];
    let mut source = start(&TimerlatOptions { period_ns, cpus, ..way.clone() })?;
    println!("latency until it runs: {}", source.sees_own_code());
    let mut snapshots = Vec::new();
    for _ in 0..3 {
        thread::sleep(Duration::from_secs(1));
        snapshots.push(source.snapshot()?);
    }
    patching(|| drop(source));
    let mut total = snapshots[0].clone();
    snapshots[1..].iter().for_each(|later| append(&mut total, later.clone()));
    total.series = total.merged_by("cpu");
    // Each span has its own part of the schedule.
    for snapshot in snapshots.iter().chain([&total]) {
        ensure!(Some(snapshot.backend.as_str()) == way.backend.as_deref(), "it is {}", snapshot.backend);
        keeps_its_schedule(snapshot, period_ns, way.threads)?;
    }
    Ok(())
}

fn keeps_its_schedule(snapshot: &Snapshot, period_ns: u64, threads: Threads) -> Result<()> {
    let [unseen, armed_late] = ["unseen", "armed_late"].map(|reason| snapshot.lost.get(reason).copied().unwrap_or(0));
    let is_tracers = snapshot.backend == "tracer";
    if is_tracers {
        ensure!(snapshot.lost["samples"] == 0, "{} samples are lost", snapshot.lost["samples"]);
    }
    let mut uncounted = 0;
    for series in &snapshot.series {
        let [irq, thread, corrected] = ["irq", "thread", "thread_corrected"].map(|kind| &series.histograms[kind]);
        let (missed, user) = (series.values["missed"] as u64, series.histograms.get("user"));
        ensure!(user.is_none() == (threads == Threads::Kernel), "kernel threads do not return to user space");
        // An unseen activation of the tracer has no figures at all.
        let unseen_there = if is_tracers { unseen } else { 0 };
        let delivered = user.unwrap_or(thread).count() + missed + unseen_there;
        let due = snapshot.duration_ns / period_ns;
        let overdue = series.values["overdue"];
        ensure!(overdue == 0.0, "{overdue} periods were in flight for too long");
        println!("{} {threads:?}: {delivered} of {due} periods, lost {:?}", snapshot.backend, snapshot.lost);
        ensure!(delivered.abs_diff(due) <= 1, "{delivered} of {due} periods");
        ensure!(irq.mean_ns() < thread.mean_ns(), "a thread ran before its timer came in");
        ensure!(user.is_none_or(|user| thread.mean_ns() < user.mean_ns()), "a thread returned before it ran");
        assert_eq!(irq.count(), thread.count(), "each activation has both times");
        uncounted += user.map_or(0, |user| user.count() - irq.count());
        assert_eq!(corrected.count(), thread.count() + missed);
    }
    let stated = if is_tracers { 0 } else { unseen + armed_late };
    assert_eq!(uncounted, stated, "activations without times, and lost ones");
    Ok(())
}

/// Explains activations that are late by `over_ns` on the disturbed CPU, which is disturbed in rounds until there are
/// enough events.
fn explained(
    way: &TimerlatOptions,
    test_cpus: TestCpus,
    over_ns: u64,
    kind: Kind,
    length_ns: u64,
) -> Result<(Vec<Range<u64>>, Vec<LateEvent>)> {
    let options = TimerlatOptions {
        cpus: vec![test_cpus.disturbed],
        explain_over_ns: Some(over_ns),
        keep_evidence: true,
        ..way.clone()
    };
    pin_to(test_cpus.tool)?;
    let every_ns = (20 * MS_NS).max(length_ns * 5 / 2);
    let mut source = start(&options)?;
    let (mut made, mut events) = (Vec::new(), Vec::new());
    let began = Instant::now();
    let cpu = test_cpus.disturbed;
    while events.len() < wanted_events() * 3 / 2 && began.elapsed() < DEADLINE {
        let over = AtomicBool::new(false);
        let round = thread::scope(|scope| {
            let disturbing = scope.spawn(|| {
                let round = while_loaded(cpu, || disturb(kind, cpu, length_ns, TIMES, every_ns));
                over.store(true, Ordering::Relaxed);
                round
            });
            let mut drained = Ok(());
            while !over.load(Ordering::Relaxed) && drained.is_ok() {
                drained = source.drain_late(Duration::from_millis(50), &mut |event| events.push(event));
            }
            let round = disturbing.join().expect("disturbing does not panic");
            drained.and(round)
        });
        made.extend(round?);
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
    }
    patching(|| drop(source));
    Ok((made, events))
}

/// Checks that late activations are attributed to the disturbance, for each of this kernel's ways.
fn is_blamed_by_each(kind: Kind, length_ns: u64, is_true: impl Fn(&Cause) -> bool) -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    // An emulated CPU is late by milliseconds at any time, and stops for tens of them now and then.
    let length_ns = if is_emulated() { 45 * MS_NS } else { length_ns };
    // The kind of threads makes no difference.
    for way in ways().iter().filter(|way| way.threads != Threads::Kernel) {
        let once = || match disturbances_are_blamed(way, test_cpus, kind, length_ns, &is_true) {
            Err(error) if is_unsupported(&error) => Ok(()),
            outcome => outcome,
        };
        in_rounds(once)?;
    }
    Ok(())
}

/// Checks the activations that are late mostly by a disturbance: almost all must name it first, and almost all of the
/// time is explained.
fn disturbances_are_blamed(
    way: &TimerlatOptions,
    test_cpus: TestCpus,
    kind: Kind,
    length_ns: u64,
    is_true: impl Fn(&Cause) -> bool,
) -> Result<()> {
    let (made, events) = explained(way, test_cpus, length_ns / 2, kind, length_ns)?;
    for event in &events {
        let sum: u64 = event.causes.iter().map(|cause| cause.ns).sum();
        ensure!(sum == event.latency_ns, "the causes add up to {sum}: {event:?}");
    }
    let disturbed = |event: &&LateEvent| {
        let span = evidence(event).due_ns..evidence(event).thread_ns;
        made.iter().map(|made| common_ns(made, &span)).sum::<u64>() * 20 >= event.latency_ns * 11
    };
    let events: Vec<&LateEvent> = events.iter().filter(disturbed).collect();
    let right = events.iter().filter(|event| event.causes.first().is_some_and(&is_true)).count();
    let total_ns: u64 = events.iter().map(|event| event.latency_ns).sum();
    let unknown_ns: u64 = events.iter().map(|event| blamed_ns(event, &[CauseKind::Unknown], "")).sum();
    let backend = way.backend.as_deref().unwrap_or_default();
    println!("{backend}: {right} of {} name the true cause; unknown: {unknown_ns} of {total_ns} ns", events.len());
    for event in events.iter().filter(|event| !event.causes.first().is_some_and(&is_true)).take(3) {
        println!("another cause: {:?}", event.causes);
    }
    ensure!(events.len() >= wanted_events(), "only {} late events of {}", events.len(), made.len());
    ensure!(events.len() - right <= by_chance(events.len(), WRONG_BY_CHANCE), "too few are right");
    ensure!(unknown_ns * 100 <= total_ns * 5, "too much is unknown");
    Ok(())
}

#[test]
fn blames_interrupts_off() -> Result<()> {
    is_blamed_by_each(Kind::IrqsOff, 2 * MS_NS, |cause| is(cause, CauseKind::IrqsOff, "whylate-irqsoff:"))
}

#[test]
fn blames_thread_of_higher_priority() -> Result<()> {
    let hog = Kind::Hog(HogPolicy::Fifo(98));
    is_blamed_by_each(hog, 3 * MS_NS, |cause| is(cause, CauseKind::Thread, "whylate-hog:"))
}

#[test]
fn blames_softirq() -> Result<()> {
    is_blamed_by_each(Kind::Softirq, 2 * MS_NS, |cause| is(cause, CauseKind::Softirq, "hrtimer"))
}

/// Without disturbances an activation can only wait for idle exit, or for the hypervisor.
#[test]
fn idle_cpu_is_late_by_idle_exit() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    if is_emulated() {
        println!("skipped: an emulated CPU is late all the time");
        return Ok(());
    }
    pin_to(test_cpus.tool)?;
    in_rounds(|| idle_exit_is_blamed(test_cpus).and_then(|()| busy_cpu_has_no_idle_exit(test_cpus)))
}

/// Minimum idle share of the time.
const IDLE: f64 = 0.9;

/// Returns a CPU's idle time since boot (proc_stat(5)), in seconds.
fn idle_s(cpu: u32) -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let name = format!("cpu{cpu}");
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(&name)).context("no such CPU")?;
    let ticks = line.split_whitespace().nth(4).context("no time that it was idle")?.parse::<f64>()?;
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}

fn explaining(cpu: u32, over_ns: u64) -> TimerlatOptions {
    TimerlatOptions {
        cpus: vec![cpu],
        explain_over_ns: Some(over_ns),
        keep_evidence: true,
        ..TimerlatOptions::default()
    }
}

/// Checks that late activations on an idle CPU are due to idle exit, apart from the timer's own interrupt and other
/// threads.
fn idle_exit_is_blamed(test_cpus: TestCpus) -> Result<()> {
    let mut source = start(&TimerlatOptions { cpus: vec![test_cpus.disturbed], ..TimerlatOptions::default() })?;
    thread::sleep(Duration::from_secs(1));
    let usual = source.snapshot()?.total("thread");
    patching(|| drop(source));
    // The later half, as far as the two runs are alike.
    let over_ns = usual.quantile_ns(0.5);
    let (before, began) = (idle_s(test_cpus.disturbed)?, Instant::now());
    let mut source = start(&explaining(test_cpus.disturbed, over_ns))?;
    let mut events = Vec::new();
    while events.len() < wanted_events() && began.elapsed() < DEADLINE {
        source.drain_late(Duration::from_millis(50), &mut |event| events.push(event))?;
    }
    patching(|| drop(source));
    let idle = (idle_s(test_cpus.disturbed)? - before) / began.elapsed().as_secs_f64();

    // The host delays the interrupt within its own function too, which says nothing about idle.
    let is_its_timer = |cause: &&Cause| is(cause, CauseKind::Irq, "local_timer");
    let first = |event: &LateEvent| event.causes.iter().find(|cause| !is_its_timer(cause)).map(|cause| cause.kind);
    let count = |kinds: &[CauseKind]| {
        events.iter().filter(|event| first(event).is_some_and(|kind| kinds.contains(&kind))).count()
    };
    let right = count(&[CauseKind::IdleExit, CauseKind::Steal]);
    let others = count(&[CauseKind::Thread, CauseKind::Softirq]);
    println!(
        "{right} of {} over {over_ns} ns name the way out of idle, {others} other threads; CPU {} was idle for {:.1} % of the time",
        events.len(),
        test_cpus.disturbed,
        idle * 100.0
    );
    if idle < IDLE {
        let others = format!("others have CPU {} for {:.1} % of the time", test_cpus.disturbed, (1.0 - idle) * 100.0);
        return Err(Unjudged(others).into());
    }
    ensure!(events.len() >= wanted_events(), "only {} were over {over_ns} ns", events.len());
    ensure!(others * 4 <= events.len(), "other threads run on an idle CPU: {others} of {}", events.len());
    let judged = events.len() - others;
    ensure!(judged - right <= by_chance(judged, WRONG_BY_CHANCE), "too few are right: {right} of {judged}");
    Ok(())
}

fn busy_cpu_has_no_idle_exit(test_cpus: TestCpus) -> Result<()> {
    let mut source = start(&explaining(test_cpus.disturbed, 1))?;
    let mut events = Vec::new();
    while_loaded(test_cpus.disturbed, || {
        // The load starts first.
        thread::sleep(Duration::from_millis(50));
        source.drain_late(Duration::ZERO, &mut |_| {})?;
        thread::sleep(Duration::from_millis(500));
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))
    })?;
    patching(|| drop(source));
    ensure!(!events.is_empty(), "nothing was late by a nanosecond beside a busy thread");
    let of_idle = events.iter().find(|event| event.causes.iter().any(|cause| cause.kind == CauseKind::IdleExit));
    ensure!(of_idle.is_none(), "a busy CPU comes out of idle: {of_idle:?}");
    Ok(())
}

#[test]
fn threshold_stops_measurement_on_every_cpu() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    // A thread that loses its CPU between its switch-in and its own reading stops the measurement without a late event.
    for way in ways() {
        in_rounds(|| stops_and_goes_on(test_cpus, &way))?;
    }
    Ok(())
}

fn stops_and_goes_on(test_cpus: TestCpus, way: &TimerlatOptions) -> Result<()> {
    let cpus = vec![test_cpus.tool, test_cpus.disturbed];
    let stop = Stop { irq_ns: None, thread_ns: Some(2 * MS_NS) };
    let options = TimerlatOptions { cpus, stop, explain_over_ns: stop.thread_ns, keep_evidence: true, ..way.clone() };
    let mut source = start(&options)?;
    let hog = Kind::Hog(HogPolicy::Fifo(98));
    disturb(hog, test_cpus.disturbed, 10 * MS_NS, 3, 20 * MS_NS)?;
    let (began, mut hit) = (Instant::now(), false);
    let mut is_over = false;
    while !is_over {
        ensure!(began.elapsed() < DEADLINE, "nothing stopped it");
        // Once more after the stop.
        is_over = source.stopped_by().is_some();
        let mut due = Vec::new();
        source.drain_late(Duration::from_millis(1), &mut |event| due.push((event.cpu, evidence(&event).due_ns)))?;
        hit |= due.into_iter().any(|(cpu, due_ns)| source.is_hit(cpu, due_ns));
    }
    ensure!(!source.tasks_at_stop().is_empty(), "no task ran");
    let lost = source.snapshot()?.lost;
    ensure!(hit, "what stopped it is not reported, {way:?}, lost {lost:?}");
    thread::sleep(Duration::from_millis(100));
    let after = source.snapshot()?;
    assert!(after.total("thread").is_empty(), "threads go on counting");
    source.resume()?;
    let began = Instant::now();
    while source.snapshot()?.total("thread").is_empty() {
        ensure!(began.elapsed() < DEADLINE, "nothing is counted after going on");
        // An emulated CPU may be late again at once, and stop the measurement by an activation without a seen thread.
        if is_emulated() && source.has_stopped() {
            source.resume()?;
        }
        thread::sleep(Duration::from_millis(50));
    }
    patching(|| drop(source));
    Ok(())
}

#[test]
fn worst_includes_the_maximum() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    // The kind of threads makes no difference.
    for way in ways().iter().filter(|way| way.threads != Threads::Kernel) {
        // On a slow machine, late events may not fit into the buffer, which is counted.
        in_rounds(|| finds_the_worst(test_cpus.disturbed, way))?;
    }
    Ok(())
}

fn finds_the_worst(cpu: u32, way: &TimerlatOptions) -> Result<()> {
    let options = TimerlatOptions { cpus: vec![cpu], explain_worst: Some(5), ..way.clone() };
    let mut source = start(&options)?;
    let (mut latencies_ns, mut later) = (Vec::new(), 0);
    for tenth in 0..20 {
        source.drain_late(Duration::ZERO, &mut |event| {
            latencies_ns.push(event.latency_ns);
            later += u64::from(tenth >= 10);
        })?;
        thread::sleep(Duration::from_millis(100));
    }
    let snapshot = source.snapshot()?;
    // After the snapshot, so that it covers every activation in it.
    source.drain_late(Duration::ZERO, &mut |event| latencies_ns.push(event.latency_ns))?;
    patching(|| drop(source));
    let worst_ns = of_cpu(&snapshot, cpu).histograms["thread"].max_ns();
    // The tracer takes its samples a little later than the BPF programs.
    let may_be_apart_ns = if snapshot.backend == "tracer" { worst_ns / 5 } else { 0 };
    let explained_ns = latencies_ns.into_iter().max().unwrap_or(0);
    let is_there = explained_ns >= worst_ns - may_be_apart_ns;
    ensure!(is_there, "the worst is missing: {explained_ns} of {worst_ns} ns, {way:?}, lost {:?}", snapshot.lost);
    ensure!(later < 500, "{later} events in a second, of which five can matter at a time");
    Ok(())
}
