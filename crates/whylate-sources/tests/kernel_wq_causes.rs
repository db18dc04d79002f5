// SPDX-License-Identifier: MIT OR Apache-2.0
//! The causes of late work items, against disturbances of known cause and length. Runs as root.

mod support;

use std::io::{Read, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use support::fixtures::late_work::{VICTIM, Watched, blamed_ns, common_ns, evidence, span, watched};
use support::machine::cpus::TestCpus;
use support::machine::lock::{lock_machine, lock_machine_to_inject, plan};
use support::machine::real_time::become_idle_on;
use support::oracles::chance::{by_chance, in_rounds};
use support::oracles::trace::{Event, Kind as TraceKind, Trace};
use support::workloads::disturbances::{disturb, is, is_unsupported, while_loaded};
use support::workloads::ping_pong;
use support::{WRONG_BY_CHANCE, is_emulated, wanted_events};
use whylate_model::{Cause, CauseKind, LateEvent};
use whylate_sources::inject::disturbance::{Kind, Policy};
use whylate_sources::inject::work::{self, HANDLER};

/// Length of a disturbance, and the threshold: most of that length.
const LENGTH_NS: u64 = 8_000_000;
const LATE: Duration = Duration::from_millis(5);
/// Disturbances per round. Rounds repeat until there are enough events: not each finds a waiting item, and on a busy
/// machine few do.
const TIMES: u64 = 30;
const DEADLINE: Duration = Duration::from_secs(60);

/// Repeats rounds until there are `wanted` late events and a quarter more, as some are late for other reasons.
fn rounds<T>(seen: &AtomicUsize, wanted: usize, mut round: impl FnMut() -> Result<Vec<T>>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    let began = Instant::now();
    while seen.load(Ordering::Relaxed) < wanted + wanted / 4 && began.elapsed() < DEADLINE {
        all.extend(round()?);
    }
    Ok(all)
}

/// Runs `act` while two SCHED_IDLE threads on the disturbed CPU only wake each other: its heartbeat pauses, and the
/// tick has to do. Being SCHED_IDLE, they do not delay other threads.
fn while_switching<T>(cpu: u32, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let (from_first, to_second) = std::io::pipe()?;
    let (from_second, to_first) = std::io::pipe()?;
    let over = AtomicBool::new(false);
    let ping_pong_in_pipes = |mut from: std::io::PipeReader, mut to: std::io::PipeWriter| {
        become_idle_on(cpu)?;
        // When one ends, the other finds its pipe closed.
        while !over.load(Ordering::Relaxed) {
            if to.write_all(&[0]).and_then(|()| from.read_exact(&mut [0])).is_err() {
                break;
            }
        }
        anyhow::Ok(())
    };
    thread::scope(|scope| {
        let pairs = [(from_second, to_second), (from_first, to_first)];
        let threads = pairs.map(|(from, to)| scope.spawn(move || ping_pong_in_pipes(from, to)));
        let outcome = act();
        over.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().expect("handing on does not panic")?;
        }
        outcome
    })
}

/// Checks the events that are late mostly by a disturbance: almost all (most on an emulated CPU) name it first, and
/// little is unknown.
fn ensure_blamed(watched: &Watched<Vec<Range<u64>>>, is_true: impl Fn(&Cause) -> bool) -> Result<()> {
    let disturbed = |event: &&LateEvent| {
        let common_ns: u64 = watched.outcome.iter().map(|made| common_ns(made, &span(event))).sum();
        event.labels["handler"] == VICTIM && common_ns * 20 >= event.latency_ns * 11
    };
    let judged = if is_emulated() { usize::MAX } else { 1 };
    let is_right = |event: &&&LateEvent| event.causes.iter().take(judged).any(&is_true);
    let events: Vec<_> = watched.events.iter().filter(disturbed).collect();
    println!("{} disturbances, {} late events", watched.outcome.len(), watched.events.len());
    let right = events.iter().filter(is_right).count();
    let total_ns: u64 = events.iter().map(|event| event.latency_ns).sum();
    let unknown_ns: u64 = events.iter().map(|event| blamed_ns(event, &[CauseKind::Unknown], "")).sum();
    println!("{right} of {} events name the true cause; unknown: {unknown_ns} of {total_ns} ns", events.len());
    for event in events.iter().filter(|event| !is_right(event)).take(5) {
        println!("another cause: {:?}", event.causes);
    }
    let (tolerated, unknown_percent) =
        if is_emulated() { (events.len() / 4, 25) } else { (by_chance(events.len(), WRONG_BY_CHANCE), 5) };
    ensure!(events.len() >= wanted_events(), "only {} late events; lost: {:?}", events.len(), watched.snapshot.lost);
    ensure!(events.len() - right <= tolerated, "too few are right");
    ensure!(unknown_ns * 100 <= total_ns * unknown_percent, "too much is unknown");
    Ok(())
}

