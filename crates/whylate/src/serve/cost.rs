// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the exporter itself costs.

use std::fs;

use rustix::param::page_size;
use whylate_sources::kernel::clock;

use crate::render::metrics::Own;

/// The maps are looked at in one of this many intervals: there are more than a hundred, and they rarely change.
const MAPS_EVERY: u32 = 30;

/// Reads the cost of this process.
#[derive(Debug, Default)]
pub struct Cost {
    reads: u32,
    map_bytes: u64,
}

impl Cost {
    /// Returns the cost so far.
    pub fn now(&mut self) -> Own {
        if self.reads.is_multiple_of(MAPS_EVERY) {
            self.map_bytes = map_bytes();
        }
        self.reads = self.reads.wrapping_add(1);
        Own {
            cpu_seconds: clock::process_cpu_ns() as f64 / 1e9,
            resident_bytes: resident_bytes(),
            map_bytes: self.map_bytes,
            descriptors: fs::read_dir("/proc/self/fd").map_or(0, |all| all.count() as u64),
            ..Own::default()
        }
    }
}

/// Returns the resident memory of this process; 0 if it cannot be read.
fn resident_bytes() -> u64 {
    // proc_pid_statm(5): the second field is the resident size in pages.
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages.saturating_mul(page_size() as u64)
}

/// Returns the kernel memory of the BPF maps that this process has open, by `memlock` in fdinfo. A map of two
/// descriptors counts once.
fn map_bytes() -> u64 {
    let mut maps = std::collections::BTreeMap::new();
    for entry in fs::read_dir("/proc/self/fdinfo").into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.trim().parse::<u64>().ok())
        };
        if let (Some(id), Some(bytes)) = (field("map_id"), field("memlock")) {
            maps.insert(id, bytes);
        }
    }
    maps.values().sum()
}
