// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kinds of system calls, by what a thread waits for in them. The kind decides whether a wait can hold a program up.

use crate::WaitClass;
use crate::wait::{CallWaits, of_syscall};

/// Kind of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// Waits for a lock of a file.
    FileLock,
    /// A futex: a lock, or a condition that another thread signals.
    Futex,
    /// Reads data, which may be an answer or work.
    Reads,
    /// Writes data, or connects: waits only for a busy peer.
    Writes,
    /// Waits until a disk has data.
    Syncs,
    /// Waits for a child, or is stopped.
    Child,
    /// Waits for events, connections or a time by design.
    Idle,
    /// Any other call: its waits are within the kernel.
    Other,
}

impl CallKind {
    /// Returns the kind of a system call by its name.
    pub fn from_name(name: &str) -> Self {
        match name {
            "flock" | "fcntl" => return CallKind::FileLock,
            "read" | "readv" | "pread64" | "preadv" | "preadv2" | "recvfrom" | "recvmsg" | "recvmmsg"
            | "recvmmsg_time64" | "tee" => return CallKind::Reads,
            "write" | "writev" | "pwrite64" | "pwritev" | "pwritev2" | "sendto" | "sendmsg" | "sendmmsg"
            | "sendfile" | "connect" | "vmsplice" => return CallKind::Writes,
            "vfork" | "clone" | "clone3" | "wait4" | "waitid" | "ptrace" | "exit" | "exit_group" => {
                return CallKind::Child;
            }
            _ => {}
        }
        match of_syscall(name) {
            Some(CallWaits::For(WaitClass::Lock)) if name.starts_with("futex") => CallKind::Futex,
            Some(CallWaits::For(WaitClass::Disk)) => CallKind::Syncs,
            Some(CallWaits::For(WaitClass::Idle | WaitClass::Timer)) => CallKind::Idle,
            _ => CallKind::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_classified_by_what_they_wait_for() {
        for (name, kind) in [
            ("flock", CallKind::FileLock),
            ("futex_wait", CallKind::Futex),
            ("recvfrom", CallKind::Reads),
            ("sendmsg", CallKind::Writes),
            ("fdatasync", CallKind::Syncs),
            ("wait4", CallKind::Child),
            ("epoll_wait", CallKind::Idle),
            ("clock_nanosleep", CallKind::Idle),
            ("semop", CallKind::Other),
            ("openat", CallKind::Other),
        ] {
            assert_eq!(CallKind::from_name(name), kind, "{name}");
        }
    }
}
