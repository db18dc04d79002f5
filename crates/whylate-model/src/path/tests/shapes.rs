// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shapes from the tests of other critical-path tools, and programs with a path that follows from their sleeps.

use super::*;
use CauseKind::{Interrupt, Running, Timer, Work};

/// Threads 1, 2 and 3 run on CPUs 0, 1 and 2; times are in milliseconds.
struct Program(Scenario);

/// Events at the same time are nanoseconds apart: ends the query after the last of them.
fn up_to(asked: Query) -> Query {
    Query { to_ns: asked.to_ns + 1_000, ..asked }
}

impl Program {
    fn new() -> Self {
        let mut scenario = Scenario::new(4);
        for tid in 1..=3 {
            scenario.preempted(0, tid as usize - 1, tid);
        }
        Program(scenario)
    }

    fn waits(&mut self, ms: u64, tid: u32) -> &mut Self {
        self.0.sleeps(ms, tid as usize - 1, 0);
        self
    }

    /// A running thread wakes another one.
    fn wakes(&mut self, ms: u64, by: u32, tid: u32) -> &mut Self {
        self.0.wakes(ms, by as usize - 1, tid).preempted(ms, tid as usize - 1, tid);
        self
    }

    /// An interrupt on the fourth CPU, which is idle, wakes the thread.
    fn interrupt(&mut self, ms: u64, events: &[Event], tid: u32) -> &mut Self {
        events.iter().for_each(|&event| {
            self.0.at(ms, 3, event);
        });
        self.0.wakes(ms, 3, tid);
        if !events.is_empty() {
            self.0.at(ms, 3, Event::IrqEnds);
        }
        self.0.preempted(ms, tid as usize - 1, tid);
        self
    }

    fn timer(&mut self, ms: u64, tid: u32) -> &mut Self {
        self.interrupt(ms, &[Event::Irq(Name::new("local_timer")), Event::TimerExpires(TimerKind::Other)], tid)
    }

    fn wait(&mut self, tid: u32, from_ms: u64, to_ms: u64) -> Vec<(u64, CauseKind, String, u32)> {
        segments_of(self.0.past(to_ms + 1), up_to(asked(tid, from_ms, to_ms)))
    }

    /// Returns the path of thread 1; all threads belong to its command.
    fn command(&mut self, to_ms: u64) -> Vec<(u64, CauseKind, String, u32)> {
        let mut past = self.0.past(to_ms + 1);
        past.cpus.iter_mut().flatten().for_each(|slice| *slice = slice.marked(|_, _| true));
        segments_of(past, Query { is_command: true, ..up_to(asked(1, 0, to_ms)) })
    }
}

/// What a thread sends over loopback is received in a softirq nested on it.
#[test]
fn loopback_waker_of_command_is_followed_as_member() {
    let sent = [Event::SoftirqRaised(3), Event::Softirq(3)];
    let mut program = Program::new();
    program.waits(2, 1);
    sent.iter().for_each(|&event| {
        program.0.at(6, 1, event);
    });
    program.0.wakes(6, 1, 1).at(6, 1, Event::SoftirqEnds).preempted(6, 0, 1);
    // Before its switch-out, the path is its waker's.
    assert_eq!(program.command(8), [segment(6, Running, "t2:2", 0), segment(2, Running, "t1:1", 0)]);
}

#[test]
fn work_item_leads_to_queuer_not_to_workers_waker() {
    let mut program = Program::new();
    program.0.at(1, 2, Event::Work(Some(8), 80));
    program.waits(2, 1).0.at(4, 1, Event::Queued(9, None)).at(6, 2, Event::WorkEnds);
    program.0.at(6, 2, Event::Work(Some(9), 90));
    program.wakes(9, 3, 1);
    let expected = [segment(2, Running, "t2:2", 1), segment(2, Work, "handler80", 1), segment(3, Work, "handler90", 1)];
    assert_eq!(program.wait(1, 2, 9), expected);
    // The queuer slept until it queued the item, and the worker is woken for it.
    let mut program = Program::new();
    program.waits(1, 3).waits(2, 2).waits(3, 1).timer(5, 2);
    program.0.at(7, 1, Event::Queued(9, None));
    program.wakes(7, 2, 3).0.at(7, 2, Event::Work(Some(9), 90));
    let expected = [segment(2, Timer, "timer", 2), segment(2, Running, "t2:2", 1), segment(2, Work, "handler90", 1)];
    assert_eq!(program.wakes(9, 3, 1).wait(1, 3, 9), expected);
    // A timer queued the item.
    let mut program = Program::new();
    program.0.at(1, 2, Event::Work(Some(8), 80));
    program.waits(3, 1).0.at(5, 3, Event::Irq(Name::new("local_timer"))).at(
        5,
        3,
        Event::TimerExpires(TimerKind::Other),
    );
    program.0.at(5, 3, Event::Queued(7, None)).at(5, 3, Event::IrqEnds);
    program.0.at(6, 2, Event::WorkEnds).at(6, 2, Event::Work(Some(7), 70));
    let expected = [segment(2, Timer, "timer", 2), segment(1, Work, "handler80", 1), segment(3, Work, "handler70", 1)];
    assert_eq!(program.wakes(9, 3, 1).wait(1, 3, 9), expected);
}

