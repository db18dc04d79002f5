// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reference implementation of the walk without an index of cursors: each change is shown to each cursor.
//! [`super::super::walk()`] must report the same findings.
//!
//! The walk goes strictly back in time, so it needs no cycle detection. It follows one thread at a time: while the
//! thread is on a CPU, it is charged itself; while it is runnable, the actor on its CPU is charged; where it was woken,
//! the walk continues with the waker, until it reaches the switch-out of the waiter.

use super::super::cursor::{DEEPEST, Woken, resumed_by};
use super::super::history::{Holder, Move, Request, RunSlice, SwitchIn, SwitchOut, Waker};
use super::super::items::{Item, Items};
use super::super::rewind::{Change, CpuState, Rewind};
use super::super::{Actor, CpuTimeline, Finding, Limits, Query, Segment, WakeupEdge};
use crate::{CauseKind, thread};

/// Tolerance between a caller's switch-in time and the timeline's: a vCPU may be descheduled between the two events.
const SLACK_NS: u64 = 20_000_000;

/// TID of no thread.
const NO_THREAD: u32 = u32::MAX;

const NOT_RECORDED: &str = "not recorded";

/// A wait that was followed to its waker.
#[derive(Clone, Copy, Debug)]
struct Frame {
    tid: u32,
    hop: u32,
}

/// Actor that a walk is following.
#[derive(Clone, Copy, Debug)]
enum Mode {
    /// The walk has not started.
    Before,
    /// The thread is on this CPU, possibly below an interrupt.
    Running {
        cpu: usize,
    },
    /// The thread is runnable and waits for this CPU.
    Ready {
        cpu: usize,
        since: Since,
        moved: Option<Move>,
        /// Time until which the thread was not allowed to run, and the limit.
        limit: Option<(u64, Actor)>,
    },
    /// No thread can be followed until the innermost waiter's switch-out.
    Leaf {
        kind: CauseKind,
        who: Actor,
    },
    /// A block I/O request is at its device (`is_issued`), or queued for it.
    Disk {
        request: Request,
        is_issued: bool,
    },
    Done,
}

/// Start of a thread's run-queue wait.
#[derive(Clone, Copy, Debug)]
enum Since {
    Woken(Woken),
    /// The thread lost its CPU at this time.
    Lost(u64),
}

impl Since {
    fn at_ns(self) -> u64 {
        match self {
            Since::Woken(Woken { at_ns, .. }) | Since::Lost(at_ns) => at_ns,
        }
    }

    fn can_be_before(self, to_ns: u64) -> bool {
        match self {
            Since::Woken(Woken { by: None, .. }) => true,
            Since::Woken(Woken { at_ns, .. }) | Since::Lost(at_ns) => at_ns < to_ns,
        }
    }
}

/// The state of one walk.
#[derive(Debug)]
struct Cursor {
    asked: Query,
    /// Start of the explained time.
    now_ns: u64,
    mode: Mode,
    /// TID of the thread that is followed.
    tid: u32,
    frames: Vec<Frame>,
    hops: u32,
    items: Items,
}

/// Walks back through the timeline for each of `asked`, and reports findings newest first: the segments of each query
/// partition its time. Nothing is kept after it was reported, so memory does not grow with time.
pub fn walk_every(
    past: &mut dyn CpuTimeline,
    asked: &[Query],
    limits: &dyn Limits,
    found: &mut dyn FnMut(usize, Finding),
) {
    let mut order: Vec<usize> = (0..asked.len()).collect();
    order.sort_by_key(|&index| asked[index].to_ns);
    let mut cursors: Vec<(usize, Cursor)> = Vec::new();
    let mut rewind = Rewind::new(past, false);
    loop {
        let reached_ns = rewind.next_ns().unwrap_or(0);
        while let Some(&index) = order.last()
            && asked[index].to_ns.saturating_add(SLACK_NS) >= reached_ns
        {
            order.pop();
            cursors.push((index, Cursor::new(asked[index])));
        }
        let change = rewind.next();
        for (index, cursor) in &mut cursors {
            let mut report = |finding| found(*index, finding);
            cursor.go_back(&rewind, reached_ns, change.as_ref(), limits, &mut report);
        }
        cursors.retain(|(_, cursor)| !matches!(cursor.mode, Mode::Done));
        match change {
            Some(change) if !(cursors.is_empty() && order.is_empty()) => rewind.pass(&change),
            _ => break,
        }
    }
}

