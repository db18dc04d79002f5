// SPDX-License-Identifier: MIT OR Apache-2.0
//! Budgets of threads: what they did with their time, with each kind of wait followed to its cause.

mod kind;
mod latencies;
mod ready;
mod waits;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::mpsc;
use std::{mem, thread};

use serde::{Deserialize, Serialize};

use self::kind::{Kind, ThreadLabel, WaitPart};
use self::latencies::Latencies;
use self::ready::Ready;
use self::waits::OpenWait;
use super::command::LongWait;
use super::cursor::NOT_OVER;
use super::history::{Name, Waker};
use super::sums::Sums;
use super::walk::walk_for_sums;
use super::working::Working;
use super::{Actor, CpuTimeline, Finding, Limits, Names, PathSegment, Query, Segment, ThreadRecords};
use crate::object::UnfinishedWait;
use crate::reclaim::{Reclaim, ReclaimCounter};
use crate::wait::{CallWaits, Stop, WaitClass, is_sleep, of_syscall};
use crate::work::Work;
use crate::{CauseKind, Histogram};

/// Maximum number of waits listed one by one.
const MAX_LONGEST: usize = 5;
/// Maximum number of waits, of all threads, kept until the starts of their nested waits are found.
const MAX_KEPT: usize = 1024;
/// Number of findings that the walker sends at a time.
const BATCH: usize = 1024;
/// Maximum number of batches in the channel.
const BATCHES: usize = 8;
/// Minimum duration from which the nesting of waits is kept; of shorter waits with nested waits, only the parts are.
const MIN_NESTED_NS: u64 = 50_000;

/// The time budget of threads in a span of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Budget {
    /// Number of threads.
    pub threads: u64,
    /// Total time of the threads, to which the following fields add up.
    pub total_ns: u64,
    /// Time on a CPU, interrupts included.
    pub on_cpu_ns: u64,
    /// Time slept by design: as long as the thread asked for.
    pub own_sleep_ns: u64,
    /// Waits for a CPU.
    pub ready: Waits,
    /// Other waits, sorted by total time, largest first.
    pub waits: Vec<Waits>,
    /// Longest completed waits, longest first.
    pub longest: Vec<LongWait>,
    /// Number of waits that were not followed to their wakers, or not all the way, because there were too many.
    #[serde(default)]
    pub not_followed: u64,
    /// Functions in which the threads worked, if they were sampled. It is part of `on_cpu_ns`, without interrupts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// Time in which the threads reclaimed memory, by reason. It is part of the other fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reclaim: Vec<Reclaim>,
}

/// What `--json` prints about a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProgramReport {
    /// Name of the program.
    pub name: String,
    /// Number of the program's processes.
    pub processes: u64,
    /// Number of child processes that are left out because a single process was chosen.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub children: u64,
    /// Measured time, in nanoseconds.
    pub span_ns: u64,
    /// Time budget of the program's threads.
    #[serde(flatten)]
    pub budget: Budget,
    /// What threads wait for at the end, as far as it is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unfinished: Vec<UnfinishedWait>,
    /// Throttled time of the program's cgroups and their ancestors (CPU quota), over all CPUs, in nanoseconds.
    pub throttled: BTreeMap<String, u64>,
    /// Lost events, by reason.
    pub lost: BTreeMap<String, u64>,
    /// What is not known, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limitation: Option<String>,
}

/// Kind of event that ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum EndedBy {
    /// Another one of the queried threads.
    Own,
    /// Any other thread.
    Others,
    /// Completion of a block I/O request.
    Disk,
    /// A timer.
    Timer,
    /// A packet from the network.
    Network,
    /// Any other interrupt.
    Interrupt,
    /// The wait continues at the end of the span.
    NotOver,
    /// The wakeup was not recorded.
    Unseen,
}

/// State of a thread from outside the recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutsideState {
    /// Name of the thread.
    pub name: Name,
    /// System call that the thread waits in at the start of the span.
    pub waits_in: Option<String>,
    /// The thread waits outside of system calls at the start of the span.
    pub is_outside_calls: bool,
    /// The thread is a kernel thread.
    pub is_kernel: bool,
    /// Why the thread is stopped at the end of the span.
    pub stop: Option<Stop>,
    /// TID and name of the thread's tracer at the end of the span.
    pub tracer: Option<(u32, Name)>,
}

/// Waits of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Waits {
    /// System call, or other kind of wait, that the threads waited in.
    pub via: String,
    /// Kind of event that ended these waits; `None` for waits for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<EndedBy>,
    /// Total time in nanoseconds.
    pub ns: u64,
    /// Distribution of the durations.
    pub latency: Histogram,
    /// Segments of the waits, as far as they were followed.
    pub path: Vec<PathSegment>,
}

