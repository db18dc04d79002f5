// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attributes the time of a run slice to an actor.

use super::Actor;
use super::history::{Holder, RunSlice};
use crate::CauseKind;

/// Why an actor is unknown: nothing was recorded of the CPU.
pub(super) const NOT_RECORDED: &str = "not recorded";

/// State of one CPU at the current time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CpuState {
    /// Current run slice of the CPU.
    pub slice: RunSlice,
    /// Time since which interrupts are known to be off, until the slice ends; [`u64::MAX`] if they are not.
    pub irqs_off_ns: u64,
    /// Earliest time at which an interrupt of the burst was due that begins with the slice; [`u64::MAX`] for none.
    pub due_ns: u64,
}

/// Emits the segments of a part of a slice, as seen by the runnable thread `ready`, or by the running thread itself.
/// Steal time is known only for the whole slice; it is spread evenly, and put at the end of the part.
pub(super) fn emit_slice_segments(
    lane: &CpuState,
    cpu: usize,
    from_ns: u64,
    to_ns: u64,
    ready: Option<u32>,
    emit: &mut dyn FnMut(u64, u64, CauseKind, Actor),
) {
    let slice = &lane.slice;
    let (ns, whole_ns) = (to_ns.saturating_sub(from_ns), slice.end_ns.saturating_sub(slice.start_ns));
    // A 128-bit division costs as much as all the rest.
    let steal_ns = match slice.steal_ns {
        0 => 0,
        steal_ns => (u128::from(steal_ns) * u128::from(ns)).checked_div(u128::from(whole_ns)).unwrap_or(0),
    };
    let own_end_ns = to_ns - u64::try_from(steal_ns).unwrap_or(u64::MAX).min(ns);
    emit(own_end_ns, to_ns, CauseKind::Steal, Actor::Text("hypervisor"));
    let name = slice.name;
    let (kind, who) = match slice.holder {
        Holder::Irq { .. } => (CauseKind::Irq, Actor::Interrupt(name)),
        Holder::Softirq => (CauseKind::Softirq, Actor::Interrupt(name)),
        Holder::Work { handler, .. } => (CauseKind::Work, Actor::Work(handler)),
        Holder::Thread(tid) => {
            let kind = match ready {
                None => CauseKind::Running,
                Some(ready) if ready == tid => CauseKind::Wakeup,
                Some(_) => CauseKind::Thread,
            };
            (kind, Actor::Thread { tid, name, cgroup: slice.cgroup, is_member: slice.is_member })
        }
        Holder::Idle => (CauseKind::IdleExit, Actor::Cpu(cpu as u32)),
        Holder::Unrecorded => (CauseKind::Unknown, Actor::Text(NOT_RECORDED)),
    };
    // For the running thread itself, time with interrupts off is its own work.
    let keeps_off = ready.is_some() && slice.holder.tid().is_some();
    let off_ns = if keeps_off { lane.irqs_off_ns.clamp(from_ns, own_end_ns) } else { own_end_ns };
    emit(off_ns, own_end_ns, CauseKind::IrqsOff, who);
    emit(from_ns, off_ns, kind, who);
}
