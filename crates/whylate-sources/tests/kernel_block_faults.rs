// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source `block` while disks fail, time out, disappear or are full, beside a second instance of the source and
//! after a killed one. Each request is counted, or lost for a named reason. Runs as root, where the kernel has
//! null_blk: in a virtual machine.

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use whylate_sources::Measuring;
use whylate_sources::block::{BlockOptions, By};
use whylate_sources::kernel::clock::monotonic_ns;

use support::fixtures::null_disk::{BLOCK, Mounted, Null, load_modules};
use support::machine::lock::lock_machine;
use support::oracles::bpf_programs;
use support::oracles::chance::{Unjudged, in_rounds};
use support::oracles::disk_counts::{READS, in_flight, kernel_counts, late_events, reads, totals, wait_for};
use support::oracles::disk_counts::{Totals, attach, end, ensure_counts_are_the_kernels, ensure_lost};

const MS: u64 = 1_000_000;

#[test]
fn errors_are_counted_and_named() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // 20 blocks, in sectors.
    let Some(null) = Null::with(Duration::from_millis(1), 4, &[("badblocks", "+0-159")])? else { return Ok(()) };
    let mut source = attach(&BlockOptions { late_over_ns: Some(1), ..null.options() })?;
    let read = reads(&null.open()?, (0..80).map(|turn| turn * 7 % 80));
    let events = late_events(&mut source)?;
    let snapshot = end(source, &[])?;
    assert_eq!(read, 60);
    assert_eq!(totals(&snapshot, &null.name, "read"), Totals { requests: 80, errors: 20, bytes: 80 * BLOCK as u64 });
    let failed = events.iter().filter(|event| event.labels.get("error").is_some_and(|error| error == "EIO"));
    let sectors: BTreeSet<u64> = failed.map(|event| event.labels["sector"].parse()).collect::<Result<_, _>>()?;
    assert_eq!(sectors, (0..20).map(|block| block * 8).collect());
    assert_eq!(events.iter().filter(|event| !event.labels.contains_key("error")).count(), 60);
    Ok(())
}

#[test]
fn removed_device_leaves_no_state() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(null) = Null::make(Duration::from_millis(50), 4)? else { return Ok(()) };
    // Of all disks: a new disk may reuse the number and the memory of a removed one.
    let mut source = attach(&BlockOptions { device: None, late_over_ns: Some(1), ..null.options() })?;
    let name = null.name.clone();
    let file = null.open()?;
    let began_ns = monotonic_ns();
    let read = thread::scope(|scope| -> Result<u64> {
        let file = &file;
        let each = |number: u64| {
            // Until the first failure.
            move || (0..).take_while(|turn| reads(file, [number * 1_031 + turn % 1_000]) == 1).count() as u64
        };
        let threads: Vec<_> = (0..8).map(|number| scope.spawn(each(number))).collect();
        let read_already = || kernel_counts(&name).is_ok_and(|counts| counts[READS] >= 32).then_some(());
        wait_for("the reading", read_already)?;
        null.set("power", "0")?;
        threads.into_iter().map(|thread| thread.join().map_err(|_| io::Error::other("it failed").into())).sum()
    })?;
    drop((file, null));
    let mut events = late_events(&mut source)?;
    // The machine may have other disks.
    events.retain(|event| event.labels["device"] == name);
    let snapshot = source.snapshot()?;
    ensure_lost(&snapshot, &[])?;
    let early = events.iter().find(|event| event.at_ns - event.latency_ns < began_ns);
    ensure!(early.is_none(), "it began before it was read: {early:?}");
    let failed = events.iter().filter(|event| event.labels.contains_key("error")).count() as u64;
    let requests = totals(&snapshot, &name, "read").requests;
    println!("{read} are read of {name}, {requests} requests, {failed} with errors");
    ensure!(read >= 24 && failed <= 8, "{read} are read, {failed} have failed");
    assert_eq!((requests - failed, events.len() as u64), (read, requests));

    let began_ns = monotonic_ns();
    let Some(null) = Null::make(Duration::from_millis(1), 4)? else { return Ok(()) };
    assert_eq!(reads(&null.open()?, 0..40), 40);
    let mut events = late_events(&mut source)?;
    events.retain(|event| event.labels["device"] == null.name);
    let snapshot = end(source, &[])?;
    // Including the kernel's own reads, of the partition table.
    assert_eq!(totals(&snapshot, &null.name, "read").requests, kernel_counts(&null.name)?[READS]);
    let early = events.iter().find(|event| event.at_ns - event.latency_ns < began_ns);
    ensure!(early.is_none(), "it began before its device was there: {early:?}");
    Ok(())
}

