// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reserves free memory of the size of work items.
//!
//! A BPF program that allocates a work item cannot wait, so the kernel allocates from slabs that are in use already,
//! and takes a new page only if that needs no lock. Some kernels take no page at all (those that still count their
//! memory as not fully initialized), so allocation fails after some hundred items. Extended attributes of a file in
//! memory come from the same slabs: setting many and removing most leaves slabs in use with free objects.

use std::io;
use std::os::fd::OwnedFd;

use libbpf_rs::Btf;
use libbpf_rs::btf::HasSize;
use libbpf_rs::btf::types::Struct;
use rustix::fs::{MemfdFlags, XattrFlags, fremovexattr, fsetxattr, memfd_create};

/// Keeps one attribute of this many. Slabs of this object size hold at least twice as many objects, so each stays in
/// use.
const KEEP_ONE_OF: u64 = 8;

/// Keeps the slabs in use while it lives.
pub(super) struct Reserve(#[allow(dead_code, reason = "the file holds the attributes")] OwnedFd);

impl Reserve {
    /// Makes room for this many items on the current CPU's node.
    pub(super) fn new(types: &Btf<'_>, items: u64) -> io::Result<Self> {
        let size = |name| types.type_by_name::<Struct<'_>>(name).map(|found| found.size());
        let (Some(item), Some(attribute)) = (size("bpf_work"), size("simple_xattr")) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let value = vec![0; item.saturating_sub(attribute)];
        let file = memfd_create("whylate-reserve", MemfdFlags::CLOEXEC)?;
        let name = |number| format!("user.{number}");
        let attributes = items + items.div_ceil(KEEP_ONE_OF - 1);
        for number in 0..attributes {
            fsetxattr(&file, name(number), &value, XattrFlags::empty())?;
        }
        for number in (0..attributes).filter(|number| number % KEEP_ONE_OF != 0) {
            fremovexattr(&file, name(number))?;
        }
        Ok(Self(file))
    }
}
