// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submission threads under loads of known work, compared with the scheduler's counts. Runs as root.
#![allow(unsafe_code)]

mod support;

use std::fs;
use std::io::Read as _;
use std::mem;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use io_uring::IoUring;
use support::is_emulated;
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::{Unjudged, in_rounds};
use whylate_model::sqpoll::{is_part_of, is_thread};
use whylate_model::{CauseKind, Series, Snapshot};
use whylate_sources::inject::sqpoll::{Load, MAX_URGENT, Plan, READ_BYTES};
use whylate_sources::sqpoll::{AttachedSqpoll, SqpollOptions};
use whylate_sources::{AttachError, Attached as _, Measuring, Session, Threads};

const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum error of a share of work, as a share of the time.
const MAX_ERROR: f64 = 0.02;

fn options(backend: &str) -> SqpollOptions {
    SqpollOptions {
        backend: Some(backend.to_owned()),
        threads: Threads::of_process(std::process::id()),
        ..SqpollOptions::default()
    }
}

fn precise() -> SqpollOptions {
    SqpollOptions { precise: true, ..options("bpf") }
}

fn start(options: &SqpollOptions) -> Result<Measuring<AttachedSqpoll>> {
    Ok(patching(|| options.start(&Session::of_one()))?)
}

/// Samples, without trampolines, as on kernels before 6.9.
fn sampled() -> SqpollOptions {
    SqpollOptions { sampled: true, ..options("bpf") }
}

/// Returns the ways to measure work that this kernel has. Each is attached before a thread spins without end, and
/// detached after it.
fn ways() -> Result<Vec<SqpollOptions>> {
    let mut ways = vec![options("bpf"), sampled()];
    match patching(|| precise().start(&Session::of_one())) {
        Ok(_) => ways.push(precise()),
        Err(AttachError::Unsupported(reason)) => println!("skipped: --precise: {reason}"),
        Err(error) => return Err(error.into()),
    }
    Ok(ways)
}

fn threads(snapshot: &Snapshot) -> Vec<&Series> {
    snapshot.series.iter().filter(|series| is_thread(series)).collect()
}

/// Returns the series of a thread. Another test of this process may have left a thread that is about to end.
fn of_thread(snapshot: &Snapshot, tid: u32) -> Result<&Series> {
    let mut found = threads(snapshot).into_iter().filter(|series| series.labels["tid"] == tid.to_string());
    let series = found.next().with_context(|| format!("thread {tid} is not in {:?}", snapshot.series))?;
    ensure!(found.next().is_none(), "thread {tid} is there twice: {:?}", snapshot.series);
    Ok(series)
}

fn value(series: &Series, name: &str) -> Result<f64> {
    series.values.get(name).copied().with_context(|| format!("no {name} in {series:?}"))
}

fn ensure_adds_up(series: &Series) -> Result<()> {
    let sum: f64 =
        ["working", "spinning", "sleeping", "starved"].iter().filter_map(|name| series.values.get(*name)).sum();
    ensure!((sum - 1.0).abs() < 1e-9, "the shares add up to {sum}: {series:?}");
    Ok(())
}

/// Returns a thread's run-queue wait in nanoseconds, by the scheduler's count.
fn waited_ns(tid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat"))?;
    Ok(text.split_whitespace().nth(1).context("schedstat has three fields")?.parse()?)
}

/// Returns the minimum duration of one of the load's requests as a system call.
fn read_ns() -> Result<u64> {
    let mut file = fs::File::open("/dev/urandom")?;
    let mut buffer = vec![0; READ_BYTES];
    let mut best = Duration::MAX;
    for _ in 0..50 {
        let began = Instant::now();
        file.read_exact(&mut buffer)?;
        best = best.min(began.elapsed());
    }
    Ok(best.as_nanos() as u64)
}

/// Other threads ran on the load's CPU for this share of the time, so that its work is unknown.
#[derive(Debug, thiserror::Error)]
#[error("others had the load's CPU for too long to tell: {0}")]
struct LoadIsUnknown(f64);

