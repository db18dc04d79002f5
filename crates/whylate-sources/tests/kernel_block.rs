// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the source `block` with the kernel's own trace of the test's requests, and with the test's own timing. Runs
//! as root.

mod support;

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use whylate_model::{CauseKind, Histogram, LateEvent, Snapshot};
use whylate_sources::block::{BlockOptions, By, disk_of};
use whylate_sources::inject::disturbance::Kind;
use whylate_sources::{Session, Source as _};

use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::{by_chance, in_rounds};
use support::oracles::trace::Trace;
use support::workloads::disturbances::{disturb, is, is_unsupported, while_loaded};
use support::{amount, file_on_disk, is_emulated};

/// Bytes per read or write; at least the block size of the disk.
const BLOCK: usize = 4096;
const BLOCKS: u64 = 2_048;
const LARGE: usize = 512 << 10;
/// Resolution of a trace's timestamps.
const STAMP_NS: u64 = 1_000;

/// A buffer that is aligned for direct I/O.
#[repr(align(4096))]
struct Buffer([u8; BLOCK]);

/// Like [`Buffer`], for requests that take a disk long.
#[repr(align(4096))]
struct Large([u8; LARGE]);

/// Creates a file on the disk that bypasses the page cache. Returns `None`, and prints why, if there can be none.
fn direct_file() -> Result<Option<File>> {
    let Some(file) = file_on_disk()? else { return Ok(None) };
    let block = Buffer([7; BLOCK]);
    (0..BLOCKS).try_for_each(|number| file.write_all_at(&block.0, number * BLOCK as u64))?;
    file.sync_all()?;
    if fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::DIRECT).is_err() {
        println!("skipped: the file system of the build folder has no direct I/O");
        return Ok(None);
    }
    Ok(Some(file))
}

/// Reads or writes blocks, and returns each one's duration in nanoseconds, as the caller measures it.
fn requests(file: &File, count: u64, writes: bool) -> Result<Vec<u64>> {
    let mut block = Buffer([7; BLOCK]);
    let each = |number: u64| {
        // Far apart, so that they are not merged.
        let at = (number * 769 % BLOCKS) * BLOCK as u64;
        let began = Instant::now();
        if writes {
            file.write_all_at(&block.0, at)?;
        } else {
            file.read_exact_at(&mut block.0, at)?;
        }
        Ok(began.elapsed().as_nanos() as u64)
    };
    (0..count).map(each).collect()
}

fn merged_histogram(snapshot: &Snapshot, operation: &str, name: &str) -> Histogram {
    let own = std::process::id().to_string();
    let is_own = |labels: &whylate_model::Labels| labels["operation"] == operation && labels["pid"] == own;
    let mut all = Histogram::default();
    for series in snapshot.series.iter().filter(|series| is_own(&series.labels)) {
        series.histograms.get(name).iter().for_each(|of| all.merge(of));
    }
    all
}

/// Returns the nanoseconds at the device of each of this thread's requests, by the trace.
fn at_device(trace: Trace, operation: char) -> Result<Vec<u64>> {
    let own = rustix::thread::gettid().as_raw_pid() as u32;
    let mut issued: HashMap<String, u64> = HashMap::new();
    let mut took = Vec::new();
    for line in trace.finish_lines()? {
        // `254,0 R 4096 () 4711 + 8 none,0,0 [dd]`; a completion has no bytes.
        let sector = || {
            let (before, after) = line.fields.split_once(" + ")?;
            Some(format!("{} {}", before.rsplit(' ').next()?, after.split(' ').next()?))
        };
        // 6.1 prints no flags while other instances trace the same events.
        let flags = line.fields.split(' ').nth(1).unwrap_or_default();
        let is_wanted = flags.is_empty() || flags.starts_with(operation);
        match (line.event.as_str(), sector()) {
            ("block_rq_issue", Some(sector)) if is_wanted && line.tid == own => {
                issued.insert(sector, line.at_us);
            }
            ("block_rq_complete", Some(sector)) => {
                took.extend(issued.remove(&sector).map(|at_us| (line.at_us - at_us) * 1_000));
            }
            _ => {}
        }
    }
    ensure!(issued.is_empty(), "{} requests are not done in the trace", issued.len());
    Ok(took)
}

