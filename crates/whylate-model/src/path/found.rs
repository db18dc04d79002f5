// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a walk has found of one wait, put together in order of time and in words.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::history::{Blocked, Name, Waker};
use super::{Finding, Hop, Party, Segment};
use crate::late::{Cause, CauseKind};
use crate::{Cgroup, thread};

/// So many segments are kept in order; beyond that, those that are alike become one.
const SEGMENTS: usize = 400;

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
    /// How many waits it lies within.
    pub depth: u32,
    /// The thread that had the time belongs to the command whose path it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_member: bool,
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

    /// The wait that it is a part of: who waited, and in what.
    pub fn wait(&self) -> (&Option<String>, &Option<String>) {
        (&self.waiter, &self.via)
    }

    /// Whether a thread did what is told.
    pub(super) fn is_a_threads(&self) -> bool {
        matches!(self.kind, CauseKind::Running | CauseKind::Thread | CauseKind::IrqsOff)
    }

    /// Whether a thread waited for a CPU, even where parts were summed up and which one is not known any more.
    pub fn is_ready(&self) -> bool {
        use CauseKind::{IdleExit, IrqsOff, Thread, Throttled, Wakeup};
        self.ready.is_some() || matches!(self.kind, Thread | IrqsOff | IdleExit | Wakeup | Throttled)
    }
}

