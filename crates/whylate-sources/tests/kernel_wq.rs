// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the source `wq` with what was injected, and with the kernel's own trace of the same span.

mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use whylate_model::{Histogram, LateEvent, Snapshot};
use whylate_sources::inject::work::{HANDLER, Plan};
use whylate_sources::wq::{By, WqOptions};
use whylate_sources::{Attached, Session, Source};

use support::fixtures::wq_session::{append, by_label, inject, injected, session, traced};
use support::machine::lock::{lock_machine, lock_machine_to_inject, plan};
use support::machine::real_time::patching;
use support::oracles::bpf_programs;
use support::oracles::chance::{by_chance, in_rounds};
use support::oracles::trace::Trace;
use support::oracles::work_item_pairs::{Execution, Truth, agree, bucket_of, counts};
use support::workloads::work_items;
use support::{amount, is_emulated, largest_or_median};

fn by(by: By) -> WqOptions {
    WqOptions { by, phases: true, ..WqOptions::default() }
}

fn only_injected() -> WqOptions {
    WqOptions { only: Some(HANDLER.to_owned()), ..by(By::Handler) }
}

/// Runs the items, and fails unless each of them is counted exactly once.
fn ensure_all_are_counted(options: &WqOptions, plan: &Plan) -> Result<()> {
    let session = session(options, |_, _| inject(plan))?;
    let ran = injected(&session, plan.items)?;
    session.ensure_nothing_hidden()?;
    for phase in ["latency", "activate", "pool", "runtime", "on_cpu", "asleep", "ready"] {
        let counted = session.distribution(HANDLER, phase).count();
        ensure!(counted == ran, "{phase}: {counted} of {ran}, lost {:?}", session.snapshot.lost);
    }
    println!("{ran} items, {ran} counted; lost: {:?}", session.snapshot.lost);
    Ok(())
}

#[test]
fn counts_each_of_ten_thousand_items_once() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    ensure_all_are_counted(&by(By::Handler), &plan(amount(10_000)))?;
    ensure_all_are_counted(&only_injected(), &plan(amount(10_000)))
}

#[test]
fn counts_each_of_fifty_thousand_items_once_under_load() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    ensure_all_are_counted(&by(By::Handler), &Plan { load: true, ..plan(amount(50_000)) })
}

/// Returns the bounds of each value's bucket, ascending.
fn buckets(histogram: &Histogram) -> Vec<(u64, u64)> {
    histogram
        .iter()
        .flat_map(|(range, count)| std::iter::repeat_n((*range.start(), *range.end()), count as usize))
        .collect()
}

#[test]
fn item_waits_for_busy_items_before_it() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    const BUSY_NS: u64 = 5_000_000;
    let busy = Plan { busy_ns: BUSY_NS, cpu: Some(1), ..plan(20) };
    in_rounds(|| {
        let session = session(&only_injected(), |_, _| inject(&busy))?;
        let ran = session.truth.of_handler(HANDLER);
        ensure!(ran.len() == 20, "somebody else injects too");
        let first_queued_ns = ran.iter().map(|execution| execution.queued_ns).min().unwrap_or(0);
        let last_queued_ns = ran.iter().map(|execution| execution.queued_ns).max().unwrap_or(0);
        let batch_ns = last_queued_ns - first_queued_ns;

        // However busy the machine is, an item cannot start before the earlier ones have ended.
        let latency = session.distribution(HANDLER, "latency");
        let seen = buckets(&latency);
        assert_eq!(seen.len(), 20);
        for (index, (_, upper_ns)) in (0..).zip(&seen) {
            assert!(upper_ns + batch_ns + 1_000 >= index * BUSY_NS, "item {index} waited {upper_ns} ns at most");
        }
        let runtime = session.distribution(HANDLER, "runtime");
        assert_eq!(runtime.count(), 20);
        assert!(runtime.min_ns() >= BUSY_NS, "an item ran for {} ns", runtime.min_ns());
        let parts = ["on_cpu", "asleep", "ready"].map(|part| session.distribution(HANDLER, part).sum_ns());
        assert_eq!(parts.iter().sum::<u128>(), runtime.sum_ns());

        let mut waits: Vec<u64> = ran.iter().map(|execution| execution.wait_ns()).collect();
        waits.sort_unstable();
        // A wait of some microseconds is not more exact in the trace than its buckets are.
        let pairs = waits.iter().zip(&seen).map(|(wait_ns, (_, upper_ns))| (*wait_ns, *upper_ns));
        let differing: Vec<_> = pairs.filter(|(wait_ns, upper_ns)| !agree(*wait_ns, *upper_ns, 20_000)).collect();
        let tolerated = if is_emulated() { seen.len() / 2 } else { 0 };
        ensure!(differing.len() <= tolerated, "in the trace, and up to what was measured, in ns: {differing:?}");
        let max_ns = waits[19];
        let off_ns = latency.max_ns().abs_diff(max_ns);
        let part = if is_emulated() { 8 } else { 50 };
        ensure!(off_ns <= 200_000.max(max_ns / part), "max {} ns, in the trace {max_ns} ns", latency.max_ns());
        println!("max {} ns, in the trace {max_ns} ns; ideal {} ns", latency.max_ns(), 19 * BUSY_NS);
        Ok(())
    })
}

