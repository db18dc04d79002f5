// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the reasons in `lost` mean.

/// A reason for which events are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason {
    /// Its name in JSON. One name may mean something else in another source.
    pub name: &'static str,
    /// What happened, in a line.
    pub meaning: &'static str,
}

pub(super) const fn reason(name: &'static str, meaning: &'static str) -> Reason {
    Reason { name, meaning }
}

/// Those of every source.
pub const SHARED_LOST: &[Reason] = &[
    reason("late_events", "late events came faster than they were read, or were too many for one line of JSON"),
    reason("nested", "a BPF program was skipped because it was already running on that CPU"),
    reason("occupancy_nested", "an event interrupted the accounting of its CPU, and is missing from it (--why)"),
    reason("occupancy_stacks", "the stack that a late interrupt found could not be stored (--why)"),
    reason(
        "over_budget",
        "late events beyond what may be spent on causes, per CPU and second; they count as late (--why)",
    ),
    reason(
        "unseen_switches",
        "the CPU ran a thread that was not seen switching in; some supervisors hide theirs (--why)",
    ),
];
