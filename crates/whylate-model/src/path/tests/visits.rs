// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cursors are visited as often as something can change them, and miss nothing.

use std::collections::BTreeMap;

use super::super::cursor::Cursor;
use super::super::cursors::Bound;
use super::super::history::CpuTimeline;
use super::super::rewind::Rewind;
use super::super::walk::{SLACK_NS, walk_within};
use super::super::{Actor, Finding, Limits, Segment};
use super::*;

/// Limits a thread now and then.
struct SomeLimits;

impl Limits for SomeLimits {
    fn next_allowed(&self, tid: u32, running_ns: u64) -> Option<(u64, u32)> {
        running_ns.is_multiple_of(5).then(|| (running_ns.saturating_sub(u64::from(tid) * 7), tid))
    }
}

fn any_asked() -> impl Strategy<Value = Query> {
    (1_u32..6, 0_u64..450, 0_u64..450, any::<bool>(), any::<bool>())
        .prop_map(|(tid, from_ns, to_ns, is_wait, is_command)| Query { tid, from_ns, to_ns, is_wait, is_command })
}

/// Returns the findings of each walk, in order; walks are independent of each other.
fn of_each(asked: &[Query], walk: impl FnOnce(&mut dyn FnMut(usize, Finding))) -> Vec<Vec<Finding>> {
    let mut found = vec![Vec::new(); asked.len()];
    walk(&mut |index, finding| found[index].push(finding));
    found
}