/// Returns the longest wait in the trace, and whether the distribution agrees with the waits there.
fn times_agree(executions: &[&Execution], seen: &Histogram) -> (u64, bool) {
    // At the edges the source may have seen more than is certain.
    let certain = executions.iter().filter(|execution| !execution.at_edge).map(|execution| execution.wait_ns());
    let mut waits: Vec<u64> = certain.collect();
    waits.sort_unstable();
    let max_ns = waits.last().copied().unwrap_or(0);
    if is_emulated() {
        let near = |percent: usize| waits[(waits.len() - 1) * percent / 100];
        // The median of a few is not typical either.
        let agree = waits.len() < 100 || {
            let median_ns = seen.quantile_ns(0.5);
            let typical_ns = median_ns.clamp(near(45), near(55));
            agree(median_ns, typical_ns, 50_000)
        };
        return (max_ns, agree);
    }
    let max_with_edges_ns = executions.iter().map(|execution| execution.wait_ns()).max().unwrap_or(0);
    let agrees = [max_ns, max_with_edges_ns].iter().any(|max_ns| agree(*max_ns, seen.max_ns(), 50_000))
        || (max_ns..=max_with_edges_ns).contains(&seen.max_ns());
    (max_ns, agrees)
}

/// Maximum share of handlers with a longest wait in which another task or, mostly, the hypervisor ran between the
/// source's clock reading and the trace's.
fn apart_by_chance() -> f64 {
    if is_emulated() { 0.05 } else { 0.02 }
}

/// Maximum share of items that are queued where no BPF program runs. Some hosts run none in a process of theirs that
/// monitors the machine from inside, nor in interrupts over it; tracefs sees those. The share of items queued by
/// interrupts, such as at the end of disk requests, is that process's share of a CPU.
fn unseen_by_chance() -> f64 {
    0.05
}

