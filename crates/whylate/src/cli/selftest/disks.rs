// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks `block` by disk reads of known latency, alone and with concurrent writes.

use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use whylate_model::selftest::{Check, Unit};
use whylate_model::sources::BLOCK;
use whylate_model::{CauseKind, Histogram, LateEvent};
use whylate_sources::block::{BlockOptions, By};
use whylate_sources::inject::requests::{self, HOG, Plan, Report, folder_on_disk};
use whylate_sources::{AttachError, Session, Source as _};

use super::Setup;

pub(super) const READS: &str = "100 disk reads";
const COUNT: u64 = 100;
const EVERY: Duration = Duration::from_millis(2);
/// Maximum number of missing reads. Each must be counted as lost. A virtual machine's kernel may hide completions.
const MAX_UNSEEN: u64 = COUNT / 10;
/// Maximum number of snapshots until each read is counted, as seen or as lost.
const ROUNDS: u32 = 4;
/// Number of threads that write during the explained reads.
const HOGS: u32 = 16;

/// Compares the latency that the reader measured with what the source reports.
pub(super) fn reads(setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    let none = || {
        AttachError::Unsupported(
            "none of /var/tmp, /tmp and the current directory is on a disk with direct I/O: run it from a directory that is"
                .to_owned(),
        )
    };
    let folder = folder_on_disk().ok_or_else(none)?;
    let plan = Plan { folder, reads: COUNT, every: EVERY, ..Plan::default() };
    let Measured { backend, latency, unseen, report } = measured(&plan, setup)?;
    // On a busy machine, the reader waits longer for a CPU than for the disk.
    let own_ns = report.made.iter().map(|read| read.took_ns - read.queued_ns).sum::<u64>() as f64;
    let own_ns = own_ns / report.made.len().max(1) as f64;
    let (right, late) = explained(&Plan { hogs: HOGS, ..plan }, setup)?;
    let check = |figure: &str| Check::new(BLOCK.name, backend, READS, figure);
    Ok(vec![
        check("reads counted").compare(
            Unit::Count,
            report.made.len() as f64,
            latency.count() as f64,
            unseen.min(MAX_UNSEEN) as f64,
        ),
        check("mean latency")
            .compare(Unit::Ns, own_ns, latency.mean_ns() as f64, setup.apart_ns as f64 + own_ns / 20.0)
            .blames(HOG, right, late),
    ])
}

struct Measured {
    backend: &'static str,
    latency: Histogram,
    /// Number of requests that the source counts as lost, because the kernel did not show their completion.
    unseen: u64,
    report: Report,
}

fn measured(plan: &Plan, setup: &Setup<'_>) -> Result<Measured, AttachError> {
    let mut source = BlockOptions { by: By::Thread, ..BlockOptions::default() }.attach(&Session::of_one())?;
    let report = requests::run(plan, setup.stop)?;
    let (mut latency, mut unseen) = (Histogram::default(), 0);
    let tid = report.tid.to_string();
    for _ in 0..ROUNDS {
        let snapshot = source.snapshot()?;
        for series in &snapshot.series {
            let label = |name: &str| series.labels.get(name).map_or("", String::as_str);
            if label("tid") == tid && label("operation") == "read" && label("device") == report.disk {
                latency.merge(series.histograms.get("latency").unwrap_or(&Histogram::default()));
            }
        }
        unseen += snapshot.lost.get("reused").copied().unwrap_or(0);
        if latency.count() + unseen >= report.made.len() as u64 {
            break;
        }
        // If a completion was hidden, its read counts as lost once its memory is reused. Further reads reuse it.
        let another = thread::scope(|scope| scope.spawn(|| requests::run(plan, setup.stop)).join());
        another.map_err(|_| anyhow!("the reading thread failed"))??;
    }
    Ok(Measured { backend: source.backend, latency, unseen, report })
}

/// Returns how many late reads name the writing threads as the first disk cause, and how many reads were late.
fn explained(plan: &Plan, setup: &Setup<'_>) -> Result<(u64, u64), AttachError> {
    let (mut right, mut late) = (0, 0);
    let options = BlockOptions { explain_over_ns: Some(1), phases: true, ..BlockOptions::default() };
    let own = rustix::thread::gettid().as_raw_pid().to_string();
    let mut source = options.attach(&Session::of_one())?;
    let mut each = |event: LateEvent| {
        let label = |name: &str| event.labels.get(name).map_or("", String::as_str);
        if label("submitter_tid") != own || label("operation") != "read" {
            return;
        }
        late += 1;
        let of_disk = |kind| matches!(kind, CauseKind::Disk | CauseKind::DiskQueue);
        let first = event.causes.iter().find(|cause| of_disk(cause.kind));
        right += u64::from(first.is_some_and(|cause| cause.who.comm() == Some(HOG)));
    };
    // All requests are late here, and the buffer holds some thousands: drain it in between.
    for _ in 0..10 {
        requests::run(&Plan { reads: plan.reads / 10, ..plan.clone() }, setup.stop)?;
        source.drain_late(Duration::ZERO, &mut each)?;
    }
    Ok((right, late))
}
