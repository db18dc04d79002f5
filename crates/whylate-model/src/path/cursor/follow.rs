// SPDX-License-Identifier: MIT OR Apache-2.0
//! From a wait to who ended it.

use super::super::history::{Holder, Request, RunSlice, Waker};
use super::super::items::{Item, Woken};
use super::super::rewind::Rewind;
use super::super::{Actor, Finding, WakeupEdge};
use super::{Cursor, DEEPEST, Frame, Mode, NO_THREAD, NOT_FOLLOWED};
use crate::cause::{INTERRUPT, NETWORK, OVERWRITTEN};
use crate::wait::Stop;
use crate::{CauseKind, thread};

impl Cursor {
    /// Stops tracking the thread until the walk reaches it again; the reason is `why`.
    pub(super) fn lose(&mut self, why: &'static str, found: &mut dyn FnMut(Finding)) {
        self.push(Woken { at_ns: self.now_ns, ..Woken::default() }, self.tid, found);
        self.mode = unknown(why);
    }

    /// Opens a wait of the followed thread for the one that is followed next, until the walk reaches `tid`.
    pub(super) fn push(&mut self, woken: Woken, tid: u32, found: &mut dyn FnMut(Finding)) {
        let (number, within) = (self.hops, self.frames.last().map(|frame| frame.hop));
        let Woken { at_ns: woken_ns, by, stop, .. } = woken;
        found(Finding::WakeupEdge(WakeupEdge { number, within, tid: self.tid, woken_ns, by, stop }));
        self.frames.push(Frame { tid, hop: number });
        self.hops += 1;
    }

    /// Continues with the waker of the thread.
    pub(super) fn follow(&mut self, rewind: &Rewind<'_>, woken: Woken, found: &mut dyn FnMut(Finding)) {
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
            // The activity of others did not cause the wait; the thread that stopped it did.
            self.mode = Mode::Leaf { kind: CauseKind::Stopped, who: resumed_by(rewind, woken, stop) };
        } else if self.frames.len() > DEEPEST {
            self.mode = unknown("too many waits within waits");
        } else {
            self.go_on_with(waker, found);
        }
    }

    /// Continues with the queuer of an item, whatever the worker did before.
    pub(super) fn follow_queuer(&mut self, rewind: &Rewind<'_>, item: Item, found: &mut dyn FnMut(Finding)) {
        self.frames.truncate(item.depth);
        let queuer = waker_of(rewind, item.queued);
        if queuer.is_err() {
            // The wait is the item's and not the worker's, so it does not end where the worker ran before.
            self.tid = item.tid;
            self.push(item.queued, NO_THREAD, found);
        }
        self.go_on_with(queuer, found);
    }

    pub(super) fn go_on_with(&mut self, waker: Result<(u32, usize), Mode>, found: &mut dyn FnMut(Finding)) {
        self.mode = match waker {
            Ok(_) | Err(Mode::Disk { .. }) if self.is_cut && !self.frames.is_empty() => {
                found(Finding::NotFollowed);
                unknown(NOT_FOLLOWED)
            }
            Ok((tid, cpu)) => {
                self.tid = tid;
                Mode::Running { cpu }
            }
            Err(ends_here) => ends_here,
        };
    }

    /// Continues with the submitter of a request.
    pub(super) fn follow_submitter(&mut self, rewind: &Rewind<'_>, request: Request) {
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
}

pub(super) fn unknown(why: &'static str) -> Mode {
    Mode::Leaf { kind: CauseKind::Unknown, who: Actor::Text(why) }
}

/// Returns the thread that resumed a stopped thread.
fn resumed_by(rewind: &Rewind<'_>, woken: Woken, stop: Stop) -> Actor {
    let Some(Waker::Thread(tid)) = woken.by else { return Actor::Text(stop.who()) };
    let slice = rewind.cpu_of(tid).and_then(|cpu| rewind.lanes.get(cpu)).map(|lane| lane.slice);
    match slice {
        Some(RunSlice { name, cgroup, is_member, .. }) => Actor::Thread { tid, name, cgroup, is_member },
        None if tid & thread::OUTSIDE != 0 => Actor::Text("a thread outside this PID namespace"),
        None => Actor::Text(stop.who()),
    }
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
        Some(Waker::Network) => leaf(CauseKind::Network, Actor::Text(NETWORK)),
        Some(Waker::Rcu) => leaf(CauseKind::Rcu, Actor::Text("grace period")),
        // The time of its creation is unknown too.
        Some(Waker::Disk(request)) if request == Request::default() => leaf(CauseKind::Disk, Actor::Text(OVERWRITTEN)),
        Some(Waker::Disk(request)) => Err(Mode::Disk { request, is_issued: true }),
        Some(Waker::Irq | Waker::Softirq) => {
            let who = if is_interrupt { Actor::Interrupt(there.name) } else { Actor::Text(INTERRUPT) };
            leaf(CauseKind::Interrupt, who)
        }
    }
}
