// SPDX-License-Identifier: MIT OR Apache-2.0
//! `sqpoll`: io_uring's submission threads.

use super::SeriesColumn::{Label, Value};
use super::lost::reason;
use super::{Card, Judged, JudgedShare, Merging, PRESENT, Remark};
use crate::late::{ROLE, SUBMISSION_THREAD};
use crate::sqpoll::verdicts;
use crate::{Histogram, Series, Snapshot};

/// A submission thread is starved if it waits for a CPU for more than this share of its time.
const STARVED: JudgedShare =
    JudgedShare { value: "starved", late_from: 0.1, of: "submission threads", late: "starved" };

/// Time use of submission threads. Its late events are their run-queue waits.
pub static SQPOLL: Card = Card {
    columns: &[
        Label("process"),
        Label("tid"),
        Value("working"),
        Value("spinning"),
        Value("starved"),
        Value("starved_by"),
        Label("by"),
        Value("sleeping"),
        Value("sqes_per_s"),
        Value("cpu"),
    ],
    remark,
    advice: verdicts,
    judged_share: Some(STARVED),
    // If work is indistinguishable from spinning, `running` is both.
    shares: &["working", "spinning", "running", "sleeping", "starved"],
    also_reports: |event| event.labels.get(ROLE).is_some_and(|role| role == SUBMISSION_THREAD),
    merging: |name| match name {
        "working" | "spinning" | "running" | "sleeping" | "starved" | "sqes_per_s" | "wakeups_per_s" | PRESENT => {
            Merging::OverPresence
        }
        "starved_by" | "throttled" => Merging::OverSpan,
        "utilisation" => Merging::Derived(utilisation),
        _ => Merging::LastKnown,
    },
    lost: &[
        reason(
            "busy_rings",
            "a ring was locked at every try, or did not show its thread while the thread was spinning (backend fdinfo)",
        ),
        reason("ended_unseen", "a submission thread was gone, and its exit was not seen"),
        reason(
            "samples",
            "a submission thread could not be sampled, or its stack could not be read (before Linux 6.9)",
        ),
        reason("threads_full", "the table of threads was full"),
        reason("unread_processes", "the kernel denied access to the rings of a process"),
        reason("unseen_wakeups", "the start of a long wait for a CPU was not seen, so the wait is left out (--why)"),
        reason(
            "work_ends",
            "the end of work was not seen; the time until the next work or sleep counts as work (--precise)",
        ),
    ],
    ..Card::new(
        "sqpoll",
        Judged {
            of: "",
            row: "SQPOLL: until it runs",
            late: ["SQPOLL wait", "SQPOLL waits"],
            late_from_ns: 5_000_000,
            next: "whylate sqpoll --why {from} 1",
        },
        |_| Histogram::default(),
    )
};

fn remark(snapshot: &Snapshot) -> Remark {
    let shares: Vec<f64> = snapshot.series.iter().filter_map(starved).collect();
    let starving = shares.iter().filter(|&&share| share >= STARVED.late_from).count();
    STARVED.remark(shares.len(), starving)
}

/// Returns the working share of the time on a CPU.
fn utilisation(series: &Series) -> Option<f64> {
    let (working, spinning) = (series.values.get("working")?, series.values.get("spinning")?);
    (working + spinning > 0.0).then(|| working / (working + spinning))
}

fn starved(series: &Series) -> Option<f64> {
    series.values.get(STARVED.value).copied()
}
