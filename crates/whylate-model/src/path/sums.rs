// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths of many waits in one: what is alike in all of them once.

use std::collections::{HashMap, HashSet};

use super::PathSegment;
use crate::thread::without_number;

/// So many parts are kept apart.
const PARTS: usize = 2_000;
/// So many more are told without the waits that they lie within, by names alone.
const LOOSE: usize = 200;
/// From here on threads are looked for that can be told together.
const MANY_PARTS: usize = 200;
/// So many threads of one name are told apart.
const FEW: usize = 8;

/// Paths, added up.
#[derive(Debug, Default)]
pub(super) struct Sums {
    parts: Vec<PathSegment>,
    /// Names that so many threads have that their numbers tell nothing.
    shared: HashSet<String>,
    /// How many parts were left when they were last looked for.
    looked_at: usize,
}

impl Sums {
    /// Adds a path.
    pub fn add(&mut self, path: Vec<PathSegment>) {
        let path = path.into_iter().map(|segment| self.without_numbers(segment)).collect();
        merge(&mut self.parts, path);
        if self.parts.len() > MANY_PARTS.max(2 * self.looked_at) {
            self.share_names();
            self.looked_at = self.parts.len();
        }
    }

    /// What has been added up.
    pub fn finish(mut self) -> Vec<PathSegment> {
        self.share_names();
        self.parts
    }

    /// Where one name has become that of many threads, they are told together.
    fn share_names(&mut self) {
        let mut threads: HashMap<&str, HashSet<&str>> = HashMap::new();
        for part in &self.parts {
            for called in names_of(part) {
                threads.entry(without_number(called)).or_default().insert(called);
            }
        }
        let shared = threads.into_iter().filter(|(_, threads)| threads.len() > FEW);
        let shared: Vec<String> = shared.map(|(name, _)| name.to_owned()).collect();
        if shared.is_empty() {
            return;
        }
        self.shared.extend(shared);
        let parts = std::mem::take(&mut self.parts);
        let parts = parts.into_iter().map(|part| self.without_numbers(part)).collect();
        merge(&mut self.parts, parts);
    }

    fn without_numbers(&self, segment: PathSegment) -> PathSegment {
        segment.with_threads(&|called| {
            let name = without_number(called);
            if self.shared.contains(name) { name } else { called }.to_owned()
        })
    }
}

/// The threads that a part names, but for submitters.
fn names_of(part: &PathSegment) -> impl Iterator<Item = &str> {
    let who = part.is_a_threads().then_some(&part.who);
    who.into_iter().chain(&part.ready).chain(&part.waiter).map(String::as_str)
}

/// Adds parts to parts: those that are alike in order and in all they tell become one, and what has no room is summed up.
fn merge(into: &mut Vec<PathSegment>, path: Vec<PathSegment>) {
    let is_like = |a: &PathSegment, b: &PathSegment| {
        (a.kind, a.depth, &a.who, &a.ready, &a.via, &a.waiter) == (b.kind, b.depth, &b.who, &b.ready, &b.via, &b.waiter)
    };
    // Where one stands after which, it is found next.
    let mut at = 0;
    for segment in path {
        let place = into[at..].iter().position(|known| is_like(known, &segment)).map(|place| at + place);
        let place = place.or_else(|| into[..at].iter().position(|known| is_like(known, &segment)));
        match place {
            Some(place) => {
                into[place].ns += segment.ns;
                at = place;
            }
            None if into.len() < PARTS => {
                at = (at + 1).min(into.len());
                into.insert(at, segment);
            }
            None => {
                let is_named = segment.is_a_threads();
                let loose = PathSegment {
                    ns: segment.ns,
                    kind: segment.kind,
                    who: if is_named { without_number(&segment.who).to_owned() } else { segment.who },
                    ready: segment.ready.as_deref().map(|ready| without_number(ready).to_owned()),
                    ..PathSegment::default()
                };
                let others = PathSegment { ns: segment.ns, who: "others".to_owned(), ..PathSegment::default() };
                let known = into.iter().position(|known| is_like(known, &loose));
                let known = known.or_else(|| into.iter().position(|known| is_like(known, &others)));
                match known {
                    Some(known) => into[known].ns += segment.ns,
                    None if into.len() < PARTS + LOOSE => into.push(loose),
                    None => into.push(others),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CauseKind;

    #[test]
    fn parts_that_are_alike_become_one_and_nothing_is_lost() {
        let part = |ns, who: &str, depth| PathSegment { ns, who: who.to_owned(), depth, ..PathSegment::default() };
        let mut sums = Sums::default();
        sums.add(vec![part(1, "a", 1), part(2, "b", 2), part(4, "a", 1)]);
        sums.add(vec![part(8, "b", 2), part(16, "c", 2), part(32, "a", 1)]);
        let told: Vec<(u64, &str)> = sums.parts.iter().map(|part| (part.ns, part.who.as_str())).collect();
        assert_eq!(told, [(37, "a"), (10, "b"), (16, "c")]);
        let many = PARTS as u64 + 2 * LOOSE as u64;
        let path = (0..many).map(|number| part(1, &number.to_string(), 1)).collect();
        sums.add(path);
        let sums = sums.finish();
        assert_eq!(sums.iter().map(|part| part.ns).sum::<u64>(), 63 + many);
        assert!(sums.len() <= PARTS + LOOSE + 1);
    }

    #[test]
    fn many_threads_of_one_name_are_told_together_and_few_are_not() {
        let part = |ns, kind, name: &str, tid: usize| PathSegment {
            ns,
            kind,
            who: format!("{name}:{tid}"),
            ready: Some(format!("client:{tid}")),
            ..PathSegment::default()
        };
        let (mut few, mut many) = (Sums::default(), Sums::default());
        for (sums, threads) in [(&mut few, FEW), (&mut many, 3 * MANY_PARTS)] {
            for tid in 1..=threads {
                let disk = PathSegment {
                    ns: 4,
                    kind: CauseKind::Disk,
                    who: format!("vda (write by client:{tid})"),
                    ..PathSegment::default()
                };
                sums.add(vec![part(1, CauseKind::Thread, "client", tid), part(2, CauseKind::Irq, "eth0", 1), disk]);
            }
        }
        let mut told: Vec<_> = many.finish().into_iter().map(|part| (part.ns, part.who, part.ready)).collect();
        told.sort();
        let client = Some("client".to_owned());
        let of_each = 3 * MANY_PARTS as u64;
        let expected = [
            (of_each, "client".to_owned(), client.clone()),
            (2 * of_each, "eth0:1".to_owned(), client),
            (4 * of_each, "vda (write by client)".to_owned(), None),
        ];
        assert_eq!(told, expected);
        assert_eq!(few.finish().len(), 2 * FEW + 1);
    }
}
