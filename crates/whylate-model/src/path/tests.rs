// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timelines with known paths, and random ones.

mod budgets;
mod forward;
mod shapes;
mod stopped;
mod visits;

use proptest::prelude::*;

use super::events::{Builder, Event};
use super::history::{Blocked, Holder, Move, Moves, Name, Operation, Recorded, RunSlice, SwitchIn, SwitchOut, Waker};
use super::timer::TimerKind;
use super::{Names, Path, PathBuilder, PathSegment, Query, walk};
use crate::wait::Stop;
use crate::{ActorName, CauseKind, Cgroup};

/// Builds a timeline in milliseconds, in which thread 5 is called `t5`.
struct Scenario {
    builder: Builder,
    running: Vec<u32>,
}

const MS: u64 = 1_000_000;

fn name(tid: u32) -> Name {
    Name::new(&format!("t{tid}"))
}

impl Scenario {
    fn new(cpus: usize) -> Self {
        let mut scenario = Scenario { builder: Builder::default(), running: vec![0; cpus] };
        for cpu in 0..cpus {
            scenario.switch(0, cpu, SwitchOut::Preempted, 0);
        }
        scenario
    }

    fn at(&mut self, ms: u64, cpu: usize, event: Event) -> &mut Self {
        self.builder.add(cpu, 1 + ms * MS, event);
        self
    }

    fn switch(&mut self, ms: u64, cpu: usize, exit: SwitchOut, to: u32) -> &mut Self {
        let from = std::mem::replace(&mut self.running[cpu], to);
        self.at(ms, cpu, Event::Switch { from, from_name: name(from), exit, to, to_name: name(to) })
    }

    /// Switches from the current thread, which blocks, to `to`.
    fn sleeps(&mut self, ms: u64, cpu: usize, to: u32) -> &mut Self {
        self.switch(ms, cpu, SwitchOut::Blocked(Blocked { syscall: Some(202), ..Blocked::default() }), to)
    }

    fn preempted(&mut self, ms: u64, cpu: usize, to: u32) -> &mut Self {
        self.switch(ms, cpu, SwitchOut::Preempted, to)
    }

    fn wakes(&mut self, ms: u64, cpu: usize, tid: u32) -> &mut Self {
        self.at(ms, cpu, Event::Waking(tid))
    }

    fn past(&mut self, ms: u64) -> Recorded {
        std::mem::take(&mut self.builder).finish(1 + ms * MS)
    }
}

struct Plain;

/// A thread that still exists when the path is built.
const PRESENT: u32 = 60;

impl Names for Plain {
    fn handler(&mut self, number: u64) -> String {
        format!("handler{number}")
    }

    fn device(&mut self, device: u32) -> String {
        format!("disk{device}")
    }

    fn thread(&mut self, tid: u32) -> Option<Name> {
        (tid == PRESENT).then(|| name(tid))
    }

    fn limit(&mut self, number: u32) -> ActorName {
        format!("limit{number}").into()
    }

    fn quota(&mut self, cgroup: u64) -> String {
        format!("quota{cgroup}")
    }

    fn cgroup(&mut self, number: u64) -> Option<Cgroup> {
        Some(Cgroup::new(&format!("/{number}")))
    }

    fn waits_in(&mut self, _tid: u32, _woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
        (blocked.syscall.map(|number| format!("call{number}")), Vec::new())
    }
}

fn path_of(past: Recorded, asked: Query) -> Path {
    let mut past = past;
    let mut found = PathBuilder::default();
    let mut begins_ns = asked.to_ns;
    walk(&mut past, &[asked], &(), &mut |_, finding| {
        if let super::Finding::Segment(segment) = finding {
            assert_eq!(segment.to_ns, begins_ns, "a gap before {finding:?}");
            begins_ns = segment.from_ns;
        }
        found.add(finding);
    });
    assert_eq!(begins_ns, asked.from_ns.min(asked.to_ns), "the beginning is missing");
    let path = found.finish(&mut Plain);
    assert_eq!(path.total_ns(), asked.to_ns.saturating_sub(asked.from_ns));
    path
}

