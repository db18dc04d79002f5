// SPDX-License-Identifier: MIT OR Apache-2.0
//! Causes of a late timer and of the late thread that it wakes.

use serde::{Deserialize, Serialize};

use super::span::Span;
use super::timeline::Timeline;
use super::window::{Rule, Window};
use crate::{ActorName, Cause, CauseKind, Interval, Occupancy, Occupant};

/// Evidence of a late activation. Timestamps are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TimerEvidence {
    /// Due time of the timer.
    pub due_ns: u64,
    /// Time at which the timer's function was called, in its interrupt.
    pub irq_ns: u64,
    /// Switch-in of the thread that the timer woke.
    pub thread_ns: u64,
    /// TID of the woken thread.
    pub tid: u32,
    /// Account of the CPU. The interval of the timer's interrupt states its delay.
    pub occupancy: Occupancy,
    /// Kernel stack at the interrupt, innermost frame first; empty unless enabled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
}

/// Parts of a late activation, as rtla's auto-analysis names them. Each list is sorted, largest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimerAnalysis {
    /// Causes of the delay between the due time and the start of the timer's interrupt.
    pub irq_delay: Vec<Cause>,
    /// Time from due to the timer's function, in nanoseconds.
    pub irq_latency_ns: u64,
    /// Time from the start of the timer's interrupt to its end.
    pub irq_duration_ns: u64,
    /// The interrupted thread, while it continued to run after the interrupt.
    pub blocking: Vec<Cause>,
    /// Non-maskable interrupts after the timer's interrupt.
    pub nmi: Vec<Cause>,
    /// Other interrupts after the timer's interrupt.
    pub irq: Vec<Cause>,
    /// Softirqs after the timer's interrupt.
    pub softirq: Vec<Cause>,
    /// Other threads after the timer's interrupt.
    pub thread: Vec<Cause>,
    /// Everything else: the hypervisor, an idle state, unknown time.
    pub other: Vec<Cause>,
    /// Time from due until the thread was switched in, in nanoseconds.
    pub thread_latency_ns: u64,
}

/// Returns the causes of an activation's latency, largest first. They add up to the latency to the nanosecond, even for
/// inconsistent evidence; unexplained time is [`CauseKind::Unknown`].
///
/// Each instant belongs to the occupant of the CPU: before the timer's interrupt the code that had interrupts disabled,
/// the idle state that was left, or an earlier interrupt; then the timer's interrupt itself, and the occupants that
/// delayed the thread.
pub fn timer_causes(evidence: &TimerEvidence) -> Vec<Cause> {
    causes_of(evidence, Span { from_ns: evidence.due_ns, to_ns: evidence.thread_ns })
}

/// Splits the causes into the parts of an activation. They add up to the thread's latency.
pub fn timer_analysis(evidence: &TimerEvidence) -> TimerAnalysis {
    let TimerEvidence { due_ns, irq_ns, thread_ns, .. } = *evidence;
    let (interrupt, interrupted) = own_interrupt(evidence);
    let within = |ns: u64| ns.clamp(due_ns, thread_ns.max(due_ns));
    let begin_ns = within(interrupt.map_or(irq_ns, |interval| interval.start_ns));
    let end_ns = within(interrupt.map_or(irq_ns, |interval| interval.end_ns).max(begin_ns));
    let mut analysis = TimerAnalysis {
        irq_delay: causes_of(evidence, Span { from_ns: due_ns, to_ns: begin_ns }),
        irq_latency_ns: irq_ns.saturating_sub(due_ns),
        irq_duration_ns: end_ns - begin_ns,
        thread_latency_ns: thread_ns.saturating_sub(due_ns),
        ..TimerAnalysis::default()
    };
    for cause in causes_of(evidence, Span { from_ns: end_ns, to_ns: thread_ns }) {
        let is_blocking = interrupted.as_ref().is_some_and(|name| *name == cause.who);
        let part = match cause.kind {
            CauseKind::Thread | CauseKind::Work | CauseKind::IrqsOff | CauseKind::PreemptOff if is_blocking => {
                &mut analysis.blocking
            }
            CauseKind::Thread | CauseKind::Work | CauseKind::IrqsOff | CauseKind::PreemptOff => &mut analysis.thread,
            CauseKind::Nmi => &mut analysis.nmi,
            CauseKind::Irq => &mut analysis.irq,
            CauseKind::Softirq => &mut analysis.softirq,
            _ => &mut analysis.other,
        };
        part.push(cause);
    }
    analysis
}

impl TimerAnalysis {
    /// Returns the time of the interrupt's delay that the exit from an idle state took; 0 if the CPU was not idle.
    pub fn exit_from_idle_ns(&self) -> u64 {
        sum_ns(self.irq_delay.iter().filter(|cause| cause.kind == CauseKind::IdleExit))
    }

    /// Returns the interrupts before the timer's own that delayed it.
    pub fn previous_irqs(&self) -> impl Iterator<Item = &Cause> {
        self.irq_delay.iter().filter(|cause| cause.kind == CauseKind::Irq)
    }

