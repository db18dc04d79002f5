// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds a path from the findings of a walk over one wait.

mod fold;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::history::{Blocked, Name, Request, Waker};
use super::timer::TimerKind;
use super::{Actor, Finding, Segment, WakeupEdge};
use crate::object::Object;
use crate::thread::{self, ActorName};
use crate::wait::{Stop, is_sleep};
use crate::{Cause, CauseKind, Cgroup};

/// Number of segments kept in order; if there are more, equal ones are summed (folded).
const MAX_SEGMENTS: usize = 400;
/// After folding, number of summed parts that each new part is compared with before the next fold.
const COMPARED: usize = 64;
/// Maximum number of waits that may get their beginning later.
const MAX_UNMET: usize = 256;

/// Label of merged segments with unknown actors.
pub const OTHERS: &str = "others";

/// A segment of a path, as text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathSegment {
    /// Duration in nanoseconds.
    pub ns: u64,
    /// Kind of delay or work.
    pub kind: CauseKind,
    /// Actor that the time is attributed to.
    pub who: ActorName,
    /// The runnable thread, if the segment shows the actor on the CPU that it waited for.
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<ActorName>,
    /// System call that the waiter waited in, or the wait that its stack shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<String>,
    /// The waiter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiter: Option<ActorName>,
    /// What the waiter waited for, and who could end the wait, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<Box<Object>>,
    /// Number of waits that ended by the timeout of the call, if the segment is the rest of such waits.
    #[serde(default, skip_serializing_if = "is_none")]
    pub timeouts: u32,
    /// Stack of the waiter, innermost frame first, if known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// Why the waiter was stopped, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<Stop>,
    /// Number of enclosing waits.
    pub depth: u32,
    /// The thread that the time is attributed to belongs to the command of the path.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_member: bool,
    /// The timer, if it is named by the system call that the waiter waited in.
    #[serde(skip)]
    pub timer: Option<TimerKind>,
    /// Cgroup of the thread that the time is attributed to, for the causes made from the segment.
    #[serde(skip)]
    pub cgroup: Option<Cgroup>,
    /// Cgroup of the waiter.
    #[serde(skip)]
    pub cgroup_of_waiter: Option<Cgroup>,
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

/// A wait of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitSpan {
    /// TID as shown.
    pub tid: u32,
    /// Time of the switch-out (CLOCK_MONOTONIC); `None` if the switch-out was not recorded.
    pub from_ns: Option<u64>,
    /// Time of the wakeup (CLOCK_MONOTONIC).
    pub woken_ns: u64,
    /// TID and name of the waker, if it is a thread with a known name.
    pub waker: Option<(u32, Name)>,
}

/// Resolves the IDs in a timeline to names.
pub trait Names {
    /// Returns the name of a work item's function.
    fn handler(&mut self, number: u64) -> String;
    /// Returns the name of a block device.
    fn device(&mut self, device: u32) -> String;
    /// Returns the name of a thread that the walk did not reach, if it can still be looked up.
    fn thread(&mut self, tid: u32) -> Option<Name>;
    /// Returns the name of a limit on a thread.
    fn limit(&mut self, number: u32) -> ActorName;
    /// Returns the owner of the CPU quota that limits threads of this cgroup.
    fn quota(&mut self, cgroup: u64) -> String;
    /// Returns a cgroup, if known.
    fn cgroup(&mut self, number: u64) -> Option<Cgroup>;
    /// Returns the system call in which a thread waited that was woken at `woken_ns`, and its stack if known.
    fn waits_in(&mut self, tid: u32, woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>);
    /// Returns the object for which a thread waited in the system call `via`, or outside of calls, if known.
    fn object(&mut self, _wait: WaitSpan, _via: Option<&str>) -> Option<Object> {
        None
    }
}

/// A whole path, from beginning to end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Path {
    /// Segments, which add up to the time of the query.
    pub segments: Vec<PathSegment>,
    /// Equal parts are summed, because there were too many to keep their order.
    pub is_folded: bool,
}

