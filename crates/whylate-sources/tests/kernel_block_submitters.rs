// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submitters named by the source `block` where a file system or a driver submits for others, and how it counts flushes,
//! discards and stacked devices. Runs as root, where the kernel has null_blk: in a virtual machine.

mod support;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use whylate_model::LateEvent;
use whylate_sources::block::{BlockOptions, By};
use whylate_sources::kernel::clock::monotonic_ns;

use support::fixtures::null_disk::{BLOCK, Buffer, Mounted, Null, SIZE_MIB, load_modules};
use support::machine::lock::lock_machine;
use support::oracles::disk_counts::{FLUSHES, MERGED_WRITES, attach, end, ensure_counts_are_the_kernels, in_flight};
use support::oracles::disk_counts::{kernel_counts, late_events, reads, totals, wait_for};

const MS: u64 = 1_000_000;
/// Bytes dirtied per file.
const DIRTIED: u64 = 512 << 10;
const CGROUP: &str = "/whylate-dirtier";

/// A cgroup that is charged with its writeback, removed on drop.
struct Dirtier(PathBuf);

impl Dirtier {
    fn make() -> Result<Option<Dirtier>> {
        let root = Path::new("/sys/fs/cgroup");
        // Writeback is attributed to cgroups if both controllers are enabled (mm/backing-dev.c).
        if fs::write(root.join("cgroup.subtree_control"), "+io +memory").is_err() {
            println!("skipped: no cgroup is charged with what it writes here");
            return Ok(None);
        }
        let dirtier = Dirtier(root.join(&CGROUP[1..]));
        let _ = fs::remove_dir(&dirtier.0);
        fs::create_dir(&dirtier.0)?;
        Ok(Some(dirtier))
    }

    /// Has a process in the cgroup write a file, and returns its PID.
    fn write(&self, file: &Path, options: &str) -> Result<u32> {
        let script = format!(
            "echo $$ >{}/cgroup.procs; exec dd if=/dev/zero of={} bs={DIRTIED} count=1 {options}",
            self.0.display(),
            file.display()
        );
        let mut child = Command::new("sh").args(["-c", &script]).stderr(Stdio::null()).spawn()?;
        let pid = child.id();
        ensure!(child.wait()?.success(), "{} cannot be written", file.display());
        Ok(pid)
    }
}

impl Drop for Dirtier {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn names_submitter_and_charged_cgroup_not_issuing_worker() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(mounted) = Mounted::make(64)? else { return Ok(()) };
    let Some(dirtier) = Dirtier::make()? else { return Ok(()) };
    let name = &mounted.null.name;
    for is_synced_by_dirtier in [true, false] {
        let path = mounted.directory.path().join(format!("file-{is_synced_by_dirtier}"));
        mounted.sync()?;
        let before = kernel_counts(name)?;
        let mut source = attach(&BlockOptions { by: By::Cgroup, late_over_ns: Some(1), ..mounted.null.options() })?;
        let began_ns = monotonic_ns();
        let submitter = if is_synced_by_dirtier {
            dirtier.write(&path, "conv=fsync")?
        } else {
            dirtier.write(&path, "")?;
            File::open(&path)?.sync_all()?;
            rustix::thread::gettid().as_raw_pid() as u32
        };
        wait_for("the end of all requests", || (in_flight(name) == Some(0)).then_some(()))?;
        let events = late_events(&mut source)?;
        let snapshot = end(source, &[])?;
        ensure_counts_are_the_kernels(&snapshot, name, &before)?;
        let mut bytes_by_actor: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for event in events.iter().filter(|event| event.labels["operation"] == "write") {
            ensure!(event.at_ns - event.latency_ns >= began_ns, "it began before it was written: {event:?}");
            let labels = &event.labels;
            *bytes_by_actor.entry((&labels["submitter"], &labels["charged_to"])).or_default() +=
                labels["bytes"].parse::<u64>()?;
        }
        println!("synced by the dirtier: {is_synced_by_dirtier}, {submitter}: {bytes_by_actor:?}");
        let own = bytes_by_actor.iter().filter(|((who, _), _)| who.ends_with(&format!(":{submitter}")));
        let charged: Vec<_> = own.map(|((_, cgroup), bytes)| (*cgroup, *bytes)).collect();
        assert_eq!(charged, [(CGROUP, DIRTIED)]);
        let of_journal = bytes_by_actor.iter().filter(|((who, _), _)| is_of_journal(who, name));
        ensure!(of_journal.clone().count() > 0, "the journal has written nothing");
        ensure!(of_journal.clone().all(|((_, cgroup), _)| *cgroup == "/"), "{bytes_by_actor:?}");
        let is_known = |who: &str| {
            who.ends_with(&format!(":{submitter}")) || is_of_journal(who, name) || who == format!("writeback of {name}")
        };
        ensure!(bytes_by_actor.keys().all(|(who, _)| is_known(who)), "{bytes_by_actor:?}");
        let by_cgroup = snapshot.series.iter().filter(|series| series.labels["cgroup"] == CGROUP);
        let written = by_cgroup.filter(|series| series.labels["operation"] == "write");
        assert_eq!(written.map(|series| series.values["bytes"] as u64).sum::<u64>(), DIRTIED);
    }
    Ok(())
}