impl Cursor {
    fn new(asked: Query) -> Self {
        let mode = if asked.from_ns < asked.to_ns { Mode::Before } else { Mode::Done };
        Cursor {
            asked,
            now_ns: asked.to_ns,
            mode,
            tid: asked.tid,
            frames: Vec::new(),
            hops: 0,
            items: Items::default(),
        }
    }

    /// Explains the time after `reached_ns`, which is the time of `change`.
    fn go_back(
        &mut self,
        rewind: &Rewind<'_>,
        reached_ns: u64,
        change: Option<&Change>,
        limits: &dyn Limits,
        found: &mut dyn FnMut(Finding),
    ) {
        if reached_ns >= self.asked.to_ns {
            // Only the switch-in matters until then: the earliest one after the end counts, if the thread was waiting
            // at the end.
            if let Some(change) = change.filter(|change| change.after.holder.tid() == Some(self.asked.tid)) {
                self.enter(change, limits, found);
                self.items = Items::default();
                if !matches!(self.mode, Mode::Ready { since, .. } if since.can_be_before(self.asked.to_ns)) {
                    self.mode = Mode::Before;
                }
            }
            return;
        }
        if self.now_ns == self.asked.to_ns && self.hops == 0 {
            match (rewind.cpu_of(self.tid), self.mode) {
                (Some(cpu), _) => self.mode = Mode::Running { cpu },
                (None, Mode::Before) => self.lose("not over yet", found),
                _ => {}
            }
        }
        let until_ns = reached_ns.max(self.asked.from_ns);
        // Events between two changes: wakeups, and the phases of requests.
        while let Some(at_ns) = self.due_ns(reached_ns).filter(|&at_ns| at_ns >= until_ns && at_ns > self.asked.from_ns)
        {
            self.explain(rewind, at_ns, found);
            self.pass_due(rewind, found);
        }
        let asleep = change.and_then(|change| self.frame_that_begins(&change.before, change.at_ns));
        if let (Some(index), Some(change)) = (asleep, change) {
            let (hop, name) = (self.frames[index].hop, change.before.name);
            match change.before.exit {
                // `from_ns` may be later than the switch-out.
                SwitchOut::Blocked(blocked) => found(Finding::Asleep { hop, name, blocked, at_ns: until_ns }),
                SwitchOut::Preempted => found(Finding::Preempted { hop }),
                SwitchOut::GoesOn | SwitchOut::Dead => {}
            }
        }
        let is_back = change.is_some_and(|change| self.is_back(&change.before));
        let is_own = change.is_some_and(|change| self.lane() == Some(change.cpu));
        if is_own || is_back || asleep.is_some() || until_ns == self.asked.from_ns {
            self.explain(rewind, until_ns, found);
        }
        match change {
            _ if until_ns == self.asked.from_ns => self.mode = Mode::Done,
            None => {
                self.mode = unknown(NOT_RECORDED);
                self.explain(rewind, self.asked.from_ns, found);
                self.mode = Mode::Done;
            }
            // The beginning of the wait.
            Some(_) if asleep == Some(0) && self.asked.is_wait => self.mode = Mode::Done,
            Some(change) => self.pass(change, asleep, is_back, limits, found),
        }
    }