fn asked(tid: u32, from_ms: u64, to_ms: u64) -> Query {
    Query { tid, from_ns: 1 + from_ms * MS, to_ns: 1 + to_ms * MS + 1_000, is_wait: false, is_command: false }
}

fn segments_of(past: Recorded, asked: Query) -> Vec<(u64, CauseKind, String, u32)> {
    let of = |segment: PathSegment| ((segment.ns + MS / 2) / MS, segment.kind, segment.who.to_string(), segment.depth);
    // Events at the same time are nanoseconds apart.
    path_of(past, asked).segments.into_iter().map(of).filter(|segment| segment.0 > 0).collect()
}

fn segment(ms: u64, kind: CauseKind, who: &str, depth: u32) -> (u64, CauseKind, String, u32) {
    (ms, kind, who.to_owned(), depth)
}

#[test]
fn thousands_of_threads_keep_their_names() {
    let (of_each, all) = (MS, 3_000);
    // Each thread wakes the next one just before its end.
    let slice = |number: u64| RunSlice {
        start_ns: 1 + number * of_each,
        end_ns: 1 + (number + 1) * of_each,
        holder: Holder::Thread(10 + number as u32),
        name: Name::new("cc"),
        entry: SwitchIn::Woken { at_ns: number * of_each, by: Waker::Thread(9 + number as u32), cpu: 0 },
        is_member: true,
        is_of_member: true,
        ..RunSlice::default()
    };
    let past = Recorded { cpus: vec![(0..all).map(slice).collect()] };
    let asked = Query { is_command: true, ..asked(9 + all as u32, 1, all) };
    let path = path_of(past, asked);
    let own = path.segments.iter().filter(|segment| segment.kind == CauseKind::Running && segment.is_member);
    let own_ns: u64 = own.filter(|segment| segment.who.to_string().starts_with("cc")).map(|segment| segment.ns).sum();
    assert!(path.is_folded && path.segments.len() <= 800);
    assert!(own_ns > path.total_ns() / 100 * 99, "{own_ns} of {} ns: {:?}", path.total_ns(), path.segments.last());
}

#[test]
fn unseen_parent_is_found_again() {
    let slice = |tid, from_ms, to_ms, entry| RunSlice {
        start_ns: 1 + from_ms * MS,
        end_ns: 1 + to_ms * MS,
        holder: Holder::Thread(tid),
        name: name(tid),
        entry,
        ..RunSlice::default()
    };
    let entry = SwitchIn::Woken { at_ns: 1 + 3 * MS, by: Waker::Parent(5), cpu: 0 };
    let past = Recorded { cpus: vec![vec![slice(5, 0, 2, SwitchIn::GoesOn), slice(6, 4, 8, entry)]] };
    let path = segments_of(past, asked(6, 0, 8));
    let of_parent = segment(2, CauseKind::Running, "t5:5", 0);
    let unseen = [
        segment(1, CauseKind::Unknown, "who made it was not seen", 1),
        segment(1, CauseKind::Unknown, "not recorded", 0),
    ];
    let [first, second] = unseen;
    assert_eq!(path, [of_parent, first, second, segment(4, CauseKind::Running, "t6:6", 0)]);
}

#[test]
fn events_after_query_end_are_ignored() {
    let mut history = Scenario::new(1);
    history.switch(0, 0, SwitchOut::Preempted, 5).sleeps(1, 0, 6).wakes(9, 0, 5).sleeps(9, 0, 5);
    // The thread is preempted just after the end, and switched in again at once.
    history.preempted(12, 0, 7).sleeps(12, 0, 5).sleeps(13, 0, 0);
    let asked = Query { to_ns: 12 * MS, ..asked(5, 0, 12) };
    let path = segments_of(history.past(14), asked);
    let running = |ms, who, depth| segment(ms, CauseKind::Running, who, depth);
    assert_eq!(path, [running(1, "t5:5", 0), running(8, "t6:6", 1), running(3, "t5:5", 0)]);
}

