// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums time by cause.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::{ActorName, Cause, CauseKind, Cgroup, Occupant};

/// Blame for a span of time: the kind of delay and the culprit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Blame {
    pub kind: CauseKind,
    pub who: ActorName,
    /// Path of the thread's cgroup.
    pub cgroup: Option<String>,
}

impl Blame {
    pub fn new(kind: CauseKind, who: impl Into<ActorName>) -> Self {
        Blame { kind, who: who.into(), cgroup: None }
    }

    /// Returns the blame for unexplained time; `why` names the missing evidence.
    pub fn unknown(why: &str) -> Self {
        Blame::new(CauseKind::Unknown, why)
    }

    /// Blames what had a CPU.
    fn of_occupant(kind: CauseKind, occupant: &Occupant, cpu: u32) -> Self {
        let (who, cgroup) = match occupant {
            Occupant::Idle => (format!("CPU {cpu}").into(), None),
            Occupant::Thread { tid, name, cgroup } => (ActorName::thread(name, *tid), cgroup.clone()),
            Occupant::Work { handler, .. } => (handler.as_str().into(), None),
            Occupant::Irq { name } | Occupant::Softirq { name } => (name.as_str().into(), None),
        };
        Blame { kind, who, cgroup }
    }
}

/// Sums the parts of a window by blame.
#[derive(Debug, Default)]
pub(super) struct Sum<'a> {
    by_blame: BTreeMap<Blame, BlameTotal<'a>>,
    /// Occupants of CPUs, which are named at the end: a window has hundreds of intervals of a few occupants.
    by_occupant: BTreeMap<(CauseKind, u32, &'a Occupant), BlameTotal<'a>>,
    total_ns: u64,
}

#[derive(Debug, Default)]
struct BlameTotal<'a> {
    ns: u64,
    /// Time by stack; only stacks that have frames.
    by_stack: BTreeMap<&'a [String], u64>,
}

impl<'a> BlameTotal<'a> {
    fn add(&mut self, ns: u64, stack: &'a [String]) {
        self.ns += ns;
        if !stack.is_empty() {
            *self.by_stack.entry(stack).or_default() += ns;
        }
    }
}

impl<'a> Sum<'a> {
    pub fn add(&mut self, blame: Blame, ns: u64, stack: &'a [String]) {
        if ns == 0 {
            return;
        }
        self.total_ns += ns;
        self.by_blame.entry(blame).or_default().add(ns, stack);
    }

    /// Adds time of an occupant of the CPU.
    pub fn add_occupant(&mut self, kind: CauseKind, occupant: &'a Occupant, cpu: u32, ns: u64, stack: &'a [String]) {
        if ns == 0 {
            return;
        }
        self.total_ns += ns;
        self.by_occupant.entry((kind, cpu, occupant)).or_default().add(ns, stack);
    }

    pub fn total_ns(&self) -> u64 {
        self.total_ns
    }

    /// Returns the causes, largest first, each with the stack that covers most of its time.
    pub fn into_causes(mut self) -> Vec<Cause> {
        for ((kind, cpu, occupant), part) in self.by_occupant {
            let of_blame = self.by_blame.entry(Blame::of_occupant(kind, occupant, cpu)).or_default();
            of_blame.ns += part.ns;
            part.by_stack.into_iter().for_each(|(stack, ns)| *of_blame.by_stack.entry(stack).or_default() += ns);
        }
        let mut causes: Vec<Cause> = self
            .by_blame
            .into_iter()
            .map(|(blame, part)| {
                // Of equals the first in order, so that equal evidence gives equal causes.
                let stack = part.by_stack.into_iter().min_by_key(|&(_, ns)| Reverse(ns));
                let stack = stack.map(|(stack, _)| stack.to_vec()).unwrap_or_default();
                let cgroup = blame.cgroup.as_deref().map(Cgroup::new);
                Cause { stack, cgroup, ..Cause::new(blame.kind, blame.who, part.ns) }
            })
            .collect();
        // A stable sort: causes of equal length stay in order of kind and name.
        causes.sort_by_key(|cause| Reverse(cause.ns));
        causes
    }
}
