// SPDX-License-Identifier: MIT OR Apache-2.0
//! Empty programs, in this process.

use std::mem::MaybeUninit;

use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/floor.skel.rs"));
}

/// Attaches the pair of a work item, until the links are dropped: they keep their programs.
pub fn attach() -> libbpf_rs::Result<Vec<Link>> {
    let mut object = MaybeUninit::uninit();
    let skeleton = skel::FloorSkelBuilder::default().open(&mut object)?.load()?;
    Ok(vec![skeleton.progs.on_queue_work.attach()?, skeleton.progs.on_execute_start.attach()?])
}

/// Attaches the one of a context switch, as long.
pub fn attach_to_switches() -> libbpf_rs::Result<Link> {
    let mut object = MaybeUninit::uninit();
    let skeleton = skel::FloorSkelBuilder::default().open(&mut object)?.load()?;
    skeleton.progs.on_switch.attach()
}

/// The iterator over all threads that takes the kernel stack of each and does nothing with it.
pub fn attach_to_threads() -> libbpf_rs::Result<Link> {
    let mut object = MaybeUninit::uninit();
    let skeleton = skel::FloorSkelBuilder::default().open(&mut object)?.load()?;
    skeleton.progs.on_each_thread.attach()
}
