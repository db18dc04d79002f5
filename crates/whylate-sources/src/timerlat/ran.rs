// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program that timestamps when a measured thread runs again, if the kernel permits fexit programs.

use std::os::fd::{AsFd as _, BorrowedFd};

use libbpf_rs::Link;
use libbpf_rs::skel::SkelBuilder as _;

use crate::kernel::attach;
use crate::source::AttachError;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/timerlat/ran.skel.rs"));
}

/// The attached program, detached on drop.
pub(super) struct Ran {
    _link: Link,
    skeleton: skel::RanSkel<'static>,
}

impl Ran {
    /// Attaches the program, with the shared activations of all CPUs.
    pub(super) fn attach(activations: BorrowedFd<'_>, cpus: u32) -> Result<Self, AttachError> {
        let mut open = skel::RanSkelBuilder::default().open(attach::open_object())?;
        open.maps.activation_by_cpu.set_max_entries(cpus)?;
        open.maps.activation_by_cpu.reuse_fd(activations)?;
        let skeleton = attach::load(open)?;
        let link = skeleton.progs.on_hrtimer_nanosleep_exit.attach()?;
        Ok(Ran { _link: link, skeleton })
    }

    pub(super) fn program(&self) -> BorrowedFd<'_> {
        self.skeleton.progs.on_hrtimer_nanosleep_exit.as_fd()
    }
}