/// Compares an interval with the load's own account, which at times cannot say whether the last request was done, as
/// the load did not run.
fn compare_once(source: &mut AttachedSqpoll, load: &Load, duty: f64) -> Result<()> {
    source.snapshot()?;
    let (before, queued_ns) = (load.done()?, waited_ns(load.tid())?);
    thread::sleep(INTERVAL);
    let snapshot = source.snapshot()?;
    let (done, queued_ns) = (load.done()?.since(&before), waited_ns(load.tid())? - queued_ns);
    let share = |ns: u64| ns as f64 / done.at_ns as f64;
    let series = of_thread(&snapshot, load.tid())?;
    ensure_adds_up(series)?;
    let working = value(series, "working")?;
    let (most, unsure) = (share(done.busy_ns), share(done.uncertain_ns));
    println!(
        "duty {duty}: outstanding {most:.4}, of that unsure {unsure:.4}; working {working:.4} of {:?} ({:?})",
        series.values, snapshot.lost
    );
    if unsure >= MAX_ERROR / 2.0 && !is_emulated() {
        return Err(LoadIsUnknown(unsure).into());
    }
    ensure!(done.requests > 0, "nothing was done");
    // Other threads may occupy the submission thread's CPU.
    let had_cpu = 1.0 - value(series, "starved")?;
    ensure!(most > 0.7 * duty.min(had_cpu) || is_emulated(), "the load has not reached {duty}: {most}");
    ensure!(working <= most + MAX_ERROR, "outstanding {most}, working {working}");
    if is_emulated() {
        // The host may stop a CPU of the emulator when a request comes in: it is outstanding, and no work is done.
        let least = share(done.requests * read_ns()?) / 2.0;
        println!("{} requests take at least {least:.4}", done.requests);
        ensure!(working >= least, "the requests take {least} where they are system calls, working {working}");
    } else {
        // A request is outstanding, too, while its thread waits for the CPU.
        let queued = share(queued_ns);
        let least = most - unsure - queued;
        ensure!(working >= least - MAX_ERROR, "outstanding {most}, unsure {unsure}, queued {queued}: {working}");
    }
    Ok(())
}

#[test]
fn working_share_matches_load() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    for way in ways()? {
        // On an emulator a request takes longer than the shortest duties last.
        // Beyond MAX_URGENT the application is not real-time, and on a busy machine its account is as uncertain as the error.
        let duties = if is_emulated() { &[0.37, 0.99][..] } else { &[0.01, 0.1, 0.37, MAX_URGENT - 0.01] };
        for &duty in duties {
            let plan = Plan {
                duty,
                sq_cpu: Some(test_cpus.disturbed),
                app_cpu: Some(test_cpus.tool),
                urgent: true,
                ..Plan::default()
            };
            let mut source = start(&way)?;
            let load = Load::start(&plan)?;
            println!("work is measured by {}", source.way());
            // The load calibrates the duration of a request.
            thread::sleep(Duration::from_millis(300));
            let mut was_known = duty < MAX_URGENT;
            let outcome = in_rounds(|| {
                let outcome = compare_once(&mut source, &load, duty);
                let is_unknown = outcome.as_ref().is_err_and(|error| error.is::<LoadIsUnknown>());
                was_known |= outcome.is_err() && !is_unknown;
                // Once a round was judged, one that cannot be is inconclusive.
                outcome
                    .map_err(|error| if is_unknown && was_known { Unjudged(error.to_string()).into() } else { error })
            });
            match outcome {
                // So large a share needs an application that is not real-time.
                Err(error) if !was_known => println!("skipped: {duty}: {error}"),
                outcome => outcome?,
            }
            drop(load);
            patching(|| drop(source));
        }
    }
    Ok(())
}

