// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a timer, and the thread that it wakes, was late.

use serde::{Deserialize, Serialize};

use super::timeline::Timeline;
use super::window::{Rule, Span, Window};
use crate::{Cause, CauseKind, Interval, Occupancy, Occupant, thread};

/// What was seen of a late activation. All times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimerEvidence {
    /// When the timer was due.
    pub due_ns: u64,
    /// When its function was called, in its interrupt.
    pub irq_ns: u64,
    /// When the thread that it woke got the CPU.
    pub thread_ns: u64,
    /// That thread.
    pub tid: u32,
    /// Who had the CPU. The timer's own interrupt says how late it was.
    pub occupancy: Occupancy,
    /// The kernel stack that the interrupt found, innermost first; empty unless asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
}

/// The parts of a late activation, as rtla's auto-analysis names them. Each list is largest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimerAnalysis {
    /// From due to the beginning of the timer's interrupt, and who made it wait.
    pub irq_delay: Vec<Cause>,
    /// From due to the timer's function.
    pub irq_latency_ns: u64,
    /// The rest of the timer's interrupt.
    pub irq_duration_ns: u64,
    /// The thread that was interrupted, while it kept the CPU afterwards.
    pub blocking: Vec<Cause>,
    /// Non-maskable interrupts after the timer's interrupt.
    pub nmi: Vec<Cause>,
    /// Other interrupts after it.
    pub irq: Vec<Cause>,
    /// Softirqs after it.
    pub softirq: Vec<Cause>,
    /// Other threads after it.
    pub thread: Vec<Cause>,
    /// What is left: the hypervisor, an idle state, what is not known.
    pub other: Vec<Cause>,
    /// From due to when the thread got the CPU.
    pub thread_latency_ns: u64,
}

/// The causes of an activation's latency, largest first. They add up to it to the nanosecond, whatever the evidence is
/// like; what is not known is [`CauseKind::Unknown`].
///
/// Each instant belongs to whoever had the CPU: until the timer's interrupt the one that kept interrupts off, the idle
/// state that was left, or the interrupt before; then that interrupt itself, and whoever kept the thread from the CPU.
pub fn timer_causes(evidence: &TimerEvidence) -> Vec<Cause> {
    causes_of(evidence, Span { from_ns: evidence.due_ns, to_ns: evidence.thread_ns })
}

/// The same causes, as the parts of an activation. They add up to the thread's latency.
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
    /// Of the interrupt's delay, the exit from an idle state; 0 where the CPU was not idle.
    pub fn exit_from_idle_ns(&self) -> u64 {
        sum_ns(self.irq_delay.iter().filter(|cause| cause.kind == CauseKind::IdleExit))
    }

    /// The interrupts before the timer's own, that it had to wait for.
    pub fn previous_irqs(&self) -> impl Iterator<Item = &Cause> {
        self.irq_delay.iter().filter(|cause| cause.kind == CauseKind::Irq)
    }

    /// The whole of the parts; the same as the thread's latency.
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

/// The timer's interrupt, and what the thread that it interrupted is called among the causes.
fn own_interrupt(evidence: &TimerEvidence) -> (Option<&Interval>, Option<String>) {
    let intervals = &evidence.occupancy.intervals;
    let is_own = |interval: &Interval| interval.start_ns <= evidence.irq_ns && evidence.irq_ns <= interval.end_ns;
    let at =
        intervals.iter().position(|interval| matches!(interval.occupant, Occupant::Irq { .. }) && is_own(interval));
    let before = &intervals[..at.unwrap_or(0)];
    let interrupted = before.iter().rev().find_map(|interval| match &interval.occupant {
        Occupant::Thread { tid, name, .. } => Some(thread::called(name, *tid)),
        Occupant::Work { handler, .. } => Some(handler.clone()),
        Occupant::Idle => Some(String::new()),
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
    fn each_part_has_its_place() {
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
        // Both have one thread id here, so the name tells them apart.
        assert_eq!(sums, [1_300, 200, 500, 3_000, 0]);
        assert_eq!((analysis.irq_latency_ns, analysis.irq_duration_ns), (2_100, 1_000));
        assert_eq!((analysis.irq_delay[0].kind, analysis.irq_delay[0].ns), (CauseKind::IrqsOff, 2_000));
        assert_eq!(analysis.total_ns(), analysis.thread_latency_ns);
    }

    #[test]
    fn an_idle_state_and_an_interrupt_before_are_told() {
        let intervals =
            [(0, Occupant::Idle), (2_000, irq("eth0")), (3_000, irq("local_timer")), (4_000, Occupant::Idle)];
        let analysis = timer_analysis(&evidence(&intervals, 0));
        assert_eq!(analysis.exit_from_idle_ns(), 1_000);
        assert_eq!(
            analysis.previous_irqs().map(|cause| (cause.who.as_str(), cause.ns)).collect::<Vec<_>>(),
            [("eth0", 1_000)]
        );
        assert_eq!(analysis.total_ns(), 8_000);
    }

    #[test]
    fn without_an_account_everything_is_unknown() {
        let bare = TimerEvidence { occupancy: Occupancy::default(), ..evidence(&[], 0) };
        let analysis = timer_analysis(&bare);
        assert_eq!(analysis.total_ns(), 8_000);
        assert!(timer_causes(&bare).iter().all(|cause| cause.kind == CauseKind::Unknown));
    }
}