#[test]
fn looks_up_name_of_earlier_submitter() {
    for (submitter, called) in [(PRESENT, "t60:60"), (61, "thread 61")] {
        let mut history = Scenario::new(2);
        history.preempted(0, 1, submitter).at(1, 1, Event::RequestBegins(8, 77, Operation::Write)).sleeps(2, 1, 0);
        history.at(2, 1, Event::RequestIssued(8, 77, Operation::Write)).preempted(3, 0, 1).sleeps(5, 0, 0);
        history.at(9, 1, Event::Irq(Name::new("nvme"))).at(9, 1, Event::RequestDone(8, 77)).wakes(9, 1, 1);
        history.preempted(9, 0, 1);
        let path = segments_of(history.past(10), asked(1, 5, 9));
        assert_eq!(path, [segment(4, CauseKind::Disk, &format!("disk8 (write by {called})"), 1)]);
    }
}

#[test]
fn wait_for_server_follows_its_work() {
    use CauseKind::{Disk, DiskQueue, Irq, Running, Thread};
    let mut history = Scenario::new(2);
    // t1 waits for t2, which runs, waits for the disk, and then for its CPU, occupied by t3.
    history.preempted(0, 0, 1).wakes(2, 0, 2).preempted(2, 1, 2).sleeps(3, 0, 0);
    history.at(9, 1, Event::RequestBegins(8, 77, Operation::Write)).sleeps(10, 1, 0);
    history.at(11, 1, Event::RequestIssued(8, 77, Operation::Write));
    history.at(14, 1, Event::Irq(Name::new("nvme"))).at(15, 1, Event::RequestDone(8, 77)).wakes(15, 1, 2);
    history.preempted(15, 1, 2).preempted(18, 1, 3).preempted(28, 1, 2).wakes(29, 1, 1).preempted(29, 0, 1);
    let expected = [
        segment(7, Running, "t2:2", 1),
        segment(1, DiskQueue, "disk8 (write by t2:2)", 2),
        segment(4, Disk, "disk8 (write by t2:2)", 2),
        segment(3, Running, "t2:2", 1),
        segment(10, Thread, "t3:3", 1),
        segment(1, Running, "t2:2", 1),
    ];
    let past = history.past(30);
    assert_eq!(segments_of(past.clone(), asked(1, 3, 29)), expected);
    let path = path_of(past, asked(1, 3, 29));
    let of =
        |kind| path.segments.iter().find(|segment| segment.kind == kind && segment.ns > MS / 2).expect("it is there");
    assert_eq!(
        (of(Running).waiter_name().to_string(), of(Running).via.as_deref()),
        ("t1:1".to_owned(), Some("call202"))
    );
    assert_eq!(of(Thread).ready, Some(ActorName::thread("t2", 2)));
    let kinds: Vec<CauseKind> = path.causes().iter().map(|cause| cause.kind).collect();
    assert_eq!(kinds[..4], [Running, Thread, Disk, DiskQueue]);
    assert!(!kinds.contains(&Irq));
}

#[test]
fn wait_begins_at_switch_out_of_waiter() {
    let mut history = Scenario::new(2);
    history.preempted(0, 0, 1).preempted(0, 1, 2).sleeps(3, 0, 0).wakes(7, 1, 1).preempted(8, 0, 1);
    let past = history.past(9);
    // Likewise in a query that covers only a later part.
    for (from_ms, expected_ms) in [(0, (3, 5)), (4, (4, 4))] {
        let (mut past, mut found, mut began_ns) = (past.clone(), PathBuilder::default(), None);
        let asked = Query { is_wait: true, ..asked(1, from_ms, 8) };
        walk(&mut past, &[asked], &(), &mut |_, finding| {
            if let super::Finding::Asleep { hop: 0, at_ns, .. } = finding {
                began_ns = Some(at_ns);
            }
            found.add(finding);
        });
        let path = found.finish(&mut Plain);
        assert_eq!(began_ns.map(|ns| asked.to_ns - ns), Some(path.total_ns()));
        assert_eq!((began_ns.unwrap_or(0) / MS, path.total_ns() / MS), expected_ms);
    }
}

