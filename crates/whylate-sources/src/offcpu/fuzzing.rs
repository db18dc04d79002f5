// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzz targets: files of any user's processes that whylate reads, and what the BPF programs report of threads.

use std::collections::HashMap;
use std::fs::File;

use whylate_model::wait::Classes;

use super::elf::Elf;
use super::mappings::MapsLine;
use super::perf_map;
use super::places::{PlaceDelta, Sum, Woken, can_be_woken, frames_of, woken};
use super::proc;
use super::skel::types::{place_key, process_value, stack_value};
use super::stack::{plain, stack_of, user_frames};
use crate::kernel::attach::{read_plain, text};
use crate::kernel::mounts::Mounts;

/// Number of offsets per segment at which the unwind rule is looked up.
const OFFSETS_PER_SEGMENT: u64 = 16;

/// Reads headers, symbols and unwind rules of an ELF file.
pub fn elf_in(file: File) {
    let Ok(Some(elf)) = Elf::from_file(&file, true) else { return };
    elf.names();
    for (at, length) in elf.parts() {
        for index in 0..OFFSETS_PER_SEGMENT {
            let offset = at.saturating_add(length / OFFSETS_PER_SEGMENT * index);
            elf.rule_at(offset);
            elf.address_of(offset);
        }
    }
}

/// Lines of /proc/PID/maps about executable mappings.
pub fn maps(text: &str) {
    text.lines().for_each(|line| {
        MapsLine::parse(line);
    });
}

/// Reads a perf map (/tmp/perf-PID.map), as just-in-time compilers write it.
///
/// # Panics
/// Panics if an address does not have the name of the last line that covers it.
pub fn perf_map(bytes: &[u8]) {
    perf_map::check(bytes);
}

/// /proc/PID/stat of a thread with an arbitrary comm.
pub fn stat(text: &str) {
    proc::parse_stat(text);
}

/// Reads the number of threads in /proc/loadavg.
pub(crate) fn load(text: &str) {
    super::choice::threads_of(text);
}

/// Looks up the file system of a mount ID, and of a device; the first line has the ID, the others are mountinfo.
pub fn mountinfo(text: &str) {
    let (first_line, mounts) = text.split_once('\n').unwrap_or_default();
    let (number, mounts) = (first_line.parse().unwrap_or(0), Mounts::from_text(mounts));
    mounts.is_local_mount(number, || Mounts::from_text(text));
    mounts.is_local_device((0, number as u32), || Mounts::from_text(text));
}

/// Reads a stack entry with its frames and process, and names of kernel functions.
pub fn places(bytes: &[u8]) {
    let Some(key) = read_plain::<place_key>(bytes) else { return };
    let rest = &bytes[size_of::<place_key>()..];
    let process = read_plain::<process_value>(rest).map(|process| (process.tgid, text(&process.comm)));
    let rest = rest.get(size_of::<process_value>()..).unwrap_or_default();
    let (addresses, rest) = match read_plain::<stack_value>(rest) {
        Some(stack) => (frames_of(&stack).to_vec(), &rest[size_of::<stack_value>()..]),
        None => (Vec::new(), rest),
    };
    let names = rest.split(|&byte| byte == 0).map(|name| plain(&String::from_utf8_lossy(name)).to_owned());
    let both = [names.collect(), user_frames(&key, &addresses, &HashMap::new())];
    let by = can_be_woken(&key).then(|| woken(key.kernel_stack, &HashMap::from([(key.user_stack, key)])));
    let is_woken = by.is_some_and(|by| matches!(by, Woken::Thread(_)));
    let sum = Sum { ns: u64::from(key.process), samples: 1, waits: u64::from(is_woken) };
    let place = PlaceDelta { number: 0, key, woken: by, sum };
    // Built once: its rules are parsed from a long text.
    thread_local!(static CLASSES: Classes = Classes::default());
    CLASSES.with(|classes| stack_of(&place, both, process.as_ref(), None, classes));
}
