// SPDX-License-Identifier: MIT OR Apache-2.0
//! Adds up the waits and CPU time of threads from their run slices, and chooses the waits that are followed along their paths.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use super::thread::{Group, HeldUpWait, ThreadState, ThreadSums};
use super::{CallKind, HeldUpProgram, Programs, Spawned};
use crate::ActorName;
use crate::object::Object;
use crate::own::{Own, own};
use crate::path::history::{Holder, Name, RunSlice, SwitchIn, SwitchOut, Waker};
use crate::path::{Path, Query, WaitSpan};

/// Maximum number of threads; waits of further ones are only counted.
const MAX_THREADS: usize = 32_768;
/// Number of threads from which those are forgotten that have not run for some time: a table of 32,768 takes tens of
/// megabytes.
const FORGET_FROM: usize = 4_096;
/// That time.
const FORGOTTEN_AFTER_NS: u64 = 60_000_000_000;
/// Maximum number of names under which exited threads are summed.
const MAX_NAMES: usize = 1_024;
/// Total time of the waits of one kind for each sample. So longer waits are sampled more often.
const SAMPLE_NS: u64 = 5_000_000;
/// Maximum number of samples at a time: of each kind of wait of a thread, of all together, and of those that are pending.
const MAX_SAMPLES_OF_GROUP: usize = 3;
const MAX_SAMPLES: usize = 48;
const MAX_DUE: usize = 4_096;
/// Maximum number of programs in a snapshot, and minimum share of the covered time for which each was held up.
const MAX_PROGRAMS: usize = 64;
const MIN_SHARE: f64 = 0.02;
/// Maximum number of programs that others started, and minimum number of their runs a second.
const MAX_SPAWNED: usize = 8;
const MIN_RUNS_A_SECOND: f64 = 5.0;
/// Maximum number of kinds of waits that are to be read, and minimum share of the time of each; soon after a snapshot, of this
/// time: single waits are not read.
const MAX_LEADERS: usize = 12;
const MIN_LEADER_SHARE: f64 = 0.1;
const MIN_LEADER_SPAN_NS: u64 = 1_000_000_000;
/// Time after a snapshot in which the leaders of the span before are still read: the first waits may not be over yet.
const LED_FOR_NS: u64 = 500_000_000;

/// What the live machine knows of waits.
pub trait WaitLookup {
    /// Returns the name of a system call.
    fn call_name(&mut self, number: u16) -> Option<String>;
    /// Returns the object that was read during a wait in the system call `via`, or outside of calls. It is asked for the
    /// waits of a thread in order of time.
    fn object(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object>;
}

/// Threads that were held up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeldUpThreads {
    /// The thread with this TID.
    One(u32),
    /// All threads of this name that have exited.
    OfName(Name),
}

/// Waits of one kind for which threads were held up most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Leader {
    /// The threads.
    pub threads: HeldUpThreads,
    /// Number of the system call, if they waited in one.
    pub call: Option<u16>,
}

/// A wait that is to be followed along its path.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The wait to follow.
    pub query: Query,
    /// Name of the thread.
    pub name: Name,
    group: Group,
    weight: u64,
}

/// A waiter and its main waker. Only the live machine shows how their processes are related.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The waiter.
    pub waiter: u32,
    /// The thread that ended most of its waits.
    pub waker: u32,
}

/// Sums of all threads of a span.
#[derive(Debug, Default)]
pub struct Tally {
    threads: HashMap<u32, ThreadState>,
    exited: HashMap<Name, ThreadSums>,
    /// Number of exited processes by name and creator.
    spawned: HashMap<(Name, u32), u64>,
    calls: HashMap<u16, (CallKind, Option<String>)>,
    covered_ns: u64,
    /// Start and end of the time that was read without a gap.
    read_from_ns: u64,
    read_until_ns: u64,
    on_cpu_ns: u64,
    ready_ns: u64,
    due: Vec<Sample>,
    /// Leaders of the previous span.
    led: Vec<Leader>,
    /// Number of waits, and of starts of programs, that count for no program for lack of room.
    unjudged: u64,
}

impl Tally {
    /// Returns the time up to which slices were read.
    pub fn read_until_ns(&self) -> u64 {
        self.read_until_ns
    }

