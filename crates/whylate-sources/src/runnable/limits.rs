// SPDX-License-Identifier: MIT OR Apache-2.0
//! What kept a thread that could run from every CPU: quotas, budgets and schedulers, by name.

use std::fs;

use whylate_model::blame::Throttled;

use super::skel::types::{limits, throttled_by};
use crate::cgroups::Cgroups;

/// Which scheduler is a BPF program now.
const SCHED_EXT: &str = "/sys/kernel/sched_ext/root/ops";

/// Until when the thread of this name was kept off, and by whom. It had a CPU at `running_ns` (CLOCK_MONOTONIC).
pub(super) fn throttled(of: &limits, running_ns: u64, subject: &str, cgroups: &mut Cgroups) -> Option<Throttled> {
    let told = |until_ns, by| Some(Throttled { until_ns, by });
    if of.deadline_ns != 0 {
        return told(of.deadline_ns, format!("deadline of {subject}"));
    }
    if of.throttled_by == throttled_by::THROTTLED_BY_REAL_TIME.0 {
        // It goes before all others as soon as it may.
        return told(running_ns, format!("real-time limit of {}", cgroup(of.own_cgroup, cgroups)));
    }
    if of.until_ns != 0 { told(of.until_ns, cgroup(of.quota_cgroup, cgroups)) } else { None }
}

/// What keeps it from a CPU that is idle.
pub(super) fn kept_from_idle(of: &limits, cgroups: &mut Cgroups) -> Option<String> {
    if of.quota_cgroup != 0 {
        return Some(cgroup(of.quota_cgroup, cgroups));
    }
    if of.has_sched_ext != 0 {
        let name = fs::read_to_string(SCHED_EXT).unwrap_or_default();
        return Some(format!("sched_ext scheduler {}", name.trim()).trim_end().to_owned());
    }
    (of.has_core_scheduling != 0).then(|| "core scheduling".to_owned())
}

/// A cgroup as causes name it.
fn cgroup(id: u64, cgroups: &mut Cgroups) -> String {
    cgroups.path(id).map_or_else(|| format!("cgroup {id}"), |path| format!("cgroup {path}"))
}
