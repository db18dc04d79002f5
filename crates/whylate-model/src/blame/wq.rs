// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a work item was late.

use serde::{Deserialize, Serialize};

use super::sum::Blame;
use super::timeline::Timeline;
use super::window::{Rule, Span, Window};
use crate::occupancy::BusyPools;
use crate::{Cause, CauseKind, Occupancy, Occupant};

/// Nothing is known that kept the pool from waking a worker.
const NO_WORKER_WOKEN: &str = "before a worker was woken";
/// It may have been awake or not.
const WAKEUP_NOT_SEEN: &str = "the worker's wakeup was not seen";

/// What was seen of a late work item. All times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkEvidence {
    /// When it was queued.
    pub queued_ns: u64,
    /// When `max_active` let it go; equal to `queued_ns` where it did at once.
    pub activated_ns: u64,
    /// When a worker took it.
    pub started_ns: u64,
    /// Its workqueue.
    pub workqueue: String,
    /// What kind of pool it waited in.
    pub pool: PoolClass,
    /// The worker that took it; 0 for a softirq.
    pub worker_tid: u32,
    /// The worker was the workqueue's rescuer.
    #[serde(default)]
    pub by_rescuer: bool,
    /// When the worker's thread was made.
    #[serde(default)]
    pub worker_created_ns: u64,
    /// How the worker came to run; `None` where it was not seen being woken since tracing began, and for a softirq.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wakeup: Option<Wakeup>,
    /// Items of the same workqueue (on the same CPU or node) that were in progress while this one waited for
    /// `max_active`, in order of their ends; one that has not ended yet has the end of the wait.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<HeldSlot>,
    /// The last item of the worker before this one, where the worker had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<HeldSlot>,
    /// Who had the CPU on which the item was started.
    pub occupancy: Occupancy,
}

/// The kind of a worker pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolClass {
    /// A CPU's own pool of normal priority.
    #[default]
    Normal,
    /// A CPU's own pool for workqueues with `WQ_HIGHPRI`.
    Highpri,
    /// Not bound to one CPU.
    Unbound,
    /// Runs in a softirq (`WQ_BH`).
    Softirq,
}

/// How a worker came to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wakeup {
    /// When it was woken the last time: it has not slept since.
    pub woken_ns: u64,
    /// When it was moved to this CPU the last time since it was woken, and from which CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<(u64, u32)>,
}

/// An item that another one had to wait for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldSlot {
    /// Its function.
    pub handler: String,
    /// When a worker took it.
    pub started_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
}

/// The causes of a work item's wait, largest first. They add up to it to the nanosecond, whatever the evidence is like;
/// what is not known is [`CauseKind::Unknown`].
///
/// - Until `max_active` let the item go: the handlers whose items held the slots, or the workqueue where unknown.
/// - Until its worker was woken for the last time: in a CPU's own pool, whoever had the CPU while another item of the
///   pool was in progress and not asleep (the kernel starts no second worker then). Otherwise the worker's earlier
///   item, the worker being made, or the rescuer being called.
/// - From then on: whoever had the CPU, and the other CPU's run queue before the worker was moved from there.
pub fn causes(evidence: &WorkEvidence) -> Vec<Cause> {
    let timeline = Timeline::new(&evidence.occupancy);
    let span = Span { from_ns: evidence.queued_ns, to_ns: evidence.started_ns };
    let mut window = Window::new(span, evidence.worker_tid);
    let holders =
        Rule::Held { slots: &evidence.slots, otherwise: Blame::new(CauseKind::MaxActive, evidence.workqueue.as_str()) };
    window.part(evidence.activated_ns, holders);
    match evidence.wakeup {
        _ if evidence.pool == PoolClass::Softirq => {}
        // Of a worker whose wakeup was not seen, only the time on the CPU is sure.
        None => evidence.until_woken(evidence.started_ns, &mut window),
        Some(wakeup) => {
            evidence.until_woken(wakeup.woken_ns, &mut window);
            if let Some((moved_ns, cpu)) = wakeup.moved {
                // A worker that has had an item since it was woken was running there, as far as it was not preempted.
                let has_run = ran(evidence.previous.as_ref()).is_some_and(|item| item.started_ns >= wakeup.woken_ns);
                let queue = match has_run {
                    true => Blame::unknown(&format!("the worker was on CPU {cpu}")),
                    false => Blame::new(CauseKind::Wakeup, format!("run queue of CPU {cpu}")),
                };
                evidence.around_previous(moved_ns, &mut window, |known| {
                    Rule::Fixed(if known.kind == CauseKind::Work { known } else { queue.clone() })
                });
            }
        }
    }
    window.part(evidence.started_ns, Rule::Occupants);
    window.causes(&timeline)
}

