// SPDX-License-Identifier: MIT OR Apache-2.0
//! `sqpoll`: io_uring's submission threads.

use super::lost::reason;
use super::{Card, Judged, JudgedShare, Remark};
use crate::late::{ROLE, SUBMISSION_THREAD};
use crate::merge::{Merging, PRESENT};
use crate::sqpoll::verdicts;
use crate::{Histogram, Series, Snapshot};

/// A submission thread that waits for a CPU for more than this share of its time is starved.
const STARVED: JudgedShare =
    JudgedShare { value: "starved", late_from: 0.1, of: "submission threads", late: "starved" };

/// What submission threads do with their time. It counts those of their waits for a CPU that are late, and no others.
pub static SQPOLL: Card = Card {
    remark,
    advice: verdicts,
    judged_share: Some(STARVED),
    // Where work cannot be told from spinning, `running` is both.
    shares: &["working", "spinning", "running", "sleeping", "starved"],
    tells: |event| event.labels.get(ROLE).is_some_and(|role| role == SUBMISSION_THREAD),
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
            "a ring was locked at every try, or did not show its thread while that was spinning (backend fdinfo)",
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
    ..Card::new("sqpoll", Judged { of: "", late_from_ns: 5_000_000, next: "whylate sqpoll --why {from} 1" }, |_| {
        Histogram::default()
    })
};

fn remark(snapshot: &Snapshot) -> Remark {
    let shares: Vec<f64> = snapshot.series.iter().filter_map(starved).collect();
    let starving = shares.iter().filter(|&&share| share >= STARVED.late_from).count();
    STARVED.remark(shares.len(), starving)
}

/// Of its time on a CPU, the share with something to do.
fn utilisation(series: &Series) -> Option<f64> {
    let (working, spinning) = (series.values.get("working")?, series.values.get("spinning")?);
    (working + spinning > 0.0).then(|| working / (working + spinning))
}

fn starved(series: &Series) -> Option<f64> {
    series.values.get(STARVED.value).copied()
}
