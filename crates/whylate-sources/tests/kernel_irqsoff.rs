// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interrupts that are off for a known time, and what is late for other reasons. They run as root.

mod kernel;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kernel::disturb::{disturb, is_unsupported, while_loaded};
use kernel::late::{Places, common_ns, stay_on};
use kernel::turn::turn_to_measure;
use kernel::urgent::patching;
use kernel::{is_emulated, unless_stolen};
use whylate_model::blame::Evidence;
use whylate_model::irqsoff::LateTick;
use whylate_model::{Labels, LateEvent, Snapshot};
use whylate_sources::Attached;
use whylate_sources::inject::disturbance::Kind;
use whylate_sources::irqsoff::{IrqsoffOptions, attach};

const MS_NS: u64 = 1_000_000;
const TIMES: u64 = 50;

fn start(options: &IrqsoffOptions) -> Result<Box<dyn Attached>> {
    Ok(patching(|| attach(options))?)
}

fn tick(event: &LateEvent) -> &LateTick {
    match event.evidence.as_deref() {
        Some(Evidence::Tick(tick)) => tick,
        _ => panic!("the evidence was asked for"),
    }
}

/// What was seen while a CPU was disturbed.
struct Seen {
    made: Vec<Range<u64>>,
    events: Vec<LateEvent>,
    snapshot: Snapshot,
}

/// Measures a CPU while it is disturbed under load.
fn seen(places: Places, options: &IrqsoffOptions, kind: Kind, length_ns: u64) -> Result<Seen> {
    stay_on(places.tool)?;
    let mut source = start(options)?;
    source.snapshot()?;
    let cpu = places.disturbed;
    let mut events = Vec::new();
    let over = AtomicBool::new(false);
    // Not a multiple of the period, so that windows begin at any moment of it.
    let every_ns = 2 * length_ns + 17 * MS_NS + 137_000;
    let made = thread::scope(|scope| {
        let disturbing = scope.spawn(|| {
            let made = while_loaded(cpu, || disturb(kind, cpu, length_ns, TIMES, every_ns));
            over.store(true, Ordering::Relaxed);
            made
        });
        let mut drained = Ok(());
        while !over.load(Ordering::Relaxed) && drained.is_ok() {
            drained = source.drain_late(Duration::from_millis(50), &mut |event| events.push(event));
        }
        let made = disturbing.join().expect("disturbing does not panic");
        drained.and(made)
    })?;
    source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
    let snapshot = source.snapshot()?;
    patching(|| drop(source));
    Ok(Seen { made, events, snapshot })
}

fn options(places: Places) -> IrqsoffOptions {
    IrqsoffOptions {
        cpus: vec![places.disturbed],
        late_over_ns: Some(100_000),
        keep_evidence: true,
        ..IrqsoffOptions::default()
    }
}

/// The late event of a window: the one that came in right after it.
fn event_of<'a>(events: &'a [LateEvent], made: &Range<u64>) -> Option<&'a LateEvent> {
    events
        .iter()
        .max_by_key(|event| common_ns(made, &(tick(event).due_ns..tick(event).came_ns)))
        .filter(|event| common_ns(made, &(tick(event).due_ns..tick(event).came_ns)) > 0)
}

/// What has become of windows of known length.
#[derive(Debug, Default)]
struct Tally {
    windows: usize,
    missed: usize,
    outside: usize,
    /// The same where what delivering an interrupt takes counts as an error.
    strictly_outside: usize,
    named: usize,
}

const ENABLES: &str = "bpf_local_irq_restore";

fn is_by(labels: &Labels, function: &str) -> bool {
    labels["kind"] == "irqs_off" && labels.get("function").is_some_and(|found| found == function)
}

fn windows_are_seen(places: Places, length_ns: u64, tally: &mut Tally) -> Result<()> {
    let seen = seen(places, &options(places), Kind::IrqsOff, length_ns)?;
    for made in &seen.made {
        tally.windows += 1;
        let Some(event) = event_of(&seen.events, made) else {
            tally.missed += 1;
            continue;
        };
        let length_ns = made.end - made.start;
        let at_most_ns = event.at_most_ns.context("it has no upper bound")?;
        let least_ns = event.latency_ns;
        tally.strictly_outside += usize::from(!(least_ns..=least_ns + MS_NS).contains(&length_ns));
        if !(least_ns..=at_most_ns).contains(&length_ns) {
            println!("{length_ns} ns are not within {least_ns} and {at_most_ns} ns: {:?}", event.causes);
            tally.outside += 1;
        }
        if is_by(&event.labels, ENABLES) {
            tally.named += 1;
            ensure!(event.stack.first().is_some_and(|frame| frame == ENABLES), "{:?}", event.stack);
        } else {
            println!("another culprit: {:?}, found {:?}", event.labels, tick(event));
        }
        ensure!(event.causes.iter().map(|cause| cause.ns).sum::<u64>() == event.latency_ns, "{event:?}");
    }
    let counted: u64 = seen
        .snapshot
        .series
        .iter()
        .filter(|series| is_by(&series.labels, ENABLES))
        .map(|series| series.histograms["length"].count())
        .sum();
    let told = seen.events.iter().filter(|event| is_by(&event.labels, ENABLES)).count() as u64;
    println!("{length_ns} ns: {counted} counted, lost {:?}", seen.snapshot.lost);
    ensure!(counted == told, "{counted} are counted, and {told} told");
    Ok(())
}

#[test]
fn windows_with_interrupts_off_are_seen_within_their_bounds() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else {
        return Ok(());
    };
    if is_emulated() {
        println!("skipped: an emulated CPU is late all the time");
        return Ok(());
    }
    let outcome = unless_stolen(|| {
        let mut tally = Tally::default();
        for length_ms in [2, 5, 10, 20] {
            windows_are_seen(places, length_ms * MS_NS, &mut tally)?;
        }
        println!("{tally:?}");
        ensure!(tally.windows as u64 == 4 * TIMES && tally.missed == 0, "not every window was seen: {tally:?}");
        ensure!(tally.named == tally.windows, "another culprit was named: {tally:?}");
        ensure!(tally.outside * 100 <= tally.windows, "too many are outside their bounds: {tally:?}");
        Ok(())
    });
    match outcome {
        Err(error) if is_unsupported(&error) => Ok(()),
        outcome => outcome,
    }
}
