// SPDX-License-Identifier: MIT OR Apache-2.0
//! Credentials of the programs that whylate executes: they get none of its privileges.

#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{Gid, Signal, Uid, getegid, geteuid, getgid, getuid, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

/// `PROC_USER_INIT_INO`: the inode of the initial user namespace, the same on every kernel.
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// User and groups of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The user ID.
    pub uid: u32,
    /// The primary group ID.
    pub gid: u32,
    /// The supplementary group IDs, with the primary one.
    pub groups: Vec<u32>,
}

/// Tests whether this process may change its user and groups.
pub fn may_change_user() -> bool {
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
    capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

/// Tests whether this process may raise the priority of its threads (`CAP_SYS_NICE`).
pub(crate) fn may_raise_priority() -> bool {
    let has = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE));
    has && in_initial_user_namespace() != Some(false)
}

/// Tests whether this process is in the initial user namespace: in another one, its capabilities do not apply to the
/// kernel as a whole. `None` if unknown.
pub(crate) fn in_initial_user_namespace() -> Option<bool> {
    fs::read_link("/proc/self/ns/user").ok().map(|target| target.as_os_str() == INITIAL_USER_NAMESPACE)
}

/// Keeps this process's inheritable and ambient capabilities from the programs that it executes. The process itself
/// keeps its own, and a program of root has those that the kernel gives root. Call it before other threads start: each
/// has its own sets.
///
/// # Errors
/// Fails if the kernel refuses it.
pub fn keep_capabilities() -> io::Result<()> {
    let sets = capabilities(None)?;
    // The ambient set is a subset of the inheritable one: it is cleared with it.
    if sets.inheritable.is_empty() {
        return Ok(());
    }
    Ok(set_capabilities(None, CapabilitySets { inheritable: CapabilitySet::empty(), ..sets })?)
}

/// Runs a program as the real user of this process, if a set-user-ID bit has changed the effective one.
pub fn run_as_real_user(command: &mut Command) {
    if (getuid(), getgid()) != (geteuid(), getegid()) {
        run_as(command, getuid(), getgid(), None);
    }
}

/// Has a program get SIGTERM when the thread that starts it ends, however that happens.
pub fn end_with_this_thread(command: &mut Command) {
    let ask = || -> io::Result<()> { Ok(set_parent_process_death_signal(Some(Signal::TERM))?) };
    // SAFETY: `ask` makes one system call, and neither allocates nor takes locks.
    unsafe { command.pre_exec(ask) };
}

/// Runs a program as another user.
pub fn run_as_user(command: &mut Command, user: &Credentials) {
    let groups = user.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
    run_as(command, Uid::from_raw(user.uid), Gid::from_raw(user.gid), Some(groups));
}

fn run_as(command: &mut Command, uid: Uid, gid: Gid, groups: Option<Vec<Gid>>) {
    let change = move || -> io::Result<()> {
        // The user last: afterwards the groups cannot be changed.
        if let Some(groups) = &groups {
            set_thread_groups(groups)?;
        }
        set_thread_res_gid(gid, gid, gid)?;
        Ok(set_thread_res_uid(uid, uid, uid)?)
    };
    // SAFETY: between fork and exec, the closure makes system calls only. It allocates no memory and takes no lock.
    unsafe { command.pre_exec(change) };
}
