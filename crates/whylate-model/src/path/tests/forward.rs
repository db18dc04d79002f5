// SPDX-License-Identifier: MIT OR Apache-2.0
//! An oracle that builds the paths forward in time. It shares only the kernel's events with the walk: each thread has a
//! path at any time, and a wakee takes over its waker's path for the time that it slept.

use std::collections::{BTreeMap, VecDeque};

use super::*;
use CauseKind::{IdleExit, Running, Thread, Timer};

/// Maximum number of threads.
const THREADS: usize = 12;

/// The parts of a time, in order and without gaps: start, end, kind, and actor.
type Parts = Vec<(u64, u64, CauseKind, String)>;

/// State of a thread, and its start.
#[derive(Clone, Copy, Debug)]
enum State {
    Runs(u64),
    CanRun(u64),
    Sleeps(u64),
    Gone,
}

#[derive(Clone, Debug)]
struct Follower {
    state: State,
    /// In a wait, the path of its waker since the wait began.
    bounded: Parts,
    /// As for a command: if a thread of the command woke the thread, the whole path of the waker.
    unbounded: Parts,
    /// Start of the last wait, until the thread is switched in.
    slept_ns: Option<u64>,
}

/// A wait or command, and its parts.
struct Answer {
    asked: Query,
    parts: Parts,
}

/// A machine with threads that follow a script.
struct Machine {
    history: Builder,
    /// Thread on each CPU.
    cpus: Vec<u32>,
    /// Threads on each CPU with the time of the switch-in.
    holders: Vec<Vec<(u64, u32)>>,
    can_run: VecDeque<u32>,
    threads: BTreeMap<u32, Follower>,
    now_ns: u64,
    answers: Vec<Answer>,
}

/// Returns whether a thread belongs to the command.
fn is_member(tid: u32) -> bool {
    !tid.is_multiple_of(3)
}

fn called(tid: u32) -> String {
    format!("t{tid}:{tid}")
}

fn since(parts: &Parts, from_ns: u64) -> Parts {
    let later = parts.iter().filter(|part| part.1 > from_ns);
    later.map(|part| (part.0.max(from_ns), part.1, part.2, part.3.clone())).collect()
}

impl Machine {
    /// Starts with a thread on each CPU.
    fn new(cpus: usize) -> Self {
        let mut machine = Machine {
            history: Builder::default(),
            cpus: vec![0; cpus],
            holders: vec![Vec::new(); cpus],
            can_run: VecDeque::new(),
            threads: BTreeMap::new(),
            now_ns: 0,
            answers: Vec::new(),
        };
        for cpu in 0..cpus {
            let tid = cpu as u32 + 1;
            machine.now_ns += 1;
            machine.history.seen(cpu, machine.now_ns, tid, name(tid));
            let state = State::Runs(machine.now_ns);
            let follower = Follower { state, bounded: Vec::new(), unbounded: Vec::new(), slept_ns: None };
            machine.threads.insert(tid, follower);
            machine.holders[cpu].push((machine.now_ns, tid));
            machine.cpus[cpu] = tid;
        }
        machine
    }

    fn add(&mut self, cpu: usize, event: Event) {
        self.now_ns = self.history.add(cpu, self.now_ns, event);
    }

    fn extend(&mut self, tid: u32, parts: impl IntoIterator<Item = (u64, u64, CauseKind, String)>) {
        let follower = self.threads.get_mut(&tid).expect("it is known");
        for part in parts {
            follower.bounded.push(part.clone());
            follower.unbounded.push(part);
        }
    }

    /// Adds what the thread has been doing up to now to its path.
    fn settle(&mut self, tid: u32) {
        let now_ns = self.now_ns;
        if let State::Runs(from_ns) = self.threads[&tid].state {
            self.extend(tid, [(from_ns, now_ns, Running, called(tid))]);
            self.threads.get_mut(&tid).expect("it is known").state = State::Runs(now_ns);
        }
    }

    /// Switches from the current thread to the one that has been runnable for the longest time.
    fn switch(&mut self, cpu: usize, exit: SwitchOut) {
        let (from, to) = (self.cpus[cpu], self.can_run.pop_front().unwrap_or(0));
        self.add(cpu, Event::Switch { from, from_name: name(from), exit, to, to_name: name(to) });
        if from != 0 {
            self.settle(from);
            let now_ns = self.now_ns;
            let follower = self.threads.get_mut(&from).expect("it is known");
            follower.state = match exit {
                SwitchOut::Dead => State::Gone,
                SwitchOut::Preempted | SwitchOut::GoesOn => State::CanRun(now_ns),
                SwitchOut::Blocked(_) => State::Sleeps(now_ns),
            };
            match exit {
                SwitchOut::Blocked(_) => follower.slept_ns = Some(now_ns),
                SwitchOut::Preempted => self.can_run.push_back(from),
                _ => {}
            }
        }
        self.cpus[cpu] = to;
        if to != 0 {
            self.enter(cpu, to);
        }
        self.holders[cpu].push((self.now_ns, to));
    }