fn disturbances_are_blamed(kind: Kind, is_true: impl Fn(&Cause) -> bool) -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    let cpu = test_cpus.disturbed;
    let watched = watched(test_cpus, LATE, |seen| {
        while_loaded(cpu, || rounds(seen, wanted_events(), || disturb(kind, cpu, LENGTH_NS, TIMES, 3 * LENGTH_NS)))
    });
    match watched {
        Err(error) if is_unsupported(&error) => Ok(()),
        watched => ensure_blamed(&watched?, is_true),
    }
}

#[test]
fn blames_interrupts_off_with_enabling_stack() -> Result<()> {
    let is_true = |cause: &Cause| {
        is(cause, CauseKind::IrqsOff, "whylate-irqsoff:")
            && cause.stack.iter().any(|frame| frame == "bpf_local_irq_restore")
    };
    in_rounds(|| disturbances_are_blamed(Kind::IrqsOff, is_true))
}

#[test]
fn blames_interrupts_off_on_constantly_switching_cpu() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    let cpu = test_cpus.disturbed;
    in_rounds(|| {
        let watched = watched(test_cpus, LATE, |seen| {
            while_switching(cpu, || {
                // Until heartbeats pause.
                thread::sleep(Duration::from_millis(200));
                rounds(seen, wanted_events(), || disturb(Kind::IrqsOff, cpu, 2 * LENGTH_NS, TIMES, 6 * LENGTH_NS))
            })
        });
        match watched {
            Err(error) if is_unsupported(&error) => Ok(()),
            watched => ensure_blamed(&watched?, |cause| is(cause, CauseKind::IrqsOff, "whylate-irqsoff:")),
        }
    })
}

#[test]
fn blames_thread_of_higher_priority() -> Result<()> {
    let hog = Kind::Hog(Policy::Fifo(50));
    in_rounds(|| disturbances_are_blamed(hog, |cause| is(cause, CauseKind::Thread, "whylate-hog:")))
}

#[test]
fn blames_long_softirq() -> Result<()> {
    in_rounds(|| disturbances_are_blamed(Kind::Softirq, |cause| is(cause, CauseKind::Softirq, "hrtimer")))
}

/// Returns the executions of injected items, by the kernel's own trace.
fn runs(events: &[Event]) -> Vec<Range<u64>> {
    let of = |kind| events.iter().filter(move |event| event.kind == kind && event.handler == HANDLER);
    let ends = |start: &&Event| {
        let mut ends = of(TraceKind::End).filter(|end| end.tid == start.tid && end.at_ns >= start.at_ns);
        ends.next().map(|end| start.at_ns..end.at_ns)
    };
    of(TraceKind::Start).collect::<Vec<_>>().iter().filter_map(ends).collect()
}

fn busy_items(cpu: u32, items: u64, at_once: u64, busy_ns: u64) -> Result<Vec<()>> {
    let plan = work::Plan { busy_ns, at_once, cpu: Some(cpu), ..plan(items) };
    ensure!(work::run(&plan, &AtomicBool::new(false))?.complete, "not every item has run");
    Ok(Vec::new())
}

#[test]
fn blames_busy_work_item() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine_to_inject(), TestCpus::find()) else {
        return Ok(());
    };
    let cpu = test_cpus.disturbed;
    in_rounds(|| {
        let trace = Trace::start()?;
        let watched = watched(test_cpus, LATE, |seen| {
            while_loaded(cpu, || rounds(seen, wanted_events(), || busy_items(cpu, TIMES, 4, LENGTH_NS)))
        })?;
        let _: &Vec<()> = &watched.outcome;
        let watched = Watched { events: watched.events, snapshot: watched.snapshot, outcome: runs(&trace.finish()?) };
        ensure_blamed(&watched, |cause| is(cause, CauseKind::Work, HANDLER))
    })
}

