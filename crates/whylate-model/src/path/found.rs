// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a walk has found of one wait, put together in order of time and in words.

mod fold;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::history::{Blocked, Name, Request, Waker};
use super::timer::TimerKind;
use super::{Finding, Hop, Party, Segment};
use crate::late::{Cause, CauseKind};
use crate::wait::Stop;
use crate::{Cgroup, thread};

/// So many segments are kept in order; beyond that, those that are alike become one.
const SEGMENTS: usize = 400;
/// Of those that are alike already, so many are compared with each that is new, before all are again.
const FIRST: usize = 64;
/// So many waits are known that may be found to have begun earlier.
const UNMET: usize = 256;

/// Whose parts are that were summed up so far that nobody of them is known any more.
pub const OTHERS: &str = "others";

/// A part of a path, in words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PathSegment {
    /// How long it took.
    pub ns: u64,
    /// What happened.
    pub kind: CauseKind,
    /// To or by whom.
    pub who: String,
    /// Who could have run meanwhile, where it tells who had a CPU.
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<String>,
    /// In what the thread waited whose wait it is a part of: a system call, or what its stack tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<String>,
    /// The thread that waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiter: Option<String>,
    /// Where it waited, innermost first, where that was seen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// What had stopped that thread, if anything did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<Stop>,
    /// How many waits it lies within.
    pub depth: u32,
    /// The thread that had the time belongs to the command whose path it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_member: bool,
    /// The timer, where it is told in what the thread waited for it.
    #[serde(skip)]
    pub timer: Option<TimerKind>,
    /// The cgroup of the thread that had the time, for the causes that are made of it.
    #[serde(skip)]
    pub cgroup: Option<Cgroup>,
    /// That of the thread that waited.
    #[serde(skip)]
    pub cgroup_of_waiter: Option<Cgroup>,
}

/// What names stand for the numbers of a past.
pub trait Names {
    /// A work item's function.
    fn handler(&mut self, number: u64) -> String;
    /// A block device.
    fn device(&mut self, device: u32) -> String;
    /// A thread that was not met on the way, where that can be asked now.
    fn thread(&mut self, tid: u32) -> Option<Name>;
    /// What limits a thread.
    fn limit(&mut self, number: u32) -> String;
    /// Whose quota limits threads of that cgroup.
    fn quota(&mut self, cgroup: u64) -> String;
    /// A cgroup, where that is known.
    fn cgroup(&mut self, number: u64) -> Option<Cgroup>;
    /// What a thread waits in, that was woken then, with its stack where that is known.
    fn waits_in(&mut self, tid: u32, woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>);
}

/// A whole path, from its beginning to its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Path {
    /// They add up to the time that was asked about.
    pub segments: Vec<PathSegment>,
    /// Parts that are alike stand together, as there were too many to keep their order.
    pub is_folded: bool,
}

impl PathSegment {
    /// The same, with the names of threads made of how they are called: of whoever did it, could run, waited, or submitted
    /// the request.
    pub fn with_threads(self, name: &dyn Fn(&str) -> String) -> Self {
        let who = match self.kind {
            _ if self.is_a_threads() => name(&self.who),
            // The submitter stands last, in brackets.
            CauseKind::Disk | CauseKind::DiskQueue => {
                match self.who.strip_suffix(')').and_then(|who| who.rsplit_once(" by ")) {
                    Some((request, by)) => format!("{request} by {})", name(by)),
                    None => self.who,
                }
            }
            _ => self.who,
        };
        let named = |called: Option<String>| called.as_deref().map(name);
        PathSegment { who, ready: named(self.ready), waiter: named(self.waiter), ..self }
    }

    /// The same, knowing in what the thread waited.
    pub(super) fn waiting_in(self, via: Option<String>) -> Self {
        let who = self.timer.map_or(self.who, |of| of.told(via.as_deref()).to_owned());
        PathSegment { who, via, ..self }
    }

    /// Who is to blame for it, with the cgroup of that thread. A sleep is laid to whoever slept.
    fn culprit(&self) -> (Cow<'_, str>, Option<&Cgroup>) {
        if self.kind != CauseKind::Timer || self.who == OTHERS {
            return (self.who.as_str().into(), self.cgroup.as_ref());
        }
        let timer = self.timer.unwrap_or_default();
        let who = timer.culprit(self.via.as_deref(), self.waiter.as_deref());
        (who.into(), self.cgroup_of_waiter.as_ref().filter(|_| timer.is_own()))
    }

