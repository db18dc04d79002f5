// SPDX-License-Identifier: MIT OR Apache-2.0
//! What any user's processes and their files make whylate read.

use std::fs::File;

use super::elf::Elf;
use super::process::{CodeMapped, parse_perf_map};
use super::{far_files, proc};

/// At so many places of each part of a file it is asked how to unwind.
const PLACES: u64 = 16;

/// Headers, names, and how functions are unwound.
pub fn elf_in(file: File) {
    let Ok(Some(elf)) = Elf::of(file) else { return };
    elf.names(true);
    for (at, length) in elf.parts() {
        for place in 0..PLACES {
            let offset = at.saturating_add(length / PLACES * place);
            elf.rule_at(offset);
            elf.address_of(offset);
        }
    }
}

/// What /proc/PID/maps tells of code.
pub fn maps(text: &str) {
    text.lines().for_each(|line| {
        CodeMapped::parse(line);
    });
}

/// What compilers at run time write into /tmp/perf-PID.map.
pub fn perf_map(text: &str) {
    parse_perf_map(text);
}

/// What /proc/PID/stat tells of a thread that may call itself anything.
pub fn stat(text: &str) {
    proc::parse_stat(text);
}

/// Which file system lies at a path, and on a device; both are in the first line.
pub fn mountinfo(text: &str) {
    let (asked, mounts) = text.split_once('\n').unwrap_or_default();
    far_files::type_of(mounts, asked);
    far_files::type_at(mounts, asked);
}
