// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source `offcpu` on blocked waits, compared with the times that waiters and the threads they wait for measure
//! themselves. Runs as root.

#[path = "kernel_paths/chain.rs"]
mod chain;
#[path = "kernel_paths/flush.rs"]
mod flush;
#[path = "kernel_paths/handoff.rs"]
mod handoff;
#[path = "kernel_paths/peers.rs"]
mod peers;
#[path = "kernel_paths/queued_work.rs"]
mod queued_work;
#[path = "kernel_paths/stolen_lock.rs"]
mod stolen_lock;
mod support;
#[path = "kernel_paths/unrelated_threads.rs"]
mod unrelated_threads;
#[path = "kernel_paths/wait_kinds.rs"]
mod wait_kinds;

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use peers::{Peers, Played, Round, trial};
use support::machine::cpus::TestCpus;
use support::machine::lock::{MachineLock, lock_machine};
use support::machine::real_time::patching;
use support::oracles::chance::{by_chance, in_rounds};
use support::{amount, file_on_disk, is_emulated};
use whylate_model::path::PathSegment;
use whylate_model::{CauseKind, LateEvent};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

/// Maximum error in nanoseconds by the threads' own overhead and clocks.
const NEAR_NS: u64 = 300_000;
/// Maximum error of a disk's time, by its user's clock.
const NEAR_DISK_NS: u64 = 1_000_000;
const LATE_NS: u64 = 5_000_000;
/// Maximum share of rounds in which an event comes between two readings that belong together.
const MAX_WRONG_BY_CHANCE: f64 = 0.05;

/// The rounds of a process, and all waits that were explained during them.
struct Recording {
    rounds: Vec<Round>,
    skipped: Vec<String>,
    events: Vec<LateEvent>,
    has_gaps: bool,
}

/// Returns `None`, and prints why, on an emulator, where the lengths of a wait's parts are not comparable.
fn lock_to_compare_lengths() -> Option<MachineLock> {
    if is_emulated() {
        println!("skipped: an emulated CPU stops at any time");
        return None;
    }
    lock_two_cpus()
}

/// Returns `None`, and prints why, where nothing can be compared.
fn lock_two_cpus() -> Option<MachineLock> {
    TestCpus::find().and_then(|_| lock_machine())
}

fn watched(what: &str, over_ns: u64) -> Result<Recording> {
    let mut peers = Peers::start(what)?;
    let options = OffcpuOptions {
        threads: Threads::of_process(peers.pid()),
        explain_over_ns: Some(over_ns),
        explain_sleeps_over_ns: Some(over_ns),
        idle: true,
        ..OffcpuOptions::default()
    };
    let mut source = patching(|| options.attach(&Session::of_one()))?;
    let mut events = Vec::new();
    let played = thread::spawn(peers.begin()?);
    while !played.is_finished() {
        source.drain_late(Duration::from_millis(50), &mut |event| events.push(event))?;
    }
    source.drain_late(Duration::from_millis(50), &mut |event| events.push(event))?;
    let Played { rounds, skipped, is_whole } = played.join().expect("reading does not panic")?;
    ensure!(is_whole, "the process that plays {what} has failed after {} rounds", rounds.len());
    let lost = source.snapshot()?.lost;
    patching(|| drop(source));
    println!("{what}: {} rounds, {} waits, lost: {lost:?}", rounds.len(), events.len());
    for event in &events {
        let causes: u64 = event.causes.iter().map(|cause| cause.ns).sum();
        ensure!(causes == event.latency_ns, "the causes add up to {causes}: {event:?}");
        let parts: u64 = event.path.iter().map(|segment| segment.ns).sum();
        ensure!(event.path.is_empty() || parts == event.latency_ns, "the path adds up to {parts}: {event:?}");
    }
    // Some machines hide context switches of a supervisor's threads from tracing.
    let has_gaps = lost["unseen_switches"] > 0;
    Ok(Recording { rounds, skipped, events, has_gaps })
}

impl Recording {
    /// Returns the round's wait: the longest one of the client within the round.
    fn event(&self, round: &Round) -> Option<&LateEvent> {
        let client = round.client.to_string();
        let within = round.began_ns..=round.ended_ns;
        let of = self.events.iter().filter(|event| event.labels["tid"] == client && within.contains(&event.at_ns));
        of.filter(|event| !event.path.is_empty()).max_by_key(|event| event.latency_ns)
    }