    /// Moves to before a change; all time that it matters for is explained.
    fn pass(
        &mut self,
        change: &Change,
        asleep: Option<usize>,
        is_back: bool,
        limits: &dyn Limits,
        found: &mut dyn FnMut(Finding),
    ) {
        if let Some(index) = asleep {
            self.tid = self.frames[index].tid;
            self.frames.truncate(index);
            self.items.up_to(index + 1);
            self.mode = Mode::Running { cpu: change.cpu };
        } else if is_back {
            self.mode = Mode::Running { cpu: change.cpu };
        } else if let Mode::Running { cpu } = self.mode
            && cpu == change.cpu
        {
            if change.after.holder.tid() == Some(self.tid) {
                self.enter(change, limits, found);
            }
            let is_other = match change.before.holder {
                Holder::Thread(tid) | Holder::Work { tid, .. } => tid != self.tid,
                Holder::Idle | Holder::Unrecorded => true,
                Holder::Irq { .. } | Holder::Softirq => false,
            };
            if matches!(self.mode, Mode::Running { .. }) && is_other {
                self.lose("how it got its CPU was not seen", found);
            }
        }
    }

    /// Returns the CPU to which the current time is attributed.
    fn lane(&self) -> Option<usize> {
        match self.mode {
            Mode::Running { cpu } | Mode::Ready { cpu, .. } => Some(cpu),
            _ => None,
        }
    }

    /// Returns the next time at which something happens to the followed thread without a context switch.
    fn due_ns(&self, reached_ns: u64) -> Option<u64> {
        let of_mode = match self.mode {
            Mode::Ready { moved: Some(moved), .. } => Some(moved.at_ns),
            Mode::Ready { since: Since::Woken(woken), .. } => Some(woken.at_ns),
            // If the context switch was recorded at this time, it is handled there.
            Mode::Ready { since: Since::Lost(at_ns), .. } if at_ns > reached_ns => Some(at_ns),
            Mode::Disk { request, is_issued: true } => Some(request.issued_ns),
            Mode::Disk { request, is_issued: false } => Some(request.queued_ns),
            _ => None,
        };
        of_mode.max(self.items.due_ns()).map(|at_ns| at_ns.min(self.now_ns))
    }

    /// Takes the item that is due. Its worker may have been woken for it, just after it was queued.
    fn take_item_due(&mut self) -> Option<Item> {
        let due = self.items.take_due(self.now_ns);
        due.or_else(|| match self.mode {
            Mode::Ready { since: Since::Woken(woken), .. } if !woken.is_within_item => {
                self.items.take_woken_for(self.frames.len(), woken)
            }
            _ => None,
        })
    }

    fn pass_due(&mut self, rewind: &Rewind<'_>, found: &mut dyn FnMut(Finding)) {
        if let Some(item) = self.take_item_due() {
            return self.follow_queuer(rewind, item, found);
        }
        match self.mode {
            Mode::Ready { cpu, since, limit, moved: Some(moved) } => {
                let is_known = (moved.from_cpu as usize) < rewind.lanes.len();
                let cpu = if is_known { moved.from_cpu as usize } else { cpu };
                self.mode = Mode::Ready { cpu, since, limit, moved: None };
            }
            Mode::Ready { since: Since::Woken(woken), .. } => self.follow(rewind, woken, found),
            Mode::Ready { since: Since::Lost(_), .. } => self.lose("how it lost its CPU was not seen", found),
            Mode::Disk { request, is_issued: true } => self.mode = Mode::Disk { request, is_issued: false },
            Mode::Disk { request, is_issued: false } => self.follow_submitter(rewind, request),
            _ => {}
        }
    }

    /// Returns the open wait that begins where this slice ends: its thread is on a CPU then, so it does not wait, even
    /// if its switch-out was not recorded.
    fn frame_that_begins(&self, before: &RunSlice, at_ns: u64) -> Option<usize> {
        let tid = before.holder.tid()?;
        self.frames.iter().position(|frame| frame.tid == tid).filter(|_| before.end_ns == at_ns)
    }

    /// Stops tracking the thread until the walk reaches it again; the reason is `why`.
    fn lose(&mut self, why: &'static str, found: &mut dyn FnMut(Finding)) {
        self.push(Woken { at_ns: self.now_ns, ..Woken::default() }, self.tid, found);
        self.mode = unknown(why);
    }

