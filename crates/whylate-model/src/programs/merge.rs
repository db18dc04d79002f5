// SPDX-License-Identifier: MIT OR Apache-2.0
//! Adds up the programs of consecutive spans.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::{HeldUpPart, HeldUpProgram, Programs};
use crate::path::OTHERS;
use crate::{ActorName, Cause, CauseKind};

/// Maximum number of programs, and of causes of one part. Further programs are left out; further causes are summed.
const MAX_PROGRAMS: usize = 4_096;
const MAX_CAUSES: usize = 64;
/// Maximum number of programs that others started; the first ones are kept.
const MAX_SPAWNED: usize = 256;

impl Programs {
    /// Adds the programs of the next span. Returns the number of programs for which there was no room.
    pub fn add(&mut self, next: &Programs) -> u64 {
        self.covered_ns = self.covered_ns.saturating_add(next.covered_ns);
        self.on_cpu_ns = self.on_cpu_ns.saturating_add(next.on_cpu_ns);
        self.ready_ns = self.ready_ns.saturating_add(next.ready_ns);
        for of in &next.spawned {
            let spawned = self.spawned.len();
            match self.spawned.iter_mut().find(|known| known.name == of.name && known.by == of.by) {
                Some(known) => known.runs = known.runs.saturating_add(of.runs),
                None if spawned < MAX_SPAWNED => self.spawned.push(of.clone()),
                None => {}
            }
        }
        self.spawned.sort_by(|a, b| (b.runs, &a.name, &a.by).cmp(&(a.runs, &b.name, &b.by)));
        if next.held_up.is_empty() {
            return 0;
        }
        let key = |program: &HeldUpProgram| (program.who.clone(), program.process.clone());
        let mut known: HashMap<(ActorName, Option<ActorName>), usize> =
            self.held_up.iter().enumerate().map(|(at, program)| (key(program), at)).collect();
        let mut dropped = 0;
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
        // The first object that was seen stands for all.
        if self.object.is_none() {
            self.object.clone_from(&next.object);
        }
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
}

#[cfg(test)]
mod tests {
    use super::super::HeldUpBy;
    use super::*;

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
    fn causes_beyond_the_maximum_are_counted_together() {
        let mut sum = Programs::default();
        for number in 0..100 {
            assert_eq!(sum.add(&programs(10, &format!("a{number}"))), 0);
        }
        let causes = &sum.held_up[0].parts[0].causes;
        assert_eq!((causes.len(), causes.iter().map(|cause| cause.ns).sum::<u64>()), (MAX_CAUSES + 1, 1_000));
    }
}
