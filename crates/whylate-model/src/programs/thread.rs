// SPDX-License-Identifier: MIT OR Apache-2.0
//! What one thread did, or all exited threads of one name.

use std::collections::VecDeque;

use super::seen_objects::SeenObjects;
use super::{CallKind, HeldUpBy, HeldUpPart};
use crate::object::Object;
use crate::path::history::{Blocked, Name, Waker};
use crate::path::timer::TimerKind;
use crate::path::{Path, PathSegment};
use crate::{ActorName, Cause, CauseKind, Histogram};

/// Maximum number of kinds of waits of a thread; waits of further ones are only counted.
const MAX_GROUPS: usize = 16;
/// Maximum number of wakees that are kept: the latest ones.
const MAX_WAKEES: usize = 8;
/// Maximum number of wakers for each kind of wait; further ones are not counted.
const MAX_WAKERS: usize = 8;
/// Number of durations that are added to the histogram at once.
const AT_ONCE: usize = 128;
/// Minimum share of requests, as a divisor: one in this number of waits for another program has to follow a request.
const ASKED_PART: u64 = 10;
/// Maximum number of causes of one kind of wait.
const MAX_CAUSES: usize = 32;

/// Number of waits of one kind that are read until the next snapshot.
const READINGS: u64 = 8;

/// Kind of waits, with the system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Group {
    /// Runnable, behind other threads.
    Queued,
    /// Runnable, and throttled: the CPU quota of its cgroup is used up.
    Throttled,
    /// Blocked.
    Blocked { by: HeldUpBy, call: Option<u16> },
}

/// A wait in which a thread may have been held up.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldUpWait {
    pub group: Group,
    pub waker: Option<u32>,
    /// Whether the thread sent a request to the waker before the wait, for groups in which this matters.
    pub has_asked: bool,
    pub ns: u64,
}

/// Sums of the waits of one group.
#[derive(Clone, Debug)]
pub(super) struct GroupSums {
    pub group: Group,
    pub ns: u64,
    durations_ns: Vec<u64>,
    latency: Histogram,
    /// Wakers that ended the waits, with the total time of these waits.
    pub wakers: Vec<(u32, u64)>,
    /// Time of the waits for which no sample is due yet.
    pub unsampled_ns: u64,
    /// Number of waits, and of those that followed a request.
    count: u64,
    asked: u64,
    /// Weight of all samples, and of those that were held up.
    sampled: u64,
    held_up: u64,
    /// Causes of the samples that were held up, in weight.
    causes: Vec<(Cause, f64)>,
    objects: SeenObjects,
}

impl GroupSums {
    fn new(group: Group) -> Self {
        GroupSums {
            group,
            ns: 0,
            durations_ns: Vec::new(),
            latency: Histogram::default(),
            wakers: Vec::new(),
            unsampled_ns: 0,
            count: 0,
            asked: 0,
            sampled: 0,
            held_up: 0,
            causes: Vec::new(),
            objects: SeenObjects::default(),
        }
    }

    /// Returns whether enough of the waits were read.
    pub fn is_read(&self) -> bool {
        self.objects.waits() >= READINGS
    }

    /// Adds the object that was read during one of the waits.
    pub fn saw(&mut self, object: Object) {
        self.objects.add(object, 1);
    }

    fn add(&mut self, wait: &HeldUpWait) {
        self.ns += wait.ns;
        self.unsampled_ns += wait.ns;
        self.count += 1;
        self.asked += u64::from(wait.has_asked);
        self.durations_ns.push(wait.ns);
        if self.durations_ns.len() >= AT_ONCE {
            self.count();
        }
        let Some(waker) = wait.waker else { return };
        let has_room = self.wakers.len() < MAX_WAKERS;
        match self.wakers.iter_mut().find(|(known, _)| *known == waker) {
            Some((_, ns)) => *ns += wait.ns,
            None if has_room => self.wakers.push((waker, wait.ns)),
            None => {}
        }
    }

