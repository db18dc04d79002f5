// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks what held a program up: the culprits of its waits.

use super::{By, Culprits, Ranking};
use crate::late::CGROUP;
use crate::path::budget::Budget;
use crate::path::{OTHERS, PathSegment};
use crate::sources::OFFCPU;
use crate::{ActorName, Cause, CauseKind, Cgroup, LateEvent};

impl Budget {
    /// Ranks the culprits of the waits that are not by design, as in the overview. `cgroup_of` looks up the cgroup of a
    /// TID. Time of unknown cause, and time whose actors were merged, has no culprit.
    pub fn culprits(&self, by: By, cgroup_of: &mut dyn FnMut(u32) -> Option<Cgroup>) -> Ranking {
        let mut culprits = Culprits::by(by);
        let waits = self.waits.iter().filter(|waits| !waits.is_by_design()).chain([&self.ready]);
        for segment in waits.flat_map(|waits| &waits.path) {
            if segment.ns > 0 && segment.kind != CauseKind::Unknown && segment.who != OTHERS {
                culprits.add(&OFFCPU, &event_of(segment, cgroup_of));
            }
        }
        culprits.take()
    }
}

/// Returns a segment as a late event with one cause.
fn event_of(segment: &PathSegment, cgroup_of: &mut dyn FnMut(u32) -> Option<Cgroup>) -> LateEvent {
    let (who, known) = segment.culprit();
    let cgroup = known.cloned().or_else(|| who.tid().and_then(&mut *cgroup_of));
    let victim = segment.ready.as_ref().or(segment.waiter.as_ref());
    let of_victim = victim.and_then(ActorName::tid).and_then(cgroup_of);
    let cause = Cause { cgroup, ..Cause::new(segment.kind, who.into_owned(), segment.ns) };
    let mut event = LateEvent { latency_ns: segment.ns, causes: vec![cause], ..LateEvent::default() };
    event.subject = victim.map_or_else(String::new, ActorName::to_string);
    event.labels.extend(of_victim.map(|cgroup| (CGROUP.to_owned(), cgroup.path)));
    event
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::budget::{EndedBy, Waits};

    #[test]
    fn culprits_add_up_over_states_by_thread_name_and_cgroup() {
        let thread = |name: &str, tid| Some(ActorName::thread(name, tid));
        let part = |ns, kind, who: &str, waiter: u32| PathSegment {
            ns,
            kind,
            who: who.parse().expect("any text"),
            ready: (kind == CauseKind::Thread).then(|| ActorName::thread("server", waiter)),
            waiter: thread("server", waiter),
            depth: 1,
            ..PathSegment::default()
        };
        let waits = |via: &str, ended_by, path: &[PathSegment]| Waits {
            via: via.to_owned(),
            ended_by: Some(ended_by),
            path: path.to_vec(),
            ..Waits::default()
        };
        use CauseKind::{Disk, Running, Thread, Unknown};
        let ready = Waits { path: vec![part(50, Thread, "batch:7", 1)], ..Waits::default() };
        let behind =
            [part(30, Thread, "batch:8", 1), part(20, Running, "encoder:9", 1), part(10, Running, "server:2", 1)];
        let unnamed = [part(5, Unknown, "x", 1), part(6, Running, OTHERS, 1), part(0, Running, "zero:3", 1)];
        let budget = Budget {
            ready,
            waits: vec![
                waits("futex", EndedBy::Others, &behind),
                waits("futex", EndedBy::Disk, &[part(40, Disk, "vda (read by server:1)", 1)]),
                waits("read", EndedBy::Others, &unnamed),
                // By design.
                waits("poll", EndedBy::NotOver, &[part(900, Running, "client:5", 1)]),
            ],
            ..Budget::default()
        };
        let mut cgroup_of = |tid| Some(Cgroup::new(if matches!(tid, 1 | 2) { "/server" } else { "/jobs" }));
        let mut ranked = |by| -> Vec<(String, u64, u64)> {
            let culprits = budget.culprits(by, &mut cgroup_of).culprits;
            culprits.into_iter().map(|of| (of.who.to_string(), of.total_ns, of.alike)).collect()
        };
        let row = |who: &str, ns, alike| (who.to_owned(), ns, alike);
        let [disk, encoder] = [row("vda (read by server:1)", 40, 0), row("encoder:9", 20, 0)];
        assert_eq!(
            ranked(By::Culprit),
            [row("batch:7", 50, 0), disk.clone(), row("batch:8", 30, 0), encoder.clone(), row("server:2", 10, 0)]
        );
        assert_eq!(ranked(By::Name), [row("batch", 80, 2), disk, encoder, row("server:2", 10, 0)]);
        // The disk's request is of the server's own cgroup.
        let expected =
            [row("/jobs", 80, 0), row("/server (itself)", 40, 0), row("/jobs", 20, 0), row("/server (itself)", 10, 0)];
        assert_eq!(ranked(By::Cgroup), expected);
    }
}
