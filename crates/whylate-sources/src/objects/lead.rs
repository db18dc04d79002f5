// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leads to the peers of objects.

/// Access to a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub reads: bool,
    pub writes: bool,
}

impl Access {
    /// Returns whether both allow something in common.
    pub(super) fn overlaps(self, other: Access) -> bool {
        self.reads && other.reads || self.writes && other.writes
    }
}

/// Where the peers of an object are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    /// Processes with this pipe open for `access`.
    Pipe { link: String, access: Access },
    /// Processes with this FIFO open for `access`.
    Fifo { link: String, inode: u64, access: Access },
    /// The other end of this socket.
    Socket { inode: u64 },
    /// The listener with this name, to which this Unix socket is being connected.
    Listener { inode: u64, name: String },
    /// Processes that have this socket open, the other end.
    PeerSocket { inode: u64 },
    /// The daemon of the FUSE file system with this minor device number.
    Fuse { minor: u32 },
    /// Holder of the lock for which the waiter's process waits, on the file with this path.
    LockHolder { path: String },
    /// These processes.
    Processes(Vec<u32>),
    /// This thread of the waiter's process.
    Thread(u32),
}