#[test]
fn request_counts_and_times_match_trace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(file) = direct_file()? else { return Ok(()) };
    let disk = disk_of(&file)?;
    for writes in [false, true] {
        let count = amount(500);
        let (operation, letter) = if writes { ("write", 'W') } else { ("read", 'R') };
        in_rounds(|| {
            let trace = Trace::record(&["block/block_rq_issue", "block/block_rq_complete"])?;
            let options =
                BlockOptions { device: Some(disk.clone()), by: By::Process, phases: true, ..BlockOptions::default() };
            let mut source = patching(|| options.attach(&Session::of_one()))?;
            let own_ns: u64 = requests(&file, count, writes)?.iter().sum();
            let snapshot = source.snapshot()?;
            patching(|| drop(source));
            let traced = at_device(trace, letter)?;
            let (latency, device) =
                (merged_histogram(&snapshot, operation, "latency"), merged_histogram(&snapshot, operation, "device"));
            let phases = ["throttled", "queued", "device", "completion"]
                .map(|name| merged_histogram(&snapshot, operation, name).sum_ns());
            println!(
                "{operation}: {} of {count}, {} in the trace; {} ns in total, {phases:?}, own clock {own_ns}; lost {:?}",
                latency.count(),
                traced.len(),
                latency.sum_ns(),
                snapshot.lost
            );
            ensure!(latency.count() == count && traced.len() as u64 == count, "{} of {count}", latency.count());
            ensure!(phases.iter().sum::<u128>() == latency.sum_ns(), "the phases are {phases:?}");
            ensure!(latency.sum_ns() <= u128::from(own_ns), "{} ns of {own_ns}", latency.sum_ns());
            ensure!(snapshot.lost["in_progress_full"] == 0, "{:?}", snapshot.lost);
            if is_emulated() {
                println!("skipped: an emulated CPU stops at any time, also between two programs at one event");
                return Ok(());
            }
            let traced_ns: u64 = traced.iter().sum();
            let device_ns = device.sum_ns() + merged_histogram(&snapshot, operation, "completion").sum_ns();
            let apart_ns = u128::from(traced_ns).abs_diff(device_ns);
            let tolerated_ns = u128::from(count * STAMP_NS).max(u128::from(traced_ns) / 1_000);
            ensure!(apart_ns <= tolerated_ns, "{device_ns} ns at the device, {traced_ns} in the trace");
            let most_ns = traced.iter().copied().max().unwrap_or(0);
            let longest_ns = device.max_ns() + merged_histogram(&snapshot, operation, "completion").max_ns();
            ensure!(device.max_ns() <= most_ns + 2 * STAMP_NS, "longest {} and {most_ns} ns", device.max_ns());
            ensure!(longest_ns + 2 * STAMP_NS + most_ns / 1_000 >= most_ns, "longest {longest_ns} and {most_ns} ns");
            Ok(())
        })?;
    }
    Ok(())
}

/// Threads that write continuously, until it is dropped.
struct Hogs {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<Result<()>>>,
}

