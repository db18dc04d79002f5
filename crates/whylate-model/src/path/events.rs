// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds the scheduling timeline from kernel events in order of time, as other tools have recorded them.

use std::collections::HashMap;

use super::history::{
    Blocked, Holder, Move, Moves, Name, Operation, Recorded, Request, RunSlice, SwitchIn, SwitchOut, Waker,
};
use super::timer::TimerKind;
use crate::wait::Stop;

/// An event on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// `sched_switch`: a context switch; TID 0 is the idle task.
    Switch {
        /// TID switched out.
        from: u32,
        /// Name of the thread switched out.
        from_name: Name,
        /// Kind of the switch-out.
        exit: SwitchOut,
        /// TID switched in.
        to: u32,
        /// Name of the thread switched in.
        to_name: Name,
    },
    /// `sched_waking`: the current actor of the CPU wakes a thread.
    Waking(u32),
    /// `sched_waking` in an interrupt or softirq without a recorded entry, with the context as far as it is
    /// known.
    WakingBy(u32, Waker),
    /// `sched_wakeup`: a thread becomes runnable.
    Awake(u32),
    /// `sched_migrate_task`: a thread moves to another CPU's run queue; the second field is the CPU that it leaves.
    Moved(u32, u32),
    /// `sched_wakeup_new`: a thread is created.
    New(u32),
    /// `sched_process_exec`: the current thread executes another program.
    Exec(Name),
    /// The current thread takes over the TID of its process's first thread, which has exited, to execute a program.
    Renumbered(u32),
    /// `irq_handler_entry`: a hardware interrupt handler starts.
    Irq(Name),
    /// The hardware interrupt handler ends.
    IrqEnds,
    /// A softirq starts, by its number (include/linux/interrupt.h).
    Softirq(u8),
    /// The softirq ends.
    SoftirqEnds,
    /// A softirq is raised on this CPU.
    SoftirqRaised(u8),
    /// A timer's function starts, of this kind.
    TimerExpires(TimerKind),
    /// The timer's function ends.
    TimerEnds,
    /// A work item is queued, by its address; with the context if the entry of its interrupt or softirq may not be
    /// recorded.
    Queued(u64, Option<Waker>),
    /// A worker starts an item, by its address, if recorded, and the ID of its function.
    Work(Option<u64>, u64),
    /// The worker has finished the item.
    WorkEnds,
    /// A block I/O request is created or inserted: device, sector, operation.
    RequestBegins(u32, u64, Operation),
    /// The request is issued to the device.
    RequestIssued(u32, u64, Operation),
    /// The request completes.
    RequestDone(u32, u64),
    /// Events of this CPU are missing since the previous one.
    Lost,
}

/// Names of softirqs by number (include/linux/interrupt.h).
pub const SOFTIRQS: [&str; 10] =
    ["hi", "timer", "net_tx", "net_rx", "block", "irq_poll", "tasklet", "sched", "hrtimer", "rcu"];
const TIMER: u8 = 1;
const NET_TX: u8 = 2;
const NET_RX: u8 = 3;
const HRTIMER: u8 = 8;
const RCU: u8 = 9;
/// Indexes into `Cpu::timers`.
const IN_IRQ: usize = 0;
const IN_SOFTIRQ: usize = 1;
/// Maximum number of outstanding requests, and of queued items that no worker has started.
const MAX_REQUESTS: usize = 1 << 16;
const MAX_ITEMS: usize = 1 << 16;

#[derive(Clone, Debug, Default)]
struct Cpu {
    /// Start of the current slice; `None` if the actor is unknown.
    since_ns: Option<u64>,
    /// Time of the CPU's last event.
    seen_ns: u64,
    tid: u32,
    name: Name,
    entry: SwitchIn,
    moved: Option<Moves>,
    /// Why the thread was stopped until it was switched in, if it was.
    stopped: Option<Stop>,
    handler: Option<u64>,
    irq: Option<Name>,
    softirq: Option<u8>,
    /// Kind of the latest timer that ran in the current interrupt, and in the current softirq.
    timers: [Option<TimerKind>; 2],
    /// The kernel's own timer that sent the packets that the network softirq receives.
    sending_timer: Option<TimerKind>,
    done: Option<Request>,
    /// TID of the sender of the packets that the network softirq receives.
    sender: Option<u32>,
}

/// Way in which a thread became runnable.
#[derive(Clone, Copy, Debug)]
struct Ready {
    entry: SwitchIn,
    /// `sched_wakeup` was recorded.
    is_awake: bool,
    moved: Option<Moves>,
}

impl Ready {
    fn new(entry: SwitchIn, is_awake: bool) -> Self {
        Ready { entry, is_awake, moved: None }
    }
}

