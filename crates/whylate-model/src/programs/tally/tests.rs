// SPDX-License-Identifier: MIT OR Apache-2.0
use super::*;
use crate::CauseKind;
use crate::object::ObjectKind;
use crate::path::PathSegment;
use crate::path::history::{Blocked, Request};
use crate::programs::HeldUpBy;

const MS_NS: u64 = 1_000_000;
const READ: u16 = 0;
const WRITE: u16 = 1;
const POLL: u16 = 7;
const FLOCK: u16 = 73;
const FUTEX: u16 = 202;
const WAIT4: u16 = 61;

fn call_name(number: u16) -> Option<String> {
    let name = match number {
        READ => "read",
        WRITE => "write",
        POLL => "poll",
        FLOCK => "flock",
        FUTEX => "futex",
        WAIT4 => "wait4",
        _ => return None,
    };
    Some(name.to_owned())
}

/// A run slice from and to milliseconds.
fn ran(tid: u32, from_ms: u64, to_ms: u64, entry: SwitchIn, exit: SwitchOut) -> RunSlice {
    RunSlice {
        start_ns: from_ms * MS_NS,
        end_ns: to_ms * MS_NS,
        holder: Holder::Thread(tid),
        name: Name::new(if tid == 7 { "service" } else { "other" }),
        entry,
        exit,
        ..RunSlice::default()
    }
}

fn woken(at_ms: u64, by: Waker) -> SwitchIn {
    SwitchIn::Woken { at_ns: at_ms * MS_NS, by, cpu: 0 }
}

fn in_call(number: u16) -> SwitchOut {
    SwitchOut::Blocked(Blocked { syscall: Some(number), ..Blocked::default() })
}

/// Objects by TID and by the milliseconds at which the wait ended.
struct Read(Vec<(u32, u64, Object)>);

impl WaitLookup for Read {
    fn call_name(&mut self, number: u16) -> Option<String> {
        call_name(number)
    }

    fn object(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object> {
        assert!(via == Some("flock") && wait.from_ns.is_some_and(|from_ns| from_ns < wait.woken_ns));
        let is_of = |(tid, woken_ms, _): &&(u32, u64, Object)| (*tid, woken_ms * MS_NS) == (wait.tid, wait.woken_ns);
        self.0.iter().find(is_of).map(|(.., object)| object.clone())
    }
}

/// A machine without objects.
struct Nothing;

impl WaitLookup for Nothing {
    fn call_name(&mut self, number: u16) -> Option<String> {
        call_name(number)
    }

