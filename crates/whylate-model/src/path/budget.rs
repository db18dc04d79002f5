// SPDX-License-Identifier: MIT OR Apache-2.0
//! What threads did with their time: a budget that adds up, with each kind of wait followed to what it ends in.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::command::LongWait;
use super::history::{Blocked, Name, Waker};
use super::sums::Sums;
use super::{Asked, Finding, Found, Hop, Limits, Names, Party, Past, PathSegment, Segment, walk};
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
    /// The longest of these waits that are over, the longest first.
    pub longest: Vec<LongWait>,
}

/// Who or what ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndedBy {
    /// Another thread of those that were asked for.
    Own,
    /// Any other thread.
    Others,
    /// A disk.
    Disk,
    /// A timer.
    Timer,
    /// A packet from elsewhere.
    Network,
    /// Any other interrupt.
    Interrupt,
    /// It is not over at the end.
    NotOver,
    /// That was not seen.
    Unseen,
}

/// What is known of a thread besides what is recorded of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Its name.
    pub name: Name,
    /// The system call that it waits in as the look begins.
    pub waits_in: Option<String>,
}

/// Waits of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waits {
    /// In what the threads waited.
    pub via: String,
    /// Who or what ended these waits; not of waits for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<EndedBy>,
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
    woken_ns: u64,
    blocked: Option<Blocked>,
}

/// Gathers what walks find.
struct Gatherer<'a> {
    names: &'a mut dyn Names,
    asked: &'a [Asked],
    known: &'a BTreeMap<u32, Known>,
    /// The numbers of those that are asked for.
    own: BTreeSet<u32>,
    budget: Budget,
    waits: BTreeMap<(String, EndedBy), (Waits, Sums)>,
    /// Of each thread, the wait that is being gone back through.
    open: Vec<Option<Open>>,
    /// Of each thread, how long it could run without a break.
    ready_ns: Vec<u64>,
    ready: Vec<Found>,
    from_ns: u64,
}

/// Tells what threads did; each of `asked` is a thread and when it lived, and `known` what is known of some at that time.
pub fn budget(
    past: &mut dyn Past,
    asked: &[Asked],
    known: &BTreeMap<u32, Known>,
    limits: &dyn Limits,
    names: &mut dyn Names,
) -> Budget {
    let mut gatherer = Gatherer {
        names,
        asked,
        known,
        own: asked.iter().map(|asked| asked.tid).collect(),
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
                let Hop { by, woken_ns, .. } = hop;
                self.open[number] =
                    Some(Open { found: Found::default(), ns: 0, from_ns: 0, by, woken_ns, blocked: None });
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
            Finding::Hop(_) | Finding::Called { .. } => {}
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

    fn ended_by(&self, number: usize, open: &Open) -> EndedBy {
        match open.by {
            Some(Waker::Thread(tid) | Waker::Parent(tid)) if self.own.contains(&tid) => EndedBy::Own,
            Some(Waker::Thread(_) | Waker::Parent(_)) => EndedBy::Others,
            Some(Waker::Disk(_)) => EndedBy::Disk,
            Some(Waker::Timer) => EndedBy::Timer,
            Some(Waker::Network) => EndedBy::Network,
            Some(Waker::Rcu | Waker::Softirq | Waker::Irq) => EndedBy::Interrupt,
            None if open.woken_ns == self.asked[number].to_ns => EndedBy::NotOver,
            None => EndedBy::Unseen,
        }
    }

    fn close(&mut self, number: usize) {
        let Some(mut open) = self.open[number].take().filter(|open| open.ns > 0) else { return };
        let ended_by = self.ended_by(number, &open);
        let asked = self.asked[number];
        let known = self.known.get(&asked.tid);
        if let Some(known) = known {
            open.found.name(asked.tid, known.name);
        }
        // Where it fell asleep before anybody looked, what it was found in then is what it waited in.
        let began_earlier = open.blocked.is_none() && open.from_ns == asked.from_ns;
        let waits_in = known.filter(|_| began_earlier).and_then(|known| known.waits_in.as_ref());
        let mut path = open.found.finish(self.names).segments;
        if let Some(waits_in) = waits_in {
            let own = path.iter_mut().filter(|segment| segment.depth == 1);
            own.for_each(|segment| segment.via = Some(waits_in.clone()));
        }
        let outermost = path.iter().find(|segment| segment.depth == 1);
        let via = outermost.and_then(|segment| segment.via.clone());
        let sleeps = via.as_deref().is_some_and(|via| via.contains("nanosleep"));
        if matches!(ended_by, EndedBy::Timer | EndedBy::NotOver) && sleeps {
            self.budget.own_sleep_ns += open.ns;
            return;
        }
        let other = match open.blocked {
            Some(blocked) if blocked.is_kernel => "waits of kernel threads",
            Some(_) => "waits outside system calls",
            None => "waits that began earlier",
        };
        let via = via.unwrap_or_else(|| other.to_owned());
        let (waits, sums) = self
            .waits
            .entry((via.clone(), ended_by))
            .or_insert_with(|| (Waits { via, ended_by: Some(ended_by), ..Waits::default() }, Sums::default()));
        waits.ns += open.ns;
        waits.latency.merge(&[open.ns].into_iter().collect());
        if open.ns < FOLLOWED_NS {
            let short = path.first().cloned().unwrap_or_default();
            let short =
                PathSegment { ns: open.ns, kind: CauseKind::Unknown, who: "short waits".to_owned(), depth: 1, ..short };
            sums.add(vec![short]);
            return;
        }
        // What is not over has nothing to tell, and whatever is idle all the time would be all that is told.
        if ended_by != EndedBy::NotOver {
            let longest = &mut self.budget.longest;
            let after_ns = open.from_ns.saturating_sub(self.from_ns);
            longest.push(LongWait { after_ns, ns: open.ns, path: path.clone() });
            longest.sort_by_key(|wait| Reverse(wait.ns));
            longest.truncate(LONGEST);
        }
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