/// A disk of scsi_debug, which can let commands time out.
struct Scsi {
    name: String,
}

impl Scsi {
    fn make() -> Result<Option<Scsi>> {
        load_modules(&[("scsi_common", ""), ("scsi_mod", ""), ("sd_mod", ""), ("scsi_debug", "dev_size_mb=8 delay=0")]);
        if !Path::new("/sys/module/scsi_debug").exists() {
            println!("skipped: this kernel has no scsi_debug");
            return Ok(None);
        }
        let is_it = |name: &String| {
            let model = fs::read_to_string(format!("/sys/block/{name}/device/model")).unwrap_or_default();
            model.trim() == "scsi_debug" && Path::new("/dev").join(name).exists()
        };
        let name = wait_for("the disk", || {
            let disks = fs::read_dir("/sys/block").ok()?.flatten();
            disks.filter_map(|disk| disk.file_name().into_string().ok()).find(is_it)
        })?;
        fs::write(format!("/sys/block/{name}/device/timeout"), "1")?;
        Ok(Some(Scsi { name }))
    }

    fn set(name: &str, value: &str) -> Result<()> {
        Ok(fs::write(Path::new("/sys/bus/pseudo/drivers/scsi_debug").join(name), value)?)
    }
}

impl Drop for Scsi {
    fn drop(&mut self) {
        let _ = Scsi::set("every_nth", "0");
        let _ = Scsi::set("opts", "0");
    }
}

#[test]
fn timed_out_request_counts_once_with_its_total_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(scsi) = Scsi::make()? else { return Ok(()) };
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(Path::new("/dev").join(&scsi.name))?;
    ensure!(reads(&direct, 0..8) == 8, "the disk cannot be read");
    let retries = fs::read_dir(format!("/sys/block/{}/device/scsi_disk", scsi.name))?.flatten().next();
    let retries = retries.context("it is no SCSI disk")?.path().join("max_retries");
    let options = BlockOptions {
        device: Some(scsi.name.clone()),
        phases: true,
        late_over_ns: Some(500 * MS),
        ..BlockOptions::default()
    };
    // 4: commands get no answer.
    Scsi::set("opts", "4")?;
    for is_tried_again in [false, true] {
        fs::write(&retries, if is_tried_again { "5" } else { "0" })?;
        let before = kernel_counts(&scsi.name)?;
        let mut source = attach(&options)?;
        Scsi::set("every_nth", "1")?;
        let read = thread::scope(|scope| {
            let reading = scope.spawn(|| reads(&direct, [77]));
            if is_tried_again {
                // The request is issued at once; the timeout takes long.
                wait_for("the request", || (in_flight(&scsi.name) == Some(1)).then_some(()))?;
                thread::sleep(Duration::from_millis(300));
                Scsi::set("every_nth", "0")?;
            }
            reading.join().map_err(|_| anyhow::anyhow!("it failed"))
        });
        Scsi::set("every_nth", "0")?;
        let read = read?;
        let events = late_events(&mut source)?;
        let snapshot = end(source, &[])?;
        ensure_counts_are_the_kernels(&snapshot, &scsi.name, &before)?;
        println!("tried again: {is_tried_again}: {read} read, {events:?}");
        assert_eq!((read, events.len()), (u64::from(is_tried_again), 1));
        assert_eq!(totals(&snapshot, &scsi.name, "read").errors, u64::from(!is_tried_again));
        assert_eq!(events[0].labels.contains_key("error"), !is_tried_again);
        // The time before the retry does not count as time at the device.
        let long = if is_tried_again { "queued" } else { "device" };
        ensure!(events[0].phases.iter().any(|(phase, ns)| phase == long && *ns >= 900 * MS), "{events:?}");
    }
    Ok(())
}