#[test]
fn counts_and_maxima_per_handler_match_trace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let seconds = if std::env::var_os("WHYLATE_THOROUGH").is_some() { 5 } else { 2 };
    in_rounds(|| {
        let trace = Trace::start()?.with_stacks()?;
        let session = traced(trace, &by(By::Handler), |_, _| work_items::mixed_load(Duration::from_secs(seconds)))?;
        session.ensure_nothing_hidden()?;
        let executions = session.truth.executions.len() as u64;
        let latency = by_label(&session.snapshot, "handler", "latency");
        let matched: u64 = latency.values().map(Histogram::count).sum();
        let mut handlers: BTreeMap<String, Vec<&Execution>> = session.truth.by(|execution| execution.handler.clone());
        for handler in latency.keys() {
            handlers.entry(handler.clone()).or_default();
        }
        let (mut miscounted, mut apart, mut missing) = (0, 0, 0);
        for (handler, executions) in &handlers {
            let seen = latency.get(handler).cloned().unwrap_or_default();
            let (least, most) = counts(executions);
            let (max_ns, times_agree) = times_agree(executions, &seen);
            if !(least..=most).contains(&seen.count()) || !times_agree {
                // Some may be missing if the source counts them as lost.
                let few = least.saturating_sub(seen.count());
                missing += few;
                let tolerated = by_chance(least as usize, unseen_by_chance()) as u64;
                miscounted += usize::from(seen.count() > most || few > tolerated);
                apart += usize::from(!times_agree);
                let twice = executions.iter().filter(|execution| execution.queued_twice).count();
                println!(
                    "{handler}: counted {}, in the trace {least} to {most} ({twice} of them queued twice); max {} ns, in the trace {max_ns} ns",
                    seen.count(),
                    seen.max_ns()
                );
            }
        }
        let total = executions + session.truth.unqueued;
        let twice = session.truth.executions.iter().filter(|execution| execution.queued_twice).count();
        println!(
            "{total} executions, {matched} matched ({:.3} %), {twice} queued twice; {} handlers, {miscounted} miscounted, {apart} with other times; lost: {:?}",
            matched as f64 / total as f64 * 100.0,
            handlers.len(),
            session.snapshot.lost
        );
        let stated = session.snapshot.lost["unmatched"];
        ensure!(missing <= stated, "{missing} executions are missing, and {stated} are stated");
        ensure!(missing * 1_000 <= total, "{missing} of {total} executions are missing");
        ensure!(matched * 100 >= total * 99, "{matched} of {total} executions are matched");
        ensure!(miscounted == 0, "{miscounted} of {} handlers are miscounted", handlers.len());
        let tolerated = by_chance(handlers.len(), apart_by_chance());
        ensure!(apart <= tolerated, "{apart} of {} handlers have other times", handlers.len());
        Ok(())
    })
}

fn phases_add_up(snapshot: &Snapshot) -> Result<()> {
    ensure!(!snapshot.series.is_empty());
    for series in &snapshot.series {
        let sum = |name: &str| series.histograms[name].sum_ns();
        ensure!(sum("activate") + sum("pool") == sum("latency"), "{:?}", series.labels);
        ensure!(sum("on_cpu") + sum("asleep") + sum("ready") == sum("runtime"), "{:?}", series.labels);
        let count = |name: &str| series.histograms[name].count();
        ensure!([count("activate"), count("pool")] == [count("latency"); 2], "{:?}", series.labels);
        ensure!([count("on_cpu"), count("asleep"), count("ready")] == [count("runtime"); 3], "{:?}", series.labels);
    }
    println!("the phases of {} series add up", snapshot.series.len());
    Ok(())
}

#[test]
fn phases_of_every_series_add_up() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for key in [By::Handler, By::Nothing, By::Pool] {
        // An item that is counted during the last snapshot is in it with a part of its phases; an emulated CPU may stop
        // right there.
        in_rounds(|| {
            phases_add_up(&session(&by(key), |_, _| work_items::mixed_load(Duration::from_secs(1)))?.snapshot)
        })?;
    }
    Ok(())
}

#[test]
fn items_beyond_max_active_wait_for_activation() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    in_rounds(|| {
        let session = session(&only_injected(), |_, _| inject(&Plan { busy_ns: 10_000, ..plan(amount(10_000)) }))?;
        let ran = session.truth.of_handler(HANDLER);
        ensure!(ran.len() as u64 == amount(10_000), "somebody else injects too");
        let held_back = ran.iter().filter_map(|run| Some((run.activated_ns?, run)));
        let truth: Histogram = held_back.map(|(activated_ns, run)| activated_ns - run.queued_ns).collect();
        let activate = session.distribution(HANDLER, "activate");
        let at_once: u64 = activate.iter().filter(|(range, _)| *range.end() == 0).map(|(_, count)| count).sum();
        let seen = activate.count() - at_once;
        println!("held back: {seen}, in the trace {}", truth.count());
        println!("max {} ns, in the trace {} ns", activate.max_ns(), truth.max_ns());
        println!("sum {} ns, in the trace {} ns", activate.sum_ns(), truth.sum_ns());
        assert!(truth.count() > 0, "max_active holds no item back");
        assert_eq!(seen, truth.count());
        ensure!(agree(activate.max_ns(), truth.max_ns(), 50_000), "the longest activations differ");
        ensure!(activate.sum_ns().abs_diff(truth.sum_ns()) * 100 <= truth.sum_ns(), "the sums differ");
        Ok(())
    })
}