    /// Checks that almost all waits of one kind are right: `off` returns what is wrong with a wait.
    fn ensure_true(&self, kind: &str, off: impl Fn(&Round, &LateEvent) -> Option<String>) -> Result<()> {
        let rounds: Vec<&Round> = self.rounds.iter().filter(|round| round.kind == kind).collect();
        let (mut wrong, mut hidden) = (Vec::new(), 0);
        for round in &rounds {
            let Some(event) = self.event(round) else {
                let of_client = self.events.iter().filter(|event| event.labels["tid"] == round.client.to_string());
                let after = of_client.filter(|event| event.at_ns >= round.began_ns).min_by_key(|event| event.at_ns);
                let after = after.map(|event| (event.at_ns, event.latency_ns, summary(event)));
                wrong.push(format!("was not reported: {round:?}; what follows is {after:?}"));
                continue;
            };
            let Some(off) = off(round, event) else { continue };
            // Time that is reported as unknown blames no thread.
            if self.has_gaps && event.path.iter().any(|segment| segment.kind == CauseKind::Unknown) {
                hidden += 1;
                continue;
            }
            wrong.push(format!("{off}: {round:?} {:?}", summary(event)));
        }
        println!("{kind}: {} waits, {} off, {hidden} with time that the machine hides", rounds.len(), wrong.len());
        wrong.iter().take(3).for_each(|wrong| println!("  {wrong}"));
        // An emulated CPU stops at any time: the typical wait counts.
        let tolerated = match rounds.len() {
            all if is_emulated() => all / 2,
            all if trial().is_some() => all / 20,
            all => by_chance(all, MAX_WRONG_BY_CHANCE),
        };
        ensure!(rounds.len() == peers::rounds(), "{kind}: {} waits of {}", rounds.len(), peers::rounds());
        ensure!(wrong.len() <= tolerated, "{kind}: {} of {} waits are off", wrong.len(), rounds.len());
        Ok(())
    }
}

/// Summarizes a path: microseconds, kind, actor and depth of each segment.
fn summary(event: &LateEvent) -> Vec<(u64, CauseKind, String, u32)> {
    let parts = event.path.iter().filter(|segment| segment.ns >= 20_000);
    parts.map(|segment| (segment.ns / 1_000, segment.kind, segment.who.to_string(), segment.depth)).collect()
}

fn sum(path: &[PathSegment], is_it: impl Fn(&PathSegment) -> bool) -> u64 {
    path.iter().filter(|segment| is_it(segment)).map(|segment| segment.ns).sum()
}

/// Returns whether the segment is an interrupt over a working thread, which the kernel counts as the thread's CPU time.
fn is_above(segment: &PathSegment) -> bool {
    segment.ready.is_none() && matches!(segment.kind, CauseKind::Irq | CauseKind::Softirq)
}

/// By TID, as a thread may be renamed when it runs next.
fn worked(path: &[PathSegment], tid: u64) -> u64 {
    sum(path, |segment| segment.kind == CauseKind::Running && segment.who.tid().map(u64::from) == Some(tid))
}

#[test]
fn path_shows_server_computing_writing_and_waiting() -> Result<()> {
    let Some(_lock) = lock_to_compare_lengths() else { return Ok(()) };
    in_rounds(|| watched("chain", LATE_NS)?.ensure_true("chain", off_in_chain))
}

/// Returns whether the segment is a run-queue wait behind this thread.
fn is_kept_by(segment: &PathSegment, tid: u64) -> bool {
    segment.kind == CauseKind::Thread && segment.who.tid().map(u64::from) == Some(tid)
}

