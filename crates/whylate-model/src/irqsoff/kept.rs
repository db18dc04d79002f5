// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread that kept its CPU although the kernel had marked it to be given to another one.

use crate::blame::frames::{Interrupted, interrupted};
use crate::late::cpu_subject;
use crate::{Cause, CauseKind, Labels, LateEvent};

/// Label `kind` of a thread with preemption on, as far as known: the kernel came to no point that looks for the mark.
pub const NO_RESCHEDULE_POINT: &str = "no_reschedule_point";

/// Functions of the scheduler itself, and of what is called before it by an event's program.
const OWN: [&str; 8] = [
    "__schedule",
    "schedule",
    "bpf_trace_run",
    "__traceiter_",
    "bpf_trampoline",
    "bpf_prog_",
    "__bpf_prog",
    "bpf_get_stack",
];
/// Functions through which preemption that is enabled again leads to the scheduler.
const PREEMPTS: [&str; 5] = [
    "preempt_schedule",
    "__preempt_schedule",
    "raw_irqentry_exit_cond_resched",
    "irqentry_exit",
    "arm64_preempt_schedule_irq",
];

/// What was seen of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// `name:tid`.
    pub thread: String,
    /// The CPU.
    pub cpu: u32,
    /// From the mark until the scheduler was entered: so long at least preemption was off, or no point reached.
    pub length_ns: u64,
    /// The stack that a timer's interrupt found meanwhile, innermost first, with its own frames; empty without one.
    pub inside: Vec<String>,
    /// The stack with which the scheduler was entered.
    pub at_end: Vec<String>,
}

impl Kept {
    /// As a late event. Its labels but for `task` tell culprits apart.
    pub fn event(&self, at_unix_ns: u64) -> LateEvent {
        let (is_preempted, ended_by) = end(&self.at_end);
        // Preemption is never off in user code: a hypervisor or a long handler had the CPU.
        let was_user = !self.inside.is_empty() && matches!(interrupted(&self.inside), Interrupted::User);
        let inside = match interrupted(&self.inside) {
            Interrupted::Kernel(frames) => frames,
            Interrupted::User => &[],
        };
        // Whoever enables preemption has had it off, or called whoever had. The return to user space tells nobody.
        let stack = if is_preempted || inside.is_empty() { ended_by } else { inside };
        let kind = match is_preempted {
            _ if was_user => CauseKind::Unknown.name(),
            true => CauseKind::PreemptOff.name(),
            false => NO_RESCHEDULE_POINT,
        };
        let names = [
            ("kind", Some(kind)),
            ("function", name(stack, 0)),
            ("caller", name(stack, 1)),
            ("task", Some(&self.thread)),
        ];
        let labels: Labels =
            names.into_iter().filter_map(|(label, value)| Some((label.to_owned(), value?.to_owned()))).collect();
        let stack = if inside.is_empty() { ended_by } else { inside }.to_vec();
        let (kind, who) =
            if was_user { (CauseKind::Unknown, "user code ran") } else { (CauseKind::PreemptOff, &*self.thread) };
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

/// Whether preemption that was enabled again led to the scheduler, and the frames of whoever entered it.
fn end(stack: &[String]) -> (bool, &[String]) {
    let is_own = |frame: &String| OWN.iter().any(|own| function(frame).starts_with(own));
    let first = stack.iter().position(|frame| !is_own(frame)).unwrap_or(stack.len());
    let rest = &stack[first..];
    let preempts = |frame: &String| PREEMPTS.iter().any(|start| function(frame).starts_with(start));
    // The way back to user space has such a name too.
    let to_user = |frame: &String| function(frame).contains("to_user_mode");
    let led = rest.iter().position(|frame| !preempts(frame) || to_user(frame)).unwrap_or(rest.len());
    let after = &rest[led..];
    // The kernel asks by itself, where preemption is not enabled: with `cond_resched()`.
    let asks = after.first().is_some_and(|frame| function(frame).contains("cond_resched"));
    let after = if asks { &after[1..] } else { after };
    let is_preempted = led > 0 && !asks;
    match interrupted(after) {
        // An interrupt that comes in when they are enabled again.
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

    fn told(inside: &str, at_end: &str) -> (String, String, String) {
        let kept = Kept {
            thread: "sh:7".to_owned(),
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
    fn whoever_enables_preemption_has_had_it_off() {
        let by_function = "__schedule preempt_schedule_common preempt_schedule preempt_schedule_thunk bpf_preempt_enable bpf_prog_1_hold";
        assert_eq!(told("", by_function), named("preempt_off", "bpf_preempt_enable", "bpf_prog_1_hold"));
        let inside = "hrtimer_interrupt asm_sysvec_apic_timer_interrupt bpf_loop bpf_prog_1_hold";
        assert_eq!(told(inside, by_function), named("preempt_off", "bpf_preempt_enable", "bpf_prog_1_hold"));
        let by_interrupt = "__schedule preempt_schedule_irq raw_irqentry_exit_cond_resched irqentry_exit \
                            sysvec_reschedule_ipi asm_sysvec_reschedule_ipi _raw_spin_unlock_irqrestore uart_write";
        assert_eq!(told("", by_interrupt), named("preempt_off", "_raw_spin_unlock_irqrestore", "uart_write"));
    }

    #[test]
    fn user_code_never_has_preemption_off() {
        let to_user = "bpf_trace_run1 __schedule schedule irqentry_exit_to_user_mode asm_sysvec_apic_timer_interrupt";
        let inside = "hrtimer_interrupt __sysvec_apic_timer_interrupt sysvec_apic_timer_interrupt asm_sysvec_apic_timer_interrupt";
        assert_eq!(told(inside, to_user).0, "unknown");
    }

    #[test]
    fn without_preemption_the_kernel_has_no_point_where_it_looks() {
        let to_user =
            "bpf_trace_run1 __schedule schedule exit_to_user_mode_loop do_syscall_64 entry_SYSCALL_64_after_hwframe";
        assert_eq!(told("", to_user), named(NO_RESCHEDULE_POINT, "exit_to_user_mode_loop", "do_syscall_64"));
        let inside = "hrtimer_interrupt asm_sysvec_apic_timer_interrupt copy_page_range dup_mm do_syscall_64";
        assert_eq!(told(inside, to_user), named(NO_RESCHEDULE_POINT, "copy_page_range", "dup_mm"));
        let asked = "__schedule __cond_resched copy_page_range dup_mm";
        assert_eq!(told("", asked), named(NO_RESCHEDULE_POINT, "copy_page_range", "dup_mm"));
        let interrupted = "__schedule schedule irqentry_exit_to_user_mode asm_sysvec_reschedule_ipi";
        assert_eq!(told("", interrupted).0, NO_RESCHEDULE_POINT);
        assert_eq!(told("", ""), named(NO_RESCHEDULE_POINT, "", ""));
    }
}
