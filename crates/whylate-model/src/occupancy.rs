// SPDX-License-Identifier: MIT OR Apache-2.0
//! Account of a CPU: its occupant at each instant.

use serde::{Deserialize, Serialize};

/// Account of one CPU over a window that ends with a late event. Timestamps are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Occupancy {
    /// The CPU.
    pub cpu: u32,
    /// Start of the gapless account; earlier records were overwritten, or tracing had not started.
    pub since_ns: u64,
    /// Older part of a window with too many intervals, merged by occupant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<Merged>,
    /// Sorted by time, and disjoint: each instant belongs to exactly one occupant.
    pub intervals: Vec<Interval>,
}

/// Uninterrupted time of one occupant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Interval {
    /// Start of the interval.
    pub start_ns: u64,
    /// End of the interval, and start of the next one.
    pub end_ns: u64,
    /// Occupant of the CPU.
    pub occupant: Occupant,
    /// Time taken from the occupant.
    #[serde(flatten)]
    pub taken: Taken,
    /// Delay of an interrupt before `start_ns`. Interrupts were disabled on the CPU for at least this time.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub late_ns: u64,
    /// Kernel stack at the late interrupt, innermost frame first: the code that enabled interrupts again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// Worker pools of this CPU with a worker that was running an item and not asleep: on the CPU (below the interrupt,
    /// if any), or waiting in the run queue.
    #[serde(default)]
    pub busy: BusyPools,
}

/// Time that was taken from an occupant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Taken {
    /// Steal time: the hypervisor ran something else.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub steal_ns: u64,
    /// Possible further steal time: the hypervisor took it in this interval or before.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub perhaps_stolen_ns: u64,
    /// Time of non-maskable interrupts.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub nmi_ns: u64,
}

/// Per-CPU worker pools with an item in progress. Such a pool starts no other worker (concurrency management).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BusyPools {
    /// The normal-priority pool.
    pub normal: bool,
    /// The pool of workqueues with `WQ_HIGHPRI`.
    pub highpri: bool,
}

/// Time by occupant over a span with more intervals than are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Merged {
    /// Start of the span.
    pub start_ns: u64,
    /// End of the span, where the intervals start.
    pub end_ns: u64,
    /// Time of each occupant. They add up to the span or less: the rest did not fit.
    pub parts: Vec<MergedPart>,
}

/// One occupant's share of a span.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MergedPart {
    /// Occupant of the CPU.
    pub occupant: Occupant,
    /// Total time in nanoseconds.
    pub ns: u64,
    /// Time taken from the occupant.
    #[serde(flatten)]
    pub taken: Taken,
}

/// Occupant of a CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Occupant {
    /// Nothing: the CPU was idle.
    #[default]
    Idle,
    /// A thread.
    Thread {
        /// TID, as in [`crate::thread`].
        tid: u32,
        /// Name (`comm`).
        name: String,
        /// Path of its cgroup, if known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
    },
    /// A worker thread running a work item.
    Work {
        /// Function of the item.
        handler: String,
        /// TID of the worker.
        tid: u32,
        /// Name of the worker.
        name: String,
    },
    /// A hardware interrupt, named after its device or vector.
    Irq {
        /// For example `nvme0q1`, `local_timer`.
        name: String,
    },
    /// A softirq.
    Softirq {
        /// For example `net_rx`.
        name: String,
    },
}
