// SPDX-License-Identifier: MIT OR Apache-2.0
//! What reading objects may take.

use crate::kernel::clock;

/// Maximum number of descriptors that are looked at, and CPU time for one snapshot, in nanoseconds.
const MAX_DESCRIPTORS: usize = 1 << 16;
const MAX_CPU_NS: u64 = 300_000_000;

/// What is left of it for the calling thread.
pub(super) struct Budget {
    descriptors: usize,
    /// End by the CPU clock of this thread.
    until_ns: u64,
}

impl Budget {
    pub(super) fn new() -> Self {
        Budget { descriptors: MAX_DESCRIPTORS, until_ns: clock::thread_cpu_ns() + MAX_CPU_NS }
    }

    #[cfg(test)]
    pub(super) fn spent() -> Self {
        Budget { descriptors: 0, until_ns: 0 }
    }

    pub(super) fn has_time(&self) -> bool {
        clock::thread_cpu_ns() < self.until_ns
    }

    /// Takes room for one descriptor; returns false if there is none.
    pub(super) fn take_descriptor(&mut self) -> bool {
        let has_room = self.descriptors > 0 && self.has_time();
        self.descriptors = self.descriptors.saturating_sub(1);
        has_room
    }
}
