// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the BPF programs' record of a late activation to a late event.

use std::mem::offset_of;

use whylate_model::LateEvent;
use whylate_model::blame::{self, TimerEvidence};
use whylate_model::late::cpu_subject;

use super::skel::types::{interrupted_stack, late_activation};
use crate::cpu_account::Windows;
use crate::kernel::clock;
use crate::kernel::symbols::KernelSymbols;

/// Returns the evidence of the causes and the event; `None` if the record is truncated.
pub(super) fn event_of(
    bytes: &[u8],
    windows: &mut Windows,
    symbols: &mut KernelSymbols,
) -> Option<(TimerEvidence, LateEvent)> {
    let u64_at = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let due_ns = u64_at(offset_of!(late_activation, due_ns))?;
    let irq_ns = u64_at(offset_of!(late_activation, irq_ns))?;
    let thread_ns = u64_at(offset_of!(late_activation, thread_ns))?;
    let (tid, cpu) = (u32_at(offset_of!(late_activation, tid))?, u32_at(offset_of!(late_activation, cpu))?);
    let stack_at = offset_of!(late_activation, stack);
    let stack_bytes = u64_at(stack_at + offset_of!(interrupted_stack, bytes))? as i64;
    let frames_at = stack_at + offset_of!(interrupted_stack, frames);
    // Negative if the kernel could not capture the stack.
    let frames = bytes.get(frames_at..frames_at + usize::try_from(stack_bytes).unwrap_or(0));
    let stack = frames.map_or_else(Vec::new, |frames| symbols.stack(frames));
    let window = bytes.get(offset_of!(late_activation, window)..)?;
    let occupancy = windows.read(window, symbols)?;
    let evidence = TimerEvidence { due_ns, irq_ns, thread_ns, tid, occupancy, stack };
    let latency_ns = thread_ns.saturating_sub(due_ns);
    let mut event = LateEvent {
        subject: cpu_subject(cpu),
        at_unix_ns: clock::unix_ns_of(thread_ns),
        at_ns: thread_ns,
        latency_ns,
        cpu,
        phases: vec![
            ("irq".to_owned(), irq_ns.saturating_sub(due_ns).min(latency_ns)),
            ("wakeup".to_owned(), thread_ns.saturating_sub(irq_ns.max(due_ns))),
        ],
        causes: blame::timer_causes(&evidence),
        stack: evidence.stack.clone(),
        ..LateEvent::default()
    };
    event.labels.insert("cpu".to_owned(), cpu.to_string());
    Some((evidence, event))
}