impl WorkEvidence {
    /// Explains the time in which the item's worker was not awake.
    fn until_woken<'a>(&'a self, until_ns: u64, window: &mut Window<'a>) {
        // In other pools every item that comes in wakes a worker, if one is idle.
        let pool = matches!(self.pool, PoolClass::Normal | PoolClass::Highpri).then_some(self.pool);
        self.around_previous(until_ns, window, |otherwise| Rule::OccupantsWhileBusy { pool, otherwise });
    }

    /// Explains a time by the worker's earlier item while that was in progress, and at other times by `rule`, which is
    /// given what is known without an account of the CPU.
    fn around_previous<'a>(&'a self, until_ns: u64, window: &mut Window<'a>, rule: impl Fn(Blame) -> Rule<'a>) {
        let previous = ran(self.previous.as_ref());
        let mut bounds = [
            previous.map_or(until_ns, |item| item.started_ns),
            previous.map_or(until_ns, |item| item.ended_ns),
            self.worker_created_ns,
            until_ns,
        ];
        bounds.sort_unstable();
        for bound_ns in bounds {
            let now_ns = window.reached_ns();
            let otherwise = match previous {
                Some(item) if item.started_ns <= now_ns && now_ns < item.ended_ns => {
                    Blame::new(CauseKind::Work, item.handler.as_str())
                }
                _ if self.by_rescuer => Blame::new(CauseKind::Wakeup, "rescuer"),
                _ if now_ns < self.worker_created_ns => Blame::new(CauseKind::Wakeup, "worker creation"),
                _ if self.wakeup.is_none() => Blame::unknown(WAKEUP_NOT_SEEN),
                _ => Blame::unknown(NO_WORKER_WOKEN),
            };
            window.part(bound_ns.min(until_ns), rule(otherwise));
        }
    }
}

/// An item that makes sense.
fn ran(item: Option<&HeldSlot>) -> Option<&HeldSlot> {
    item.filter(|item| item.started_ns < item.ended_ns)
}

impl PoolClass {
    /// Whether a worker of this CPU's own pool has the CPU with an item, told by the worker's name.
    pub(super) fn is_of(self, occupant: &Occupant, cpu: u32) -> bool {
        let Occupant::Work { name, .. } = occupant else {
            return false;
        };
        // kworker/CPU:NUMBER, and an H at the end in the pool of high priority.
        let number = name.strip_prefix("kworker/").and_then(|rest| rest.strip_prefix(&format!("{cpu}:")));
        match self {
            PoolClass::Normal => number.is_some_and(|number| !number.ends_with('H')),
            PoolClass::Highpri => number.is_some_and(|number| number.ends_with('H')),
            PoolClass::Unbound | PoolClass::Softirq => false,
        }
    }
}

impl BusyPools {
    /// Whether the CPU's pool of this class has an item in progress; no other pool is any CPU's own.
    pub fn has(self, pool: PoolClass) -> bool {
        match pool {
            PoolClass::Normal => self.normal,
            PoolClass::Highpri => self.highpri,
            PoolClass::Unbound | PoolClass::Softirq => false,
        }
    }
}
