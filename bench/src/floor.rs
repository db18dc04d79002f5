// SPDX-License-Identifier: MIT OR Apache-2.0
//! Empty BPF programs, in this process.

use std::mem::MaybeUninit;

use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/floor.skel.rs"));
}

fn attach_with<T>(attach: impl FnOnce(&skel::FloorProgs<'_>) -> libbpf_rs::Result<T>) -> libbpf_rs::Result<T> {
    let mut object = MaybeUninit::uninit();
    let skeleton = skel::FloorSkelBuilder::default().open(&mut object)?.load()?;
    attach(&skeleton.progs)
}

/// Attaches an empty program to each of the two events of a work item, until the links are dropped.
pub fn attach_to_work_items() -> libbpf_rs::Result<Vec<Link>> {
    attach_with(|programs| Ok(vec![programs.on_queue_work.attach()?, programs.on_execute_start.attach()?]))
}

/// Attaches an empty program to context switches, until the link is dropped.
pub fn attach_to_switches() -> libbpf_rs::Result<Vec<Link>> {
    attach_with(|programs| Ok(vec![programs.on_switch.attach()?]))
}

/// Attaches an iterator over all threads that takes each kernel stack and drops it.
pub fn attach_to_threads() -> libbpf_rs::Result<Link> {
    attach_with(|programs| programs.on_each_thread.attach())
}
