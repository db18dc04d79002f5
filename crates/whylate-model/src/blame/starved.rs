// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a thread that could run had no CPU.

use serde::{Deserialize, Serialize};

use super::sum::Blame;
use super::timeline::Timeline;
use super::window::{Rule, Span, Window};
use crate::{Cause, CauseKind, Occupancy};

/// What was seen of a wait for a CPU. All times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StarvedEvidence {
    /// Since when the thread could run.
    pub runnable_ns: u64,
    /// When it got the CPU.
    pub running_ns: u64,
    /// The thread.
    pub tid: u32,
    /// When it was moved to this CPU meanwhile, and from which one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<(u64, u32)>,
    /// Its cgroup, or one above, has a quota of CPU time.
    #[serde(default, skip_serializing_if = "is_false")]
    pub has_quota: bool,
    /// Who had the CPU.
    pub occupancy: Occupancy,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// A CPU comes out of the deepest idle state within so many nanoseconds.
const IDLE_EXIT_NS: u64 = 1_000_000;

/// The causes of the wait, largest first: whoever had the CPU, and the other CPU's run queue before the thread was moved from there. Where
/// the CPU was idle for longer than coming out of an idle state takes, a quota kept the thread from it, if there is one. They add up to the
/// wait to the nanosecond; what is not known is [`CauseKind::Unknown`].
pub fn starved_causes(evidence: &StarvedEvidence) -> Vec<Cause> {
    let span = Span { from_ns: evidence.runnable_ns, to_ns: evidence.running_ns };
    if span.ns() == 0 {
        return Vec::new();
    }
    let mut window = Window::new(span, evidence.tid);
    if let Some((moved_ns, cpu)) = evidence.moved {
        window.part(moved_ns, Rule::Fixed(Blame::new(CauseKind::Wakeup, format!("run queue of CPU {cpu}"))));
    }
    window.part(evidence.running_ns, Rule::Occupants);
    let mut causes = window.causes(&Timeline::new(&evidence.occupancy));
    for cause in &mut causes {
        if evidence.has_quota && cause.kind == CauseKind::IdleExit && cause.ns > IDLE_EXIT_NS {
            *cause =
                Cause { kind: CauseKind::Wakeup, who: "the cgroup's quota of CPU time".to_owned(), ..cause.clone() };
        }
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Interval, Occupant};

    #[test]
    fn whoever_had_the_cpu_is_blamed_for_the_time_it_had_it() {
        let thread = |tid: u32, start_ns, end_ns| Interval {
            start_ns,
            end_ns,
            occupant: Occupant::Thread { tid, name: "hog".to_owned() },
            ..Interval::default()
        };
        let occupancy =
            Occupancy { since_ns: 20, intervals: vec![thread(7, 20, 60), thread(8, 60, 100)], ..Occupancy::default() };
        let evidence =
            StarvedEvidence { runnable_ns: 10, running_ns: 100, tid: 5, occupancy, ..StarvedEvidence::default() };
        let causes = starved_causes(&evidence);
        let told: Vec<_> = causes.iter().map(|cause| (cause.kind, cause.who.as_str(), cause.ns)).collect();
        let expected = [
            (CauseKind::Thread, "hog:7", 40),
            (CauseKind::Thread, "hog:8", 40),
            (CauseKind::Unknown, "not recorded", 10),
        ];
        assert_eq!(told, expected);
    }
    #[test]
    fn a_queue_that_it_was_moved_from_and_a_quota_are_named() {
        let idle =
            Interval { start_ns: 5_000_000, end_ns: 40_000_000, occupant: Occupant::Idle, ..Interval::default() };
        let occupancy = Occupancy { since_ns: 5_000_000, intervals: vec![idle], ..Occupancy::default() };
        let mut evidence = StarvedEvidence {
            runnable_ns: 0,
            running_ns: 40_000_000,
            tid: 5,
            moved: Some((10_000_000, 3)),
            has_quota: true,
            occupancy,
        };
        let told = |evidence: &StarvedEvidence| -> Vec<(CauseKind, String, u64)> {
            starved_causes(evidence).into_iter().map(|cause| (cause.kind, cause.who, cause.ns)).collect()
        };
        let queue = (CauseKind::Wakeup, "run queue of CPU 3".to_owned(), 10_000_000);
        let quota = (CauseKind::Wakeup, "the cgroup's quota of CPU time".to_owned(), 30_000_000);
        assert_eq!(told(&evidence), [quota, queue.clone()]);
        evidence.has_quota = false;
        assert_eq!(told(&evidence), [(CauseKind::IdleExit, "CPU 0".to_owned(), 30_000_000), queue]);
    }
}
