// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits that keep a runnable thread from all CPUs: quotas, budgets and schedulers, by name.

use std::fs;

use whylate_model::ActorName;
use whylate_model::blame::Throttled;

use super::skel::types::{limits, throttled_by};
use crate::kernel::cgroups::Cgroups;

/// Name of the current sched_ext scheduler.
const SCHED_EXT: &str = "/sys/kernel/sched_ext/root/ops";

/// Returns when the thread `subject` was throttled, and by what, in time order. It became runnable at the first of the
/// given times (CLOCK_MONOTONIC), and ran at the second.
pub(super) fn throttled(
    of: &limits,
    [runnable_ns, running_ns]: [u64; 2],
    subject: ActorName,
    cgroups: &mut Cgroups,
) -> Vec<Throttled> {
    let from_the_start = |until_ns, by| vec![Throttled { from_ns: runnable_ns, until_ns, by }];
    if of.deadline_ns != 0 {
        return from_the_start(of.deadline_ns, subject.within("deadline of ", ""));
    }
    if of.throttled_by == throttled_by::THROTTLED_BY_REAL_TIME.0 {
        // It runs before all others as soon as it may.
        return from_the_start(running_ns, format!("real-time limit of {}", cgroups.label(of.own_cgroup)).into());
    }
    let mut spans = Vec::new();
    if of.until_ns != 0 {
        spans.extend(from_the_start(of.until_ns, cgroups.label(of.quota_cgroup).into()));
    }
    for span in of.later.iter().filter(|span| span.until_ns != 0) {
        let by = cgroups.label(of.later_cgroup).into();
        spans.push(Throttled { from_ns: span.from_ns, until_ns: span.until_ns, by });
    }
    spans.sort_by_key(|span| span.from_ns);
    spans
}

/// Returns what keeps the thread from an idle CPU.
pub(super) fn kept_from_idle(of: &limits, cgroups: &mut Cgroups) -> Option<String> {
    if of.quota_cgroup != 0 {
        return Some(cgroups.label(of.quota_cgroup));
    }
    if of.has_sched_ext != 0 {
        let name = fs::read_to_string(SCHED_EXT).unwrap_or_default();
        return Some(format!("sched_ext scheduler {}", name.trim()).trim_end().to_owned());
    }
    (of.has_core_scheduling != 0).then(|| "core scheduling".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_limit_on_idle_cpu_with_quota_first() {
        let cgroups = &mut Cgroups::default();
        assert_eq!(kept_from_idle(&limits::default(), cgroups), None);
        let by_core = limits { has_core_scheduling: 1, ..limits::default() };
        assert_eq!(kept_from_idle(&by_core, cgroups).as_deref(), Some("core scheduling"));
        let by_program = limits { has_sched_ext: 1, ..by_core };
        assert!(kept_from_idle(&by_program, cgroups).is_some_and(|by| by.starts_with("sched_ext scheduler")));
        // No cgroup has this ID.
        let by_quota = limits { quota_cgroup: u64::MAX, ..by_program };
        assert!(kept_from_idle(&by_quota, cgroups).is_some_and(|by| by.starts_with("cgroup ")));
    }

    #[test]
    fn throttled_spans_start_at_wakeup_and_are_ordered() {
        let cgroups = &mut Cgroups::default();
        let spans = |of: &limits, cgroups: &mut Cgroups| -> Vec<(u64, u64)> {
            throttled(of, [10, 90], ActorName::thread("a", 1), cgroups)
                .iter()
                .map(|span| (span.from_ns, span.until_ns))
                .collect()
        };
        assert_eq!(spans(&limits::default(), cgroups), []);
        assert_eq!(spans(&limits { deadline_ns: 50, ..limits::default() }, cgroups), [(10, 50)]);
        let real_time = limits { throttled_by: throttled_by::THROTTLED_BY_REAL_TIME.0, ..limits::default() };
        assert_eq!(spans(&real_time, cgroups), [(10, 90)]);
        let mut quota = limits { until_ns: 20, ..limits::default() };
        (quota.later[0].from_ns, quota.later[0].until_ns) = (60, 80);
        (quota.later[2].from_ns, quota.later[2].until_ns) = (30, 40);
        assert_eq!(spans(&quota, cgroups), [(10, 20), (30, 40), (60, 80)]);
    }
}
