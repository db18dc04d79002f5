// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits that are being walked back.

use super::super::history::{Blocked, Name, Request};
use super::super::{Actor, Finding, Names, PathBuilder, PathSegment, Segment, WaitSpan, WakeupEdge};
use super::kind::{ThreadLabel, WaitPart};
use crate::CauseKind;
use crate::wait::Stop;

/// Maximum number of parts of a wait without nested waits.
const MAX_PARTS: usize = 32;

/// A wait that is being walked back.
#[derive(Debug)]
pub(super) struct OpenWait {
    pub hop: WakeupEdge,
    pub ns: u64,
    pub from_ns: u64,
    /// Name of the thread and its wait, from its switch-out.
    asleep: Option<(Name, Blocked)>,
    /// Number of the last nested wait.
    pub last_hop: u32,
    /// The thread was preempted, so it waited for a CPU.
    pub is_preempted: bool,
    /// Number of nested waits without a known start.
    pub unmet: u32,
    /// Parts, newest first, as long as they are few and there is no nested wait.
    parts: Vec<Segment>,
    /// All findings, once there are more.
    found: Option<Box<PathBuilder>>,
}

impl OpenWait {
    /// Starts with the hop that ended the wait.
    pub fn new(hop: WakeupEdge) -> Self {
        OpenWait {
            hop,
            ns: 0,
            from_ns: 0,
            asleep: None,
            last_hop: hop.number,
            is_preempted: false,
            unmet: 0,
            parts: Vec::new(),
            found: None,
        }
    }

    /// Adds a finding within the wait.
    pub fn add(&mut self, finding: Finding) {
        match finding {
            Finding::Segment(segment) => {
                self.ns += segment.to_ns - segment.from_ns;
                self.from_ns = segment.from_ns;
                if self.found.is_none() && self.add_part(segment) {
                    return;
                }
            }
            Finding::Asleep { hop, name, blocked, .. } if hop == self.hop.number => {
                self.asleep = Some((name, blocked));
                if self.found.is_none() {
                    return;
                }
            }
            Finding::Unmet { hop } if hop == self.hop.number => return,
            Finding::Unmet { .. } => self.unmet += 1,
            Finding::Preempted { hop } => {
                self.is_preempted |= hop == self.hop.number;
                return;
            }
            Finding::NotFollowed => return,
            Finding::Asleep { .. } | Finding::Called { .. } => {}
            Finding::WakeupEdge(hop) => self.last_hop = hop.number,
        }
        self.found().add(finding);
    }

    /// Adds a segment to `parts`; returns false if it does not fit.
    fn add_part(&mut self, segment: Segment) -> bool {
        if segment.hop != Some(self.hop.number) {
            return false;
        }
        // Requests that differ only in time are summed.
        let who = match segment.who {
            Actor::Disk(request) => Actor::Disk(Request { queued_ns: 0, issued_ns: 0, ..request }),
            who => who,
        };
        let segment = Segment { who, ..segment };
        let key = |part: &Segment| (part.kind, part.who, part.ready);
        let has_room = self.parts.len() < MAX_PARTS;
        match self.parts.last_mut() {
            Some(last) if key(last) == key(&segment) => last.from_ns = segment.from_ns,
            _ if has_room => self.parts.push(segment),
            _ => return false,
        }
        true
    }

    fn found(&mut self) -> &mut PathBuilder {
        self.found.get_or_insert_with(|| {
            let mut found = PathBuilder::default();
            found.add(Finding::WakeupEdge(self.hop));
            if let Some((name, blocked)) = self.asleep {
                found.add(Finding::Asleep { hop: self.hop.number, name, blocked, at_ns: self.from_ns });
            }
            self.parts.drain(..).for_each(|part| found.add(Finding::Segment(part)));
            Box::new(found)
        })
    }

    /// Returns all parts, if they are few and there is no nested wait.
    pub fn parts(&self) -> Option<&[Segment]> {
        self.found.is_none().then_some(&self.parts)
    }

    /// Returns the thread's wait, if the switch-out was recorded.
    pub fn blocked(&self) -> Option<Blocked> {
        self.asleep.map(|(_, blocked)| blocked)
    }

    /// Returns the thread's name, if the switch-out was recorded.
    pub fn name(&self) -> Option<Name> {
        self.asleep.map(|(name, _)| name)
    }

    /// Returns why the thread was stopped, if recorded.
    pub fn stop(&self) -> Option<Stop> {
        self.hop.stop.or_else(|| self.blocked()?.stop)
    }

    /// Attributes unknown time to what keeps the thread stopped: its tracer, if that is the reason.
    pub fn is_stopped(&mut self, stop: Stop, tracer: Option<(u32, Name)>) {
        let who = match tracer.filter(|_| stop == Stop::Tracer) {
            Some((tid, name)) => Actor::Thread { tid, name, cgroup: None, is_member: false },
            None => Actor::Text(stop.who()),
        };
        for part in self.parts.iter_mut().filter(|part| part.kind == CauseKind::Unknown) {
            (part.kind, part.who) = (CauseKind::Stopped, who);
        }
    }

    /// Returns the thread's wait as text.
    pub fn waits_in(&self, names: &mut dyn Names) -> Option<String> {
        let blocked = self.blocked().unwrap_or_default();
        names.waits_in(self.hop.tid, self.hop.woken_ns, &blocked).0.or_else(|| blocked.outside_calls())
    }

    /// Returns whether the object is known for which the thread waited in the call `via`, or outside of calls.
    pub fn has_object(&self, via: Option<&str>, names: &mut dyn Names) -> bool {
        let from_ns = self.asleep.map(|_| self.from_ns);
        names.object(WaitSpan { tid: self.hop.tid, from_ns, woken_ns: self.hop.woken_ns, waker: None }, via).is_some()
    }

    /// Returns all parts without their nesting, if there are nested waits.
    pub fn flat(&self, waiter: ThreadLabel) -> Vec<(WaitPart, u64)> {
        let parts = self.found.iter().flat_map(|found| found.flat());
        let called = |(tid, name)| ThreadLabel::Thread(tid, name);
        parts.map(|(kind, who, ready, ns)| (WaitPart { waiter, kind, who, ready: ready.map(called) }, ns)).collect()
    }

    /// Returns the path of the wait. `waits_in` replaces the thread's wait, if given.
    pub fn path(
        mut self,
        name: Option<Name>,
        waits_in: Option<&String>,
        stop: Option<Stop>,
        names: &mut dyn Names,
    ) -> Vec<PathSegment> {
        self.found();
        let mut found = *self.found.take().unwrap_or_default();
        if let Some(name) = name {
            found.name(self.hop.tid, name);
        }
        let mut path = found.finish(names).segments;
        if let Some(waits_in) = waits_in {
            let own = path.iter_mut().filter(|segment| segment.depth == 1);
            own.for_each(|segment| {
                *segment = std::mem::take(segment).waiting_in(Some(waits_in.clone()));
                segment.stop = stop;
            });
        }
        path
    }
}