    /// Opens a wait of the followed thread for the one that is followed next, until the walk reaches `tid`.
    fn push(&mut self, woken: Woken, tid: u32, found: &mut dyn FnMut(Finding)) {
        let (number, within) = (self.hops, self.frames.last().map(|frame| frame.hop));
        let Woken { at_ns: woken_ns, by, stop, .. } = woken;
        found(Finding::WakeupEdge(WakeupEdge { number, within, tid: self.tid, woken_ns, by, stop }));
        self.frames.push(Frame { tid, hop: number });
        self.hops += 1;
    }

    /// Returns whether the runnable thread lost its CPU where this slice ends.
    fn is_back(&self, before: &RunSlice) -> bool {
        let waits = matches!(self.mode, Mode::Ready { since: Since::Lost(_), .. });
        waits && before.holder.tid() == Some(self.tid) && before.exit != SwitchOut::GoesOn
    }

    /// Handles the switch-in of the followed thread.
    fn enter(&mut self, change: &Change, limits: &dyn Limits, found: &mut dyn FnMut(Finding)) {
        if let Holder::Work { tid, .. } = change.after.holder {
            // The time is the item's, so no segment names the worker, which is named for its wait before.
            found(Finding::Called { tid, name: change.after.name });
        }
        let RunSlice { throttled_ns, cgroup, .. } = change.after;
        let ready = |since: Since| {
            let quota =
                || (throttled_ns > 0).then(|| (since.at_ns().saturating_add(throttled_ns), Actor::Quota(cgroup)));
            let limit = limits.next_allowed(self.tid, change.at_ns).map(|(until_ns, by)| (until_ns, Actor::Limit(by)));
            let is_within = |moved: &Move| since.at_ns() < moved.at_ns && moved.at_ns < change.at_ns;
            let moved = change.after.moved.filter(is_within);
            Mode::Ready { cpu: change.cpu, since, moved, limit: limit.or_else(quota) }
        };
        self.mode = match change.after.entry {
            SwitchIn::GoesOn => Mode::Running { cpu: change.cpu },
            SwitchIn::Preempted { at_ns } => ready(Since::Lost(at_ns)),
            SwitchIn::Woken { at_ns, by, cpu } => {
                let (is_of_member, is_within_item) =
                    (change.after.is_of_member, matches!(change.after.holder, Holder::Work { .. }));
                let stop = change.after.stopped;
                ready(Since::Woken(Woken { at_ns, by: Some(by), cpu, is_of_member, is_within_item, stop }))
            }
            SwitchIn::Queued { at_ns, by, cpu } => {
                let queued = Woken { at_ns, by: Some(by), cpu, ..Woken::default() };
                self.items.begin(Item { queued, depth: self.frames.len(), tid: self.tid });
                Mode::Running { cpu: change.cpu }
            }
            SwitchIn::Unseen => ready(Since::Woken(Woken { at_ns: change.at_ns, ..Woken::default() })),
        };
    }

    /// Continues with the waker of the thread.
    fn follow(&mut self, rewind: &Rewind<'_>, woken: Woken, found: &mut dyn FnMut(Finding)) {
        let waker = waker_of(rewind, woken);
        if let Ok((tid, cpu)) = waker {
            let is_of_command = self.asked.is_command && self.frames.is_empty() && woken.is_of_member;
            // A new thread has not waited.
            if is_of_command || matches!(woken.by, Some(Waker::Parent(_))) {
                (self.tid, self.mode) = (tid, Mode::Running { cpu });
                return;
            }
        } else if let Some(Waker::Parent(parent)) = woken.by
            && parent & thread::OUTSIDE == 0
        {
            self.tid = parent;
            self.lose("who made it was not seen", found);
            return;
        }
        self.push(woken, self.tid, found);
        if let Some(stop) = woken.stop {
            self.mode = Mode::Leaf { kind: CauseKind::Stopped, who: resumed_by(rewind, woken, stop) };
        } else if self.frames.len() > DEEPEST {
            self.mode = unknown("too many waits within waits");
        } else {
            self.go_on_with(waker);
        }
    }