    /// The wait that it is a part of: who waited, and in what.
    pub fn wait(&self) -> (&Option<String>, &Option<String>) {
        (&self.waiter, &self.via)
    }

    /// Whether a thread did what is told.
    pub(super) fn is_a_threads(&self) -> bool {
        // Whoever stopped a thread is one where a number tells.
        matches!(self.kind, CauseKind::Running | CauseKind::Thread | CauseKind::IrqsOff)
            || self.kind == CauseKind::Stopped && self.who.contains(':')
    }

    /// Whether a thread waited for a CPU, even where parts were summed up and which one is not known any more.
    pub fn is_ready(&self) -> bool {
        use CauseKind::{IdleExit, IrqsOff, Thread, Throttled, Wakeup};
        self.ready.is_some() || matches!(self.kind, Thread | IrqsOff | IdleExit | Wakeup | Throttled)
    }
}

impl Path {
    /// Sums of what it consists of, by who is to blame, the largest first.
    pub fn causes(&self) -> Vec<Cause> {
        let mut sums: Vec<Cause> = Vec::new();
        let mut places: HashMap<(CauseKind, Cow<'_, str>), usize> = HashMap::new();
        for segment in &self.segments {
            let (who, cgroup) = segment.culprit();
            let place = *places.entry((segment.kind, who)).or_insert_with_key(|(kind, who)| {
                sums.push(Cause { cgroup: cgroup.cloned(), ..Cause::new(*kind, who.as_ref(), 0) });
                sums.len() - 1
            });
            sums[place].ns += segment.ns;
        }
        sums.sort_by(|a, b| (Reverse(a.ns), a.kind, &a.who).cmp(&(Reverse(b.ns), b.kind, &b.who)));
        sums
    }

    /// How long it is.
    pub fn total_ns(&self) -> u64 {
        self.segments.iter().map(|segment| segment.ns).sum()
    }
}

/// A part, while it is found.
#[derive(Clone, Copy, Debug)]
struct Part {
    ns: u64,
    kind: CauseKind,
    who: Party,
    ready: Option<u32>,
    wait: Option<usize>,
}

/// A wait that others are parts of.
#[derive(Clone, Debug)]
struct Wait {
    within: Option<usize>,
    tid: u32,
    woken_ns: u64,
    by: Option<Waker>,
    /// What had stopped it when it was woken.
    stop: Option<Stop>,
    /// Its name and what it waited in, as soon as it is known where it began.
    asleep: Option<(Name, Blocked)>,
}

/// Takes in what a walk finds of one wait. Its memory is bounded, however long that is.
#[derive(Debug, Default)]
pub struct Found {
    parts: Vec<Part>,
    waits: Vec<Wait>,
    /// Waits that are open, the outermost first, with the numbers of their hops.
    open: Vec<(u32, usize)>,
    /// The same of those that are not open any more and may be found to have begun earlier.
    unmet: Vec<(u32, usize)>,
    /// The thread whose name was taken in last.
    named: Option<u32>,
    names: HashMap<u32, Name>,
    /// Of the threads that have names.
    cgroups: HashMap<u32, u64>,
    is_folded: bool,
}

impl Found {
    /// Takes one in.
    pub fn add(&mut self, finding: Finding) {
        match finding {
            Finding::Segment(segment) => self.add_segment(segment),
            Finding::Hop(hop) => self.add_hop(hop),
            Finding::Called { tid, name } => self.name(tid, name),
            Finding::Asleep { hop, name, blocked, .. } => {
                if let Some(wait) = self.wait_of(hop) {
                    let is_known = self.is_folded && self.waits[wait].asleep.is_some();
                    self.waits[wait].asleep = if is_known { self.waits[wait].asleep } else { Some((name, blocked)) };
                }
                self.unmet.retain(|&(number, _)| number != hop);
            }
            Finding::Unmet { hop } => {
                let wait = self.wait_of(hop).filter(|_| self.unmet.len() < UNMET);
                self.unmet.extend(wait.map(|wait| (hop, wait)));
            }
            Finding::NotFollowed => {}
        }
    }

    /// A thread's name, where no other one is known yet: the last that it had counts.
    pub fn name(&mut self, tid: u32, name: Name) {
        if self.names.len() < SEGMENTS * 4 {
            self.names.entry(tid).or_insert(name);
        }
    }

