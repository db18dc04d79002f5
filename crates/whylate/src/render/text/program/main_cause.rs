// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds what delayed a program most.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use whylate_model::path::budget::{Budget, Waits};
use whylate_model::path::{OTHERS, PathSegment};
use whylate_model::{ActorName, CauseKind};

use super::{SHOWN_PERCENT, percent};
use crate::render::text::path;

/// The longest cause of a program's waits.
pub(super) struct MainCause<'a> {
    /// Time in nanoseconds.
    pub ns: u64,
    /// The cause as a clause.
    pub what: String,
    /// The waits of which it is the cause for the longest time.
    pub waits: &'a Waits,
}

/// Returns the longest known cause of the waits that are not by design. Threads of one name are one cause. A timer that
/// expired is the cause only if nothing else has a share that is shown.
pub(super) fn main_cause(budget: &Budget) -> Option<MainCause<'_>> {
    let what = |segment: &PathSegment| {
        if segment.depth > 1 { path::what_in_whose_wait(segment) } else { path::what(segment) }
    };
    let waits = budget.waits.iter().filter(|waits| !waits.is_by_design()).chain([&budget.ready]);
    // Time in each kind of waits, and the cause with the threads' TIDs.
    type Sums<'a> = (Vec<(u64, &'a Waits)>, BTreeSet<String>);
    let mut causes: BTreeMap<(bool, String), Sums<'_>> = BTreeMap::new();
    for (waits, (outer, segment)) in
        waits.flat_map(|waits| path::segments_of_waits(&waits.path).map(move |part| (waits, part)))
    {
        if segment.kind == CauseKind::Unknown || segment.who == OTHERS {
            continue;
        }
        let object = path::object_instead(segment, outer);
        let is_timer = segment.kind == CauseKind::Timer && !segment.gave_up();
        let is_timer = is_timer && object.is_none_or(|object| !object.is_owed());
        let called =
            |segment: &PathSegment| object.map_or_else(|| what(segment), |object| format!("it waited for {object}"));
        let by_name = called(&segment.clone().with_threads(&ActorName::by_name));
        let (sums, of_threads) = causes.entry((!is_timer, by_name)).or_default();
        match sums.last_mut().filter(|(_, last)| std::ptr::eq(*last, waits)) {
            Some((ns, _)) => *ns += segment.ns,
            None => sums.push((segment.ns, waits)),
        }
        of_threads.insert(called(segment));
    }
    let is_shown = |ns: u64| percent(ns, budget) >= SHOWN_PERCENT;
    let whole = |sums: &[(u64, &Waits)]| sums.iter().map(|(ns, _)| ns).sum::<u64>();
    let longest = causes.into_iter().max_by_key(|((is_no_timer, what), (sums, _))| {
        let ns = whole(sums);
        (*is_no_timer && is_shown(ns), ns, Reverse(what.clone()))
    });
    longest.and_then(|((_, by_name), (sums, of_threads))| {
        let what = of_threads.first().filter(|_| of_threads.len() == 1).cloned().unwrap_or(by_name);
        let (_, waits) = *sums.iter().max_by_key(|(ns, _)| *ns)?;
        Some(MainCause { ns: whole(&sums), what, waits })
    })
}