/// Walks without an index of cursors and without sums: each change is shown to each cursor.
fn walk_unindexed(
    past: &mut dyn CpuTimeline,
    asked: &[Query],
    limits: &dyn Limits,
    found: &mut dyn FnMut(usize, Finding),
) {
    let mut rewind = Rewind::new(past, false);
    let mut cursors: Vec<Cursor> = asked.iter().map(|&query| Cursor::new(query)).collect();
    loop {
        let reached_ns = rewind.next_ns().unwrap_or(0);
        let change = rewind.next();
        for (index, cursor) in cursors.iter_mut().enumerate() {
            if asked[index].to_ns.saturating_add(SLACK_NS) >= reached_ns && !cursor.is_done() {
                cursor.go_back(&rewind, reached_ns, change.as_ref(), limits, &mut |finding| found(index, finding));
            }
        }
        let Some(change) = change else { return };
        rewind.pass(&change);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn indexed_walk_matches_unindexed_walk(
        cpus in prop::collection::vec(prop::collection::vec(any_slice(), 0..40), 1..4),
        asked in prop::collection::vec(any_asked(), 0..12),
        is_sorted in any::<bool>(),
        is_limited in any::<bool>(),
    ) {
        let mut past = Recorded { cpus };
        if is_sorted {
            past.cpus.iter_mut().for_each(|cpu| cpu.sort_by_key(|slice| (slice.start_ns, slice.end_ns)));
        }
        let limits: &dyn Limits = if is_limited { &SomeLimits } else { &() };
        let now = of_each(&asked, |found| walk(&mut past.clone(), &asked, limits, found));
        let before = of_each(&asked, |found| walk_unindexed(&mut past.clone(), &asked, limits, found));
        for (now, before) in now.into_iter().zip(before) {
            // The indexed walk reports a wait for a CPU at its end, after what else was found during it.
            let is_asleep = |finding: &Finding| matches!(finding, Finding::Asleep { .. } | Finding::Preempted { .. });
            let apart = |all: &[Finding]| all.iter().copied().partition::<Vec<Finding>, _>(is_asleep);
            prop_assert_eq!(apart(&now), apart(&before));
            let path = |all: Vec<Finding>| {
                let mut found = PathBuilder::default();
                all.into_iter().for_each(|finding| found.add(finding));
                found.finish(&mut Plain)
            };
            prop_assert_eq!(path(now), path(before));
        }
    }
}

/// Threads that run on one CPU in turn, 10 ns each, with the given switch-in and switch-out.
fn in_turn(turns: u64, slice: impl Fn(u64) -> (u32, SwitchIn, SwitchOut)) -> Recorded {
    let of = |turn: u64| {
        let (tid, entry, exit) = slice(turn);
        let (start_ns, end_ns) = (1 + turn * 10, 11 + turn * 10);
        RunSlice { start_ns, end_ns, holder: Holder::Thread(tid), name: name(tid), entry, exit, ..RunSlice::default() }
    };
    Recorded { cpus: vec![(0..turns).map(of).collect()] }
}

fn over_all(past: &Recorded, tids: std::ops::RangeInclusive<u32>) -> Vec<Query> {
    let to_ns = past.cpus.iter().flatten().map(|slice| slice.end_ns).max().unwrap_or(0);
    tids.map(|tid| Query { tid, from_ns: 1, to_ns, is_wait: false, is_command: false }).collect()
}

/// Returns the number of visits, and the findings.
fn visits(past: &Recorded, asked: &[Query], bound: Bound) -> (u64, Vec<Vec<Finding>>) {
    let mut visits = 0;
    let found = of_each(asked, |found| visits = walk_within(&mut past.clone(), asked, &(), bound, found));
    (visits, found)
}

const ASLEEP: SwitchOut = SwitchOut::Blocked(Blocked {
    syscall: Some(230),
    is_uninterruptible: false,
    in_iowait: false,
    is_kernel: false,
    stop: None,
});

#[test]
fn sleeping_threads_are_not_visited_for_others() {
    // 1 and 2 take turns, and 3 to 1,000 sleep all the time.
    let past = in_turn(20_000, |turn| {
        (1 + (turn % 2) as u32, SwitchIn::Preempted { at_ns: (turn * 10).saturating_sub(9) }, SwitchOut::Preempted)
    });
    let (visits, _) = visits(&past, &over_all(&past, 3..=1_000), Bound::None);
    assert!(visits <= 5 * 1_000, "{visits} visits");
}

#[test]
fn visits_grow_with_threads_own_switches() {
    // Each of 1,000 threads runs 20 times, woken by a timer just before.
    let woken = |turn: u64| SwitchIn::Woken { at_ns: turn * 10 - 3, by: Waker::Timer(TimerKind::default()), cpu: 0 };
    let past = in_turn(20_000, |turn| {
        (1 + (turn % 1_000) as u32, if turn == 0 { SwitchIn::Unseen } else { woken(turn) }, ASLEEP)
    });
    let (visits, _) = visits(&past, &over_all(&past, 1..=1_000), Bound::None);
    assert!(visits <= 5 * (20_000 + 1_000), "{visits} visits");
}

#[test]
fn runnable_threads_are_visited_once_per_run_slice() {
    // 700 threads that never sleep: between two turns of each lie those of all others.
    let lost = |turn: u64| SwitchIn::Preempted { at_ns: (1 + turn * 10).saturating_sub(6_990) };
    let past = in_turn(14_000, |turn| (1 + (turn % 700) as u32, lost(turn), SwitchOut::Preempted));
    let asked = over_all(&past, 1..=700);
    let (visits, exact) = visits(&past, &asked, Bound::None);
    assert!(visits <= 5 * (14_000 + 700), "{visits} visits");
    // With sums, they need no more findings either.
    let (_, sums) = self::visits(&past, &asked, Bound::OF_SUMS);
    let all = |found: &[Vec<Finding>]| found.iter().map(Vec::len).sum::<usize>();
    assert!(all(&exact) > 4_800_000 && all(&sums) <= 2_500_000, "{} and {}", all(&exact), all(&sums));
}

/// 1 wakes 2 to `threads` in turn, each of which sleeps until its next turn.
fn of_one_waker(threads: u64, turns: u64) -> Recorded {
    in_turn(turns, |turn| match turn % 2 {
        0 => (1, SwitchIn::Preempted { at_ns: (1 + turn * 10).saturating_sub(10) }, SwitchOut::Preempted),
        _ => {
            let entry = SwitchIn::Woken { at_ns: turn * 10 - 3, by: Waker::Thread(1), cpu: 0 };
            (2 + (turn / 2 % (threads - 1)) as u32, entry, ASLEEP)
        }
    })
}

#[test]
fn work_bound_reports_unfollowed_waits() {
    let past = of_one_waker(250, 10_000);
    let asked = over_all(&past, 2..=250);
    let (all, exact) = visits(&past, &asked, Bound::None);
    let bound = Bound::Work { of_change: 8, more: 1_000 };
    let (some, found) = visits(&past, &asked, bound);
    assert!(all > 1_200_000 && some < 250_000, "{all} and {some} visits");
    let (mut not_followed, mut followed) = (0, 0);
    for (found, exact) in found.iter().zip(&exact) {
        not_followed += found.iter().filter(|finding| **finding == Finding::NotFollowed).count();
        let total = |found: &[Finding]| segments(found).map(|segment| segment.to_ns - segment.from_ns).sum::<u64>();
        assert_eq!(total(found), total(exact));
        // The run slices of each thread itself are all reported.
        let is_own = |finding: &&Finding| matches!(finding, Finding::Segment(segment) if segment.hop.is_none());
        let own = |all: &[Finding]| all.iter().filter(is_own).copied().collect::<Vec<Finding>>();
        assert_eq!(own(found), own(exact));
        let is_of_waker = |finding: &&Finding| matches!(finding, Finding::Segment(segment) if segment.kind == CauseKind::Running && segment.hop.is_some());
        followed += found.iter().filter(is_of_waker).count();
    }
    assert!(not_followed > 100 && followed > 1_000, "{not_followed} waits, {followed} parts");
}

fn segments(found: &[Finding]) -> impl Iterator<Item = &Segment> {
    found.iter().filter_map(|finding| if let Finding::Segment(segment) = finding { Some(segment) } else { None })
}

/// Kind, actor, runnable thread and wait of segments.
type What = (CauseKind, Actor, Option<u32>, Option<u32>);

/// Returns the time by kind and thread name.
fn by_name(found: &[Finding]) -> BTreeMap<What, u64> {
    let mut sums = BTreeMap::new();
    for segment in segments(found) {
        let who = match segment.who {
            Actor::Thread { name, is_member, .. } => Actor::Program { name, is_member },
            other => other,
        };
        *sums.entry((segment.kind, who, segment.ready, segment.hop)).or_default() += segment.to_ns - segment.from_ns;
    }
    sums
}

/// A turn of a thread on a busy CPU: its duration, and the time since the thread was preempted or woken.
type Turn = (u32, u64, Option<(u64, bool)>);

/// CPUs on which threads take turns, after long waits for a CPU.
fn crowded(cpus: &[Vec<Turn>], names: u32) -> Recorded {
    let of_cpu = |turns: &Vec<Turn>| {
        let mut end_ns = 1;
        let of = |&(tid, ns, waited_ns): &Turn| {
            let start_ns = end_ns;
            end_ns += ns;
            let (holder, steal_ns) = match tid {
                0 => (Holder::Idle, 0),
                100.. => (Holder::Irq { late_ns: ns / 2 }, 0),
                tid => (Holder::Thread(tid), ns / 7),
            };
            let entry = match waited_ns.map(|(ns, is_woken)| (start_ns.saturating_sub(ns), is_woken)) {
                None => SwitchIn::GoesOn,
                Some((at_ns, false)) => SwitchIn::Preempted { at_ns },
                Some((at_ns, true)) => SwitchIn::Woken { at_ns, by: Waker::Timer(TimerKind::default()), cpu: 0 },
            };
            let name = name(tid % names);
            RunSlice {
                start_ns,
                end_ns,
                holder,
                name,
                entry,
                exit: SwitchOut::Preempted,
                steal_ns,
                ..RunSlice::default()
            }
        };
        turns.iter().map(of).collect()
    };
    Recorded { cpus: cpus.iter().map(of_cpu).collect() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn summed_runqueue_waits_match_exact_ones(
        cpus in prop::collection::vec(
            prop::collection::vec((0_u32..104, 1_u64..40, prop::option::of((0_u64..30_000, any::<bool>()))), 0..1_500),
            1..3,
        ),
        tids in 1_u32..80,
        names in 1_u32..10,
        asked in prop::collection::vec((1_u32..80, 0_u64..20_000, 0_u64..40_000), 1..8),
        is_limited in any::<bool>(),
    ) {
        let cpus: Vec<Vec<Turn>> = cpus
            .into_iter()
            .map(|turns| turns.into_iter().map(|(tid, ns, waited)| (if tid < 100 { tid % tids } else { tid }, ns, waited)).collect())
            .collect();
        let past = crowded(&cpus, names);
        prop_assert_eq!(past.backwards().cpus(), cpus.len());
        let limits: &dyn Limits = if is_limited { &SomeLimits } else { &() };
        let asked: Vec<Query> = asked
            .into_iter()
            .map(|(tid, from_ns, to_ns)| Query { tid: tid % tids, from_ns, to_ns, is_wait: false, is_command: false })
            .collect();
        let bound = Bound::Work { of_change: u64::MAX >> 1, more: u64::MAX >> 1 };
        let sums = of_each(&asked, |found| {
            walk_within(&mut past.clone(), &asked, limits, bound, found);
        });
        let exact = of_each(&asked, |found| walk_unindexed(&mut past.clone(), &asked, limits, found));
        for (sums, exact) in sums.iter().zip(&exact) {
            prop_assert_eq!(by_name(sums), by_name(exact));
            let mut from_ns = None;
            for finding in sums {
                if let Finding::Segment(segment) = finding {
                    prop_assert!(from_ns.is_none_or(|from_ns| from_ns == segment.to_ns), "a gap after {segment:?}");
                    from_ns = Some(segment.from_ns);
                }
            }
        }
    }
}
