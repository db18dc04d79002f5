// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PID namespace of this process, in which threads are selected and reported.
//!
//! Programs identify threads by their PIDs in the initial namespace. In another one, requested PIDs are translated
//! here, before programs are loaded, and reported ones in `bpf/pid_namespace.bpf.h`. Threads outside of the namespace
//! have no PID there; they are reported as culprits, but not as victims.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::LazyLock;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use crate::kernel::attach;
use crate::kernel::error::AttachError;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/pid_namespace/number.skel.rs"));
}

/// PROC_PID_INIT_INO (include/linux/proc_ns.h)
const INITIAL_INODE: u32 = 0xeffffffc;
/// A PID that no process has.
const NO_PID: u32 = u32::MAX >> 1;

/// Returns the inode of the PID namespace; `None` if it is the initial one, or unknown. A process never leaves its own.
pub fn own() -> Option<u32> {
    static OWN: LazyLock<Option<u32>> = LazyLock::new(|| {
        let inode = fs::metadata("/proc/self/ns/pid").ok()?.ino() as u32;
        (inode != INITIAL_INODE).then_some(inode)
    });
    *OWN
}

/// Returns the namespace as BPF programs expect it; 0 for the initial one.
pub(crate) fn as_setting() -> u32 {
    own().unwrap_or(0)
}

/// Translates a PID of this namespace to the initial one; [`NO_PID`] if there is no such process.
///
/// # Errors
/// Fails if the kernel does not let programs iterate over processes.
pub(crate) fn kernels_number(pid: u32) -> Result<u32, AttachError> {
    if own().is_none() {
        return Ok(pid);
    }
    let skeleton = skel::NumberSkelBuilder::default().open(attach::open_object())?.load()?;
    let output = attach::iterate_over_process(skeleton.progs.on_each_thread_tell.as_fd(), pid);
    let output = match output {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Vec::new(),
        output => output.context("cannot translate numbers of processes")?,
    };
    Ok(output.first_chunk().map_or(NO_PID, |number| u32::from_ne_bytes(*number)))
}

/// Returns this process's PID in the initial namespace.
///
/// # Errors
/// See [`kernels_number`].
pub(crate) fn kernels_own_number() -> Result<u32, AttachError> {
    kernels_number(std::process::id())
}

/// Returns this process's PID in /proc, which may be mounted for another namespace; `None` if it is not mounted, or for
/// a namespace that this process is not in.
pub(crate) fn own_number_in_proc() -> Option<u32> {
    fs::read_link("/proc/self").ok()?.to_str()?.parse().ok()
}

/// Tests whether /proc has the PIDs of this namespace.
pub(crate) fn has_proc() -> bool {
    own_number_in_proc() == Some(std::process::id())
}

/// Returns why /proc cannot be used with PIDs of this namespace, if so.
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

/// Returns a note on the namespace of reported PIDs, unless they are the initial one's.
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
            "in a PID namespace: thread numbers are those of this namespace, and threads outside it are NAME:outside; /proc \
             belongs to another one: user frames have no names and its PIDs differ (remount it: unshare --mount-proc)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinguishes_other_proc_from_none() {
        assert_eq!(lacks_of(Some(5), 5), None);
        assert!(lacks_of(Some(500), 5).is_some_and(|why| why.contains("belongs to another PID namespace")));
        assert!(lacks_of(None, 5).is_some_and(|why| why.contains("not mounted")));
    }

    #[test]
    fn initial_namespace_needs_no_translation() {
        if own().is_none() {
            assert_eq!(kernels_number(1).ok(), Some(1));
            assert!(notice().is_none() || !has_proc());
        }
    }
}
