// SPDX-License-Identifier: MIT OR Apache-2.0
//! Code that an interrupt interrupted, derived from the kernel stack inside its handler.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interrupted<'a> {
    /// Kernel code: its frames, innermost first; the whole stack if it has no interrupt entry.
    Kernel(&'a [String]),
    /// User code, in which interrupts are enabled.
    User,
}

/// Strips the interrupt's own frames from a stack, innermost frame first.
pub(crate) fn interrupted(stack: &[String]) -> Interrupted<'_> {
    // The first entry is that of the interrupt that took the stack; an entry further out belongs to the interrupted
    // code.
    let Some(entry) = stack.iter().position(|frame| is_entry(frame)) else {
        return Interrupted::Kernel(stack);
    };
    // arm64 enters through several functions in a row.
    let below = stack[entry..].iter().position(|frame| !is_entry(frame));
    match below {
        Some(frames) => Interrupted::Kernel(&stack[entry + frames..]),
        None => Interrupted::User,
    }
}

/// Returns whether a frame is a function through which the CPU enters the kernel for an interrupt. `asm_exc_page_fault`
/// and other exceptions are none: they are part of the interrupted code.
fn is_entry(frame: &str) -> bool {
    let function = frame.split(['+', ' ']).next().unwrap_or_default();
    let x86 = function.starts_with("asm_sysvec_")
        || ["asm_common_interrupt", "asm_spurious_interrupt", "asm_fred_entrypoint_kernel", "asm_fred_entrypoint_user"]
            .contains(&function);
    let arm64 = ["el1", "el0"].iter().any(|level| {
        let rest = function.trim_start_matches('_').strip_prefix(level).unwrap_or_default();
        ["_interrupt", "_irq"].iter().any(|name| rest.starts_with(name))
            || ["h_64_irq", "t_64_irq", "t_32_irq", "h_64_fiq", "t_64_fiq"].iter().any(|name| rest.starts_with(name))
    });
    x86 || arm64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(frames: &str) -> Vec<String> {
        frames.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn strips_interrupt_frames() {
        let held = stack(
            "hrtimer_interrupt __sysvec_apic_timer_interrupt sysvec_apic_timer_interrupt asm_sysvec_apic_timer_interrupt \
             _raw_spin_unlock_irqrestore console_unlock ret_from_fork_asm",
        );
        assert_eq!(interrupted(&held), Interrupted::Kernel(&held[4..]));
        let arm64 =
            stack("gic_handle_irq do_interrupt_handler el1_interrupt el1h_64_irq_handler el1h_64_irq kfree_skb");
        assert_eq!(interrupted(&arm64), Interrupted::Kernel(&arm64[5..]));
    }

    #[test]
    fn keeps_frames_of_interrupted_page_fault() {
        let fault =
            stack("sysvec_apic_timer_interrupt asm_sysvec_apic_timer_interrupt handle_mm_fault asm_exc_page_fault");
        assert_eq!(interrupted(&fault), Interrupted::Kernel(&fault[2..]));
        let softirq = stack("asm_sysvec_apic_timer_interrupt net_rx_action irq_exit_rcu asm_common_interrupt");
        assert_eq!(interrupted(&softirq), Interrupted::Kernel(&softirq[1..]));
    }

    #[test]
    fn no_frames_below_entry_means_user_space() {
        for frames in
            ["hrtimer_interrupt asm_sysvec_apic_timer_interrupt", "el0_interrupt __el0_irq_handler_common el0t_64_irq"]
        {
            assert_eq!(interrupted(&stack(frames)), Interrupted::User, "{frames}");
        }
    }

    #[test]
    fn keeps_stack_without_entry() {
        let unclear = stack("console_unlock vprintk_emit");
        assert_eq!(interrupted(&unclear), Interrupted::Kernel(&unclear));
        assert_eq!(interrupted(&[]), Interrupted::Kernel(&[]));
    }
}
