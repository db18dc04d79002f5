// SPDX-License-Identifier: MIT OR Apache-2.0
//! Folds a path of many parts: equal parts are summed.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use super::super::Actor;
use super::super::history::{Name, Waker};
use super::{MAX_SEGMENTS, OTHERS, PathBuilder, PathPart, Wait};
use crate::CauseKind;
use crate::wait::Stop;

impl PathBuilder {
    /// Sums equal parts, and merges waits of one thread for the same waker within the same wait.
    pub(super) fn fold(&mut self, innermost: Option<usize>) {
        self.is_folded = true;
        let mut waits: Vec<Wait> = Vec::new();
        let mut indexes = Vec::with_capacity(self.waits.len());
        let mut known: HashMap<(Option<usize>, u32, u64, Option<Stop>), usize> = HashMap::new();
        for wait in &self.waits {
            let within = wait.within.map(|within: usize| indexes[within]);
            let index = *known.entry((within, wait.tid, ended_by(wait.by), wait.stop)).or_insert_with(|| {
                waits.push(Wait { within, count: 0, ..wait.clone() });
                waits.len() - 1
            });
            waits[index].asleep = waits[index].asleep.or(wait.asleep);
            waits[index].count = waits[index].count.saturating_add(wait.count);
            indexes.push(index);
        }
        let mut parts: Vec<PathPart> = Vec::new();
        let mut alike: HashMap<_, Vec<usize>> = HashMap::new();
        for part in &self.parts {
            let part = PathPart { wait: part.wait.map(|wait| indexes[wait]), ..*part };
            let same = alike.entry((part.wait, part.kind, part.who.key(), part.ready)).or_default();
            match same.iter().find(|&&index| parts[index].is_like(&part)) {
                Some(&index) => parts[index].ns += part.ns,
                None => {
                    same.push(parts.len());
                    parts.push(part);
                }
            }
        }
        // Only waits that are still open can be referred to again.
        let innermost = self.open.iter().rposition(|&(_, wait)| Some(wait) == innermost);
        self.open.truncate(innermost.map_or(0, |innermost| innermost + 1));
        self.open.iter_mut().chain(&mut self.unmet).for_each(|(_, wait)| *wait = indexes[*wait]);
        self.named = None;
        (self.waits, self.parts) = (waits, parts);
        let latest = self.parts.last().copied();
        if self.parts.len() > MAX_SEGMENTS {
            self.merge_small();
        }
        self.drop_unused_waits();
        self.drop_unused_names(latest);
    }

    /// Drops waits without parts.
    fn drop_unused_waits(&mut self) {
        let mut is_used = vec![false; self.waits.len()];
        // The first wait is that of the query.
        is_used.iter_mut().take(1).for_each(|first| *first = true);
        let named_again = self.open.iter().chain(&self.unmet).map(|&(_, wait)| wait);
        for wait in self.parts.iter().filter_map(|part| part.wait).chain(named_again) {
            let mut next = Some(wait);
            while let Some(at) = next.filter(|&at| !is_used[at]) {
                is_used[at] = true;
                next = self.waits[at].within;
            }
        }
        let mut kept = 0;
        let indexes: Vec<usize> = is_used.iter().map(|&is_used| (kept, kept += usize::from(is_used)).0).collect();
        let mut at = 0;
        self.waits.retain(|_| (is_used[at], at += 1).0);
        self.waits.iter_mut().for_each(|wait| wait.within = wait.within.map(|within| indexes[within]));
        self.parts.iter_mut().for_each(|part| part.wait = part.wait.map(|wait| indexes[wait]));
        self.open.iter_mut().chain(&mut self.unmet).for_each(|(_, wait)| *wait = indexes[*wait]);
    }

    /// Drops names of threads without parts, except those of the latest part.
    fn drop_unused_names(&mut self, latest: Option<PathPart>) {
        let of_part = |part: &PathPart| {
            let who = match part.who {
                Actor::Thread { tid, .. } => Some(tid),
                Actor::Disk(request) => Some(request.submitter),
                _ => None,
            };
            [part.ready, who]
        };
        let of_parts = self.parts.iter().chain(&latest).flat_map(of_part).flatten();
        let used: HashSet<u32> = of_parts.chain(self.waits.iter().map(|wait| wait.tid)).collect();
        self.names.retain(|tid, _| used.contains(tid));
        self.cgroups.retain(|tid, _| used.contains(tid));
    }

    /// If there are too many distinct parts, merges the smallest by thread name; beyond that, without names.
    fn merge_small(&mut self) {
        let mut by_size: Vec<usize> = (0..self.parts.len()).collect();
        by_size.sort_by_key(|&index| Reverse(self.parts[index].ns));
        let mut small: Vec<PathPart> = Vec::new();
        let mut indexes: HashMap<(CauseKind, Option<(Name, bool)>), usize> = HashMap::new();
        let mut is_small = vec![false; self.parts.len()];
        for &index in &by_size[MAX_SEGMENTS / 2..] {
            is_small[index] = true;
            let part = self.parts[index];
            let named = part
                .who
                .named()
                .filter(|&named| indexes.len() < MAX_SEGMENTS / 4 || indexes.contains_key(&(part.kind, Some(named))));
            let sum = *indexes.entry((part.kind, named)).or_insert_with(|| {
                let program = |(name, is_member)| Actor::Program { name, is_member };
                let who = named.map_or(Actor::Text(OTHERS), program);
                small.push(PathPart { ns: 0, who, ready: None, wait: None, ..part });
                small.len() - 1
            });
            small[sum].ns += part.ns;
        }
        let mut index = 0;
        self.parts.retain(|_| {
            index += 1;
            !is_small[index - 1]
        });
        self.parts.extend(small);
    }
}

