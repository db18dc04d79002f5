// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plain data types that whylate's sources produce and its outputs render.
//!
//! Nothing in this crate touches the kernel, reads a clock or needs a privilege, so that a recording replays through
//! the same code as a live run and every output can be tested from a fixed [`Snapshot`].

pub mod blame;
mod cause;
pub mod cgroup;
pub mod culprits;
pub mod diff;
pub mod folded;
pub mod ftrace;
pub mod histogram;
pub mod holders;
pub mod import;
pub mod irqsoff;
mod labels;
pub mod late;
pub mod merge;
pub mod name;
pub mod object;
pub mod occupancy;
pub mod overview;
pub mod own;
pub mod paste;
pub mod path;
pub mod programs;
pub mod reclaim;
pub mod recording;
#[cfg(test)]
mod schema;
pub mod selftest;
pub mod snapshot;
pub mod sniff;
pub mod sources;
pub mod sqpoll;
pub mod stack;
pub mod steps;
pub mod text;
pub mod thread;
pub mod totals;
pub mod tree;
pub mod units;
pub mod wait;
pub mod work;
pub mod worst;

pub use blame::{TimerAnalysis, TimerEvidence, WorkEvidence};
pub use cause::{Cause, CauseKind};
pub use cgroup::Cgroup;
pub use culprits::Culprits;
pub use histogram::Histogram;
pub use labels::Labels;
pub use late::LateEvent;
pub use merge::Merger;
pub use occupancy::{Interval, Occupancy, Occupant};
pub use snapshot::{Probe, Series, Snapshot};
pub use sources::Card;
pub use stack::{Stack, Waker, WokenBy};
pub use steps::Steps;
pub use thread::ActorName;
pub use wait::{Wait, WaitClass};
pub use worst::TopN;