    /// Each part of a wait that is the outermost, whatever wait within it it lies in: what happened, by whom, who could run
    /// meanwhile, and for how long.
    pub(super) fn flat(&self) -> impl Iterator<Item = (CauseKind, Party, Option<(u32, Name)>, u64)> {
        self.parts.iter().map(|part| {
            let name = |tid: u32| self.names.get(&tid).copied().unwrap_or_default();
            let who = match part.who {
                // What a timer was for is known by what its own wait was in.
                Party::Timer(of) if of.is_own() && part.wait != Some(0) => Party::Timer(TimerKind::Other),
                // Requests that are alike are told as one, whenever they were.
                Party::Disk(request) => Party::Disk(Request { queued_ns: 0, issued_ns: 0, ..request }),
                who => who,
            };
            (part.kind, who, part.ready.map(|tid| (tid, name(tid))), part.ns)
        })
    }

    fn wait_of(&self, hop: u32) -> Option<usize> {
        let numbered = |(number, _): &&(u32, usize)| *number == hop;
        self.open.iter().rev().find(numbered).or_else(|| self.unmet.iter().find(numbered)).map(|&(_, wait)| wait)
    }

    fn add_hop(&mut self, Hop { number, within, tid, woken_ns, by, stop }: Hop) {
        while self.open.last().is_some_and(|&(number, _)| Some(number) != within) {
            self.open.pop();
        }
        let wait = Wait { within: self.open.last().map(|&(_, wait)| wait), tid, woken_ns, by, stop, asleep: None };
        let known =
            if self.is_folded { self.waits.iter().take(FIRST).position(|known| known.is_like(&wait)) } else { None };
        self.open.push((number, known.unwrap_or(self.waits.len())));
        if known.is_none() {
            self.waits.push(wait);
        }
    }

    fn add_segment(&mut self, segment: Segment) {
        let Segment { from_ns, to_ns, kind, who, ready, hop } = segment;
        if let Party::Thread { tid, name, cgroup, .. } = who
            && self.named != Some(tid)
        {
            self.name(tid, name);
            if let (Some(cgroup), true) = (cgroup, self.names.contains_key(&tid)) {
                self.cgroups.entry(tid).or_insert(cgroup);
            }
            self.named = Some(tid);
        }
        let wait = hop.and_then(|number| self.wait_of(number));
        let part = Part { ns: to_ns - from_ns, kind, who, ready, wait };
        let like = match self.parts.last_mut() {
            Some(last) if last.is_like(&part) => Some(last),
            _ if self.is_folded => self.parts.iter_mut().take(FIRST).find(|known| known.is_like(&part)),
            _ => None,
        };
        match like {
            Some(like) => like.ns += part.ns,
            None => self.parts.push(part),
        }
        if self.parts.len() >= 2 * SEGMENTS {
            self.fold(wait);
        }
    }

    /// Names of threads that had no CPU in all that time and are told of: who waited, or submitted a request before.
    fn learn_names(&mut self, names: &mut dyn Names) {
        for wait in &self.waits {
            if let Some((name, _)) = wait.asleep {
                self.names.entry(wait.tid).or_insert(name);
            }
        }
        let of_part = |part: &Part| {
            let submitter = if let Party::Disk(request) = part.who { Some(request.submitter) } else { None };
            [part.ready, submitter.filter(|&tid| tid != 0)]
        };
        let unknown: HashSet<u32> = self.parts.iter().flat_map(of_part).flatten().collect();
        for tid in unknown.into_iter().filter(|tid| !self.names.contains_key(tid)).collect::<Vec<_>>() {
            names.thread(tid).map(|name| self.names.insert(tid, name));
        }
    }