fn off_in_chain(round: &Round, event: &LateEvent) -> Option<String> {
    let [server, bully, cpu_ns, wrote_ns, write_cpu_ns, kept_ns] = round.numbers[..] else { return Some("?".into()) };
    let is_bully = |segment: &PathSegment| is_kept_by(segment, bully);
    // It may have run briefly before, while the server blocked.
    let after_write = event.path.iter().rposition(|segment| segment.depth > 1).map_or(0, |last| last + 1);
    let Some(first) = event.path[after_write..].iter().position(&is_bully).map(|first| after_write + first) else {
        return Some(format!("{bully} is not there"));
    };
    let last = event.path.iter().rposition(&is_bully)?;
    // Including interrupts during it.
    let reported_kept_ns = sum(&event.path[first..=last], |segment| is_bully(segment) || !is_thread(segment));
    if reported_kept_ns.abs_diff(kept_ns) > NEAR_NS {
        return Some(format!("{bully} kept it for {reported_kept_ns} of {kept_ns} ns"));
    }
    let reported_cpu_ns =
        worked(&event.path, server) + sum(&event.path, |segment| segment.depth == 1 && is_above(segment));
    if reported_cpu_ns.abs_diff(cpu_ns) > NEAR_NS {
        return Some(format!("the server {server} worked for {reported_cpu_ns} of {cpu_ns} ns"));
    }
    let write = event.path.iter().position(|segment| segment.depth > 1)?;
    let reported_write_ns =
        sum(&event.path[write..first.max(write)], |segment| segment.depth > 1 || segment.ready.is_some());
    let (least, most) = (reported_write_ns, reported_write_ns + write_cpu_ns);
    if wrote_ns + NEAR_DISK_NS < least || wrote_ns > most + NEAR_DISK_NS {
        return Some(format!("it wrote for {least} to {most} of {wrote_ns} ns"));
    }
    None
}

#[test]
fn path_names_server_for_each_kind_of_wait() -> Result<()> {
    let Some(_lock) = lock_two_cpus() else { return Ok(()) };
    in_rounds(|| {
        let watched = watched("ways", LATE_NS)?;
        for way in wait_kinds::WAYS {
            let is_there = watched.rounds.iter().any(|round| round.kind == way);
            // Skips are printed for each way that this machine lacks.
            if is_there || watched.skipped.is_empty() {
                watched.ensure_true(way, off_in_way)?;
            }
        }
        Ok(())
    })
}

fn is_thread(segment: &PathSegment) -> bool {
    matches!(segment.kind, CauseKind::Thread | CauseKind::Running | CauseKind::Wakeup | CauseKind::Work)
}

fn off_in_way(round: &Round, event: &LateEvent) -> Option<String> {
    let [server, burnt_ns, all_ns] = round.numbers[..] else { return Some("?".into()) };
    let reported_ns = worked(&event.path, server) + sum(&event.path, is_above);
    let near_ns = if is_emulated() { 10 * NEAR_NS } else { NEAR_NS };
    let is_near = (burnt_ns.saturating_sub(near_ns)..=all_ns + near_ns).contains(&reported_ns);
    (!is_near).then(|| format!("the server {server} worked for {reported_ns}, not {burnt_ns} to {all_ns} ns"))
}

#[test]
fn lock_handoff_is_shared_among_holders() -> Result<()> {
    let Some(_lock) = lock_to_compare_lengths() else { return Ok(()) };
    in_rounds(|| watched("handoff", LATE_NS)?.ensure_true("handoff", off_in_handoff))
}

fn off_in_handoff(round: &Round, event: &LateEvent) -> Option<String> {
    let held: Vec<(u64, u64)> = round.numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect();
    let held_by = |tid: u64| worked(&event.path, tid);
    let all_ns: u64 = held.iter().map(|(_, ns)| ns).sum();
    let reported_ns: u64 = held.iter().map(|&(tid, _)| held_by(tid)).sum();
    let share = |ns: u64, of_ns: u64| ns as f64 / of_ns.max(1) as f64;
    held.iter().find_map(|&(tid, ns)| {
        let (truth, reported) = (share(ns, all_ns), share(held_by(tid), reported_ns));
        ((truth - reported).abs() > 0.05 * truth).then(|| format!("{tid} has {reported:.3}, not {truth:.3}"))
    })
}

/// A thread that is woken with a lock, but finds it taken, waits twice in a row.
#[test]
fn stolen_lock_shows_both_holders() -> Result<()> {
    let Some(_lock) = lock_to_compare_lengths() else { return Ok(()) };
    in_rounds(|| watched("stolen", LATE_NS)?.ensure_true("stolen", off_in_theft))
}

