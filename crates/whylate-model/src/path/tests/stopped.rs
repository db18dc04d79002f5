// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stopped threads: the thread that resumed them is named, and not its activity.

use std::collections::BTreeMap;

use super::super::budget::{EndedBy, OutsideState, budget};
use super::*;
use crate::path::ThreadRecords;

/// Thread 1 is stopped from 10 to 30 ms, and thread 2 resumes it; the kernel reports the stop as `exit`.
fn stopped(exit: SwitchOut) -> Scenario {
    let mut scenario = Scenario::new(2);
    scenario.preempted(0, 0, 1).preempted(0, 1, 2);
    scenario.switch(10, 0, exit, 0).wakes(30, 1, 1).preempted(30, 0, 1);
    scenario
}

fn stop(stop: Stop) -> SwitchOut {
    SwitchOut::Blocked(Blocked { syscall: Some(230), stop: Some(stop), ..Blocked::default() })
}

#[test]
fn stopped_time_is_attributed_to_resuming_thread() {
    for what in [Stop::Signal, Stop::Tracer, Stop::Freezer] {
        let path = path_of(stopped(stop(what)).past(40), asked(1, 5, 35));
        let parts = path.segments.iter().map(|part| (in_ms(part.ns), part.kind, part.who.to_string()));
        let segments: Vec<_> = parts.filter(|(ms, ..)| *ms > 0).collect();
        let expected =
            [(5, CauseKind::Running, "t1:1"), (20, CauseKind::Stopped, "t2:2"), (5, CauseKind::Running, "t1:1")];
        assert_eq!(segments, expected.map(|(ms, kind, who)| (ms, kind, who.to_owned())));
        let part = &path.segments[1];
        assert_eq!((part.via.as_deref(), part.stop), (Some(what.words()), Some(what)));
        assert_eq!(part.waiter_name(), "t1:1");
        assert!(path.is_held_up(20 * MS, false));
    }
}

#[test]
fn activity_of_resuming_thread_is_not_followed() {
    // Thread 2 sleeps during the stop, as a shell does that stops a process for a while.
    let mut history = Scenario::new(2);
    history.preempted(0, 0, 1).preempted(0, 1, 2);
    history.switch(10, 0, stop(Stop::Signal), 0).sleeps(11, 1, 0);
    history.at(29, 1, Event::Irq(Name::new("timer"))).at(29, 1, Event::TimerExpires(TimerKind::Other)).wakes(29, 1, 2);
    history.at(29, 1, Event::IrqEnds).preempted(29, 1, 2).wakes(30, 1, 1).preempted(30, 0, 1);
    let segments = segments_of(history.past(40), asked(1, 10, 30));
    assert_eq!(segments, [segment(20, CauseKind::Stopped, "t2:2", 1)]);
}

#[test]
fn waiter_for_stopped_thread_sees_resuming_thread() {
    let mut history = Scenario::new(2);
    // Thread 3 waits for thread 1, which is stopped from 10 to 30 ms.
    history.preempted(0, 0, 3).preempted(0, 1, 2).sleeps(5, 0, 1);
    history.switch(10, 0, stop(Stop::Signal), 0).wakes(30, 1, 1).preempted(30, 0, 1);
    history.wakes(35, 0, 3).sleeps(35, 0, 3);
    let segments = segments_of(history.past(40), asked(3, 5, 35));
    let expected = [
        segment(5, CauseKind::Running, "t1:1", 1),
        segment(20, CauseKind::Stopped, "t2:2", 2),
        segment(5, CauseKind::Running, "t1:1", 1),
    ];
    assert_eq!(segments, expected);
}

#[test]
fn stopped_thread_is_no_own_sleep() {
    let budget_of = |history: &mut Scenario, known: OutsideState| {
        let of = |tid| Query { tid, from_ns: 1, to_ns: 1 + 100 * MS, is_wait: false, is_command: false };
        budget(
            &mut history.past(100),
            &[of(1)],
            &BTreeMap::from([(1, known)]),
            &(),
            &mut Plain,
            &ThreadRecords::default(),
        )
    };
    let napper =
        OutsideState { name: name(1), waits_in: Some("clock_nanosleep".to_owned()), ..OutsideState::default() };
    // The thread has not run since before the start of the span.
    let asleep = budget_of(&mut Scenario::new(1), napper.clone());
    assert_eq!((in_ms(asleep.own_sleep_ns), asleep.waits.len()), (100, 0));
    let tracer = Some((7, Name::new("gdb")));
    for (stop, who) in [(Stop::Signal, "signal"), (Stop::Freezer, "freezer"), (Stop::Tracer, "gdb:7")] {
        let seen = budget_of(&mut Scenario::new(1), OutsideState { stop: Some(stop), tracer, ..napper.clone() });
        assert_eq!((seen.own_sleep_ns, seen.waits.len()), (0, 1), "{stop:?}");
        let waits = &seen.waits[0];
        let wait = (waits.via.as_str(), waits.ended_by, in_ms(waits.ns));
        assert_eq!(wait, (stop.words(), Some(EndedBy::NotOver), 100));
        let part = &waits.path[0];
        assert_eq!((part.kind, &*part.who.to_string(), part.stop), (CauseKind::Stopped, who, Some(stop)));
    }
    // The thread was stopped and resumed within the span: the thread that resumed it is named.
    let mut history = stopped(stop(Stop::Signal));
    let seen = budget_of(&mut history, OutsideState { name: name(1), ..OutsideState::default() });
    let waits = seen.waits.iter().find(|waits| waits.via == Stop::Signal.words()).expect("it was stopped");
    let part = &waits.path[0];
    assert_eq!((in_ms(part.ns), part.kind, &*part.who.to_string()), (20, CauseKind::Stopped, "t2:2"));
    assert_eq!((seen.own_sleep_ns, waits.ended_by, part.stop), (0, Some(EndedBy::Others), Some(Stop::Signal)));
}

/// Events at the same time are nanoseconds apart.
fn in_ms(ns: u64) -> u64 {
    (ns + MS / 2) / MS
}
