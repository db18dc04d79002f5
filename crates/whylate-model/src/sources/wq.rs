// SPDX-License-Identifier: MIT OR Apache-2.0
//! `wq`: work items.

use super::SeriesColumn::{Distribution, Label};
use super::lost::reason;
use super::{Card, EventWords, Judged, Merging};
use crate::late::{ROLE, WORKER};

/// Time that work items wait until a worker starts them.
pub static WQ: Card = Card {
    subject: "work item",
    // A worker without an item that waits for a CPU is about to start one, which waits at least as long. A worker with
    // an item does not count: its item has started.
    also_reports: |event| {
        event.labels.get(ROLE).is_some_and(|role| role == WORKER) && !event.labels.contains_key("handler")
    },
    columns: &[
        Label("handler"),
        Distribution("latency"),
        Label("workqueue"),
        Distribution("runtime"),
        Distribution("pool"),
        Distribution("activate"),
        Distribution("ready"),
        Distribution("asleep"),
        Distribution("on_cpu"),
    ],
    phases: &[
        ("latency", "queued until a worker starts it"),
        ("activate", "waiting for max_active"),
        ("pool", "waiting for a worker"),
        ("runtime", "from start to end"),
        ("on_cpu", "of the run time, on a CPU"),
        ("asleep", "of the run time, asleep"),
        ("ready", "of the run time, waiting for a CPU"),
    ],
    words: EventWords { late: "late item", lasted: "waited", event: "item", latencies: "waits", of: "handler" },
    // These are items that had not started or ended at the end of the span.
    merging: |_| Merging::Latest,
    lost: &[
        reason("buckets_full", "the memory for histograms was full"),
        reason(
            "cancelled",
            "a queued item was canceled or armed anew; whylate notices this when its memory is queued again",
        ),
        reason("end_unmatched", "an item ended that was not seen starting, mostly because it ran when measuring began"),
        reason("evicted", "an item that had been queued for more than 10 s had to make room for another one"),
        reason("holders", "a running item could not be recorded, so items that wait for it do not name it (--why)"),
        reason("items_full", "the table of queued items was full"),
        reason("reused", "the item's memory was freed and used for another item"),
        reason("running_full", "the table of running items was full"),
        reason("series_full", "the table of series was full"),
        reason("stacks", "the stack of an item's queuer could not be kept"),
        reason(
            "unmatched",
            "an item started that was not seen being queued, mostly because it was queued before measuring began",
        ),
    ],
    ..Card::new(
        "wq",
        Judged {
            of: "workqueue latency, from queued to started",
            row: "work item: until started",
            late: ["work item", "work items"],
            late_from_ns: 10_000_000,
            next: "whylate wq --why {from}",
        },
        |snapshot| snapshot.total("latency"),
    )
};
