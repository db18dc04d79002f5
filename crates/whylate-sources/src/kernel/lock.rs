// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detects whether the owner of something that outlives processes is alive: it holds a lock on it.

use std::os::fd::AsFd;

use rustix::fs::{FlockOperation, flock};

/// Locks a file or a directory until it is closed, which the kernel does for a killed process. Returns `false` if
/// another process has locked it, from any namespace. Directories of tracefs can be locked too.
pub(crate) fn lock(file: impl AsFd) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}