    fn object(&mut self, _wait: WaitSpan, _via: Option<&str>) -> Option<Object> {
        None
    }
}

fn add(tally: &mut Tally, (from_ms, until_ms): (u64, u64), slices: &[RunSlice]) {
    tally.add((from_ms * MS_NS, until_ms * MS_NS), slices, &mut Nothing);
}

/// Gives each sample a path with this kind.
fn explain(tally: &mut Tally, kind: CauseKind) {
    for sample in tally.samples() {
        let ns = sample.query.to_ns - sample.query.from_ns;
        let depth = u32::from(sample.query.is_wait);
        let segment = PathSegment { ns, kind, who: ActorName::thread("other", 8), depth, ..PathSegment::default() };
        tally.explain(&sample, &Path { segments: vec![segment], is_folded: false });
    }
}

fn take(tally: &mut Tally) -> Programs {
    tally.take(&|_| false, &mut call_name)
}

/// Returns the parts of a thread, as kind, call and milliseconds.
fn parts(programs: &Programs, tid: u32) -> Vec<(HeldUpBy, Option<String>, u64)> {
    let of = programs.held_up.iter().find(|program| program.who.tid() == Some(tid));
    let parts = of.into_iter().flat_map(|program| &program.parts);
    parts.map(|part| (part.by, part.via.clone(), part.ns / MS_NS)).collect()
}

/// Thread 7 blocks in a call at 10 ms, and thread 8 wakes it at 50 ms. With `has_asked`, thread 7 wakes thread 8 before it
/// blocks.
fn wait_in(exit: SwitchOut, has_asked: bool) -> Vec<RunSlice> {
    let entry = if has_asked { woken(5, Waker::Thread(7)) } else { woken(5, Waker::Network) };
    vec![
        ran(8, 0, 1, SwitchIn::Unseen, in_call(POLL)),
        ran(7, 1, 10, woken(1, Waker::Network), exit),
        ran(8, 11, 60, entry, in_call(POLL)),
        ran(7, 55, 60, woken(50, Waker::Thread(8)), in_call(POLL)),
    ]
}

#[test]
fn waits_for_answers_hold_a_program_up_and_waits_for_work_do_not() {
    let held_up = |exit, has_asked, kind| {
        let mut tally = Tally::default();
        add(&mut tally, (0, 100), &wait_in(exit, has_asked));
        explain(&mut tally, kind);
        parts(&take(&mut tally), 7)
    };
    let ready = (HeldUpBy::RunQueue, None, 5);
    let program = |via: &str| vec![(HeldUpBy::Program, Some(via.to_owned()), 40), ready.clone()];
    assert_eq!(held_up(in_call(READ), true, CauseKind::Running), program("read"));
    assert_eq!(held_up(in_call(READ), false, CauseKind::Running), std::slice::from_ref(&ready));
    assert_eq!(held_up(in_call(WRITE), false, CauseKind::Running), program("write"));
    // The other program sleeps, and holds no lock.
    assert_eq!(held_up(in_call(READ), true, CauseKind::Timer), std::slice::from_ref(&ready));
    let lock = vec![(HeldUpBy::Lock, Some("flock".to_owned()), 40), ready.clone()];
    assert_eq!(held_up(in_call(FLOCK), false, CauseKind::Timer), lock);
    for call in [POLL, WAIT4] {
        assert_eq!(held_up(in_call(call), true, CauseKind::Running), std::slice::from_ref(&ready));
    }
    // A locked page or a kernel lock: if its holder waits for a disk, the wait is for the disk.
    let uninterruptible = SwitchOut::Blocked(Blocked { is_uninterruptible: true, ..Blocked::default() });
    assert_eq!(held_up(uninterruptible, false, CauseKind::Running)[0].0, HeldUpBy::Lock);
    assert_eq!(held_up(uninterruptible, false, CauseKind::DiskQueue)[0].0, HeldUpBy::Disk);
}

#[test]
fn reader_of_a_pipeline_sends_no_request() {
    // Thread 7 makes room in the pipe, for which the writer waits.
    let mut tally = Tally::default();
    let slices = [
        ran(8, 0, 1, SwitchIn::Unseen, in_call(WRITE)),
        ran(7, 1, 10, woken(1, Waker::Network), in_call(READ)),
        ran(8, 11, 60, woken(5, Waker::Thread(7)), in_call(POLL)),
        ran(7, 50, 60, woken(50, Waker::Thread(8)), in_call(POLL)),
    ];
    add(&mut tally, (0, 100), &slices);
    explain(&mut tally, CauseKind::Running);
    assert_eq!(parts(&take(&mut tally), 7), []);
}

#[test]
fn pairs_that_wait_for_work_are_not_held_up() {
    let mut tally = Tally::default();
    add(&mut tally, (0, 100), &wait_in(in_call(READ), true));
    explain(&mut tally, CauseKind::Running);
    let programs = tally.take(&|pair| pair == Pair { waiter: 7, waker: 8 }, &mut call_name);
    assert_eq!(parts(&programs, 7), [(HeldUpBy::RunQueue, None, 5)]);
}

#[test]
fn of_two_threads_that_wait_for_each_other_the_longer_waiter_is_held_up() {
    let mut tally = Tally::default();
    let slices = [
        ran(8, 0, 1, SwitchIn::Unseen, in_call(READ)),
        ran(7, 1, 10, woken(1, Waker::Network), in_call(READ)),
        ran(8, 10, 50, woken(5, Waker::Thread(7)), in_call(READ)),
        ran(7, 50, 60, woken(50, Waker::Thread(8)), in_call(READ)),
        ran(8, 60, 90, woken(60, Waker::Thread(7)), in_call(READ)),
    ];
    add(&mut tally, (0, 100), &slices);
    explain(&mut tally, CauseKind::Running);
    let programs = take(&mut tally);
    assert_eq!(parts(&programs, 7), [(HeldUpBy::Program, Some("read".to_owned()), 40)]);
    assert_eq!(parts(&programs, 8), [(HeldUpBy::RunQueue, None, 5)]);
    // If the longer waiter waits only for work, the other one is the client.
    let mut tally = Tally::default();
    add(&mut tally, (0, 100), &slices);
    explain(&mut tally, CauseKind::Running);
    let programs = tally.take(&|pair| pair == Pair { waiter: 7, waker: 8 }, &mut call_name);
    assert_eq!(parts(&programs, 7), []);
    assert_eq!(parts(&programs, 8)[0], (HeldUpBy::Program, Some("read".to_owned()), 14));
}

#[test]
fn time_beyond_a_gap_is_not_counted() {
    let mut tally = Tally::default();
    add(&mut tally, (0, 40), &wait_in(in_call(FLOCK), false)[..2]);
    // Nothing was read between 40 and 45 ms: the thread may have run.
    add(&mut tally, (45, 100), &wait_in(in_call(FLOCK), false)[3..]);
    assert_eq!(parts(&take(&mut tally), 7), [(HeldUpBy::RunQueue, None, 5)]);
    // Without a gap, a wait may begin in an earlier read.
    add(&mut tally, (100, 140), &[ran(7, 101, 110, woken(101, Waker::Network), in_call(FLOCK))]);
    add(&mut tally, (140, 200), &[ran(7, 150, 151, woken(150, Waker::Thread(8)), in_call(POLL))]);
    let programs = take(&mut tally);
    assert_eq!(parts(&programs, 7), [(HeldUpBy::Lock, Some("flock".to_owned()), 40)]);
    assert_eq!(programs.covered_ns, 100 * MS_NS);
}

#[test]
fn quota_is_apart_from_the_run_queue() {
    let mut tally = Tally::default();
    let throttled = RunSlice {
        throttled_ns: 30 * MS_NS,
        ..ran(7, 50, 60, SwitchIn::Preempted { at_ns: 10 * MS_NS }, in_call(POLL))
    };
    add(&mut tally, (0, 100), &[throttled]);
    let programs = take(&mut tally);
    assert_eq!(parts(&programs, 7), [(HeldUpBy::Quota, None, 30), (HeldUpBy::RunQueue, None, 10)]);
    assert_eq!((programs.on_cpu_ns, programs.ready_ns), (10 * MS_NS, 10 * MS_NS), "throttled time is no competition");
    let counts: Vec<u64> = programs.held_up[0].parts.iter().map(|part| part.latency.max_ns() / MS_NS).collect();
    assert_eq!(counts, [30, 10], "each has its own durations");
}

#[test]
fn wait_for_cpu_counts_whole_over_several_reads() {
    let mut tally = Tally::default();
    add(&mut tally, (0, 100), &[ran(7, 1, 10, woken(1, Waker::Network), in_call(POLL))]);
    add(&mut tally, (100, 200), &[]);
    // The thread has been runnable since 50 ms.
    add(&mut tally, (200, 300), &[ran(7, 250, 251, woken(50, Waker::Network), in_call(POLL))]);
    assert_eq!(parts(&take(&mut tally), 7), [(HeldUpBy::RunQueue, None, 200)]);
    // Of the time before a gap, nothing is known.
    add(&mut tally, (400, 500), &[ran(7, 450, 451, woken(350, Waker::Network), in_call(POLL))]);
    let programs = take(&mut tally);
    assert_eq!(parts(&programs, 7), [(HeldUpBy::RunQueue, None, 50)]);
    assert_eq!(programs.held_up[0].lived_ns, 100 * MS_NS);
}

#[test]
fn time_before_a_gap_counts_as_lifetime() {
    let mut tally = Tally::default();
    let late = |from_ms: u64| ran(7, from_ms + 50, from_ms + 51, woken(from_ms, Waker::Network), in_call(POLL));
    add(&mut tally, (0, 100), &[late(0)]);
    add(&mut tally, (300, 400), &[late(300)]);
    let programs = take(&mut tally);
    assert_eq!((programs.covered_ns, programs.held_up[0].lived_ns), (200 * MS_NS, 200 * MS_NS));
}

#[test]
fn busy_thread_counts_before_it_blocks_and_kernel_thread_does_not() {
    let mut tally = Tally::default();
    let never_blocks = ran(9, 0, 60, SwitchIn::Preempted { at_ns: 0 }, SwitchOut::Preempted);
    let of_kernel = SwitchOut::Blocked(Blocked { is_kernel: true, ..Blocked::default() });
    let kernel = [
        ran(8, 60, 70, SwitchIn::Unseen, SwitchOut::Preempted),
        ran(8, 75, 80, SwitchIn::Preempted { at_ns: 70 * MS_NS }, of_kernel),
    ];
    add(&mut tally, (0, 100), &[&[never_blocks], &kernel[..]].concat());
    let programs = take(&mut tally);
    assert_eq!((programs.on_cpu_ns, programs.ready_ns), (60 * MS_NS, 0));
}

#[test]
fn short_lived_threads_are_added_up_by_name() {
    let mut tally = Tally::default();
    let born = |tid: u32, at_ms: u64| {
        let birth = ran(
            tid,
            at_ms,
            at_ms + 1,
            woken(at_ms, Waker::Parent(9)),
            SwitchOut::Blocked(Blocked { is_uninterruptible: true, in_iowait: true, ..Blocked::default() }),
        );
        let end = ran(tid, at_ms + 8, at_ms + 9, woken(at_ms + 8, Waker::Disk(Request::default())), SwitchOut::Dead);
        [birth, end]
    };
    let slices: Vec<RunSlice> = (0..9).flat_map(|number| born(100 + number, 10 * u64::from(number))).collect();
    add(&mut tally, (0, 100), &slices);
    let programs = take(&mut tally);
    let [program] = &programs.held_up[..] else { panic!("{programs:?}") };
    assert_eq!((program.who.to_string(), program.lived_ns / MS_NS), ("other".to_owned(), 81));
    assert_eq!((program.parts[0].by, program.parts[0].ns / MS_NS), (HeldUpBy::Disk, 63));
    assert_eq!(program.parts[0].latency.count(), 9);
    assert_eq!((programs.spawned[0].name.as_str(), programs.spawned[0].runs), ("other", 9));
}

#[test]
fn samples_are_few_and_in_proportion_to_time() {
    let mut tally = Tally::default();
    let mut slices = Vec::new();
    for number in 0..1_000 {
        let at_ms = number * 10;
        slices.push(ran(7, at_ms + 9, at_ms + 10, woken(at_ms + 9, Waker::Thread(8)), in_call(FLOCK)));
    }
    add(&mut tally, (0, 10_000), &slices);
    let samples = tally.samples();
    assert_eq!(samples.len(), MAX_SAMPLES_OF_GROUP);
    let weight: u64 = samples.iter().map(|sample| sample.weight).sum();
    // Each wait takes 9 ms; the start of the first one was not seen.
    assert_eq!(weight, 999 * 9 / 5);
    assert!(tally.samples().is_empty());
}

/// Thread 7 waits in a call for 40 ms of each 50 ms, until thread 8 wakes it.
fn waits_of(call: u16, count: u64) -> Vec<RunSlice> {
    let wait = |number: u64| {
        let at_ms = 50 * number + 40;
        ran(7, at_ms, at_ms + 10, woken(at_ms, Waker::Thread(8)), in_call(call))
    };
    (0..count).map(wait).collect()
}

#[test]
fn part_has_the_object_of_most_waits_that_were_read() {
    let lock = |path: &str| Object::with_path(ObjectKind::FileLock, path);
    let object_of = |read: &[(u64, &str)]| {
        let mut tally = Tally::default();
        let mut lookup = Read(read.iter().map(|&(woken_ms, path)| (7, woken_ms, lock(path))).collect());
        tally.add((0, 500 * MS_NS), &waits_of(FLOCK, 10), &mut lookup);
        let programs = take(&mut tally);
        let part = programs.held_up[0].parts[0].clone();
        assert_eq!((part.by, part.latency.count()), (HeldUpBy::Lock, 9));
        (part.object, part.object_waits)
    };
    assert_eq!(object_of(&[(90, "/a"), (140, "/b"), (190, "/a")]), (Some(lock("/a")), 2));
    assert_eq!(object_of(&[(90, "/a"), (140, "/b")]), (None, 0));
    assert_eq!(object_of(&[(41, "/a")]), (None, 0), "no wait ended then");
}

#[test]
fn leaders_are_held_up_for_long_and_those_in_futexes_come_last() {
    let one = |tid, call| Leader { threads: HeldUpThreads::One(tid), call: Some(call) };
    let mut tally = Tally::default();
    add(&mut tally, (0, 500), &waits_of(FLOCK, 10));
    assert_eq!(tally.leaders(), [one(7, FLOCK)]);
    // Right after a snapshot, the thread is still read.
    take(&mut tally);
    add(&mut tally, (500, 600), &[]);
    assert_eq!(tally.leaders(), [one(7, FLOCK)]);
    add(&mut tally, (600, 1_100), &[]);
    assert_eq!(tally.leaders(), []);
    // Waits for work: thread 7 sends no requests.
    let mut tally = Tally::default();
    add(&mut tally, (0, 500), &waits_of(READ, 10));
    assert_eq!(tally.leaders(), []);
    // Too short a time: 40 of 500 ms.
    let mut tally = Tally::default();
    add(&mut tally, (0, 500), &waits_of(FLOCK, 2));
    assert_eq!(tally.leaders(), []);
    let mut tally = Tally::default();
    let in_futex = waits_of(FUTEX, 10).into_iter().map(|slice| RunSlice { holder: Holder::Thread(6), ..slice });
    let mut both: Vec<RunSlice> = waits_of(FLOCK, 5).into_iter().chain(in_futex).collect();
    both.sort_by_key(|slice| slice.start_ns);
    add(&mut tally, (0, 500), &both);
    assert_eq!(tally.leaders(), [one(7, FLOCK), one(6, FUTEX)]);
}

#[test]
fn waits_that_were_read_often_enough_lead_no_more() {
    let lock = Object::with_path(ObjectKind::FileLock, "/a");
    let mut tally = Tally::default();
    // The first wait was not seen to begin.
    let mut lookup = Read((1..8).map(|number| (7, 50 * number + 40, lock.clone())).collect());
    tally.add((0, 500 * MS_NS), &waits_of(FLOCK, 10), &mut lookup);
    assert_eq!(tally.leaders().len(), 1);
    let mut tally = Tally::default();
    let mut lookup = Read((1..9).map(|number| (7, 50 * number + 40, lock.clone())).collect());
    tally.add((0, 500 * MS_NS), &waits_of(FLOCK, 10), &mut lookup);
    assert_eq!(tally.leaders(), []);
    // In the next span, they are read again.
    take(&mut tally);
    assert_eq!(tally.leaders().len(), 1);
}

#[test]
fn short_lived_threads_of_a_name_lead_together() {
    let lived = |number: u64| {
        let (tid, at_ms) = (100 + number as u32, 50 * number);
        let begin = ran(tid, at_ms, at_ms + 1, woken(at_ms, Waker::Parent(9)), in_call(FLOCK));
        [begin, ran(tid, at_ms + 40, at_ms + 41, woken(at_ms + 40, Waker::Thread(8)), SwitchOut::Dead)]
    };
    let mut tally = Tally::default();
    add(&mut tally, (0, 500), &(0..10).flat_map(lived).collect::<Vec<_>>());
    let threads = HeldUpThreads::OfName(Name::new("other"));
    assert_eq!(tally.leaders(), [Leader { threads, call: Some(FLOCK) }]);
}

#[test]
fn waits_beyond_the_bounds_are_counted() {
    let one_more = MAX_THREADS as u64 + 1;
    let of_thread = |tid: u64| RunSlice {
        holder: Holder::Thread(tid as u32),
        ..ran(0, 5, 6, woken(4, Waker::Network), in_call(POLL))
    };
    let slices: Vec<RunSlice> = (1..=one_more).map(of_thread).collect();
    let mut tally = Tally::default();
    add(&mut tally, (0, 10), &slices);
    assert_eq!((tally.take_unjudged(), tally.take_unjudged()), (1, 0));
    // Short-lived threads of many names, each with a wait for a CPU.
    let of_name = |number: u64| RunSlice {
        holder: Holder::Thread(number as u32),
        name: Name::new(&format!("n{number}")),
        ..ran(0, 5, 6, woken(4, Waker::Network), SwitchOut::Dead)
    };
    let slices: Vec<RunSlice> = (1..=MAX_NAMES as u64 + 3).map(of_name).collect();
    let mut tally = Tally::default();
    add(&mut tally, (0, 10), &slices);
    assert_eq!(tally.take_unjudged(), 3);
}