#[test]
fn request_starts_with_its_own_bio_despite_merges() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(mounted) = Mounted::make(64)? else { return Ok(()) };
    let name = &mounted.null.name;
    mounted.sync()?;
    let before = kernel_counts(name)?;
    let mut source = attach(&BlockOptions { late_over_ns: Some(1), ..mounted.null.options() })?;
    let (mut early, mut all) = (0, 0);
    for number in 0..20 {
        let began_ns = monotonic_ns();
        // The journal writes one bio per block, and the block layer merges them. Their memory is reused.
        let path = mounted.directory.path().join(format!("file-{number}"));
        fs::write(&path, [7; 16 << 10])?;
        File::open(&path)?.sync_all()?;
        wait_for("the end of all requests", || (in_flight(name) == Some(0)).then_some(()))?;
        let events = late_events(&mut source)?;
        all += events.len();
        early += events.iter().filter(|event| event.at_ns - event.latency_ns < began_ns).count();
    }
    end(source, &[])?;
    let merged = kernel_counts(name)?[MERGED_WRITES] - before[MERGED_WRITES];
    println!("{all} requests, {merged} merged bios; {early} begin before they were written");
    ensure!(merged >= 20, "only {merged} bios are merged");
    assert_eq!(early, 0);
    Ok(())
}

/// Returns whether `who` is the live journal thread of the disk's file system, as `comm:TID`.
fn is_of_journal(who: &str, disk: &str) -> bool {
    let Some((comm, tid)) = who.rsplit_once(':') else { return false };
    let is_alive = fs::read_to_string(format!("/proc/{tid}/comm")).is_ok_and(|now| now.trim() == comm);
    comm.starts_with(&format!("jbd2/{disk}")) && is_alive
}

#[test]
fn flushes_and_discards_have_own_operations() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // Without FUA the block layer flushes after the write; not every null_blk can be configured so.
    for fua in [None, Some(("fua", "0"))] {
        let more = [("memory_backed", "1"), ("cache_size", "8"), ("discard", "1")];
        let mut more = more.to_vec();
        more.extend(fua);
        if fua.is_some() && !Null::can("fua") {
            continue;
        }
        let Some(null) = Null::with(Duration::from_millis(1), 4, &more)? else { return Ok(()) };
        let (plain, block) = (null.open()?, Box::new(Buffer([7; BLOCK])));
        let mut forced = OpenOptions::new();
        let forced = forced.write(true).custom_flags(libc::O_DIRECT | libc::O_DSYNC).open(null.path())?;
        let before = kernel_counts(&null.name)?;
        let mut source = attach(&BlockOptions { late_over_ns: Some(1), ..null.options() })?;
        let at = |number: u64| number * 7 * BLOCK as u64;
        (0..6).try_for_each(|number| plain.write_all_at(&block.0, at(number)))?;
        (0..4).try_for_each(|_| plain.sync_all())?;
        (0..8).try_for_each(|number| forced.write_all_at(&block.0, at(number)))?;
        for number in 1..=3_u64 {
            let mut discard = Command::new("blkdiscard");
            discard.args(["-o", &(number << 20).to_string(), "-l", &(256 << 10).to_string()]).arg(null.path());
            ensure!(discard.status()?.success(), "it cannot discard");
        }
        let events = late_events(&mut source)?;
        let snapshot = end(source, &[])?;
        ensure_counts_are_the_kernels(&snapshot, &null.name, &before)?;
        let of = |operation: &str| totals(&snapshot, &null.name, operation).requests;
        // A FUA write counts as a write, and its O_DSYNC caller also flushes.
        assert_eq!(["write", "flush", "discard"].map(of), [6 + 8, 4 + 8, 3]);
        assert_eq!(totals(&snapshot, &null.name, "discard").bytes, 3 * (256 << 10));
        let mut by_flags: BTreeMap<&str, u64> = BTreeMap::new();
        events.iter().for_each(|event| *by_flags.entry(&event.labels["flags"]).or_default() += 1);
        let flushed = kernel_counts(&null.name)?[FLUSHES] - before[FLUSHES];
        println!("{fua:?}: {by_flags:?}, {flushed} flushes of the disk");
        assert_eq!(by_flags, [("WS", 6), ("FS", 12), ("WFS", 8), ("DS", 3)].into());
        assert_eq!(flushed, if fua.is_some() { 12 + 8 } else { 12 });
        // Without FUA it lasts until the flush after it is done, which takes as long again.
        let turns = if fua.is_some() { 2 } else { 1 };
        let short =
            events.iter().find(|event| event.labels["flags"] == "WFS" && event.latency_ns < turns * MS * 99 / 100);
        ensure!(short.is_none(), "{short:?}");
    }
    Ok(())
}