    /// Adds the run slices of all CPUs between two times, in order of their starts.
    pub fn add(&mut self, (from_ns, until_ns): (u64, u64), slices: &[RunSlice], lookup: &mut dyn WaitLookup) {
        if from_ns != self.read_until_ns {
            // Threads may have run in the gap.
            let read_until_ns = self.read_until_ns;
            self.threads.values_mut().for_each(|thread| {
                thread.sums.lived_ns += read_until_ns.saturating_sub(thread.counted_from_ns);
                (thread.left, thread.counted_from_ns) = (None, from_ns);
            });
            self.read_from_ns = from_ns;
        }
        for slice in slices {
            let Holder::Thread(tid) = slice.holder else { continue };
            if tid != 0 {
                self.add_slice(tid, slice, from_ns, lookup);
            }
        }
        self.covered_ns += until_ns.saturating_sub(from_ns);
        self.read_until_ns = until_ns;
    }

    fn add_slice(&mut self, tid: u32, slice: &RunSlice, from_ns: u64, lookup: &mut dyn WaitLookup) {
        if self.threads.len() >= MAX_THREADS && !self.threads.contains_key(&tid) {
            let ends_wait = matches!(slice.entry, SwitchIn::Woken { .. } | SwitchIn::Preempted { .. });
            self.unjudged += u64::from(ends_wait);
            return;
        }
        if let SwitchIn::Woken { by: Waker::Parent(_), .. } = slice.entry {
            // An earlier thread with this TID has exited, and its exit was not seen.
            self.exit(tid, slice.start_ns);
        }
        if let SwitchIn::Woken { at_ns, by: Waker::Thread(waker), .. } = slice.entry
            && let Some((_, blocked)) = self.threads.get(&tid).and_then(|thread| thread.left)
        {
            let call = blocked.syscall.map(|number| kind_of_call(&mut self.calls, number, lookup));
            // A waker that makes room for data, or releases a lock, does not send a request.
            let takes_requests = matches!(call, Some(CallKind::Reads | CallKind::Idle | CallKind::Futex));
            if let Some(waker) = self.threads.get_mut(&waker).filter(|_| takes_requests) {
                waker.wakes(tid, at_ns);
            }
        }
        let thread = self.threads.entry(tid).or_insert_with(|| ThreadState {
            counted_from_ns: if let SwitchIn::Woken { by: Waker::Parent(_), at_ns, .. } = slice.entry {
                at_ns.max(from_ns)
            } else {
                from_ns
            },
            parent: match slice.entry {
                SwitchIn::Woken { by: Waker::Parent(parent), .. } => {
                    Some(parent).filter(|_| !slice.is_in_parents_process)
                }
                _ => None,
            },
            ..ThreadState::default()
        });
        thread.sums.name = slice.name;
        let on_cpu_ns = slice.end_ns.saturating_sub(slice.start_ns.max(from_ns));
        thread.sums.on_cpu_ns += on_cpu_ns;
        if thread.is_kernel != Some(true) {
            self.on_cpu_ns += on_cpu_ns;
        }
        let runnable = match slice.entry {
            SwitchIn::Preempted { at_ns } => Some((at_ns, None)),
            SwitchIn::Woken { at_ns, by, .. } => Some((at_ns.min(slice.start_ns), Some(by))),
            SwitchIn::GoesOn | SwitchIn::Queued { .. } | SwitchIn::Unseen => None,
        };
        if let Some((runnable_ns, by)) = runnable {
            let (mut waits, mut object) = ([None; 3], None);
            if let (Some(by), Some((left_ns, blocked))) = (by, thread.left.take()) {
                let call = match blocked.syscall {
                    Some(number) => kind_of_call(&mut self.calls, number, lookup),
                    None => CallKind::Other,
                };
                let ns = runnable_ns.saturating_sub(left_ns);
                let group = ThreadState::group_of(blocked, call, by).filter(|_| ns > 0 && slice.stopped.is_none());
                let waker = if let Waker::Thread(tid) = by { Some(tid) } else { None };
                let asked_waker = || waker.is_some_and(|waker| thread.has_asked(waker, left_ns));
                let has_asked = call == CallKind::Writes || asked_waker();
                let wait =
                    |by| HeldUpWait { group: Group::Blocked { by, call: blocked.syscall }, waker, has_asked, ns };
                waits[0] = group.map(|by| (wait(by), left_ns, slice.start_ns, true));
                if waits[0].is_some() {
                    let via = blocked.syscall.and_then(|number| self.calls.get(&number)?.1.as_deref());
                    object = lookup
                        .object(WaitSpan { tid, from_ns: Some(left_ns), woken_ns: runnable_ns, waker: None }, via);
                }
                thread.resumed_ns = slice.start_ns;
            }
            // A wait that began in an earlier read counts whole in the read in which it ends.
            let ready_from_ns = runnable_ns.max(self.read_from_ns).min(slice.start_ns);
            let ready_ns = slice.start_ns - ready_from_ns;
            if ready_ns > 0 {
                let throttled_ns = slice.throttled_ns.min(ready_ns);
                let queued_ns = ready_ns - throttled_ns;
                thread.sums.queued_ns += queued_ns;
                if thread.is_kernel != Some(true) {
                    self.ready_ns += queued_ns;
                }
                let wait = |group, ns| {
                    let wait = HeldUpWait { group, waker: None, has_asked: false, ns };
                    (ns > 0).then_some((wait, ready_from_ns, slice.start_ns, false))
                };
                (waits[1], waits[2]) = (wait(Group::Queued, queued_ns), wait(Group::Throttled, throttled_ns));
            }
            for (wait, from_ns, to_ns, is_wait) in waits.into_iter().flatten() {
                let Some(sums) = thread.sums.add(&wait) else {
                    self.unjudged += 1;
                    continue;
                };
                if let Some(object) = object.take_if(|_| is_wait) {
                    sums.saw(object);
                }
                let weight = sums.unsampled_ns / SAMPLE_NS;
                sums.unsampled_ns %= SAMPLE_NS;
                if weight > 0 && self.due.len() < MAX_DUE {
                    let query = Query { tid, from_ns, to_ns, is_wait, is_command: false };
                    self.due.push(Sample { query, name: slice.name, group: wait.group, weight });
                }
            }
        }
        match slice.exit {
            SwitchOut::Blocked(blocked) => {
                if blocked.is_kernel && thread.is_kernel != Some(true) {
                    self.on_cpu_ns = self.on_cpu_ns.saturating_sub(thread.sums.on_cpu_ns);
                    self.ready_ns = self.ready_ns.saturating_sub(thread.sums.queued_ns);
                }
                thread.is_kernel = Some(blocked.is_kernel);
                thread.left = Some((slice.end_ns, blocked));
            }
            SwitchOut::Preempted => thread.left = None,
            SwitchOut::Dead => self.exit(tid, slice.end_ns),
            SwitchOut::GoesOn => {}
        }
    }

