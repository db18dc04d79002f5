// SPDX-License-Identifier: MIT OR Apache-2.0
//! Meanings of the reasons in `lost`.

/// A reason for lost events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason {
    /// Name in JSON; its meaning depends on the source.
    pub name: &'static str,
    /// Meaning, in one line.
    pub meaning: &'static str,
    /// Whether the events are missing from the figures; otherwise they are left out on purpose, and only counted.
    pub is_lost: bool,
}

pub(super) const fn reason(name: &'static str, meaning: &'static str) -> Reason {
    Reason { name, meaning, is_lost: true }
}

pub(super) const fn left_out(name: &'static str, meaning: &'static str) -> Reason {
    Reason { name, meaning, is_lost: false }
}

/// Reasons of all sources.
pub const SHARED_LOST: &[Reason] = &[
    reason(
        "births_full",
        "more threads were created or exited than are remembered; later ones belong to no command (run)",
    ),
    reason(
        "edges_overwritten",
        "records of a CPU were overwritten before they were read; on paths, that time is `not recorded` (--why, run)",
    ),
    reason(
        "lock_waits_unread",
        "the kernel lock of a wait was not kept: too many threads waited, or one for two locks at once (--why, -p, run)",
    ),
    reason("late_events", "late events came faster than they were read, or were too many for one line of JSON"),
    reason(
        "merged_full",
        "the span has more series, stacks or programs than a merged snapshot can have; the others are missing (replay)",
    ),
    reason("nested", "a BPF program was skipped because it was already running on that CPU"),
    reason(
        "occupancy_nested",
        "an event interrupted the accounting of its CPU, and is missing from the account (--why)",
    ),
    reason("occupancy_stacks", "the stack at which a late interrupt arrived could not be stored (--why)"),
    reason(
        "over_budget",
        "the budget for explaining (--budget) was spent; these late events count as late, without causes (--why)",
    ),
    reason(
        "moves_overwritten",
        "the record of a thread's run queue before its migration was overwritten; that time counts for its last CPU (--why, run)",
    ),
    reason(
        "queuers_overwritten",
        "the record of who queued a work item was overwritten before the item started, or the item was canceled (--why, run)",
    ),
    reason(
        "reclaim_began_earlier",
        "a thread reclaimed memory when recording began; this is in no memory stall (run, -p, --comm, --cgroup)",
    ),
    reason(
        "reclaim_full",
        "a span in which a thread reclaimed memory found no room; memory stalls are longer than shown (run, -p, --comm, --cgroup)",
    ),
    reason(
        "requests_full",
        "more disk requests were in progress than are kept; waits for them do not show the time at the device (--why, run)",
    ),
    reason(
        "requests_overwritten",
        "the record of a disk request was overwritten before a wait for the request was explained (--why, run)",
    ),
    reason(
        "records_given_up",
        "there was no room for older records in memory or in a file; on paths, that time is `not recorded` (run)",
    ),
    reason(
        "unseen_interrupts",
        "a waker, submitter or queuer is unknown: an interrupt without a tracepoint was running (--why, run)",
    ),
    reason(
        "unseen_requests",
        "the start of a disk request was not seen; waits for it do not show the time at the device (--why, run)",
    ),
    reason(
        "unseen_switches",
        "the CPU ran a thread that was not seen switching in; some supervisors hide their context switches (--why)",
    ),
    left_out(
        "wait_objects_unread",
        "the object of a wait of 100 ms or more was not read while the wait lasted (-p, run)",
    ),
    reason(
        "waits_not_followed",
        "there were too many waits to follow each in time; some threads' other waits are `not followed` (-p, --comm, --cgroup)",
    ),
];
