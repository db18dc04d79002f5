// SPDX-License-Identifier: MIT OR Apache-2.0
//! Budgets of timelines with known answers.

use std::collections::BTreeMap;

use super::super::budget::{Budget, EndedBy, OutsideState, budget};
use super::super::history::{Name, Request};
use super::*;
use crate::path::ThreadRecords;

/// Threads 1, 2 and 4 are a server, 3 is its client; all are blocked at the start.
fn of_a_server() -> Budget {
    let mut scenario = Scenario::new(1);
    scenario.preempted(10, 0, 3).wakes(20, 0, 1).sleeps(20, 0, 1);
    scenario.wakes(30, 0, 2).sleeps(30, 0, 2).wakes(40, 0, 1).sleeps(40, 0, 1).sleeps(50, 0, 0);
    let mut past = scenario.past(100);
    let of = |tid| Query { tid, from_ns: 1, to_ns: 1 + 100 * MS, is_wait: false, is_command: false };
    let known = |tid, waits_in: &str| {
        (
            tid,
            OutsideState { name: Name::new("server"), waits_in: Some(waits_in.to_owned()), ..OutsideState::default() },
        )
    };
    let known = BTreeMap::from([known(1, "poll"), known(4, "accept")]);
    budget(&mut past, &[of(1), of(2), of(4)], &known, &(), &mut Plain, &ThreadRecords::default())
}

/// Events at the same time are nanoseconds apart.
fn in_ms(ns: u64) -> u64 {
    (ns + MS / 2) / MS
}

#[test]
fn waits_are_grouped_by_waker() {
    let seen = of_a_server();
    let mut waits: Vec<_> =
        seen.waits.iter().map(|waits| (waits.via.as_str(), waits.ended_by, in_ms(waits.ns))).collect();
    waits.sort_by_key(|&(via, _, ms)| (via, ms));
    let expected = [
        ("accept", Some(EndedBy::NotOver), 100),
        ("call202", Some(EndedBy::Own), 10),
        ("call202", Some(EndedBy::NotOver), 110),
        // What the thread waits in is known from the start of the span, or not.
        ("poll", Some(EndedBy::Others), 20),
        ("waits that began earlier", Some(EndedBy::Own), 30),
    ];
    assert_eq!(waits, expected);
    assert_eq!((in_ms(seen.on_cpu_ns), in_ms(seen.total_ns), seen.threads), (30, 300, 3));
}

#[test]
fn thread_that_never_ran_has_current_name() {
    let seen = of_a_server();
    let accept = seen.waits.iter().find(|waits| waits.via == "accept").expect("it waits all the time");
    let segment = &accept.path[0];
    assert_eq!((segment.waiter_name(), segment.via.as_deref()), (ActorName::thread("server", 4), Some("accept")));
    // Waits that are not over have no path.
    assert_eq!(seen.longest.len(), 3);
}

#[test]
fn names_waits_outside_calls_that_began_earlier() {
    let via = |known: OutsideState| {
        let mut scenario = Scenario::new(1);
        scenario.preempted(10, 0, 3).wakes(20, 0, 1).sleeps(20, 0, 1).sleeps(50, 0, 0);
        let asked = Query { tid: 1, from_ns: 1, to_ns: 1 + 30 * MS, is_wait: false, is_command: false };
        let seen = budget(
            &mut scenario.past(100),
            &[asked],
            &BTreeMap::from([(1, known)]),
            &(),
            &mut Plain,
            &ThreadRecords::default(),
        );
        seen.waits.into_iter().map(|waits| waits.via).collect::<Vec<_>>()
    };
    assert_eq!(via(OutsideState { is_kernel: true, ..OutsideState::default() }), ["waits of kernel threads"]);
    assert_eq!(via(OutsideState { is_outside_calls: true, ..OutsideState::default() }), ["waits outside system calls"]);
    assert_eq!(via(OutsideState::default()), ["waits that began earlier"]);
}

