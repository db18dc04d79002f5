// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths: a wait followed back along who ended it, until every nanosecond of it is somebody's.
//!
//! A [`Past`] hands out what is known of all CPUs, from its end backwards: who had each, how it came by it, and how it left.
//! [`walk()`] goes back through it. It follows one thread at a time: while that has a CPU, the time is its own; while it
//! could run, the time belongs to whoever had its CPU; and where it was woken, a *hop* leads to whoever woke it, until the
//! walk comes to where the one that waited fell asleep. [`Found`] puts the findings of one wait together, in order of time
//! and in words, as a [`Path`], whose segments add up to the wait. [`command`] does so for a whole command, whose threads
//! [`members`] knows.
//!
//! Pasts are built of [`events`], kept in little memory ([`packed`]), or read from traces of others ([`import`]).

pub mod budget;
pub mod command;
mod cursor;
mod cursors;
pub mod events;
mod found;
mod held_up;
pub mod history;
mod holding;
pub mod import;
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

pub(crate) use cursor::DEEPEST;
pub use found::{Found, Names, OTHERS, Path, PathSegment};
pub use history::Past;
pub use walk::walk;
pub use within::within;

use history::{Blocked, Name, Request, Waker};
use timer::TimerKind;

use crate::CauseKind;
use crate::wait::Stop;

/// What is to be explained: what a thread did, or waited for, in a span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The thread, by its number as it is shown.
    pub tid: u32,
    /// From when on.
    pub from_ns: u64,
    /// Up to when. The thread has a CPU then, or has just got one.
    pub to_ns: u64,
    /// It is the thread's last wait, and ends where it fell asleep, which need not be known; `from_ns` is a bound.
    pub is_wait: bool,
    /// It is a command's: where a thread of the command woke it, the walk goes on with that one and does not come back.
    /// Otherwise it comes back to each thread where that fell asleep.
    pub is_command: bool,
}

/// What a walk finds, the latest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A part of the time. Each one ends where the one before it begins.
    Segment(Segment),
    /// A wait is followed to who ended it. Segments that follow are within it, until it is told where it began.
    Hop(Hop),
    /// The name of a thread that may be told of without a part of its own.
    Called {
        /// Its number, as it is shown.
        tid: u32,
        /// Its name.
        name: Name,
    },
    /// Where a wait began.
    Asleep {
        /// Which one.
        hop: u32,
        /// The thread's name then.
        name: Name,
        /// In what it waits.
        blocked: Blocked,
        /// When.
        at_ns: u64,
    },
    /// A nested wait started before the wait around it: its start may be found later.
    Unmet {
        /// Which one.
        hop: u32,
    },
    /// A wait is not followed any further, because there are too many: the rest of it is nobody's.
    NotFollowed,
}

/// A part of a path, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// When it began.
    pub from_ns: u64,
    /// When it ended.
    pub to_ns: u64,
    /// What happened.
    pub kind: CauseKind,
    /// To or by whom.
    pub who: Party,
    /// The thread that could run meanwhile, where that is what it is about.
    pub ready: Option<u32>,
    /// The innermost wait that it belongs to.
    pub hop: Option<u32>,
}

/// A wait on the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Its number on this path, counted from its end.
    pub number: u32,
    /// The wait that it is a part of.
    pub within: Option<u32>,
    /// Who waited.
    pub tid: u32,
    /// When it was woken.
    pub woken_ns: u64,
    /// By whom; `None` where that was not seen.
    pub by: Option<Waker>,
    /// What had stopped it until then.
    pub stop: Option<Stop>,
}

/// Who or what a segment is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Party {
    /// A thread.
    Thread {
        /// Its number, as it is shown.
        tid: u32,
        /// Its name.
        name: Name,
        /// Its cgroup, as in [`history::Slice::cgroup`].
        cgroup: Option<u64>,
        /// It belongs to the command that is explained.
        is_member: bool,
    },
    /// Threads of one name, where there are too many to tell them apart.
    Program {
        /// Their name.
        name: Name,
        /// They belong to the command that is explained.
        is_member: bool,
    },
    /// A work item, by its function as in [`history::Holder::Work`].
    Work(u64),
    /// An interrupt or softirq.
    Interrupt(Name),
    /// An idle CPU.
    Cpu(u32),
    /// A request of a disk.
    Disk(Request),
    /// What limits a thread, by its number in [`Limits`].
    Limit(u32),
    /// The quota of a thread's cgroup, or of one above it, as in [`history::Slice::cgroup`].
    Quota(Option<u64>),
    /// A timer, which is told by what the thread waited in.
    Timer(TimerKind),
    /// In words.
    Text(&'static str),
}

/// Threads that were not allowed to run.
pub trait Limits {
    /// For a thread that got a CPU then: up to when it was not allowed to have one, and by whom, as a number that
    /// [`Names`] knows.
    fn of(&self, tid: u32, running_ns: u64) -> Option<(u64, u32)>;
}

/// Nobody limits anybody.
impl Limits for () {
    fn of(&self, _tid: u32, _running_ns: u64) -> Option<(u64, u32)> {
        None
    }
}

#[cfg(test)]
mod tests;
