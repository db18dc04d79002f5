// SPDX-License-Identifier: MIT OR Apache-2.0
//! What CPUs did lately, for a source whose own programs copy no windows.

use whylate_model::Occupancy;

use super::rings::Rings;
use super::skel::types::{interval, occupant_kind};
use super::{Account, spread_steal};
use crate::symbols::KernelSymbols;

/// So many intervals of a CPU at most, the last ones: who kept interrupts off before one is among these.
const MOST_INTERVALS: usize = 64;
/// The interrupt that one CPU sends another takes less on the way.
const ON_THE_WAY_NS: u64 = 100_000;

impl Account {
    /// Who had that CPU between two moments, as far as the account has it still; `None` where it was never seen.
    pub(crate) fn lately(&self, cpu: u32, from_ns: u64, to_ns: u64, symbols: &mut KernelSymbols) -> Option<Occupancy> {
        let mut kept = self.kept.borrow_mut();
        let kept = &mut *kept;
        kept.rings.present(cpu as usize)?;
        // All of them before names are looked up, for which the kernel does not wait.
        let within = back(&kept.rings, cpu, to_ns).take_while(|&(_, end_ns)| end_ns > from_ns);
        let within: Vec<_> = within.take(MOST_INTERVALS).collect();
        let since_ns = within.last().map_or(to_ns, |(of, _)| of.start_ns);
        let decoded = within.iter().rev();
        let mut intervals: Vec<_> =
            decoded.filter_map(|&(of, end_ns)| kept.windows.interval(&of, end_ns.min(to_ns), symbols)).collect();
        if !kept.rings.has_exact_steal(cpu as usize) {
            spread_steal(&mut intervals);
        }
        Some(Occupancy { cpu, since_ns, merged: None, intervals })
    }

    /// The CPU that had a device's interrupt then, or that sent another one its own right after it: `likely` before all
    /// others.
    pub(crate) fn interrupted_by_device(&self, likely: u32, at_ns: u64) -> Option<u32> {
        let kept = self.kept.borrow();
        let was = |&cpu: &u32| {
            back(&kept.rings, cpu, at_ns.saturating_add(1))
                .take_while(|&(_, end_ns)| end_ns.saturating_add(ON_THE_WAY_NS) >= at_ns)
                .any(|(of, _)| u32::from(of.kind) == occupant_kind::OCCUPANT_DEVICE_IRQ.0)
        };
        std::iter::once(likely).chain((0..kept.cpus).filter(|&cpu| cpu != likely)).find(was)
    }
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
        match rings.interval(cpu, written.wrapping_sub(middle + 1)) {
            Some(of) if of.start_ns >= before_ns => later = middle + 1,
            _ => all = middle,
        }
    }
    let end_ns = match later.checked_sub(1) {
        Some(after) => rings.interval(cpu, written.wrapping_sub(after + 1)).map_or(before_ns, |of| of.start_ns),
        None => present.filter(|(of, _)| of.start_ns >= before_ns).map_or(u64::MAX, |(of, _)| of.start_ns),
    };
    let present = present.into_iter().map(|(of, _)| of).filter(move |of| of.start_ns < before_ns);
    let before = (later + 1..=rings.slots()).map_while(move |back| rings.interval(cpu, written.wrapping_sub(back)));
    present.chain(before).scan(end_ns, |end_ns, of| {
        // Where it is not older than the one after it, a later one has taken its place.
        let is_older = of.start_ns < *end_ns;
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