    /// Adds an exited thread to the sums of its name.
    fn exit(&mut self, tid: u32, at_ns: u64) {
        let Some(mut thread) = self.threads.remove(&tid).filter(|thread| thread.is_kernel != Some(true)) else {
            return;
        };
        thread.sums.lived_ns += at_ns.saturating_sub(thread.counted_from_ns);
        if let Some(parent) = thread.parent {
            let key = (thread.sums.name, parent);
            match self.spawned.len() < MAX_NAMES || self.spawned.contains_key(&key) {
                true => *self.spawned.entry(key).or_default() += 1,
                false => self.unjudged += 1,
            }
        }
        self.unjudged += match self.exited.len() < MAX_NAMES || self.exited.contains_key(&thread.sums.name) {
            true => self.exited.entry(thread.sums.name).or_default().absorb(thread.sums),
            false => thread.sums.waits(),
        };
    }

    /// Returns the number of waits, and of starts of programs, since the last call that count for no program, because there
    /// were too many threads, names or kinds of waits.
    pub fn take_unjudged(&mut self) -> u64 {
        std::mem::take(&mut self.unjudged)
    }

    /// Returns samples of the waits of the threads that were held up most. Their paths are to be followed.
    pub fn samples(&mut self) -> Vec<Sample> {
        let mut groups: HashMap<(u32, Group), Vec<Sample>> = HashMap::new();
        for sample in std::mem::take(&mut self.due) {
            let tid = sample.query.tid;
            // Threads that are runnable most of the time are expected to share the CPUs.
            let is_busy = |sums: &ThreadSums| (sums.on_cpu_ns + sums.queued_ns) * 2 > self.covered_ns;
            let is_queued = sample.group == Group::Queued;
            let is_wanted = match self.threads.get(&tid).map(|thread| &thread.sums) {
                Some(sums) => !(is_queued && is_busy(sums)) && sums.may_be_held_up(sample.group),
                // The thread has exited.
                None => !is_queued,
            };
            if !is_wanted {
                continue;
            }
            groups.entry((tid, sample.group)).or_default().push(sample);
        }
        let weight = |samples: &[Sample]| samples.iter().map(|sample| sample.weight).sum::<u64>();
        // Futexes come last.
        let rank =
            |(tid, group): (u32, Group), samples: &[Sample]| (self.is_futex(group), Reverse(weight(samples)), tid);
        let mut groups: Vec<_> = groups.into_iter().map(|(key, samples)| (rank(key, &samples), samples)).collect();
        groups.sort_by_key(|(rank, _)| *rank);
        groups.into_iter().flat_map(|(_, samples)| thinned(&samples)).take(MAX_SAMPLES).collect()
    }

