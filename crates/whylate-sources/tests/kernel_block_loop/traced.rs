// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the source `block` tells of fio's reads and writes on a disk, compared with blktrace's own events of the same
//! requests.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use whylate_model::{Histogram, LateEvent, Snapshot};
use whylate_sources::block::BlockOptions;

use crate::kernel::blk_tracer::{BlkTracer, Traced};
use crate::kernel::chance::{Unjudged, by_chance, in_rounds};
use crate::kernel::disk_counts::attach;
use crate::kernel::loop_disk::Loop;
use crate::kernel::turn::turn_to_measure;
use crate::kernel::urgent::patching;

const DISK_MIB: usize = 16;
/// How far the means may be apart, or by a thousandth. One stamps after the other, at the same event.
const APART_NS: u64 = 1_000;
/// How often one request may be twice as far apart, as each end is stamped apart: where an interrupt or the hypervisor
/// comes between the two, or what they need is not in the CPU's cache.
const SELDOM: f64 = 0.15;

/// Has fio read and write so many blocks, some at once. Meanwhile it takes in what is told of them.
fn fio(disk: &Loop, depth: u32, count: u32, mut meanwhile: impl FnMut() -> Result<()>) -> Result<bool> {
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
        meanwhile()?;
    };
    ensure!(status.success(), "fio fails");
    Ok(true)
}

/// A request by its stamps: when it came, when its device had it, and when it was done.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Stamped {
    sector: u64,
    stamps: [u64; 3],
}

impl Stamped {
    fn told(event: &LateEvent) -> Result<Stamped> {
        let at_device = event.phases.iter().filter(|(phase, _)| phase == "device" || phase == "completion");
        let issued_ns = event.at_ns - at_device.map(|(_, ns)| ns).sum::<u64>();
        let sector = event.labels["sector"].parse()?;
        Ok(Stamped { sector, stamps: [event.at_ns - event.latency_ns, issued_ns, event.at_ns] })
    }

    fn traced(request: &Traced) -> Stamped {
        let stamps = [request.queued_ns, request.issued_ns, request.completed_ns];
        Stamped { sector: request.sector, stamps }
    }
}

/// What its device had of it, and all of it, by the place of the stamp from which it lasts.
const TIMES: [(&str, usize, &[&str]); 2] =
    [("in all", 0, &["latency"]), ("at the device", 1, &["device", "completion"])];

/// One operation's requests, by either.
struct Compared {
    what: String,
    pairs: Vec<(Stamped, Stamped)>,
}

impl Compared {
    /// At each event the two stamp one after the other, always in the order in which they were attached.
    fn ensure_stamps_are_in_order(&self) -> Result<()> {
        let mut gaps: [Vec<u64>; 3] = Default::default();
        for (ours, theirs) in &self.pairs {
            for (place, gaps) in gaps.iter_mut().enumerate() {
                let gap = ours.stamps[place].checked_sub(theirs.stamps[place]).filter(|_| ours.sector == theirs.sector);
                gaps.push(gap.with_context(|| format!("{}: stamp {place} of {ours:?}, {theirs:?}", self.what))?);
            }
        }
        let shares = gaps.map(|mut gaps| {
            gaps.sort_unstable();
            [50, 95, 99, 100].map(|percent| gaps[(gaps.len() - 1) * percent / 100])
        });
        println!("{}: half, 95, 99 and 100 % are stamped within {shares:?} ns", self.what);
        Ok(())
    }

    fn ensure_times_agree(&self, told: &dyn Fn(&str) -> Histogram) -> Result<()> {
        for (which, from, names) in TIMES {
            let time = |of: &Stamped| of.stamps[2] - of.stamps[from];
            let times: Vec<(u64, u64)> = self.pairs.iter().map(|(ours, theirs)| (time(ours), time(theirs))).collect();
            let count = times.len() as u64;
            // The histograms have what the events tell, to the nanosecond.
            let told_ns: u128 = names.iter().map(|name| told(name).sum_ns()).sum();
            assert_eq!(told_ns, times.iter().map(|(ours_ns, _)| u128::from(*ours_ns)).sum());
            let own_most_ns = times.iter().map(|(ours_ns, _)| *ours_ns).max().unwrap_or(0);
            if let [name] = names {
                assert_eq!(told(name).max_ns(), own_most_ns);
            }
            let mean_ns = times.iter().map(|(_, theirs_ns)| theirs_ns).sum::<u64>() / count;
            let own_mean_ns = times.iter().map(|(ours_ns, _)| ours_ns).sum::<u64>() / count;
            // What its own stamps are apart, the longest is, too.
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
            ensure!(apart <= by_chance(times.len(), SELDOM), "{apart} of {count} requests are far apart {which}");
        }
        Ok(())
    }
}

fn apart_ns(ns: u64) -> u64 {
    APART_NS.max(ns / 1_000)
}

#[test]
fn reads_and_writes_of_fio_are_those_of_blktrace() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    // Not the machine's own disk: others may use that so much that no trace has room for it.
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
    let told = |name: &str| {
        let mut all = Histogram::default();
        let ours = snapshot.series.iter().filter(|series| series.labels["operation"] == operation);
        ours.for_each(|series| all.merge(&series.histograms[name]));
        all
    };
    let ours = events.iter().filter(|event| event.labels["operation"] == operation);
    let mut ours = ours.map(Stamped::told).collect::<Result<Vec<_>>>()?;
    let theirs = traced.iter().filter(|request| request.writes == (operation == "write"));
    let (seen, unseen): (Vec<&Traced>, Vec<&Traced>) =
        theirs.partition(|request| ours.iter().any(|ours| ours.sector == request.sector));
    // Where a kernel keeps programs out of a process, they do not run in the interrupts that come in it either.
    let interrupted: BTreeSet<u32> = unseen.iter().map(|request| request.interrupted).collect();
    let is_kept_out = seen.iter().all(|request| !interrupted.contains(&request.interrupted));
    let kept_out = Unjudged(format!("{} are done in {interrupted:?}, where no program runs", unseen.len()));
    ensure!(unseen.is_empty() || !is_kept_out, kept_out);
    let count = seen.len();
    ensure!(count > 0, "blktrace saw no {operation}s");
    let counts = (told("latency").count(), ours.len(), unseen.len());
    assert_eq!(counts, (count as u64, count, 0), "{operation}s, lost {:?}", snapshot.lost);
    let mut theirs: Vec<Stamped> = seen.into_iter().map(Stamped::traced).collect();
    ours.sort();
    theirs.sort();
    let compared = Compared { what: format!("{count} {operation}s"), pairs: ours.into_iter().zip(theirs).collect() };
    compared.ensure_stamps_are_in_order()?;
    compared.ensure_times_agree(&told)
}