/// Builds slices from events.
#[derive(Debug, Default)]
pub struct Builder {
    cpus: Vec<Cpu>,
    ready: HashMap<u32, Ready>,
    requests: HashMap<(u32, u64), Request>,
    /// Queuing of items, by their addresses.
    queued: HashMap<u64, SwitchIn>,
    /// Work item handlers of workers that were switched out within an item, by TID.
    interrupted: HashMap<u32, u64>,
    /// Why switched-out threads are stopped, by TID.
    stops: HashMap<u32, Stop>,
    past: Recorded,
    last_ns: u64,
    has_wakeups: bool,
    /// Number of context switches that were not recorded: a thread was on a CPU while another one was seen taking it.
    pub unseen_switches: u64,
    /// Number of items that lost their queuer.
    pub queuers_lost: u64,
}

impl Builder {
    /// Adds an event of a CPU, after all that were added before, and returns its time. Events at the same time are
    /// spread, each a nanosecond after the previous one.
    pub fn add(&mut self, cpu: usize, at_ns: u64, event: Event) -> u64 {
        let at_ns = self.advance_to(cpu, at_ns);
        match event {
            Event::Switch { from, from_name, exit, to, to_name } => {
                self.switch(cpu, at_ns, (from, from_name, exit), (to, to_name));
            }
            Event::Waking(tid) => {
                let entry = SwitchIn::Woken { at_ns, by: self.waker(cpu), cpu: cpu as u32 };
                self.ready.insert(tid, Ready::new(entry, false));
            }
            Event::WakingBy(tid, by) => {
                let by = self.waker_in(cpu, by);
                self.ready.insert(tid, Ready::new(SwitchIn::Woken { at_ns, by, cpu: cpu as u32 }, false));
            }
            Event::Awake(tid) => {
                self.has_wakeups = true;
                if let Some(ready) = self.ready.get_mut(&tid) {
                    ready.is_awake = true;
                }
            }
            Event::Moved(tid, from_cpu) => {
                // A thread may change its run queue while it is being woken; before, it was in none.
                if let Some(ready) = self.ready.get_mut(&tid).filter(|ready| ready.is_awake) {
                    let last = Move { at_ns, from_cpu };
                    ready.moved = Some(ready.moved.map_or_else(|| Moves::one(last), |moves| moves.and_then(last)));
                }
            }
            Event::New(tid) => {
                let by = Waker::Parent(self.cpus[cpu].tid);
                self.ready.insert(tid, Ready::new(SwitchIn::Woken { at_ns, by, cpu: cpu as u32 }, true));
            }
            Event::Exec(name) => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                self.cpus[cpu].name = name;
            }
            Event::Renumbered(tid) => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                self.ready.remove(&tid);
                let state = &mut self.cpus[cpu];
                let before = std::mem::replace(&mut state.tid, tid);
                // A walk back continues with the old TID.
                state.entry = SwitchIn::Woken { at_ns, by: Waker::Parent(before), cpu: cpu as u32 };
            }
            Event::Irq(name) => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                let state = &mut self.cpus[cpu];
                (state.irq, state.timers[IN_IRQ], state.done) = (Some(name), None, None);
            }
            Event::IrqEnds => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                self.cpus[cpu].irq = None;
            }
            Event::Softirq(number) => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                let state = &mut self.cpus[cpu];
                (state.softirq, state.timers[IN_SOFTIRQ], state.done) = (Some(number), None, None);
            }
            Event::SoftirqEnds => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                let state = &mut self.cpus[cpu];
                if let Some(NET_RX | NET_TX) = state.softirq {
                    (state.sender, state.sending_timer) = (None, None);
                }
                state.softirq = None;
            }
            Event::SoftirqRaised(number) => {
                let state = &mut self.cpus[cpu];
                if matches!(number, NET_RX | NET_TX) && state.irq.is_none() {
                    let timer = state.timers[IN_SOFTIRQ].filter(|timer| !timer.is_own());
                    match state.softirq {
                        None => (state.sender, state.sending_timer) = (Some(state.tid), None),
                        Some(TIMER | HRTIMER) if timer.is_some() => state.sending_timer = timer,
                        Some(_) => {}
                    }
                }
            }
            Event::TimerExpires(kind) => {
                let state = &mut self.cpus[cpu];
                state.timers[usize::from(state.irq.is_none())] = Some(kind);
            }
            Event::TimerEnds => {
                let state = &mut self.cpus[cpu];
                if let Some(kind) = &mut state.timers[usize::from(state.irq.is_none())] {
                    // A later wakeup may be another actor's.
                    *kind = TimerKind::Other;
                }
            }
            Event::Queued(item, by) => {
                // Cancelled items are never removed.
                if self.queued.len() >= MAX_ITEMS {
                    self.queuers_lost += self.queued.drain().len() as u64;
                }
                let by = by.map_or_else(|| self.waker(cpu), |by| self.waker_in(cpu, by));
                self.queued.insert(item, SwitchIn::Queued { at_ns, by, cpu: cpu as u32 });
            }
            Event::Work(item, handler) => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                let state = &mut self.cpus[cpu];
                state.handler = Some(handler);
                // The item of a flush is queued without an event.
                if let Some(entry) = item.and_then(|item| self.queued.remove(&item))
                    && state.irq.is_none()
                    && state.softirq.is_none()
                {
                    state.entry = entry;
                }
            }
            Event::WorkEnds => {
                self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
                self.cpus[cpu].handler = None;
            }
            Event::RequestBegins(device, sector, operation) => {
                self.begin_request(cpu, at_ns, device, sector, operation)
            }
            Event::RequestIssued(device, sector, operation) => {
                self.begin_request(cpu, at_ns, device, sector, operation);
                if let Some(request) = self.requests.get_mut(&(device, sector)) {
                    request.issued_ns = at_ns;
                }
            }
            Event::RequestDone(device, sector) => {
                if let Some(request) = self.requests.remove(&(device, sector)) {
                    self.cpus[cpu].done = Some(request);
                }
            }
            Event::Lost => self.lose(cpu),
        }
        self.cpus[cpu].seen_ns = at_ns;
        at_ns
    }

    /// Records that a thread is on a CPU just before the event added next. If it cannot have been there since the CPU's
    /// last event, the CPU's actor in between is unknown.
    pub fn seen(&mut self, cpu: usize, at_ns: u64, tid: u32, name: Name) {
        if self.cpus.get(cpu).is_some_and(|state| state.since_ns.is_some() && state.tid == tid) {
            return;
        }
        let at_ns = self.advance_to(cpu, at_ns);
        if self.cpus[cpu].since_ns.is_some() {
            self.unseen_switches += 1;
            self.lose(cpu);
        }
        self.ready.remove(&tid);
        let state = &mut self.cpus[cpu];
        (state.tid, state.name, state.entry) = (tid, name, SwitchIn::GoesOn);
        (state.since_ns, state.seen_ns) = (Some(at_ns), at_ns);
    }

    /// Returns the TID of the thread known to be on a CPU.
    pub fn holder(&self, cpu: usize) -> Option<u32> {
        self.cpus.get(cpu).filter(|state| state.since_ns.is_some()).map(|state| state.tid)
    }

    fn advance_to(&mut self, cpu: usize, at_ns: u64) -> u64 {
        while self.cpus.len() <= cpu {
            self.cpus.push(Cpu::default());
            self.past.cpus.push(Vec::new());
        }
        self.last_ns = at_ns.max(self.last_ns.saturating_add(1));
        self.last_ns
    }

    /// Marks all since the CPU's last event as unknown. Any runnable thread may have run there and blocked again.
    fn lose(&mut self, cpu: usize) {
        if self.cpus[cpu].since_ns.is_some() {
            self.end_slice(cpu, self.cpus[cpu].seen_ns, SwitchOut::GoesOn);
        }
        self.cpus[cpu] = Cpu { seen_ns: self.cpus[cpu].seen_ns, ..Cpu::default() };
        self.ready.clear();
        self.queued.clear();
        self.interrupted.clear();
        self.stops.clear();
    }

    /// Returns the timeline up to `at_ns`.
    pub fn finish(mut self, at_ns: u64) -> Recorded {
        for cpu in 0..self.cpus.len() {
            self.end_slice(cpu, at_ns, SwitchOut::GoesOn);
        }
        self.past
    }

    fn switch(
        &mut self,
        cpu: usize,
        at_ns: u64,
        (from, from_name, exit): (u32, Name, SwitchOut),
        (to, to_name): (u32, Name),
    ) {
        if self.cpus[cpu].since_ns.is_some() && self.cpus[cpu].tid != from {
            self.unseen_switches += 1;
            self.lose(cpu);
        }
        let state = &mut self.cpus[cpu];
        (state.irq, state.softirq, state.tid) = (None, None, from);
        if state.name == Name::default() {
            state.name = from_name;
        }
        self.end_slice(cpu, at_ns, exit);
        let waking = self.ready.remove(&from);
        // If the waking precedes the switch-out, and its wakeup follows it, the thread was still running when it was
        // woken: it need not wait at all.
        let is_woken = self.has_wakeups && waking.is_some_and(|ready| !ready.is_awake);
        if exit == SwitchOut::Preempted || matches!(exit, SwitchOut::Blocked(_)) && is_woken {
            self.ready.insert(from, Ready::new(SwitchIn::Preempted { at_ns }, true));
        }
        let (entry, moved) =
            self.ready.remove(&to).map_or((SwitchIn::Unseen, None), |ready| (ready.entry, ready.moved));
        let state = &mut self.cpus[cpu];
        if let Some(handler) = state.handler.take().filter(|_| exit != SwitchOut::Dead) {
            self.interrupted.insert(from, handler);
        }
        (state.tid, state.name, state.handler) = (to, to_name, self.interrupted.remove(&to));
        state.entry = if to == 0 { SwitchIn::GoesOn } else { entry };
        state.moved = moved;
        state.stopped = self.stops.remove(&to).filter(|_| matches!(entry, SwitchIn::Woken { .. }));
        if let SwitchOut::Blocked(Blocked { stop: Some(stop), .. }) = exit {
            self.stops.insert(from, stop);
        }
        (state.sender, state.sending_timer, state.done) = (None, None, None);
    }

    fn end_slice(&mut self, cpu: usize, at_ns: u64, exit: SwitchOut) {
        let state = &mut self.cpus[cpu];
        let Some(start_ns) = state.since_ns.replace(at_ns) else { return };
        let is_interrupt = state.irq.is_some() || state.softirq.is_some();
        let (holder, name) = match (state.irq, state.softirq, state.handler) {
            (Some(name), ..) => (Holder::Irq { late_ns: 0 }, name),
            (_, Some(number), _) => {
                let name = SOFTIRQS.get(usize::from(number)).map_or_else(Name::default, |name| Name::new(name));
                (Holder::Softirq, name)
            }
            (.., Some(handler)) => (Holder::Work { tid: state.tid, handler }, state.name),
            _ if state.tid == 0 => (Holder::Idle, state.name),
            _ => (Holder::Thread(state.tid), state.name),
        };
        let (entry, moved, stopped) = match is_interrupt {
            true => (SwitchIn::GoesOn, None, None),
            false => (std::mem::take(&mut state.entry), state.moved.take(), state.stopped.take()),
        };
        if start_ns < at_ns || exit != SwitchOut::GoesOn || entry != SwitchIn::GoesOn {
            let slice =
                RunSlice { start_ns, end_ns: at_ns, holder, name, entry, moved, exit, stopped, ..RunSlice::default() };
            self.past.cpus[cpu].push(slice);
        }
    }

    /// Returns the waker for a wakeup on this CPU now.
    fn waker(&self, cpu: usize) -> Waker {
        let state = &self.cpus[cpu];
        match (state.irq, state.softirq) {
            (Some(_), _) => match (state.timers[IN_IRQ], state.done) {
                (Some(timer), _) => Waker::Timer(timer),
                (None, done) => done.map_or(Waker::Irq, Waker::Disk),
            },
            (None, Some(TIMER | HRTIMER)) => Waker::Timer(state.timers[IN_SOFTIRQ].unwrap_or_default()),
            (None, Some(RCU)) => Waker::Rcu,
            (None, Some(NET_RX | NET_TX)) => match (state.sender, state.sending_timer) {
                (Some(sender), _) => Waker::Thread(sender),
                (None, Some(timer)) => Waker::Timer(timer),
                (None, None) => Waker::Network,
            },
            (None, Some(_)) => state.done.map_or(Waker::Softirq, Waker::Disk),
            // The idle task wakes no thread: an interrupt that is not recorded does.
            (None, None) if state.tid == 0 => state.done.map_or(Waker::Irq, Waker::Disk),
            (None, None) => Waker::Thread(state.tid),
        }
    }

    /// Returns the waker for a wakeup known to be in an interrupt or softirq.
    fn waker_in(&self, cpu: usize, by: Waker) -> Waker {
        let state = &self.cpus[cpu];
        let is_told = state.irq.is_some() || state.softirq.is_some() && by == Waker::Softirq;
        match by {
            _ if is_told => self.waker(cpu),
            Waker::Irq | Waker::Softirq => state.done.map_or(by, Waker::Disk),
            by => by,
        }
    }

    fn begin_request(&mut self, cpu: usize, at_ns: u64, device: u32, sector: u64, operation: Operation) {
        if self.requests.len() >= MAX_REQUESTS && !self.requests.contains_key(&(device, sector)) {
            return;
        }
        let submitter = self.cpus[cpu].tid;
        let new = || Request { queued_ns: at_ns, issued_ns: at_ns, device, operation, submitter };
        self.requests.entry((device, sector)).or_insert_with(new);
    }
}