impl Hogs {
    fn start(file: &File, threads: usize) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |number: usize| {
            let (file, stop) = (file.try_clone()?, Arc::clone(&stop));
            let write = move || -> Result<()> {
                // Large, so that the number of requests stays within the buffer of late events.
                let blocks = Box::new(Large([9; LARGE]));
                for turn in (number as u64..).step_by(3) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    file.write_all_at(&blocks.0, turn % (BLOCKS * BLOCK as u64 / LARGE as u64) * LARGE as u64)?;
                }
                Ok(())
            };
            Ok(thread::Builder::new().name("hog".to_owned()).spawn(write)?)
        };
        let threads = (0..threads).map(start).collect::<Result<_>>()?;
        Ok(Hogs { stop, threads })
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[test]
fn blames_late_requests_on_concurrent_ones() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU stops at any time, and an emulated disk serves one request after the other");
        return Ok(());
    }
    let (Some(file), Some(others)) = (direct_file()?, direct_file()?) else { return Ok(()) };
    let disk = disk_of(&file)?;
    let options = BlockOptions { device: Some(disk.clone()), explain_over_ns: Some(1), ..BlockOptions::default() };
    let own = rustix::thread::gettid().as_raw_pid().to_string();
    let explained = |hogs: usize| -> Result<Vec<String>> {
        let mut source = patching(|| options.attach(&Session::of_one()))?;
        let running = Hogs::start(&others, hogs)?;
        let mut first = Vec::new();
        let mut wrong = None;
        let mut all = 0;
        let mut each = |event: LateEvent| {
            all += 1;
            if event.labels["submitter_tid"] != own || event.labels["operation"] != "read" {
                return;
            }
            let sum_ns: u64 = event.causes.iter().map(|cause| cause.ns).sum();
            if sum_ns != event.latency_ns {
                wrong = Some(format!("{sum_ns} of {} ns", event.latency_ns));
            }
            let is_of_disk = |kind| matches!(kind, CauseKind::Disk | CauseKind::DiskQueue);
            let largest = event.causes.iter().find(|cause| is_of_disk(cause.kind));
            let who = largest.map_or_else(String::new, |cause| cause.who.to_string());
            first.push(who);
        };
        // All requests are late here, and the buffer has room for some thousands.
        for _ in 0..100 {
            requests(&file, 2, false)?;
            source.drain_late(Duration::ZERO, &mut each)?;
        }
        drop(running);
        let snapshot = source.snapshot()?;
        println!("{all} are reported, {:?}, lost {:?}", snapshot.unexplained, snapshot.lost);
        patching(|| drop(source));
        if let Some(wrong) = wrong {
            bail!("causes add up to {wrong}");
        }
        ensure!(first.len() >= 150, "{} of 200 reads are explained", first.len());
        Ok(first)
    };
    in_rounds(|| {
        let named = explained(16)?;
        let of_hogs = named.iter().filter(|who| who.starts_with("hog:") && who.ends_with(" (writes)")).count();
        println!("{of_hogs} of {} reads are behind hogs", named.len());
        ensure!(named.len() - of_hogs <= by_chance(named.len(), 0.02), "{of_hogs} of {} are behind hogs", named.len());
        Ok(())
    })?;
    in_rounds(|| {
        let named = explained(0)?;
        let alone = named.iter().filter(|who| **who == disk).count();
        println!("{alone} of {} reads are alone", named.len());
        ensure!(named.len() - alone <= by_chance(named.len(), 0.05), "{alone} of {} are alone", named.len());
        Ok(())
    })
}

/// Returns each device interrupt's name, with its count on each CPU.
fn device_interrupts() -> Result<Vec<(String, Vec<u64>)>> {
    let text = fs::read_to_string("/proc/interrupts")?;
    let row = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let counts = rest.split_whitespace().map_while(|word| word.parse().ok()).collect();
        name.trim().parse::<u32>().is_ok().then(|| (name.to_owned(), counts))
    };
    Ok(text.lines().filter_map(row).collect())
}

/// Returns the CPU that takes the disk's interrupts, if it is a single one.
fn interrupted_cpu(file: &File) -> Result<Option<u32>> {
    let (count, before) = (200, device_interrupts()?);
    requests(file, count, false)?;
    let mut most = (0, None);
    for ((name, after), (was, before)) in device_interrupts()?.into_iter().zip(before) {
        ensure!(name == was, "an interrupt has come or gone");
        let came: Vec<u64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        let all: u64 = came.iter().sum();
        if all > most.0 {
            most = (all, came.iter().position(|&one| one * 20 >= all * 19));
        }
    }
    println!("{} interrupts of {count} requests come in on CPU {:?}", most.0, most.1);
    Ok(most.1.filter(|_| most.0 >= count / 2).map(|cpu| cpu as u32))
}

fn stay_off(cpu: u32) -> Result<()> {
    let mut set = sched_getaffinity(None)?;
    set.unset(cpu as usize);
    Ok(sched_setaffinity(None, &set)?)
}

