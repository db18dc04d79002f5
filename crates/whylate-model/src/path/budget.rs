// SPDX-License-Identifier: MIT OR Apache-2.0
//! What threads did with their time: a budget that adds up, with each kind of wait followed to what it ends in.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::command::LongWait;
use super::history::{Blocked, Waker};
use super::sums::Sums;
use super::{Asked, Finding, Found, Limits, Names, Party, Past, PathSegment, Segment, walk};
use crate::{CauseKind, Histogram};

/// So many waits are told one by one.
const LONGEST: usize = 5;
/// Waits that are shorter are counted, and not followed.
const FOLLOWED_NS: u64 = 50_000;

/// What some threads did in a span of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// How many threads.
    pub threads: u64,
    /// Their time in all: what follows adds up to it.
    pub total_ns: u64,
    /// They had a CPU, or an interrupt on top of them.
    pub on_cpu_ns: u64,
    /// They slept for as long as they wanted to.
    pub own_sleep_ns: u64,
    /// They could run.
    pub ready: Waits,
    /// Other waits, the longest in all first.
    pub waits: Vec<Waits>,
    /// The longest of these waits, the longest first.
    pub longest: Vec<LongWait>,
}

impl Budget {
    /// The same, with the names of threads made of how they are called.
    pub fn with_threads(self, name: &dyn Fn(&str) -> String) -> Self {
        let named = |path: Vec<PathSegment>| path.into_iter().map(|part| part.with_threads(name)).collect();
        let waits = |waits: Waits| Waits { path: named(waits.path), ..waits };
        let longest = self.longest.into_iter().map(|wait| LongWait { path: named(wait.path), ..wait }).collect();
        Budget { ready: waits(self.ready), waits: self.waits.into_iter().map(waits).collect(), longest, ..self }
    }
}

/// Waits of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waits {
    /// In what the threads waited.
    pub via: String,
    /// How long in all.
    pub ns: u64,
    /// How long each took.
    pub latency: Histogram,
    /// What they consist of, as far as they were followed.
    pub path: Vec<PathSegment>,
}

/// A wait that is being gone back through.
struct Open {
    found: Found,
    ns: u64,
    from_ns: u64,
    by: Option<Waker>,
    blocked: Option<Blocked>,
}

/// Gathers what walks find.
struct Gatherer<'a> {
    names: &'a mut dyn Names,
    budget: Budget,
    waits: BTreeMap<String, (Waits, Sums)>,
    /// Of each thread, the wait that is being gone back through.
    open: Vec<Option<Open>>,
    /// Of each thread, how long it could run without a break.
    ready_ns: Vec<u64>,
    ready: Vec<Found>,
    from_ns: u64,
}

/// Tells what threads did; each of `asked` is a thread and when it lived.
pub fn budget(past: &mut dyn Past, asked: &[Asked], limits: &dyn Limits, names: &mut dyn Names) -> Budget {
    let mut gatherer = Gatherer {
        names,
        budget: Budget { threads: asked.len() as u64, ..Budget::default() },
        waits: BTreeMap::new(),
        open: asked.iter().map(|_| None).collect(),
        ready_ns: vec![0; asked.len()],
        ready: asked.iter().map(|_| Found::default()).collect(),
        from_ns: asked.iter().map(|asked| asked.from_ns).min().unwrap_or(0),
    };
    walk(past, asked, limits, &mut |number, finding| gatherer.add(number, finding));
    gatherer.finish()
}

impl Gatherer<'_> {
    fn add(&mut self, number: usize, finding: Finding) {
        match finding {
            Finding::Hop(hop) if hop.within.is_none() => {
                self.close(number);
                self.close_ready(number);
                let open = Open { found: Found::default(), ns: 0, from_ns: 0, by: hop.by, blocked: None };
                self.open[number] = Some(open);
            }
            Finding::Segment(segment) if segment.hop.is_none() => {
                self.close(number);
                self.add_own(number, segment);
            }
            Finding::Segment(segment) => {
                self.budget.total_ns += segment.to_ns - segment.from_ns;
                if let Some(open) = &mut self.open[number] {
                    open.ns += segment.to_ns - segment.from_ns;
                    open.from_ns = segment.from_ns;
                }
            }
            Finding::Asleep { hop, blocked, .. } => {
                if let Some(open) = self.open[number].as_mut().filter(|open| open.found.is_outermost(hop)) {
                    open.blocked = Some(blocked);
                }
            }
            Finding::Hop(_) => {}
        }
        if let Some(open) = &mut self.open[number] {
            open.found.add(finding);
        }
    }

    /// What the thread did itself, or could have done.
    fn add_own(&mut self, number: usize, segment: Segment) {
        let ns = segment.to_ns - segment.from_ns;
        self.budget.total_ns += ns;
        if segment.ready.is_some() {
            self.ready_ns[number] += ns;
            self.ready[number].add(Finding::Segment(segment));
        } else {
            if let Party::Thread { tid, name, .. } = segment.who {
                self.ready[number].name(tid, name);
            }
            self.close_ready(number);
            self.budget.on_cpu_ns += ns;
        }
    }

    fn close_ready(&mut self, number: usize) {
        let ns = std::mem::take(&mut self.ready_ns[number]);
        if ns > 0 {
            self.budget.ready.ns += ns;
            self.budget.ready.latency.merge(&[ns].into_iter().collect());
        }
    }

    fn close(&mut self, number: usize) {
        let Some(open) = self.open[number].take().filter(|open| open.ns > 0) else { return };
        let path = open.found.finish(self.names).segments;
        let outermost = path.iter().find(|segment| segment.depth == 1);
        let via = outermost.and_then(|segment| segment.via.clone());
        let sleeps = via.as_deref().is_some_and(|via| via.contains("nanosleep"));
        if open.by == Some(Waker::Timer) && sleeps {
            self.budget.own_sleep_ns += open.ns;
            return;
        }
        let other = match open.blocked {
            Some(blocked) if blocked.is_kernel => "waits of kernel threads",
            Some(_) => "waits outside system calls",
            None => "waits that began earlier",
        };
        let via = via.unwrap_or_else(|| other.to_owned());
        let (waits, sums) =
            self.waits.entry(via.clone()).or_insert_with(|| (Waits { via, ..Waits::default() }, Sums::default()));
        waits.ns += open.ns;
        waits.latency.merge(&[open.ns].into_iter().collect());
        if open.ns < FOLLOWED_NS {
            let short = path.first().cloned().unwrap_or_default();
            let short =
                PathSegment { ns: open.ns, kind: CauseKind::Unknown, who: "short waits".to_owned(), depth: 1, ..short };
            sums.add(vec![short]);
            return;
        }
        let longest = &mut self.budget.longest;
        longest.push(LongWait { after_ns: open.from_ns.saturating_sub(self.from_ns), ns: open.ns, path: path.clone() });
        longest.sort_by_key(|wait| Reverse(wait.ns));
        longest.truncate(LONGEST);
        sums.add(path);
    }

    fn finish(mut self) -> Budget {
        for number in 0..self.open.len() {
            self.close(number);
            self.close_ready(number);
        }
        let mut ready = Sums::default();
        for found in std::mem::take(&mut self.ready) {
            ready.add(found.finish(self.names).segments);
        }
        self.budget.ready.path = ready.finish();
        let with_path = |(waits, sums): (Waits, Sums)| Waits { path: sums.finish(), ..waits };
        let mut waits: Vec<Waits> = self.waits.into_values().map(with_path).collect();
        waits.sort_by_key(|waits| Reverse(waits.ns));
        Budget { waits, ..self.budget }
    }
}
