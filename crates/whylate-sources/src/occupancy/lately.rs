// SPDX-License-Identifier: MIT OR Apache-2.0
//! What CPUs did lately, for a source whose own programs copy no windows.

use std::ops::Range;

use whylate_model::Occupancy;

use super::rings::Rings;
use super::skel::types::{interval, irq_vector, lateness, occupant_kind};
use super::{Account, spread_steal};
use crate::attach;
use crate::symbols::KernelSymbols;

/// The interrupt that one CPU sends another takes less on the way.
const ON_THE_WAY_NS: u64 = 100_000;

impl Account {
    /// Who had that CPU in a span, in its last `most` intervals and as far as the account has them still; `None` where the
    /// CPU was never seen, and of no time.
    pub(crate) fn lately(
        &self,
        cpu: u32,
        span: Range<u64>,
        most: usize,
        symbols: &mut KernelSymbols,
    ) -> Option<Occupancy> {
        let mut kept = self.kept.borrow_mut();
        let kept = &mut *kept;
        if span.is_empty() {
            return None;
        }
        // All of them before names are looked up, for which the kernel does not wait.
        let within = intervals(&kept.rings, cpu, &span, most);
        if within.is_empty() {
            kept.rings.present(cpu as usize)?;
        }
        let since_ns = within.last().map_or(span.end, |(of, _)| of.start_ns);
        let decoded = within.iter().rev();
        let mut intervals: Vec<_> =
            decoded.filter_map(|&(of, end_ns)| kept.windows.interval(&of, end_ns.min(span.end), symbols)).collect();
        if !kept.rings.has_exact_steal(cpu as usize) {
            spread_steal(&mut intervals);
        }
        Some(Occupancy { cpu, since_ns, merged: None, intervals })
    }

    /// The same of a CPU on which an interrupt came late in that time; most often none did.
    pub(crate) fn lately_late(
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
        let has_late = intervals(&self.kept.borrow().rings, cpu, &span, most).iter().any(is_late);
        has_late.then(|| self.lately(cpu, span, most, symbols)).flatten()
    }

    /// The CPU whose interrupt it was that told this one something then: its own, or, where that `may_be_sent` by another,
    /// the one that had a device's right before.
    pub(crate) fn interrupted(&self, cpu: u32, at_ns: u64, may_be_sent: bool) -> Option<u32> {
        let kept = self.kept.borrow();
        let [device, vector] = [occupant_kind::OCCUPANT_DEVICE_IRQ.0, occupant_kind::OCCUPANT_VECTOR.0];
        let at = |cpu| back(&kept.rings, cpu, at_ns.saturating_add(1));
        let (of, _) = at(cpu).next()?;
        let own = u32::from(of.kind);
        let calls = [irq_vector::VECTOR_CALL_FUNCTION.0, irq_vector::VECTOR_CALL_FUNCTION_SINGLE.0];
        if may_be_sent && own == vector && calls.contains(&of.id) {
            let was = |&other: &u32| {
                at(other)
                    .take_while(|&(_, end_ns)| end_ns.saturating_add(ON_THE_WAY_NS) >= at_ns)
                    .any(|(of, _)| u32::from(of.kind) == device)
            };
            // None where it was long on the way: then this CPU took it late.
            return (0..kept.cpus).filter(|&other| other != cpu).find(was).or(Some(cpu));
        }
        (own == device || own == vector).then_some(cpu)
    }
}

/// The last ones of a span, back in time, each with its end.
fn intervals(rings: &Rings, cpu: u32, span: &Range<u64>, most: usize) -> Vec<(interval, u64)> {
    back(rings, cpu, span.end).take_while(|&(_, end_ns)| end_ns > span.start).take(most).collect()
}

/// A CPU's intervals that began before a moment, back in time, each with its end.
fn back(rings: &Rings, cpu: u32, before_ns: u64) -> impl Iterator<Item = (interval, u64)> {
    let cpu = cpu as usize;
    let present = rings.present(cpu);
    let written = present.map_or(0, |(_, written)| written);
    // So many have begun later, at least; most have when somebody asks.
    let (mut later, mut all) = (0, rings.slots());
    while later < all {
        let middle = later + (all - later) / 2;
        match rings.start_ns(cpu, written.wrapping_sub(middle + 1)) {
            Some(start_ns) if start_ns >= before_ns => later = middle + 1,
            _ => all = middle,
        }
    }
    let end_ns = match later.checked_sub(1) {
        Some(after) => rings.start_ns(cpu, written.wrapping_sub(after + 1)).unwrap_or(before_ns),
        None => present.filter(|(of, _)| of.start_ns >= before_ns).map_or(u64::MAX, |(of, _)| of.start_ns),
    };
    let present = present.into_iter().map(|(of, _)| of).filter(move |of| of.start_ns < before_ns);
    let before = (later + 1..=rings.slots()).map_while(move |back| rings.interval(cpu, written.wrapping_sub(back)));
    present.chain(before).scan(end_ns, |end_ns, of| {
        // Where it is later than the one after it, a later one has taken its place.
        let is_older = of.start_ns <= *end_ns;
        is_older.then(|| (of, std::mem::replace(end_ns, of.start_ns)))
    })
}

#[cfg(test)]
mod tests {
    use super::super::rings::made_up::{SLOTS, rings, start_of};
    use super::*;

    #[test]
    fn intervals_are_found_by_their_time_back_to_what_was_overwritten() {
        let (rings, kernel) = rings();
        (0..=100).for_each(|_| kernel.switch());
        let all: Vec<_> = back(&rings, 0, u64::MAX).map(|(of, end_ns)| (of.start_ns, end_ns)).collect();
        // The present one, and all but the one that may just be written.
        assert_eq!((all.len(), all[0]), (SLOTS as usize, (start_of(100), u64::MAX)));
        assert!(all.windows(2).all(|pair| pair[0].0 == pair[1].1));
        for (from_the_end, &(start_ns, end_ns)) in all.iter().enumerate() {
            for before_ns in [start_ns + 1, end_ns] {
                let found: Vec<_> = back(&rings, 0, before_ns).map(|(of, end_ns)| (of.start_ns, end_ns)).collect();
                assert_eq!(found, all[from_the_end..], "before {before_ns}");
            }
        }
        assert_eq!(back(&rings, 0, start_of(1)).count(), 0);
    }
}