impl PathSegment {
    /// Returns the segment with `name` applied to all labels of threads: actor, runnable thread, waiter, and submitter
    /// of the request.
    pub fn with_threads(self, name: &dyn Fn(&ActorName) -> ActorName) -> Self {
        let [ready, waiter] = [&self.ready, &self.waiter].map(|thread| thread.as_ref().map(name));
        PathSegment { who: name(&self.who), ready, waiter, ..self }
    }

    /// Returns the segment with the system call that the thread waited in.
    pub(super) fn waiting_in(self, via: Option<String>) -> Self {
        let who = self.timer.map_or(self.who, |of| of.culprit_name(via.as_deref()).into());
        PathSegment { who, via, ..self }
    }

    /// Returns the culprit and the cgroup of its thread. A sleep is attributed to the thread that slept.
    pub(crate) fn culprit(&self) -> (Cow<'_, ActorName>, Option<&Cgroup>) {
        if self.kind != CauseKind::Timer || self.who == OTHERS {
            return (Cow::Borrowed(&self.who), self.cgroup.as_ref());
        }
        let timer = self.timer.unwrap_or_default();
        let who = timer.culprit(self.via.as_deref(), self.waiter.as_ref());
        (Cow::Owned(who), self.cgroup_of_waiter.as_ref().filter(|_| timer.is_own()))
    }

    /// Strips the fields in which the object differs from that of another segment of the same wait.
    pub(super) fn keep_common_object(&mut self, other: &PathSegment) {
        if let (Some(one), Some(other)) = (&mut self.object, &other.object) {
            one.keep_common(other);
        }
    }

    /// Returns whether the waiter gave up: it got no answer, or no lock, before the timeout of its call.
    pub fn gave_up(&self) -> bool {
        self.timeouts > 0 && self.object.as_ref().is_some_and(|object| object.is_owed())
    }

    /// Returns the name of the waiter.
    pub fn waiter_name(&self) -> ActorName {
        self.waiter.clone().unwrap_or_else(|| "a thread".into())
    }

    /// Returns whether both segments are parts of waits of one thread in one system call for one object.
    pub fn is_of_same_wait(&self, other: &PathSegment) -> bool {
        let is_same_object = match (&self.object, &other.object) {
            (Some(one), Some(other)) => one.is_same(other),
            (None, None) => true,
            _ => false,
        };
        is_same_object && (&self.waiter, &self.via) == (&other.waiter, &other.via)
    }

    /// Returns whether a thread waited for a CPU, even if parts were merged and the thread is no longer known.
    pub fn is_ready(&self) -> bool {
        use CauseKind::{IdleExit, IrqsOff, Thread, Throttled, Wakeup};
        self.ready.is_some() || matches!(self.kind, Thread | IrqsOff | IdleExit | Wakeup | Throttled)
    }
}

impl Path {
    /// Returns the sums of the segments by culprit, largest first.
    pub fn causes(&self) -> Vec<Cause> {
        let mut sums: Vec<Cause> = Vec::new();
        let mut indexes: HashMap<(CauseKind, Cow<'_, ActorName>), usize> = HashMap::new();
        for segment in &self.segments {
            let (who, cgroup) = segment.culprit();
            let index = *indexes.entry((segment.kind, who)).or_insert_with_key(|(kind, who)| {
                sums.push(Cause { cgroup: cgroup.cloned(), ..Cause::new(*kind, who.clone().into_owned(), 0) });
                sums.len() - 1
            });
            sums[index].ns += segment.ns;
        }
        sums.sort_by(|a, b| (Reverse(a.ns), a.kind, &a.who).cmp(&(Reverse(b.ns), b.kind, &b.who)));
        sums
    }

    /// Returns the total duration in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        self.segments.iter().map(|segment| segment.ns).sum()
    }
}

/// A part, while findings are collected.
#[derive(Clone, Copy, Debug)]
struct PathPart {
    ns: u64,
    kind: CauseKind,
    who: Actor,
    ready: Option<u32>,
    wait: Option<usize>,
}

