// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether the owner of something that outlives processes still lives: it holds a lock on it.

use std::os::fd::AsFd;

use rustix::fs::{FlockOperation, flock};

/// Locks a file or a folder until it is closed, which the kernel does for a process that is killed; `false` where
/// somebody else has it locked, from whatever namespace. Folders of tracefs can be locked too.
pub(crate) fn lock(file: impl AsFd) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}
