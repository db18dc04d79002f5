// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submission threads under loads of known work, and beside what the scheduler counts. They run as root.
#![allow(unsafe_code)]

mod kernel;

use std::fs;
use std::io::Read as _;
use std::mem;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use io_uring::IoUring;
use kernel::chance::in_rounds;
use kernel::is_emulated;
use kernel::late::{Places, stay_on};
use kernel::turn::turn_to_measure;
use kernel::urgent::patching;
use whylate_model::sqpoll::{is_part_of, is_thread};
use whylate_model::{CauseKind, Series, Snapshot};
use whylate_sources::inject::sqpoll::{Load, MOST_URGENT, Plan, READ_BYTES};
use whylate_sources::sqpoll::{AttachedSqpoll, SqpollOptions};
use whylate_sources::{AttachError, Attached as _, Measuring, Session, Threads};

const INTERVAL: Duration = Duration::from_secs(1);
/// What a share of work may be off by, as a share of the time.
const OFF: f64 = 0.02;

fn options(backend: &str) -> SqpollOptions {
    SqpollOptions {
        backend: Some(backend.to_owned()),
        threads: Threads::of(std::process::id()),
        ..SqpollOptions::default()
    }
}

fn precise() -> SqpollOptions {
    SqpollOptions { precise: true, ..options("bpf") }
}

fn start(options: &SqpollOptions) -> Result<Measuring<AttachedSqpoll>> {
    Ok(patching(|| options.start(&Session::of_one()))?)
}

/// Without trampolines, as on kernels before 6.9.
fn sampled() -> SqpollOptions {
    SqpollOptions { sampled: true, ..options("bpf") }
}

/// The ways to tell work that this kernel has, attached before a thread spins without end and taken away after it.
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

/// The series of a thread. Another test of this process may have left one that is about to end.
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

/// How long a thread has waited for a CPU by the scheduler's count.
fn waited_ns(tid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat"))?;
    Ok(text.split_whitespace().nth(1).context("schedstat has three fields")?.parse()?)
}

/// How long one request of the load takes as a system call, at best.
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

/// Others had the load's CPU for this share of the time: what it has done is not known.
#[derive(Debug, thiserror::Error)]
#[error("others had the load's CPU for too long to tell: {0}")]
struct Unknown(f64);

/// Compares an interval with what the load knows: at times not whether its last request was done, as it had no CPU.
fn compare_once(source: &mut AttachedSqpoll, load: &Load, duty: f64) -> Result<()> {
    source.snapshot()?;
    let before = load.done()?;
    thread::sleep(INTERVAL);
    let snapshot = source.snapshot()?;
    let done = load.done()?.since(&before);
    let share = |ns: u64| ns as f64 / done.at_ns as f64;
    let series = of_thread(&snapshot, load.tid())?;
    ensure_adds_up(series)?;
    let working = value(series, "working")?;
    let (most, unsure) = (share(done.busy_ns), share(done.uncertain_ns));
    println!(
        "duty {duty}: outstanding {most:.4}, of that unsure {unsure:.4}; working {working:.4} of {:?} ({:?})",
        series.values, snapshot.lost
    );
    if unsure >= OFF / 2.0 && !is_emulated() {
        return Err(Unknown(unsure).into());
    }
    ensure!(done.requests > 0, "nothing was done");
    // Others may keep the thread from its CPU.
    let had_cpu = 1.0 - value(series, "starved")?;
    ensure!(most > 0.7 * duty.min(had_cpu) || is_emulated(), "the load has not reached {duty}: {most}");
    ensure!(working <= most + OFF, "outstanding {most}, working {working}");
    if is_emulated() {
        // Whoever runs the emulator may stop a CPU just when a request comes in: it is outstanding, and no work.
        let least = share(done.requests * read_ns()?) / 2.0;
        println!("{} requests take at least {least:.4}", done.requests);
        ensure!(working >= least, "the requests take {least} where they are system calls, working {working}");
    } else {
        ensure!(working >= most - unsure - OFF, "outstanding {most}, unsure {unsure}, working {working}");
    }
    Ok(())
}

