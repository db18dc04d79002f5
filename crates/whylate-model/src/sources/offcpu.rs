// SPDX-License-Identifier: MIT OR Apache-2.0
//! `offcpu`: threads off their CPUs.

use super::SeriesColumn::Value;
use super::lost::{left_out, reason};
use super::{Card, Judged, Merging};
use crate::{Histogram, Snapshot};

/// Stacks of sleeping threads, and run-queue waits. 20 ms is a normal run-queue wait with five other runnable threads.
/// Users notice threads that are held up for more than 100 ms.
pub static OFFCPU: Card = Card {
    columns: &[Value("threads"), Value("walks"), Value("rate_hz")],
    event: "wait",
    stacks: "where threads wait",
    events: Some(Judged {
        of: "run-queue latency, from runnable to running",
        row: "run queue: until running",
        late: ["wait for a CPU", "waits for a CPU"],
        late_from_ns: 20_000_000,
        next: "whylate offcpu --why {from} -d 10s",
    }),
    held_up: Some(Judged {
        of: "waits for other threads, disks or locks",
        row: "wait: held up by others",
        late: ["held-up wait", "held-up waits"],
        late_from_ns: 100_000_000,
        next: "whylate offcpu --why {from} -d 10s",
    }),
    beyond_a_look: &[("shorter waits of threads, and those for timers or networks", "whylate offcpu -d 10s")],
    merging: |name| match name {
        "walks" => Merging::Sum,
        _ => Merging::Latest,
    },
    lost: &[
        reason(
            "exited",
            "a process exited, or ran another program, before its mappings were read; its sample has no names (run, -p)",
        ),
        reason("holders_full", "the table of waiters and holders was full; the holder is not shown (--blocked)"),
        reason(
            "holders_unmet",
            "a lock's holder has ended or is outside this PID namespace; it is not named (--blocked)",
        ),
        reason("names_full", "the names of all stacks took too much memory; stacks lack outer frames ([cut])"),
        reason(
            "objects_unread",
            "the object of a wait was not read: too many waits, no time left, or the thread ran before it was read (--blocked)",
        ),
        reason("places_full", "the table of call sites was full"),
        reason("processes_full", "the table of processes was full"),
        reason(
            "programs_full",
            "a wait, or the start of a program, counts for none of the programs held up: too many threads, names or kinds",
        ),
        reason("rules_full", "there was no room for a frame's unwind rule; the stack ends in [unwound partly]"),
        reason("samples_full", "a running thread's sample found no room; it counts for no function (run, -p)"),
        left_out(
            "samples_in_interrupts",
            "samples of interrupts and softirqs, which are not the work of the thread that they interrupted (run, -p)",
        ),
        reason(
            "samples_over_budget",
            "reading programs took too long, so a later process was not read; its sample has no names (run, -p)",
        ),
        reason("samples_unread", "the kernel gave no stack of a running thread; its sample counts for no function"),
        reason("stacks_full", "the table of stacks was full"),
        reason("threads_full", "the table of threads was full"),
        reason("torn", "the thread ran while its stack was read; its time counts without a stack"),
        reason(
            "unread",
            "the thread's memory did not answer; its time counts, and its stack ends in [memory did not answer]",
        ),
        reason(
            "unread_files",
            "a mapped file or a list of mappings was unreadable, too large or not read in time; stacks lack frames or names",
        ),
        reason(
            "unread_perf_maps",
            "a perf map (/tmp/perf-PID.map) was too large, or was not read to its end in time; compiled code lacks names",
        ),
        reason("unreadable", "the stack of a living thread could not be read (backend proc)"),
        reason("unseen", "a wait was not seen to begin; its time is left out (backend trace)"),
        reason(
            "unseen_sleeps",
            "a long wait began before the oldest record that is kept, or too many ended at once; it is left out (--why)",
        ),
        reason("unseen_wakers", "the waker was not seen; the wait counts as [waker not seen] (--wakers)"),
        reason("unseen_wakeups", "the start of a long wait for a CPU was not seen, so the wait is left out (--why)"),
        reason(
            "unwound_partly",
            "outer frames of a running thread were not found; its stack ends in [unwound partly] (run, -p)",
        ),
    ],
    ..Card::new(
        "offcpu",
        Judged {
            of: "D-state sleeps, with their age at the end",
            row: "D state: age at the end",
            late: ["thread in D state", "threads in D state"],
            // The awaited event is long overdue.
            late_from_ns: 1_000_000_000,
            next: "whylate offcpu --blocked {from}",
        },
        uninterruptible_ages,
    )
};

/// Returns the ages of threads in uninterruptible sleep: they hold others up and cannot be killed.
fn uninterruptible_ages(snapshot: &Snapshot) -> Histogram {
    let mut ages = Histogram::default();
    snapshot.stacks.iter().filter(|stack| stack.state == "D").for_each(|stack| ages.merge(&stack.age));
    ages
}
