// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who had a CPU, instant by instant.

use serde::{Deserialize, Serialize};

/// The account of one CPU over a window that ends with a late event. All times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occupancy {
    /// The CPU.
    pub cpu: u32,
    /// The account has no gap from here on; what was before has been overwritten, or was before tracing began.
    pub since_ns: u64,
    /// The older part of a window with too many intervals, merged by occupant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<Merged>,
    /// In order of time, and disjoint: each instant belongs to exactly one occupant.
    pub intervals: Vec<Interval>,
}

/// One occupant, without a break.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// When it began.
    pub start_ns: u64,
    /// When the next one began.
    pub end_ns: u64,
    /// Who had the CPU.
    pub occupant: Occupant,
    /// What took parts of it.
    #[serde(flatten)]
    pub taken: Taken,
    /// For an interrupt: how long before `start_ns` it was due. The CPU had interrupts disabled since then, at least.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub late_ns: u64,
    /// The kernel stack that the late interrupt found, innermost first: who enabled interrupts again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// Which of the CPU's own worker pools had a worker that was running an item and not asleep: on the CPU (below the
    /// interrupt, if there is one), or waiting to get it back.
    #[serde(default)]
    pub busy: BusyPools,
}

/// Parts of an occupant's time that it did not have itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// The hypervisor ran something else.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steal_ns: u64,
    /// Of the rest, what the hypervisor may have had: it took as much then or before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub perhaps_stolen_ns: u64,
    /// Non-maskable interrupts ran.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nmi_ns: u64,
}

/// Per-CPU worker pools that have an item in progress. Such a pool starts no other worker (concurrency management).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusyPools {
    /// The pool of normal priority.
    pub normal: bool,
    /// The pool of workqueues with `WQ_HIGHPRI`.
    pub highpri: bool,
}

/// Sums over a span, where single intervals were too many to be kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// Begin of the span.
    pub start_ns: u64,
    /// End of the span, where the intervals begin.
    pub end_ns: u64,
    /// Each occupant's part. They add up to the span or less: what is missing had no room.
    pub parts: Vec<MergedPart>,
}

/// What one occupant had of a span.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergedPart {
    /// Who had the CPU.
    pub occupant: Occupant,
    /// For how long in all.
    pub ns: u64,
    /// What took parts of it.
    #[serde(flatten)]
    pub taken: Taken,
}

/// Who had a CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Occupant {
    /// Nobody: the CPU was idle.
    #[default]
    Idle,
    /// A thread.
    Thread {
        /// Its id, by [`crate::thread`].
        tid: u32,
        /// Its name (`comm`).
        name: String,
        /// The path of its cgroup, where that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
    },
    /// A worker thread with a work item.
    Work {
        /// The item's function.
        handler: String,
        /// The worker's id.
        tid: u32,
        /// The worker's name.
        name: String,
    },
    /// A hardware interrupt, by the name of its device or vector.
    Irq {
        /// E.g. `nvme0q1`, `local_timer`.
        name: String,
    },
    /// A softirq.
    Softirq {
        /// E.g. `net_rx`.
        name: String,
    },
}

fn is_zero(ns: &u64) -> bool {
    *ns == 0
}