impl Wait {
    /// Returns whether both are waits of one thread, ended by the same waker, within the same wait.
    pub(super) fn is_like(&self, other: &Wait) -> bool {
        let key = |wait: &Wait| (wait.within, wait.tid, ended_by(wait.by), wait.stop);
        key(self) == key(other)
    }

    /// Returns why the thread was stopped, if it was.
    pub(super) fn stopped(&self) -> Option<Stop> {
        self.stop.or_else(|| self.asleep.and_then(|(_, blocked)| blocked.stop))
    }
}

impl PathPart {
    pub(super) fn is_like(&self, other: &PathPart) -> bool {
        let who = match (self.who, other.who) {
            (Actor::Disk(one), Actor::Disk(other)) => {
                (one.device, one.operation, one.submitter) == (other.device, other.operation, other.submitter)
            }
            (one, other) => one == other,
        };
        who && (self.kind, self.ready, self.wait) == (other.kind, other.ready, other.wait)
    }
}

impl Actor {
    /// Returns the name and membership, by which threads are merged.
    pub(in super::super) fn named(&self) -> Option<(Name, bool)> {
        match *self {
            Actor::Thread { name, is_member, .. } | Actor::Program { name, is_member } => Some((name, is_member)),
            _ => None,
        }
    }

    /// Returns a hash key, equal for equal actors.
    pub(in super::super) fn key(&self) -> u64 {
        match *self {
            Actor::Thread { tid, .. } => u64::from(tid),
            Actor::Work(handler) => handler,
            Actor::Interrupt(Name(bytes)) | Actor::Program { name: Name(bytes), .. } => {
                u64::from_le_bytes(std::array::from_fn(|at| bytes[at]))
            }
            Actor::Cpu(cpu) => u64::from(cpu),
            Actor::Disk(request) => u64::from(request.device),
            Actor::Limit(number) => u64::from(number),
            Actor::Quota(cgroup) => cgroup.unwrap_or(0),
            Actor::Timer(of) => of as u64,
            Actor::Text(text) => text.len() as u64,
        }
    }
}

/// Returns a key, equal for wakers that are merged.
fn ended_by(by: Option<Waker>) -> u64 {
    match by {
        None => 0,
        Some(Waker::Thread(tid) | Waker::Parent(tid)) => 1 << 32 | u64::from(tid),
        Some(Waker::Timer(of)) => 2 << 32 | of as u64,
        Some(Waker::Network) => 3 << 32,
        Some(Waker::Rcu) => 4 << 32,
        Some(Waker::Softirq) => 5 << 32,
        Some(Waker::Irq) => 6 << 32,
        Some(Waker::Disk(request)) => 7 << 32 | u64::from(request.device),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{Finding, Segment, WakeupEdge};
    use super::*;

    /// A build that runs for hours: each process waits once for another process, and once for a CPU.
    #[test]
    fn memory_does_not_grow_with_number_of_threads() {
        let mut found = PathBuilder::default();
        let mut now_ns = 1 << 40;
        let mut add = |found: &mut PathBuilder, ns: u64, kind, tid: u32, ready, hop| {
            let who = Actor::Thread { tid, name: Name::new("cc1"), cgroup: None, is_member: true };
            found.add(Finding::Segment(Segment { from_ns: now_ns - ns, to_ns: now_ns, kind, who, ready, hop }));
            now_ns -= ns;
        };
        for number in 0..20_000_u32 {
            let (tid, waker) = (10 + 2 * number, 11 + 2 * number);
            let by = Some(Waker::Thread(waker));
            found.add(Finding::WakeupEdge(WakeupEdge { number, within: None, tid, woken_ns: 0, by, stop: None }));
            add(&mut found, 10, CauseKind::Running, waker, None, Some(number));
            add(&mut found, 5, CauseKind::Running, tid, None, None);
            // Earlier parts are longer, so that they are listed one by one.
            add(&mut found, 20 + u64::from(number), CauseKind::Thread, waker, Some(tid), None);
            assert!(found.waits.len() <= 3 * MAX_SEGMENTS && found.names.len() <= 4 * MAX_SEGMENTS);
        }
        found.fold(None);
        assert!(found.waits.len() <= MAX_SEGMENTS, "{} waits", found.waits.len());
        let ready: Vec<u32> = found.parts.iter().filter_map(|part| part.ready).collect();
        assert!(ready.len() > 100 && ready.iter().all(|tid| found.names.contains_key(tid)));
    }
}