/// Runs the items, and returns the late events of the injected handler with their true executions, in order of start.
fn late_events(options: &WqOptions, plan: &Plan) -> Result<(Vec<LateEvent>, Vec<Execution>)> {
    let session = session(options, |source, _| {
        let mut events = Vec::new();
        let mut take = |source: &mut dyn Attached| source.drain_late(Duration::ZERO, &mut |event| events.push(event));
        thread::scope(|scope| {
            let injection = scope.spawn(|| inject(plan));
            while !injection.is_finished() {
                take(source)?;
                thread::sleep(Duration::from_millis(1));
            }
            injection.join().map_err(|_| anyhow!("the injection failed"))?
        })?;
        take(source)?;
        Ok(events)
    })?;
    ensure!(session.snapshot.lost["late_events"] == 0, "late events are lost: {:?}", session.snapshot.lost);
    let truth: Vec<Execution> = session.truth.of_handler(HANDLER).into_iter().cloned().collect();
    ensure!(truth.len() as u64 == plan.items, "somebody else injects too");
    let mut events = session.outcome;
    events.retain(|event| event.labels["handler"] == HANDLER);
    events.sort_by_key(|event| event.at_unix_ns);
    Ok((events, truth))
}

/// Delayed items, such as vmstat updates of each CPU every second, are queued by timers.
#[test]
fn interrupted_thread_is_not_the_queuer() -> Result<()> {
    const BUSY: &str = "wq-interrupted";
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let options = WqOptions { late_over_ns: Some(1), ..WqOptions::default() };
    let mut source = options.attach(&Session::of_one())?;
    let is_over = AtomicBool::new(false);
    let mut queuers: BTreeMap<String, u64> = BTreeMap::new();
    // With PREEMPT_RT, kernel threads serve timers.
    let by_timers = |queuers: &BTreeMap<String, u64>| -> u64 {
        let is_timer = |name: &str| ["softirq", "interrupt"].contains(&name) || name.starts_with("ktimers/");
        queuers.iter().filter(|(name, _)| is_timer(name)).map(|(_, count)| count).sum()
    };
    let until = Instant::now() + Duration::from_secs(3);
    thread::scope(|scope| -> Result<()> {
        for _ in 0..thread::available_parallelism()?.get() {
            let spin = || {
                while !is_over.load(Ordering::Relaxed) && Instant::now() < until {
                    std::hint::spin_loop();
                }
            };
            thread::Builder::new().name(BUSY.to_owned()).spawn_scoped(scope, spin)?;
        }
        while Instant::now() < until && by_timers(&queuers) < 3 {
            let mut count = |event: LateEvent| *queuers.entry(event.labels["queued_by"].clone()).or_default() += 1;
            source.drain_late(Duration::from_millis(20), &mut count)?;
        }
        is_over.store(true, Ordering::Relaxed);
        Ok(())
    })?;
    println!("{queuers:?}");
    ensure!(!queuers.contains_key(BUSY), "an interrupted thread is shown as a queuer: {queuers:?}");
    ensure!(by_timers(&queuers) > 0, "no timer queued an item: {queuers:?}");
    Ok(())
}