#[test]
fn working_share_matches_load_of_sleeping_thread() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let plan = Plan {
        duty: 0.1,
        period: Duration::from_millis(100),
        idle_ms: 1,
        sq_cpu: Some(test_cpus.disturbed),
        app_cpu: Some(test_cpus.tool),
        urgent: true,
        ..Plan::default()
    };
    for way in ways()? {
        let mut source = start(&way)?;
        let load = Load::start(&plan)?;
        println!("work is measured by {}", source.way());
        in_rounds(|| {
            compare_once(&mut source, &load, plan.duty)?;
            thread::sleep(INTERVAL);
            let snapshot = source.snapshot()?;
            let series = of_thread(&snapshot, load.tid())?;
            println!("{:?}", series.values);
            // Run-queue waits may be long, but it does not spin.
            let (sleeping, starved) = (value(series, "sleeping")?, value(series, "starved")?);
            // An emulated CPU that stops while the thread spins adds to the spinning.
            let most = if is_emulated() { 0.3 } else { 0.7 };
            ensure!(sleeping + starved > most, "it neither works nor spins for most of the time: {series:?}");
            let wakeups = value(series, "wakeups_per_s")?;
            println!("{wakeups} wake-ups a second of 10");
            ensure!(wakeups <= 15.0 && (wakeups >= 5.0 || starved > 0.1), "{wakeups} wake-ups a second: {series:?}");
            Ok(())
        })?;
        drop(load);
        patching(|| drop(source));
    }
    Ok(())
}

#[test]
fn precise_is_refused_while_a_thread_never_sleeps() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let _load = Load::start(&Plan { duty: 0.05, ..Plan::default() })?;
    match precise().start(&Session::of_one()).map(|_| ()) {
        Err(AttachError::Unsupported(reason)) if reason.contains("spins without sleeping") => Ok(()),
        other => anyhow::bail!("{other:?}"),
    }
}

/// Runs `act` while two threads keep a CPU busy.
fn with_competitors<T>(cpu: u32, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            thread::Builder::new().name("test-hog".to_owned()).spawn_scoped(scope, || {
                pin_to(cpu).expect("a thread may go to a CPU");
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })?;
        }
        let outcome = act();
        over.store(true, Ordering::Relaxed);
        outcome
    })
}

#[test]
fn starved_share_matches_schedstat() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let plan = Plan { duty: 0.05, sq_cpu: Some(test_cpus.disturbed), app_cpu: Some(test_cpus.tool), ..Plan::default() };
    for backend in ["bpf", "fdinfo"] {
        let load = Load::start(&plan)?;
        with_competitors(test_cpus.disturbed, || {
            in_rounds(|| {
                let mut source = start(&options(backend))?;
                let before_ns = waited_ns(load.tid())?;
                thread::sleep(3 * INTERVAL);
                let waited_ns = waited_ns(load.tid())? - before_ns;
                let snapshot = source.snapshot()?;
                patching(|| drop(source));
                let series = of_thread(&snapshot, load.tid())?;
                let starved = value(series, "starved")?;
                let counted = waited_ns as f64 / snapshot.duration_ns as f64;
                println!("{backend}: starved {starved:.4}, by schedstat {counted:.4}: {:?}", series.values);
                ensure!(starved > 0.3, "two others want its CPU all the time: {series:?}");
                ensure!((starved - counted).abs() < MAX_ERROR, "starved {starved}, by schedstat {counted}");
                let parts = snapshot.series.iter().filter(|part| is_part_of(part, series));
                let by: Vec<_> = parts.filter_map(|part| part.labels.get("by")).collect();
                println!("{by:?}");
                // Another busy thread of this machine may be named instead of the two.
                ensure!(backend != "bpf" || !by.is_empty(), "without a culprit: {:?}", snapshot.series);
                Ok(())
            })
        })?;
    }
    Ok(())
}