/// A wait that contains parts or other waits.
#[derive(Clone, Debug)]
struct Wait {
    within: Option<usize>,
    tid: u32,
    woken_ns: u64,
    by: Option<Waker>,
    /// Why the thread was stopped when it was woken, if it was.
    stop: Option<Stop>,
    /// Name of the thread and its wait, once the beginning is found.
    asleep: Option<(Name, Blocked)>,
    /// Time of the switch-out, once the beginning is found.
    asleep_ns: Option<u64>,
    /// Number of equal waits, if several were merged into this one.
    count: u32,
}

/// What is known of a wait besides its times: system call, stack and object.
struct Known {
    via: Option<String>,
    stack: Vec<String>,
    object: Option<Box<Object>>,
}

impl Wait {
    /// Looks up what is known of the wait. `waker` is the thread that ended it, if it has a name.
    fn known(&self, waker: Option<(u32, Name)>, names: &mut dyn Names) -> Known {
        let blocked = self.asleep.map_or_else(Blocked::default, |(_, blocked)| blocked);
        let (via, stack) = names.waits_in(self.tid, self.woken_ns, &blocked);
        let via = via.or_else(|| blocked.outside_calls());
        if let Some(stop) = self.stopped() {
            return Known { via: Some(stop.words().to_owned()), stack, object: None };
        }
        // Waits that were merged may have been for different objects.
        let span = WaitSpan { tid: self.tid, from_ns: self.asleep_ns, woken_ns: self.woken_ns, waker };
        let object = (self.count == 1).then(|| names.object(span, via.as_deref())).flatten().map(Box::new);
        Known { via, stack, object }
    }

    /// Returns the number of waits that ended by the timeout of their call.
    fn timeouts(&self, known: &Known) -> u32 {
        let is_timeout = self.by == Some(Waker::Timer(TimerKind::Wakeup))
            && known.via.as_ref().is_some_and(|via| !is_sleep(via))
            && self.stopped().is_none();
        if is_timeout { self.count } else { 0 }
    }
}

impl PathPart {
    fn is_timer(&self) -> bool {
        self.who == Actor::Timer(TimerKind::Wakeup)
    }
}

/// Builds the path of one wait from findings. Memory is bounded, however long the wait is.
#[derive(Debug, Default)]
pub struct PathBuilder {
    parts: Vec<PathPart>,
    waits: Vec<Wait>,
    /// Open waits, outermost first, with the numbers of their hops.
    open: Vec<(u32, usize)>,
    /// Waits no longer open that may still get their beginning, with the numbers of their hops.
    unmet: Vec<(u32, usize)>,
    /// TID of the thread that was named last.
    named: Option<u32>,
    names: HashMap<u32, Name>,
    /// Cgroup IDs of the threads in `names`.
    cgroups: HashMap<u32, u64>,
    is_folded: bool,
}

impl PathBuilder {
    /// Adds a finding.
    pub fn add(&mut self, finding: Finding) {
        match finding {
            Finding::Segment(segment) => self.add_segment(segment),
            Finding::WakeupEdge(hop) => self.add_hop(hop),
            Finding::Called { tid, name } => self.name(tid, name),
            Finding::Asleep { hop, name, blocked, at_ns } => {
                if let Some(wait) = self.wait_of(hop).map(|wait| &mut self.waits[wait])
                    && (!self.is_folded || wait.asleep.is_none())
                {
                    (wait.asleep, wait.asleep_ns) = (Some((name, blocked)), Some(at_ns));
                }
                self.unmet.retain(|&(number, _)| number != hop);
            }
            Finding::Unmet { hop } => {
                let wait = self.wait_of(hop).filter(|_| self.unmet.len() < MAX_UNMET);
                self.unmet.extend(wait.map(|wait| (hop, wait)));
            }
            Finding::NotFollowed | Finding::Preempted { .. } => {}
        }
    }

    /// Sets a thread's name, unless one is known: findings come newest first, and the newest name counts.
    pub fn name(&mut self, tid: u32, name: Name) {
        if self.names.len() < MAX_SEGMENTS * 4 {
            self.names.entry(tid).or_insert(name);
        }
    }