/// Checks that both are named: an item that is busy for 5 ms, and what preempts it, or runs after it on a kernel
/// without preemption.
fn both_are_named(kind: Kind, length_ns: u64, kinds: &[CauseKind], who: &str) -> Result<()> {
    if is_emulated() {
        println!("skipped: an emulated CPU stops at any time");
        return Ok(());
    }
    let (Some(_lock), Some(test_cpus)) = (lock_machine_to_inject(), TestCpus::find()) else {
        return Ok(());
    };
    let cpu = test_cpus.disturbed;
    let trace = Trace::start()?.with_switches()?;
    let watched = watched(test_cpus, Duration::from_millis(3), |seen| {
        rounds(seen, 2 * wanted_events(), || {
            thread::scope(|scope| {
                let items = scope.spawn(|| busy_items(cpu, 100, 1, 5_000_000));
                let disturbed = disturb(kind, cpu, length_ns, 40, 15_000_000);
                items.join().expect("injecting does not panic")?;
                disturbed
            })
        })
    });
    let watched = match watched {
        Err(error) if is_unsupported(&error) => return Ok(()),
        watched => watched?,
    };
    let slices = trace.slices_of(who.trim_end_matches(':'))?;
    let items = runs(&trace.finish()?);
    println!("{} disturbances, {} items, {} events", watched.outcome.len(), items.len(), watched.events.len());
    let (mut pairs, mut wrong) = (0, 0);
    for event in watched.events.iter().filter(|event| event.labels["handler"] == VICTIM) {
        let window = span(event);
        let of = |spans: &[Range<u64>]| spans.iter().map(|span| common_ns(span, &window)).sum::<u64>();
        let mut both_ns = 0;
        for made in &watched.outcome {
            for item in &items {
                let common = made.start.max(item.start)..made.end.min(item.end);
                both_ns += common_ns(&common, &window);
            }
        }
        let (true_other_ns, true_item_ns) = (of(&watched.outcome), of(&items) - both_ns);
        if true_other_ns * 10 < length_ns * 9 || true_item_ns < 1_000_000 {
            continue;
        }
        let (other_ns, item_ns) = (blamed_ns(event, kinds, who), blamed_ns(event, &[CauseKind::Work], HANDLER));
        // The thread also runs before and after the disturbance.
        let most_other_ns = of(&slices).max(true_other_ns);
        let is_within = |reported: u64, least: u64, most: u64| reported * 10 >= least * 9 && reported * 10 <= most * 11;
        pairs += 1;
        let is_right =
            is_within(other_ns, true_other_ns, most_other_ns) && is_within(item_ns, true_item_ns, true_item_ns);
        if !is_right {
            wrong += 1;
            println!(
                "{other_ns} of {true_other_ns} to {most_other_ns}, {item_ns} of {true_item_ns}: {:?}",
                event.causes
            );
        }
    }
    println!("{pairs} items with both causes, {wrong} of them wrong");
    ensure!(pairs >= 20, "too few items had both causes");
    // The hypervisor, or a burst of interrupts, may take its part of an item too.
    ensure!(wrong * 20 <= pairs, "too many are wrong");
    Ok(())
}

#[test]
fn names_work_item_and_its_preemptor() -> Result<()> {
    let hog = Kind::Hog(Policy::Fifo(50));
    in_rounds(|| both_are_named(hog, 3_000_000, &[CauseKind::Thread], "whylate-hog:"))
}

#[test]
fn names_work_item_and_interrupts_off_within() -> Result<()> {
    let kinds = [CauseKind::IrqsOff, CauseKind::Thread];
    in_rounds(|| both_are_named(Kind::IrqsOff, 2_000_000, &kinds, "whylate-irqsoff:"))
}

/// Returns a few seconds, or `WHYLATE_TEST_SECONDS`.
fn span_of_play() -> Duration {
    let asked = std::env::var("WHYLATE_TEST_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(asked.unwrap_or(5))
}

#[test]
fn merges_100k_switches_per_second_within_each_event() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    in_rounds(|| merges_switches(test_cpus))
}

fn merges_switches(test_cpus: TestCpus) -> Result<()> {
    let began = Instant::now();
    let watched =
        watched(test_cpus, Duration::from_millis(4), |_| ping_pong::play(test_cpus.disturbed, span_of_play()))?;
    let rate = watched.outcome.switches / began.elapsed().as_secs().max(1);
    println!("{rate} switches a second, {} late events, lost: {:?}", watched.events.len(), watched.snapshot.lost);
    let (mut explained_ns, mut true_ns, mut merged) = (0, 0, 0);
    for event in watched.events.iter().filter(|event| event.labels["handler"] == VICTIM) {
        true_ns += watched.outcome.bursts.iter().map(|burst| common_ns(burst, &span(event))).sum::<u64>();
        let players = ping_pong::THREADS.map(|name| blamed_ns(event, &[CauseKind::Thread], name));
        explained_ns += players.iter().sum::<u64>();
        merged += usize::from(evidence(event).occupancy.merged.is_some());
    }
    println!("{merged} with merged intervals; {explained_ns} of {true_ns} ns are blamed on the two threads");
    // An emulated CPU does not switch often enough for that.
    ensure!(merged > 0 || is_emulated(), "no window had too many intervals");
    // Interrupts and idle gaps between the two threads are part of the bursts too.
    ensure!(explained_ns <= true_ns + true_ns / 50, "the two threads are blamed for more than they did");
    let at_least = if is_emulated() { 3 } else { 8 };
    ensure!(explained_ns * 10 >= true_ns * at_least, "the two threads are blamed for too little");
    Ok(())
}
