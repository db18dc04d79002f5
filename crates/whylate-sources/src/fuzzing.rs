// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `make fuzz` hands bytes to: parsers of what the kernel and other programs have written.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, memfd_create};

pub use crate::offcpu::fuzzing::{elf_in, maps, mountinfo, perf_map, stat};
pub use crate::sqpoll::fuzzing::fdinfo;
use crate::tracefs::ring_page::Page;

/// A program or library: its headers, its names, and how some of its functions are unwound.
///
/// # Panics
/// When there is no memory for a file.
pub fn elf(bytes: &[u8]) {
    let file = File::from(memfd_create("fuzzed", MemfdFlags::CLOEXEC).expect("there is memory"));
    file.write_all_at(bytes, 0).expect("there is memory");
    elf_in(file);
}

/// A page of the kernel's ring buffer.
pub fn ring_page(bytes: &[u8]) {
    Page::new(bytes).into_iter().for_each(|page| page.for_each(drop));
}