/// A device-mapper device on a disk, removed on drop.
struct Mapped {
    name: String,
}

const MAPPED: &str = "whylate-mapped";

impl Mapped {
    fn make(null: &Null, target: &str) -> Result<Option<Mapped>> {
        load_modules(&[("dm-mod", ""), ("dm-delay", "")]);
        let sectors = fs::read_to_string(format!("/sys/block/{}/size", null.name))?;
        let table = format!("0 {} {target}", sectors.trim()).replace("DISK", &null.path().display().to_string());
        let mut create = Command::new("dmsetup");
        create.args(["create", MAPPED, "--noudevsync", "--noudevrules", "--table", &table]);
        match create.status() {
            Ok(status) if status.success() => {}
            _ => {
                println!("skipped: there is no device mapper");
                return Ok(None);
            }
        }
        let is_it = |disk: &PathBuf| fs::read_to_string(disk.join("dm/name")).is_ok_and(|name| name.trim() == MAPPED);
        let disk = fs::read_dir("/sys/block")?.flatten().map(|disk| disk.path()).find(is_it);
        let name = disk.as_deref().and_then(Path::file_name).context("it is not there")?;
        Ok(Some(Mapped { name: name.to_string_lossy().into_owned() }))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = Command::new("dmsetup").args(["remove", "--retry", "--noudevsync", "--noudevrules", MAPPED]).status();
    }
}

const DELAYED_MS: u64 = 20;

#[test]
fn mapped_device_time_includes_disk_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for (target, own_ms) in [("linear DISK 0", 0), (&*format!("delay DISK 0 {DELAYED_MS}"), DELAYED_MS)] {
        let Some(null) = Null::make(Duration::from_millis(5), 4)? else { return Ok(()) };
        let Some(mapped) = Mapped::make(&null, target)? else { return Ok(()) };
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(format!("/dev/{}", mapped.name))?;
        let before = [&null.name, &mapped.name].map(|disk| kernel_counts(disk));
        let mut source = attach(&BlockOptions { device: None, late_over_ns: Some(1), ..null.options() })?;
        assert_eq!(reads(&file, (0..40).map(|turn| turn * 7)), 40);
        let events = late_events(&mut source)?;
        let snapshot = end(source, &[])?;
        for (disk, before) in [&null.name, &mapped.name].into_iter().zip(before) {
            ensure_counts_are_the_kernels(&snapshot, disk, &before?)?;
            assert_eq!(totals(&snapshot, disk, "read").requests, 40);
        }
        let of = |disk: &str| -> BTreeMap<&str, &LateEvent> {
            let ours = events.iter().filter(|event| event.labels["device"] == disk);
            ours.map(|event| (&*event.labels["sector"], event)).collect()
        };
        let (above, below) = (of(&mapped.name), of(&null.name));
        assert_eq!((above.len(), below.len()), (40, 40));
        let own = rustix::thread::gettid().as_raw_pid().to_string();
        for (sector, event) in &above {
            let disk = below.get(sector).context("the disk below has other requests")?;
            let began_ns = |event: &LateEvent| event.at_ns - event.latency_ns;
            ensure!(
                began_ns(event) + own_ms.saturating_sub(DELAYED_MS / 2) * MS <= began_ns(disk)
                    && disk.at_ns <= event.at_ns,
                "it does not cover that of the disk: {event:?}, {disk:?}"
            );
            ensure!(disk.latency_ns >= 5 * MS * 99 / 100, "{disk:?}");
            assert_eq!(event.labels["submitter_tid"], own);
            // A worker submits what was delayed.
            assert_eq!(disk.labels["submitter_tid"] == own, own_ms == 0, "{disk:?}");
        }
        println!("{target}: submitted below by {}", below.values().next().context("none")?.labels["submitter"]);
    }
    Ok(())
}

