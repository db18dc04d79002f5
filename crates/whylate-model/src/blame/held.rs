// SPDX-License-Identifier: MIT OR Apache-2.0
//! Holders of the `max_active` slots that a work item waited for.

use std::collections::BTreeSet;

use super::pool::HeldSlot;
use super::span::Span;
use super::sum::{Blame, Sum};
use crate::CauseKind;

/// Shares a span among the holders of the slots.
///
/// Time with several holders is shared equally. Time without a holder belongs to the next holder to start: an active
/// item occupies its slot while it waits for its own worker. Time after the last end belongs to the holder that ended
/// last: its worker activates the next item some instructions later. `otherwise` is blamed if no holder is known.
pub(super) fn share(span: Span, slots: &[HeldSlot], otherwise: &Blame, sum: &mut Sum<'_>) {
    let mut slots: Vec<&HeldSlot> =
        slots.iter().filter(|slot| slot.ended_ns > slot.started_ns.max(span.from_ns)).collect();
    slots.sort_by(|a, b| (a.started_ns, a.ended_ns, &a.handler).cmp(&(b.started_ns, b.ended_ns, &b.handler)));
    let mut ends: Vec<u64> = slots.iter().map(|slot| slot.ended_ns).filter(|&ended_ns| ended_ns < span.to_ns).collect();
    ends.sort_unstable();
    let mut ends = ends.into_iter().peekable();
    // Indices into `slots`.
    let mut holders: BTreeSet<usize> = BTreeSet::new();
    let last_ended = slots.iter().max_by_key(|slot| slot.ended_ns).copied();
    let mut next = 0;
    let mut now_ns = span.from_ns;
    while now_ns < span.to_ns {
        while next < slots.len() && slots[next].started_ns <= now_ns {
            holders.insert(next);
            next += 1;
        }
        holders.retain(|&holder| slots[holder].ended_ns > now_ns);
        while ends.next_if(|&ended_ns| ended_ns <= now_ns).is_some() {}
        let next_start_ns = slots.get(next).map_or(span.to_ns, |slot| slot.started_ns);
        let next_end_ns = ends.peek().copied().unwrap_or(span.to_ns);
        let until_ns = next_start_ns.min(next_end_ns).min(span.to_ns);
        let ns = until_ns - now_ns;
        let blamed = |slot: &HeldSlot| Blame::new(CauseKind::MaxActive, slot.handler.clone());
        if holders.is_empty() {
            let holder = slots.get(next).or(last_ended.as_ref());
            sum.add(holder.map_or_else(|| otherwise.clone(), |slot| blamed(slot)), ns, &[]);
        }
        let count = holders.len() as u64;
        for (number, &holder) in (0..).zip(&holders) {
            // The nanoseconds that cannot be shared go to the first holders, one each.
            sum.add(blamed(slots[holder]), ns / count + u64::from(number < ns % count), &[]);
        }
        now_ns = until_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(from_ns: u64, to_ns: u64, slots: &[(&str, u64, u64)]) -> Vec<(String, u64)> {
        let slots: Vec<HeldSlot> = slots
            .iter()
            .map(|&(handler, started_ns, ended_ns)| HeldSlot { handler: handler.to_owned(), started_ns, ended_ns })
            .collect();
        let mut sum = Sum::default();
        share(Span { from_ns, to_ns }, &slots, &Blame::new(CauseKind::MaxActive, "wq"), &mut sum);
        sum.into_causes().into_iter().map(|cause| (cause.who.to_string(), cause.ns)).collect()
    }

    fn owned(expected: &[(&str, u64)]) -> Vec<(String, u64)> {
        expected.iter().map(|&(who, ns)| (who.to_owned(), ns)).collect()
    }

    #[test]
    fn single_slot_time_goes_to_successive_holders() {
        assert_eq!(
            shares(100, 160, &[("a", 50, 110), ("b", 112, 130), ("c", 131, 160)]),
            owned(&[("c", 30), ("b", 20), ("a", 10)])
        );
    }

    #[test]
    fn concurrent_holders_share_to_the_nanosecond() {
        assert_eq!(shares(0, 10, &[("a", 0, 10), ("b", 0, 10), ("c", 0, 10)]), owned(&[("a", 4), ("b", 3), ("c", 3)]));
        assert_eq!(shares(0, 10, &[("a", 0, 4), ("b", 0, 10)]), owned(&[("b", 8), ("a", 2)]));
    }

    #[test]
    fn time_after_last_end_goes_to_last_holder() {
        assert_eq!(shares(0, 10, &[("b", 0, 9), ("a", 0, 4)]), owned(&[("b", 8), ("a", 2)]));
    }

    #[test]
    fn unattributed_pool_time_goes_to_workqueue() {
        assert_eq!(shares(0, 10, &[]), owned(&[("wq", 10)]));
        assert_eq!(shares(5, 10, &[("a", 0, 4), ("backwards", 9, 6)]), owned(&[("wq", 5)]));
    }
}
