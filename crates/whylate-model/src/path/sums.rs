// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums the paths of many waits: equal parts are added up.

use std::collections::{HashMap, HashSet};

use super::outline::{Piece, pieces};
use super::{OTHERS, PathSegment};
use crate::ActorName;

/// Maximum number of distinct parts.
const MAX_PARTS: usize = 2_000;
/// Maximum number of further parts, kept without their enclosing waits and aggregated by name.
const MAX_LOOSE: usize = 200;
/// Number of parts from which threads of one name are aggregated.
const AGGREGATE_FROM: usize = 200;
/// Maximum number of threads of one name that are listed one by one.
const MAX_LISTED_THREADS: usize = 8;

/// Sums of paths.
#[derive(Debug, Default)]
pub(super) struct Sums {
    outermost: Parts,
    /// Number of distinct parts.
    parts: usize,
    /// Names shared by more than `MAX_LISTED_THREADS` threads, which are listed without TIDs.
    shared: HashSet<String>,
    /// Number of parts after names were last aggregated.
    parts_after_aggregation: usize,
}

/// Parts at one depth, and the waits nested at that depth.
#[derive(Debug, Default)]
struct Parts {
    own: Vec<PathSegment>,
    waits: Vec<Wait>,
}

#[derive(Debug)]
struct Wait {
    /// An empty segment with the waiter, its system call and the object.
    outer: PathSegment,
    within: Parts,
}

impl Sums {
    /// Adds a path.
    pub fn add(&mut self, path: Vec<PathSegment>) {
        let path: Vec<PathSegment> = path.into_iter().map(|segment| self.strip_shared_tids(segment)).collect();
        self.take(&path);
        if self.parts > AGGREGATE_FROM.max(2 * self.parts_after_aggregation) {
            self.aggregate_names();
            self.parts_after_aggregation = self.parts;
        }
    }

    /// Returns the sums. The parts of nested waits follow a wait's own parts.
    pub fn finish(mut self) -> Vec<PathSegment> {
        self.aggregate_names();
        self.outermost.flat(0)
    }

    fn take(&mut self, path: &[PathSegment]) {
        let mut loose = Vec::new();
        self.outermost.add(path, 0, &mut self.parts, &mut loose);
        loose.into_iter().for_each(|segment| self.outermost.add_loose(segment, &mut self.parts));
    }

    /// Aggregates the threads of each name that more than `MAX_LISTED_THREADS` threads share.
    fn aggregate_names(&mut self) {
        let mut threads: HashMap<String, HashSet<Option<u32>>> = HashMap::new();
        self.outermost.each(&mut |part| {
            for thread in names_of(part) {
                threads.entry(thread.comm().unwrap_or_default().to_owned()).or_default().insert(thread.tid());
            }
        });
        threads.retain(|_, threads| threads.len() > MAX_LISTED_THREADS);
        if threads.is_empty() {
            return;
        }
        self.shared.extend(threads.into_keys());
        self.parts = 0;
        let Parts { own, waits } = std::mem::take(&mut self.outermost);
        // Loose parts come last, so that they do not take the room of the others.
        for parts in [Parts { own: Vec::new(), waits }, Parts { own, waits: Vec::new() }] {
            let path: Vec<PathSegment> = parts.flat(0).into_iter().map(|part| self.strip_shared_tids(part)).collect();
            self.take(&path);
        }
    }

    fn strip_shared_tids(&self, segment: PathSegment) -> PathSegment {
        let is_shared = |name: &ActorName| name.comm().is_some_and(|comm| self.shared.contains(comm));
        segment.with_threads(&|name| if is_shared(name) { name.by_name() } else { name.clone() })
    }
}

/// Returns the threads that a part names, without submitters.
fn names_of(part: &PathSegment) -> impl Iterator<Item = &ActorName> {
    [&part.who].into_iter().chain(&part.ready).chain(&part.waiter).filter(|name| name.is_thread())
}

