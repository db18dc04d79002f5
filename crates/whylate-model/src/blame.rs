// SPDX-License-Identifier: MIT OR Apache-2.0
//! Derives the causes of a late event from its evidence; the causes add up to its latency.
//!
//! A source's rules ([`causes`] for work items) split the window of a late event into parts and explain each part;
//! `window` does the arithmetic, in nanoseconds. Time that no rule explains is
//! [`CauseKind::Unknown`](crate::CauseKind::Unknown).

mod block;
pub(crate) mod frames;
mod held;
mod pool;
mod runnable;
mod span;
mod sum;
mod tick;
mod timeline;
mod timer;
mod window;
mod wq;

pub use block::{OtherRequests, RequestEvidence, request_causes};
pub use pool::{HeldSlot, PoolClass};
pub use runnable::{RunnableEvidence, Throttled, runnable_causes};
pub use tick::{Found, Keeper, LateTick, Reason, interrupted_stack, keeper, tick_causes};
pub use timer::{TimerAnalysis, TimerEvidence, timer_analysis, timer_causes};
pub use wq::{Wakeup, WorkEvidence, causes};

use serde::{Deserialize, Serialize};

/// Evidence from which the causes of a late event are derived; one variant per source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Evidence {
    /// A late work item.
    Work(WorkEvidence),
    /// A late timer and the thread that it wakes.
    Timer(TimerEvidence),
    /// A late interrupt.
    Tick(LateTick),
    /// A thread that waited for a CPU.
    Runnable(RunnableEvidence),
    /// A slow I/O request.
    Request(RequestEvidence),
}

impl Evidence {
    /// Returns the causes, largest first.
    pub fn causes(&self) -> Vec<crate::Cause> {
        match self {
            Evidence::Work(evidence) => causes(evidence),
            Evidence::Timer(evidence) => timer_causes(evidence),
            Evidence::Tick(tick) => tick_causes(tick),
            Evidence::Runnable(evidence) => runnable_causes(evidence),
            Evidence::Request(evidence) => request_causes(evidence),
        }
    }

    /// Returns the event's latency in nanoseconds.
    pub fn latency_ns(&self) -> u64 {
        match self {
            Evidence::Work(evidence) => evidence.started_ns.saturating_sub(evidence.queued_ns),
            Evidence::Timer(evidence) => evidence.thread_ns.saturating_sub(evidence.due_ns),
            Evidence::Tick(tick) => tick.late_ns(),
            Evidence::Runnable(evidence) => evidence.running_ns.saturating_sub(evidence.runnable_ns),
            Evidence::Request(evidence) => evidence.completed_ns.saturating_sub(evidence.submitted_ns),
        }
    }
}

impl From<WorkEvidence> for Evidence {
    fn from(evidence: WorkEvidence) -> Self {
        Evidence::Work(evidence)
    }
}

impl From<TimerEvidence> for Evidence {
    fn from(evidence: TimerEvidence) -> Self {
        Evidence::Timer(evidence)
    }
}

impl From<LateTick> for Evidence {
    fn from(tick: LateTick) -> Self {
        Evidence::Tick(tick)
    }
}

impl From<RunnableEvidence> for Evidence {
    fn from(evidence: RunnableEvidence) -> Self {
        Evidence::Runnable(evidence)
    }
}

impl From<RequestEvidence> for Evidence {
    fn from(evidence: RequestEvidence) -> Self {
        Evidence::Request(evidence)
    }
}