#[test]
fn run_queue_waits_are_explained() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU is late all the time");
        return Ok(());
    }
    let plan = Plan { duty: 0.05, sq_cpu: Some(test_cpus.disturbed), app_cpu: Some(test_cpus.tool), ..Plan::default() };
    let load = Load::start(&plan)?;
    let mut source = start(&SqpollOptions { explain_over_ns: Some(1_000_000), ..options("bpf") })?;
    let mut late = Vec::new();
    with_competitors(test_cpus.disturbed, || {
        thread::sleep(2 * INTERVAL);
        source.drain_late(Duration::ZERO, &mut |event| late.push(event))
    })?;
    patching(|| drop(source));
    late.retain(|event| event.labels["tid"] == load.tid().to_string());
    println!("{} waits, the last one {:?}", late.len(), late.last());
    ensure!(late.len() > 10, "{} waits are not many", late.len());
    for event in &late {
        let sum_ns: u64 = event.causes.iter().map(|cause| cause.ns).sum();
        ensure!(sum_ns == event.latency_ns, "causes add up to {sum_ns}: {event:?}");
    }
    let of = |which: &dyn Fn(&whylate_model::Cause) -> bool| -> u64 {
        late.iter().flat_map(|event| &event.causes).filter(|cause| which(cause)).map(|cause| cause.ns).sum()
    };
    let hogs_ns = of(&|cause| cause.kind == CauseKind::Thread && cause.who.comm() == Some("test-hog"));
    let threads_ns = of(&|cause| cause.kind == CauseKind::Thread);
    // Stolen time is missing for all of them.
    let all_ns = of(&|cause| cause.kind != CauseKind::Steal);
    println!("of {all_ns} ns the hogs had {hogs_ns}, all threads {threads_ns}");
    // Other busy threads of this machine have their part too.
    ensure!(
        hogs_ns > 0 && threads_ns * 10 > all_ns * 8,
        "of {all_ns} ns the hogs had {hogs_ns}, and all threads {threads_ns}"
    );
    Ok(())
}

#[test]
fn rings_with_shared_thread_appear_under_one_thread() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let load = Load::start(&Plan { duty: 0.05, rings: 2, ..Plan::default() })?;
    for backend in ["bpf", "fdinfo"] {
        let mut source = start(&options(backend))?;
        thread::sleep(INTERVAL / 2);
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        let series = of_thread(&snapshot, load.tid())?;
        println!("{backend}: {:?}", series.values);
        if backend == "bpf" || value(series, "rings")? > 0.0 {
            ensure!(value(series, "rings")? as u64 == 2, "{backend}: {:?}", snapshot.series);
            let rings =
                snapshot.series.iter().filter(|part| part.labels.contains_key("ring") && is_part_of(part, series));
            let attached: Vec<bool> = rings.map(|ring| ring.values.contains_key("attached")).collect();
            // fdinfo does not show it.
            let expected = [false, backend == "bpf"];
            ensure!(attached == expected, "the second one was attached to the first: {:?}", snapshot.series);
        } else {
            ensure!(snapshot.lost["busy_rings"] > 0, "{backend} lost its rings: {snapshot:?}");
        }
    }
    Ok(())
}

#[test]
fn idle_ring_only_sleeps() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for backend in ["bpf", "fdinfo"] {
        let mut source = start(&options(backend))?;
        let before = source.snapshot()?;
        let ring: IoUring = IoUring::builder().setup_sqpoll(1_000).build(8)?;
        let mut duplicates = vec![];
        for _ in 0..3 {
            // SAFETY: the call takes a number and makes a descriptor.
            duplicates.push(unsafe { libc::dup(ring.as_raw_fd()) });
        }
        thread::sleep(INTERVAL / 2);
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        for fd in duplicates {
            // SAFETY: the descriptor was made above, and is used nowhere else.
            unsafe { libc::close(fd) };
        }
        drop(ring);
        let is_new = |series: &&&Series| !before.series.iter().any(|other| other.labels == series.labels);
        let all = threads(&snapshot);
        let new: Vec<_> = all.iter().filter(is_new).collect();
        println!("{backend}: {new:?}");
        ensure!(new.len() == 1, "{backend}: one thread is new: {:?}", snapshot.series);
        let series = new[0];
        ensure!(value(series, "sleeping")? > 0.9, "{backend}: {series:?}");
        ensure!(value(series, "starved")? < 0.1, "{backend}: {series:?}");
        ensure!(value(series, "rings")? as u64 == 1, "{backend}: its ring has four descriptors: {series:?}");
        ensure!(series.values.get("working").is_none_or(|&share| share < 0.01), "{backend}: {series:?}");
    }
    Ok(())
}