/// A buffer for a read that a driver splits.
#[repr(align(4096))]
struct Large([u8; 256 << 10]);

/// Reads a device that splits each read for the disk below.
fn are_whole(name: &str, null: &Null) -> Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(format!("/dev/{name}"))?;
    let (below, above) = (kernel_counts(&null.name)?, kernel_counts(name)?);
    let mut source = attach(&BlockOptions { device: None, late_over_ns: Some(1), ..null.options() })?;
    let mut large = Box::new(Large([0; 256 << 10]));
    let length = large.0.len() as u64;
    (0..20).try_for_each(|turn| file.read_exact_at(&mut large.0, turn * 7 % 16 * length))?;
    let events = late_events(&mut source)?;
    let snapshot = end(source, &[])?;
    ensure_counts_are_the_kernels(&snapshot, &null.name, &below)?;
    let (whole, parts) = (totals(&snapshot, name, "read"), totals(&snapshot, &null.name, "read"));
    println!("{name}: {whole:?} in {parts:?}; before {above:?}, now {:?}", kernel_counts(name)?);
    assert_eq!((whole.requests, whole.bytes, whole.errors, parts.bytes), (20, 20 * length, 0, 20 * length));
    assert!(parts.requests >= 4 * whole.requests);
    let of = |disk: &str| -> Vec<(u64, u64)> {
        let ours = events.iter().filter(|event| event.labels["device"] == disk);
        ours.map(|event| (event.at_ns - event.latency_ns, event.at_ns)).collect()
    };
    let (whole, parts) = (of(name), of(&null.name));
    let within = |whole: (u64, u64)| parts.iter().filter(move |part| whole.0 <= part.0 && part.1 <= whole.1).count();
    // The reads are sequential, and each lasts until its last part is done.
    assert_eq!(whole.iter().map(|&whole| within(whole)).sum::<usize>(), parts.len(), "{whole:?}, {parts:?}");
    Ok(())
}

#[test]
fn split_bio_counts_once_until_last_part_completes() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(null) = Null::make(Duration::from_millis(1), 16)? else { return Ok(()) };
    // Stripes of 64 KiB, alternately in both halves of the disk.
    let Some(mapped) = Mapped::make(&null, &format!("striped 2 128 DISK 0 DISK {}", SIZE_MIB * 1024))? else {
        return Ok(());
    };
    are_whole(&mapped.name, &null)
}

/// An md array on one disk, in chunks of 64 KiB, stopped on drop.
struct Array;

const ARRAY: &str = "md_whylate";

impl Array {
    fn make(null: &Null) -> Result<Option<Array>> {
        load_modules(&[("md-mod", ""), ("raid0", "")]);
        if fs::write("/sys/module/md_mod/parameters/new_array", ARRAY).is_err() {
            println!("skipped: there is no md");
            return Ok(None);
        }
        let array = Array;
        let disk = fs::read_to_string(format!("/sys/block/{}/dev", null.name))?;
        for (file, value) in
            [("metadata_version", "none"), ("chunk_size", "65536"), ("level", "raid0"), ("raid_disks", "1")]
        {
            array.set(file, value)?;
        }
        array.set("new_dev", disk.trim())?;
        array.set(&format!("dev-{}/slot", null.name), "0")?;
        array.set(&format!("dev-{}/size", null.name), &(SIZE_MIB * 1024).to_string())?;
        array.set("array_state", "active")?;
        Ok(Some(array))
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        fs::write(format!("/sys/block/{ARRAY}/md/{file}"), value).with_context(|| format!("cannot set {file}"))
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        let _ = self.set("array_state", "clear");
    }
}

#[test]
fn split_parts_of_md_array_do_not_count() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(null) = Null::make(Duration::from_millis(1), 16)? else { return Ok(()) };
    let Some(_array) = Array::make(&null)? else { return Ok(()) };
    are_whole(ARRAY, &null)
}
