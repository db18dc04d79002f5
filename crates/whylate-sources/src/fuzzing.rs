// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `make fuzz` hands bytes to: parsers of what the kernel, other programs and our own in it have written.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, memfd_create};

pub use crate::irqsoff::fuzzing::{kept_cpus, late_ticks, sections};
use crate::occupancy::Windows;
pub use crate::offcpu::fuzzing::{elf_in, maps, mountinfo, perf_map, places, stat};
pub use crate::runnable::fuzzing::waits;
pub use crate::sqpoll::fuzzing::{fdinfo, looks};
use crate::symbols::KernelSymbols;
pub use crate::timerlat::fuzzing::activations;
use crate::tracefs::ring_page::Page;
pub use crate::wq::fuzzing::work_items;

/// With what names things; functions of the kernel are their addresses.
pub(crate) fn with_names<T>(read: impl FnOnce(&mut Windows, &mut KernelSymbols) -> Option<T>) {
    thread_local! {
        // Reading the hierarchy of cgroups for each input would take all the time.
        static NAMES: (RefCell<Windows>, KernelSymbols) = (RefCell::default(), KernelSymbols::untold());
    }
    NAMES.with(|(windows, symbols)| drop(read(&mut windows.borrow_mut(), &mut symbols.shared())));
}

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
