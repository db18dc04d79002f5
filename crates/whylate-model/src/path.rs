// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths: a wait followed back through its wakers, until every nanosecond of it is attributed.
//!
//! A [`CpuTimeline`] is a per-CPU scheduling timeline, read backwards: run slices with their switch-in and switch-out.
//! [`walk()`] goes back through it and follows one thread at a time. While the thread is on a CPU, it is charged
//! itself. While it is runnable, the actor on its CPU is charged. Where it was woken, a *hop* (wakeup edge) leads to
//! the waker, until the walk reaches the switch-out with which the wait began. [`PathBuilder`] collects the findings of
//! one wait as a [`Path`], in order of time and as text; its segments add up to the wait. [`command`] does so for the
//! threads of a whole command, which [`members`] knows.
//!
//! Timelines are built from [`events`], kept compressed ([`packed`]), or read from other tools' traces
//! ([`ftrace::timeline`](crate::ftrace::timeline)).

pub mod budget;
mod build;
pub mod command;
mod cursor;
mod cursors;
pub mod events;
mod held_up;
pub mod history;
mod holding;
mod items;
pub mod members;
pub mod outline;
pub mod packed;
mod passed;
mod rewind;
pub mod stolen;
mod sums;
pub mod timer;
mod walk;
pub mod watched;
mod within;
mod working;

pub use build::{Names, OTHERS, Path, PathBuilder, PathSegment, WaitSpan};
pub(crate) use cursor::DEEPEST;
pub use history::CpuTimeline;
pub use walk::walk;
pub use within::within;

use history::{Blocked, Name, Request, Waker};
use timer::TimerKind;

use crate::CauseKind;
use crate::reclaim::ReclaimRecords;
use crate::wait::Stop;
use crate::work::CpuSamples;

/// A query: the activity of a thread, or its wait, in a span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// TID as shown.
    pub tid: u32,
    /// Start of the span (CLOCK_MONOTONIC).
    pub from_ns: u64,
    /// End of the span (CLOCK_MONOTONIC). The thread is on a CPU then, or is being switched in.
    pub to_ns: u64,
    /// Explains only the thread's last wait, back to its switch-out, which need not be recorded; `from_ns` is a lower
    /// bound.
    pub is_wait: bool,
    /// Explains a command: if a thread of the command woke the thread, the walk continues with the waker and does not
    /// return. Otherwise the walk returns to each waiting thread at its switch-out.
    pub is_command: bool,
}

/// A result of a walk, reported newest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A part of the time. Each segment ends where the one reported before it begins.
    Segment(Segment),
    /// A wakeup edge to the waker. The segments that follow belong to the wait until its beginning is reported.
    WakeupEdge(WakeupEdge),
    /// The name of a thread that may be mentioned without a segment of its own.
    Called {
        /// TID as shown.
        tid: u32,
        /// Name of the thread.
        name: Name,
    },
    /// The beginning of a wait: its switch-out.
    Asleep {
        /// [`WakeupEdge::number`] of the wait.
        hop: u32,
        /// The thread's name at the switch-out.
        name: Name,
        /// Wait of the thread.
        blocked: Blocked,
        /// Time of the switch-out (CLOCK_MONOTONIC).
        at_ns: u64,
    },
    /// The thread did not wait: it lost its CPU there, and has been runnable since.
    Preempted {
        /// [`WakeupEdge::number`] of the supposed wait.
        hop: u32,
    },
    /// A nested wait started before the wait around it: its start may be found later.
    Unmet {
        /// [`WakeupEdge::number`] of the nested wait.
        hop: u32,
    },
    /// A wait is followed no further, because there are too many; the rest of it is unattributed.
    NotFollowed,
}

/// A part of a path and the actor it is attributed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Start (CLOCK_MONOTONIC).
    pub from_ns: u64,
    /// End (CLOCK_MONOTONIC).
    pub to_ns: u64,
    /// Kind of delay or work.
    pub kind: CauseKind,
    /// Actor that the time is attributed to.
    pub who: Actor,
    /// The runnable thread, if the segment is a wait for a CPU.
    pub ready: Option<u32>,
    /// [`WakeupEdge::number`] of the innermost wait that the segment belongs to.
    pub hop: Option<u32>,
}

/// A wait on the path, with the wakeup edge that ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeupEdge {
    /// Number of the wait on this path, counted from the end of the path.
    pub number: u32,
    /// Number of the enclosing wait.
    pub within: Option<u32>,
    /// TID of the waiter.
    pub tid: u32,
    /// Time of the wakeup (CLOCK_MONOTONIC).
    pub woken_ns: u64,
    /// Waker; `None` if the wakeup was not recorded.
    pub by: Option<Waker>,
    /// Why the thread was stopped until the wakeup, if it was.
    pub stop: Option<Stop>,
}

/// The actor that a segment is attributed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Actor {
    /// A thread.
    Thread {
        /// TID as shown.
        tid: u32,
        /// Name of the thread.
        name: Name,
        /// Cgroup ID, as in [`history::RunSlice::cgroup`].
        cgroup: Option<u64>,
        /// The thread belongs to the command that is explained.
        is_member: bool,
    },
    /// All threads of one name, where they are too many to be listed one by one.
    Program {
        /// Name of the threads.
        name: Name,
        /// The threads belong to the command that is explained.
        is_member: bool,
    },
    /// A work item, by the ID of its function as in [`history::Holder::Work`].
    Work(u64),
    /// An interrupt or softirq.
    Interrupt(Name),
    /// An idle CPU.
    Cpu(u32),
    /// A block I/O request.
    Disk(Request),
    /// A limit on a thread, by its ID in [`Limits`].
    Limit(u32),
    /// CPU quota of the cgroup, or of an ancestor of it; the ID is as in [`history::RunSlice::cgroup`].
    Quota(Option<u64>),
    /// A timer, named by the system call that the thread waited in.
    Timer(TimerKind),
    /// Fixed text.
    Text(&'static str),
}

/// What threads did, beside the timeline of the CPUs.
#[derive(Clone, Debug, Default)]
pub struct ThreadRecords {
    /// When threads reclaimed memory.
    pub reclaim: ReclaimRecords,
    /// What they did while they ran.
    pub samples: CpuSamples,
}

/// Source of the times in which threads were not allowed to run.
pub trait Limits {
    /// Returns the time until which a thread that was switched in at `running_ns` was not allowed to run, and the ID of
    /// the limit, which [`Names`] resolves.
    fn next_allowed(&self, tid: u32, running_ns: u64) -> Option<(u64, u32)>;
}

/// No limits.
impl Limits for () {
    fn next_allowed(&self, _tid: u32, _running_ns: u64) -> Option<(u64, u32)> {
        None
    }
}

#[cfg(test)]
mod tests;