    /// Adds the path of a sample.
    pub fn explain(&mut self, sample: &Sample, path: &Path) {
        let exited = &mut self.exited;
        let sums = self.threads.get_mut(&sample.query.tid).map(|thread| &mut thread.sums);
        if let Some(sums) = sums.or_else(|| exited.get_mut(&sample.name)) {
            sums.explain(sample.group, sample.weight, path);
        }
    }

    /// Returns the waits for which threads were held up most since the last snapshot, and of which not enough were read; soon
    /// after the snapshot, also those of the span before. Their objects are to be read.
    pub fn leaders(&self) -> Vec<Leader> {
        let mut leaders = self.held_up_most(false);
        if self.covered_ns < LED_FOR_NS {
            leaders.extend(&self.led);
        }
        let mut seen = HashSet::new();
        leaders.retain(|leader| seen.insert(*leader));
        leaders.truncate(MAX_LEADERS);
        leaders
    }

    /// Returns the waits for which threads were held up most; `with_read`, also those of which enough were read.
    fn held_up_most(&self, with_read: bool) -> Vec<Leader> {
        let min_ns = (MIN_LEADER_SHARE * self.covered_ns.max(MIN_LEADER_SPAN_NS) as f64) as u64;
        let alive = self.threads.iter().filter(|(_, thread)| thread.is_kernel != Some(true));
        let alive = alive.map(|(&tid, thread)| (HeldUpThreads::One(tid), &thread.sums));
        let exited = self.exited.iter().map(|(&name, sums)| (HeldUpThreads::OfName(name), sums));
        let mut leaders: Vec<(bool, Reverse<u64>, Leader)> = Vec::new();
        for (threads, sums) in alive.chain(exited) {
            for sums in sums.groups.iter().filter(|sums| sums.may_be_held_up() && sums.ns > min_ns) {
                // Of exited threads, these are not judged.
                let is_left_out = sums.is_of_program() && matches!(threads, HeldUpThreads::OfName(_));
                if let Group::Blocked { call, .. } = sums.group
                    && !is_left_out
                    && (with_read || !sums.is_read())
                {
                    leaders.push((self.is_futex(sums.group), Reverse(sums.ns), Leader { threads, call }));
                }
            }
        }
        leaders.sort_unstable();
        leaders.truncate(MAX_LEADERS);
        leaders.into_iter().map(|(_, _, leader)| leader).collect()
    }

    /// Returns whether these waits are in a futex: many threads wait in one, and most of these wait for work.
    fn is_futex(&self, group: Group) -> bool {
        let Group::Blocked { call: Some(call), .. } = group else { return false };
        self.calls.get(&call).is_some_and(|(kind, _)| *kind == CallKind::Futex)
    }

    /// Returns the programs since the last call. `is_work` returns whether the waiter of a pair only waits for work; then
    /// the waker does not hold it up.
    pub fn take(
        &mut self,
        is_work: &dyn Fn(Pair) -> bool,
        call_name: &mut dyn FnMut(u16) -> Option<String>,
    ) -> Programs {
        let until_ns = self.read_until_ns;
        self.led = self.held_up_most(true);
        let covered_ns = std::mem::take(&mut self.covered_ns);
        let mut programs = Programs {
            covered_ns,
            on_cpu_ns: std::mem::take(&mut self.on_cpu_ns),
            ready_ns: std::mem::take(&mut self.ready_ns),
            held_up: Vec::new(),
            spawned: self.take_spawned(covered_ns),
        };
        let is_long = |ns: u64| ns as f64 >= MIN_SHARE * covered_ns as f64;
        let mutual = self.lesser_of_mutual_pairs();
        for (&tid, thread) in &mut self.threads {
            let sums = std::mem::take(&mut thread.sums);
            thread.sums.name = sums.name;
            let lived_ns = until_ns.saturating_sub(thread.counted_from_ns);
            thread.counted_from_ns = until_ns;
            if thread.is_kernel != Some(false) || !is_long(sums.held_up_ns()) {
                continue;
            }
            let mut sums = ThreadSums { lived_ns: sums.lived_ns + lived_ns, ..sums };
            sums.groups.retain(|group| {
                let is_of_program = group.is_of_program();
                let pair = group.main_waker().filter(|_| is_of_program).map(|waker| Pair { waiter: tid, waker });
                pair.is_none_or(|pair| {
                    let reverse = Pair { waiter: pair.waker, waker: pair.waiter };
                    !is_work(pair) && (!mutual.contains(&pair) || is_work(reverse))
                })
            });
            let who = thread.actor(tid);
            programs.held_up.extend(program_of(who, sums, call_name));
        }
        for (name, mut sums) in self.exited.drain() {
            // The wakers of exited threads, and whether these are their parents, are no longer known.
            sums.groups.retain(|group| !group.is_of_program());
            if is_long(sums.held_up_ns()) {
                programs.held_up.extend(program_of(ActorName::program(name.text()), sums, call_name));
            }
        }
        programs.held_up.retain(|program| is_long(program.held_up_ns()));
        self.unjudged += programs.keep_longest(MAX_PROGRAMS);
        // Threads that have not run for a long time are forgotten; when they run again, they count as new threads. Exits in
        // time that was not read are not seen.
        if self.threads.len() > FORGET_FROM {
            self.threads.retain(|_, thread| thread.resumed_ns.saturating_add(FORGOTTEN_AFTER_NS) > until_ns);
            self.threads.shrink_to(2 * self.threads.len());
        }
        programs
    }

