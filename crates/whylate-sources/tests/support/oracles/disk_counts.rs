// SPDX-License-Identifier: MIT OR Apache-2.0
//! Totals of a disk by the source `block`, and by the kernel's own counters.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use whylate_model::{LateEvent, Snapshot};
use whylate_sources::block::BlockOptions;
use whylate_sources::{Measuring, Session, Source as _};

use crate::support::fixtures::null_disk::{BLOCK, Buffer};
use crate::support::machine::real_time::patching;

/// A timeout that none of these tests reaches, also on an emulated CPU.
const AT_MOST: Duration = Duration::from_secs(60);

pub fn attach(options: &BlockOptions) -> Result<Measuring> {
    Ok(patching(|| options.attach(&Session::of_one()))?)
}

/// Totals of one device and operation.
#[derive(Debug, Default, PartialEq)]
pub struct Totals {
    pub requests: u64,
    pub errors: u64,
    pub bytes: u64,
}

pub fn totals(snapshot: &Snapshot, device: &str, operation: &str) -> Totals {
    let mut all = Totals::default();
    let is_asked = |labels: &whylate_model::Labels| labels["device"] == device && labels["operation"] == operation;
    for series in snapshot.series.iter().filter(|series| is_asked(&series.labels)) {
        all.requests += series.histograms["latency"].count();
        all.errors += series.values["errors"] as u64;
        all.bytes += series.values["bytes"] as u64;
    }
    all
}

/// Ends the measurement. Fails if the counts lost, by reason, are not exactly `lost`.
pub fn end(mut source: Measuring, lost: &[(&str, u64)]) -> Result<Snapshot> {
    let snapshot = source.snapshot()?;
    patching(|| drop(source));
    ensure_lost(&snapshot, lost)?;
    Ok(snapshot)
}

pub fn ensure_lost(snapshot: &Snapshot, lost: &[(&str, u64)]) -> Result<()> {
    let seen = snapshot.lost.iter().filter(|(_, count)| **count > 0).map(|(name, count)| (name.as_str(), *count));
    let (seen, expected) = (seen.collect::<BTreeMap<_, _>>(), lost.iter().copied().collect::<BTreeMap<_, _>>());
    ensure!(seen == expected, "lost {seen:?}, not {expected:?}");
    Ok(())
}

/// Returns the kernel's own counters of a disk (Documentation/block/stat.rst).
pub fn kernel_counts(disk: &str) -> Result<Vec<u64>> {
    let text = fs::read_to_string(format!("/sys/block/{disk}/stat"))?;
    Ok(text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
}

/// Indexes into those counters.
pub const READS: usize = 0;
const READ_SECTORS: usize = 2;
const WRITES: usize = 4;
pub const MERGED_WRITES: usize = 5;
const WRITTEN_SECTORS: usize = 6;
const DISCARDS: usize = 11;
pub const FLUSHES: usize = 15;

/// Returns the reads and writes in flight: queued or at the device.
pub fn in_flight(disk: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/sys/block/{disk}/inflight")).ok()?;
    text.split_whitespace().map(|count| count.parse::<u64>().ok()).sum()
}

/// Compares the source's totals with the kernel's counters. The kernel counts an empty write, which only flushes, as a
/// write.
pub fn ensure_counts_are_the_kernels(snapshot: &Snapshot, disk: &str, before: &[u64]) -> Result<()> {
    let now = kernel_counts(disk)?;
    let counted = |index: usize| now[index] - before[index];
    let [reads, writes, flushes, discards] =
        ["read", "write", "flush", "discard"].map(|operation| totals(snapshot, disk, operation));
    println!("{disk}: {reads:?}, {writes:?}, {flushes:?}, {discards:?}; before {before:?}, now {now:?}");
    assert_eq!(
        (reads.requests, writes.requests + flushes.requests, discards.requests),
        (counted(READS), counted(WRITES), counted(DISCARDS))
    );
    assert_eq!((reads.bytes, writes.bytes), (counted(READ_SECTORS) * 512, counted(WRITTEN_SECTORS) * 512));
    Ok(())
}

/// Reads the blocks one after another, and returns how many could be read.
pub fn reads(file: &File, blocks: impl IntoIterator<Item = u64>) -> u64 {
    let mut block = Box::new(Buffer([0; BLOCK]));
    let mut read = |number: u64| file.read_exact_at(&mut block.0, number * BLOCK as u64).is_ok();
    blocks.into_iter().map(|number| u64::from(read(number))).sum()
}

pub fn late_events(source: &mut Measuring) -> Result<Vec<LateEvent>> {
    let mut events = Vec::new();
    source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
    Ok(events)
}

pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        ensure!(began.elapsed() < AT_MOST, "{what} does not come");
        thread::sleep(Duration::from_millis(20));
    }
}
