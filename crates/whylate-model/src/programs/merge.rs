// SPDX-License-Identifier: MIT OR Apache-2.0
//! Adds up the programs of consecutive spans.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::{HeldUpPart, HeldUpProgram, Programs};
use crate::path::OTHERS;
use crate::{ActorName, Cause, CauseKind};

/// Maximum number of programs, and of causes of one part. Further programs are counted; further causes are summed.
const MAX_PROGRAMS: usize = 4_096;
const MAX_CAUSES: usize = 64;
/// Maximum number of programs that others started; the first ones are kept, and further ones are counted.
const MAX_SPAWNED: usize = 256;

impl Programs {
    /// Adds the programs of the next span. Returns the number of programs for which there was no room.
    pub fn add(&mut self, next: &Programs) -> u64 {
        let mut dropped = 0;
        self.covered_ns = self.covered_ns.saturating_add(next.covered_ns);
        self.on_cpu_ns = self.on_cpu_ns.saturating_add(next.on_cpu_ns);
        self.ready_ns = self.ready_ns.saturating_add(next.ready_ns);
        for of in &next.spawned {
            let spawned = self.spawned.len();
            match self.spawned.iter_mut().find(|known| known.name == of.name && known.by == of.by) {
                Some(known) => known.runs = known.runs.saturating_add(of.runs),
                None if spawned < MAX_SPAWNED => self.spawned.push(of.clone()),
                None => dropped += 1,
            }
        }
        self.spawned.sort_by(|a, b| (b.runs, &a.name, &a.by).cmp(&(a.runs, &b.name, &b.by)));
        if next.held_up.is_empty() {
            return dropped;
        }
        let key = |program: &HeldUpProgram| (program.who.clone(), program.process.clone());
        let mut known: HashMap<(ActorName, Option<ActorName>), usize> =
            self.held_up.iter().enumerate().map(|(at, program)| (key(program), at)).collect();
        for program in &next.held_up {
            match known.get(&key(program)) {
                Some(&at) => self.held_up[at].absorb(program),
                None if self.held_up.len() < MAX_PROGRAMS => {
                    known.insert(key(program), self.held_up.len());
                    self.held_up.push(program.clone());
                }
                None => dropped += 1,
            }
        }
        self.held_up.sort_by(|a, b| (b.held_up_ns(), &a.who).cmp(&(a.held_up_ns(), &b.who)));
        dropped
    }
}

impl Programs {
    /// Returns an upper bound of the memory in bytes.
    pub fn heap_bytes(&self) -> usize {
        // Names are short, and objects have one path.
        let of_part = |part: &HeldUpPart| {
            let causes = part.causes.len() * (size_of::<Cause>() + 64);
            size_of::<HeldUpPart>() + part.latency.iter().count() * 16 + causes + 512
        };
        let of = |program: &HeldUpProgram| {
            size_of::<HeldUpProgram>() + 128 + program.parts.iter().map(of_part).sum::<usize>()
        };
        self.held_up.iter().map(of).sum()
    }
}

impl HeldUpProgram {
    fn absorb(&mut self, next: &HeldUpProgram) {
        self.others = self.others.max(next.others);
        self.lived_ns = self.lived_ns.saturating_add(next.lived_ns);
        self.on_cpu_ns = self.on_cpu_ns.saturating_add(next.on_cpu_ns);
        for part in &next.parts {
            match self.parts.iter_mut().find(|known| known.by == part.by && known.via == part.via) {
                Some(known) => known.absorb(part),
                None => self.parts.push(part.clone()),
            }
        }
        self.parts.sort_by_key(|part| Reverse(part.ns));
    }
}

impl HeldUpPart {
    fn absorb(&mut self, next: &HeldUpPart) {
        self.ns = self.ns.saturating_add(next.ns);
        self.latency.merge(&next.latency);
        self.absorb_object(next);
        for cause in &next.causes {
            let has_room = self.causes.len() < MAX_CAUSES;
            let known = self.causes.iter_mut().find(|known| known.kind == cause.kind && known.who == cause.who);
            match known {
                Some(known) => known.ns = known.ns.saturating_add(cause.ns),
                None if has_room => self.causes.push(cause.clone()),
                None => match self.causes.iter_mut().find(|known| known.who == OTHERS) {
                    Some(others) => others.ns = others.ns.saturating_add(cause.ns),
                    None => self.causes.push(Cause::new(CauseKind::Unknown, OTHERS, cause.ns)),
                },
            }
        }
        self.causes.sort_by(|a, b| (b.ns, a.kind, &a.who).cmp(&(a.ns, b.kind, &b.who)));
    }

