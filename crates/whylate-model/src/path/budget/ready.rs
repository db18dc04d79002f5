// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums which actors occupied the CPUs that threads waited for, in bounded memory.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::super::history::Name;
use super::super::{Actor, Finding, Names, OTHERS, PathBuilder, PathSegment, Segment};
use crate::{ActorName, CauseKind};

/// Number of threads of one name above which they share one sum.
const MAX_SEPARATE_THREADS: usize = 64;
/// Maximum number of parts of all threads together.
const MAX_PARTS: usize = 1 << 16;
/// Minimum and maximum number of parts of each thread.
const THREAD_PARTS_RANGE: (usize, usize) = (16, 400);

/// After merging, number of parts, in multiples of the room, that are added before parts are merged again.
const CLOSED: usize = 64;

/// Kind, actor, TID of the waiter, and duration in nanoseconds.
type Part = ((CauseKind, Actor, u32), u64);

/// Sums of the waits for a CPU of one thread, or of all threads of one name if they are many.
#[derive(Debug)]
pub(super) struct Ready {
    /// Name of the threads, if they are many.
    shared: Option<Name>,
    parts: Vec<Part>,
    /// Names of the thread, and of the threads in its parts.
    names: Vec<(u32, Name)>,
    /// TID of the thread that was named last.
    named: Option<u32>,
    room: usize,
    /// Number of further parts for which new actors are merged instead of getting an entry.
    closed: usize,
}

impl Ready {
    /// Creates empty sums for threads, given their names, and returns them with each thread's index. Many threads of
    /// one name share one.
    pub fn for_threads(names: &[Option<Name>]) -> (Vec<Self>, Vec<usize>) {
        let mut threads: HashMap<Name, usize> = HashMap::new();
        names.iter().flatten().for_each(|&name| *threads.entry(name).or_default() += 1);
        threads.retain(|_, threads| *threads > MAX_SEPARATE_THREADS);
        let (mut sums, mut shared_indexes) = (Vec::new(), HashMap::new());
        let mut new = |shared| {
            sums.push(Ready { shared, parts: Vec::new(), names: Vec::new(), named: None, room: 0, closed: 0 });
            sums.len() - 1
        };
        let index = |name: &Option<Name>| match name.filter(|name| threads.contains_key(name)) {
            Some(name) => *shared_indexes.entry(name).or_insert_with(|| new(Some(name))),
            None => new(None),
        };
        let indexes = names.iter().map(index).collect();
        let (least, most) = THREAD_PARTS_RANGE;
        let room = (MAX_PARTS / sums.len().max(1)).clamp(least, most);
        sums.iter_mut().for_each(|sums| sums.room = room);
        (sums, indexes)
    }

    /// Adds time while thread `ready` waited for a CPU.
    pub fn add(&mut self, kind: CauseKind, who: Actor, ready: u32, ns: u64) {
        let is_one_of_them = self.shared.is_some() && who.named().map(|(name, _)| name) == self.shared;
        let who = if is_one_of_them { who.by_name() } else { who };
        let ready = if self.shared.is_some() { 0 } else { ready };
        self.closed = self.closed.saturating_sub(1);
        self.add_part(((kind, who, ready), ns));
        if self.parts.len() > self.room {
            self.merge_small();
            self.closed = CLOSED * self.room;
        }
    }

    fn add_part(&mut self, (what, ns): Part) {
        let (kind, who, ready) = what;
        if let Some(index) = self.parts.iter().position(|part| part.0 == what) {
            self.parts[index].1 += ns;
            // Moves frequent parts to the front.
            self.parts.swap(index, index / 2);
        } else if self.closed > 0 && who != who.by_name() {
            self.add_part(((kind, who.by_name(), ready), ns));
        } else if self.closed > 0 && self.parts.len() >= self.room && who != Actor::Text(OTHERS) {
            self.add_part(((kind, Actor::Text(OTHERS), ready), ns));
        } else {
            self.parts.push((what, ns));
        }
    }

    /// Sets a thread's name. Names come newest first, and the newest counts.
    pub fn name(&mut self, tid: u32, name: Name) {
        if self.shared.is_some() || self.named.replace(tid) == Some(tid) {
            return;
        }
        let is_known = self.names.iter().any(|&(known, _)| known == tid);
        if !is_known && self.names.len() < self.room {
            self.names.push((tid, name));
        }
    }

