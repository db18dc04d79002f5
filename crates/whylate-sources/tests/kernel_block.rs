// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the source `block` sees of requests that a test makes, compared with the kernel's own trace and with how long
//! the test itself waits. They run as root.

mod kernel;

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

use kernel::chance::{by_chance, in_rounds};
use kernel::disturb::{disturb, is, is_unsupported, while_loaded};
use kernel::trace::Trace;
use kernel::turn::turn_to_measure;
use kernel::urgent::patching;
use kernel::{amount, file_on_disk, is_emulated};

/// What is read and written at once, on disks whose blocks are no larger.
const BLOCK: usize = 4096;
const BLOCKS: u64 = 2_048;
const LARGE: usize = 512 << 10;
/// What a trace's stamps are exact to.
const STAMP_NS: u64 = 1_000;

/// Memory that a disk can write to.
#[repr(align(4096))]
struct Buffer([u8; BLOCK]);

/// The same of what takes a disk long.
#[repr(align(4096))]
struct Large([u8; LARGE]);

/// A file whose blocks are on the disk, and are not kept in memory.
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

/// How long each read or write of a block took, by the clock of whoever waits.
fn requests(file: &File, count: u64, writes: bool) -> Result<Vec<u64>> {
    let mut block = Buffer([7; BLOCK]);
    let each = |number: u64| {
        // Places that are far apart are not merged.
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

fn of(snapshot: &Snapshot, operation: &str, name: &str) -> Histogram {
    let own = std::process::id().to_string();
    let is_own = |labels: &whylate_model::Labels| labels["operation"] == operation && labels["pid"] == own;
    let mut all = Histogram::default();
    for series in snapshot.series.iter().filter(|series| is_own(&series.labels)) {
        series.histograms.get(name).iter().for_each(|of| all.merge(of));
    }
    all
}

/// Nanoseconds at the device of each of this process's requests, as the trace tells.
fn at_device(trace: Trace, operation: char) -> Result<Vec<u64>> {
    let own = rustix::thread::gettid().as_raw_pid() as u32;
    let mut issued: HashMap<String, u64> = HashMap::new();
    let mut took = Vec::new();
    for line in trace.finish_lines()? {
        // `254,0 R 4096 () 4711 + 8 none,0,0 [dd]`, and without the bytes when it is done.
        let place = || {
            let (before, after) = line.fields.split_once(" + ")?;
            Some(format!("{} {}", before.rsplit(' ').next()?, after.split(' ').next()?))
        };
        // 6.1 prints no flags where other instances trace the same.
        let flags = line.fields.split(' ').nth(1).unwrap_or_default();
        let is_wanted = flags.is_empty() || flags.starts_with(operation);
        match (line.event.as_str(), place()) {
            ("block_rq_issue", Some(place)) if is_wanted && line.tid == own => {
                issued.insert(place, line.at_us);
            }
            ("block_rq_complete", Some(place)) => {
                took.extend(issued.remove(&place).map(|at_us| (line.at_us - at_us) * 1_000));
            }
            _ => {}
        }
    }
    ensure!(issued.is_empty(), "{} requests are not done in the trace", issued.len());
    Ok(took)
}

#[test]
fn requests_are_counted_and_take_as_long_as_the_kernel_says() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let Some(file) = direct_file()? else { return Ok(()) };
    let disk = disk_of(&file)?;
    for writes in [false, true] {
        let count = amount(500);
        let (operation, letter) = if writes { ("write", 'W') } else { ("read", 'R') };
        in_rounds(|| {
            let trace = Trace::of(&["block/block_rq_issue", "block/block_rq_complete"])?;
            let options =
                BlockOptions { device: Some(disk.clone()), by: By::Process, phases: true, ..BlockOptions::default() };
            let mut source = patching(|| options.attach(&Session::of_one()))?;
            let own_ns: u64 = requests(&file, count, writes)?.iter().sum();
            let snapshot = source.snapshot()?;
            patching(|| drop(source));
            let traced = at_device(trace, letter)?;
            let (latency, device) = (of(&snapshot, operation, "latency"), of(&snapshot, operation, "device"));
            let phases =
                ["throttled", "queued", "device", "completion"].map(|name| of(&snapshot, operation, name).sum_ns());
            println!(
                "{operation}: {} of {count}, {} in the trace; {} ns in all, {phases:?}, own clock {own_ns}; lost {:?}",
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
            let device_ns = device.sum_ns() + of(&snapshot, operation, "completion").sum_ns();
            let apart_ns = u128::from(traced_ns).abs_diff(device_ns);
            let tolerated_ns = u128::from(count * STAMP_NS).max(u128::from(traced_ns) / 1_000);
            ensure!(apart_ns <= tolerated_ns, "{device_ns} ns at the device, {traced_ns} in the trace");
            let most_ns = traced.iter().copied().max().unwrap_or(0);
            let longest_ns = device.max_ns() + of(&snapshot, operation, "completion").max_ns();
            ensure!(device.max_ns() <= most_ns + 2 * STAMP_NS, "longest {} and {most_ns} ns", device.max_ns());
            ensure!(longest_ns + 2 * STAMP_NS + most_ns / 1_000 >= most_ns, "longest {longest_ns} and {most_ns} ns");
            Ok(())
        })?;
    }
    Ok(())
}

/// Threads that write all the time, until it is dropped.
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
                // Large ones, of which a disk does not do so many that there is no room to tell of them.
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
fn late_requests_are_blamed_on_those_that_the_device_had_meanwhile() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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
            let who = largest.map_or_else(String::new, |cause| cause.who.clone());
            first.push(who);
        };
        // All requests are late here, of which there is room for some thousands.
        for _ in 0..100 {
            requests(&file, 2, false)?;
            source.drain_late(Duration::ZERO, &mut each)?;
        }
        drop(running);
        let snapshot = source.snapshot()?;
        println!("{all} are told, {:?}, lost {:?}", snapshot.unexplained, snapshot.lost);
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

/// How often each interrupt of a device has come in on each CPU.
fn device_interrupts() -> Result<Vec<(String, Vec<u64>)>> {
    let text = fs::read_to_string("/proc/interrupts")?;
    let row = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let counts = rest.split_whitespace().map_while(|word| word.parse().ok()).collect();
        name.trim().parse::<u32>().is_ok().then(|| (name.to_owned(), counts))
    };
    Ok(text.lines().filter_map(row).collect())
}

/// The CPU to which the disk's interrupts go, as far as it is one.
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
fn whoever_keeps_a_disks_interrupt_off_is_blamed() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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

/// A device of memory that nobody uses, which takes bios as they are. It is empty again after this.
struct Zram(PathBuf);

impl Zram {
    fn take() -> Result<Option<Zram>> {
        let folder = PathBuf::from("/sys/block/zram0");
        if fs::read_to_string(folder.join("initstate")).is_ok_and(|state| state.trim() == "0")
            && fs::write(folder.join("disksize"), "16M").is_ok()
        {
            return Ok(Some(Zram(folder)));
        }
        println!("skipped: there is no zram0 that nobody uses");
        Ok(None)
    }

    /// Who looks what is on a new device may have it open still.
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
fn bios_of_a_device_without_requests_are_counted_and_own_ones_left_out() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
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
            let latency = of(&snapshot, "write", "latency");
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