#[test]
fn each_item_over_threshold_is_a_late_event() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    in_rounds(|| {
        let options = WqOptions { late_over_ns: Some(1), stacks: true, ..only_injected() };
        let (events, truth) = late_events(&options, &Plan { busy_ns: 2_000_000, ..plan(30) })?;
        assert_eq!(events.len(), 30);
        let mut off_ns = Vec::new();
        for (event, execution) in events.iter().zip(&truth) {
            let label = |name: &str| event.labels.get(name).map(String::as_str).unwrap_or_default();
            assert_eq!(label("workqueue"), execution.workqueue);
            assert_eq!(label("queued_by"), "whylate-inject");
            assert_eq!(label("queued_by_pid"), std::process::id().to_string());
            assert_eq!(label("queued_by_tid"), execution.queued_by_tid.to_string());
            assert!(label("worker").starts_with("kworker/"), "{}", label("worker"));
            assert_eq!(event.cpu, execution.cpu);
            assert_eq!(event.phases.iter().map(|(_, ns)| ns).sum::<u64>(), event.latency_ns);
            assert!(event.stack.iter().any(|frame| frame.contains("queue_work")), "{:?}", event.stack);
            off_ns.push(event.latency_ns.abs_diff(execution.wait_ns()));
        }
        println!("30 late events, {off_ns:?} ns off the trace; stack {:?}", events[0].stack);
        let off_ns = largest_or_median(off_ns);
        ensure!(off_ns < 100_000, "a late event is {off_ns} ns off");

        let over_ns = 20_000_000;
        let options = WqOptions { late_over_ns: Some(over_ns), ..only_injected() };
        let (events, truth) = late_events(&options, &Plan { busy_ns: 2_000_000, ..plan(30) })?;
        assert!(events.iter().all(|event| event.latency_ns >= over_ns && event.stack.is_empty()));
        let late = truth.iter().filter(|execution| execution.wait_ns() >= over_ns).count();
        println!("{} late events over 20 ms, in the trace {late}", events.len());
        ensure!(events.len() == late, "{} late events, in the trace {late}", events.len());
        Ok(())
    })
}

#[test]
fn ten_thousand_late_events_are_all_reported_or_counted_as_lost() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    // Without a reader.
    let options = WqOptions { late_over_ns: Some(1), ..only_injected() };
    let session = session(&options, |source, _| {
        inject(&plan(amount(10_000)))?;
        let mut events = 0;
        source.drain_late(Duration::ZERO, &mut |event| events += u64::from(event.labels["handler"] == HANDLER))?;
        Ok(events)
    })?;
    let ran = injected(&session, amount(10_000))?;
    let lost = session.snapshot.lost["late_events"];
    println!("{} late events, {lost} counted as lost", session.outcome);
    assert_eq!(session.outcome + lost, ran);
    assert_eq!(session.distribution(HANDLER, "latency").count(), ran);
    Ok(())
}

#[test]
fn unknown_handler_is_never_seen() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let options = WqOptions { only: Some("no_such_handler".to_owned()), ..by(By::Handler) };
    let session = session(&options, |_, _| inject(&plan(1_000)))?;
    println!("lost: {:?}", session.snapshot.lost);
    assert!(session.snapshot.series.is_empty(), "{:?}", session.snapshot.series);
    assert_eq!(session.snapshot.lost["unmatched"], 0);
    session.ensure_nothing_hidden()
}

/// Checks that what is not counted is stated as unmatched; `stated` is over all series.
fn assert_counted(count: u64, (least, most): (u64, u64), stated: u64, what: &str) {
    assert!(
        count <= most && count + stated >= least,
        "{what}: {count} and {stated} unmatched, in the trace {least} to {most}"
    );
}

/// Checks that little more is unmatched than `truth` knows to have been queued before the window.
fn assert_rarely_unmatched(stated: u64, most: u64, truth: &Truth) {
    // Earlier items wait for longer while the other CPUs of an emulator are kept busy.
    let before = if is_emulated() { truth.unqueued.max(3) } else { 1 };
    assert!(stated <= before + most / 1_000, "{stated} unmatched of {most}");
}

