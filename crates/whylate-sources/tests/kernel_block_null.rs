// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source `block` on a device with known service times: the kernel's null_blk, where a timer completes requests.
//! Runs as root, where that module can be loaded: Debian's kernels in a virtual machine have it.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use whylate_model::{CauseKind, Histogram, LateEvent};
use whylate_sources::block::BlockOptions;
use whylate_sources::inject::file_load;
use whylate_sources::{Session, Source as _};

use support::fixtures::null_disk::{BLOCK, Buffer, Null, SIZE_MIB};
use support::is_emulated;
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::in_rounds;
use support::oracles::disk_counts::{ensure_counts_are_the_kernels, ensure_lost, kernel_counts, totals};

const MS: u64 = 1_000_000;

/// Has `threads` threads read or write `count` blocks each, one after another, in the half of the device that starts at
/// block `from`. Ends early when `stop` is set.
fn load(null: &Null, threads: u64, count: u64, from: u64, writes: bool, stop: &Arc<AtomicBool>) -> Result<()> {
    let start = |number: u64| {
        let (file, stop) = (null.open()?, Arc::clone(stop));
        let work = move || -> io::Result<()> {
            let mut block = Box::new(Buffer([7; BLOCK]));
            for turn in 0..count {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                // Far apart, so that they are not merged.
                let at = (from + (number * 1_031 + turn * 769) % (SIZE_MIB * 128)) * BLOCK as u64;
                if writes { file.write_all_at(&block.0, at)? } else { file.read_exact_at(&mut block.0, at)? }
            }
            Ok(())
        };
        Ok(thread::Builder::new().name("load".to_owned()).spawn(work)?)
    };
    let threads: Vec<_> = (0..threads).map(start).collect::<Result<_>>()?;
    for thread in threads {
        thread.join().map_err(|_| io::Error::other("a thread failed"))??;
    }
    Ok(())
}

fn near(ns: u64, expected_ns: u64) -> bool {
    // An emulated CPU is late by milliseconds.
    let slack_ns = if is_emulated() { 3 * MS + expected_ns / 5 } else { MS / 10 };
    ns.abs_diff(expected_ns) <= expected_ns / 20 + slack_ns
}

#[test]
fn device_and_queue_times_match_service_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for (took_ms, depth, scheduler) in [
        (1, 1, "none"),
        (1, 4, "none"),
        (5, 64, "none"),
        (5, 4, "mq-deadline"),
        (20, 1, "mq-deadline"),
        (20, 4, "none"),
    ] {
        let threads = u64::from(4 * depth).min(16);
        let Some(null) = Null::make(Duration::from_millis(took_ms), depth)? else { return Ok(()) };
        if null.schedule_by(scheduler).is_err() {
            println!("{scheduler} is not there");
            continue;
        }
        in_rounds(|| {
            let count = (200 / took_ms / threads * u64::from(depth)).max(4);
            let mut source = patching(|| null.options().attach(&Session::of_one()))?;
            load(&null, threads, count, 0, false, &Arc::default())?;
            let snapshot = source.snapshot()?;
            patching(|| drop(source));
            let of = |name: &str| {
                let mut all = Histogram::default();
                let reads = snapshot.series.iter().filter(|series| series.labels["thread"] == "load");
                reads.for_each(|series| all.merge(&series.histograms[name]));
                all
            };
            let [latency, throttled, queued, device] = ["latency", "throttled", "queued", "device"].map(of);
            let waited_ns = throttled.mean_ns() + queued.mean_ns();
            // Each request waits for the ones before it.
            let turns = threads.div_ceil(depth.into()) - 1;
            println!(
                "{took_ms} ms, depth {depth}, {threads} threads, {scheduler}: {} requests, at the device {} ns ({} to {}), before {} and {} ns; \
                 lost {:?}",
                latency.count(),
                device.quantile_ns(0.5),
                device.min_ns(),
                device.max_ns(),
                throttled.mean_ns(),
                queued.mean_ns(),
                snapshot.lost
            );
            assert_eq!(latency.count(), threads * count, "lost {:?}", snapshot.lost);
            // The completion timer may be late, but never early.
            ensure!(device.min_ns() >= took_ms * MS * 99 / 100, "{} ns at the device", device.min_ns());
            ensure!(near(device.quantile_ns(0.5), took_ms * MS), "{} ns at the device", device.quantile_ns(0.5));
            // In the first turn some do not wait, and in the last one the queue is shorter.
            let expected_ns = turns * took_ms * MS;
            ensure!(
                waited_ns <= expected_ns * 21 / 20 + if is_emulated() { 10 * MS + expected_ns / 4 } else { MS / 10 }
                    && waited_ns * 10 >= expected_ns * 5,
                "{waited_ns} ns before, {expected_ns} expected"
            );
            Ok(())
        })?;
    }
    Ok(())
}