    /// Attributes a wait for a CPU to the actors on it.
    fn enter(&mut self, cpu: usize, tid: u32) {
        let now_ns = self.now_ns;
        let State::CanRun(from_ns) = self.threads[&tid].state else { panic!("thread {tid} cannot run") };
        let holders = self.holders[cpu].clone();
        let ends_ns = holders.iter().skip(1).map(|&(at_ns, _)| at_ns).chain([now_ns]);
        for (&(start_ns, holder), end_ns) in holders.iter().zip(ends_ns).filter(|(_, end_ns)| *end_ns > from_ns) {
            let (kind, who) = match holder {
                0 => (IdleExit, format!("CPU {cpu}")),
                holder => (Thread, called(holder)),
            };
            self.extend(tid, [(start_ns.max(from_ns), end_ns, kind, who)]);
        }
        let follower = self.threads.get_mut(&tid).expect("it is known");
        follower.state = State::Runs(now_ns);
        if let Some(from_ns) = follower.slept_ns.take() {
            let asked = Query { tid, from_ns, to_ns: now_ns, is_wait: false, is_command: false };
            self.answers.push(Answer { asked, parts: since(&follower.bounded, from_ns) });
        }
    }

    /// Wakes a thread, from the current thread or from a timer.
    fn wake(&mut self, cpu: usize, tid: u32, by_timer: bool) {
        let State::Sleeps(from_ns) = self.threads[&tid].state else { return };
        let waker = self.cpus[cpu];
        if by_timer || waker == 0 {
            self.add(cpu, Event::WakingBy(tid, Waker::Timer(TimerKind::default())));
            self.extend(tid, [(from_ns, self.now_ns, Timer, "timer".to_owned())]);
        } else {
            self.add(cpu, Event::Waking(tid));
            self.settle(waker);
            let of_waker = self.threads[&waker].clone();
            let (bounded, unbounded) = (since(&of_waker.bounded, from_ns), of_waker.unbounded);
            let woken = self.threads.get_mut(&tid).expect("it is known");
            match is_member(waker) {
                true => woken.unbounded = unbounded,
                false => woken.unbounded.extend(bounded.iter().cloned()),
            }
            woken.bounded.extend(bounded);
        }
        self.threads.get_mut(&tid).expect("it is known").state = State::CanRun(self.now_ns);
        self.can_run.push_back(tid);
    }

    /// A new thread inherits the path of its parent.
    fn make(&mut self, cpu: usize) {
        let (tid, parent) = (self.threads.len() as u32 + 1, self.cpus[cpu]);
        self.add(cpu, Event::New(tid));
        self.settle(parent);
        let state = State::CanRun(self.now_ns);
        let follower = Follower { state, slept_ns: None, ..self.threads[&parent].clone() };
        self.threads.insert(tid, follower);
        self.can_run.push_back(tid);
    }

    /// Performs one step, given the time since the previous one in nanoseconds.
    fn step(&mut self, (after_ns, cpu, what, wakee): (u64, usize, u8, usize)) {
        self.now_ns += after_ns;
        let cpu = cpu % self.cpus.len();
        let asleep: Vec<u32> =
            self.threads.iter().filter(|(_, one)| matches!(one.state, State::Sleeps(_))).map(|(&tid, _)| tid).collect();
        let sleeper = (!asleep.is_empty()).then(|| asleep[wakee % asleep.len()]);
        let is_idle = self.cpus[cpu] == 0;
        match (what, sleeper) {
            _ if is_idle && !self.can_run.is_empty() => self.switch(cpu, SwitchOut::Preempted),
            (0..3, Some(tid)) if !is_idle => self.wake(cpu, tid, false),
            (3, Some(tid)) => self.wake(cpu, tid, true),
            (4..8, _) if !is_idle => self.switch(cpu, SwitchOut::Blocked(Blocked::default())),
            (8, _) if !is_idle && !self.can_run.is_empty() => self.switch(cpu, SwitchOut::Preempted),
            (9, _) if !is_idle && self.threads.len() < THREADS => self.make(cpu),
            (10, _) if !is_idle && self.threads.len() > THREADS / 2 => self.switch(cpu, SwitchOut::Dead),
            _ => {}
        }
    }

    /// Returns the timeline, and the expected answers.
    fn end(mut self) -> (Recorded, Vec<Answer>) {
        self.now_ns += 5;
        for tid in self.cpus.clone().into_iter().filter(|&tid| tid != 0) {
            self.settle(tid);
            let (from_ns, to_ns) = (self.cpus.len() as u64, self.now_ns);
            let parts = since(&self.threads[&tid].unbounded, from_ns);
            let asked = Query { tid, from_ns, to_ns, is_wait: false, is_command: true };
            self.answers.push(Answer { asked, parts });
        }
        let mut past = self.history.finish(self.now_ns + 1);
        past.cpus.iter_mut().flatten().for_each(|slice| *slice = slice.marked(|tid, _| is_member(tid)));
        (past, self.answers)
    }
}

/// Returns the total time by kind and actor.
fn totals(parts: impl IntoIterator<Item = (u64, CauseKind, String)>) -> BTreeMap<String, u64> {
    let mut totals = BTreeMap::new();
    for (ns, kind, who) in parts {
        *totals.entry(format!("{kind:?} {who}")).or_default() += ns;
    }
    totals
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Exact to the nanosecond, as nothing is missing.
    #[test]
    fn walk_matches_forward_oracle(
        cpus in 1_usize..4,
        steps in prop::collection::vec((1_u64..1_000, 0_usize..3, 0_u8..11, 0_usize..THREADS), 1..300),
    ) {
        let mut machine = Machine::new(cpus);
        steps.into_iter().for_each(|step| machine.step(step));
        let (past, answers) = machine.end();
        for Answer { asked, parts } in answers {
            let forward = totals(parts.into_iter().map(|(from_ns, to_ns, kind, who)| (to_ns - from_ns, kind, who)));
            let backward = path_of(past.clone(), asked).segments;
            let backward = totals(backward.into_iter().map(|segment| (segment.ns, segment.kind, segment.who.to_string())));
            prop_assert_eq!(forward, backward, "{:?}", asked);
        }
    }
}