#[test]
fn wakeup_of_a_thread_that_is_about_to_sleep_ends_no_earlier_wait() {
    use CauseKind::{Running, Thread};
    let slice = |tid, from_ms, to_ms, entry, exit| RunSlice {
        start_ns: 1 + from_ms * MS,
        end_ns: 1 + to_ms * MS,
        holder: Holder::Thread(tid),
        name: name(tid),
        entry,
        exit,
        ..RunSlice::default()
    };
    let woken = |ms| SwitchIn::Woken { at_ns: 1 + ms * MS, by: Waker::Thread(2), cpu: 1 };
    let sleeps = SwitchOut::Blocked(Blocked::default());
    // t1 is woken at 6, and switched out at 7.
    let cpu = vec![
        slice(1, 0, 1, SwitchIn::GoesOn, sleeps),
        slice(3, 1, 4, SwitchIn::Unseen, SwitchOut::Preempted),
        slice(1, 4, 7, woken(3), sleeps),
        slice(3, 7, 9, SwitchIn::Unseen, SwitchOut::Preempted),
        slice(1, 9, 11, woken(6), SwitchOut::GoesOn),
    ];
    let wakers = vec![slice(2, 0, 12, SwitchIn::GoesOn, SwitchOut::GoesOn)];
    let expected = [
        segment(1, Running, "t1:1", 0),
        segment(2, Running, "t2:2", 1),
        segment(1, Thread, "t3:3", 0),
        segment(3, Running, "t1:1", 0),
        segment(2, Thread, "t3:3", 0),
        segment(2, Running, "t1:1", 0),
    ];
    assert_eq!(segments_of(Recorded { cpus: vec![cpu, wakers] }, asked(1, 0, 11)), expected);
}

#[test]
fn wait_may_end_before_recorded_switch_in() {
    let mut history = Scenario::new(2);
    history.preempted(0, 0, 1).preempted(0, 1, 2).sleeps(3, 0, 3).wakes(7, 1, 1).preempted(13, 0, 1);
    let expected = [segment(4, CauseKind::Running, "t2:2", 1), segment(1, CauseKind::Thread, "t3:3", 0)];
    assert_eq!(segments_of(history.past(14), asked(1, 3, 8)), expected);
}

#[test]
fn later_wait_of_thread_is_ignored() {
    // The thread is preempted right after the end of the query.
    let mut history = Scenario::new(1);
    history.preempted(0, 0, 1).preempted(5, 0, 2).preempted(6, 0, 1);
    let asked = Query { to_ns: 1 + 5 * MS - MS / 2, ..asked(1, 1, 5) };
    assert_eq!(segments_of(history.past(7), asked), [segment(4, CauseKind::Running, "t1:1", 0)]);
}

