// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides which waits for others are late: those with activity on this machine, and not those for idle threads.

use std::collections::BTreeMap;

use super::timer::TimerKind;
use super::{Path, PathSegment};
use crate::{ActorName, CauseKind};

impl Path {
    /// Returns whether the path is a wait for others of at least `over_ns`, at least half of which is attributed to
    /// activity: running, waiting for a CPU, block I/O. For a lock it does not matter what the holder did.
    pub fn is_held_up(&self, over_ns: u64, is_for_lock: bool) -> bool {
        // The rest is the thread's own wait for a CPU.
        let within = || self.segments.iter().filter(|segment| segment.depth > 0);
        let whole_ns: u64 = within().map(|segment| segment.ns).sum();
        let active_ns: u64 = within().filter(|segment| !is_unattributed(segment.kind)).map(|segment| segment.ns).sum();
        whole_ns >= over_ns && (is_for_lock || active_ns >= whole_ns - active_ns)
    }

    /// Returns the thread, other than the waiter itself, that slept or waited with a timeout for at least half of a
    /// wait for others of at least `over_ns`.
    pub fn sleeper(&self, over_ns: u64) -> Option<&ActorName> {
        let whole_ns: u64 = self.segments.iter().filter(|segment| segment.depth > 0).map(|segment| segment.ns).sum();
        let mut sums: BTreeMap<&ActorName, u64> = BTreeMap::new();
        for segment in self.segments.iter().filter(|segment| is_sleep_segment(segment) && segment.depth > 1) {
            let Some(waiter) = &segment.waiter else { continue };
            *sums.entry(waiter).or_default() += segment.ns;
        }
        let (sleeper, ns) = sums.into_iter().max_by_key(|&(_, ns)| ns)?;
        (whole_ns >= over_ns && ns >= whole_ns - ns).then_some(sleeper)
    }
}

/// Returns whether the thread slept or waited with a timeout. Waiting for one of the kernel's own timers is no sleep.
fn is_sleep_segment(segment: &PathSegment) -> bool {
    segment.kind == CauseKind::Timer && segment.timer.is_none_or(TimerKind::is_own)
}

/// Returns whether time of this kind is attributed to no activity on this machine.
fn is_unattributed(kind: CauseKind) -> bool {
    use CauseKind::{Interrupt, Network, Outside, Rcu, Timer, Unknown};
    matches!(kind, Timer | Network | Interrupt | Rcu | Outside | Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS_NS: u64 = 1_000_000;

    fn path(segments: &[(u64, CauseKind, &str, u32)]) -> Path {
        let segment = |&(ms, kind, who, depth): &(u64, CauseKind, &str, u32)| PathSegment {
            ns: ms * MS_NS,
            kind,
            who: who.into(),
            waiter: (depth > 0).then(|| ActorName::thread("waiter", depth)),
            depth,
            ..PathSegment::default()
        };
        Path { segments: segments.iter().map(segment).collect(), is_folded: false }
    }

    #[test]
    fn activity_counts_as_held_up_and_idle_waits_do_not() {
        use CauseKind::{
            Disk, DiskQueue, Interrupt, IrqsOff, Network, Outside, Rcu, Running, Thread, Throttled, Timer,
        };
        let is_held_up = |path: Path| path.is_held_up(100 * MS_NS, false);
        for kind in [Running, Thread, Disk, DiskQueue, IrqsOff, Throttled, CauseKind::Work, CauseKind::Steal] {
            assert!(is_held_up(path(&[(100, kind, "a", 1)])), "{kind:?}");
        }
        for kind in [Timer, Network, Interrupt, Rcu, Outside, CauseKind::Unknown] {
            assert!(!is_held_up(path(&[(100, kind, "a", 1)])), "{kind:?}");
            assert!(path(&[(100, kind, "a", 1)]).is_held_up(100 * MS_NS, true), "{kind:?}");
        }
        // Half of it is enough, however deep.
        assert!(is_held_up(path(&[(50, Timer, "timer", 2), (20, Running, "a", 1), (30, Disk, "vda", 3)])));
        assert!(!is_held_up(path(&[(51, Timer, "timer", 2), (49, Running, "a", 1)])));
    }

    #[test]
    fn own_runqueue_wait_is_no_wait_for_others() {
        use CauseKind::{Running, Thread, Timer};
        let beside = |ms| path(&[(ms, Running, "a", 1), (500, Thread, "b", 0)]);
        assert!(!beside(99).is_held_up(100 * MS_NS, true) && beside(100).is_held_up(100 * MS_NS, false));
        let idle = path(&[(100, Timer, "timer", 1), (500, Thread, "b", 0)]);
        assert!(!idle.is_held_up(100 * MS_NS, false));
    }

    #[test]
    fn reports_sleeping_peer_but_not_own_timeout() {
        use CauseKind::{Running, Timer};
        let slept = |ms| path(&[(ms, Timer, "timer", 2), (40, Running, "peer:8", 1), (500, Running, "client:7", 0)]);
        assert_eq!(slept(60).sleeper(100 * MS_NS), Some(&ActorName::thread("waiter", 2)));
        assert_eq!(slept(59).sleeper(100 * MS_NS), None);
        assert_eq!(slept(39).sleeper(MS_NS), None);
        assert_eq!(path(&[(200, Timer, "timer", 1)]).sleeper(MS_NS), None);
    }

    #[test]
    fn waiter_for_kernel_timer_is_no_sleeper() {
        let mut path = path(&[(70, CauseKind::Timer, "TCP retransmission", 2), (10, CauseKind::Running, "peer:7", 1)]);
        path.segments[0].timer = Some(TimerKind::TcpRetransmission);
        assert_eq!(path.sleeper(MS_NS), None);
    }
}
