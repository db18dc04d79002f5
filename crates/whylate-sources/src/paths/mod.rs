// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths through the scheduling timeline: its recorder while a command runs, and names for its IDs.

mod asleep;
mod contended;
mod held_up;
mod lasting;
mod lock_waits;
mod names;
mod object_reader;
mod program;
mod ran;
mod read_objects;
mod reclaim;
mod recorder;
mod stopped;

pub use crate::objects::SwitchCounts;
pub(crate) use contended::{ContendedLocks, LoadingLocks, without_locks};
pub(crate) use held_up::{HeldUpWaits, LockedWaits};
pub(crate) use lock_waits::LockWaits;
pub use names::PathNames;
pub(crate) use names::device_name;
pub use program::{Member, Program, is_same_name, is_within, priority};
pub use recorder::{Recorded, Recorder};
pub(crate) use stopped::tracer_of;
pub use stopped::{Stopped, StoppedThreads};
