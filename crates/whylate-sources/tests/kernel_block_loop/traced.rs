// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the source `block` with blktrace's events, for fio's reads and writes on a disk.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use whylate_model::{Histogram, LateEvent, Snapshot};
use whylate_sources::block::BlockOptions;

use crate::support::fixtures::loop_disk::Loop;
use crate::support::machine::lock::lock_machine;
use crate::support::machine::real_time::patching;
use crate::support::oracles::blk_tracer::{BlkTracer, Traced};
use crate::support::oracles::chance::{Unjudged, by_chance, in_rounds};
use crate::support::oracles::disk_counts::attach;

const DISK_MIB: usize = 16;
/// Maximum distance of the means in nanoseconds, or 1/1,000 if that is more: the two timestamps of an event are taken
/// one after the other.
const APART_NS: u64 = 1_000;
/// Maximum share of requests that are more than twice as far apart: each end has two timestamps, and an interrupt, the
/// hypervisor or a cache miss may come between them.
const MAX_FAR_APART: f64 = 0.15;

/// Has fio read and write `count` blocks with `depth` in flight, and calls `while_running` until it ends. Returns false,
/// and prints why, without fio.
fn fio(disk: &Loop, depth: u32, count: u32, mut while_running: impl FnMut() -> Result<()>) -> Result<bool> {
    let mut fio = Command::new("fio");
    fio.args(["--name=traced", "--rw=randrw", "--bs=4k", "--direct=1", "--ioengine=libaio", "--runtime=5"]);
    fio.arg(format!("--filename={}", disk.path())).arg(format!("--iodepth={depth}"));
    fio.arg(format!("--number_ios={count}"));
    let Ok(mut running) = fio.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn() else {
        println!("skipped: there is no fio");
        return Ok(false);
    };
    let status = loop {
        if let Some(status) = running.try_wait()? {
            break status;
        }
        while_running()?;
    };
    ensure!(status.success(), "fio fails");
    Ok(true)
}

/// A request by its timestamps: queued, issued and completed.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timestamps {
    sector: u64,
    at_ns: [u64; 3],
}

impl Timestamps {
    fn from_event(event: &LateEvent) -> Result<Timestamps> {
        let at_device = event.phases.iter().filter(|(phase, _)| phase == "device" || phase == "completion");
        let issued_ns = event.at_ns - at_device.map(|(_, ns)| ns).sum::<u64>();
        let sector = event.labels["sector"].parse()?;
        Ok(Timestamps { sector, at_ns: [event.at_ns - event.latency_ns, issued_ns, event.at_ns] })
    }

    fn from_traced(request: &Traced) -> Timestamps {
        let at_ns = [request.queued_ns, request.issued_ns, request.completed_ns];
        Timestamps { sector: request.sector, at_ns }
    }
}

/// Total and device time: label, index of the timestamp where it starts, and histograms.
const TIMES: [(&str, usize, &[&str]); 2] =
    [("in total", 0, &["latency"]), ("at the device", 1, &["device", "completion"])];

/// The requests of one operation, paired by sector, with both sets of timestamps.
struct Compared {
    what: String,
    pairs: Vec<(Timestamps, Timestamps)>,
}

impl Compared {
    /// At each event the source and the tracer take timestamps in the order in which they were attached.
    fn ensure_stamps_are_in_order(&self) -> Result<()> {
        let mut gaps: [Vec<u64>; 3] = Default::default();
        for (ours, theirs) in &self.pairs {
            for (index, gaps) in gaps.iter_mut().enumerate() {
                let gap = ours.at_ns[index].checked_sub(theirs.at_ns[index]).filter(|_| ours.sector == theirs.sector);
                gaps.push(gap.with_context(|| format!("{}: stamp {index} of {ours:?}, {theirs:?}", self.what))?);
            }
        }
        let shares = gaps.map(|mut gaps| {
            gaps.sort_unstable();
            [50, 95, 99, 100].map(|percent| gaps[(gaps.len() - 1) * percent / 100])
        });
        println!("{}: half, 95, 99 and 100 % are stamped within {shares:?} ns", self.what);
        Ok(())
    }

