// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interrupts that are off for a known time, and lateness for other reasons. Runs as root.

mod support;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use support::fixtures::late_work::common_ns;
use support::is_emulated;
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::machine::real_time::{become_fifo_on, patching};
use support::oracles::chance::in_rounds;
use support::workloads::disturbances::{disturb, is_unsupported, while_loaded};
use whylate_model::blame::Evidence;
use whylate_model::blame::{Found, LateTick};
use whylate_model::{Labels, LateEvent, Series, Snapshot};
use whylate_sources::inject::disturbance::Kind;
use whylate_sources::irqsoff::{IrqsoffOptions, What};
use whylate_sources::{Measuring, Session, Source as _};

const MS_NS: u64 = 1_000_000;
const TIMES: u64 = 50;

fn start(options: &IrqsoffOptions) -> Result<Measuring> {
    Ok(patching(|| options.attach(&Session::of_one()))?)
}

/// Time within which a tick is late in user code, on most machines.
const USER_TICK_WITHIN: Duration = Duration::from_secs(20);

fn is_in_user(event: &LateEvent) -> bool {
    tick(event).found == Found::User
}

fn tick(event: &LateEvent) -> &LateTick {
    match event.evidence.as_deref() {
        Some(Evidence::Tick(tick)) => tick,
        _ => panic!("the evidence was asked for"),
    }
}

/// The result of measuring a CPU while it was disturbed.
struct Measurement {
    made: Vec<Range<u64>>,
    events: Vec<LateEvent>,
    snapshot: Snapshot,
}