    fn count(&mut self) {
        self.latency.merge(&self.durations_ns.drain(..).collect());
    }

    /// Returns whether the thread may be held up in these waits. Without requests, waits for another program are waits for
    /// work. A request to a thread that is awake causes no wakeup, so only some waits need to follow one.
    pub fn may_be_held_up(&self) -> bool {
        !self.is_of_program() || self.asked.saturating_mul(ASKED_PART) >= self.count
    }

    /// Returns whether these are waits for another program.
    pub fn is_of_program(&self) -> bool {
        matches!(self.group, Group::Blocked { by: HeldUpBy::Program, .. })
    }

    /// Returns the thread that ended most of the waits.
    pub fn main_waker(&self) -> Option<u32> {
        self.wakers.iter().max_by_key(|(_, ns)| *ns).map(|&(tid, _)| tid)
    }

    /// Adds the path of a sample.
    fn explain(&mut self, weight: u64, path: &Path) {
        let is_own =
            |segment: &&PathSegment| (segment.depth == 0) == matches!(self.group, Group::Queued | Group::Throttled);
        let segments: Vec<PathSegment> = path.segments.iter().filter(is_own).cloned().collect();
        let path = Path { segments, is_folded: false };
        let whole_ns = path.total_ns();
        if whole_ns == 0 {
            return;
        }
        self.sampled += weight;
        // A program that sleeps voluntarily holds no other program up, but a lock that it holds does.
        if self.is_of_program() && !path.is_held_up(0, false) {
            return;
        }
        self.held_up += weight;
        for cause in path.causes() {
            let share = weight as f64 * cause.ns as f64 / whole_ns as f64;
            self.add_cause(cause, share);
        }
    }

    /// Adds a cause. Beyond a maximum, threads with the same name are summed, and beyond another one all further causes.
    fn add_cause(&mut self, cause: Cause, share: f64) {
        let is_same = |(known, _): &&mut (Cause, f64)| known.kind == cause.kind && known.who == cause.who;
        let causes = self.causes.len();
        match self.causes.iter_mut().find(is_same) {
            Some((_, sum)) => *sum += share,
            None if causes < MAX_CAUSES => self.causes.push((cause, share)),
            None if cause.who.tid().is_some() => {
                let who = cause.who.by_name();
                self.add_cause(Cause { who, ..cause }, share);
            }
            None if causes < 2 * MAX_CAUSES => self.causes.push((cause, share)),
            None => self.add_other(share),
        }
    }

    fn add_other(&mut self, share: f64) {
        let is_other = |(cause, _): &&mut (Cause, f64)| cause.who == crate::path::OTHERS;
        match self.causes.iter_mut().find(is_other) {
            Some((_, sum)) => *sum += share,
            None => self.causes.push((Cause::new(CauseKind::Unknown, crate::path::OTHERS, 0), share)),
        }
    }

