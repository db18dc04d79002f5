// SPDX-License-Identifier: MIT OR Apache-2.0
//! Causes of a late work item.

use serde::{Deserialize, Serialize};

use super::pool::{HeldSlot, PoolClass};
use super::span::Span;
use super::sum::Blame;
use super::timeline::Timeline;
use super::window::{Rule, Window};
use crate::{Cause, CauseKind, Occupancy};

/// No reason is known why the pool did not wake a worker.
const NO_WORKER_WOKEN: &str = "before a worker was woken";
/// The worker may have been awake or not.
const WAKEUP_NOT_SEEN: &str = "the worker's wakeup was not seen";

/// Evidence of a late work item. Timestamps are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct WorkEvidence {
    /// Time at which the item was queued.
    pub queued_ns: u64,
    /// Time at which `max_active` allowed the item to become active; equal to `queued_ns` if at once.
    pub activated_ns: u64,
    /// Time at which a worker started the item.
    pub started_ns: u64,
    /// Name of the item's workqueue.
    pub workqueue: String,
    /// Kind of the worker pool that the item waited in.
    pub pool: PoolClass,
    /// TID of the worker that ran the item; 0 for a softirq.
    pub worker_tid: u32,
    /// Whether that worker was the workqueue's rescuer.
    #[serde(default)]
    pub by_rescuer: bool,
    /// Time at which the worker's thread was created.
    #[serde(default)]
    pub worker_created_ns: u64,
    /// The worker's last wakeup; `None` if none was seen since tracing started, and for a softirq.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wakeup: Option<Wakeup>,
    /// Items of the workqueue (on the same CPU or node) that were in progress while this one waited for `max_active`,
    /// in order of their ends; an unfinished one has the end of the wait.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<HeldSlot>,
    /// The worker's item before this one, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<HeldSlot>,
    /// Account of the CPU on which the item started.
    pub occupancy: Occupancy,
}

/// A worker's wakeup and migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Wakeup {
    /// Time of the last wakeup; the worker has not slept since.
    pub woken_ns: u64,
    /// Time of the last migration to this CPU since the wakeup, and the CPU that the worker came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<(u64, u32)>,
}

/// Returns the causes of a work item's wait, largest first. They add up to the wait to the nanosecond, even for
/// inconsistent evidence; unexplained time is [`CauseKind::Unknown`].
///
/// - Until `max_active` activated the item: the handlers of the items that occupied the slots, or the workqueue if these
///   are unknown.
/// - Until its worker was last woken: in a CPU's own pool, the occupants of the CPU while another item of the pool was in
///   progress and not sleeping (the kernel starts no second worker then). Otherwise the worker's earlier item, the
///   creation of the worker, or the call of the rescuer.
/// - From then on: the occupants of the CPU, and the former CPU's run queue before the worker was migrated.
pub fn causes(evidence: &WorkEvidence) -> Vec<Cause> {
    let timeline = Timeline::new(&evidence.occupancy);
    let span = Span { from_ns: evidence.queued_ns, to_ns: evidence.started_ns };
    let mut window = Window::new(span, evidence.worker_tid);
    let holders =
        Rule::Held { slots: &evidence.slots, otherwise: Blame::new(CauseKind::MaxActive, evidence.workqueue.as_str()) };
    window.part(evidence.activated_ns, holders);
    match evidence.wakeup {
        _ if evidence.pool == PoolClass::Softirq => {}
        // For a worker without a recorded wakeup, only its time on the CPU is certain.
        None => evidence.until_woken(evidence.started_ns, &mut window),
        Some(wakeup) => {
            evidence.until_woken(wakeup.woken_ns, &mut window);
            if let Some((moved_ns, cpu)) = wakeup.moved {
                // A worker that started an item since the wakeup was running there, unless it was preempted.
                let has_run =
                    if_consistent(evidence.previous.as_ref()).is_some_and(|item| item.started_ns >= wakeup.woken_ns);
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
    /// Explains the time in which the item's worker was asleep.
    fn until_woken<'a>(&'a self, until_ns: u64, window: &mut Window<'a>) {
        // In other pools each queued item wakes a worker, if one is idle.
        let pool = matches!(self.pool, PoolClass::Normal | PoolClass::Highpri).then_some(self.pool);
        self.around_previous(until_ns, window, |otherwise| Rule::OccupantsWhileBusy { pool, otherwise });
    }

    /// Explains time by the worker's earlier item while that was in progress, and other time by `rule`, which receives
    /// the blame that applies without an account of the CPU.
    fn around_previous<'a>(&'a self, until_ns: u64, window: &mut Window<'a>, rule: impl Fn(Blame) -> Rule<'a>) {
        let previous = if_consistent(self.previous.as_ref());
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

/// Returns the item if its times are consistent.
fn if_consistent(item: Option<&HeldSlot>) -> Option<&HeldSlot> {
    item.filter(|item| item.started_ns < item.ended_ns)
}