#[test]
fn total_does_not_depend_on_grouping() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    for key in [By::Nothing, By::Handler, By::Workqueue, By::Cpu, By::Pool] {
        let session = session(&by(key), |_, _| inject(&plan(amount(10_000))))?;
        let (least, most) = session.truth.count();
        let total = session.snapshot.total("latency").count();
        println!("by {key:?}: {total}, in the trace {least} to {most}, {} series", session.snapshot.series.len());
        let stated = session.snapshot.lost["unmatched"];
        assert_counted(total, (least, most), stated, &format!("by {key:?}"));
        assert_rarely_unmatched(stated, most, &session.truth);
        assert!(least >= amount(10_000));
        session.ensure_nothing_hidden()?;
        let (label, groups) = match key {
            By::Handler => ("handler", session.truth.by(|execution| execution.handler.clone())),
            By::Workqueue => ("workqueue", session.truth.by(|execution| execution.workqueue.clone())),
            By::Cpu => ("cpu", session.truth.by(|execution| execution.cpu.to_string())),
            By::Nothing | By::Pool => continue,
        };
        let counted = by_label(&session.snapshot, label, "latency");
        for (name, executions) in groups {
            let (least, most) = counts(&executions);
            let count = counted.get(&name).map_or(0, Histogram::count);
            assert_counted(count, (least, most), stated, &format!("{label} {name}"));
        }
    }
    Ok(())
}

#[test]
fn concurrent_snapshots_lose_and_double_nothing() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    for (key, phases) in [(By::Handler, true), (By::Nothing, true), (By::Handler, false), (By::Nothing, false)] {
        in_rounds(|| {
            let session = session(&WqOptions { phases, ..by(key) }, |source, so_far| {
                let over = AtomicBool::new(false);
                let mut snapshots = 0;
                thread::scope(|scope| {
                    let injection = scope.spawn(|| {
                        let report = inject(&Plan { busy_ns: 20_000, at_once: amount(2_000), ..plan(amount(20_000)) });
                        over.store(true, Ordering::Relaxed);
                        report
                    });
                    while !over.load(Ordering::Relaxed) {
                        append(so_far, source.snapshot()?);
                        snapshots += 1;
                        thread::sleep(Duration::from_millis(50));
                    }
                    injection.join().map_err(|_| anyhow!("the injection failed"))?
                })?;
                Ok(snapshots)
            })?;
            let ran = injected(&session, amount(20_000))?;
            session.ensure_nothing_hidden()?;
            let (least, most) = session.truth.count();
            let total = session.snapshot.total("latency");
            println!(
                "by {key:?}, phases {phases}: {} in {} snapshots, in the trace {least} to {most}",
                total.count(),
                session.outcome
            );
            let stated = session.snapshot.lost["unmatched"];
            assert_counted(total.count(), (least, most), stated, "in the snapshots");
            assert_rarely_unmatched(stated, most, &session.truth);
            if key == By::Handler {
                ensure!(session.distribution(HANDLER, "latency").count() == ran, "not all items are in the snapshots");
            }
            if phases {
                let sum = |name: &str| session.snapshot.total(name).sum_ns();
                // An item that starts during a snapshot may be in two snapshots with its phases, but does not get lost.
                for (whole, parts) in
                    [("latency", &["activate", "pool"][..]), ("runtime", &["on_cpu", "asleep", "ready"])]
                {
                    let parts: Vec<u128> = parts.iter().map(|&part| sum(part)).collect();
                    let lost = &session.snapshot.lost;
                    ensure!(
                        parts.iter().sum::<u128>() == sum(whole),
                        "{parts:?} ns are not {} of {whole}, lost {lost:?}",
                        sum(whole)
                    );
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn dropped_source_leaves_no_programs() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let before = bpf_programs::held_by(std::process::id())?;
    let options = WqOptions { late_over_ns: Some(1), stacks: true, ..by(By::Handler) };
    let mut source = patching(|| options.attach(&Session::of_one()))?;
    let mut held = bpf_programs::held_by(std::process::id())?;
    held.retain(|id| !before.contains(id));
    println!("{} programs", held.len());
    assert!(held.len() >= 4, "{held:?}");
    work_items::mixed_load(Duration::from_millis(100))?;
    source.snapshot().context("no snapshot")?;
    patching(|| drop(source));
    bpf_programs::ensure_gone(&held)
}

#[test]
fn attach_time_is_printed() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let began = Instant::now();
    let source = patching(|| by(By::Handler).attach(&Session::of_one()))?;
    println!("{} backend attached after {:?}: {:?}", source.backend, began.elapsed(), source.fallback_reason);
    assert_eq!(bucket_of(u64::MAX), 495);
    Ok(())
}