#[test]
fn the_share_of_work_is_that_of_the_load() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    for way in ways()? {
        // Emulated, a request takes longer than the shortest ones last.
        let duties = if is_emulated() { &[0.37, 0.99][..] } else { &[0.01, 0.1, 0.37, 0.99] };
        for &duty in duties {
            let plan = Plan {
                duty,
                sq_cpu: Some(places.disturbed),
                app_cpu: Some(places.tool),
                urgent: true,
                ..Plan::default()
            };
            let mut source = start(&way)?;
            let load = Load::start(&plan)?;
            println!("work is told by {}", source.way());
            // The load learns how long a request takes.
            thread::sleep(Duration::from_millis(300));
            let mut was_known = duty < MOST_URGENT;
            let outcome = in_rounds(|| {
                let outcome = compare_once(&mut source, &load, duty);
                was_known |= outcome.as_ref().is_err_and(|error| !error.is::<Unknown>());
                outcome
            });
            match outcome {
                // So large a share comes from an application that is not urgent.
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
fn a_thread_that_sleeps_in_between_works_as_much() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let plan = Plan {
        duty: 0.1,
        period: Duration::from_millis(100),
        idle_ms: 1,
        sq_cpu: Some(places.disturbed),
        app_cpu: Some(places.tool),
        urgent: true,
        ..Plan::default()
    };
    for way in ways()? {
        let mut source = start(&way)?;
        let load = Load::start(&plan)?;
        println!("work is told by {}", source.way());
        in_rounds(|| {
            compare_once(&mut source, &load, plan.duty)?;
            thread::sleep(INTERVAL);
            let snapshot = source.snapshot()?;
            let series = of_thread(&snapshot, load.tid())?;
            println!("{:?}", series.values);
            // Others may keep it from a CPU for long, but it does not spin.
            let (sleeping, starved) = (value(series, "sleeping")?, value(series, "starved")?);
            // An emulated CPU that stops while it spins adds to that.
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
fn nothing_waits_for_a_thread_that_never_sleeps() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let _load = Load::start(&Plan { duty: 0.05, ..Plan::default() })?;
    match precise().start(&Session::of_one()).map(|_| ()) {
        Err(AttachError::Unsupported(reason)) if reason.contains("spins without sleeping") => Ok(()),
        other => anyhow::bail!("{other:?}"),
    }
}

/// Two threads that keep a CPU busy meanwhile.
fn with_competitors<T>(cpu: u32, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            thread::Builder::new().name("test-hog".to_owned()).spawn_scoped(scope, || {
                stay_on(cpu).expect("a thread may go to a CPU");
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
fn a_thread_without_a_cpu_is_starved_as_the_scheduler_counts_it() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let plan = Plan { duty: 0.05, sq_cpu: Some(places.disturbed), app_cpu: Some(places.tool), ..Plan::default() };
    for backend in ["bpf", "fdinfo"] {
        let load = Load::start(&plan)?;
        with_competitors(places.disturbed, || {
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
                ensure!((starved - counted).abs() < OFF, "starved {starved}, by schedstat {counted}");
                let parts = snapshot.series.iter().filter(|part| is_part_of(part, series));
                let by: Vec<_> = parts.filter_map(|part| part.labels.get("by")).collect();
                println!("{by:?}");
                // Whoever else is busy on this machine may be named rather than the two.
                ensure!(backend != "bpf" || !by.is_empty(), "behind nobody: {:?}", snapshot.series);
                Ok(())
            })
        })?;
    }
    Ok(())
}

#[test]
fn long_waits_for_a_cpu_are_explained() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU is late all the time");
        return Ok(());
    }
    let plan = Plan { duty: 0.05, sq_cpu: Some(places.disturbed), app_cpu: Some(places.tool), ..Plan::default() };
    let load = Load::start(&plan)?;
    let mut source = start(&SqpollOptions { explain_over_ns: Some(1_000_000), ..options("bpf") })?;
    let mut late = Vec::new();
    with_competitors(places.disturbed, || {
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
    let hogs_ns = of(&|cause| cause.kind == CauseKind::Thread && cause.who.starts_with("test-hog:"));
    let threads_ns = of(&|cause| cause.kind == CauseKind::Thread);
    // What a hypervisor takes, it takes from all of them.
    let all_ns = of(&|cause| cause.kind != CauseKind::Steal);
    println!("of {all_ns} ns the hogs had {hogs_ns}, all threads {threads_ns}");
    // Whoever else is busy on this machine has its part too.
    ensure!(
        hogs_ns > 0 && threads_ns * 10 > all_ns * 8,
        "of {all_ns} ns the hogs had {hogs_ns}, and all threads {threads_ns}"
    );
    Ok(())
}

#[test]
fn rings_that_share_a_thread_are_told_under_one_thread() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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
            // fdinfo does not tell.
            let expected = [false, backend == "bpf"];
            ensure!(attached == expected, "the second one was attached to the first: {:?}", snapshot.series);
        } else {
            ensure!(snapshot.lost["busy_rings"] > 0, "{backend} lost its rings: {snapshot:?}");
        }
    }
    Ok(())
}

#[test]
fn a_ring_that_never_started_only_sleeps() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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
            // SAFETY: the descriptor was made above, and nobody else has it.
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
fn a_ring_that_polls_its_device_is_told_as_that() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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
    // Its memory stays mapped until this process ends, and it closes no descriptor.
    mem::forget(ring);
    // SAFETY: it is the ring's descriptor, and the ring is forgotten.
    unsafe { libc::close(fd) };
    Ok(())
}

#[test]
fn a_ring_without_a_descriptor_is_seen() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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
fn a_thread_that_ends_is_told_until_then() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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
    ensure!(of_thread(&source.snapshot()?, tid).is_err(), "it is told once");
    patching(|| drop(source));
    Ok(())
}
