// SPDX-License-Identifier: MIT OR Apache-2.0
//! `block`: disk I/O requests.

use super::SeriesColumn::{Distribution, Label, Value};
use super::lost::{left_out, reason};
use super::{Card, EventWords, Judged};

/// Latency of I/O requests, from submission to completion.
pub static BLOCK: Card = Card {
    grouped_by: Some("device"),
    columns: &[
        Label("device"),
        Label("operation"),
        Label("process"),
        Distribution("latency"),
        Distribution("device"),
        Distribution("queued"),
        Distribution("throttled"),
        Value("bytes"),
        Value("errors"),
        Label("pid"),
    ],
    phases: &[
        ("latency", "from submission until done"),
        ("throttled", "held back by io.max or writeback throttling, or no request was free"),
        ("queued", "in the queue, until issued to the driver"),
        ("device", "at the device (service time)"),
        ("completion", "from the device's interrupt until done"),
    ],
    words: EventWords { late: "late request", lasted: "took", event: "request", latencies: "requests", of: "kind" },
    lost: &[
        reason("buckets_full", "the memory for histograms was full"),
        reason("held_full", "the table of bios held back by cgroup limits was full"),
        reason("in_progress_full", "the table of requests in progress was full"),
        left_out("own", "requests of whylate itself, which are left out on purpose, so they are not lost"),
        reason("reused", "a request started in the memory of one that was not seen to end"),
        reason("series_full", "more processes, threads or cgroups submitted at once than the table of series holds"),
        reason(
            "unmatched",
            "a request completed but was not seen to start, mostly because it was in progress when measuring started",
        ),
        reason(
            "unseen_others",
            "completed requests were overwritten before they were read; causes from that time are unknown (--why)",
        ),
        reason(
            "unseen_submissions",
            "a request's bio was not seen entering the block layer, so its latency starts when the request was allocated",
        ),
    ],
    ..Card::new(
        "block",
        Judged {
            of: "block I/O latency, from submit to completion",
            row: "disk request: until done",
            late: ["disk request", "disk requests"],
            late_from_ns: 50_000_000,
            next: "whylate block --why {from}",
        },
        |snapshot| snapshot.total("latency"),
    )
};
