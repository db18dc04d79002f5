// SPDX-License-Identifier: MIT OR Apache-2.0
//! The interface of what makes disturbances on the CPU of its thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use libbpf_rs::MapHandle;

use crate::AttachError;
use crate::kernel::clock::monotonic_ns;

/// Scheduling policy of a hog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// `SCHED_FIFO` of this priority: only higher priorities preempt it.
    Fifo(u8),
    /// `SCHED_OTHER`: it shares the CPU with other normal threads.
    Normal,
}

/// A stop request by the caller, or because the caller's thread has failed.
#[derive(Clone, Copy)]
pub(super) struct Stop<'a> {
    pub(super) asked: &'a AtomicBool,
    pub(super) failed: &'a AtomicBool,
}

impl Stop<'_> {
    pub(super) fn is_set(self) -> bool {
        self.asked.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }

    /// Sleeps until `due_ns` on `CLOCK_MONOTONIC`. Returns false if stopped before.
    pub(super) fn sleep_until(self, due_ns: u64) -> bool {
        while !self.is_set() {
            match due_ns.checked_sub(monotonic_ns()) {
                None | Some(0) => return true,
                // The caller's thread unparks this one when it sees a stop request.
                Some(left_ns) => thread::park_timeout(Duration::from_nanos(left_ns)),
            }
        }
        false
    }
}

/// Times of one disturbance on `CLOCK_MONOTONIC`.
#[derive(Clone, Copy)]
pub(super) struct Made {
    /// Start; 0 if the disturbance was stopped before it started, or ran on the wrong CPU.
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    pub(super) cpu: u32,
    pub(super) on_cpu_ns: Option<u64>,
}

/// Makes disturbances of one kind on the CPU of its thread.
pub(super) trait Maker {
    /// Makes a disturbance, `lead_ns` from now.
    fn make(&mut self, stop: Stop<'_>) -> Result<Made, AttachError>;

    /// Returns the time, in nanoseconds, by which `make` has to be called before the due time.
    fn lead_ns(&self) -> u64 {
        0
    }

    /// Returns the map in which another thread stores a 1 to cut the current disturbance short.
    fn cut(&self) -> Result<Option<MapHandle>, AttachError> {
        Ok(None)
    }
}