    fn ensure_times_agree(&self, merged_histogram: &dyn Fn(&str) -> Histogram) -> Result<()> {
        for (which, from, names) in TIMES {
            let time = |of: &Timestamps| of.at_ns[2] - of.at_ns[from];
            let times: Vec<(u64, u64)> = self.pairs.iter().map(|(ours, theirs)| (time(ours), time(theirs))).collect();
            let count = times.len() as u64;
            // The histograms add up to the events' times, to the nanosecond.
            let histogram_ns: u128 = names.iter().map(|name| merged_histogram(name).sum_ns()).sum();
            assert_eq!(histogram_ns, times.iter().map(|(ours_ns, _)| u128::from(*ours_ns)).sum());
            let own_most_ns = times.iter().map(|(ours_ns, _)| *ours_ns).max().unwrap_or(0);
            if let [name] = names {
                assert_eq!(merged_histogram(name).max_ns(), own_most_ns);
            }
            let mean_ns = times.iter().map(|(_, theirs_ns)| theirs_ns).sum::<u64>() / count;
            let own_mean_ns = times.iter().map(|(ours_ns, _)| ours_ns).sum::<u64>() / count;
            // The longest request may be as far apart as its timestamps.
            let longest = times.iter().max_by_key(|(_, theirs_ns)| theirs_ns).context("there are none")?;
            let apart =
                times.iter().filter(|(ours_ns, theirs_ns)| ours_ns.abs_diff(*theirs_ns) > 2 * apart_ns(*theirs_ns));
            let apart = apart.count();
            println!(
                "    {which}: {own_mean_ns} and {mean_ns} ns on average; the longest is {} and {} ns, of {own_most_ns}; \
                 {apart} of {count} are far apart",
                longest.0, longest.1
            );
            ensure!(own_mean_ns.abs_diff(mean_ns) <= apart_ns(mean_ns), "the means are apart {which}");
            ensure!(
                apart <= by_chance(times.len(), MAX_FAR_APART),
                "{apart} of {count} requests are far apart {which}"
            );
        }
        Ok(())
    }
}

fn apart_ns(ns: u64) -> u64 {
    APART_NS.max(ns / 1_000)
}

#[test]
fn fio_requests_match_blktrace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // Not the machine's own disk, as the load of others may overflow the trace.
    let Some(disk) = Loop::make(DISK_MIB)? else { return Ok(()) };
    for (depth, count) in [(1, 1_000), (32, 2_000), (256, 3_000)] {
        in_rounds(|| {
            let Some(tracer) = BlkTracer::start(&disk.name)? else { return Ok(()) };
            let device = Some(disk.name.clone());
            let mut source =
                attach(&BlockOptions { device, phases: true, late_over_ns: Some(1), ..BlockOptions::default() })?;
            let mut events: Vec<LateEvent> = Vec::new();
            let mut drain = || source.drain_late(Duration::from_millis(5), &mut |event| events.push(event));
            if !fio(&disk, depth, count, &mut drain)? {
                return Ok(());
            }
            drain()?;
            let snapshot = source.snapshot()?;
            patching(|| drop(source));
            let traced = tracer.end()?;
            println!("{depth} at once:");
            ["read", "write"].into_iter().try_for_each(|operation| compare(&snapshot, &events, &traced, operation))
        })?;
    }
    Ok(())
}

fn compare(snapshot: &Snapshot, events: &[LateEvent], traced: &[Traced], operation: &str) -> Result<()> {
    let merged_histogram = |name: &str| {
        let mut all = Histogram::default();
        let ours = snapshot.series.iter().filter(|series| series.labels["operation"] == operation);
        ours.for_each(|series| all.merge(&series.histograms[name]));
        all
    };
    let ours = events.iter().filter(|event| event.labels["operation"] == operation);
    let mut ours = ours.map(Timestamps::from_event).collect::<Result<Vec<_>>>()?;
    let theirs = traced.iter().filter(|request| request.writes == (operation == "write"));
    let (seen, unseen): (Vec<&Traced>, Vec<&Traced>) =
        theirs.partition(|request| ours.iter().any(|ours| ours.sector == request.sector));
    // A kernel that hides a process from BPF programs also hides interrupts that interrupt that process.
    let interrupted: BTreeSet<u32> = unseen.iter().map(|request| request.interrupted).collect();
    let is_kept_out = seen.iter().all(|request| !interrupted.contains(&request.interrupted));
    let kept_out = Unjudged(format!("{} are done in {interrupted:?}, where no program runs", unseen.len()));
    ensure!(unseen.is_empty() || !is_kept_out, kept_out);
    let count = seen.len();
    ensure!(count > 0, "blktrace saw no {operation}s");
    let counts = (merged_histogram("latency").count(), ours.len(), unseen.len());
    assert_eq!(counts, (count as u64, count, 0), "{operation}s, lost {:?}", snapshot.lost);
    let mut theirs: Vec<Timestamps> = seen.into_iter().map(Timestamps::from_traced).collect();
    ours.sort();
    theirs.sort();
    let compared = Compared { what: format!("{count} {operation}s"), pairs: ours.into_iter().zip(theirs).collect() };
    compared.ensure_stamps_are_in_order()?;
    compared.ensure_times_agree(&merged_histogram)
}
