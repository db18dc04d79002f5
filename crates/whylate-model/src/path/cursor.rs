// SPDX-License-Identifier: MIT OR Apache-2.0
//! One walk back from the end of a wait, along its wakers.
//!
//! The walk goes strictly back in time, so it needs no cycle detection. It follows one thread at a time: while the
//! thread is on a CPU, it is charged itself; while it is runnable, the actor on its CPU is charged; where it was woken,
//! the walk continues with the waker, until it reaches the switch-out of the waiter.

mod follow;

use self::follow::unknown;
use super::history::{Blocked, Holder, Move, Moves, Request, RunSlice, SwitchIn, SwitchOut};
use super::holding::{NOT_RECORDED, emit_slice_segments};
use super::items::{Item, Items, Woken};
use super::rewind::{Change, Rewind};
use super::{Actor, Finding, Limits, Query, Segment};
use crate::CauseKind;
use crate::cause::RUN_QUEUE_UNKNOWN;

/// Maximum depth of nested waits that are followed.
pub(crate) const DEEPEST: usize = 64;
/// TID of no thread.
const NO_THREAD: u32 = u32::MAX;
/// Maximum number of switch-outs looked for at a time, to know what the threads waited in.
const MAX_UNMET: usize = 64;

/// Why an actor is unknown: the wait is not over at the end of the span.
pub(super) const NOT_OVER: &str = "not over yet";
const NOT_FOLLOWED: &str = "not followed (too many waits)";

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
    /// The thread is runnable and waits for this CPU; for an unknown one between migrations that were not recorded.
    Ready {
        cpu: Option<usize>,
        since: Since,
        /// Earlier migrations from other run queues, if there were any.
        moved: Option<Moves>,
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

/// The CPU that a cursor watches for changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WatchedCpu {
    /// Each change of this CPU.
    Running(usize),
    /// All changes of this CPU together, at the end of the thread's wait for it.
    Ready(usize),
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
pub(super) struct Cursor {
    asked: Query,
    /// Start of the explained time.
    now_ns: u64,
    mode: Mode,
    /// TID of the thread that is followed.
    tid: u32,
    frames: Vec<Frame>,
    /// Explained waits without a known beginning.
    unmet: Vec<Frame>,
    /// Time down to which the beginnings of `unmet` are looked for.
    unmet_until_ns: u64,
    hops: u32,
    items: Items,
    /// Waits of the thread are not followed to their wakers.
    is_cut: bool,
}

impl Cursor {
    pub fn new(asked: Query) -> Self {
        let mode = if asked.from_ns < asked.to_ns { Mode::Before } else { Mode::Done };
        Cursor {
            asked,
            now_ns: asked.to_ns,
            mode,
            tid: asked.tid,
            frames: Vec::new(),
            unmet: Vec::new(),
            unmet_until_ns: 0,
            hops: 0,
            items: Items::default(),
            is_cut: false,
        }
    }

    /// Stops following, or follows again, waits of the thread to their wakers.
    pub fn set_cut(&mut self, is_cut: bool) {
        self.is_cut = is_cut;
    }

    /// Returns whether the cursor is following a wait of its thread to the waker.
    pub fn follows(&self) -> bool {
        match self.mode {
            Mode::Leaf { .. } => self.frames.len() > 1,
            _ => !self.frames.is_empty() && !self.is_at_end(),
        }
    }

    /// Stops following the current wait of its thread at `reached_ns`; returns whether there was one.
    pub fn cut_short(&mut self, rewind: &Rewind<'_>, reached_ns: u64, found: &mut dyn FnMut(Finding)) -> bool {
        if !self.follows() || !self.has_begun(reached_ns) {
            return false;
        }
        self.explain(rewind, reached_ns.max(self.asked.from_ns), found);
        self.frames.truncate(1);
        self.items.up_to(1);
        self.mode = unknown(NOT_FOLLOWED);
        true
    }

    /// Returns whether all time is explained and no beginning of a wait is looked for.
    pub fn is_done(&self) -> bool {
        matches!(self.mode, Mode::Done) && self.unmet.is_empty()
    }

    /// Returns whether the end of the query lies after `reached_ns`.
    fn has_begun(&self, reached_ns: u64) -> bool {
        reached_ns < self.asked.to_ns
    }

    /// Returns whether nothing is explained yet: the first lane found with the thread is where it runs.
    fn is_at_end(&self) -> bool {
        self.now_ns == self.asked.to_ns && self.hops == 0
    }

    /// Returns the start of the time to explain.
    pub fn start_ns(&self) -> u64 {
        self.asked.from_ns
    }

    /// Returns the time at which [`Cursor::go_back`] has something to do even without a context switch.
    pub fn wake_ns(&self, reached_ns: u64) -> u64 {
        if !self.has_begun(reached_ns) {
            return self.asked.to_ns.saturating_sub(1);
        }
        if matches!(self.mode, Mode::Done) {
            return self.unmet_until_ns;
        }
        let of_mode = match self.mode {
            // If a context switch happens at this time, the cursor acts there instead.
            Mode::Ready { since: Since::Lost(at_ns), moved: None, .. } => at_ns.saturating_sub(1),
            _ => self.due_of_mode_ns().unwrap_or(0),
        };
        of_mode.max(self.items.due_ns().unwrap_or(0)).max(self.asked.from_ns)
    }

    /// Returns the threads that the cursor watches for context switches, besides those of the CPU that it runs on.
    pub fn tids(&self) -> impl Iterator<Item = u32> {
        // What a thread does on a CPU itself while it waits for it differs from what others do there.
        let is_followed = self.is_at_end() || matches!(self.mode, Mode::Ready { .. });
        let followed = is_followed.then_some(self.tid);
        // Threads that stay in the list come first.
        let waits = self.unmet.iter().chain(&self.frames).map(|frame| frame.tid);
        [self.asked.tid].into_iter().chain(waits).chain(followed)
    }

    /// Returns the CPU that the cursor watches for changes.
    pub fn watched_cpu(&self, reached_ns: u64) -> Option<WatchedCpu> {
        match self.mode {
            _ if !self.has_begun(reached_ns) => None,
            // A wait for a CPU is explained as a whole once it is passed, except for the last part.
            Mode::Ready { cpu, .. } if !self.is_at_end() => cpu.map(WatchedCpu::Ready),
            Mode::Running { cpu } | Mode::Ready { cpu: Some(cpu), .. } => Some(WatchedCpu::Running(cpu)),
            _ => None,
        }
    }

    /// Returns whether the change, once passed, decides where the thread runs at its end.
    pub fn is_settled_by(&self, change: &Change, reached_ns: u64) -> bool {
        let holders = [change.before.holder, change.after.holder];
        self.has_begun(reached_ns) && self.is_at_end() && holders.iter().any(|holder| holder.tid() == Some(self.tid))
    }

    /// Explains the time after `reached_ns`, which is the time of `change`. Does nothing if nothing happens to the
    /// followed thread and to nothing that [`Cursor::wake_ns`], [`Cursor::tids`] and [`Cursor::watched_cpu`] name.
    pub fn go_back(
        &mut self,
        rewind: &Rewind<'_>,
        reached_ns: u64,
        change: Option<&Change>,
        limits: &dyn Limits,
        found: &mut dyn FnMut(Finding),
    ) {
        if !self.has_begun(reached_ns) {
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
        if let Some(change) = change.filter(|_| !self.unmet.is_empty()) {
            self.meet(change, found);
        }
        if matches!(self.mode, Mode::Done) {
            if change.is_none() || reached_ns <= self.unmet_until_ns {
                self.unmet.clear();
            }
            return;
        }
        if self.is_at_end() {
            match (rewind.cpu_of(self.tid), self.mode) {
                (Some(cpu), _) => self.mode = Mode::Running { cpu },
                (None, Mode::Before) => self.lose(NOT_OVER, found),
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
        let is_back = change.is_some_and(|change| self.is_back(&change.before));
        let is_own = change.is_some_and(|change| self.lane() == Some(change.cpu));
        if is_own || is_back || asleep.is_some() || until_ns == self.asked.from_ns {
            self.explain(rewind, until_ns, found);
        }
        if let (Some(index), Some(change)) = (asleep, change) {
            let (hop, name) = (self.frames[index].hop, change.before.name);
            match change.before.exit {
                // `from_ns` may be later than the switch-out.
                SwitchOut::Blocked(blocked) => found(Finding::Asleep { hop, name, blocked, at_ns: until_ns }),
                SwitchOut::Preempted => found(Finding::Preempted { hop }),
                SwitchOut::GoesOn | SwitchOut::Dead => {}
            }
        }
        match change {
            _ if until_ns == self.asked.from_ns => self.end(asleep, found),
            None => {
                self.mode = unknown(NOT_RECORDED);
                self.explain(rewind, self.asked.from_ns, found);
                self.mode = Mode::Done;
            }
            // The beginning of the wait.
            Some(_) if asleep == Some(0) && self.asked.is_wait => self.end(asleep, found),
            Some(change) => self.pass(change, asleep, is_back, limits, found),
        }
    }

    /// Ends the walk: all time is explained. The beginnings of the open waits, except the one that begins here, are
    /// looked for in as much time again.
    fn end(&mut self, asleep: Option<usize>, found: &mut dyn FnMut(Finding)) {
        self.mode = Mode::Done;
        asleep.map(|index| self.frames.remove(index));
        self.leave(0, found);
        self.unmet_until_ns = self.now_ns.saturating_sub(self.asked.to_ns - self.now_ns);
    }

    /// Stops following the waits from `first` on; their threads are still asleep.
    fn leave(&mut self, first: usize, found: &mut dyn FnMut(Finding)) {
        for frame in self.frames.drain(first.min(self.frames.len())..) {
            let is_new = frame.tid != NO_THREAD && self.unmet.iter().all(|unmet| unmet.tid != frame.tid);
            if is_new && self.unmet.len() < MAX_UNMET {
                self.unmet.push(frame);
                found(Finding::Unmet { hop: frame.hop });
            }
        }
    }

    /// Reports the beginning of a wait, if the change is the switch-out of its thread.
    fn meet(&mut self, change: &Change, found: &mut dyn FnMut(Finding)) {
        let RunSlice { holder, name, exit, end_ns, .. } = change.before;
        let is_it = |frame: &Frame| holder.tid() == Some(frame.tid) && end_ns == change.at_ns;
        if let Some(index) = self.unmet.iter().position(is_it) {
            let hop = self.unmet.swap_remove(index).hop;
            let blocked = if let SwitchOut::Blocked(blocked) = exit { blocked } else { Blocked::default() };
            found(Finding::Asleep { hop, name, blocked, at_ns: change.at_ns });
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
            self.leave(index + 1, found);
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
            Mode::Running { cpu } => Some(cpu),
            Mode::Ready { cpu, .. } => cpu,
            _ => None,
        }
    }

    /// Returns the next time at which something happens to the followed thread without a context switch.
    fn due_ns(&self, reached_ns: u64) -> Option<u64> {
        let of_mode = match self.mode {
            // If the context switch was recorded at this time, it is handled there.
            Mode::Ready { since: Since::Lost(at_ns), moved: None, .. } if at_ns <= reached_ns => None,
            _ => self.due_of_mode_ns(),
        };
        of_mode.max(self.items.due_ns()).map(|at_ns| at_ns.min(self.now_ns))
    }

    fn due_of_mode_ns(&self) -> Option<u64> {
        match self.mode {
            Mode::Ready { moved: Some(Moves { last, .. }), .. } => Some(last.at_ns),
            Mode::Ready { since, .. } => Some(since.at_ns()),
            Mode::Disk { request, is_issued: true } => Some(request.issued_ns),
            Mode::Disk { request, is_issued: false } => Some(request.queued_ns),
            _ => None,
        }
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
            Mode::Ready { cpu, since, limit, moved: Some(Moves { last, first, has_gap }) } => {
                let before = last.from_cpu as usize;
                let cpu = match has_gap {
                    true => None,
                    // Nothing is known of a CPU without events.
                    false => Some(before).filter(|&before| before < rewind.lanes.len()).or(cpu),
                };
                let is_earlier = |first: &Move| since.at_ns() < first.at_ns && first.at_ns <= last.at_ns;
                self.mode = Mode::Ready { cpu, since, limit, moved: first.filter(is_earlier).map(Moves::one) };
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

    /// Returns whether the runnable thread lost its CPU where this slice ends: it was preempted, or it was about to sleep
    /// when it was woken, and slept for no time.
    fn is_back(&self, before: &RunSlice) -> bool {
        let waits = matches!(self.mode, Mode::Ready { .. });
        waits && before.holder.tid() == Some(self.tid) && before.exit != SwitchOut::GoesOn
    }

    /// Handles the switch-in of the followed thread.
    fn enter(&mut self, change: &Change, limits: &dyn Limits, found: &mut dyn FnMut(Finding)) {
        if let Holder::Work { tid, .. } = change.after.holder {
            // The time is the item's, so no segment names the worker, which is named for its wait before.
            found(Finding::Called { tid, name: change.after.name });
        }
        let RunSlice { throttled_ns, cgroup, moved, .. } = change.after;
        let ready = |since: Since| {
            let quota =
                || (throttled_ns > 0).then(|| (since.at_ns().saturating_add(throttled_ns), Actor::Quota(cgroup)));
            let limit = limits.next_allowed(self.tid, change.at_ns).map(|(until_ns, by)| (until_ns, Actor::Limit(by)));
            let is_within = |moved: &Moves| since.at_ns() < moved.last.at_ns && moved.last.at_ns < change.at_ns;
            Mode::Ready { cpu: Some(change.cpu), since, moved: moved.filter(is_within), limit: limit.or_else(quota) }
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
            Mode::Ready { cpu: None, .. } => {
                emit(from_ns, to_ns, CauseKind::Unknown, Actor::Text(RUN_QUEUE_UNKNOWN));
            }
            Mode::Ready { cpu: Some(cpu), limit, .. } => {
                let limit_ns = limit.map_or(0, |(until_ns, _)| until_ns);
                // Until the end of a limit, no other actor is charged.
                let of_limit = |from_ns, to_ns, emit: &mut dyn FnMut(u64, u64, CauseKind, Actor)| {
                    if let Some((_, by)) = limit {
                        emit(from_ns, to_ns, CauseKind::Throttled, by);
                    }
                };
                let free_ns = limit_ns.clamp(from_ns, to_ns);
                if let Some(sum) = rewind.sum(cpu, free_ns, to_ns, self.tid) {
                    let mut end_ns = to_ns;
                    for &(kind, who, ns) in sum.parts() {
                        emit(end_ns - ns, end_ns, kind, who);
                        end_ns -= ns;
                    }
                    of_limit(from_ns, free_ns, &mut emit);
                } else {
                    for lane in rewind.passed(cpu, from_ns, to_ns) {
                        let from_ns = lane.slice.start_ns.max(from_ns);
                        let to_ns = lane.slice.end_ns.min(to_ns);
                        let free_ns = limit_ns.clamp(from_ns, to_ns);
                        emit_slice_segments(lane, cpu, free_ns, to_ns, Some(self.tid), &mut emit);
                        of_limit(from_ns, free_ns, &mut emit);
                    }
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
