// SPDX-License-Identifier: MIT OR Apache-2.0
//! Causes of a run-queue wait.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::span::Span;
use super::sum::Blame;
use super::timeline::Timeline;
use super::window::{Rule, Window};
use crate::cause::RUN_QUEUE_UNKNOWN;
use crate::{ActorName, Cause, CauseKind, Occupancy};

/// Evidence of a run-queue wait. Timestamps are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RunnableEvidence {
    /// Time at which the thread became runnable.
    pub runnable_ns: u64,
    /// Time of the switch-in.
    pub running_ns: u64,
    /// TID of the thread.
    pub tid: u32,
    /// Time of the last migration during the wait, and the CPU that the thread came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<(u64, u32)>,
    /// Time of the first migration and the CPU that the thread came from, if another migration followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_moved: Option<(u64, u32)>,
    /// Whether migrations before the last one are missing: the run queue between the known ones is unknown.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_unknown_moves: bool,
    /// Spans in which the thread was throttled, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub throttled: Vec<Throttled>,
    /// Restriction that may keep the thread from an idle CPU, as causes name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_from_idle: Option<String>,
    /// Account of the CPU.
    pub occupancy: Occupancy,
    /// Account of the CPU from which the thread was migrated last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occupancy_before: Option<Occupancy>,
    /// Account of the CPU from which the thread was migrated first, if there are two known migrations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occupancy_at_first: Option<Occupancy>,
}

/// A time in which a thread was throttled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Throttled {
    /// Start of the throttled time.
    pub from_ns: u64,
    /// End of the throttled time.
    pub until_ns: u64,
    /// Limit that throttled the thread, as causes name it: `cgroup /a/b`, `deadline of NAME:tid`.
    pub by: ActorName,
}

/// Maximum time to leave the deepest idle state.
const IDLE_EXIT_NS: u64 = 1_000_000;

/// Returns the causes of the wait, largest first: what throttled the thread, and the occupants of the CPU that it was
/// queued on, which is its former CPU until the migration. Where the CPU was idle for longer than the exit from an idle
/// state takes, `kept_from_idle` is blamed. The causes add up to the wait; unexplained time is [`CauseKind::Unknown`].
pub fn runnable_causes(evidence: &RunnableEvidence) -> Vec<Cause> {
    let span = Span { from_ns: evidence.runnable_ns, to_ns: evidence.running_ns };
    if span.ns() == 0 {
        return Vec::new();
    }
    let before = evidence.occupancy_before.as_ref().map(Timeline::new);
    let at_first = evidence.occupancy_at_first.as_ref().map(Timeline::new);
    let mut window = Window::new(span, evidence.tid);
    let mut throttled = evidence.throttled.iter();
    let mut next = throttled.next();
    loop {
        let until_ns = next.map_or(evidence.running_ns, |throttled| throttled.from_ns);
        if let Some((first_ns, cpu)) = evidence.first_moved {
            window.part(first_ns.min(until_ns), queued_on(cpu, at_first.as_ref()));
        }
        if let Some((moved_ns, cpu)) = evidence.moved {
            let rule = match evidence.has_unknown_moves {
                true => Rule::Fixed(Blame::unknown(RUN_QUEUE_UNKNOWN)),
                false => queued_on(cpu, before.as_ref()),
            };
            window.part(moved_ns.min(until_ns), rule);
        }
        window.part(until_ns, Rule::Occupants);
        let Some(Throttled { until_ns, by, .. }) = next else { break };
        window.part(*until_ns, Rule::Fixed(Blame::new(CauseKind::Throttled, by.clone())));
        next = throttled.next();
    }
    let mut causes = window.causes(&Timeline::new(&evidence.occupancy));
    let kept_off_idle = |cause: &Cause| cause.kind == CauseKind::IdleExit && cause.ns > IDLE_EXIT_NS;
    if let Some(by) = &evidence.kept_from_idle
        && let Some(at) = causes.iter().position(kept_off_idle)
    {
        let idle_ns = causes.remove(at).ns;
        match causes.iter_mut().find(|cause| cause.kind == CauseKind::Throttled && cause.who == *by) {
            Some(throttled) => throttled.ns += idle_ns,
            None => causes.push(Cause::new(CauseKind::Throttled, by.as_str(), idle_ns)),
        }
        causes.sort_by_key(|cause| Reverse(cause.ns));
    }
    causes
}

