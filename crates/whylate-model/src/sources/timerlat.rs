// SPDX-License-Identifier: MIT OR Apache-2.0
//! `timerlat`: timers and the threads that they wake.

use super::SeriesColumn::{Distribution, Label, Value};
use super::lost::reason;
use super::{Card, Judged, Merging};

/// Lateness of timers, and run-queue waits of the threads that they wake.
pub static TIMERLAT: Card = Card {
    columns: &[
        Label("cpu"),
        Distribution("thread"),
        Distribution("irq"),
        Value("missed"),
        Value("overdue"),
        Distribution("user"),
    ],
    merging: |name| match name {
        "missed" => Merging::Sum,
        _ => Merging::Latest,
    },
    lost: &[
        reason(
            "armed_late",
            "a stopped or preempted thread set its timer after it was due; only its return to user space counts",
        ),
        reason("samples", "the kernel's tracer overwrote samples before they were read (backend tracer)"),
        reason("unseen", "the timer or the switch of an activation was not seen; only its return to user space counts"),
    ],
    ..Card::new(
        "timerlat",
        Judged {
            of: "timer wakeup latency, from due to running",
            row: "timer: until thread runs",
            late: ["timer", "timers"],
            late_from_ns: 5_000_000,
            next: "whylate timerlat top --why {from}",
        },
        |snapshot| snapshot.total("thread"),
    )
};
