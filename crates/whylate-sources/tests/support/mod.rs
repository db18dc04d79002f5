// SPDX-License-Identifier: MIT OR Apache-2.0
//! Support shared by the kernel tests. Not every test program uses all of it.
#![allow(dead_code)]

pub mod fixtures;
pub mod machine;
pub mod oracles;
pub mod workloads;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

pub use oracles::chance::is_emulated;

/// Returns `of`, or a fifth of it on an emulator, where everything takes a hundred times as long.
pub fn amount(of: u64) -> u64 {
    if is_emulated() { of / 5 } else { of }
}

/// Creates a file on a disk. Returns `None`, and prints why, if the build directory is on none.
pub fn file_on_disk() -> std::io::Result<Option<File>> {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR"))?;
    if libc::major(file.metadata()?.dev()) == 0 {
        println!("skipped: the build folder is on no disk");
        return Ok(None);
    }
    Ok(Some(file))
}

/// Number of late events to compare per disturbance: fewer on an emulator and in a short run.
pub fn wanted_events() -> usize {
    if is_emulated() {
        25
    } else if std::env::var_os("WHYLATE_THOROUGH").is_some() {
        200
    } else {
        60
    }
}

/// Maximum share of late events that the host's own disturbances get attributed to another cause than the injected one.
pub const WRONG_BY_CHANCE: f64 = 0.02;

/// Returns the difference that has to be small: the largest, or the median on an emulator.
pub fn largest_or_median(mut differences_ns: Vec<u64>) -> u64 {
    differences_ns.sort_unstable();
    let index = if is_emulated() { differences_ns.len() / 2 } else { differences_ns.len().saturating_sub(1) };
    differences_ns.get(index).copied().unwrap_or(0)
}
