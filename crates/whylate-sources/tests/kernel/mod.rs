// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel tests share. Not every test program uses all of it.
#![allow(dead_code)]

pub mod blk_tracer;
pub mod chance;
pub mod disk_counts;
pub mod disturb;
pub mod functions;
pub mod late;
pub mod loop_disk;
pub mod mixed;
pub mod null_disk;
pub mod oracle;
pub mod paced;
pub mod ping_pong;
pub mod programs;
pub mod session;
pub mod trace;
pub mod turn;
pub mod urgent;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

/// Whether an emulator runs this kernel. The machine below may then stop a CPU for milliseconds between any two
/// instructions and two records of one event: of what is compared many times, the typical one counts, not the worst.
pub fn is_emulated() -> bool {
    std::env::var_os("WHYLATE_EMULATED").is_some()
}

/// So many, or fewer where everything takes a hundred times as long.
pub fn amount(of: u64) -> u64 {
    if is_emulated() { of / 5 } else { of }
}

/// A new file on a disk; `None`, and a line that says why, where tests have none.
pub fn file_on_disk() -> std::io::Result<Option<File>> {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR"))?;
    if libc::major(file.metadata()?.dev()) == 0 {
        println!("skipped: the build folder is on no disk");
        return Ok(None);
    }
    Ok(Some(file))
}

/// How many late events of one disturbance are compared: fewer where a run has to be short, and where each takes long.
pub fn wanted_events() -> usize {
    if is_emulated() {
        25
    } else if std::env::var_os("WHYLATE_THOROUGH").is_some() {
        200
    } else {
        60
    }
}

/// How often, at most, what the machine below does gets a late event blamed on another than who was to disturb it.
pub const WRONG_BY_CHANCE: f64 = 0.02;

/// Of many differences, the one that has to be small.
pub fn judged(mut differences_ns: Vec<u64>) -> u64 {
    differences_ns.sort_unstable();
    let place = if is_emulated() { differences_ns.len() / 2 } else { differences_ns.len().saturating_sub(1) };
    differences_ns.get(place).copied().unwrap_or(0)
}
