// SPDX-License-Identifier: MIT OR Apache-2.0
//! `irqsoff`: late interrupts.

use super::SeriesColumn::{Distribution, Label, Value};
use super::lost::reason;
use super::{Card, EventWords, Judged, Merging};

/// Sections with interrupts disabled, by culprit. Late events and figures cover everything that delays an interrupt.
pub static IRQSOFF: Card = Card {
    columns: &[
        Label("kind"),
        Label("function"),
        Distribution("length"),
        Value("share"),
        Label("caller"),
        Label("handler"),
    ],
    stacks: "where interrupts were kept off",
    words: EventWords {
        late: "late interrupt",
        lasted: "took",
        event: "interrupt",
        latencies: "interrupts",
        of: "CPU",
    },
    beyond_a_look: &[
        ("how long preemption is off", "whylate irqsoff --preempt 10 1"),
        ("timers of other threads and of the kernel", "whylate irqsoff --timers 10 1"),
    ],
    merging: |name| match name {
        "share" => Merging::OverSpan,
        "period_ns" => Merging::Max,
        "interrupt_ns" => Merging::Latest,
        _ => Merging::Sum,
    },
    lost: &[
        reason("buckets_full", "the memory for histograms was full"),
        reason("cpus_full", "the file has events of more CPUs than are read (--import)"),
        reason("culprits_full", "there were more culprits at once than their table holds"),
        reason("events", "the kernel lost events, as the file says (--import)"),
        reason("looks", "a CPU went offline and came back; its sections are no longer sampled by NMI"),
        reason("series_full", "the table of series was full"),
        reason(
            "stacks",
            "the stack of a late tick could not be kept; it counts without the function that enabled interrupts",
        ),
        reason(
            "traces",
            "new longest sections came faster than their traces were read, or a trace was missing (backend tracer)",
        ),
        reason(
            "unmatched",
            "the start or end of a section or a timer's function, or a reschedule mark, was not seen; mostly right after the start",
        ),
        reason("unreadable", "a line of the file is not an event (--import)"),
        reason(
            "unseen",
            "a due tick was not seen, mostly because opening perf events made the kernel reprogram its timers",
        ),
    ],
    ..Card::new(
        "irqsoff",
        Judged {
            of: "interrupt latency, from due to handled",
            row: "interrupt: until handled",
            late: ["interrupt", "interrupts"],
            late_from_ns: 5_000_000,
            next: "whylate irqsoff --why {from}",
        },
        |snapshot| snapshot.total("length"),
    )
};
