// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a section with interrupts or preemption off begins and ends, and what it is then.

use crate::{CauseKind, Labels};

/// Functions through which the CPU enters the kernel for an interrupt, which disables interrupts itself.
const ENTRIES: [&str; 11] = [
    "irqentry_enter",
    "sysvec_",
    "common_interrupt",
    "el1_irq",
    "el0_irq",
    "el1_interrupt",
    "el0_interrupt",
    "do_el1_interrupt",
    "enter_from_kernel_mode",
    "enter_from_user_mode",
    "__irq_svc",
];
/// Functions at the end of a handler: those of the same names, and those that leave it or go on to softirqs.
const LEAVING: [&str; 8] = [
    "irqentry_exit",
    "handle_softirqs",
    "__do_softirq",
    "__irq_exit_rcu",
    "irq_exit",
    "exit_to_kernel_mode",
    "exit_to_user_mode",
    "prepare_exit_to_user_mode",
];

/// Names of functions; empty where they are not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place<'a> {
    /// Preemption was off, not interrupts.
    pub is_preemption: bool,
    /// Who ended it.
    pub enabled_by: &'a str,
    /// Who called that function.
    pub caller: &'a str,
    /// Who began it.
    pub disabled_by: &'a str,
    /// The handler of an interrupt that was called in it.
    pub handler: &'a str,
}

fn starts_with_any(name: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| name.starts_with(start))
}

impl<'a> Place<'a> {
    /// What was off: interrupts, preemption, or interrupts because of an interrupt.
    pub fn kind(&self) -> CauseKind {
        let is_entry = starts_with_any(self.disabled_by, &ENTRIES);
        let leaves = || starts_with_any(self.enabled_by, &LEAVING) || starts_with_any(self.enabled_by, &ENTRIES);
        match self {
            Place { is_preemption: true, .. } => CauseKind::PreemptOff,
            // A page fault and its like enter the same way, and enable interrupts soon.
            _ if !self.handler.is_empty() || is_entry && leaves() => CauseKind::Irq,
            _ => CauseKind::IrqsOff,
        }
    }

    /// The handler of an interrupt, as far as it is known.
    pub fn handler(&self) -> &'a str {
        if !self.handler.is_empty() {
            return self.handler;
        }
        let vector =
            [self.disabled_by, self.caller, self.enabled_by].iter().find_map(|name| name.strip_prefix("sysvec_"));
        vector.unwrap_or("interrupt")
    }

    /// Labels that tell it from other places, without names that are not known.
    pub fn labels(&self) -> Labels {
        let kind = self.kind();
        let names = match kind {
            CauseKind::Irq => [("handler", self.handler()), ("function", ""), ("caller", ""), ("disabled_by", "")],
            _ => [
                ("handler", ""),
                ("function", self.enabled_by),
                ("caller", self.caller),
                ("disabled_by", self.disabled_by),
            ],
        };
        let kind = match kind {
            CauseKind::PreemptOff => "preempt_off",
            CauseKind::Irq => "irq",
            _ => "irqs_off",
        };
        let known = names.into_iter().filter(|(_, value)| !value.is_empty()).chain([("kind", kind)]);
        known.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// Who is blamed: a handler, or the thread.
    pub fn who(&self, thread: &str) -> String {
        if self.kind() == CauseKind::Irq { self.handler().to_owned() } else { thread.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_is_told_from_whoever_disables_interrupts() {
        let of = |disabled_by, enabled_by, caller| {
            let place = Place { disabled_by, enabled_by, caller, ..Place::default() };
            (place.kind(), place.handler())
        };
        let timer = of("irqentry_enter", "irqentry_exit", "sysvec_apic_timer_interrupt");
        assert_eq!(timer, (CauseKind::Irq, "apic_timer_interrupt"));
        assert_eq!(of("common_interrupt", "handle_softirqs", ""), (CauseKind::Irq, "interrupt"));
        assert_eq!(of("irqentry_enter", "exc_page_fault", "asm_exc_page_fault").0, CauseKind::IrqsOff);
        assert_eq!(of("_raw_spin_lock_irqsave", "_raw_spin_unlock_irqrestore", "console_unlock").0, CauseKind::IrqsOff);
        let place = Place { handler: "arch_timer", enabled_by: "a", ..Place::default() };
        assert_eq!(
            (place.kind(), place.handler(), place.who("sh:1")),
            (CauseKind::Irq, "arch_timer", "arch_timer".to_owned())
        );
    }

    #[test]
    fn labels_are_of_what_is_known() {
        let place = Place { is_preemption: true, enabled_by: "a", handler: "h", ..Place::default() };
        let labels: Vec<_> = place.labels().into_iter().collect();
        assert_eq!(
            labels,
            [("function", "a"), ("kind", "preempt_off")].map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        assert_eq!(place.who("sh:1"), "sh:1");
    }
}