/// Kinds of waits in no known system call.
const OF_KERNEL_THREADS: &str = "waits of kernel threads";
const OUTSIDE_CALLS: &str = "waits outside system calls";
const BEGAN_EARLIER: &str = "waits that began earlier";
const UNRECORDED_START: &str = "waits with unrecorded start";

impl Waits {
    /// Returns whether the system call in which the threads waited is unknown.
    pub fn is_in_no_call(&self) -> bool {
        [OF_KERNEL_THREADS, OUTSIDE_CALLS, BEGAN_EARLIER, UNRECORDED_START].contains(&self.via.as_str())
    }

    /// Returns whether the program waits by design: for a request, a child or a time, none of which came.
    pub fn is_by_design(&self) -> bool {
        matches!(self.ended_by, Some(EndedBy::NotOver | EndedBy::Timer))
            && of_syscall(&self.via) == Some(CallWaits::For(WaitClass::Idle))
            && !self.path.iter().any(PathSegment::gave_up)
    }
}

/// Collects the findings of walks.
struct Gatherer<'a> {
    names: &'a mut dyn Names,
    asked: &'a [Query],
    /// State of each thread from outside the recording.
    known: Vec<Option<&'a OutsideState>>,
    /// TIDs of the queried threads.
    own: HashSet<u32>,
    budget: Budget,
    work: Working<'a>,
    reclaim: ReclaimCounter<'a>,
    waits: BTreeMap<(String, EndedBy), Kind>,
    /// The wait of each thread that is being walked back.
    open: Vec<Option<OpenWait>>,
    /// Explained waits of each thread that lack starts of nested waits, newest first; `kept` counts all.
    unmet: Vec<VecDeque<OpenWait>>,
    kept: usize,
    /// Current wait of each thread for a CPU, in nanoseconds.
    ready_ns: Vec<u64>,
    ready_latencies: Latencies,
    ready: Vec<Ready>,
    /// Index into `ready` for each thread.
    ready_indexes: Vec<usize>,
    from_ns: u64,
}

/// Returns the budget of threads. Each of `asked` is a thread and its lifetime; `known` has state from outside the
/// recording, and `records` what else the threads did. A second thread walks back through the timeline.
pub fn budget(
    past: &mut (dyn CpuTimeline + Send),
    asked: &[Query],
    known: &BTreeMap<u32, OutsideState>,
    limits: &(dyn Limits + Sync),
    names: &mut dyn Names,
    records: &ThreadRecords,
) -> Budget {
    let known: Vec<Option<&OutsideState>> = asked.iter().map(|asked| known.get(&asked.tid)).collect();
    let thread_names: Vec<Option<Name>> = known.iter().map(|known| known.map(|known| known.name)).collect();
    let (ready, ready_indexes) = Ready::for_threads(&thread_names);
    let mut gatherer = Gatherer {
        names,
        asked,
        known,
        own: asked.iter().map(|asked| asked.tid).collect(),
        budget: Budget { threads: asked.len() as u64, ..Budget::default() },
        work: Working::new(&records.samples),
        reclaim: ReclaimCounter::new(&records.reclaim),
        waits: BTreeMap::new(),
        open: asked.iter().map(|_| None).collect(),
        unmet: asked.iter().map(|_| VecDeque::new()).collect(),
        kept: 0,
        ready_ns: vec![0; asked.len()],
        ready_latencies: Latencies::default(),
        ready,
        ready_indexes,
        from_ns: asked.iter().map(|asked| asked.from_ns).min().unwrap_or(0),
    };
    thread::scope(|scope| {
        let (batches, found) = mpsc::sync_channel(BATCHES);
        scope.spawn(move || {
            let mut batch = Vec::with_capacity(BATCH);
            walk_for_sums(past, asked, limits, &mut |number, finding| {
                batch.push((number, finding));
                if batch.len() == BATCH {
                    // The receiver is there until the last batch, unless it panicked.
                    let _ = batches.send(mem::replace(&mut batch, Vec::with_capacity(BATCH)));
                }
            });
            let _ = batches.send(batch);
        });
        for batch in found {
            batch.into_iter().for_each(|(number, finding)| gatherer.add(number, finding));
        }
    });
    gatherer.finish()
}