    /// Makes room: merges the smaller half of the parts by thread name, and the smallest of these without names.
    fn merge_small(&mut self) {
        let mut parts = std::mem::take(&mut self.parts);
        sort(&mut parts);
        for (index, ((kind, who, ready), ns)) in parts.into_iter().enumerate() {
            let who = match index {
                _ if index < self.room / 2 => who,
                _ if self.parts.len() < self.room * 3 / 4 => who.by_name(),
                _ => Actor::Text(OTHERS),
            };
            self.add_part(((kind, who, ready), ns));
        }
    }

    /// Returns the sums as text, largest first.
    pub fn finish(self, names: &mut dyn Names) -> Vec<PathSegment> {
        let mut parts = self.parts;
        sort(&mut parts);
        let mut found = PathBuilder::default();
        self.names.into_iter().for_each(|(tid, name)| found.name(tid, name));
        let mut to_ns = parts.iter().map(|&(_, ns)| ns).sum::<u64>();
        // `PathBuilder` takes findings newest first.
        for ((kind, who, ready), ns) in parts.into_iter().rev() {
            let from_ns = to_ns - ns;
            found.add(Finding::Segment(Segment { from_ns, to_ns, kind, who, ready: Some(ready), hop: None }));
            to_ns = from_ns;
        }
        let mut segments = found.finish(names).segments;
        if let Some(name) = self.shared {
            segments.iter_mut().for_each(|segment| segment.ready = Some(ActorName::program(name.text())));
        }
        segments
    }
}

/// Sorts parts, largest first, in deterministic order.
fn sort(parts: &mut [Part]) {
    parts.sort_by_cached_key(|&((kind, who, ready), ns)| (Reverse(ns), kind, who.key(), ready));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: u32, name: &str) -> Actor {
        Actor::Thread { tid, name: Name::new(name), cgroup: None, is_member: false }
    }

    #[test]
    fn many_threads_of_one_name_share_one_sum() {
        let of = |name: &str, count| std::iter::repeat_n(Some(Name::new(name)), count);
        let names: Vec<_> =
            of("pool", MAX_SEPARATE_THREADS + 1).chain(of("few", MAX_SEPARATE_THREADS)).chain([None, None]).collect();
        let (sums, indexes) = Ready::for_threads(&names);
        let (of_pool, others) = indexes.split_at(MAX_SEPARATE_THREADS + 1);
        assert!(of_pool.iter().all(|&index| index == of_pool[0] && sums[index].shared == Some(Name::new("pool"))));
        assert_eq!(sums.len(), 1 + MAX_SEPARATE_THREADS + 2);
        let apart: std::collections::BTreeSet<_> = others.iter().collect();
        assert_eq!(apart.len(), MAX_SEPARATE_THREADS + 2);
    }

    #[test]
    fn threads_of_shared_name_are_merged_and_others_keep_tids() {
        let (mut sums, _) = Ready::for_threads(&vec![Some(Name::new("pool")); MAX_SEPARATE_THREADS + 1]);
        for tid in 0..=MAX_SEPARATE_THREADS as u32 {
            sums[0].add(CauseKind::Thread, thread(tid + 1, "pool"), tid, 10);
            sums[0].add(CauseKind::Wakeup, thread(tid, "pool"), tid, 1);
            sums[0].add(CauseKind::Thread, thread(900, "hog"), tid, 100);
        }
        let all = MAX_SEPARATE_THREADS as u64 + 1;
        let mut parts: Vec<_> = sums[0].parts.iter().map(|&((kind, who, _), ns)| (ns, kind, who)).collect();
        parts.sort_by_key(|&(ns, ..)| Reverse(ns));
        let pool = Actor::Program { name: Name::new("pool"), is_member: false };
        let expected = [
            (100 * all, CauseKind::Thread, thread(900, "hog")),
            (10 * all, CauseKind::Thread, pool),
            (all, CauseKind::Wakeup, pool),
        ];
        assert_eq!(parts, expected);
    }
}
