// SPDX-License-Identifier: MIT OR Apache-2.0
//! Walks back through one timeline for many queries at once.

use super::cursor::Cursor;
use super::cursors::{Bound, Cursors};
use super::rewind::Rewind;
use super::{CpuTimeline, Finding, Limits, Query};

/// Tolerance between a caller's switch-in time and the timeline's: a vCPU may be descheduled between the two events.
pub(super) const SLACK_NS: u64 = 20_000_000;

/// Walks back through the timeline for each of `asked`, and reports findings newest first: the segments of each query
/// partition its time. Nothing is kept after it was reported, so memory does not grow with time.
pub fn walk(past: &mut dyn CpuTimeline, asked: &[Query], limits: &dyn Limits, found: &mut dyn FnMut(usize, Finding)) {
    walk_within(past, asked, limits, Bound::None, found);
}

/// Walks for many threads of which only sums are wanted. Segments of a long wait for a CPU come in any order, one for
/// each actor. If the work exceeds the bound, only some threads are followed to their wakers
/// ([`Finding::NotFollowed`]). The run time depends on the length of the timeline, not on the number of threads.
pub(super) fn walk_for_sums(
    past: &mut dyn CpuTimeline,
    asked: &[Query],
    limits: &dyn Limits,
    found: &mut dyn FnMut(usize, Finding),
) {
    walk_within(past, asked, limits, Bound::OF_SUMS, found);
}

/// Walks within `bound`, and returns how many times a cursor was visited.
pub(super) fn walk_within(
    past: &mut dyn CpuTimeline,
    asked: &[Query],
    limits: &dyn Limits,
    bound: Bound,
    found: &mut dyn FnMut(usize, Finding),
) -> u64 {
    let mut order: Vec<usize> = (0..asked.len()).collect();
    order.sort_by_key(|&index| asked[index].to_ns);
    let mut rewind = Rewind::new(past, bound != Bound::None);
    let mut cursors = Cursors::new(rewind.lanes.len(), bound);
    loop {
        let reached_ns = rewind.next_ns().unwrap_or(0);
        while let Some(&index) = order.last()
            && asked[index].to_ns.saturating_add(SLACK_NS) >= reached_ns
        {
            order.pop();
            cursors.add(index, Cursor::new(asked[index]), asked[index].tid);
        }
        let change = rewind.next();
        cursors.visit(&mut rewind, reached_ns, change.as_ref(), limits, found);
        match change {
            Some(change) if !(cursors.is_empty() && order.is_empty()) => rewind.pass(&change),
            _ => return cursors.visits,
        }
    }
}