impl Parts {
    /// Adds parts: equal parts within equal waits become one. Appends the parts without room to `loose`.
    fn add(&mut self, path: &[PathSegment], depth: u32, parts: &mut usize, loose: &mut Vec<PathSegment>) {
        for piece in pieces(path, depth) {
            match piece {
                Piece::Own(segment) if segment.ns == 0 => {}
                Piece::Own(segment) => {
                    if !add_to_equal(&mut self.own, segment) {
                        if *parts < MAX_PARTS {
                            *parts += 1;
                            self.own.push(segment.clone());
                        } else {
                            loose.push(segment.clone());
                        }
                    }
                }
                Piece::Wait { outer, within } => {
                    let index = self.waits.iter().position(|wait| wait.outer.is_of_same_wait(outer));
                    let at = match index {
                        Some(at) => {
                            self.waits[at].outer.keep_common_object(outer);
                            at
                        }
                        None if *parts < MAX_PARTS => {
                            let PathSegment { waiter, via, object, .. } = outer.clone();
                            let outer = PathSegment { waiter, via, object, depth: depth + 1, ..PathSegment::default() };
                            self.waits.push(Wait { outer, within: Parts::default() });
                            self.waits.len() - 1
                        }
                        None => {
                            loose.extend_from_slice(within);
                            continue;
                        }
                    };
                    self.waits[at].within.add(within, depth + 1, parts, loose);
                }
            }
        }
    }

    fn add_loose(&mut self, segment: PathSegment, parts: &mut usize) {
        let PathSegment { ns, kind, .. } = segment;
        let who = if segment.who.is_thread() { segment.who.by_name() } else { segment.who };
        let ready = segment.ready.map(|ready| ready.by_name());
        let loose = PathSegment { ns, kind, who, ready, ..PathSegment::default() };
        let others = PathSegment { ns, who: OTHERS.into(), ..PathSegment::default() };
        if !add_to_equal(&mut self.own, &loose) && !add_to_equal(&mut self.own, &others) {
            self.own.push(if *parts < MAX_PARTS + MAX_LOOSE { loose } else { others });
            *parts += 1;
        }
    }

    fn each(&self, visit: &mut dyn FnMut(&PathSegment)) {
        self.own.iter().for_each(&mut *visit);
        self.waits.iter().for_each(|wait| wait.within.each(visit));
    }

    /// Flattens the tree. Each wait begins with a part of its own, possibly empty, which has the waiter and what it
    /// waited in.
    fn flat(self, depth: u32) -> Vec<PathSegment> {
        let mut flat = self.own;
        for Wait { outer, within } in self.waits {
            if within.own.is_empty() {
                flat.push(PathSegment { depth: depth + 1, ..outer });
            }
            flat.extend(within.flat(depth + 1));
        }
        flat
    }
}

