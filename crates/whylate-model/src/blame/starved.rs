// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a thread that could run had no CPU.

use serde::{Deserialize, Serialize};

use super::timeline::Timeline;
use super::window::{Rule, Span, Window};
use crate::{Cause, Occupancy};

/// What was seen of a wait for a CPU. All times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StarvedEvidence {
    /// Since when the thread could run on this CPU.
    pub runnable_ns: u64,
    /// When it got the CPU.
    pub running_ns: u64,
    /// The thread.
    pub tid: u32,
    /// Who had the CPU.
    pub occupancy: Occupancy,
}

/// The causes of the wait, largest first: whoever had the CPU. They add up to it to the nanosecond; what is not known is
/// [`CauseKind::Unknown`](crate::CauseKind::Unknown).
pub fn starved_causes(evidence: &StarvedEvidence) -> Vec<Cause> {
    let span = Span { from_ns: evidence.runnable_ns, to_ns: evidence.running_ns };
    if span.ns() == 0 {
        return Vec::new();
    }
    let mut window = Window::new(span, evidence.tid);
    window.part(evidence.running_ns, Rule::Occupants);
    window.causes(&Timeline::new(&evidence.occupancy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CauseKind, Interval, Occupant};

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
        let evidence = StarvedEvidence { runnable_ns: 10, running_ns: 100, tid: 5, occupancy };
        let causes = starved_causes(&evidence);
        let told: Vec<_> = causes.iter().map(|cause| (cause.kind, cause.who.as_str(), cause.ns)).collect();
        let expected = [
            (CauseKind::Thread, "hog:7", 40),
            (CauseKind::Thread, "hog:8", 40),
            (CauseKind::Unknown, "not recorded", 10),
        ];
        assert_eq!(told, expected);
    }
}