#[test]
fn interrupt_is_not_attributed_to_interrupted_thread() {
    use CauseKind::{Disk, Interrupt, Network, Rcu, Timer};
    // t9 is running when the interrupt arrives that wakes t1.
    let woken_in = |events: &[Event]| {
        let mut history = Scenario::new(2);
        history.preempted(0, 0, 1).preempted(0, 1, 9).at(1, 0, Event::RequestIssued(8, 5, Operation::Read));
        history.sleeps(1, 0, 0);
        for &event in events {
            history.at(6, 1, event);
        }
        history.wakes(6, 1, 1).preempted(7, 0, 1);
        let segments = segments_of(history.past(8), asked(1, 1, 7));
        assert_eq!((segments.len(), segments[1].1), (2, CauseKind::IdleExit), "{segments:?}");
        (segments[0].1, segments[0].2.clone())
    };
    let irq = Event::Irq(Name::new("eth0"));
    assert_eq!(woken_in(&[irq]), (Interrupt, "eth0".to_owned()));
    assert_eq!(woken_in(&[irq, Event::TimerExpires(TimerKind::Other)]), (Timer, "timer".to_owned()));
    assert_eq!(woken_in(&[irq, Event::RequestDone(8, 5)]), (Disk, "disk8 (read by t1:1)".to_owned()));
    assert_eq!(woken_in(&[Event::Softirq(3)]), (Network, "network".to_owned()));
    assert_eq!(woken_in(&[Event::Softirq(9)]), (Rcu, "grace period".to_owned()));
    assert_eq!(woken_in(&[Event::Softirq(1)]), (Timer, "timer".to_owned()));
    // The timer's function determines its kind, also where a packet that it sent is received.
    let expires = Event::TimerExpires;
    let journal = "commit interval of the journal";
    assert_eq!(woken_in(&[Event::Softirq(1), expires(TimerKind::JournalInterval)]), (Timer, journal.to_owned()));
    let of_other = [irq, expires(TimerKind::DelayedWork), Event::TimerEnds];
    assert_eq!(woken_in(&of_other), (Timer, "timer".to_owned()));
    let acknowledges = [expires(TimerKind::TcpDelayedAck), Event::SoftirqRaised(3), Event::TimerEnds];
    let comes_in = [&[Event::Softirq(1)][..], &acknowledges, &[Event::SoftirqEnds, Event::Softirq(3)]].concat();
    assert_eq!(woken_in(&comes_in), (Timer, "TCP's delayed acknowledgement".to_owned()));
    let next = [&comes_in[..], &[Event::SoftirqEnds, Event::Softirq(3)]].concat();
    assert_eq!(woken_in(&next).0, Network);
    let wakes =
        [Event::Softirq(1), expires(TimerKind::Wakeup), Event::SoftirqRaised(3), Event::SoftirqEnds, Event::Softirq(3)];
    assert_eq!(woken_in(&wakes).0, Network);
    assert_eq!(woken_in(&[Event::Softirq(6)]), (Interrupt, "tasklet".to_owned()));
    // What a thread sends over loopback is received in a softirq nested on it.
    assert_eq!(woken_in(&[Event::SoftirqRaised(3), Event::Softirq(3)]).0, CauseKind::Running);
}

#[test]
fn unrecorded_time_is_unknown() {
    use CauseKind::{Running, Unknown};
    let mut history = Scenario::new(2);
    history.preempted(0, 0, 1).sleeps(1, 0, 0).preempted(5, 1, 2).wakes(9, 1, 1).preempted(9, 0, 1);
    let mut past = history.past(10);
    // The waker's CPU was overwritten up to the middle of its run.
    past.cpus[1].retain(|slice| slice.start_ns > 4 * MS);
    assert_eq!(
        segments_of(past.clone(), asked(1, 1, 9)),
        [segment(4, Unknown, "its waking was not seen", 2), segment(4, Running, "t2:2", 1)]
    );
    past.cpus[1].clear();
    assert_eq!(segments_of(past.clone(), asked(1, 1, 9)), [segment(8, Unknown, "its waker was not seen", 1)]);
    past.cpus[0].clear();
    assert_eq!(segments_of(past, asked(1, 1, 9)), [segment(8, Unknown, "not over yet", 1)]);
}

