// SPDX-License-Identifier: MIT OR Apache-2.0
//! What this kernel has and what this process may do, by other means than the code under test: a test is skipped only
//! if these agree that something is missing.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use whylate_sources::kernel::tracefs;

/// The tracepoints of every kernel that whylate measures.
const WORKQUEUE_EVENTS: [&str; 4] =
    ["workqueue_queue_work", "workqueue_activate_work", "workqueue_execute_start", "workqueue_execute_end"];
/// Bits of `CAP_SYS_ADMIN`, and of `CAP_PERFMON` and `CAP_BPF`, which together replace it.
const SYS_ADMIN: u64 = 1 << 21;
const PERFMON_AND_BPF: u64 = 1 << 38 | 1 << 39;

/// Returns whether work items can be measured.
pub fn can_measure_work() -> bool {
    let events = tracefs::find().map(|tracefs| tracefs.join("events/workqueue"));
    let has_event = |name: &str| events.as_ref().is_ok_and(|events| events.join(name).join("id").is_file());
    may_load_programs()
        && Path::new("/sys/kernel/btf/vmlinux").is_file()
        && WORKQUEUE_EVENTS.iter().all(|name| has_event(name))
}

/// Returns whether BPF programs may be loaded, and the kernel has all of these functions.
#[allow(dead_code)]
pub fn can_call(functions: &[&str]) -> bool {
    // Read once, as it takes an emulated CPU seconds.
    static SYMBOLS: OnceLock<String> = OnceLock::new();
    let symbols = SYMBOLS.get_or_init(|| fs::read_to_string("/proc/kallsyms").unwrap_or_default());
    let has = |name: &str| symbols.lines().any(|line| line.split_whitespace().nth(2) == Some(name));
    may_load_programs() && functions.iter().all(|name| has(name))
}

fn may_load_programs() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    effective & SYS_ADMIN != 0 || effective & PERFMON_AND_BPF == PERFMON_AND_BPF
}
