// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums of the waits of one kind.

use std::collections::{BTreeMap, HashMap};

use super::super::history::{Name, Request};
use super::super::sums::Sums;
use super::super::{Actor, Finding, Names, OTHERS, PathBuilder, PathSegment, Segment, WakeupEdge};
use super::{EndedBy, Latencies, Waits};
use crate::cause::OVERWRITTEN;
use crate::wait::Stop;
use crate::{ActorName, CauseKind};

/// Maximum number of parts by thread; beyond that, they are aggregated by name. At most as many names again; the rest
/// is merged.
const MAX_PARTS: usize = 4_096;

/// A thread, or all threads of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum ThreadLabel {
    Thread(u32, Name),
    Name(Name),
}

impl ThreadLabel {
    fn name(self) -> Name {
        match self {
            ThreadLabel::Thread(_, name) | ThreadLabel::Name(name) => name,
        }
    }

    fn tid(self) -> u32 {
        match self {
            ThreadLabel::Thread(tid, _) => tid,
            ThreadLabel::Name(_) => 0,
        }
    }
}

/// A part of waits without nested waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WaitPart {
    pub waiter: ThreadLabel,
    pub kind: CauseKind,
    pub who: Actor,
    pub ready: Option<ThreadLabel>,
}

impl WaitPart {
    /// Returns the only part of a short wait for a disk, without the request's times.
    pub fn from_request(waiter: ThreadLabel, request: Request) -> Self {
        let Request { device, operation, submitter, .. } = request;
        let who = match request == Request::default() {
            true => Actor::Text(OVERWRITTEN),
            false => Actor::Disk(Request { device, operation, submitter, ..Request::default() }),
        };
        WaitPart { waiter, kind: CauseKind::Disk, who, ready: None }
    }

    /// Returns a part of a wait. The name of the runnable thread is taken from the wait's other parts.
    pub fn from_segment(waiter: ThreadLabel, part: &Segment, parts: &[Segment]) -> Self {
        let name = |tid: u32| {
            let named = parts.iter().find_map(|part| match part.who {
                Actor::Thread { tid: of, name, .. } if of == tid => Some(name),
                _ => None,
            });
            named.unwrap_or_default()
        };
        let ready = part.ready.map(|tid| ThreadLabel::Thread(tid, name(tid)));
        WaitPart { waiter, kind: part.kind, who: part.who, ready }
    }

    fn by_name(self) -> Self {
        let by_name = |called: ThreadLabel| ThreadLabel::Name(called.name());
        WaitPart { waiter: by_name(self.waiter), who: self.who.by_name(), ready: self.ready.map(by_name), ..self }
    }

    /// Returns the threads that the part names.
    fn named(&self) -> impl Iterator<Item = (u32, Name)> {
        let who =
            if let Actor::Thread { tid, name, .. } = self.who { Some(ThreadLabel::Thread(tid, name)) } else { None };
        [Some(self.waiter), self.ready, who].into_iter().flatten().filter_map(|called| match called {
            ThreadLabel::Thread(tid, name) if name != Name::default() => Some((tid, name)),
            _ => None,
        })
    }

    /// Returns the part as text; `threads` has the names of submitters.
    fn segment(
        self,
        ns: u64,
        via: Option<&String>,
        threads: &BTreeMap<u32, Name>,
        names: &mut dyn Names,
    ) -> Option<PathSegment> {
        let WaitPart { waiter, kind, who, ready } = self;
        let mut found = PathBuilder::default();
        let tid = waiter.tid();
        found.add(Finding::WakeupEdge(WakeupEdge { number: 0, within: None, tid, woken_ns: 0, by: None, stop: None }));
        for called in [waiter].into_iter().chain(ready) {
            found.name(called.tid(), called.name());
        }
        if let Actor::Disk(Request { submitter, .. }) = who
            && let Some(&name) = threads.get(&submitter)
        {
            found.name(submitter, name);
        }
        let ready_tid = ready.map(ThreadLabel::tid);
        found.add(Finding::Segment(Segment { from_ns: 0, to_ns: ns, kind, who, ready: ready_tid, hop: Some(0) }));
        let mut segment = found.finish(names).segments.pop()?.waiting_in(via.cloned());
        if let ThreadLabel::Name(name) = waiter {
            segment.waiter = Some(ActorName::program(name.text()));
        }
        if let Some(ThreadLabel::Name(name)) = ready {
            segment.ready = Some(ActorName::program(name.text()));
        }
        Some(segment)
    }
}

/// Sums of waits in one system call that ended the same way.
#[derive(Debug, Default)]
pub(super) struct Kind {
    /// Whether the kind is named after the system call.
    pub has_via: bool,
    /// Why the threads were stopped, if they were.
    pub stop: Option<Stop>,
    pub ns: u64,
    pub latencies: Latencies,
    /// Waits with nested waits.
    pub sums: Sums,
    parts: HashMap<WaitPart, u64>,
    is_by_name: bool,
}

impl Kind {
    /// Adds a part of a wait without nested waits.
    pub fn add_part(&mut self, part: WaitPart, ns: u64) {
        let mut part = if self.is_by_name { part.by_name() } else { part };
        if self.parts.len() >= 2 * MAX_PARTS && !self.parts.contains_key(&part) {
            part = WaitPart {
                waiter: ThreadLabel::Name(Name::new(OTHERS)),
                who: Actor::Text(OTHERS),
                ready: None,
                ..part
            };
        }
        *self.parts.entry(part).or_default() += ns;
        if self.parts.len() > MAX_PARTS && !self.is_by_name {
            self.is_by_name = true;
            for (part, ns) in std::mem::take(&mut self.parts) {
                self.add_part(part, ns);
            }
        }
    }

    /// Returns the sums as text.
    pub fn finish(mut self, via: String, ended_by: EndedBy, names: &mut dyn Names) -> Waits {
        let mut parts: Vec<(WaitPart, u64)> = self.parts.into_iter().collect();
        // Requests of one disk have equal keys, and so have texts of equal length: `who` makes the order deterministic.
        parts.sort_by_cached_key(|&(WaitPart { waiter, kind, who, ready }, _)| (waiter, kind, who.key(), ready, who));
        let threads: BTreeMap<u32, Name> = parts.iter().flat_map(|(part, _)| part.named()).collect();
        for (part, ns) in parts {
            let segment = part.segment(ns, self.has_via.then_some(&via), &threads, names);
            let segment = segment.map(|segment| PathSegment { stop: self.stop, ..segment });
            self.sums.add(segment.into_iter().collect());
        }
        Waits { via, ended_by: Some(ended_by), ns: self.ns, latency: self.latencies.finish(), path: self.sums.finish() }
    }
}