impl Gatherer<'_> {
    fn add(&mut self, number: usize, finding: Finding) {
        if let Finding::Segment(segment) = finding {
            let is_on_cpu = segment.hop.is_none() && segment.ready.is_none();
            self.reclaim.add(self.asked[number].tid, segment.from_ns..segment.to_ns, is_on_cpu);
        }
        match finding {
            Finding::WakeupEdge(hop) if hop.within.is_none() => {
                self.close(number);
                self.close_ready(number);
                self.open[number] = Some(OpenWait::new(hop));
                return;
            }
            Finding::Segment(segment) if segment.hop.is_none() => {
                self.close(number);
                self.add_own(number, segment);
            }
            Finding::Segment(segment) => self.budget.total_ns += segment.to_ns - segment.from_ns,
            Finding::NotFollowed => self.budget.not_followed += 1,
            Finding::Asleep { hop, .. } if self.is_earlier(number, hop) => return self.meet(number, hop, finding),
            Finding::Unmet { hop } if self.is_earlier(number, hop) => return,
            Finding::Asleep { .. }
            | Finding::Preempted { .. }
            | Finding::Unmet { .. }
            | Finding::WakeupEdge(_)
            | Finding::Called { .. } => {}
        }
        if let Some(open) = &mut self.open[number] {
            open.add(finding);
        }
    }

    /// Adds time in which the thread ran or was runnable.
    fn add_own(&mut self, number: usize, segment: Segment) {
        let ns = segment.to_ns - segment.from_ns;
        self.budget.total_ns += ns;
        if let Some(ready) = segment.ready {
            self.ready_ns[number] += ns;
            self.ready[self.ready_indexes[number]].add(segment.kind, segment.who, ready, ns);
        } else {
            if let Actor::Thread { tid, name, .. } = segment.who {
                self.ready[self.ready_indexes[number]].name(tid, name);
            }
            self.work.add(number, &segment);
            self.close_ready(number);
            self.budget.on_cpu_ns += ns;
        }
    }

    fn close_ready(&mut self, number: usize) {
        let ns = std::mem::take(&mut self.ready_ns[number]);
        if ns > 0 {
            self.budget.ready.ns += ns;
            self.ready_latencies.add(ns);
        }
    }

    fn ended_by(&self, number: usize, open: &OpenWait) -> EndedBy {
        match open.hop.by {
            Some(Waker::Thread(tid) | Waker::Parent(tid)) if self.own.contains(&tid) => EndedBy::Own,
            Some(Waker::Thread(_) | Waker::Parent(_)) => EndedBy::Others,
            Some(Waker::Disk(_)) => EndedBy::Disk,
            Some(Waker::Timer(_)) => EndedBy::Timer,
            Some(Waker::Network) => EndedBy::Network,
            Some(Waker::Rcu | Waker::Softirq | Waker::Irq) => EndedBy::Interrupt,
            None if open.hop.woken_ns == self.asked[number].to_ns => EndedBy::NotOver,
            None => EndedBy::Unseen,
        }
    }

    /// Returns whether a hop is not within the wait that is being walked back.
    fn is_earlier(&self, number: usize, hop: u32) -> bool {
        self.open[number].as_ref().is_none_or(|open| hop < open.hop.number)
    }

    /// Adds the start of a nested wait to an explained wait.
    fn meet(&mut self, number: usize, hop: u32, finding: Finding) {
        let unmet = &mut self.unmet[number];
        let has = |open: &OpenWait| (open.hop.number..=open.last_hop).contains(&hop);
        let Some(at) = unmet.iter().rposition(has) else { return };
        unmet[at].add(finding);
        unmet[at].unmet = unmet[at].unmet.saturating_sub(1);
        if unmet[at].unmet == 0 {
            self.kept -= 1;
            unmet.remove(at).into_iter().for_each(|open| self.count(number, open));
        }
    }

    fn close(&mut self, number: usize) {
        let Some(open) = self.open[number].take().filter(|open| open.ns > 0) else { return };
        if open.unmet > 0 && self.kept < MAX_KEPT {
            self.kept += 1;
            self.unmet[number].push_back(open);
        } else {
            self.count(number, open);
        }
    }

    fn count(&mut self, number: usize, mut open: OpenWait) {
        let ended_by = self.ended_by(number, &open);
        let asked = self.asked[number];
        // Where the thread runs next comes after the end of the recording.
        if open.is_preempted && ended_by == EndedBy::NotOver {
            self.budget.ready.ns += open.ns;
            self.ready_latencies.add(open.ns);
            let rest = Actor::Text(NOT_OVER);
            return self.ready[self.ready_indexes[number]].add(CauseKind::Unknown, rest, asked.tid, open.ns);
        }
        let known = self.known[number];
        let name = known.map(|known| known.name);
        // If the switch-out precedes the recording, the state found at its start shows what the thread waited in.
        let blocked = open.blocked();
        let began_earlier = blocked.is_none() && open.from_ns == asked.from_ns;
        let stop = open.stop().or_else(|| {
            // Only for a wait that is not over. A freezer stops a sleeping thread without waking it; for any other stop
            // the thread has to run.
            let is_still = |stop: &Stop| ended_by == EndedBy::NotOver && (began_earlier || *stop == Stop::Freezer);
            known.and_then(|known| known.stop).filter(is_still)
        });
        if let Some(stop) = stop {
            open.is_stopped(stop, known.and_then(|known| known.tracer));
        }
        let stopped = stop.map(|stop| stop.words().to_owned());
        let in_call = known.filter(|_| began_earlier).and_then(|known| known.waits_in.as_ref());
        let waits_in = stopped.as_ref().or(in_call);
        let (ns, from_ns) = (open.ns, open.from_ns);
        let is_short = ns < MIN_NESTED_NS;
        let may_be_flat = is_short || open.parts().is_some();
        let mut via = may_be_flat.then(|| waits_in.cloned().or_else(|| open.waits_in(self.names))).flatten();
        // An uninterruptible sleep is not the sleep of the call itself: the cgroup may be over its memory limit.
        let may_be_own = !blocked.is_some_and(|blocked| blocked.is_uninterruptible);
        if may_be_own && is_own_sleep(via.as_ref(), ended_by) {
            self.budget.own_sleep_ns += ns;
            return;
        }
        // Waits that were summed have no objects.
        let has_object = !is_short && stop.is_none() && ended_by != EndedBy::NotOver;
        let has_object = has_object && may_be_flat && open.has_object(via.as_deref(), self.names);
        let is_flat = may_be_flat && !has_object;
        let waiter = ThreadLabel::Thread(asked.tid, open.name().or(name).unwrap_or_default());
        let parts = match (open.parts(), open.hop.by) {
            (Some(parts), _) => parts
                .iter()
                .map(|part| (WaitPart::from_segment(waiter, part, parts), part.to_ns - part.from_ns))
                .collect(),
            (None, Some(Waker::Disk(request))) if is_short => vec![(WaitPart::from_request(waiter, request), ns)],
            (None, _) if is_short => open.flat(waiter),
            (None, _) => Vec::new(),
        };
        // A wait that is not over has no waker, and idle threads would fill the list.
        let longest = &self.budget.longest;
        let is_long = longest.len() < MAX_LONGEST || longest.last().is_some_and(|last| last.ns < ns);
        let is_listed = is_long && !is_short && ended_by != EndedBy::NotOver;
        let path = if is_listed || !is_flat { open.path(name, waits_in, stop, self.names) } else { Vec::new() };
        if !is_flat {
            via = path.iter().find(|segment| segment.depth == 1).and_then(|segment| segment.via.clone());
            if may_be_own && is_own_sleep(via.as_ref(), ended_by) {
                self.budget.own_sleep_ns += ns;
                return;
            }
        }
        if is_listed {
            let wait = LongWait { after_ns: from_ns.saturating_sub(self.from_ns), ns, path: path.clone() };
            self.budget.longest.push(wait);
            self.budget.longest.sort_by_key(|wait| Reverse(wait.ns));
            self.budget.longest.truncate(MAX_LONGEST);
        }
        let has_via = via.is_some();
        let is_kernel = blocked.map_or(known.is_some_and(|known| known.is_kernel), |blocked| blocked.is_kernel);
        let is_outside_calls = began_earlier && known.is_some_and(|known| known.is_outside_calls);
        let other = match blocked {
            _ if is_kernel => OF_KERNEL_THREADS,
            Some(_) => OUTSIDE_CALLS,
            None if is_outside_calls => OUTSIDE_CALLS,
            None if began_earlier => BEGAN_EARLIER,
            None => UNRECORDED_START,
        };
        let kind = self.waits.entry((via.unwrap_or_else(|| other.to_owned()), ended_by)).or_default();
        kind.has_via = has_via;
        kind.stop = stop;
        kind.ns += ns;
        kind.latencies.add(ns);
        match is_flat {
            true => parts.into_iter().for_each(|(part, ns)| kind.add_part(part, ns)),
            false => kind.sums.add(path),
        }
    }

    fn finish(mut self) -> Budget {
        for number in 0..self.open.len() {
            self.close(number);
            self.close_ready(number);
            std::mem::take(&mut self.unmet[number]).into_iter().for_each(|open| self.count(number, open));
        }
        let mut ready = Sums::default();
        for of_thread in std::mem::take(&mut self.ready) {
            ready.add(of_thread.finish(self.names));
        }
        self.budget.ready.path = ready.finish();
        self.budget.ready.latency = self.ready_latencies.finish();
        let mut waits = Vec::new();
        for ((via, ended_by), kind) in self.waits {
            waits.push(kind.finish(via, ended_by, self.names));
        }
        waits.sort_by_key(|waits| Reverse(waits.ns));
        Budget { waits, work: self.work.finish(), reclaim: self.reclaim.finish(), ..self.budget }
    }
}

/// Returns whether a wait is a sleep for as long as the thread asked for.
fn is_own_sleep(via: Option<&String>, ended_by: EndedBy) -> bool {
    matches!(ended_by, EndedBy::Timer | EndedBy::NotOver) && via.is_some_and(|via| is_sleep(via))
}
