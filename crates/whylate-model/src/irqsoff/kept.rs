// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread that kept its CPU although the kernel had set its reschedule flag (TIF_NEED_RESCHED).

use crate::blame::frames::{Interrupted, interrupted};
use crate::late::cpu_subject;
use crate::{ActorName, Cause, CauseKind, Labels, LateEvent};

/// Label `kind` of a thread with preemption enabled, as far as known: the kernel reached no reschedule point.
pub const NO_RESCHEDULE_POINT: &str = "no_reschedule_point";

/// Functions of the scheduler itself, and those called before it by a BPF program on a scheduler event.
const SCHEDULER_FUNCTIONS: [&str; 8] = [
    "__schedule",
    "schedule",
    "bpf_trace_run",
    "__traceiter_",
    "bpf_trampoline",
    "bpf_prog_",
    "__bpf_prog",
    "bpf_get_stack",
];
/// Functions through which enabling preemption leads to the scheduler.
const PREEMPT_FUNCTIONS: [&str; 5] = [
    "preempt_schedule",
    "__preempt_schedule",
    "raw_irqentry_exit_cond_resched",
    "irqentry_exit",
    "arm64_preempt_schedule_irq",
];

/// Evidence of a late reschedule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LateReschedule {
    /// The thread.
    pub thread: ActorName,
    /// The CPU.
    pub cpu: u32,
    /// Time from the reschedule request to the scheduler: for at least this time, preemption was disabled or no
    /// reschedule point was reached.
    pub length_ns: u64,
    /// Stack at a timer interrupt during the delay, innermost frame first, with the interrupt's own frames; empty
    /// without one.
    pub inside: Vec<String>,
    /// Stack at the entry of the scheduler.
    pub at_end: Vec<String>,
}

impl LateReschedule {
    /// Returns the late event. Its labels other than `task` identify the culprit.
    pub fn event(&self, at_unix_ns: u64) -> LateEvent {
        let (is_preempted, ended_by) = scheduler_entry(&self.at_end);
        // Preemption is never disabled in user code: a hypervisor or a long handler delayed it.
        let was_user = !self.inside.is_empty() && matches!(interrupted(&self.inside), Interrupted::User);
        let inside = match interrupted(&self.inside) {
            Interrupted::Kernel(frames) => frames,
            Interrupted::User => &[],
        };
        // The function that enables preemption had disabled it, or called the one that had. A return to user space
        // names no function.
        let stack = if is_preempted || inside.is_empty() { ended_by } else { inside };
        let kind = match is_preempted {
            _ if was_user => CauseKind::Unknown.name(),
            true => CauseKind::PreemptOff.name(),
            false => NO_RESCHEDULE_POINT,
        };
        let task = self.thread.to_string();
        let names =
            [("kind", Some(kind)), ("function", name(stack, 0)), ("caller", name(stack, 1)), ("task", Some(&task))];
        let labels: Labels =
            names.into_iter().filter_map(|(label, value)| Some((label.to_owned(), value?.to_owned()))).collect();
        let stack = if inside.is_empty() { ended_by } else { inside }.to_vec();
        let (kind, who) = if was_user {
            (CauseKind::Unknown, "user code ran".into())
        } else {
            (CauseKind::PreemptOff, self.thread.clone())
        };
        let causes = vec![Cause { stack: stack.clone(), ..Cause::new(kind, who, self.length_ns) }];
        LateEvent {
            subject: cpu_subject(self.cpu),
            labels,
            at_unix_ns,
            latency_ns: self.length_ns,
            cpu: self.cpu,
            stack,
            causes,
            ..LateEvent::default()
        }
    }
}

fn name(stack: &[String], frame: usize) -> Option<&str> {
    stack.get(frame).map(String::as_str)
}

fn function(frame: &str) -> &str {
    frame.split(['+', ' ']).next().unwrap_or_default()
}

