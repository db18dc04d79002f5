// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interrupts not raised by devices: their names, and programs that are attached to the tracepoints of all of them.

use libbpf_rs::{ErrorKind, Link, ProgramMut};

use super::Step;
use super::skel::types::irq_vector;

/// Programs for all vectors, what their tracepoints end in, and the step at which the account calls that of a source.
const PROGRAMS: [(&str, &str, Step); 2] =
    [("on_irq_vector_entry", "_entry", Step::TicksVectorEntry), ("on_irq_vector_exit", "_exit", Step::TicksVectorExit)];

/// Returns the step at which the account calls a source's program; `None` for a program that is attached itself.
pub(crate) fn step_of(program: &ProgramMut<'_>) -> Option<Step> {
    PROGRAMS.iter().find(|(name, ..)| program.name() == *name).map(|(.., step)| *step)
}

/// Returns the name of an interrupt without a device, as the kernel's tracepoint spells it.
pub(crate) fn name_of(id: u32) -> Option<&'static str> {
    Some(match irq_vector(id) {
        irq_vector::VECTOR_LOCAL_TIMER | irq_vector::VECTOR_UNANNOUNCED_TIMER => "local_timer",
        irq_vector::VECTOR_RESCHEDULE => "reschedule",
        irq_vector::VECTOR_CALL_FUNCTION => "call_function",
        irq_vector::VECTOR_CALL_FUNCTION_SINGLE => "call_function_single",
        irq_vector::VECTOR_IRQ_WORK => "irq_work",
        irq_vector::VECTOR_PLATFORM_IPI => "x86_platform_ipi",
        irq_vector::VECTOR_THERMAL => "thermal_apic",
        irq_vector::VECTOR_THRESHOLD => "threshold_apic",
        irq_vector::VECTOR_DEFERRED_ERROR => "deferred_error_apic",
        irq_vector::VECTOR_ERROR => "error_apic",
        irq_vector::VECTOR_SPURIOUS => "spurious_apic",
        _ => return None,
    })
}

/// Attaches a program to its tracepoint, or, if it is for all vectors, to the tracepoint of each vector that this kernel
/// has: that depends on the architecture and configuration.
///
/// # Errors
/// Fails if the kernel refuses, or lacks the tracepoint of a program for a single one.
pub(crate) fn attach(program: &ProgramMut<'_>) -> libbpf_rs::Result<Vec<Link>> {
    let Some((_, ending, _)) = PROGRAMS.iter().find(|(name, ..)| program.name() == *name) else {
        return Ok(vec![program.attach()?]);
    };
    let names = (0..irq_vector::VECTOR_NAMED.0).filter_map(name_of);
    let attached = names.filter_map(|name| match program.attach_raw_tracepoint(format!("{name}{ending}")) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        attached => Some(attached),
    });
    attached.collect()
}