#[test]
fn counts_all_requests_of_full_disk() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(mounted) = Mounted::make(32)? else { return Ok(()) };
    let name = &mounted.null.name;
    mounted.sync()?;
    let before = kernel_counts(name)?;
    let options = BlockOptions { by: By::Cgroup, late_over_ns: Some(10 * MS), ..mounted.null.options() };
    let source = attach(&options)?;
    let mut file = File::create(mounted.directory.path().join("file"))?;
    let full = loop {
        match file.write_all(&[7; 64 << 10]) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    // Writeback of what does not fit fails as well; the rest is written.
    mounted.sync()?;
    drop(file);
    wait_for("the end of all requests", || (in_flight(name) == Some(0)).then_some(()))?;
    let snapshot = end(source, &[])?;
    ensure_counts_are_the_kernels(&snapshot, name, &before)?;
    let written = totals(&snapshot, name, "write");
    ensure!(written.bytes >= 16 << 20 && written.errors == 0, "{written:?}");
    Ok(())
}

/// Set for the second process: the disk to measure until it is killed.
const MEASURED: &str = "WHYLATE_MEASURED";

#[test]
fn measuring_process() -> Result<()> {
    let Some(disk) = std::env::var_os(MEASURED) else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let device = Some(disk.to_string_lossy().into_owned());
    let mut source =
        attach(&BlockOptions { device, explain_over_ns: Some(1), phases: true, ..BlockOptions::default() })?;
    println!("measuring");
    loop {
        source.drain_late(Duration::from_millis(50), &mut drop)?;
    }
}

/// The second process, killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn concurrent_instances_agree_and_killed_one_leaves_no_programs() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(null) = Null::make(Duration::from_millis(5), 4)? else { return Ok(()) };
    let file = null.open()?;
    let child = Command::new(std::env::current_exe()?)
        .args(["--exact", "measuring_process", "--nocapture", "--test-threads=1"])
        .env(MEASURED, &null.name)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut child = Running(child);
    let said = BufReader::new(child.0.stdout.take().context("it has an output")?);
    said.lines().map_while(io::Result::ok).find(|line| line.contains("measuring")).context("it does not measure")?;
    let options = BlockOptions { late_over_ns: Some(1), ..null.options() };
    let (mut first, mut second) = (attach(&options)?, attach(&options)?);
    assert_eq!(reads(&file, 0..40), 40);
    for source in [&mut first, &mut second] {
        let snapshot = source.snapshot()?;
        ensure_lost(&snapshot, &[])?;
        assert_eq!(totals(&snapshot, &null.name, "read").requests, 40);
    }
    let programs = bpf_programs::held_by(child.0.id())?;
    ensure!(!programs.is_empty(), "it holds no programs");
    thread::scope(|scope| -> Result<()> {
        let reading = scope.spawn(|| reads(&file, 40..120));
        thread::sleep(Duration::from_millis(50));
        child.0.kill()?;
        child.0.wait()?;
        let read = reading.join().map_err(|_| anyhow::anyhow!("it failed"))?;
        assert_eq!(read, 80);
        Ok(())
    })?;
    bpf_programs::ensure_gone(&programs)?;
    let snapshot = end(first, &[])?;
    assert_eq!(totals(&snapshot, &null.name, "read").requests, 80);
    let third = attach(&options)?;
    assert_eq!(reads(&file, 0..40), 40);
    for (source, requests) in [(second, 120), (third, 40)] {
        let snapshot = end(source, &[])?;
        assert_eq!(totals(&snapshot, &null.name, "read").requests, requests);
    }
    Ok(())
}

#[test]
fn requests_in_flight_at_start_count_as_unmatched() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // Longer than attaching takes; null_blk times requests out after 5 s.
    let Some(null) = Null::make(Duration::from_secs(4), 8)? else { return Ok(()) };
    let file = &null.open()?;
    in_rounds(|| {
        let first = attach(&null.options())?;
        let second = thread::scope(|scope| -> Result<Measuring> {
            let read_one = |number: u64| scope.spawn(move || reads(file, [number * 7]));
            let reading: Vec<_> = (0..4).map(read_one).collect();
            wait_for("the last request", || (in_flight(&null.name) == Some(4)).then_some(()))?;
            let second = attach(&null.options())?;
            let were_in_flight = in_flight(&null.name);
            let read: Option<u64> = reading.into_iter().map(|reading| reading.join().ok()).sum();
            assert_eq!(read, Some(4));
            ensure!(were_in_flight == Some(4), Unjudged("attaching took longer than a request".to_owned()));
            Ok(second)
        })?;
        for (source, requests, unmatched) in [(first, 4, &[][..]), (second, 0, &[("unmatched", 4)])] {
            let snapshot = end(source, unmatched)?;
            assert_eq!(totals(&snapshot, &null.name, "read").requests, requests);
        }
        Ok(())
    })
}