#[test]
fn blames_thread_that_disables_disk_interrupt() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if is_emulated() {
        println!("skipped: an emulated CPU stops at any time, also with interrupts on");
        return Ok(());
    }
    let Some(file) = direct_file()? else { return Ok(()) };
    let Some(cpu) = interrupted_cpu(&file)? else {
        println!("skipped: the disk's interrupts do not go to one CPU");
        return Ok(());
    };
    let (length_ns, times) = (20_000_000, 10);
    let options = BlockOptions {
        device: Some(disk_of(&file)?),
        explain_over_ns: Some(length_ns / 2),
        phases: true,
        ..BlockOptions::default()
    };
    in_rounds(|| {
        let mut source = patching(|| options.attach(&Session::of_one()))?;
        let over = AtomicBool::new(false);
        let mut events = Vec::new();
        let made = thread::scope(|scope| {
            let reading = scope.spawn(|| {
                stay_off(cpu)?;
                while !over.load(Ordering::Relaxed) {
                    requests(&file, 10, false)?;
                }
                anyhow::Ok(())
            });
            let disturbing = scope.spawn(|| {
                let made = while_loaded(cpu, || disturb(Kind::IrqsOff, cpu, length_ns, times, 3 * length_ns));
                over.store(true, Ordering::Relaxed);
                made
            });
            let mut drained = Ok(());
            while !over.load(Ordering::Relaxed) && drained.is_ok() {
                drained = source.drain_late(Duration::from_millis(20), &mut |event| events.push(event));
            }
            let read = reading.join().expect("reading does not panic");
            let made = disturbing.join().expect("disturbing does not panic");
            drained.and(read).and(made)
        });
        let made = match made {
            Err(error) if is_unsupported(&error) => return Ok(()),
            made => made?,
        };
        let (mut late, mut right) = (0, 0);
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let own = std::process::id().to_string();
        let is_within = |event: &&LateEvent| {
            if event.labels["submitter_pid"] != own {
                return false;
            }
            let from_ns = event.at_ns.saturating_sub(event.latency_ns);
            made.iter().any(|made| event.at_ns.min(made.end).saturating_sub(from_ns.max(made.start)) >= length_ns / 2)
        };
        for event in events.iter().filter(is_within) {
            late += 1;
            let first = &event.causes[0];
            if is(first, CauseKind::IrqsOff, Kind::IrqsOff.thread()) && first.ns >= event.latency_ns / 2 {
                right += 1;
            } else {
                println!("another cause: {event:?}");
            }
        }
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        println!("{right} of {late} late reads while interrupts were off name who kept them off; {:?}", snapshot.lost);
        ensure!(late >= times / 2, "{late} reads were late");
        ensure!(right + late / 10 >= late, "{right} of {late}");
        Ok(())
    })
}

/// An unused zram device, which takes bios instead of requests. Reset on drop.
struct Zram(PathBuf);

impl Zram {
    fn take() -> Result<Option<Zram>> {
        let directory = PathBuf::from("/sys/block/zram0");
        if fs::read_to_string(directory.join("initstate")).is_ok_and(|state| state.trim() == "0")
            && fs::write(directory.join("disksize"), "16M").is_ok()
        {
            return Ok(Some(Zram(directory)));
        }
        println!("skipped: there is no zram0 that nobody uses");
        Ok(None)
    }

    /// The reset is retried, as udev may still have the new device open.
    fn open(&self) -> Result<File> {
        Ok(OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open("/dev/zram0")?)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        for _ in 0..100 {
            if fs::write(self.0.join("reset"), "1").is_ok() {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn counts_bios_of_bio_device_and_omits_own() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(zram) = Zram::take()? else { return Ok(()) };
    let file = zram.open()?;
    let count = amount(500);
    for leave_out in [None, Some(std::process::id())] {
        in_rounds(|| {
            let options = BlockOptions {
                device: Some("zram0".to_owned()),
                by: By::Process,
                leave_out,
                ..BlockOptions::default()
            };
            let mut source = patching(|| options.attach(&Session::of_one()))?;
            let own_ns: u64 = requests(&file, count, true)?.iter().sum();
            let snapshot = source.snapshot()?;
            patching(|| drop(source));
            let latency = merged_histogram(&snapshot, "write", "latency");
            let left_out = snapshot.lost["own"];
            println!("{} of {count} writes, {} of {own_ns} ns; {left_out} left out", latency.count(), latency.sum_ns());
            let expected = if leave_out.is_some() { (0, count) } else { (count, 0) };
            ensure!((latency.count(), left_out) == expected, "{:?}", snapshot.lost);
            ensure!(latency.sum_ns() <= u128::from(own_ns), "{} of {own_ns} ns", latency.sum_ns());
            Ok(())
        })?;
    }
    Ok(())
}