/// A worker that sleeps in an item has another worker woken for the next. The wait of that one goes back to before its
/// item was queued, whichever thread queued the items in between.
#[test]
fn nested_work_item_path_ends_at_outer_queuer() {
    let mut program = Program::new();
    // Worker 4 is idle. Worker 3 starts late on an item that was queued long ago.
    program.0.preempted(0, 3, 4).sleeps(1, 3, 0).at(1, 1, Event::Queued(8, None));
    program.waits(2, 1).0.at(4, 1, Event::Queued(9, None)).at(5, 2, Event::Work(Some(8), 80));
    program.0.wakes(7, 2, 4).preempted(7, 3, 4).at(7, 3, Event::Work(Some(9), 90));
    program.0.wakes(9, 3, 1).preempted(9, 0, 1);
    let expected = [
        segment(2, Running, "t2:2", 1),
        segment(1, Running, "t3:3", 2),
        segment(2, Work, "handler80", 2),
        segment(2, Work, "handler90", 1),
    ];
    assert_eq!(program.wait(1, 2, 9), expected);
}

/// The same timer may have queued an item, and have woken its worker within the item before.
#[test]
fn worker_asleep_in_item_is_not_woken_for_next_item() {
    let mut program = Program::new();
    let timer = |program: &mut Program, ms, event: Event| {
        program.0.at(ms, 3, Event::Irq(Name::new("local_timer"))).at(ms, 3, Event::TimerExpires(TimerKind::Other));
        program.0.at(ms, 3, event).at(ms, 3, Event::IrqEnds);
    };
    program.0.at(1, 2, Event::Work(Some(8), 80));
    program.waits(2, 1);
    timer(&mut program, 4, Event::Queued(9, None));
    program.waits(5, 3);
    timer(&mut program, 6, Event::Waking(3));
    // As in an ordered workqueue, the item continues before the next one starts.
    program.0.preempted(6, 2, 3).at(8, 2, Event::Work(Some(9), 90));
    let expected = [
        segment(2, Timer, "timer", 2),
        segment(1, Work, "handler80", 1),
        segment(1, Timer, "timer", 2),
        segment(2, Work, "handler80", 1),
        segment(1, Work, "handler90", 1),
    ];
    assert_eq!(program.wakes(9, 3, 1).wait(1, 2, 9), expected);
}

/// The end of a wait is the waiter's own, wherever the queuer of an item was.
#[test]
fn queuer_that_waits_for_its_item_is_not_followed_before_its_wait() {
    let mut program = Program::new();
    program.0.at(1, 2, Event::Work(Some(8), 80)).at(2, 0, Event::Queued(9, None));
    program.waits(3, 1).0.at(5, 2, Event::WorkEnds).at(5, 2, Event::Work(Some(9), 90));
    let expected = [
        segment(3, Running, "t1:1", 0),
        segment(2, Work, "handler80", 1),
        segment(2, Work, "handler90", 1),
        segment(1, Running, "t1:1", 0),
    ];
    assert_eq!(program.wakes(7, 3, 1).wait(1, 0, 8), expected);
}

#[test]
fn thread_woken_on_idle_cpu_without_event_was_woken_by_interrupt() {
    let mut program = Program::new();
    program.waits(2, 1).interrupt(5, &[], 1);
    assert_eq!(program.wait(1, 2, 5), [segment(3, Interrupt, "interrupt", 1)]);
}

#[test]
fn nested_sleeps_are_each_reported() {
    // 3 sleeps for 400 ms, 2 for 200 and then waits for 3, 1 for 100 and then waits for 2; all from the beginning.
    let mut program = Program::new();
    program.waits(0, 1).waits(0, 2).waits(0, 3).timer(100, 1).waits(100, 1).timer(200, 2).waits(200, 2);
    program.timer(400, 3).wakes(400, 3, 2).wakes(400, 2, 1);
    let sleeps = |parts: [(u64, u32); 2]| parts.map(|(ms, depth)| segment(ms, Timer, "timer", depth));
    let past = program.0.past(401);
    // A wait returns to the switch-out of its waiter.
    assert_eq!(segments_of(past.clone(), up_to(asked(1, 100, 400))), sleeps([(100, 2), (200, 3)]));
    // A command's path does not: all of it is the longest sleep.
    let mut past = past;
    past.cpus.iter_mut().flatten().for_each(|slice| *slice = slice.marked(|_, _| true));
    let command = Query { is_command: true, ..up_to(asked(1, 0, 400)) };
    assert_eq!(segments_of(past, command), [segment(400, Timer, "timer", 1)]);
}

#[test]
fn slowest_thread_of_each_barrier_round_is_the_path() {
    // In round n thread n runs for 10 ms, and the others for 2.
    let mut program = Program::new();
    for (round, slowest) in [(0, 1), (10, 2), (20, 3)] {
        let others: Vec<u32> = (1..=3).filter(|&tid| tid != slowest).collect();
        for &tid in &others {
            program.waits(round + 2, tid);
        }
        for &tid in &others {
            program.wakes(round + 10, slowest, tid);
        }
    }
    let expected: Vec<_> = (1..=3).map(|tid| segment(10, Running, &format!("t{tid}:{tid}"), 0)).collect();
    assert_eq!(program.command(30), expected);
}