    /// Returns the sum of all parts, which equals the thread's latency.
    pub fn total_ns(&self) -> u64 {
        let after = [&self.blocking, &self.nmi, &self.irq, &self.softirq, &self.thread, &self.other];
        sum_ns(&self.irq_delay) + self.irq_duration_ns + after.into_iter().map(sum_ns).sum::<u64>()
    }
}

fn sum_ns<'a>(causes: impl IntoIterator<Item = &'a Cause>) -> u64 {
    causes.into_iter().map(|cause| cause.ns).sum()
}

fn causes_of(evidence: &TimerEvidence, span: Span) -> Vec<Cause> {
    if span.ns() == 0 {
        return Vec::new();
    }
    let timeline = Timeline::new(&evidence.occupancy);
    let mut window = Window::new(span, evidence.tid);
    window.part(span.to_ns, Rule::Occupants);
    window.causes(&timeline)
}

/// Returns the interval of the timer's interrupt, and the interrupted thread as causes name it.
fn own_interrupt(evidence: &TimerEvidence) -> (Option<&Interval>, Option<ActorName>) {
    let intervals = &evidence.occupancy.intervals;
    let is_own = |interval: &Interval| interval.start_ns <= evidence.irq_ns && evidence.irq_ns <= interval.end_ns;
    let at =
        intervals.iter().position(|interval| matches!(interval.occupant, Occupant::Irq { .. }) && is_own(interval));
    let before = &intervals[..at.unwrap_or(0)];
    let interrupted = before.iter().rev().find_map(|interval| match &interval.occupant {
        Occupant::Thread { tid, name, .. } => Some(ActorName::thread(name, *tid)),
        Occupant::Work { handler, .. } => Some(handler.as_str().into()),
        Occupant::Idle => Some(ActorName::default()),
        Occupant::Irq { .. } | Occupant::Softirq { .. } => None,
    });
    (at.map(|at| &intervals[at]), interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(name: &str) -> Occupant {
        Occupant::Thread { tid: 7, name: name.to_owned(), cgroup: None }
    }

    fn irq(name: &str) -> Occupant {
        Occupant::Irq { name: name.to_owned() }
    }

    fn evidence(intervals: &[(u64, Occupant)], late_ns: u64) -> TimerEvidence {
        let ends = intervals.iter().skip(1).map(|&(start_ns, _)| start_ns).chain([9_000]);
        let intervals = intervals.iter().zip(ends).map(|((start_ns, occupant), end_ns)| {
            let own = *occupant == irq("local_timer");
            Interval {
                start_ns: *start_ns,
                end_ns,
                occupant: occupant.clone(),
                late_ns: if own { late_ns } else { 0 },
                stack: if own { vec!["_raw_spin_unlock_irqrestore".to_owned()] } else { Vec::new() },
                ..Interval::default()
            }
        });
        let occupancy = Occupancy { intervals: intervals.collect(), ..Occupancy::default() };
        TimerEvidence { due_ns: 1_000, irq_ns: 3_100, thread_ns: 9_000, tid: 99, occupancy, stack: Vec::new() }
    }

    #[test]
    fn splits_latency_into_parts() {
        let softirq = Occupant::Softirq { name: "net_rx".to_owned() };
        let intervals = [
            (0, thread("dd")),
            (3_000, irq("local_timer")),
            (4_000, softirq),
            (4_500, thread("dd")),
            (5_500, irq("nvme0q1")),
            (5_700, thread("dd")),
            (6_000, thread("hog")),
        ];
        let analysis = timer_analysis(&evidence(&intervals, 2_000));
        let sums =
            [&analysis.blocking, &analysis.irq, &analysis.softirq, &analysis.thread, &analysis.other].map(sum_ns);
        // Both threads have one TID here, so only the name distinguishes them.
        assert_eq!(sums, [1_300, 200, 500, 3_000, 0]);
        assert_eq!((analysis.irq_latency_ns, analysis.irq_duration_ns), (2_100, 1_000));
        assert_eq!((analysis.irq_delay[0].kind, analysis.irq_delay[0].ns), (CauseKind::IrqsOff, 2_000));
        assert_eq!(analysis.total_ns(), analysis.thread_latency_ns);
    }

    #[test]
    fn reports_idle_exit_and_previous_irq() {
        let intervals =
            [(0, Occupant::Idle), (2_000, irq("eth0")), (3_000, irq("local_timer")), (4_000, Occupant::Idle)];
        let analysis = timer_analysis(&evidence(&intervals, 0));
        assert_eq!(analysis.exit_from_idle_ns(), 1_000);
        assert_eq!(
            analysis.previous_irqs().map(|cause| (cause.who.to_string(), cause.ns)).collect::<Vec<_>>(),
            [("eth0".to_owned(), 1_000)]
        );
        assert_eq!(analysis.total_ns(), 8_000);
    }

    #[test]
    fn missing_account_gives_unknown() {
        let bare = TimerEvidence { occupancy: Occupancy::default(), ..evidence(&[], 0) };
        let analysis = timer_analysis(&bare);
        assert_eq!(analysis.total_ns(), 8_000);
        assert!(timer_causes(&bare).iter().all(|cause| cause.kind == CauseKind::Unknown));
    }
}