    /// Continues with the queuer of an item, whatever the worker did before.
    fn follow_queuer(&mut self, rewind: &Rewind<'_>, item: Item, found: &mut dyn FnMut(Finding)) {
        self.frames.truncate(item.depth);
        let queuer = waker_of(rewind, item.queued);
        if queuer.is_err() {
            // The wait is the item's and not the worker's, so it does not end where the worker ran before.
            self.tid = item.tid;
            self.push(item.queued, NO_THREAD, found);
        }
        self.go_on_with(queuer);
    }

    fn go_on_with(&mut self, waker: Result<(u32, usize), Mode>) {
        self.mode = match waker {
            Ok((tid, cpu)) => {
                self.tid = tid;
                Mode::Running { cpu }
            }
            Err(ends_here) => ends_here,
        };
    }

    /// Continues with the submitter of a request.
    fn follow_submitter(&mut self, rewind: &Rewind<'_>, request: Request) {
        let waits_itself = self.frames.iter().any(|frame| frame.tid == request.submitter);
        self.mode = match rewind.cpu_of(request.submitter) {
            // The walk returns to the switch-out of the submitter.
            _ if waits_itself => Mode::Leaf { kind: CauseKind::DiskQueue, who: Actor::Disk(request) },
            Some(cpu) => {
                self.tid = request.submitter;
                Mode::Running { cpu }
            }
            None => unknown("who submitted the request was not seen"),
        };
    }

    /// Reports the time from `from_ns` up to now.
    fn explain(&mut self, rewind: &Rewind<'_>, from_ns: u64, found: &mut dyn FnMut(Finding)) {
        let to_ns = self.now_ns;
        if from_ns >= to_ns {
            return;
        }
        self.now_ns = from_ns;
        let hop = self.frames.last().map(|frame| frame.hop);
        let ready = matches!(self.mode, Mode::Ready { .. }).then_some(self.tid);
        let mut emit = |from_ns, to_ns, kind, who| {
            if from_ns < to_ns {
                found(Finding::Segment(Segment { from_ns, to_ns, kind, who, ready, hop }));
            }
        };
        match self.mode {
            Mode::Running { cpu } => emit_slice_segments(&rewind.lanes[cpu], cpu, from_ns, to_ns, None, &mut emit),
            Mode::Ready { cpu, limit, .. } => {
                // Until the end of a limit, no other actor is charged.
                let free_ns = limit.map_or(0, |(until_ns, _)| until_ns).clamp(from_ns, to_ns);
                emit_slice_segments(&rewind.lanes[cpu], cpu, free_ns, to_ns, Some(self.tid), &mut emit);
                if let Some((_, by)) = limit {
                    emit(from_ns, free_ns, CauseKind::Throttled, by);
                }
            }
            Mode::Leaf { kind, who } => emit(from_ns, to_ns, kind, who),
            Mode::Disk { request, is_issued } => {
                let kind = if is_issued { CauseKind::Disk } else { CauseKind::DiskQueue };
                emit(from_ns, to_ns, kind, Actor::Disk(request));
            }
            Mode::Before | Mode::Done => emit(from_ns, to_ns, CauseKind::Unknown, Actor::Text(NOT_RECORDED)),
        }
    }
}

fn unknown(why: &'static str) -> Mode {
    Mode::Leaf { kind: CauseKind::Unknown, who: Actor::Text(why) }
}