/// Page faults served by a thread that waits itself: each wait takes 30 us.
#[test]
fn short_nested_waits_keep_parts_by_actor() {
    const US: u64 = 1_000;
    let blocked = SwitchOut::Blocked(Blocked { is_uninterruptible: true, in_iowait: true, ..Blocked::default() });
    let slice = |from_us: u64, to_us: u64, tid: u32, waker: Option<(u32, u32)>| {
        let start_ns = 1 + from_us * US;
        let woken = |(by, cpu)| SwitchIn::Woken { at_ns: start_ns - US, by: Waker::Thread(by), cpu };
        RunSlice {
            start_ns,
            end_ns: 1 + to_us * US,
            holder: if tid == 0 { Holder::Idle } else { Holder::Thread(tid) },
            name: name(tid),
            entry: waker.map_or(SwitchIn::GoesOn, woken),
            exit: if tid == 0 { SwitchOut::GoesOn } else { blocked },
            ..RunSlice::default()
        }
    };
    let (mut faults, mut serves) = (vec![slice(0, 10, 1, None)], Vec::new());
    for round in 0..100 {
        let at = |us: u64| round * 50 + us;
        faults.extend([slice(at(10), at(40), 0, None), slice(at(40), at(60), 1, Some((2, 1)))]);
        let wakes = (round > 0).then_some((1, 0));
        serves.extend([
            slice(at(10), at(15), 2, wakes),
            slice(at(15), at(20), 3, Some((2, 1))),
            slice(at(20), at(40), 2, Some((3, 1))),
            slice(at(40), at(60), 0, None),
        ]);
    }
    let mut past = Recorded { cpus: vec![faults, serves] };
    let asked = Query { tid: 1, from_ns: 1, to_ns: 1 + 5_010 * US, is_wait: false, is_command: false };
    let seen = budget(&mut past, &[asked], &BTreeMap::new(), &(), &mut Plain, &ThreadRecords::default());
    let [waits] = seen.waits.as_slice() else { panic!("{:?}", seen.waits) };
    // The wakee is switched in a microsecond later.
    assert_eq!((waits.via.as_str(), waits.ns), ("page fault", 100 * 29 * US));
    let mut parts: Vec<_> = waits.path.iter().map(|part| (part.kind, part.who.clone(), part.ns / US)).collect();
    parts.sort_unstable_by_key(|&(_, _, us)| us);
    let [two, three] = [2, 3].map(|tid| ActorName::thread(format!("t{tid}"), tid));
    let waited = (CauseKind::Thread, three.clone(), 100);
    assert_eq!(parts, [waited, (CauseKind::Running, three, 400), (CauseKind::Running, two, 2_400)]);
    assert!(waits.path.iter().all(|part| part.waiter_name() == "t1:1"));
}

#[test]
fn worker_without_own_time_has_name() {
    // Thread 9 preempted the worker within an item that thread 1 waits for.
    let slice = |from_ms: u64, to_ms: u64, holder, tid, entry| {
        let (start_ns, end_ns) = (1 + from_ms * MS, 1 + to_ms * MS);
        RunSlice { start_ns, end_ns, holder, name: name(tid), entry, exit: SwitchOut::Preempted, ..RunSlice::default() }
    };
    let item = Holder::Work { tid: 2, handler: 7 };
    let woken = SwitchIn::Woken { at_ns: 1 + 60 * MS, by: Waker::Thread(2), cpu: 0 };
    let past = vec![
        slice(20, 50, Holder::Thread(9), 9, SwitchIn::Unseen),
        slice(50, 60, item, 2, SwitchIn::Preempted { at_ns: 1 + 20 * MS }),
        slice(60, 70, Holder::Thread(1), 1, woken),
    ];
    let path = path_of(Recorded { cpus: vec![past] }, asked(1, 30, 60));
    let segments: Vec<_> = path.segments.iter().map(|part| (part.ready.clone(), part.who.clone())).collect();
    let [two, nine] = [2, 9].map(|tid| ActorName::thread(format!("t{tid}"), tid));
    assert!(segments.contains(&(Some(two), nine)) && segments.contains(&(None, "handler7".into())), "{segments:?}");
}

#[test]
fn short_disk_waits_are_grouped_by_operation() {
    const US: u64 = 1_000;
    let thread = |at_us: u64, entry| RunSlice {
        start_ns: 1 + at_us * US,
        end_ns: 1 + (at_us + 10) * US,
        holder: Holder::Thread(5),
        name: name(5),
        entry,
        exit: SwitchOut::Blocked(Blocked { is_uninterruptible: true, in_iowait: true, ..Blocked::default() }),
        ..RunSlice::default()
    };
    let idle = |at_us: u64| RunSlice {
        start_ns: 1 + at_us * US,
        end_ns: 1 + (at_us + 40) * US,
        holder: Holder::Idle,
        ..RunSlice::default()
    };
    // The thread faults 100 times, and waits 40 us for a page each time.
    let slices = (0..100_u64).flat_map(|round| {
        let at_us = round * 50;
        let request = Request {
            queued_ns: 1 + at_us.saturating_sub(40) * US,
            issued_ns: 1 + at_us.saturating_sub(39) * US,
            device: 7,
            submitter: 5,
            ..Default::default()
        };
        let woken = SwitchIn::Woken { at_ns: 1 + at_us * US, by: Waker::Disk(request), cpu: 0 };
        [thread(at_us, if round == 0 { SwitchIn::GoesOn } else { woken }), idle(at_us + 10)]
    });
    let mut past = Recorded { cpus: vec![slices.collect()] };
    let asked = Query { tid: 5, from_ns: 1, to_ns: 1 + 4_955 * US, is_wait: false, is_command: false };
    let seen = budget(&mut past, &[asked], &BTreeMap::new(), &(), &mut Plain, &ThreadRecords::default());
    let [waits] = seen.waits.as_slice() else { panic!("{:?}", seen.waits) };
    assert_eq!((waits.via.as_str(), waits.ended_by, waits.ns), ("page fault", Some(EndedBy::Disk), 99 * 40 * US));
    assert!(waits.path.iter().all(|part| part.who == "disk7 (read by t5:5)"), "{waits:?}");
    let mut parts: Vec<_> = waits.path.iter().map(|part| (part.kind, part.ns / US)).collect();
    parts.sort_unstable_by_key(|&(_, us)| us);
    assert_eq!(parts, [(CauseKind::DiskQueue, 99), (CauseKind::Disk, 99 * 39)]);
}
