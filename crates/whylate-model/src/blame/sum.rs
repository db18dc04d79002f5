// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums time by cause.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::{ActorName, Cause, CauseKind, Cgroup};

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
}

/// Sums the parts of a window by blame.
#[derive(Debug, Default)]
pub(super) struct Sum<'a> {
    by_blame: BTreeMap<Blame, BlameTotal<'a>>,
    total_ns: u64,
}

#[derive(Debug, Default)]
struct BlameTotal<'a> {
    ns: u64,
    /// Time by stack; only stacks that have frames.
    by_stack: BTreeMap<&'a [String], u64>,
}

impl<'a> Sum<'a> {
    pub fn add(&mut self, blame: Blame, ns: u64, stack: &'a [String]) {
        if ns == 0 {
            return;
        }
        self.total_ns += ns;
        let part = self.by_blame.entry(blame).or_default();
        part.ns += ns;
        if !stack.is_empty() {
            *part.by_stack.entry(stack).or_default() += ns;
        }
    }

    pub fn total_ns(&self) -> u64 {
        self.total_ns
    }

    /// Returns the causes, largest first, each with the stack that covers most of its time.
    pub fn into_causes(self) -> Vec<Cause> {
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
