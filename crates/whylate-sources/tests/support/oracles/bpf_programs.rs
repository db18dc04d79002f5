// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists the BPF programs that a process holds, and waits until the kernel has freed them.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Returns the IDs of the programs, and of the programs of links, that the process holds.
pub fn held_by(pid: u32) -> Result<BTreeSet<u32>> {
    let mut ids = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // The descriptor may have been closed since.
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        ids.extend(text.lines().filter_map(|line| line.strip_prefix("prog_id:")?.trim().parse::<u32>().ok()));
    }
    Ok(ids)
}

/// Waits until the kernel has freed these programs, which takes a while. Fails after 30 s.
pub fn ensure_gone(ids: &BTreeSet<u32>) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let left: Vec<String> = libbpf_rs::query::ProgInfoIter::default()
            .filter(|program| ids.contains(&program.id))
            .map(|program| program.name.to_string_lossy().into_owned())
            .collect();
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "these programs stay in the kernel: {left:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