impl Path {
    /// Sums of what it consists of, the largest first.
    pub fn causes(&self) -> Vec<Cause> {
        let mut sums: Vec<Cause> = Vec::new();
        let mut places: HashMap<(CauseKind, &str), usize> = HashMap::new();
        for segment in &self.segments {
            let place = *places.entry((segment.kind, segment.who.as_str())).or_insert_with(|| {
                let cgroup = segment.cgroup.clone();
                sums.push(Cause { cgroup, ..Cause::new(segment.kind, segment.who.as_str(), 0) });
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
    /// Its name and what it waited in, as soon as it is known where it began.
    asleep: Option<(Name, Blocked)>,
}

/// Takes in what a walk finds of one wait. Its memory is bounded, however long that is.
#[derive(Debug, Default)]
pub struct Found {
    parts: Vec<Part>,
    waits: Vec<Wait>,
    /// Waits by the numbers of their hops.
    numbers: HashMap<u32, usize>,
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
            Finding::Hop(Hop { number, within, tid, woken_ns, by }) => {
                let within = within.and_then(|number| self.numbers.get(&number).copied());
                self.numbers.insert(number, self.waits.len());
                self.waits.push(Wait { within, tid, woken_ns, by, asleep: None });
            }
            Finding::Called { tid, name } => self.name(tid, name),
            Finding::Asleep { hop, name, blocked, .. } => {
                if let Some(&wait) = self.numbers.get(&hop) {
                    self.waits[wait].asleep = Some((name, blocked));
                }
            }
        }
    }

    /// A thread's name, where no other one is known yet: the last that it had counts.
    pub fn name(&mut self, tid: u32, name: Name) {
        if self.names.len() < SEGMENTS * 4 {
            self.names.entry(tid).or_insert(name);
        }
    }

    /// Whether this hop is the first that was taken in.
    pub(super) fn is_outermost(&self, hop: u32) -> bool {
        self.numbers.get(&hop) == Some(&0)
    }

    fn add_segment(&mut self, segment: Segment) {
        let Segment { from_ns, to_ns, kind, who, ready, hop } = segment;
        if let Party::Thread { tid, name, cgroup, .. } = who {
            self.name(tid, name);
            if let (Some(cgroup), true) = (cgroup, self.names.contains_key(&tid)) {
                self.cgroups.entry(tid).or_insert(cgroup);
            }
        }
        let wait = hop.and_then(|number| self.numbers.get(&number).copied());
        let part = Part { ns: to_ns - from_ns, kind, who, ready, wait };
        match self.parts.last_mut() {
            Some(last) if last.is_like(&part) => last.ns += part.ns,
            _ => self.parts.push(part),
        }
        if self.parts.len() >= 2 * SEGMENTS {
            self.fold(wait);
        }
    }

    /// Makes one of parts that are alike, and of waits of one thread for the same one within the same wait.
    fn fold(&mut self, innermost: Option<usize>) {
        self.is_folded = true;
        let mut waits: Vec<Wait> = Vec::new();
        let mut places = Vec::with_capacity(self.waits.len());
        let mut known: HashMap<(Option<usize>, u32, u64), usize> = HashMap::new();
        for wait in &self.waits {
            let within = wait.within.map(|within: usize| places[within]);
            let place = *known.entry((within, wait.tid, ended_by(wait.by))).or_insert_with(|| {
                waits.push(Wait { within, ..wait.clone() });
                waits.len() - 1
            });
            waits[place].asleep = waits[place].asleep.or(wait.asleep);
            places.push(place);
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut alike: HashMap<_, Vec<usize>> = HashMap::new();
        for part in &self.parts {
            let part = Part { wait: part.wait.map(|wait| places[wait]), ..*part };
            let same = alike.entry((part.wait, part.kind, part.who.key(), part.ready)).or_default();
            match same.iter().find(|&&place| parts[place].is_like(&part)) {
                Some(&place) => parts[place].ns += part.ns,
                None => {
                    same.push(parts.len());
                    parts.push(part);
                }
            }
        }
        // Only those that are still open are named again.
        let mut open = Vec::new();
        let mut next = innermost;
        while let Some(wait) = next {
            open.push(wait);
            next = self.waits[wait].within;
        }
        self.numbers.retain(|_, wait| open.contains(wait));
        self.numbers.values_mut().for_each(|wait| *wait = places[*wait]);
        (self.waits, self.parts) = (waits, parts);
        let latest = self.parts.last().copied();
        if self.parts.len() > SEGMENTS {
            self.sum_up_small();
        }
        self.forget_waits();
        self.forget_names(latest);
    }

    /// Those of which no part is told any more.
    fn forget_waits(&mut self) {
        let mut is_used = vec![false; self.waits.len()];
        // The first one is what was asked about.
        is_used.iter_mut().take(1).for_each(|first| *first = true);
        for wait in self.parts.iter().filter_map(|part| part.wait).chain(self.numbers.values().copied()) {
            let mut next = Some(wait);
            while let Some(at) = next.filter(|&at| !is_used[at]) {
                is_used[at] = true;
                next = self.waits[at].within;
            }
        }
        let mut kept = 0;
        let places: Vec<usize> = is_used.iter().map(|&is_used| (kept, kept += usize::from(is_used)).0).collect();
        let mut at = 0;
        self.waits.retain(|_| (is_used[at], at += 1).0);
        self.waits.iter_mut().for_each(|wait| wait.within = wait.within.map(|within| places[within]));
        self.parts.iter_mut().for_each(|part| part.wait = part.wait.map(|wait| places[wait]));
        self.numbers.values_mut().for_each(|wait| *wait = places[*wait]);
    }

    /// Those of threads that no part is about, but for the latest.
    fn forget_names(&mut self, latest: Option<Part>) {
        let of_part = |part: &Part| {
            let who = match part.who {
                Party::Thread { tid, .. } => Some(tid),
                Party::Disk(request) => Some(request.submitter),
                _ => None,
            };
            [part.ready, who]
        };
        let of_parts = self.parts.iter().chain(&latest).flat_map(of_part).flatten();
        let used: HashSet<u32> = of_parts.chain(self.waits.iter().map(|wait| wait.tid)).collect();
        self.names.retain(|tid, _| used.contains(tid));
        self.cgroups.retain(|tid, _| used.contains(tid));
    }

    /// Where even different parts are too many, threads of one name become one in the smallest; beyond that these lose
    /// their names.
    fn sum_up_small(&mut self) {
        let mut by_size: Vec<usize> = (0..self.parts.len()).collect();
        by_size.sort_by_key(|&place| Reverse(self.parts[place].ns));
        let mut small: Vec<Part> = Vec::new();
        let mut places: HashMap<(CauseKind, Option<(Name, bool)>), usize> = HashMap::new();
        let mut is_small = vec![false; self.parts.len()];
        for &place in &by_size[SEGMENTS / 2..] {
            is_small[place] = true;
            let part = self.parts[place];
            let named = part
                .who
                .named()
                .filter(|&named| places.len() < SEGMENTS / 4 || places.contains_key(&(part.kind, Some(named))));
            let sum = *places.entry((part.kind, named)).or_insert_with(|| {
                let program = |(name, is_member)| Party::Program { name, is_member };
                let who = named.map_or(Party::Text(OTHERS), program);
                small.push(Part { ns: 0, who, ready: None, wait: None, ..part });
                small.len() - 1
            });
            small[sum].ns += part.ns;
        }
        let mut place = 0;
        self.parts.retain(|_| {
            place += 1;
            !is_small[place - 1]
        });
        self.parts.extend(small);
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
                names.waits_in(wait.tid, wait.woken_ns, &blocked)
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
        let segments = self.parts.iter().map(|part| PathSegment {
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
                Party::Text(text) => text.to_owned(),
            },
            ready: part.ready.map(called),
            via: part.wait.and_then(|wait| waits[wait].0.clone()),
            waiter: part.wait.map(|wait| match self.waits[wait] {
                Wait { tid, asleep: Some((name, _)), .. } => thread::called(&name.text(), tid),
                Wait { tid, .. } => called(tid),
            }),
            stack: part.wait.map_or_else(Vec::new, |wait| waits[wait].1.clone()),
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

impl Part {
    fn is_like(&self, other: &Part) -> bool {
        let who = match (self.who, other.who) {
            (Party::Disk(one), Party::Disk(other)) => {
                (one.device, one.operation, one.submitter) == (other.device, other.operation, other.submitter)
            }
            (one, other) => one == other,
        };
        who && (self.kind, self.ready, self.wait) == (other.kind, other.ready, other.wait)
    }
}

impl Party {
    /// What threads that are alike have in common.
    fn named(&self) -> Option<(Name, bool)> {
        match *self {
            Party::Thread { name, is_member, .. } | Party::Program { name, is_member } => Some((name, is_member)),
            _ => None,
        }
    }

    /// The same for those that are alike.
    fn key(&self) -> u64 {
        match *self {
            Party::Thread { tid, .. } => u64::from(tid),
            Party::Work(handler) => handler,
            Party::Interrupt(Name(bytes)) | Party::Program { name: Name(bytes), .. } => {
                u64::from_le_bytes(std::array::from_fn(|at| bytes[at]))
            }
            Party::Cpu(cpu) => u64::from(cpu),
            Party::Disk(request) => u64::from(request.device),
            Party::Limit(number) => u64::from(number),
            Party::Quota(cgroup) => cgroup.unwrap_or(0),
            Party::Text(text) => text.len() as u64,
        }
    }
}

/// The same for waits that end alike.
fn ended_by(by: Option<Waker>) -> u64 {
    match by {
        None => 0,
        Some(Waker::Thread(tid) | Waker::Parent(tid)) => 1 << 32 | u64::from(tid),
        Some(Waker::Timer) => 2 << 32,
        Some(Waker::Network) => 3 << 32,
        Some(Waker::Rcu) => 4 << 32,
        Some(Waker::Softirq) => 5 << 32,
        Some(Waker::Irq) => 6 << 32,
        Some(Waker::Disk(request)) => 7 << 32 | u64::from(request.device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As of a build that runs for hours: each process waits once for another one, and once for a CPU.
    #[test]
    fn what_is_kept_does_not_grow_with_the_number_of_threads() {
        let mut found = Found::default();
        let mut now_ns = 1 << 40;
        let mut add = |found: &mut Found, ns: u64, kind, tid: u32, ready, hop| {
            let who = Party::Thread { tid, name: Name::of("cc1"), cgroup: None, is_member: true };
            found.add(Finding::Segment(Segment { from_ns: now_ns - ns, to_ns: now_ns, kind, who, ready, hop }));
            now_ns -= ns;
        };
        for number in 0..20_000_u32 {
            let (tid, waker) = (10 + 2 * number, 11 + 2 * number);
            let by = Some(Waker::Thread(waker));
            found.add(Finding::Hop(Hop { number, within: None, tid, woken_ns: 0, by }));
            add(&mut found, 10, CauseKind::Running, waker, None, Some(number));
            add(&mut found, 5, CauseKind::Running, tid, None, None);
            // The earlier, the longer: those are told one by one.
            add(&mut found, 20 + u64::from(number), CauseKind::Thread, waker, Some(tid), None);
            assert!(found.waits.len() <= 3 * SEGMENTS && found.names.len() <= 4 * SEGMENTS);
        }
        found.fold(None);
        assert!(found.waits.len() <= SEGMENTS, "{} waits", found.waits.len());
        let ready: Vec<u32> = found.parts.iter().filter_map(|part| part.ready).collect();
        assert!(ready.len() > 100 && ready.iter().all(|tid| found.names.contains_key(tid)));
    }
}
