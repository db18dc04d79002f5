// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread that keeps its CPU busy, with a real-time or a normal policy.

use std::io;

use anyhow::anyhow;
use rustix::time::{ClockId, clock_gettime};

use super::maker::{Made, Maker, Policy, Stop};
use super::threads;
use crate::AttachError;
use crate::kernel::clock::monotonic_ns;
use crate::kernel::priority::{become_fifo, become_normal, remedy};

pub(super) struct Hog {
    length_ns: u64,
}

impl Hog {
    /// Sets the policy of the calling thread.
    pub(super) fn new(policy: Policy, length_ns: u64) -> Result<Self, AttachError> {
        let outcome = match policy {
            Policy::Fifo(priority) => become_fifo(priority),
            // A thread inherits its creator's policy.
            Policy::Normal => become_normal(),
        };
        outcome.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => AttachError::Unsupported(format!(
                "not permitted to run with that policy ({}, or choose --policy normal)",
                remedy()
            )),
            _ => anyhow!(error).context("cannot set the policy of a thread").into(),
        })?;
        Ok(Self { length_ns })
    }
}

impl Maker for Hog {
    fn make(&mut self, stop: Stop<'_>) -> Result<Made, AttachError> {
        let ran_before_ns = ran_ns();
        let start_ns = monotonic_ns();
        let until_ns = start_ns + self.length_ns;
        let mut end_ns = start_ns;
        while end_ns < until_ns && !stop.is_set() {
            end_ns = monotonic_ns();
        }
        let ran_ns = ran_ns() - ran_before_ns;
        // Reading the thread's clock is not part of the disturbance.
        let on_cpu_ns = Some(ran_ns.min(end_ns - start_ns));
        Ok(Made { start_ns, end_ns, cpu: threads::current_cpu()?, on_cpu_ns })
    }
}

/// Returns the CPU time of the calling thread, in nanoseconds.
fn ran_ns() -> u64 {
    let ran = clock_gettime(ClockId::ThreadCPUTime);
    // It begins at 0, and nanoseconds are below a second.
    ran.tv_sec as u64 * 1_000_000_000 + ran.tv_nsec as u64
}