    /// Returns these waits as a part, if the thread was held up in them.
    fn part(mut self, call_name: &mut dyn FnMut(u16) -> Option<String>) -> Option<HeldUpPart> {
        self.count();
        // Only a sample shows whether the other program was active.
        let (may_be_held_up, needs_sample) = (self.may_be_held_up(), self.is_of_program());
        let GroupSums { group, ns, latency, sampled, held_up, causes, objects, .. } = self;
        let ns = match sampled {
            _ if !may_be_held_up => 0,
            0 if needs_sample => 0,
            0 => ns,
            _ => (ns as f64 * held_up as f64 / sampled as f64) as u64,
        };
        let scaled = |ns: u64, is_wanted: &dyn Fn(CauseKind) -> bool| {
            let causes = causes.iter().filter(|(cause, _)| is_wanted(cause.kind));
            let all: f64 = causes.clone().map(|(_, share)| share).sum();
            let scaled = causes.map(|(cause, share)| Cause { ns: (share / all * ns as f64) as u64, ..cause.clone() });
            let mut scaled: Vec<Cause> = scaled.filter(|cause| cause.ns > 0).collect();
            scaled.sort_by(|a, b| (b.ns, a.kind, &a.who).cmp(&(a.ns, b.kind, &b.who)));
            scaled
        };
        if ns == 0 {
            return None;
        }
        let is_quota = |kind| kind == CauseKind::Throttled;
        let of_cpu = |by, causes| HeldUpPart { by, ns, latency: latency.clone(), causes, ..HeldUpPart::default() };
        Some(match group {
            Group::Queued => of_cpu(HeldUpBy::RunQueue, scaled(ns, &|kind| !is_quota(kind))),
            Group::Throttled => of_cpu(HeldUpBy::Quota, scaled(ns, &is_quota)),
            Group::Blocked { by, call } => {
                let of_disk = |cause: &&(Cause, f64)| matches!(cause.0.kind, CauseKind::Disk | CauseKind::DiskQueue);
                let all: f64 = causes.iter().map(|(_, share)| share).sum();
                let disk: f64 = causes.iter().filter(of_disk).map(|(_, share)| share).sum();
                // The holder of a kernel lock, or a thread that commits a journal, may wait for a disk itself.
                let by = if by == HeldUpBy::Lock && all > 0.0 && disk * 2.0 >= all { HeldUpBy::Disk } else { by };
                let causes = scaled(ns, &|_| true);
                let (object, object_waits) = objects.into_main().unzip();
                let (via, object_waits) = (call.and_then(call_name), object_waits.unwrap_or(0));
                HeldUpPart { by, via, object, object_waits, ns, latency, causes }
            }
        })
    }
}

/// What one thread did within the span, or all exited threads of one name.
#[derive(Clone, Debug, Default)]
pub(super) struct ThreadSums {
    pub name: Name,
    pub on_cpu_ns: u64,
    /// Time on run queues, without throttled time.
    pub queued_ns: u64,
    pub lived_ns: u64,
    pub groups: Vec<GroupSums>,
}

impl ThreadSums {
    /// Adds a wait and returns its group, unless there are too many.
    pub fn add(&mut self, wait: &HeldUpWait) -> Option<&mut GroupSums> {
        let at = match self.groups.iter().position(|sums| sums.group == wait.group) {
            Some(at) => at,
            None if self.groups.len() < MAX_GROUPS => {
                self.groups.push(GroupSums::new(wait.group));
                self.groups.len() - 1
            }
            None => return None,
        };
        self.groups[at].add(wait);
        Some(&mut self.groups[at])
    }

    /// Returns whether the thread may be held up in waits of a group. For waits for another program, it has to send requests.
    pub fn may_be_held_up(&self, group: Group) -> bool {
        self.groups.iter().any(|sums| sums.group == group && sums.may_be_held_up())
    }

    /// Adds the path of a sample of a group.
    pub fn explain(&mut self, group: Group, weight: u64, path: &Path) {
        if let Some(sums) = self.groups.iter_mut().find(|sums| sums.group == group) {
            sums.explain(weight, path);
        }
    }

    /// Returns the time of waits that may have been held up.
    pub fn held_up_ns(&self) -> u64 {
        self.groups.iter().map(|sums| sums.ns).sum()
    }

    /// Returns the number of waits that may have been held up.
    pub fn waits(&self) -> u64 {
        self.groups.iter().map(|sums| sums.count).sum()
    }

    /// Adds the sums of an exited thread. Returns the number of its waits without room.
    pub fn absorb(&mut self, other: ThreadSums) -> u64 {
        let mut unjudged = 0;
        self.on_cpu_ns += other.on_cpu_ns;
        self.queued_ns += other.queued_ns;
        self.lived_ns += other.lived_ns;
        for mut sums in other.groups {
            sums.count();
            let Some(own) = self.groups.iter_mut().find(|own| own.group == sums.group) else {
                match self.groups.len() < MAX_GROUPS {
                    true => self.groups.push(sums),
                    false => unjudged += sums.count,
                }
                continue;
            };
            own.ns += sums.ns;
            own.latency.merge(&sums.latency);
            own.count += sums.count;
            own.asked += sums.asked;
            own.sampled += sums.sampled;
            own.held_up += sums.held_up;
            sums.causes.into_iter().for_each(|(cause, share)| own.add_cause(cause, share));
            own.objects.absorb(sums.objects);
        }
        unjudged
    }

