// SPDX-License-Identifier: MIT OR Apache-2.0
//! Late work items with their causes, on a CPU that is disturbed.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use whylate_model::blame::Evidence;
use whylate_model::{CauseKind, LateEvent, Snapshot, WorkEvidence};
use whylate_sources::wq::WqOptions;
use whylate_sources::{Session, Source};

use super::urgent::patching;

/// Handler of the waiting items: reading the file queues one on every CPU.
pub const VICTIM: &str = "refresh_vm_stats";
const MAKES_VICTIMS: &str = "/proc/sys/vm/stat_refresh";

/// The CPU of the tool and the observers, and the disturbed one.
#[derive(Clone, Copy)]
pub struct TestCpus {
    pub tool: u32,
    pub disturbed: u32,
}

impl TestCpus {
    /// Returns `None`, and prints why, on a machine with a single CPU.
    pub fn find() -> Option<TestCpus> {
        // Read once, as the measuring thread is pinned from then on and the test may run again.
        static USABLE: OnceLock<CpuSet> = OnceLock::new();
        let usable = USABLE.get_or_init(|| sched_getaffinity(None).expect("the affinity is readable"));
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).map(|cpu| cpu as u32);
        match (cpus.next(), cpus.next_back()) {
            (Some(tool), Some(disturbed)) => Some(TestCpus { tool, disturbed }),
            _ => {
                println!("skipped: this needs two CPUs");
                None
            }
        }
    }
}

pub fn pin_to(cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    Ok(sched_setaffinity(None, &set)?)
}

/// What was late during an action, and the action's outcome.
pub struct Watched<T> {
    pub events: Vec<LateEvent>,
    pub snapshot: Snapshot,
    pub outcome: T,
}

/// Explains all items that wait longer than `explain_over` on the disturbed CPU, while items keep being queued there
/// from the other CPU. `act` gets the number of late items so far.
pub fn watched<T: Send>(
    test_cpus: TestCpus,
    explain_over: Duration,
    act: impl FnOnce(&AtomicUsize) -> Result<T> + Send,
) -> Result<Watched<T>> {
    let options = WqOptions {
        explain_over_ns: Some(explain_over.as_nanos() as u64),
        keep_evidence: true,
        phases: true,
        ..WqOptions::default()
    };
    pin_to(test_cpus.tool)?;
    let mut source = patching(|| options.attach(&Session::of_one()))?;
    let mut events = Vec::new();
    let seen = AtomicUsize::new(0);
    let over = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        let victims = scope.spawn(|| -> Result<()> {
            while !over.load(Ordering::Relaxed) {
                std::fs::read(MAKES_VICTIMS).context("cannot queue items")?;
                thread::sleep(Duration::from_micros(300));
            }
            Ok(())
        });
        let act = scope.spawn(|| act(&seen));
        let mut drain = |wait| {
            source.drain_late(wait, &mut |event| {
                if event.cpu == test_cpus.disturbed {
                    seen.fetch_add(usize::from(event.labels["handler"] == VICTIM), Ordering::Relaxed);
                    events.push(event);
                }
            })
        };
        let mut drained = Ok(());
        while !act.is_finished() && drained.is_ok() {
            drained = drain(Duration::from_millis(50));
        }
        let outcome = act.join().expect("what is done does not panic");
        over.store(true, Ordering::Relaxed);
        victims.join().expect("reading does not panic")?;
        drained.and_then(|()| drain(Duration::from_millis(50)))?;
        outcome
    })?;
    let snapshot = source.snapshot()?;
    patching(|| drop(source));
    // Some machines hide context switches of a supervisor's threads from tracing, which leaves gaps in the account.
    let may_have_gaps = snapshot.lost["unseen_switches"] > 0;
    for event in &events {
        ensure_sound(event, may_have_gaps)?;
    }
    Ok(Watched { events, snapshot, outcome })
}

/// Returns the evidence of an event, which has to be requested.
pub fn evidence(event: &LateEvent) -> &WorkEvidence {
    match event.evidence.as_deref() {
        Some(Evidence::Work(evidence)) => evidence,
        _ => panic!("the evidence was asked for"),
    }
}

pub fn span(event: &LateEvent) -> Range<u64> {
    evidence(event).queued_ns..evidence(event).started_ns
}

pub fn common_ns(a: &Range<u64>, b: &Range<u64>) -> u64 {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}

/// Sums the causes of these kinds with an actor name that starts with `who`.
pub fn blamed_ns(event: &LateEvent, kinds: &[CauseKind], who: &str) -> u64 {
    let causes = event.causes.iter().filter(|cause| kinds.contains(&cause.kind) && cause.who.starts_with(who));
    causes.map(|cause| cause.ns).sum()
}

/// Checks that the causes add up to the latency, and that the account covers exactly the event's window on its CPU.
fn ensure_sound(event: &LateEvent, may_have_gaps: bool) -> Result<()> {
    let sum: u64 = event.causes.iter().map(|cause| cause.ns).sum();
    ensure!(sum == event.latency_ns, "the causes add up to {sum}: {event:?}");
    let window = span(event);
    let account = &evidence(event).occupancy;
    ensure!(account.cpu == event.cpu, "the account is another CPU's: {event:?}");
    let merged = account.merged.as_ref();
    let mut reached_ns = merged.map_or(account.since_ns, |merged| merged.end_ns);
    for interval in &account.intervals {
        // The first interval may begin before the window.
        let begins = interval.start_ns == reached_ns || (reached_ns == account.since_ns && merged.is_none());
        let begins = begins || (may_have_gaps && interval.start_ns > reached_ns);
        ensure!(begins && interval.end_ns >= interval.start_ns, "the account has a gap at {reached_ns}: {event:?}");
        reached_ns = interval.end_ns;
    }
    ensure!(
        reached_ns == window.end || (may_have_gaps && reached_ns < window.end),
        "the account does not end with the window: {event:?}"
    );
    if let Some(merged) = merged {
        let parts: u64 = merged.parts.iter().map(|part| part.ns).sum();
        ensure!(
            merged.start_ns >= window.start && parts <= merged.end_ns - merged.start_ns,
            "too much is merged: {event:?}"
        );
    }
    Ok(())
}
