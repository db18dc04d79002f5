// SPDX-License-Identifier: MIT OR Apache-2.0
//! Entry points of `make fuzz`: parsers of data that the kernel, other programs and our BPF programs have written.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, memfd_create};

pub use crate::irqsoff::fuzzing::{kept_cpus, late_ticks, sections};
pub use crate::kernel::cgroups::fuzzing::cgroups;
pub use crate::kernel::symbols::fuzzing::kallsyms;
use crate::kernel::tracefs::ring_page::Page;
use crate::kernel::{clock, cpus};
pub use crate::objects::fuzzing::{unix_sockets, waits_in_proc};
pub use crate::offcpu::fuzzing::{elf_in, maps, mountinfo, perf_map, places, stat};
pub use crate::runnable::fuzzing::waits;
pub use crate::sqpoll::fuzzing::{fdinfo, looks};
pub use crate::timerlat::fuzzing::{activations, timerlat_samples};
pub use crate::wq::fuzzing::work_items;

/// Parses a program or library: its headers, its symbols, and the unwinding of some functions.
///
/// # Panics
/// Panics if there is no memory for a file.
pub fn elf(bytes: &[u8]) {
    let file = File::from(memfd_create("fuzzed", MemfdFlags::CLOEXEC).expect("there is memory"));
    file.write_all_at(bytes, 0).expect("there is memory");
    elf_in(file);
}

/// Demangles a symbol.
///
/// # Panics
/// Panics if the name is longer than the limit.
pub fn demangle(symbol: &str) {
    for begins in ["", "_Z", "_R", "_ZN"] {
        let name = crate::kernel::demangle::demangled(&format!("{begins}{symbol}")).into_owned();
        assert!(name.len() <= whylate_model::name::MAX_BYTES);
    }
}

/// Parses a page of the kernel's ring buffer.
pub fn ring_page(bytes: &[u8]) {
    Page::new(bytes).into_iter().for_each(|page| page.for_each(drop));
}

/// Parses small files of /proc and /sys, of a few lines each.
///
/// # Panics
/// Panics if a list of CPUs does not survive a round trip.
pub fn small_files(text: &str) {
    if let Some(cpus) = cpus::numbers(text) {
        let ascending: Vec<u32> = BTreeSet::from_iter(cpus).into_iter().collect();
        assert_eq!(cpus::numbers(&cpus::list(&ascending)).as_ref(), Some(&ascending));
    }
    clock::offset_ns(text, "monotonic");
    crate::kernel::loaded_code::fuzzing::modules(text);
    crate::offcpu::fuzzing::load(text);
}
