// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a work item was late.

use serde::{Deserialize, Serialize};

use crate::occupancy::Occupancy;

/// What was seen of a late work item. All times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkEvidence {
    /// When it was queued.
    pub queued_ns: u64,
    /// When `max_active` let it go; equal to `queued_ns` where it did at once.
    pub activated_ns: u64,
    /// When a worker took it.
    pub started_ns: u64,
    /// Its workqueue.
    pub workqueue: String,
    /// What kind of pool it waited in.
    pub pool: PoolClass,
    /// The worker that took it; 0 for a softirq.
    pub worker_tid: u32,
    /// The worker was the workqueue's rescuer.
    #[serde(default)]
    pub by_rescuer: bool,
    /// When the worker's thread was made.
    #[serde(default)]
    pub worker_created_ns: u64,
    /// How the worker came to run; `None` where it was not seen being woken since tracing began, and for a softirq.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wakeup: Option<Wakeup>,
    /// Items of the same workqueue (on the same CPU or node) that ended while this one waited for `max_active`, in order of their ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<HeldSlot>,
    /// The last item of the worker before this one, where the worker had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<HeldSlot>,
    /// Who had the CPU on which the item was started.
    pub occupancy: Occupancy,
}

/// The kind of a worker pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolClass {
    /// A CPU's own pool of normal priority.
    #[default]
    Normal,
    /// A CPU's own pool for workqueues with `WQ_HIGHPRI`.
    Highpri,
    /// Not bound to one CPU.
    Unbound,
    /// Runs in a softirq (`WQ_BH`).
    Softirq,
}

/// How a worker came to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wakeup {
    /// When it was woken the last time: it has not slept since.
    pub woken_ns: u64,
    /// When it was moved to this CPU the last time since it was woken, and from which CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<(u64, u32)>,
}

/// An item that another one had to wait for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldSlot {
    /// Its function.
    pub handler: String,
    /// When a worker took it.
    pub started_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
}