    /// In words, in order of time.
    pub fn finish(mut self, names: &mut dyn Names) -> Path {
        if self.is_folded {
            self.fold(None);
        }
        self.learn_names(names);
        let waits: Vec<(Option<String>, Vec<String>)> = self
            .waits
            .iter()
            .map(|wait| {
                let blocked = wait.asleep.map_or_else(Blocked::default, |(_, blocked)| blocked);
                let (via, stack) = names.waits_in(wait.tid, wait.woken_ns, &blocked);
                let via = via.or_else(|| blocked.outside_calls());
                (wait.stopped().map_or(via, |stop| Some(stop.words().to_owned())), stack)
            })
            .collect();
        let depth = |mut wait: Option<usize>| {
            let mut depth = 0;
            while let Some(at) = wait {
                (wait, depth) = (self.waits[at].within, depth + 1);
            }
            depth
        };
        let called = |tid: u32| thread::called(&self.names.get(&tid).copied().unwrap_or_default().text(), tid);
        self.parts.reverse();
        // That it was stopped may be known while who let it go on is not.
        let stopped = |part: &Part| part.wait.and_then(|wait| self.waits[wait].stopped());
        let segments = self.parts.iter().map(|part| match stopped(part) {
            Some(stop) if part.kind == CauseKind::Unknown => {
                Part { kind: CauseKind::Stopped, who: Party::Text(stop.who()), ..*part }
            }
            _ => *part,
        });
        let segments = segments.map(|part| PathSegment {
            ns: part.ns,
            kind: part.kind,
            who: match part.who {
                Party::Thread { tid, name, .. } => thread::called(&name.text(), tid),
                Party::Program { name, .. } => name.text(),
                Party::Work(handler) => names.handler(handler),
                Party::Interrupt(name) => name.text(),
                Party::Cpu(cpu) => format!("CPU {cpu}"),
                Party::Disk(request) => {
                    let by = match self.names.get(&request.submitter) {
                        Some(_) => format!(" by {}", called(request.submitter)),
                        None if request.submitter == 0 => String::new(),
                        None => format!(" by thread {}", thread::number(request.submitter)),
                    };
                    format!("{} ({}{by})", names.device(request.device), request.operation.name())
                }
                Party::Limit(number) => names.limit(number),
                Party::Quota(Some(cgroup)) => names.quota(cgroup),
                Party::Quota(None) => "its cgroup".to_owned(),
                Party::Timer(of) => of.told(part.wait.and_then(|wait| waits[wait].0.as_deref())).to_owned(),
                Party::Text(text) => text.to_owned(),
            },
            timer: if let Party::Timer(of) = part.who { Some(of) } else { None },
            ready: part.ready.map(called),
            via: part.wait.and_then(|wait| waits[wait].0.clone()),
            waiter: part.wait.map(|wait| match self.waits[wait] {
                Wait { tid, asleep: Some((name, _)), .. } => thread::called(&name.text(), tid),
                Wait { tid, .. } => called(tid),
            }),
            stack: part.wait.map_or_else(Vec::new, |wait| waits[wait].1.clone()),
            stop: part.wait.and_then(|wait| self.waits[wait].stopped()),
            depth: depth(part.wait),
            is_member: part.who.named().is_some_and(|(_, is_member)| is_member),
            cgroup: match part.who {
                Party::Thread { cgroup, .. } => cgroup.and_then(|number| names.cgroup(number)),
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

    #[test]
    fn a_sleep_is_laid_to_whoever_slept() {
        let sleep = |ns, kind, waiter: &str, via: &str| PathSegment {
            ns,
            kind: CauseKind::Timer,
            who: "timer".to_owned(),
            waiter: Some(waiter.to_owned()),
            via: Some(via.to_owned()),
            timer: kind,
            cgroup_of_waiter: Some(Cgroup::of("/pod")),
            ..PathSegment::default()
        };
        let others = PathSegment { waiter: None, who: OTHERS.to_owned(), ..sleep(2, None, "", "") };
        let segments = vec![
            sleep(70, Some(TimerKind::Wakeup), "sleep:5823", "clock_nanosleep"),
            PathSegment { ns: 10, kind: CauseKind::Running, who: "holder:7".to_owned(), ..PathSegment::default() },
            sleep(5, None, "sleep:5823", "clock_nanosleep"),
            sleep(4, Some(TimerKind::Wakeup), "sleep:5823", "poll"),
            sleep(3, Some(TimerKind::TcpRetransmission), "innocent:8", "recvfrom"),
            others,
        ];
        let causes = Path { segments, is_folded: false }.causes();
        let told: Vec<_> = causes.iter().map(|cause| (cause.who.as_str(), cause.ns, cause.cgroup.is_some())).collect();
        assert_eq!(
            told,
            [
                ("sleep:5823", 75, true),
                ("holder:7", 10, false),
                ("timeout in poll (sleep:5823)", 4, true),
                ("TCP retransmission", 3, false),
                (OTHERS, 2, false)
            ]
        );
    }
}
