// SPDX-License-Identifier: MIT OR Apache-2.0
//! Start and end of a section with interrupts or preemption disabled, and its classification.

use crate::{ActorName, CauseKind, Labels};

/// Functions that enter the kernel for an interrupt; the hardware has disabled interrupts then.
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
/// Functions at the end of an interrupt: those that leave it or continue with softirqs. Functions in `ENTRIES` may end
/// it as well.
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

/// Functions that start and end a section; names are empty if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SectionFunctions<'a> {
    /// Whether preemption was disabled, not interrupts.
    pub is_preemption: bool,
    /// Function that ended the section.
    pub enabled_by: &'a str,
    /// Caller of the function that ended the section.
    pub caller: &'a str,
    /// Function that started the section.
    pub disabled_by: &'a str,
    /// Interrupt handler called in the section.
    pub handler: &'a str,
}

fn starts_with_any(name: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| name.starts_with(start))
}

impl<'a> SectionFunctions<'a> {
    /// Returns the kind of the section: interrupts or preemption disabled, or an interrupt.
    pub fn kind(&self) -> CauseKind {
        let is_entry = starts_with_any(self.disabled_by, &ENTRIES);
        let leaves = || starts_with_any(self.enabled_by, &LEAVING) || starts_with_any(self.enabled_by, &ENTRIES);
        match self {
            SectionFunctions { is_preemption: true, .. } => CauseKind::PreemptOff,
            // Page faults and other exceptions enter the same way, but enable interrupts soon.
            _ if !self.handler.is_empty() || is_entry && leaves() => CauseKind::Irq,
            _ => CauseKind::IrqsOff,
        }
    }

    /// Returns the interrupt handler, as far as it is known.
    pub fn handler(&self) -> &'a str {
        if !self.handler.is_empty() {
            return self.handler;
        }
        let vector =
            [self.disabled_by, self.caller, self.enabled_by].iter().find_map(|name| name.strip_prefix("sysvec_"));
        vector.unwrap_or("interrupt")
    }

    /// Returns labels that identify the section, without unknown names.
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

    /// Returns the culprit: the handler or the thread.
    pub fn who(&self, thread: ActorName) -> ActorName {
        if self.kind() == CauseKind::Irq { self.handler().into() } else { thread }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinguishes_handlers_from_irqs_off_sections() {
        let classify = |disabled_by, enabled_by, caller| {
            let place = SectionFunctions { disabled_by, enabled_by, caller, ..SectionFunctions::default() };
            (place.kind(), place.handler())
        };
        let timer = classify("irqentry_enter", "irqentry_exit", "sysvec_apic_timer_interrupt");
        assert_eq!(timer, (CauseKind::Irq, "apic_timer_interrupt"));
        assert_eq!(classify("common_interrupt", "handle_softirqs", ""), (CauseKind::Irq, "interrupt"));
        assert_eq!(classify("irqentry_enter", "exc_page_fault", "asm_exc_page_fault").0, CauseKind::IrqsOff);
        assert_eq!(
            classify("_raw_spin_lock_irqsave", "_raw_spin_unlock_irqrestore", "console_unlock").0,
            CauseKind::IrqsOff
        );
        let place = SectionFunctions { handler: "arch_timer", enabled_by: "a", ..SectionFunctions::default() };
        assert_eq!(
            (place.kind(), place.handler(), place.who(ActorName::thread("sh", 1))),
            (CauseKind::Irq, "arch_timer", "arch_timer".into())
        );
    }

    #[test]
    fn omits_labels_without_values() {
        let place =
            SectionFunctions { is_preemption: true, enabled_by: "a", handler: "h", ..SectionFunctions::default() };
        let labels: Vec<_> = place.labels().into_iter().collect();
        assert_eq!(
            labels,
            [("function", "a"), ("kind", "preempt_off")].map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        assert_eq!(place.who(ActorName::thread("sh", 1)), "sh:1");
    }
}
