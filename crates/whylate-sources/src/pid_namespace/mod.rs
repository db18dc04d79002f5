// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PID namespace of this process, by whose numbers threads are asked for and told.
//!
//! Programs tell threads apart by the kernel's numbers, which are those of the first namespace. In another one, what is
//! asked for is translated here, before programs are loaded; what they tell, in `bpf/pid_namespace.bpf.h`. There, threads
//! outside the namespace have no number; they are told as culprits, and are no victims.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::LazyLock;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use crate::attach;
use crate::source::AttachError;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/pid_namespace/number.skel.rs"));
}

/// PROC_PID_INIT_INO (include/linux/proc_ns.h)
const FIRST: u32 = 0xeffffffc;
/// No process has this number.
const NOBODY: u32 = u32::MAX >> 1;

/// The namespace by its inode; `None` where this is the first one, or that cannot be told. A process never leaves its own.
pub fn own() -> Option<u32> {
    static OWN: LazyLock<Option<u32>> = LazyLock::new(|| {
        let inode = fs::metadata("/proc/self/ns/pid").ok()?.ino() as u32;
        (inode != FIRST).then_some(inode)
    });
    *OWN
}

/// The namespace as programs know it.
pub(crate) fn as_setting() -> u32 {
    own().unwrap_or(0)
}

/// The kernel's number of a process that has this one here; a number that nobody has where there is no such process.
///
/// # Errors
/// When the kernel does not let programs look at processes.
pub(crate) fn kernels_number(pid: u32) -> Result<u32, AttachError> {
    if own().is_none() {
        return Ok(pid);
    }
    let skeleton = skel::NumberSkelBuilder::default().open(attach::open_object())?.load()?;
    let told = attach::iterate_over_process(skeleton.progs.on_each_thread_tell.as_fd(), pid);
    let told = match told {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Vec::new(),
        told => told.context("cannot translate numbers of processes")?,
    };
    Ok(told.first_chunk().map_or(NOBODY, |number| u32::from_ne_bytes(*number)))
}

/// That of this process.
///
/// # Errors
/// As above.
pub(crate) fn kernels_own_number() -> Result<u32, AttachError> {
    kernels_number(std::process::id())
}

/// The number of this process in /proc, which may be mounted for another namespace; `None` where it is not mounted, or
/// for a namespace that this process is not in.
pub(crate) fn own_number_in_proc() -> Option<u32> {
    fs::read_link("/proc/self").ok()?.to_str()?.parse().ok()
}

/// Whether a number here is that of the same process in /proc.
pub(crate) fn has_proc() -> bool {
    own_number_in_proc() == Some(std::process::id())
}

/// Why what is read in /proc is of no use with numbers of here, if it is not.
pub(crate) fn lacks_proc() -> Option<&'static str> {
    lacks_of(own_number_in_proc(), std::process::id())
}

fn lacks_of(in_proc: Option<u32>, here: u32) -> Option<&'static str> {
    match in_proc {
        Some(number) if number == here => None,
        Some(_) => Some(
            "/proc belongs to another PID namespace, so its thread numbers are wrong here: remount it, e.g. with unshare --mount-proc",
        ),
        None => Some("/proc is not mounted, or not for this PID namespace: mount it (mount -t proc proc /proc)"),
    }
}

/// Whose numbers are told, where they are not the kernel's, or nothing tells whether they are.
pub fn notice() -> Option<&'static str> {
    match (own(), has_proc()) {
        (None, _) if own_number_in_proc().is_none() => Some(
            "/proc is not mounted, or not for this PID namespace, so thread numbers are the machine's: mount it (mount -t \
             proc proc /proc)",
        ),
        (None, _) => None,
        (Some(_), true) => Some(
            "in a PID namespace: thread numbers are those of this namespace, and threads outside it are NAME:outside",
        ),
        (Some(_), false) => Some(
            "in a PID namespace: thread numbers are those of this namespace, and threads outside it are NAME:outside; /proc is \
             of another one, so user code has no names, and what is read there has its numbers: mount it anew (unshare --mount-proc)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_proc_is_told_from_none() {
        assert_eq!(lacks_of(Some(5), 5), None);
        assert!(lacks_of(Some(500), 5).is_some_and(|why| why.contains("belongs to another PID namespace")));
        assert!(lacks_of(None, 5).is_some_and(|why| why.contains("not mounted")));
    }

    #[test]
    fn numbers_of_the_first_namespace_are_the_kernels() {
        if own().is_none() {
            assert_eq!(kernels_number(1).ok(), Some(1));
            assert!(notice().is_none() || !has_proc());
        }
    }
}
