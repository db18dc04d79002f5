// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steal time is attributed where it happened: against a ground truth for each nanosecond of a CPU, no culprit gets
//! more of a window than it had.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use whylate_model::blame::{RunnableEvidence, runnable_causes};
use whylate_model::occupancy::Taken;
use whylate_model::{Cause, CauseKind, Interval, Occupancy, Occupant};

fn thread(tid: u32) -> Occupant {
    Occupant::Thread { tid, name: "dd".to_owned(), cgroup: None }
}

fn stack(is_user: bool) -> Vec<String> {
    let frames = ["hrtimer_interrupt", "asm_sysvec_apic_timer_interrupt", "_raw_spin_unlock_irqrestore", "write"];
    frames[..if is_user { 2 } else { 4 }].iter().map(|&frame| frame.to_owned()).collect()
}

/// Ground truth of a CPU, nanosecond by nanosecond, and the account derived from it.
#[derive(Clone, Debug, Default)]
struct Truth {
    had: Vec<Option<Occupant>>,
    intervals: Vec<Interval>,
}

impl Truth {
    /// Adds an interval; `stolen` marks the nanoseconds that the hypervisor took.
    fn add(&mut self, occupant: Occupant, stolen: &[bool]) {
        let start_ns = self.had.len() as u64;
        self.had.extend(stolen.iter().map(|&stolen| (!stolen).then(|| occupant.clone())));
        let steal_ns = stolen.iter().filter(|&&stolen| stolen).count() as u64;
        let taken = Taken { steal_ns, ..Taken::default() };
        let end_ns = self.had.len() as u64;
        self.intervals.push(Interval { start_ns, end_ns, occupant, taken, ..Interval::default() });
    }

    /// Adds an interrupt that was due `late_ns` earlier.
    fn add_late(&mut self, late_ns: u64, is_user: bool) {
        self.add(Occupant::Irq { name: "local_timer".to_owned() }, &[false]);
        if let Some(irq) = self.intervals.last_mut() {
            (irq.late_ns, irq.stack) = (late_ns, stack(is_user));
        }
    }

    fn causes_since(&self, from_ns: u64) -> Vec<Cause> {
        // As a source copies it: the interval that spans the start of the window is complete.
        let intervals = self.intervals.iter().filter(|interval| interval.end_ns > from_ns).cloned().collect();
        let occupancy = Occupancy { intervals, ..Occupancy::default() };
        runnable_causes(&RunnableEvidence {
            runnable_ns: from_ns,
            running_ns: self.had.len() as u64,
            tid: 99,
            occupancy,
            ..RunnableEvidence::default()
        })
    }
}

fn any_truth() -> impl Strategy<Value = Truth> {
    let stay = (0..4u32, vec(any::<bool>(), 1..40), 0..40usize, 0..4u8);
    vec(stay, 1..8).prop_map(|stays| {
        let mut truth = Truth::default();
        for (tid, mut stolen, late_ns, end) in stays {
            // Make the steal spans longer.
            if tid % 2 == 0 {
                let len = stolen.len();
                (0..len).for_each(|at| stolen[at] = stolen[at / 8 * 8]);
            }
            let late_ns = late_ns.min(stolen.len());
            let is_user = end == 1 && tid != 0;
            if is_user {
                // Nothing else holds it up there.
                let due = stolen.len() - late_ns;
                stolen[due..].fill(true);
            }
            truth.add(if tid == 0 { Occupant::Idle } else { thread(tid) }, &stolen);
            if end > 0 {
                truth.add_late(if end == 3 { 0 } else { late_ns as u64 }, is_user);
            }
        }
        truth
    })
}

proptest! {
    #[test]
    fn no_culprit_gets_more_time_than_it_had(truth in any_truth(), from in 0.0..1.0f64) {
        let from_ns = (truth.had.len() as f64 * from) as u64;
        let causes = truth.causes_since(from_ns);
        prop_assert_eq!(causes.iter().map(|cause| cause.ns).sum::<u64>(), truth.had.len() as u64 - from_ns);
        let mut had: BTreeMap<String, u64> = BTreeMap::new();
        for occupant in &truth.had[from_ns as usize..] {
            let who = match occupant {
                None => "hypervisor".to_owned(),
                Some(Occupant::Thread { tid, .. }) => format!("dd:{tid}"),
                // Idle time and steal time are no thread's fault, and either may count as the other.
                Some(Occupant::Idle) => "CPU 0".to_owned(),
                Some(_) => "local_timer".to_owned(),
            };
            *had.entry(who).or_default() += 1;
        }
        let idle_ns = had.get("CPU 0").copied().unwrap_or(0);
        *had.entry("hypervisor".to_owned()).or_default() += idle_ns;
        let mut actual: BTreeMap<String, u64> = BTreeMap::new();
        for cause in causes.iter().filter(|cause| cause.kind != CauseKind::Unknown) {
            *actual.entry(cause.who.to_string()).or_default() += cause.ns;
        }
        for (who, ns) in actual {
            prop_assert!(ns <= had.get(&who).copied().unwrap_or(0), "{}: {} of {:?}: {:?}", who, ns, had, causes);
        }
    }

    /// The causes of whole intervals are known.
    #[test]
    fn whole_intervals_have_no_unknown_time(truth in any_truth(), at in any::<proptest::sample::Index>()) {
        let from_ns = truth.intervals[at.index(truth.intervals.len())].start_ns;
        let causes = truth.causes_since(from_ns);
        prop_assert!(causes.iter().all(|cause| cause.kind != CauseKind::Unknown), "{:?}", causes);
        let stolen = truth.had[from_ns as usize..].iter().filter(|had| had.is_none()).count() as u64;
        let actual: u64 = causes.iter().filter(|cause| cause.kind == CauseKind::Steal).map(|cause| cause.ns).sum();
        prop_assert_eq!(actual, stolen);
    }
}

/// Steal time before the window, and a thread running from then on.
#[test]
fn steal_time_before_window_displaces_no_culprit() {
    let mut truth = Truth::default();
    let stolen: Vec<bool> = (0..1_000).map(|ns| (100..400).contains(&ns)).collect();
    truth.add(thread(7), &stolen);
    let causes_since = |from_ns: u64| -> Vec<(CauseKind, u64)> {
        truth.causes_since(from_ns).into_iter().map(|cause| (cause.kind, cause.ns)).collect()
    };
    assert_eq!(causes_since(0), [(CauseKind::Thread, 700), (CauseKind::Steal, 300)]);
    // All or part of it may have been before the window.
    assert_eq!(causes_since(50), [(CauseKind::Thread, 650), (CauseKind::Steal, 250), (CauseKind::Unknown, 50)]);
    assert_eq!(causes_since(400), [(CauseKind::Thread, 300), (CauseKind::Unknown, 300)]);
}

/// A steal clock that is read too rarely.
#[test]
fn possible_steal_time_is_unknown() {
    let mut truth = Truth::default();
    truth.add(thread(7), &[false; 1_000]);
    truth.intervals[0].taken.perhaps_stolen_ns = 300;
    let actual: Vec<_> = truth.causes_since(0).into_iter().map(|cause| (cause.kind, cause.ns)).collect();
    assert_eq!(actual, [(CauseKind::Thread, 700), (CauseKind::Unknown, 300)]);
}
