// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the source `wq` and a trace over one span of time.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use whylate_model::{Histogram, Snapshot};
use whylate_sources::inject::work::{HANDLER, Plan, Report, run};
use whylate_sources::kernel::clock::{monotonic_ns, unix_ns_of};
use whylate_sources::wq::WqOptions;
use whylate_sources::{Attached, Session, Source};

use super::is_emulated;
use super::oracle::{Truth, Window, pair};
use super::trace::Trace;
use super::urgent::patching;

/// Tolerance for a slewed wall clock, and for the source's time between reading the clock and counting.
const SLACK_NS: u64 = 1_000_000;

/// What the source saw, and what happened.
pub struct Measured<T> {
    pub snapshot: Snapshot,
    pub truth: Truth,
    pub outcome: T,
}

impl<T> Measured<T> {
    /// Returns one distribution of one handler, over all workqueues.
    pub fn distribution(&self, handler: &str, name: &str) -> Histogram {
        by_label(&self.snapshot, "handler", name).remove(handler).unwrap_or_default()
    }

    /// Fails if an event was seen but not counted.
    pub fn ensure_nothing_hidden(&self) -> Result<()> {
        let hiding = |(reason, count): &(&String, &u64)| **count > 0 && !HARMLESS.contains(&reason.as_str());
        let hidden: Vec<_> = self.snapshot.lost.iter().filter(hiding).collect();
        ensure!(hidden.is_empty(), "{hidden:?}");
        Ok(())
    }
}

/// Reasons that occur on any machine, mostly at the edges of the window, and those of late events only.
const HARMLESS: [&str; 6] = ["unmatched", "cancelled", "reused", "end_unmatched", "late_events", "stacks"];

/// Returns the distribution `name`, merged by one of the series' labels.
pub fn by_label(snapshot: &Snapshot, label: &str, name: &str) -> BTreeMap<String, Histogram> {
    let mut merged: BTreeMap<String, Histogram> = BTreeMap::new();
    for series in &snapshot.series {
        if let Some(histogram) = series.histograms.get(name) {
            merged.entry(series.labels.get(label).cloned().unwrap_or_default()).or_default().merge(histogram);
        }
    }
    merged
}

pub fn append(snapshot: &mut Snapshot, later: Snapshot) {
    snapshot.duration_ns += later.duration_ns;
    snapshot.series.extend(later.series);
    for (reason, count) in later.lost {
        *snapshot.lost.entry(reason).or_default() += count;
    }
}

pub fn inject(plan: &Plan) -> Result<Report> {
    let report = run(plan, &AtomicBool::new(false))?;
    ensure!(report.complete && report.executed == plan.items, "not all items have run: {report:?}");
    Ok(report)
}

/// How long freeing programs takes on a slow machine.
const FREED: Duration = Duration::from_millis(500);

/// Measures during `act`, which gets the source and the snapshot so far, to which it may append.
pub fn session<T>(
    options: &WqOptions,
    act: impl FnOnce(&mut dyn Attached, &mut Snapshot) -> Result<T>,
) -> Result<Measured<T>> {
    if is_emulated() {
        // The previous session's programs are freed by work items that are already queued; they would be unmatched if
        // they started later.
        thread::sleep(FREED);
    }
    traced(Trace::start()?, options, act)
}

/// Like [`session`], with a trace that was started before.
pub fn traced<T>(
    trace: Trace,
    options: &WqOptions,
    act: impl FnOnce(&mut dyn Attached, &mut Snapshot) -> Result<T>,
) -> Result<Measured<T>> {
    let mut source = patching(|| options.attach(&Session::of_one()))?;
    let mut snapshot = source.snapshot()?;
    let outcome = act(&mut *source, &mut snapshot)?;
    let last = source.snapshot()?;
    let seen_ns = monotonic_ns();
    let ended_unix_ns = last.start_unix_ns + last.duration_ns;
    append(&mut snapshot, last);
    patching(|| drop(source));
    let events = trace.finish()?;

    let now_ns = monotonic_ns();
    let now_unix_ns = unix_ns_of(now_ns);
    let monotonic_of = |unix_ns: u64| now_ns - now_unix_ns.saturating_sub(unix_ns);
    let began_ns = monotonic_of(snapshot.start_unix_ns);
    let ended_ns = monotonic_of(ended_unix_ns);
    let window = Window {
        began_ns: began_ns - SLACK_NS..began_ns + SLACK_NS,
        ended_ns: ended_ns - SLACK_NS..seen_ns.max(ended_ns),
    };
    Ok(Measured { snapshot, truth: pair(&events, &window), outcome })
}

/// Returns how many items of the injected handler ran: `items`, and those that another process injected.
pub fn injected<T>(session: &Measured<T>, items: u64) -> Result<u64> {
    let ran = session.truth.of_handler(HANDLER).len() as u64;
    ensure!(ran >= items, "{ran} of {items} items are in the trace");
    if ran > items {
        println!("somebody else injected {} items", ran - items);
    }
    Ok(ran)
}