    /// Returns the parts of the outermost wait without their nesting: kind, actor, runnable thread, and nanoseconds.
    pub(super) fn flat(&self) -> impl Iterator<Item = (CauseKind, Actor, Option<(u32, Name)>, u64)> {
        self.parts.iter().map(|part| {
            let name = |tid: u32| self.names.get(&tid).copied().unwrap_or_default();
            let who = match part.who {
                // What a timer was for is known only from its own wait.
                Actor::Timer(of) if of.is_own() && part.wait != Some(0) => Actor::Timer(TimerKind::Other),
                // Requests that differ only in time are summed.
                Actor::Disk(request) => Actor::Disk(Request { queued_ns: 0, issued_ns: 0, ..request }),
                who => who,
            };
            (part.kind, who, part.ready.map(|tid| (tid, name(tid))), part.ns)
        })
    }

    fn wait_of(&self, hop: u32) -> Option<usize> {
        let numbered = |(number, _): &&(u32, usize)| *number == hop;
        self.open.iter().rev().find(numbered).or_else(|| self.unmet.iter().find(numbered)).map(|&(_, wait)| wait)
    }

    fn add_hop(&mut self, WakeupEdge { number, within, tid, woken_ns, by, stop }: WakeupEdge) {
        while self.open.last().is_some_and(|&(number, _)| Some(number) != within) {
            self.open.pop();
        }
        let within = self.open.last().map(|&(_, wait)| wait);
        let wait = Wait { within, tid, woken_ns, by, stop, asleep: None, asleep_ns: None, count: 1 };
        let known =
            if self.is_folded { self.waits.iter().take(COMPARED).position(|known| known.is_like(&wait)) } else { None };
        self.open.push((number, known.unwrap_or(self.waits.len())));
        match known {
            Some(known) => self.waits[known].count = self.waits[known].count.saturating_add(1),
            None => self.waits.push(wait),
        }
    }

    fn add_segment(&mut self, segment: Segment) {
        let Segment { from_ns, to_ns, kind, who, ready, hop } = segment;
        if let Actor::Thread { tid, name, cgroup, .. } = who
            && self.named != Some(tid)
        {
            self.name(tid, name);
            if let (Some(cgroup), true) = (cgroup, self.names.contains_key(&tid)) {
                self.cgroups.entry(tid).or_insert(cgroup);
            }
            self.named = Some(tid);
        }
        let wait = hop.and_then(|number| self.wait_of(number));
        let part = PathPart { ns: to_ns - from_ns, kind, who, ready, wait };
        let like = match self.parts.last_mut() {
            Some(last) if last.is_like(&part) => Some(last),
            _ if self.is_folded => self.parts.iter_mut().take(COMPARED).find(|known| known.is_like(&part)),
            _ => None,
        };
        match like {
            Some(like) => like.ns += part.ns,
            None => self.parts.push(part),
        }
        if self.parts.len() >= 2 * MAX_SEGMENTS {
            self.fold(wait);
        }
    }

    /// Looks up threads that never ran in the window but are named in it: waiters and I/O submitters.
    fn resolve_names(&mut self, names: &mut dyn Names) {
        for wait in &self.waits {
            if let Some((name, _)) = wait.asleep {
                self.names.entry(wait.tid).or_insert(name);
            }
        }
        let of_part = |part: &PathPart| {
            let submitter = if let Actor::Disk(request) = part.who { Some(request.submitter) } else { None };
            [part.ready, submitter.filter(|&tid| tid != 0)]
        };
        let unknown: HashSet<u32> = self.parts.iter().flat_map(of_part).flatten().collect();
        for tid in unknown.into_iter().filter(|tid| !self.names.contains_key(tid)).collect::<Vec<_>>() {
            names.thread(tid).map(|name| self.names.insert(tid, name));
        }
    }

    /// Returns the thread that ended a wait, if its name is known.
    fn waker_of(&self, wait: &Wait) -> Option<(u32, Name)> {
        let Some(Waker::Thread(tid)) = wait.by else { return None };
        self.names.get(&tid).map(|&name| (tid, name))
    }

