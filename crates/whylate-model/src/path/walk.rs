// SPDX-License-Identifier: MIT OR Apache-2.0
//! Walks back through one past, all of them at once.

use super::cursor::Cursor;
use super::cursors::{Bound, Cursors};
use super::rewind::Rewind;
use super::{Asked, Finding, Limits, Past};

/// Whoever asks may have seen a thread get its CPU so much earlier than the past tells, where a virtual CPU stops between.
const SLACK_NS: u64 = 20_000_000;

/// Walks back through the past for each of `asked`, and hands out what it finds of them, the latest first: the segments
/// of each partition its time. What was handed out is not kept, so memory does not grow with time.
pub fn walk(past: &mut dyn Past, asked: &[Asked], limits: &dyn Limits, found: &mut dyn FnMut(usize, Finding)) {
    walk_within(past, asked, limits, Bound::None, found);
}

/// The same of many threads of which sums are wanted: the segments of a long wait for a CPU come in any order, one of each
/// holder, and where walks have too much to do, only some of them are followed to who ended their waits
/// ([`Finding::NotFollowed`]). So it takes as long as the past is, however many threads there are.
pub(super) fn walk_for_sums(
    past: &mut dyn Past,
    asked: &[Asked],
    limits: &dyn Limits,
    found: &mut dyn FnMut(usize, Finding),
) {
    walk_within(past, asked, limits, Bound::OF_SUMS, found);
}

/// Returns how often a cursor was shown a change.
pub(super) fn walk_within(
    past: &mut dyn Past,
    asked: &[Asked],
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
