// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recent intervals of a CPU, for sources with BPF programs that copy no windows.

use std::ops::Range;

use whylate_model::Occupancy;

use super::rings::Rings;
use super::skel::types::{interval, irq_vector, lateness, occupant_kind};
use super::{Account, spread_steal};
use crate::kernel::attach;
use crate::kernel::symbols::KernelSymbols;

/// Longest delivery time of an inter-processor interrupt.
const MAX_IPI_DELIVERY_NS: u64 = 100_000;

impl Account {
    /// Returns the CPU's intervals within `span`, at most the newest `most`, as far as the ring still has them. `None`
    /// if the span is empty or the CPU was never seen.
    pub(crate) fn recent_intervals(
        &self,
        cpu: u32,
        span: Range<u64>,
        most: usize,
        symbols: &mut KernelSymbols,
    ) -> Option<Occupancy> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        if span.is_empty() {
            return None;
        }
        // Copies all intervals before names are looked up: the kernel keeps overwriting the ring.
        let within = intervals(&state.rings, cpu, &span, most);
        if within.is_empty() {
            state.rings.present(cpu as usize)?;
        }
        let since_ns = within.last().map_or(span.end, |(of, _)| of.start_ns);
        let decoded = within.iter().rev();
        let mut intervals: Vec<_> =
            decoded.filter_map(|&(of, end_ns)| state.windows.interval(&of, end_ns.min(span.end), symbols)).collect();
        if !state.rings.has_exact_steal(cpu as usize) {
            spread_steal(&mut intervals);
        }
        Some(Occupancy { cpu, since_ns, merged: None, intervals })
    }

    /// Like `recent_intervals`, but `None` unless an interrupt was late in `span`, which is rare.
    pub(crate) fn recent_if_irq_late(
        &self,
        cpu: u32,
        span: Range<u64>,
        most: usize,
        symbols: &mut KernelSymbols,
    ) -> Option<Occupancy> {
        let is_late = |(of, _): &(interval, u64)| match occupant_kind(of.kind.into()) {
            occupant_kind::OCCUPANT_DEVICE_IRQ | occupant_kind::OCCUPANT_VECTOR => {
                attach::read_plain::<lateness>(&of.handler.to_ne_bytes()).is_some_and(|lateness| lateness.late_ns > 0)
            }
            _ => false,
        };
        let has_late = intervals(&self.state.borrow().rings, cpu, &span, most).iter().any(is_late);
        has_late.then(|| self.recent_intervals(cpu, span, most, symbols)).flatten()
    }

    /// Returns the CPU that was interrupted at `at_ns` on behalf of an event seen on `cpu`: `cpu` itself or, if the
    /// interrupt may be an IPI (`may_be_sent`), the CPU that handled a device interrupt just before.
    pub(crate) fn interrupted(&self, cpu: u32, at_ns: u64, may_be_sent: bool) -> Option<u32> {
        let state = self.state.borrow();
        let [device, vector] = [occupant_kind::OCCUPANT_DEVICE_IRQ.0, occupant_kind::OCCUPANT_VECTOR.0];
        let at = |cpu| intervals_before(&state.rings, cpu, at_ns.saturating_add(1));
        let (of, _) = at(cpu).next()?;
        let own = u32::from(of.kind);
        let calls = [irq_vector::VECTOR_CALL_FUNCTION.0, irq_vector::VECTOR_CALL_FUNCTION_SINGLE.0];
        if may_be_sent && own == vector && calls.contains(&of.id) {
            let was = |&other: &u32| {
                at(other)
                    .take_while(|&(_, end_ns)| end_ns.saturating_add(MAX_IPI_DELIVERY_NS) >= at_ns)
                    .any(|(of, _)| u32::from(of.kind) == device)
            };
            // If no CPU did, the IPI was delivered late: this CPU had interrupts off.
            return (0..state.cpus).filter(|&other| other != cpu).find(was).or(Some(cpu));
        }
        (own == device || own == vector).then_some(cpu)
    }
}

/// Returns up to `most` intervals that overlap `span`, newest first, each with its end.
fn intervals(rings: &Rings, cpu: u32, span: &Range<u64>, most: usize) -> Vec<(interval, u64)> {
    intervals_before(rings, cpu, span.end).take_while(|&(_, end_ns)| end_ns > span.start).take(most).collect()
}

/// Returns the CPU's intervals that started before `before_ns`, newest first, each with its end.
fn intervals_before(rings: &Rings, cpu: u32, before_ns: u64) -> impl Iterator<Item = (interval, u64)> {
    let cpu = cpu as usize;
    let present = rings.present(cpu);
    let written = present.map_or(0, |(_, written)| written);
    // Binary search for the number of newer intervals; `newer` is its lower bound. Usually most are newer.
    let (mut newer, mut all) = (0, rings.slots());
    while newer < all {
        let middle = newer + (all - newer) / 2;
        match rings.start_ns(cpu, written.wrapping_sub(middle + 1)) {
            Some(start_ns) if start_ns >= before_ns => newer = middle + 1,
            _ => all = middle,
        }
    }
    let end_ns = match newer.checked_sub(1) {
        Some(after) => rings.start_ns(cpu, written.wrapping_sub(after + 1)).unwrap_or(before_ns),
        None => present.filter(|(of, _)| of.start_ns >= before_ns).map_or(u64::MAX, |(of, _)| of.start_ns),
    };
    let present = present.into_iter().map(|(of, _)| of).filter(move |of| of.start_ns < before_ns);
    let before = (newer + 1..=rings.slots()).map_while(move |age| rings.interval(cpu, written.wrapping_sub(age)));
    present.chain(before).scan(end_ns, |end_ns, of| {
        // A start after the next interval's start means that the slot was reused.
        let is_older = of.start_ns <= *end_ns;
        is_older.then(|| (of, std::mem::replace(end_ns, of.start_ns)))
    })
}

#[cfg(test)]
mod tests {
    use super::super::rings::fixtures::{SLOTS, rings, start_of};
    use super::*;

    #[test]
    fn finds_intervals_by_time_back_to_overwritten_one() {
        let (rings, kernel) = rings();
        (0..=100).for_each(|_| kernel.switch());
        let all: Vec<_> = intervals_before(&rings, 0, u64::MAX).map(|(of, end_ns)| (of.start_ns, end_ns)).collect();
        // The current interval, and all slots but the one that the kernel may be writing.
        assert_eq!((all.len(), all[0]), (SLOTS as usize, (start_of(100), u64::MAX)));
        assert!(all.windows(2).all(|pair| pair[0].0 == pair[1].1));
        for (from_the_end, &(start_ns, end_ns)) in all.iter().enumerate() {
            for before_ns in [start_ns + 1, end_ns] {
                let found: Vec<_> =
                    intervals_before(&rings, 0, before_ns).map(|(of, end_ns)| (of.start_ns, end_ns)).collect();
                assert_eq!(found, all[from_the_end..], "before {before_ns}");
            }
        }
        assert_eq!(intervals_before(&rings, 0, start_of(1)).count(), 0);
    }
}