/// Arbitrary slices: they overlap, have gaps, and are inconsistent.
pub(super) fn any_slice() -> impl Strategy<Value = RunSlice> {
    let holder = prop_oneof![
        Just(Holder::Unrecorded),
        Just(Holder::Idle),
        (1_u32..6).prop_map(Holder::Thread),
        (1_u32..6).prop_map(|tid| Holder::Work { tid, handler: 7 }),
        (0_u64..50).prop_map(|late_ns| Holder::Irq { late_ns }),
        Just(Holder::Softirq),
    ];
    let waker = prop_oneof![
        (0_u32..6).prop_map(Waker::Thread),
        (0_u32..6).prop_map(Waker::Parent),
        (0_u8..10).prop_map(|number| Waker::Timer(TimerKind::from_number(number).unwrap_or_default())),
        Just(Waker::Irq),
        Just(Waker::Softirq),
        (0_u64..400, 0_u64..400, 0_u32..6).prop_map(|(queued_ns, issued_ns, submitter)| {
            Waker::Disk(super::history::Request { queued_ns, issued_ns, submitter, ..Default::default() })
        }),
    ];
    let entry = prop_oneof![
        Just(SwitchIn::GoesOn),
        (0_u64..400).prop_map(|at_ns| SwitchIn::Preempted { at_ns }),
        Just(SwitchIn::Unseen),
        (0_u64..400, waker.clone(), 0_u32..4).prop_map(|(at_ns, by, cpu)| SwitchIn::Woken { at_ns, by, cpu }),
        (0_u64..400, waker, 0_u32..4).prop_map(|(at_ns, by, cpu)| SwitchIn::Queued { at_ns, by, cpu }),
    ];
    let exit = prop_oneof![
        Just(SwitchOut::GoesOn),
        Just(SwitchOut::Preempted),
        Just(SwitchOut::Blocked(Blocked::default())),
        Just(SwitchOut::Blocked(Blocked { stop: Some(Stop::Freezer), ..Blocked::default() })),
        Just(SwitchOut::Dead)
    ];
    let stop = prop_oneof![Just(None), Just(Some(Stop::Signal)), Just(Some(Stop::Tracer)), Just(Some(Stop::Freezer))];
    let times = (0_u64..400, 0_u64..60);
    let quota = prop_oneof![Just((0, None)), (1_u64..60, prop::option::of(0_u64..3))];
    let one = || (0_u64..400, 0_u32..4).prop_map(|(at_ns, from_cpu)| Move { at_ns, from_cpu });
    let moved = prop::option::of((one(), prop::option::of(one()), any::<bool>()))
        .prop_map(|moved| moved.map(|(last, first, has_gap)| Moves { last, first, has_gap }));
    (times, holder, entry, exit, 0_u64..40, any::<bool>(), (quota, moved), stop).prop_map(
        |((start_ns, ns), holder, entry, exit, steal_ns, is_member, ((throttled_ns, cgroup), moved), stop)| RunSlice {
            moved,
            start_ns,
            end_ns: start_ns + ns,
            holder,
            entry,
            exit,
            steal_ns,
            is_member,
            throttled_ns,
            cgroup,
            // Only set for a thread that was woken.
            stopped: stop.filter(|_| matches!(entry, SwitchIn::Woken { .. })),
            ..RunSlice::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn path_adds_up_for_arbitrary_timeline(
        cpus in prop::collection::vec(prop::collection::vec(any_slice(), 0..40), 1..4),
        (from_ns, to_ns) in (0_u64..450, 0_u64..450),
        tid in 1_u32..6,
        is_command in any::<bool>(),
        is_sorted in any::<bool>(),
    ) {
        let mut past = Recorded { cpus };
        if is_sorted {
            past.cpus.iter_mut().for_each(|cpu| cpu.sort_by_key(|slice| (slice.start_ns, slice.end_ns)));
        }
        let asked = Query { tid, from_ns, to_ns, is_wait: false, is_command };
        let path = path_of(past, asked);
        prop_assert_eq!(path.causes().iter().map(|cause| cause.ns).sum::<u64>(), to_ns.saturating_sub(from_ns));
    }
}

#[test]
fn a_long_conversation_is_folded_and_adds_up() {
    let mut history = Scenario::new(2);
    history.preempted(0, 0, 1).sleeps(1, 0, 0).preempted(1, 1, 2);
    let mut ms = 1;
    for _ in 0..5_000 {
        // t2 waits for t3, which answers.
        history.wakes(ms + 1, 1, 3).preempted(ms + 1, 0, 3).sleeps(ms + 2, 1, 0);
        history.wakes(ms + 4, 0, 2).preempted(ms + 4, 1, 2).sleeps(ms + 5, 0, 0);
        ms += 5;
    }
    history.wakes(ms, 1, 1).preempted(ms, 0, 1);
    let path = path_of(history.past(ms + 1), asked(1, 1, ms));
    assert!(path.is_folded && path.segments.len() < 20, "{}", path.segments.len());
    let causes = path.causes();
    let segments: Vec<_> = causes[..2].iter().map(|cause| (cause.who.to_string(), (cause.ns + MS / 2) / MS)).collect();
    assert_eq!(segments, [("t2:2".to_owned(), 15_000), ("t3:3".to_owned(), 10_000)]);
}