/// Returns the rule for the time in the run queue of a CPU: its occupants, or the queue itself where they are unknown.
fn queued_on<'a>(cpu: u32, occupants: Option<&'a Timeline<'a>>) -> Rule<'a> {
    let queue = Blame::new(CauseKind::Wakeup, format!("run queue of CPU {cpu}"));
    match occupants {
        Some(occupants) => Rule::OccupantsOf(occupants, queue),
        None => Rule::Fixed(queue),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Interval, Occupant};

    #[test]
    fn blames_each_occupant_for_its_time() {
        let thread = |tid: u32, start_ns, end_ns| Interval {
            start_ns,
            end_ns,
            occupant: Occupant::Thread { tid, name: "hog".to_owned(), cgroup: None },
            ..Interval::default()
        };
        let occupancy =
            Occupancy { since_ns: 20, intervals: vec![thread(7, 20, 60), thread(8, 60, 100)], ..Occupancy::default() };
        let evidence =
            RunnableEvidence { runnable_ns: 10, running_ns: 100, tid: 5, occupancy, ..RunnableEvidence::default() };
        let causes = runnable_causes(&evidence);
        let actual: Vec<_> = causes.iter().map(|cause| (cause.kind, cause.who.to_string(), cause.ns)).collect();
        let expected = [
            (CauseKind::Thread, "hog:7", 40),
            (CauseKind::Thread, "hog:8", 40),
            (CauseKind::Unknown, "not recorded", 10),
        ];
        assert_eq!(actual, expected.map(|(kind, who, ns)| (kind, who.to_owned(), ns)));
    }
    #[test]
    fn names_former_run_queue_and_quota() {
        let idle =
            Interval { start_ns: 5_000_000, end_ns: 40_000_000, occupant: Occupant::Idle, ..Interval::default() };
        let occupancy = Occupancy { since_ns: 5_000_000, intervals: vec![idle], ..Occupancy::default() };
        let mut evidence = RunnableEvidence {
            runnable_ns: 0,
            running_ns: 40_000_000,
            tid: 5,
            moved: Some((10_000_000, 3)),
            kept_from_idle: Some("cgroup /a".to_owned()),
            occupancy,
            ..RunnableEvidence::default()
        };
        let causes_of = |evidence: &RunnableEvidence| -> Vec<(CauseKind, String, u64)> {
            runnable_causes(evidence).into_iter().map(|cause| (cause.kind, cause.who.to_string(), cause.ns)).collect()
        };
        let queue = (CauseKind::Wakeup, "run queue of CPU 3".to_owned(), 10_000_000);
        let quota = (CauseKind::Throttled, "cgroup /a".to_owned(), 30_000_000);
        assert_eq!(causes_of(&evidence), [quota, queue.clone()]);
        evidence.kept_from_idle = None;
        let idle = (CauseKind::IdleExit, "CPU 0".to_owned(), 30_000_000);
        assert_eq!(causes_of(&evidence), [idle.clone(), queue.clone()]);
        // With an account of the former CPU, for some time after the migration.
        let hog = Occupant::Thread { tid: 7, name: "hog".to_owned(), cgroup: None };
        let had = Interval { start_ns: 0, end_ns: 35_000_000, occupant: hog, ..Interval::default() };
        evidence.occupancy_before = Some(Occupancy { cpu: 3, intervals: vec![had], ..Occupancy::default() });
        assert_eq!(causes_of(&evidence), [idle.clone(), (CauseKind::Thread, "hog:7".to_owned(), 10_000_000)]);
        evidence.occupancy_before = Some(Occupancy { cpu: 3, since_ns: 10_000_000, ..Occupancy::default() });
        assert_eq!(causes_of(&evidence), [idle, queue]);
    }

    #[test]
    fn names_each_run_queue_of_a_thread_that_was_migrated_twice() {
        let hog = |tid, start_ns, end_ns| Interval {
            start_ns,
            end_ns,
            occupant: Occupant::Thread { tid, name: "hog".to_owned(), cgroup: None },
            ..Interval::default()
        };
        let of = |cpu, interval: Interval| Occupancy {
            cpu,
            since_ns: interval.start_ns,
            intervals: vec![interval],
            ..Occupancy::default()
        };
        let mut evidence = RunnableEvidence {
            runnable_ns: 0,
            running_ns: 50,
            tid: 5,
            moved: Some((48, 0)),
            first_moved: Some((18, 1)),
            occupancy: of(1, hog(9, 48, 50)),
            occupancy_before: Some(of(0, hog(8, 0, 60))),
            occupancy_at_first: Some(of(1, hog(7, 0, 30))),
            ..RunnableEvidence::default()
        };
        let causes_of = |evidence: &RunnableEvidence| -> Vec<(String, u64)> {
            runnable_causes(evidence).into_iter().map(|cause| (cause.who.to_string(), cause.ns)).collect()
        };
        let is = |expected: &[(&str, u64)]| expected.iter().map(|&(who, ns)| (who.to_owned(), ns)).collect::<Vec<_>>();
        assert_eq!(causes_of(&evidence), is(&[("hog:8", 30), ("hog:7", 18), ("hog:9", 2)]));
        // Between them were others.
        evidence.has_unknown_moves = true;
        assert_eq!(causes_of(&evidence), is(&[(RUN_QUEUE_UNKNOWN, 30), ("hog:7", 18), ("hog:9", 2)]));
        // The first one is not known.
        evidence.first_moved = None;
        assert_eq!(causes_of(&evidence), is(&[(RUN_QUEUE_UNKNOWN, 48), ("hog:9", 2)]));
    }

    #[test]
    fn throttled_time_blames_only_the_limit() {
        let interval = |start_ns, end_ns, occupant| Interval { start_ns, end_ns, occupant, ..Interval::default() };
        let hog = Occupant::Thread { tid: 7, name: "hog".to_owned(), cgroup: None };
        let occupancy = Occupancy {
            since_ns: 10_000_000,
            intervals: vec![interval(10_000_000, 90_000_000, hog), interval(90_000_000, 95_000_000, Occupant::Idle)],
            ..Occupancy::default()
        };
        let mut evidence = RunnableEvidence {
            runnable_ns: 10_000_000,
            running_ns: 95_000_000,
            tid: 5,
            throttled: vec![Throttled { from_ns: 0, until_ns: 70_000_000, by: "cgroup /a/b".into() }],
            kept_from_idle: Some("cgroup /a/b".to_owned()),
            occupancy,
            ..RunnableEvidence::default()
        };
        let causes_of = |evidence: &RunnableEvidence| -> Vec<(CauseKind, String, u64)> {
            runnable_causes(evidence).into_iter().map(|cause| (cause.kind, cause.who.to_string(), cause.ns)).collect()
        };
        let throttled = |ns| (CauseKind::Throttled, "cgroup /a/b".to_owned(), ns);
        let thread = |ns| (CauseKind::Thread, "hog:7".to_owned(), ns);
        assert_eq!(causes_of(&evidence), [throttled(65_000_000), thread(20_000_000)]);
        evidence.moved = Some((80_000_000, 3));
        let queue = (CauseKind::Wakeup, "run queue of CPU 3".to_owned(), 10_000_000);
        assert_eq!(causes_of(&evidence), [throttled(65_000_000), thread(10_000_000), queue]);
        // Migrated while throttled.
        evidence.moved = Some((30_000_000, 3));
        assert_eq!(causes_of(&evidence), [throttled(65_000_000), thread(20_000_000)]);
        // Other threads of its cgroup used up the quota while it waited behind them, twice.
        evidence.moved = None;
        let of_quota = |from_ns, until_ns| Throttled { from_ns, until_ns, by: "cgroup /a/b".into() };
        evidence.throttled = vec![of_quota(12_000_000, 40_000_000), of_quota(45_000_000, 93_000_000)];
        assert_eq!(causes_of(&evidence), [throttled(78_000_000), thread(7_000_000)]);
        evidence.moved = Some((11_000_000, 3));
        let queue = (CauseKind::Wakeup, "run queue of CPU 3".to_owned(), 1_000_000);
        assert_eq!(causes_of(&evidence), [throttled(78_000_000), thread(6_000_000), queue]);
    }

    /// Records of kernels with core scheduling or with a sched_ext scheduler.
    #[test]
    fn idle_cpu_blamed_on_scheduler_that_keeps_it_idle() {
        for by in ["core scheduling", "sched_ext scheduler made_up"] {
            let idle = Interval { start_ns: 0, end_ns: 9_000_000, ..Interval::default() };
            let evidence = RunnableEvidence {
                running_ns: 9_000_000,
                tid: 5,
                kept_from_idle: Some(by.to_owned()),
                occupancy: Occupancy { intervals: vec![idle], ..Occupancy::default() },
                ..RunnableEvidence::default()
            };
            let causes = runnable_causes(&evidence);
            assert_eq!(
                causes.iter().map(|of| (of.kind, of.who.to_string(), of.ns)).collect::<Vec<_>>(),
                [(CauseKind::Throttled, by.to_owned(), 9_000_000)]
            );
        }
    }
}