    /// Returns the programs that others started often.
    fn take_spawned(&mut self, covered_ns: u64) -> Vec<Spawned> {
        let is_often = |runs: u64| runs as f64 * 1e9 >= MIN_RUNS_A_SECOND * covered_ns as f64;
        let of = |((name, parent), runs): ((Name, u32), u64)| {
            let of_parent = self.threads.get(&parent).map(|thread| thread.sums.name).unwrap_or_default();
            Spawned { name: name.text(), by: ActorName::thread(of_parent.text(), parent), runs }
        };
        let mut often: Vec<Spawned> =
            std::mem::take(&mut self.spawned).into_iter().filter(|&(_, runs)| is_often(runs)).map(of).collect();
        often.sort_by(|a, b| (b.runs, &a.name, &a.by).cmp(&(a.runs, &b.name, &b.by)));
        often.truncate(MAX_SPAWNED);
        often
    }

    /// Returns the pairs in which the waker waits longer for the waiter than the waiter for the waker. Which thread serves
    /// the other is not known: the one that waits less is taken to be the server.
    fn lesser_of_mutual_pairs(&self) -> Vec<Pair> {
        let mut waits: HashMap<(u32, u32), u64> = HashMap::new();
        for (&waiter, thread) in &self.threads {
            for sums in &thread.sums.groups {
                if sums.is_of_program()
                    && let Some(waker) = sums.main_waker()
                {
                    *waits.entry((waiter, waker)).or_default() += sums.ns;
                }
            }
        }
        let is_lesser = |&(&(waiter, waker), &ns): &(&(u32, u32), &u64)| {
            waits.get(&(waker, waiter)).is_some_and(|&other_ns| (other_ns, waker) > (ns, waiter))
        };
        waits.iter().filter(is_lesser).map(|(&(waiter, waker), _)| Pair { waiter, waker }).collect()
    }
}

/// Returns the kind of a system call.
fn kind_of_call(
    calls: &mut HashMap<u16, (CallKind, Option<String>)>,
    number: u16,
    lookup: &mut dyn WaitLookup,
) -> CallKind {
    let (kind, _) = calls.entry(number).or_insert_with(|| {
        let name = lookup.call_name(number);
        (name.as_deref().map_or(CallKind::Other, CallKind::from_name), name)
    });
    *kind
}

/// Returns at most a few samples of one kind, at equal distances, which have the weight of all.
fn thinned(samples: &[Sample]) -> Vec<Sample> {
    let step = samples.len().div_ceil(MAX_SAMPLES_OF_GROUP).max(1);
    let one = |chunk: &[Sample]| {
        let weight = chunk.iter().map(|sample| sample.weight).sum();
        Sample { weight, ..chunk[chunk.len() / 2] }
    };
    samples.chunks(step).map(one).collect()
}

fn program_of(
    who: ActorName,
    sums: ThreadSums,
    call_name: &mut dyn FnMut(u16) -> Option<String>,
) -> Option<HeldUpProgram> {
    if who.comm().and_then(own) == Some(Own::Measures) {
        return None;
    }
    let (lived_ns, on_cpu_ns) = (sums.lived_ns, sums.on_cpu_ns);
    let parts = sums.parts(call_name);
    Some(HeldUpProgram { who, process: None, others: 0, lived_ns, on_cpu_ns, parts })
}

#[cfg(test)]
mod tests;