    /// Returns the path in order of time.
    pub fn finish(mut self, names: &mut dyn Names) -> Path {
        if self.is_folded {
            self.fold(None);
        }
        self.resolve_names(names);
        let waits: Vec<Known> = self.waits.iter().map(|wait| wait.known(self.waker_of(wait), names)).collect();
        let depth = |mut wait: Option<usize>| {
            let mut depth = 0;
            while let Some(at) = wait {
                (wait, depth) = (self.waits[at].within, depth + 1);
            }
            depth
        };
        let called = |tid: u32| ActorName::thread(self.names.get(&tid).copied().unwrap_or_default().text(), tid);
        self.parts.reverse();
        // That the thread was stopped may be known even if the thread that resumed it is not.
        let stopped = |part: &PathPart| part.wait.and_then(|wait| self.waits[wait].stopped());
        let segments = self.parts.iter().map(|part| match stopped(part) {
            Some(stop) if part.kind == CauseKind::Unknown => {
                PathPart { kind: CauseKind::Stopped, who: Actor::Text(stop.who()), ..*part }
            }
            _ => *part,
        });
        let segments = segments.map(|part| PathSegment {
            ns: part.ns,
            kind: part.kind,
            who: match part.who {
                Actor::Thread { tid, name, .. } => ActorName::thread(name.text(), tid),
                Actor::Program { name, .. } => ActorName::program(name.text()),
                Actor::Work(handler) => names.handler(handler).into(),
                Actor::Interrupt(name) => name.text().into(),
                Actor::Cpu(cpu) => format!("CPU {cpu}").into(),
                Actor::Disk(request) => {
                    let what = format!("{} ({}", names.device(request.device), request.operation.name());
                    match self.names.get(&request.submitter) {
                        Some(_) => called(request.submitter).within(&(what + " by "), ")"),
                        None if request.submitter == 0 => (what + ")").into(),
                        None => format!("{what} by thread {})", thread::number(request.submitter)).into(),
                    }
                }
                Actor::Limit(number) => names.limit(number),
                Actor::Quota(Some(cgroup)) => names.quota(cgroup).into(),
                Actor::Quota(None) => "its cgroup".into(),
                Actor::Timer(of) => of.culprit_name(part.wait.and_then(|wait| waits[wait].via.as_deref())).into(),
                Actor::Text(text) => text.into(),
            },
            timer: if let Actor::Timer(of) = part.who { Some(of) } else { None },
            ready: part.ready.map(called),
            via: part.wait.and_then(|wait| waits[wait].via.clone()),
            object: part.wait.and_then(|wait| waits[wait].object.clone()),
            timeouts: part.wait.filter(|_| part.is_timer()).map_or(0, |wait| self.waits[wait].timeouts(&waits[wait])),
            waiter: part.wait.map(|wait| match self.waits[wait] {
                Wait { tid, asleep: Some((name, _)), .. } => ActorName::thread(name.text(), tid),
                Wait { tid, .. } => called(tid),
            }),
            stack: part.wait.map_or_else(Vec::new, |wait| waits[wait].stack.clone()),
            stop: part.wait.and_then(|wait| self.waits[wait].stopped()),
            depth: depth(part.wait),
            is_member: part.who.named().is_some_and(|(_, is_member)| is_member),
            cgroup: match part.who {
                Actor::Thread { cgroup, .. } => cgroup.and_then(|number| names.cgroup(number)),
                _ => None,
            },
            cgroup_of_waiter: part
                .wait
                .and_then(|wait| self.cgroups.get(&self.waits[wait].tid))
                .and_then(|&number| names.cgroup(number)),
        });
        Path { segments: segments.collect(), is_folded: self.is_folded }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::ObjectKind;

    /// Names in which each thread waits in `poll`, for an answer of a file system.
    struct Waits;

    impl Names for Waits {
        fn handler(&mut self, _number: u64) -> String {
            String::new()
        }

        fn device(&mut self, _device: u32) -> String {
            String::new()
        }

        fn thread(&mut self, _tid: u32) -> Option<Name> {
            None
        }

        fn limit(&mut self, _number: u32) -> ActorName {
            ActorName::default()
        }

        fn quota(&mut self, _cgroup: u64) -> String {
            String::new()
        }

        fn cgroup(&mut self, _number: u64) -> Option<Cgroup> {
            None
        }

        fn waits_in(&mut self, _tid: u32, _woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
            (blocked.syscall.map(|_| "poll".to_owned()), Vec::new())
        }

        fn object(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object> {
            assert_eq!((wait.tid, via), (7, Some("poll")));
            Some(Object::with_path(ObjectKind::Fuse, format!("/{}..{}", wait.from_ns?, wait.woken_ns)))
        }
    }

    #[test]
    fn wait_has_its_object_and_merged_waits_have_a_count() {
        let mut found = PathBuilder::default();
        let blocked = Blocked { syscall: Some(7), ..Blocked::default() };
        let mut add = |number: u32, to_ns: u64| {
            let by = Some(Waker::Timer(TimerKind::Wakeup));
            let edge = WakeupEdge { number, within: None, tid: 7, woken_ns: to_ns, by, stop: None };
            found.add(Finding::WakeupEdge(edge));
            let (kind, who) = (CauseKind::Timer, Actor::Timer(TimerKind::Wakeup));
            found.add(Finding::Segment(Segment {
                from_ns: to_ns - 5,
                to_ns,
                kind,
                who,
                ready: None,
                hop: Some(number),
            }));
            found.add(Finding::Asleep { hop: number, name: Name::new("a"), blocked, at_ns: to_ns - 5 });
        };
        add(0, 30);
        add(1, 20);
        let timeouts = |found: PathBuilder| {
            let segments = found.finish(&mut Waits).segments.into_iter();
            let of = |segment: PathSegment| {
                assert_eq!(segment.gave_up(), segment.object.is_some());
                (segment.ns, segment.timeouts, segment.object.and_then(|object| object.path))
            };
            segments.map(of).collect::<Vec<_>>()
        };
        add(2, 10);
        let path = |path: &str| Some(path.to_owned());
        let mut folded =
            PathBuilder { parts: found.parts.clone(), waits: found.waits.clone(), ..PathBuilder::default() };
        assert_eq!(timeouts(found), [(5, 1, path("/5..10")), (5, 1, path("/15..20")), (5, 1, path("/25..30"))]);
        folded.fold(None);
        assert_eq!(timeouts(folded), [(15, 3, None)]);
    }

    #[test]
    fn sleep_attributed_to_sleeper() {
        let sleep = |ns, kind, waiter: &str, via: &str| PathSegment {
            ns,
            kind: CauseKind::Timer,
            who: "timer".into(),
            waiter: Some(waiter.into()),
            via: Some(via.to_owned()),
            timer: kind,
            cgroup_of_waiter: Some(Cgroup::new("/pod")),
            ..PathSegment::default()
        };
        let others = PathSegment { waiter: None, who: OTHERS.into(), ..sleep(2, None, "", "") };
        let segments = vec![
            sleep(70, Some(TimerKind::Wakeup), "sleep:5823", "clock_nanosleep"),
            PathSegment { ns: 10, kind: CauseKind::Running, who: "holder:7".into(), ..PathSegment::default() },
            sleep(5, None, "sleep:5823", "clock_nanosleep"),
            sleep(4, Some(TimerKind::Wakeup), "sleep:5823", "poll"),
            sleep(3, Some(TimerKind::TcpRetransmission), "innocent:8", "recvfrom"),
            others,
        ];
        let causes = Path { segments, is_folded: false }.causes();
        let blamed: Vec<_> =
            causes.iter().map(|cause| (cause.who.to_string(), cause.ns, cause.cgroup.is_some())).collect();
        let expected = [
            ("sleep:5823", 75, true),
            ("holder:7", 10, false),
            ("timeout in poll (sleep:5823)", 4, true),
            ("TCP retransmission", 3, false),
            (OTHERS, 2, false),
        ];
        assert_eq!(blamed, expected.map(|(who, ns, has_cgroup)| (who.to_owned(), ns, has_cgroup)));
    }
}