/// Service time of the hog's device.
const TOOK_MS: u64 = 20;
const HOG: &str = "WHYLATE_NULL_HOG";

/// Another process that keeps 64 writes in flight, killed on drop.
struct Hog(Child);

impl Hog {
    fn start(null: &Null) -> Result<Hog> {
        let hog = Command::new(std::env::current_exe()?)
            .args(["--exact", "hog_process", "--nocapture", "--test-threads=1"])
            .env(HOG, &null.name)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        thread::sleep(Duration::from_millis(if is_emulated() { 1000 } else { 200 }));
        Ok(Hog(hog))
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn hog_process() -> Result<()> {
    let Some(name) = std::env::var_os(HOG) else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The parent creates the device, and removes it.
    let null =
        std::mem::ManuallyDrop::new(Null { name: name.to_string_lossy().into_owned(), directory: PathBuf::new() });
    load(&null, 64, u64::MAX, 0, true, &Arc::default())
}

/// Reads, and returns the late reads of this thread with their causes.
fn first_of_reads(null: &Null, reads: u64, late_ns: u64) -> Result<Vec<LateEvent>> {
    let options = BlockOptions { explain_over_ns: Some(late_ns), ..null.options() };
    let mut source = patching(|| options.attach(&Session::of_one()))?;
    let own = rustix::thread::gettid().as_raw_pid().to_string();
    let file = null.open()?;
    let mut block = Box::new(Buffer([7; BLOCK]));
    let mut events = Vec::new();
    let mut all = 0;
    for turn in 0..reads {
        file.read_exact_at(&mut block.0, (turn * 769 % (SIZE_MIB * 256)) * BLOCK as u64)?;
        source.drain_late(Duration::ZERO, &mut |event: LateEvent| {
            all += 1;
            if event.labels["submitter_tid"] == own {
                events.push(event);
            }
        })?;
    }
    let snapshot = source.snapshot()?;
    println!("{all} late requests, lost {:?}", snapshot.lost);
    patching(|| drop(source));
    for event in &events {
        let sum_ns: u64 = event.causes.iter().map(|cause| cause.ns).sum();
        assert_eq!(sum_ns, event.latency_ns, "causes add up to all of it: {event:?}");
    }
    Ok(events)
}

#[test]
fn late_reads_name_process_that_fills_device() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // An emulated CPU is too slow to explain more than some hundred of a hog's writes a second.
    let depths: &[u32] = if is_emulated() { &[4] } else { &[1, 4] };
    for &depth in depths {
        let Some(null) = Null::make(Duration::from_millis(TOOK_MS), depth)? else { return Ok(()) };
        null.schedule_by("none")?;
        in_rounds(|| {
            let alone = first_of_reads(&null, 20, (TOOK_MS - 1) * MS)?;
            let is_device = |event: &&LateEvent| {
                event.causes.first().is_some_and(|first| first.kind == CauseKind::Disk && first.who == null.name)
            };
            let right = alone.iter().filter(is_device).count();
            println!("alone: {right} of {} name the device", alone.len());
            ensure!(alone.len() == 20 && right >= 19, "{:?}", alone.iter().find(|event| !is_device(event)));
            let hog = Hog::start(&null)?;
            let behind = first_of_reads(&null, 12, (TOOK_MS + 1) * MS)?;
            let who = format!("load:{} (writes)", hog.0.id());
            let is_hog = |event: &&LateEvent| event.causes.first().is_some_and(|first| first.who == who);
            let right = behind.iter().filter(is_hog).count();
            println!("depth {depth}: {right} of {} name the hog", behind.len());
            ensure!(behind.len() >= if is_emulated() { 3 } else { 10 }, "only {} are explained", behind.len());
            ensure!(right * 100 >= behind.len() * 95, "{:?}", behind.iter().find(|event| !is_hog(event)));
            Ok(())
        })?;
    }
    Ok(())
}

/// A cgroup with a limit of reads per second, removed on drop.
struct Limited(PathBuf);

impl Limited {
    fn make(null: &Null, reads_a_second: u32) -> Result<Option<Limited>> {
        let root = Path::new("/sys/fs/cgroup");
        let can = fs::read_to_string(root.join("cgroup.controllers")).is_ok_and(|names| names.contains("io"));
        if !can || fs::write(root.join("cgroup.subtree_control"), "+io").is_err() {
            println!("skipped: no cgroup may have limits of a disk here");
            return Ok(None);
        }
        let directory = root.join("whylate-limited");
        let _ = fs::remove_dir(&directory);
        fs::create_dir(&directory)?;
        let limited = Limited(directory);
        let number = fs::read_to_string(format!("/sys/block/{}/dev", null.name))?;
        fs::write(limited.0.join("io.max"), format!("{} riops={reads_a_second}", number.trim()))?;
        Ok(Some(limited))
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = fs::write("/sys/fs/cgroup/cgroup.procs", std::process::id().to_string());
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn io_max_throttling_is_attributed_to_cgroup() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(null) = Null::make(Duration::from_millis(1), 64)? else { return Ok(()) };
    let Some(limited) = Limited::make(&null, 20)? else { return Ok(()) };
    fs::write(limited.0.join("cgroup.procs"), std::process::id().to_string())?;
    let options = BlockOptions { backend: Some("fexit".to_owned()), explain_over_ns: Some(10 * MS), ..null.options() };
    in_rounds(|| {
        let mut source = match patching(|| options.attach(&Session::of_one())) {
            Ok(source) => source,
            Err(whylate_sources::AttachError::Unsupported(reason)) => {
                println!("skipped: {reason}");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let file = null.open()?;
        let mut block = Box::new(Buffer([7; BLOCK]));
        let mut own_ns = 0;
        for turn in 0..40 {
            let began = Instant::now();
            file.read_exact_at(&mut block.0, (turn * 769 % (SIZE_MIB * 256)) * BLOCK as u64)?;
            own_ns += began.elapsed().as_nanos();
        }
        let mut events = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        let own = rustix::thread::gettid().as_raw_pid().to_string();
        let of_own = snapshot.series.iter().find(|series| series.labels["tid"] == own).context("it is not named")?;
        let (latency, throttled) = (&of_own.histograms["latency"], &of_own.histograms["throttled"]);
        println!(
            "{} reads took {own_ns} ns, {} of them reported, {} held back; {} late, lost {:?}",
            latency.count(),
            latency.sum_ns(),
            throttled.sum_ns(),
            events.len(),
            snapshot.lost
        );
        ensure!(latency.count() == 40, "{} reads", latency.count());
        ensure!(
            latency.sum_ns() <= own_ns && latency.sum_ns() * 10 >= own_ns * 8,
            "{} of {own_ns} ns",
            latency.sum_ns()
        );
        ensure!(throttled.sum_ns() * 10 >= latency.sum_ns() * 8, "{} ns are held back", throttled.sum_ns());
        let right = events.iter().filter(|event| {
            let first = event.causes.first();
            event.labels["submitter_tid"] == own
                && first.is_some_and(|first| {
                    first.kind == CauseKind::Throttled && first.who == "io.max of /whylate-limited"
                })
        });
        let right = right.count();
        ensure!(
            events.len() >= 10 && right * 100 >= events.len() * 95,
            "{right} of {}: {:?}",
            events.len(),
            events.first()
        );
        Ok(())
    })
}

/// A running blktrace, with its own timestamps.
struct Blktrace {
    running: Child,
    directory: tempfile::TempDir,
}

impl Blktrace {
    fn start(null: &Null) -> Result<Option<Blktrace>> {
        let directory = tempfile::tempdir()?;
        let started = Command::new("blktrace")
            .args(["-d", &format!("/dev/{}", null.name), "-o", "trace", "-D"])
            .arg(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let Ok(mut running) = started else {
            println!("skipped: there is no blktrace");
            return Ok(None);
        };
        thread::sleep(Duration::from_millis(if is_emulated() { 2000 } else { 300 }));
        if running.try_wait()?.is_some() {
            println!("skipped: the kernel lets no blktrace in");
            return Ok(None);
        }
        Ok(Some(Blktrace { running, directory }))
    }

    /// Returns each request's nanoseconds from queue to completion and from issue to completion, by operation.
    fn end(mut self) -> Result<BTreeMap<&'static str, Vec<(u64, u64)>>> {
        let pid = rustix::process::Pid::from_child(&self.running);
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        self.running.wait()?;
        let parse = Command::new("blkparse")
            .args(["-q", "-i", "trace", "-f", "%a %d %S %T %t\\n", "-D"])
            .arg(self.directory.path())
            .output()
            .context("there is no blkparse")?;
        ensure!(parse.status.success(), "{}", String::from_utf8_lossy(&parse.stderr));
        let mut open: BTreeMap<(String, char), (u64, u64)> = BTreeMap::new();
        let mut all: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
        for line in String::from_utf8_lossy(&parse.stdout).lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [action, flags, sector, seconds, ns] = fields[..] else { continue };
            let Some(letter) = flags.chars().find(|letter| matches!(letter, 'R' | 'W')) else { continue };
            let at_ns = seconds.parse::<u64>()? * 1_000_000_000 + ns.parse::<u64>()?;
            let key = (sector.to_owned(), letter);
            match action {
                "Q" => {
                    open.insert(key, (at_ns, 0));
                }
                "D" => open.entry(key).or_default().1 = at_ns,
                "C" => {
                    let (queued_ns, issued_ns) = open.remove(&key).with_context(|| format!("no begin of {line}"))?;
                    let operation = if letter == 'R' { "read" } else { "write" };
                    all.entry(operation).or_default().push((at_ns - queued_ns, at_ns - issued_ns));
                }
                _ => {}
            }
        }
        ensure!(open.is_empty(), "{} requests have no end", open.len());
        Ok(all)
    }
}

#[test]
fn agrees_with_blktrace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for threads in [1, 32] {
        let Some(null) = Null::make(Duration::from_millis(5), 8)? else { return Ok(()) };
        let Some(blktrace) = Blktrace::start(&null)? else { return Ok(()) };
        let mut source = patching(|| null.options().attach(&Session::of_one()))?;
        let stop = Arc::default();
        thread::scope(|scope| {
            let reads = scope.spawn(|| load(&null, threads, 10, 0, false, &stop));
            // In the other half, so that the sector identifies each request.
            load(&null, threads, 10, SIZE_MIB * 128, true, &stop)?;
            reads.join().map_err(|_| io::Error::other("a thread failed"))?
        })?;
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        let traced = blktrace.end()?;
        for operation in ["read", "write"] {
            let of = |name: &str| {
                let mut all = Histogram::default();
                let ours = snapshot.series.iter().filter(|series| series.labels["operation"] == operation);
                ours.for_each(|series| all.merge(&series.histograms[name]));
                all
            };
            let theirs = traced.get(operation).context("blktrace saw none")?;
            let (latency, device, completion) = (of("latency"), of("device"), of("completion"));
            let count = theirs.len() as u64;
            let mean_ns = theirs.iter().map(|(latency_ns, _)| latency_ns).sum::<u64>() / count;
            let mean_device_ns = theirs.iter().map(|(_, device_ns)| device_ns).sum::<u64>() / count;
            let most_ns = theirs.iter().map(|(latency_ns, _)| *latency_ns).max().unwrap_or(0);
            let own_device_ns = device.mean_ns() + completion.mean_ns();
            println!(
                "{threads} threads, {operation}: {} and {count} requests, {} and {mean_ns} ns on average, {own_device_ns} and \
                 {mean_device_ns} at the device, {} and {most_ns} at most",
                latency.count(),
                latency.mean_ns(),
                latency.max_ns()
            );
            assert_eq!((latency.count(), count), (threads * 10, threads * 10), "lost {:?}", snapshot.lost);
            // An emulated CPU takes long between two BPF programs at one event, and may stop in between.
            let slack_ns = if is_emulated() { MS / 5 } else { 1_000 };
            for (ours_ns, theirs_ns) in [(latency.mean_ns(), mean_ns), (own_device_ns, mean_device_ns)] {
                let apart_ns = ours_ns.abs_diff(theirs_ns);
                ensure!(apart_ns <= slack_ns.max(theirs_ns / 1_000), "{ours_ns} and {theirs_ns} ns");
            }
            let apart_ns = latency.max_ns().abs_diff(most_ns);
            ensure!(apart_ns <= (10 * slack_ns).max(most_ns / 1_000), "{} and {most_ns} ns at most", latency.max_ns());
        }
    }
    Ok(())
}

#[test]
fn polled_requests_have_no_completion_phase() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let took = Duration::from_millis(2);
    let Some(null) = Null::with(took, 8, &[("poll_queues", "1")])? else { return Ok(()) };
    let before = kernel_counts(&null.name)?;
    let mut source = patching(|| null.options().attach(&Session::of_one()))?;
    let plan = file_load::Plan {
        path: null.path(),
        writes: false,
        block_bytes: BLOCK as u32,
        depth: 4,
        runtime: Duration::from_millis(300),
        idle_ms: 1_000,
        sq_cpu: None,
        iopoll: true,
    };
    let report = file_load::run(&plan, &AtomicBool::new(false), || Ok(()))?;
    let snapshot = source.snapshot()?;
    patching(|| drop(source));
    let of = |name: &str| {
        let mut all = Histogram::default();
        snapshot.series.iter().for_each(|series| all.merge(&series.histograms[name]));
        all
    };
    let [latency, device, completion] = ["latency", "device", "completion"].map(of);
    println!(
        "{} requests of {} blocks, {} ns on average and {} at most, of {} and {}; {} ns of completion; lost {:?}",
        latency.count(),
        report.requests,
        latency.mean_ns(),
        latency.max_ns(),
        report.latency.mean_ns(),
        report.latency.max_ns(),
        completion.sum_ns(),
        snapshot.lost
    );
    // Consecutive blocks that are submitted together are one request.
    ensure_counts_are_the_kernels(&snapshot, &null.name, &before)?;
    assert_eq!(totals(&snapshot, &null.name, "read").bytes, report.requests * BLOCK as u64);
    ensure_lost(&snapshot, &[])?;
    assert!(latency.max_ns() <= report.latency.max_ns(), "the caller waits for longer");
    // No interrupt reports their completion: they count as at the device until polling finds them done.
    assert_eq!((device.count(), completion.max_ns()), (latency.count(), 0));
    Ok(())
}