/// Measures a CPU while it is disturbed under load.
fn seen(test_cpus: TestCpus, options: &IrqsoffOptions, kind: Kind, length_ns: u64) -> Result<Measurement> {
    pin_to(test_cpus.tool)?;
    let mut source = start(options)?;
    source.snapshot()?;
    let cpu = test_cpus.disturbed;
    let mut events = Vec::new();
    let over = AtomicBool::new(false);
    // Not a multiple of the period, so that windows begin at any phase of it.
    let every_ns = 2 * length_ns + 17 * MS_NS + 137_000;
    let made = thread::scope(|scope| {
        let disturbing = scope.spawn(|| {
            let disturb = || disturb(kind, cpu, length_ns, TIMES, every_ns);
            let made =
                if kind == Kind::PreemptOff { while_contended(cpu, disturb) } else { while_loaded(cpu, disturb) };
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
    Ok(Measurement { made, events, snapshot })
}

fn options(test_cpus: TestCpus) -> IrqsoffOptions {
    IrqsoffOptions {
        backend: Some("ticks".to_owned()),
        cpus: vec![test_cpus.disturbed],
        // The period by which the bounds are known.
        period_ns: Some(MS_NS),
        late_over_ns: Some(100_000),
        keep_evidence: true,
        ..IrqsoffOptions::default()
    }
}

/// Returns the late event of a window: the tick that came right after it.
fn matching_event<'a>(events: &'a [LateEvent], made: &Range<u64>) -> Option<&'a LateEvent> {
    events
        .iter()
        .max_by_key(|event| common_ns(made, &(tick(event).due_ns..tick(event).came_ns)))
        .filter(|event| common_ns(made, &(tick(event).due_ns..tick(event).came_ns)) > 0)
}

/// Results for windows of known length.
#[derive(Debug, Default)]
struct Tally {
    windows: usize,
    missed: usize,
    outside: usize,
    /// Outside of the bounds, if interrupt delivery time counts as an error too.
    strictly_outside: usize,
    named: usize,
}

const ENABLES: &str = "bpf_local_irq_restore";

fn is_by(labels: &Labels, function: &str) -> bool {
    labels.get("kind").is_some_and(|kind| kind == "irqs_off")
        && labels.get("function").is_some_and(|found| found == function)
}

fn windows_are_seen(test_cpus: TestCpus, length_ns: u64, tally: &mut Tally) -> Result<()> {
    let seen = seen(test_cpus, &options(test_cpus), Kind::IrqsOff, length_ns)?;
    for made in &seen.made {
        tally.windows += 1;
        let Some(event) = matching_event(&seen.events, made) else {
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
    let reported = seen.events.iter().filter(|event| is_by(&event.labels, ENABLES)).count() as u64;
    println!("{length_ns} ns: {counted} counted, lost {:?}", seen.snapshot.lost);
    ensure!(counted == reported, "{counted} are counted, and {reported} reported");
    Ok(())
}

#[test]
fn irqs_off_windows_are_within_bounds() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    if is_emulated() {
        println!("skipped: an emulated CPU is late all the time");
        return Ok(());
    }
    let outcome = in_rounds(|| {
        let mut tally = Tally::default();
        for length_ms in [2, 5, 10, 20] {
            windows_are_seen(test_cpus, length_ms * MS_NS, &mut tally)?;
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

/// Late ticks in user code are not its fault: an event with interrupts off needs a stack that shows the code that
/// enabled them.
#[test]
fn user_code_is_never_blamed_for_irqs_off() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    pin_to(test_cpus.tool)?;
    // Any lateness at all, as an undisturbed machine has no other.
    let from_ns = 5_000;
    let mut source = start(&IrqsoffOptions { from_ns, late_over_ns: Some(from_ns), ..options(test_cpus) })?;
    let (began, mut events) = (Instant::now(), Vec::new());
    // Only the hypervisor makes a tick late in user code: on a quiet machine, seconds may pass until it does.
    while began.elapsed() < USER_TICK_WITHIN && !events.iter().any(is_in_user) {
        while_loaded(test_cpus.disturbed, || {
            thread::sleep(Duration::from_secs(2));
            Ok(())
        })?;
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
    }
    let lost = source.snapshot()?.lost;
    patching(|| drop(source));
    let in_user = || events.iter().filter(|event| is_in_user(event));
    let kinds: BTreeSet<&str> = in_user().map(|event| event.labels["kind"].as_str()).collect();
    println!("{} late, {} of them in user code, reported as {kinds:?}, lost {lost:?}", events.len(), in_user().count());
    for event in &events {
        let is_off = event.labels["kind"] == "irqs_off";
        ensure!(!(is_off && is_in_user(event)), "{event:?}");
        ensure!(
            !is_off || lost["stacks"] > 0 || event.labels.contains_key("function"),
            "no function enabled them: {event:?}"
        );
        // A window that was mostly stolen is not attributed to interrupts off.
        let stolen_at_most_ns = tick(event).steal_ns + tick(event).perhaps_stolen_ns;
        ensure!(!is_off || stolen_at_most_ns + from_ns <= event.latency_ns, "it was stolen: {event:?}");
        ensure!(event.causes.iter().map(|cause| cause.ns).sum::<u64>() == event.latency_ns, "{event:?}");
    }
    if cfg!(target_arch = "x86_64") && in_user().next().is_none() {
        println!("inconclusive: no tick was late in user code within {USER_TICK_WITHIN:?}");
    }
    Ok(())
}

/// Runs `act`, and adds its duration to `taken`.
fn timed<T>(taken: &mut Duration, act: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let outcome = act();
    *taken += began.elapsed();
    outcome
}

/// The timers of the backend `ticks`, as `--timers` sees them: each period has an expiry, or is counted as missed.
#[test]
fn expiries_and_missed_periods_add_up() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    in_rounds(|| {
        pin_to(test_cpus.tool)?;
        let period_ns = if is_emulated() { 20 * MS_NS } else { MS_NS };
        let mut ticks = start(&IrqsoffOptions { period_ns: Some(period_ns), timer_test: true, ..options(test_cpus) })?;
        let mut timers = patching(|| {
            let cpus = vec![test_cpus.disturbed];
            IrqsoffOptions { timers: true, cpus, ..IrqsoffOptions::default() }.attach(&Session::of_one())
        })?;
        // From here on the period is known.
        thread::sleep(Duration::from_nanos(20 * period_ns));
        // The first snapshot is slow: page faults and symbol look-ups.
        timers.snapshot()?;
        let mut reading = Duration::ZERO;
        timed(&mut reading, || timers.snapshot())?;
        ticks.snapshot()?;
        let length_ns = 10 * MS_NS;
        let made = if is_emulated() {
            thread::sleep(Duration::from_secs(2));
            Vec::new()
        } else {
            match disturb(Kind::IrqsOff, test_cpus.disturbed, length_ns, 10, 50 * MS_NS) {
                Err(error) if is_unsupported(&error) => Vec::new(),
                made => made?,
            }
        };
        let (timers_seen, ticks_seen) = (timed(&mut reading, || timers.snapshot())?, ticks.snapshot()?);
        patching(|| drop((timers, ticks)));
        let is_ours = |series: &&Series| {
            series.labels.get("callback").is_some_and(|name| name == "perf_swevent_hrtimer")
                && series.labels["cpu"] == test_cpus.disturbed.to_string()
                && series.values.contains_key("period_ns")
        };
        let ours = timers_seen.series.iter().find(is_ours).context("its timer is not seen")?;
        let (latency, runtime) = (&ours.histograms["latency"], &ours.histograms["runtime"]);
        let overruns = ours.values["overruns"] as u64;
        let due = timers_seen.duration_ns / period_ns;
        println!(
            "{} and {overruns} missed of {due} periods, latest {} ns, lost {:?}",
            latency.count(),
            latency.max_ns(),
            timers_seen.lost
        );
        ensure!(ours.labels["mode"] == "hard" && ours.values["period_ns"] as u64 == period_ns, "{:?}", ours.values);
        ensure!(runtime.count().abs_diff(latency.count()) <= 1, "a function has two ends");
        if is_emulated() {
            println!("skipped: an emulated CPU is late all the time");
            return Ok(());
        }
        let cpu = |series: &&Series| series.histograms.contains_key("lateness");
        let test = ticks_seen.series.iter().find(cpu).context("the ticks are not counted")?;
        let test_overruns = test.values["overruns"] as u64;
        // A virtual machine's kernel may hide interrupts from either count.
        ensure!(test_overruns.abs_diff(overruns) <= 5, "{test_overruns} are missed by the ticks' own count");
        if !made.is_empty() {
            // A window of ten periods hits nine or ten.
            ensure!((90..=102).contains(&overruns), "{overruns} are missed in ten windows of ten periods");
            ensure!(
                (length_ns - MS_NS..length_ns * 5 / 4).contains(&latency.max_ns()),
                "the latest was late by {}",
                latency.max_ns()
            );
        }
        // Other events make the kernel reprogram these timers, and a timer's figures are read at any time during a
        // snapshot.
        let unseen = ticks_seen.lost["unseen"] + reading.as_nanos() as u64 / period_ns;
        ensure!(
            (latency.count() + overruns).abs_diff(due) <= 2 + 2 * unseen + due / 50,
            "{} and {overruns} of {due}, and {unseen} unseen",
            latency.count()
        );
        Ok(())
    })
}

/// Period of the more urgent thread's wakeups: the maximum part of a section that passes before a thread waits for its
/// end.
const CONTEND_EVERY: Duration = Duration::from_millis(1);

/// Runs `act` while the most urgent thread wants the CPU each millisecond.
fn while_contended<T>(cpu: u32, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let wants = thread::Builder::new().name("test-wants".to_owned()).spawn_scoped(scope, || {
            become_fifo_on(cpu, 90)?;
            while !over.load(Ordering::Relaxed) {
                thread::sleep(CONTEND_EVERY);
            }
            anyhow::Ok(())
        })?;
        let outcome = act();
        over.store(true, Ordering::Relaxed);
        wants.join().expect("sleeping does not panic")?;
        outcome
    })
}

/// Checks that a known time with preemption off is reported: exactly if the kernel has events of it, else from when a
/// thread waits.
fn preemption_off_is_reported(test_cpus: TestCpus, length_ns: u64) -> Result<()> {
    let asked = IrqsoffOptions {
        what: What::Preemption,
        cpus: vec![test_cpus.disturbed],
        late_over_ns: Some(length_ns / 4),
        ..IrqsoffOptions::default()
    };
    let Measurement { made, mut events, snapshot } = seen(test_cpus, &asked, Kind::PreemptOff, length_ns)?;
    events.retain(|event| event.labels["task"].starts_with("whylate-preempt:") && event.cpu == test_cpus.disturbed);
    let is_exact = snapshot.backend == "events";
    let counted: u64 = snapshot.series.iter().map(|series| series.histograms["length"].count()).sum();
    ensure!(counted >= events.len() as u64, "{counted} are counted, and {} reported", events.len());
    // Tolerance for what an emulator does to a length, and a host to a CPU.
    let (wanted_ns, slack_ns) = if is_exact { (0, 20_000) } else { (CONTEND_EVERY.as_nanos() as u64, 150_000) };
    let slack_ns = slack_ns.max(length_ns / 50);
    let (mut reported, mut within, mut inside) = (0, 0, 0);
    for made in &made {
        let made_ns = made.end - made.start;
        let of = events.iter().max_by_key(|event| {
            let end_ns = event.at_unix_ns - unix_less_monotonic_ns();
            common_ns(made, &(end_ns - event.latency_ns..end_ns))
        });
        let Some(event) = of.filter(|event| {
            let end_ns = event.at_unix_ns - unix_less_monotonic_ns();
            common_ns(made, &(end_ns - event.latency_ns..end_ns)) > 0
        }) else {
            continue;
        };
        reported += 1;
        let least_ns = made_ns.saturating_sub(wanted_ns + slack_ns);
        within += usize::from((least_ns..=made_ns + slack_ns).contains(&event.latency_ns));
        inside += usize::from(event.stack.iter().any(|frame| frame.contains("keep_preemption_off")));
    }
    let kinds: BTreeSet<&str> = events.iter().map(|event| event.labels["kind"].as_str()).collect();
    println!(
        "preemption off, {length_ns} ns by {}: {reported} of {} reported as {kinds:?}, {within} within, {inside} with the program on the stack, \
         lost {:?}",
        snapshot.backend,
        made.len(),
        snapshot.lost
    );
    ensure!(reported == made.len(), "{reported} of {} are reported", made.len());
    ensure!(
        within * 100 >= made.len() * if is_emulated() { 50 } else { 95 },
        "{within} of {reported} are within their bounds"
    );
    // A tick finds the running program: within 10 ms there is at least one at any HZ. The last stacks are read after
    // the program was unloaded, and lack its name.
    let is_found = is_exact || length_ns < 10 * MS_NS || inside * 100 >= made.len() * 90;
    ensure!(is_found, "the program is seen {inside} times");
    Ok(())
}

/// Returns the difference of CLOCK_REALTIME, of the timestamps, and CLOCK_MONOTONIC, of the sections.
fn unix_less_monotonic_ns() -> u64 {
    let now = |clock| {
        let time = rustix::time::clock_gettime(clock);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    now(rustix::time::ClockId::Realtime) - now(rustix::time::ClockId::Monotonic)
}

#[test]
fn preemption_off_is_reported_while_a_thread_waits() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    for length_ms in [2, 5, 10, 20] {
        match in_rounds(|| preemption_off_is_reported(test_cpus, length_ms * MS_NS)) {
            Err(error) if is_unsupported(&error) => return Ok(()),
            outcome => outcome?,
        }
    }
    Ok(())
}

#[test]
fn rejects_unsupported_options() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for refused in [
        IrqsoffOptions { cpus: vec![60_000], ..IrqsoffOptions::default() },
        IrqsoffOptions { period_ns: Some(1), ..IrqsoffOptions::default() },
        IrqsoffOptions { backend: Some("nonsense".to_owned()), ..IrqsoffOptions::default() },
        IrqsoffOptions { backend: Some("need_resched".to_owned()), ..IrqsoffOptions::default() },
        IrqsoffOptions { backend: Some("ticks".to_owned()), what: What::Preemption, ..IrqsoffOptions::default() },
    ] {
        ensure!(refused.attach(&Session::of_one()).is_err(), "{refused:?}");
    }
    Ok(())
}

/// A table of eight culprits is full at once; entries of quiet culprits are reused.
#[test]
fn full_culprit_table_reuses_quiet_entries() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    let most = 8;
    let mut source = start(&IrqsoffOptions {
        // Counts each tick that comes a little later than usual.
        from_ns: 1,
        most_culprits: Some(most),
        late_over_ns: None,
        keep_evidence: false,
        ..options(test_cpus)
    })?;
    let over = AtomicBool::new(false);
    let mut stacks = BTreeSet::new();
    let mut full = 0;
    thread::scope(|scope| -> Result<()> {
        let working = scope.spawn(|| -> Result<()> {
            pin_to(test_cpus.disturbed)?;
            // The timer interrupts it somewhere in the kernel.
            while !over.load(Ordering::Relaxed) {
                std::fs::read_dir("/proc/self")?.for_each(drop);
                std::fs::read_to_string("/proc/self/status")?;
            }
            Ok(())
        });
        let mut look = || -> Result<()> {
            for _ in 0..15 {
                thread::sleep(Duration::from_millis(100));
                source.drain_late(Duration::ZERO, &mut |_| {})?;
                let snapshot = source.snapshot()?;
                stacks.extend(snapshot.stacks.into_iter().map(|stack| stack.kernel));
                full += snapshot.lost["culprits_full"];
            }
            Ok(())
        };
        let looked = look();
        over.store(true, Ordering::Relaxed);
        working.join().expect("working does not panic").and(looked)
    })?;
    patching(|| drop(source));
    println!("{} stacks with room for {most}; {full} ticks found no room", stacks.len());
    ensure!(stacks.len() > 2 * most as usize, "{} stacks", stacks.len());
    Ok(())
}