#[test]
fn iopoll_ring_is_marked() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let mut source = start(&options("bpf"))?;
    let ring: IoUring = IoUring::builder().setup_sqpoll(1_000).setup_iopoll().build(8)?;
    thread::sleep(INTERVAL / 10);
    let snapshot = source.snapshot()?;
    drop(ring);
    patching(|| drop(source));
    let rings: Vec<_> = snapshot.series.iter().filter(|series| series.labels.contains_key("ring")).collect();
    ensure!(rings.len() == 1 && rings[0].values.get("iopoll") == Some(&1.0), "{:?}", snapshot.series);
    ensure!(!rings[0].values.contains_key("napi"), "{rings:?}");
    Ok(())
}

/// Registers the descriptor of a ring with this thread (5.18), and closes it: the ring lives until the thread ends.
fn registered_and_closed(ring: IoUring) -> Result<()> {
    const IORING_REGISTER_RING_FDS: u32 = 20;
    #[repr(C)]
    struct Update {
        offset: u32,
        reserved: u32,
        data: u64,
    }
    let fd = ring.as_raw_fd();
    let mut update = Update { offset: u32::MAX, reserved: 0, data: fd as u64 };
    // SAFETY: the last two arguments are one structure of this layout, which lives until the call returns.
    let registered =
        unsafe { libc::syscall(libc::SYS_io_uring_register, fd, IORING_REGISTER_RING_FDS, &raw mut update, 1) };
    ensure!(registered == 1, "the ring cannot be registered: {}", std::io::Error::last_os_error());
    // Its memory stays mapped until this process ends, and its descriptor is not closed.
    mem::forget(ring);
    // SAFETY: it is the ring's descriptor, and the ring is forgotten.
    unsafe { libc::close(fd) };
    Ok(())
}

#[test]
fn registered_ring_without_descriptor_is_seen() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let mut source = start(&options("bpf"))?;
    let (seen, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let snapshot = thread::scope(|scope| {
        let owner = scope.spawn(|| {
            let made: Result<IoUring> = IoUring::builder().setup_sqpoll(1_000).build(8).map_err(anyhow::Error::from);
            let outcome = made.and_then(registered_and_closed);
            seen.store(true, Ordering::Relaxed);
            while outcome.is_ok() && !over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
            }
            outcome
        });
        while !seen.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(INTERVAL / 4);
        let snapshot = source.snapshot();
        over.store(true, Ordering::Relaxed);
        owner.join().expect("registering does not panic")?;
        snapshot
    })?;
    patching(|| drop(source));
    let rings: Vec<_> = snapshot.series.iter().filter_map(|series| series.labels.get("ring")).collect();
    ensure!(rings == ["registered 0"], "{:?}", snapshot.series);
    Ok(())
}

#[test]
fn ended_thread_is_reported_until_its_end() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let load = Load::start(&Plan { duty: 0.2, ..Plan::default() })?;
    let tid = load.tid();
    let mut source = start(&options("bpf"))?;
    thread::sleep(INTERVAL / 2);
    drop(load);
    while fs::exists(format!("/proc/self/task/{tid}"))? {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(INTERVAL / 2);
    let snapshot = source.snapshot()?;
    let series = of_thread(&snapshot, tid)?;
    println!("{series:?}");
    ensure_adds_up(series)?;
    ensure!(value(series, "present")? < 0.9, "it was there half of the time: {series:?}");
    ensure!(snapshot.lost["ended_unseen"] == 0, "{:?}", snapshot.lost);
    thread::sleep(INTERVAL / 10);
    ensure!(of_thread(&source.snapshot()?, tid).is_err(), "it is reported once");
    patching(|| drop(source));
    Ok(())
}