/// Returns whether enabling preemption led to the scheduler, and the frames below its entry.
fn scheduler_entry(stack: &[String]) -> (bool, &[String]) {
    let is_own = |frame: &String| SCHEDULER_FUNCTIONS.iter().any(|own| function(frame).starts_with(own));
    let first = stack.iter().position(|frame| !is_own(frame)).unwrap_or(stack.len());
    let rest = &stack[first..];
    let preempts = |frame: &String| PREEMPT_FUNCTIONS.iter().any(|start| function(frame).starts_with(start));
    // The return to user space has such a name too.
    let to_user = |frame: &String| function(frame).contains("to_user_mode");
    let led = rest.iter().position(|frame| !preempts(frame) || to_user(frame)).unwrap_or(rest.len());
    let after = &rest[led..];
    // With `cond_resched()` the kernel yields voluntarily; no preemption was enabled.
    let asks = after.first().is_some_and(|frame| function(frame).contains("cond_resched"));
    let after = if asks { &after[1..] } else { after };
    let is_preempted = led > 0 && !asks;
    match interrupted(after) {
        // An interrupt that comes in as interrupts are enabled again.
        Interrupted::Kernel(frames) if is_preempted => (true, frames),
        _ => (is_preempted, after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(frames: &str) -> Vec<String> {
        frames.split_whitespace().map(str::to_owned).collect()
    }

    fn labels_of(inside: &str, at_end: &str) -> (String, String, String) {
        let kept = LateReschedule {
            thread: ActorName::thread("sh", 7),
            cpu: 1,
            length_ns: 5_000_000,
            inside: stack(inside),
            at_end: stack(at_end),
        };
        let event = kept.event(9);
        assert_eq!((event.latency_ns, event.cpu, event.at_unix_ns, event.at_most_ns), (5_000_000, 1, 9, None));
        assert_eq!(event.causes[0].ns, 5_000_000);
        let is_known = event.labels["kind"] != "unknown";
        assert_eq!(event.causes[0].kind, if is_known { CauseKind::PreemptOff } else { CauseKind::Unknown });
        let label = |name: &str| event.labels.get(name).cloned().unwrap_or_default();
        (label("kind"), label("function"), label("caller"))
    }

    fn named(kind: &str, function: &str, caller: &str) -> (String, String, String) {
        (kind.to_owned(), function.to_owned(), caller.to_owned())
    }

    #[test]
    fn blames_function_that_enabled_preemption() {
        let by_function = "__schedule preempt_schedule_common preempt_schedule preempt_schedule_thunk bpf_preempt_enable bpf_prog_1_hold";
        assert_eq!(labels_of("", by_function), named("preempt_off", "bpf_preempt_enable", "bpf_prog_1_hold"));
        let inside = "hrtimer_interrupt asm_sysvec_apic_timer_interrupt bpf_loop bpf_prog_1_hold";
        assert_eq!(labels_of(inside, by_function), named("preempt_off", "bpf_preempt_enable", "bpf_prog_1_hold"));
        let by_interrupt = "__schedule preempt_schedule_irq raw_irqentry_exit_cond_resched irqentry_exit \
                            sysvec_reschedule_ipi asm_sysvec_reschedule_ipi _raw_spin_unlock_irqrestore uart_write";
        assert_eq!(labels_of("", by_interrupt), named("preempt_off", "_raw_spin_unlock_irqrestore", "uart_write"));
    }

    #[test]
    fn user_code_cannot_disable_preemption() {
        let to_user = "bpf_trace_run1 __schedule schedule irqentry_exit_to_user_mode asm_sysvec_apic_timer_interrupt";
        let inside = "hrtimer_interrupt __sysvec_apic_timer_interrupt sysvec_apic_timer_interrupt asm_sysvec_apic_timer_interrupt";
        assert_eq!(labels_of(inside, to_user).0, "unknown");
    }

    #[test]
    fn without_preemption_kernel_reaches_no_reschedule_point() {
        let to_user =
            "bpf_trace_run1 __schedule schedule exit_to_user_mode_loop do_syscall_64 entry_SYSCALL_64_after_hwframe";
        assert_eq!(labels_of("", to_user), named(NO_RESCHEDULE_POINT, "exit_to_user_mode_loop", "do_syscall_64"));
        let inside = "hrtimer_interrupt asm_sysvec_apic_timer_interrupt copy_page_range dup_mm do_syscall_64";
        assert_eq!(labels_of(inside, to_user), named(NO_RESCHEDULE_POINT, "copy_page_range", "dup_mm"));
        let asked = "__schedule __cond_resched copy_page_range dup_mm";
        assert_eq!(labels_of("", asked), named(NO_RESCHEDULE_POINT, "copy_page_range", "dup_mm"));
        let interrupted = "__schedule schedule irqentry_exit_to_user_mode asm_sysvec_reschedule_ipi";
        assert_eq!(labels_of("", interrupted).0, NO_RESCHEDULE_POINT);
        assert_eq!(labels_of("", ""), named(NO_RESCHEDULE_POINT, "", ""));
    }
}
