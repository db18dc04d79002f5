// SPDX-License-Identifier: MIT OR Apache-2.0
//! The oracle: pairs the events of a whole trace, after the fact.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::support::oracles::trace::{Event, Kind, by_item};

/// Handler of flush barriers, which are inserted without a queueing event.
const BARRIER: &str = "wq_barrier_func";

/// One execution of a work item.
#[derive(Clone, Debug)]
pub struct Execution {
    pub handler: String,
    pub workqueue: String,
    pub queued_ns: u64,
    pub queued_by_tid: u32,
    /// When it was activated, if max_active had held it back.
    pub activated_ns: Option<u64>,
    pub started_ns: u64,
    pub cpu: u32,
    /// Whether it was queued twice without a start in between.
    pub queued_twice: bool,
    /// Whether it is so close to an edge of the window that the source may have seen it or not.
    pub at_edge: bool,
}

impl Execution {
    pub fn wait_ns(&self) -> u64 {
        self.started_ns - self.queued_ns
    }
}

/// When the source measured: it started within one span and ended within another.
#[derive(Clone, Debug)]
pub struct Window {
    pub began_ns: Range<u64>,
    pub ended_ns: Range<u64>,
}

/// What a source should have seen.
#[derive(Debug, Default)]
pub struct Truth {
    pub executions: Vec<Execution>,
    /// Executions in the window that were queued before the window, without barriers.
    pub unqueued: u64,
}

#[derive(Clone)]
struct Queueing<'a> {
    event: &'a Event,
    activated_ns: Option<u64>,
    /// By mod_delayed_work(): the wait counts since the item was queued first.
    moved: bool,
}

/// Returns the queueing that leads to the next execution.
fn resolve<'a>(queued: &[Queueing<'a>]) -> Option<Queueing<'a>> {
    let last = queued.last()?;
    let first = queued.iter().rev().find(|queueing| !queueing.moved).or(queued.first())?;
    Some(Queueing { event: first.event, activated_ns: last.activated_ns, moved: false })
}

/// Returns whether the last queueing leads to an execution after the one that starts, as the worker had already
/// dequeued the item. Otherwise it was moved, or the earlier one was cancelled.
fn starts_again(queued: &[Queueing<'_>], later: &[&(&Event, Option<&Event>)]) -> bool {
    let mut later = later.iter().map(|(event, _)| event).filter(|event| event.kind != Kind::Activate);
    if queued.last().is_some_and(|last| last.moved) {
        return later.next().is_some_and(|event| event.kind == Kind::Start);
    }
    // Then starts and queueings balance; a cancelled one remains forever.
    let mut waiting = 1;
    later.take(1_000).any(|event| {
        match event.kind {
            Kind::Start => waiting -= 1,
            Kind::Queue if !event.moved => waiting += 1,
            _ => {}
        }
        waiting == 0
    })
}

pub fn pair(events: &[Event], window: &Window) -> Truth {
    let mut truth = Truth::default();
    for history in by_item(events).values() {
        let in_window = history.iter().filter(|(event, _)| {
            event.kind != Kind::End && event.at_ns >= window.began_ns.start && event.at_ns < window.ended_ns.end
        });
        let history: Vec<_> = in_window.collect();
        // The queueings that may still lead to an execution, oldest first.
        let mut queued: Vec<Queueing<'_>> = Vec::new();
        for (index, (event, before)) in history.iter().enumerate() {
            match event.kind {
                Kind::Queue => {
                    if queued.last().is_some_and(|last| last.event.handler != event.handler) {
                        queued.clear();
                    }
                    queued.push(Queueing { event, activated_ns: None, moved: event.moved });
                }
                Kind::Activate => {
                    // Activated right after it was queued, by the same thread: max_active did not hold it back.
                    let at_once = before.is_some_and(|before| before.kind == Kind::Queue && before.item == event.item);
                    if let Some(last) = queued.last_mut().filter(|_| !at_once) {
                        last.activated_ns = Some(event.at_ns);
                    }
                }
                Kind::Start if event.handler == BARRIER => queued.clear(),
                Kind::Start => {
                    let starts_again = queued.len() > 1 && starts_again(&queued, &history[index + 1..]);
                    let requeued = if starts_again { queued.pop() } else { None };
                    match resolve(&queued).filter(|queueing| queueing.event.handler == event.handler) {
                        Some(queueing) => {
                            let twice = starts_again || queued.len() > 1;
                            truth.executions.push(execution(&queueing, event, twice, window));
                        }
                        None => truth.unqueued += 1,
                    }
                    queued = requeued.map(|requeued| Queueing { moved: false, ..requeued }).into_iter().collect();
                }
                Kind::End => {}
            }
        }
    }
    truth.executions.sort_by_key(|execution| execution.started_ns);
    truth
}

fn execution(queueing: &Queueing<'_>, start: &Event, queued_twice: bool, window: &Window) -> Execution {
    let queued = queueing.event;
    Execution {
        handler: start.handler.clone(),
        workqueue: queued.workqueue.clone(),
        queued_ns: queued.at_ns,
        queued_by_tid: queued.tid,
        activated_ns: queueing.activated_ns,
        started_ns: start.at_ns.max(queued.at_ns),
        cpu: start.cpu,
        queued_twice,
        at_edge: window.began_ns.contains(&queued.at_ns) || start.at_ns >= window.ended_ns.start,
    }
}

impl Truth {
    /// Groups the executions by `key`.
    pub fn by<K: Ord>(&self, key: impl Fn(&Execution) -> K) -> BTreeMap<K, Vec<&Execution>> {
        let mut groups: BTreeMap<K, Vec<&Execution>> = BTreeMap::new();
        for execution in &self.executions {
            groups.entry(key(execution)).or_default().push(execution);
        }
        groups
    }

    /// Returns the executions of one handler, in order of start.
    pub fn of_handler(&self, handler: &str) -> Vec<&Execution> {
        self.executions.iter().filter(|execution| execution.handler == handler).collect()
    }

    /// Returns the minimum and maximum number of executions that a source may have counted, inclusive.
    pub fn count(&self) -> (u64, u64) {
        counts(&self.executions.iter().collect::<Vec<_>>())
    }
}

/// Returns the minimum and maximum number of these that a source may have counted.
pub fn counts(executions: &[&Execution]) -> (u64, u64) {
    let at_edge = executions.iter().filter(|execution| execution.at_edge).count() as u64;
    (executions.len() as u64 - at_edge, executions.len() as u64)
}

/// Returns the bucket of a latency, as in `whylate_model::Histogram`.
pub fn bucket_of(ns: u64) -> u32 {
    if ns < 16 {
        return ns as u32;
    }
    let power = ns.ilog2();
    (power - 2) * 8 + ((ns >> (power - 3)) & 7) as u32
}

/// Returns whether the two are at most one bucket or `tolerance_ns` apart.
pub fn agree(a_ns: u64, b_ns: u64, tolerance_ns: u64) -> bool {
    bucket_of(a_ns).abs_diff(bucket_of(b_ns)) <= 1 || a_ns.abs_diff(b_ns) <= tolerance_ns
}