    /// Returns all parts, longest first.
    pub fn parts(self, call_name: &mut dyn FnMut(u16) -> Option<String>) -> Vec<HeldUpPart> {
        let groups = self.groups.into_iter();
        let mut parts: Vec<HeldUpPart> = groups.filter_map(|sums| sums.part(call_name)).collect();
        parts.sort_by_key(|part| std::cmp::Reverse(part.ns));
        parts
    }
}

/// State of a thread between its run slices.
#[derive(Clone, Debug, Default)]
pub(super) struct ThreadState {
    pub sums: ThreadSums,
    /// Time from which its lifetime is not counted yet.
    pub counted_from_ns: u64,
    /// Time of its last switch-out, if it blocked, and how.
    pub left: Option<(u64, Blocked)>,
    /// Time of the switch-in after its last wait.
    pub resumed_ns: u64,
    /// The thread of another process that created this one, if its creation was seen.
    pub parent: Option<u32>,
    /// Whether it is a kernel thread, if it has blocked.
    pub is_kernel: Option<bool>,
    /// TIDs of its wakees, with the times of the wakeups, latest last.
    pub wakees: VecDeque<(u32, u64)>,
}

impl ThreadState {
    /// Records that the thread wakes another one.
    pub fn wakes(&mut self, tid: u32, at_ns: u64) {
        if self.wakees.len() >= MAX_WAKEES {
            self.wakees.pop_front();
        }
        self.wakees.push_back((tid, at_ns));
    }

    /// Returns whether it woke the thread `tid` after its last wait and before it blocked: that wakeup was a request.
    pub fn has_asked(&self, tid: u32, blocked_ns: u64) -> bool {
        let is_of_run = |at_ns: u64| (self.resumed_ns..=blocked_ns).contains(&at_ns);
        self.wakees.iter().any(|&(wakee, at_ns)| wakee == tid && is_of_run(at_ns))
    }

    /// Returns what may have held the thread up in a wait, if anything.
    pub fn group_of(blocked: Blocked, call: CallKind, by: Waker) -> Option<HeldUpBy> {
        if blocked.is_kernel || blocked.stop.is_some() {
            return None;
        }
        match by {
            Waker::Disk(_) => Some(HeldUpBy::Disk),
            Waker::Timer(TimerKind::MemoryLimit) => Some(HeldUpBy::Memory),
            Waker::Timer(TimerKind::DirtyThrottling | TimerKind::DiskLimit | TimerKind::WritebackThrottling) => {
                Some(HeldUpBy::Disk)
            }
            Waker::Irq | Waker::Softirq if blocked.is_uninterruptible && blocked.in_iowait => Some(HeldUpBy::Disk),
            Waker::Thread(_) if blocked.is_uninterruptible => match call {
                CallKind::Child => None,
                CallKind::Syncs => Some(HeldUpBy::Disk),
                _ if blocked.in_iowait => Some(HeldUpBy::Disk),
                _ => Some(HeldUpBy::Lock),
            },
            Waker::Thread(_) => match call {
                CallKind::FileLock | CallKind::Futex => Some(HeldUpBy::Lock),
                CallKind::Syncs if blocked.in_iowait => Some(HeldUpBy::Disk),
                CallKind::Writes | CallKind::Reads => Some(HeldUpBy::Program),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the name with the TID.
    pub fn actor(&self, tid: u32) -> ActorName {
        ActorName::thread(self.sums.name.text(), tid)
    }
}