/// Adds a segment to an equal one; returns whether there was one.
fn add_to_equal(parts: &mut [PathSegment], segment: &PathSegment) -> bool {
    let kind_and_depth = |of: &PathSegment| (of.kind, of.depth);
    let is_equal = |known: &&mut PathSegment| {
        kind_and_depth(known) == kind_and_depth(segment)
            && (&known.who, &known.ready) == (&segment.who, &segment.ready)
            && known.is_of_same_wait(segment)
    };
    let known = parts.iter_mut().find(is_equal);
    let Some(known) = known else { return false };
    known.ns += segment.ns;
    known.keep_common_object(segment);
    known.timeouts = known.timeouts.saturating_add(segment.timeouts);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CauseKind;

    #[test]
    fn equal_parts_are_summed_and_total_is_kept() {
        let part = |ns, who: &str, depth| PathSegment { ns, who: who.into(), depth, ..PathSegment::default() };
        let mut sums = Sums::default();
        sums.add(vec![part(1, "a", 1), part(2, "b", 2), part(4, "a", 1)]);
        sums.add(vec![part(8, "b", 2), part(16, "c", 2), part(32, "a", 1)]);
        assert_eq!(sums.parts, 3);
        let many = MAX_PARTS as u64 + 2 * MAX_LOOSE as u64;
        let path = (0..many).map(|number| part(1, &number.to_string(), 1)).collect();
        sums.add(path);
        let sums = sums.finish();
        let sums_by_part: Vec<(u64, String)> = sums.iter().map(|part| (part.ns, part.who.to_string())).collect();
        let expected = [(37, "a"), (10, "b"), (16, "c")].map(|(ns, who)| (ns, who.to_owned()));
        assert!(expected.iter().all(|part| sums_by_part.contains(part)), "{sums_by_part:?}");
        assert_eq!(sums.iter().map(|part| part.ns).sum::<u64>(), 63 + many);
        assert!(sums.len() <= MAX_PARTS + MAX_LOOSE + 1);
    }

    #[test]
    fn equal_parts_of_different_waits_stay_separate() {
        let part = |ns, who: &str, depth, waiter: &str, via: &str| PathSegment {
            ns,
            who: who.into(),
            depth,
            waiter: Some(waiter.into()),
            via: Some(via.to_owned()),
            ..PathSegment::default()
        };
        let mut sums = Sums::default();
        sums.add(vec![part(1, "server", 1, "client", "read"), part(2, "jbd2", 2, "server", "fsync")]);
        sums.add(vec![part(4, "server", 1, "client", "write"), part(8, "jbd2", 2, "server", "fsync")]);
        sums.add(vec![part(16, "jbd2", 2, "server", "fsync"), part(32, "server", 1, "client", "read")]);
        // A wait without a part of its own.
        sums.add(vec![part(64, "jbd2", 2, "other", "fsync")]);
        let sums = sums.finish();
        assert_eq!((sums[4].waiter.as_ref(), sums[4].depth), (Some(&"other".into()), 1));
        let sums_by_part: Vec<(u64, String)> = sums.into_iter().map(|part| (part.ns, part.who.to_string())).collect();
        let expected = [(33, "server"), (18, "jbd2"), (4, "server"), (8, "jbd2"), (0, ""), (64, "jbd2")];
        assert_eq!(sums_by_part, expected.map(|(ns, who)| (ns, who.to_owned())));
    }

    #[test]
    fn memory_is_bounded_with_ever_new_waiters() {
        let mut sums = Sums::default();
        for number in 0..5 * MAX_PARTS {
            let waiter = Some(format!("t{number}").into());
            sums.add(vec![PathSegment { ns: 1, depth: 1, waiter, ..PathSegment::default() }]);
        }
        assert!(sums.outermost.waits.len() <= MAX_PARTS);
        let sums = sums.finish();
        assert_eq!(sums.iter().map(|part| part.ns).sum::<u64>(), 5 * MAX_PARTS as u64);
        assert!(sums.len() <= MAX_PARTS + MAX_LOOSE + 1);
    }

    #[test]
    fn many_threads_of_one_name_are_aggregated_and_few_are_not() {
        let part = |ns, kind, name: &str, tid: u32| PathSegment {
            ns,
            kind,
            who: ActorName::thread(name, tid),
            ready: Some(ActorName::thread("client", tid)),
            ..PathSegment::default()
        };
        let (mut few, mut many) = (Sums::default(), Sums::default());
        for (sums, threads) in [(&mut few, MAX_LISTED_THREADS), (&mut many, 3 * AGGREGATE_FROM)] {
            for tid in 1..=threads as u32 {
                let disk = PathSegment {
                    ns: 4,
                    kind: CauseKind::Disk,
                    who: ActorName::thread("client", tid).within("vda (write by ", ")"),
                    ..PathSegment::default()
                };
                let irq = PathSegment { who: "eth0:1".into(), ..part(2, CauseKind::Irq, "", 1) };
                sums.add(vec![part(1, CauseKind::Thread, "client", tid), irq, disk]);
            }
        }
        let mut sums_by_part: Vec<_> =
            many.finish().into_iter().map(|part| (part.ns, part.who.to_string(), part.ready)).collect();
        sums_by_part.sort();
        let client = Some(ActorName::program("client"));
        let of_each = 3 * AGGREGATE_FROM as u64;
        let expected = [
            (of_each, "client".to_owned(), client.clone()),
            (2 * of_each, "eth0:1".to_owned(), client),
            (4 * of_each, "vda (write by client)".to_owned(), None),
        ];
        assert_eq!(sums_by_part, expected);
        assert_eq!(few.finish().len(), 2 * MAX_LISTED_THREADS + 1);
    }
}