    /// Keeps the object that was read in more waits (Boyer and Moore's majority vote).
    fn absorb_object(&mut self, next: &HeldUpPart) {
        let Some(object) = &next.object else { return };
        let waits = next.object_waits.max(1);
        match &mut self.object {
            Some(known) if known.is_same(object) => {
                known.keep_common(object);
                if !known.has_peer() {
                    known.clone_peers(object);
                }
                self.object_waits = self.object_waits.saturating_add(waits);
            }
            Some(_) if self.object_waits >= waits => self.object_waits -= waits,
            _ => {
                self.object_waits = waits - self.object_waits;
                self.object = Some(object.clone());
            }
        }
        if self.object_waits == 0 {
            self.object = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HeldUpBy, Spawned};
    use super::*;
    use crate::object::{Object, ObjectKind};

    fn programs(ns: u64, cause: &str) -> Programs {
        let causes = vec![Cause::new(CauseKind::Running, cause, ns)];
        let part =
            HeldUpPart { by: HeldUpBy::Lock, ns, latency: [ns].into_iter().collect(), causes, ..Default::default() };
        let who = ActorName::thread("service", 7);
        let held_up = vec![HeldUpProgram { who, lived_ns: 100, on_cpu_ns: 5, parts: vec![part], ..Default::default() }];
        Programs { covered_ns: 100, on_cpu_ns: 50, ready_ns: 20, held_up, spawned: Vec::new() }
    }

    #[test]
    fn spans_add_up() {
        let mut sum = Programs::default();
        for (ns, cause) in [(10, "a"), (30, "b"), (5, "a")] {
            assert_eq!(sum.add(&programs(ns, cause)), 0);
        }
        sum.add(&Programs { covered_ns: 100, ..Programs::default() });
        assert_eq!((sum.covered_ns, sum.on_cpu_ns, sum.ready_ns), (400, 150, 60));
        let [program] = &sum.held_up[..] else { panic!("{sum:?}") };
        assert_eq!((program.held_up_ns(), program.lived_ns, program.latency().count()), (45, 300, 3));
        let causes: Vec<_> = program.parts[0].causes.iter().map(|cause| (cause.who.to_string(), cause.ns)).collect();
        assert_eq!(causes, [("b".to_owned(), 30), ("a".to_owned(), 15)]);
    }

    #[test]
    fn object_of_most_waits_stands_for_all_spans() {
        let with = |path: &str, object_waits: u64| {
            let object = Some(Object::with_path(ObjectKind::FileLock, path));
            HeldUpPart { object, object_waits, ..Default::default() }
        };
        let merged = |parts: &[HeldUpPart]| {
            let mut sum = HeldUpPart::default();
            parts.iter().for_each(|part| sum.absorb(part));
            (sum.object.and_then(|object| object.path), sum.object_waits)
        };
        assert_eq!(merged(&[with("/b", 1), with("/a", 3), with("/b", 1)]), (Some("/a".to_owned()), 1));
        assert_eq!(merged(&[with("/a", 2), HeldUpPart::default(), with("/a", 3)]), (Some("/a".to_owned()), 5));
        assert_eq!(merged(&[with("/a", 2), with("/b", 2)]), (None, 0), "neither has the majority");
        // An older recording has no numbers.
        assert_eq!(merged(&[with("/a", 0), with("/a", 0)]), (Some("/a".to_owned()), 2));
    }

    #[test]
    fn programs_beyond_the_maximum_are_counted() {
        let spawned = (0..MAX_SPAWNED as u64 + 2).map(|number| Spawned {
            name: format!("n{number}"),
            by: ActorName::thread("sh", 5),
            runs: 1,
        });
        let mut sum = Programs::default();
        assert_eq!(sum.add(&Programs { spawned: spawned.collect(), ..programs(10, "a") }), 2);
        let who = |number: u32| HeldUpProgram { who: ActorName::thread("b", number), ..sum.held_up[0].clone() };
        let held_up: Vec<HeldUpProgram> = (0..MAX_PROGRAMS as u32 + 2).map(who).collect();
        // One has been there before.
        assert_eq!(sum.add(&Programs { held_up: held_up.clone(), ..Programs::default() }), 3);
        let mut all = Programs { held_up, ..Programs::default() };
        assert_eq!((all.keep_longest(MAX_PROGRAMS), all.held_up.len()), (2, MAX_PROGRAMS));
    }

    #[test]
    fn causes_beyond_the_maximum_are_counted_together() {
        let mut sum = Programs::default();
        for number in 0..100 {
            assert_eq!(sum.add(&programs(10, &format!("a{number}"))), 0);
        }
        let causes = &sum.held_up[0].parts[0].causes;
        assert_eq!((causes.len(), causes.iter().map(|cause| cause.ns).sum::<u64>()), (MAX_CAUSES + 1, 1_000));
    }
}