/// Returns the waker and its CPU, or the mode in which the walk continues.
#[expect(clippy::result_large_err, reason = "the mode of the walk is not an error")]
fn waker_of(rewind: &Rewind<'_>, woken: Woken) -> Result<(u32, usize), Mode> {
    let waking_cpu = woken.cpu as usize;
    let there = rewind.lanes.get(waking_cpu).map(|lane| lane.slice).unwrap_or_default();
    let is_interrupt = matches!(there.holder, Holder::Irq { .. } | Holder::Softirq);
    let leaf = |kind, who| Err(Mode::Leaf { kind, who });
    match woken.by {
        Some(by @ (Waker::Thread(tid) | Waker::Parent(tid))) => {
            let is_outside = tid & thread::OUTSIDE != 0;
            // The thread below the softirq sends through it.
            match rewind.cpu_of(tid).or_else(|| is_interrupt.then_some(waking_cpu)) {
                Some(cpu) if !is_outside || matches!(by, Waker::Parent(_)) => Ok((tid, cpu)),
                _ if is_outside => leaf(CauseKind::Outside, Actor::Text("outside this PID namespace")),
                _ => Err(unknown("its waker was not seen")),
            }
        }
        None => Err(unknown("its waking was not seen")),
        Some(Waker::Timer(of)) => leaf(CauseKind::Timer, Actor::Timer(of)),
        Some(Waker::Network) => leaf(CauseKind::Network, Actor::Text("network")),
        Some(Waker::Rcu) => leaf(CauseKind::Rcu, Actor::Text("grace period")),
        // The time of its creation is unknown too.
        Some(Waker::Disk(request)) if request == Request::default() => {
            leaf(CauseKind::Disk, Actor::Text("unknown (its request was overwritten)"))
        }
        Some(Waker::Disk(request)) => Err(Mode::Disk { request, is_issued: true }),
        Some(Waker::Irq | Waker::Softirq) => {
            let who = if is_interrupt { Actor::Interrupt(there.name) } else { Actor::Text("interrupt") };
            leaf(CauseKind::Interrupt, who)
        }
    }
}

/// Emits the segments of a part of a slice, as seen by the runnable thread `ready`, or by the running thread itself.
/// Steal time is known only for the whole slice; it is spread evenly, and put at the end of the part.
fn emit_slice_segments(
    lane: &CpuState,
    cpu: usize,
    from_ns: u64,
    to_ns: u64,
    ready: Option<u32>,
    emit: &mut dyn FnMut(u64, u64, CauseKind, Actor),
) {
    let slice = &lane.slice;
    let (ns, whole_ns) = (to_ns.saturating_sub(from_ns), slice.end_ns.saturating_sub(slice.start_ns));
    let steal_ns = (u128::from(slice.steal_ns) * u128::from(ns)).checked_div(u128::from(whole_ns)).unwrap_or(0);
    let own_end_ns = to_ns - u64::try_from(steal_ns).unwrap_or(u64::MAX).min(ns);
    emit(own_end_ns, to_ns, CauseKind::Steal, Actor::Text("hypervisor"));
    let name = slice.name;
    let (kind, who) = match slice.holder {
        Holder::Irq { .. } => (CauseKind::Irq, Actor::Interrupt(name)),
        Holder::Softirq => (CauseKind::Softirq, Actor::Interrupt(name)),
        Holder::Work { handler, .. } => (CauseKind::Work, Actor::Work(handler)),
        Holder::Thread(tid) => {
            let kind = match ready {
                None => CauseKind::Running,
                Some(ready) if ready == tid => CauseKind::Wakeup,
                Some(_) => CauseKind::Thread,
            };
            (kind, Actor::Thread { tid, name, cgroup: slice.cgroup, is_member: slice.is_member })
        }
        Holder::Idle => (CauseKind::IdleExit, Actor::Cpu(cpu as u32)),
        Holder::Unrecorded => (CauseKind::Unknown, Actor::Text(NOT_RECORDED)),
    };
    // For the running thread itself, time with interrupts off is its own work.
    let keeps_off = ready.is_some() && slice.holder.tid().is_some();
    let off_ns = if keeps_off { lane.irqs_off_ns.clamp(from_ns, own_end_ns) } else { own_end_ns };
    emit(off_ns, own_end_ns, CauseKind::IrqsOff, who);
    emit(from_ns, off_ns, kind, who);
}