fn off_in_theft(round: &Round, event: &LateEvent) -> Option<String> {
    let [holder, held_ns, thief, kept_ns, slept_ns, computed_ns] = round.numbers[..] else { return Some("?".into()) };
    let Some(theft) = event.path.iter().position(|segment| is_kept_by(segment, thief)) else {
        return Some(format!("{thief} is not there"));
    };
    let of_thief = [
        ("the thief kept the CPU", sum(&event.path, |segment| is_kept_by(segment, thief)), kept_ns),
        ("it slept", sum(&event.path[theft..], |segment| segment.kind == CauseKind::Timer), slept_ns),
        ("it computed", worked(&event.path, thief), computed_ns),
    ];
    // Interrupts during it count separately.
    let near_ns = NEAR_NS + sum(&event.path, is_above);
    let worked_ns = worked(&event.path, holder);
    // It also works until its client sleeps.
    if worked_ns + near_ns < stolen_lock::HOLDS_NS || worked_ns > held_ns + near_ns {
        return Some(format!("the holder worked for {worked_ns}, not {} to {held_ns} ns", stolen_lock::HOLDS_NS));
    }
    let mut off = of_thief.into_iter().filter(|&(_, reported_ns, ns)| reported_ns.abs_diff(ns) > near_ns);
    off.next().map(|(what, reported_ns, ns)| format!("{what} for {reported_ns}, not {ns} ns"))
}

/// The worker of a flushed work item waits for its CPU.
#[test]
fn flush_names_thread_that_delays_worker() -> Result<()> {
    let Some(_lock) = lock_to_compare_lengths() else { return Ok(()) };
    in_rounds(|| {
        let watched = watched("flush", LATE_NS)?;
        if watched.skipped.is_empty() { watched.ensure_true("flush", off_in_flush) } else { Ok(()) }
    })
}

fn off_in_flush(round: &Round, event: &LateEvent) -> Option<String> {
    let [bully, kept_ns] = round.numbers[..] else { return Some("?".into()) };
    let is_bully = |segment: &PathSegment| is_kept_by(segment, bully) && segment.depth > 0;
    let Some(first) = event.path.iter().position(&is_bully) else { return Some(format!("{bully} is not there")) };
    let last = event.path.iter().rposition(&is_bully)?;
    let reported_ns = sum(&event.path[first..=last], |segment| is_bully(segment) || !is_thread(segment));
    // Waits for workers of other CPUs come before.
    let before_ns = event.at_ns.saturating_sub(event.latency_ns).saturating_sub(round.began_ns);
    let kept_ns = kept_ns.saturating_sub(before_ns);
    (reported_ns.abs_diff(kept_ns) > NEAR_NS).then(|| format!("{bully} kept it for {reported_ns} of {kept_ns} ns"))
}

/// The worker was woken for another item, by another thread.
#[test]
fn path_names_queuer_of_work_item() -> Result<()> {
    let Some(_lock) = lock_two_cpus() else { return Ok(()) };
    in_rounds(|| {
        let watched = watched("queued", LATE_NS)?;
        if watched.skipped.is_empty() { watched.ensure_true("queued", off_in_way) } else { Ok(()) }
    })
}

#[test]
fn thread_interrupted_by_disk_is_never_blamed() -> Result<()> {
    let (Some(_lock), Some(_)) = (lock_two_cpus(), file_on_disk()?) else { return Ok(()) };
    let watched = watched("innocent", 1)?;
    let of_client: Vec<_> = watched.rounds.iter().filter_map(|round| watched.event(round)).collect();
    let is_blamed = |segment: &&PathSegment| {
        segment.kind == CauseKind::Running && segment.who.comm() == Some(unrelated_threads::NAME)
    };
    let blamed: Vec<_> =
        of_client.iter().filter(|event| event.path.iter().any(|segment| is_blamed(&segment))).collect();
    let with_disk = of_client.iter().filter(|event| event.path.iter().any(|part| part.kind == CauseKind::Disk)).count();
    println!("{} waits, {with_disk} of them for a disk, {} blame the innocent", of_client.len(), blamed.len());
    ensure!(blamed.is_empty(), "{:?}", blamed.iter().take(3).map(|event| summary(event)).collect::<Vec<_>>());
    let least = trial().map_or_else(|| amount(30), |rounds| 10 * rounds as u64);
    ensure!(with_disk as u64 >= least, "{with_disk} waits for a disk are too few");
    Ok(())
}

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn peers_process() -> Result<()> {
    peers::run_if_asked()
}
