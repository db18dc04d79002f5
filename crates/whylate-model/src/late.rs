// SPDX-License-Identifier: MIT OR Apache-2.0
//! A late event: a latency over the user's threshold.

use serde::{Deserialize, Serialize};

use crate::ActorName;
use crate::blame::Evidence;
use crate::cgroup::Cgroup;
use crate::path::PathSegment;
use crate::snapshot::Labels;

/// A wait longer than the user's threshold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LateEvent {
    /// Subject of the event: `ext4_end_io_rsv_work`, `CPU 3`, `postgres:4711`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// Labels of the waiter, e.g. `handler` and `workqueue`, and of its requester.
    pub labels: Labels,
    /// End of the wait, in nanoseconds since 1970 (UTC).
    #[serde(rename = "at", with = "crate::units::rfc3339")]
    pub at_unix_ns: u64,
    /// End of the wait on CLOCK_MONOTONIC of the measuring machine, which cannot be set; not in JSON, where it has no
    /// meaning.
    #[serde(skip)]
    pub at_ns: u64,
    /// Latency in nanoseconds.
    pub latency_ns: u64,
    /// Upper bound of the latency, if `latency_ns` is a lower bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most_ns: Option<u64>,
    /// CPU on which the wait ended.
    pub cpu: u32,
    /// The named parts of the wait in order; they add up to `latency_ns`. Empty where the source has no parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<(String, u64)>,
    /// Kernel stack of the thread that requested the work, innermost first; empty unless requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// Kernel stack sampled during the wait, innermost first, if the source can sample it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inside: Vec<String>,
    /// Causes of the wait, which add up to `latency_ns`. Empty unless `--why` asks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    /// The wait in order of time, along its wakers: the segments add up to `latency_ns` as well, and `causes` are their
    /// sums. Empty if the source follows no paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<PathSegment>,
    /// Evidence from which the causes were derived; only if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Box<Evidence>>,
}

impl LateEvent {
    /// Returns a label's value; an empty text without the label.
    pub fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }

    /// Returns the duration of a phase, in nanoseconds.
    pub fn phase_ns(&self, name: &str) -> Option<u64> {
        self.phases.iter().find(|(phase, _)| phase == name).map(|&(_, ns)| ns)
    }
}

/// Label: role of a thread in the kernel, whatever its `comm` is; most threads have none.
pub const ROLE: &str = "role";
/// Label of a long wait that is not late because another thread slept or waited with a timeout, possibly by design:
/// that thread.
pub const SLEEPER: &str = "sleeper";
/// Label: cgroup of the thread that was late.
pub const CGROUP: &str = "cgroup";
/// [`ROLE`] of a workqueue worker; with the label `handler` if it executes an item.
pub const WORKER: &str = "worker";
/// [`ROLE`] of an io_uring submission thread.
pub const SUBMISSION_THREAD: &str = "submission_thread";

/// Returns the subject of an event in which an interrupt or timer of a CPU was late.
pub fn cpu_subject(cpu: u32) -> String {
    format!("CPU {cpu}")
}

/// A part of a late event's time and the actor it is attributed to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    /// Kind of delay.
    pub kind: CauseKind,
    /// Actor that caused the delay, e.g. `dd:4242` or a handler's name.
    pub who: ActorName,
    /// Duration in nanoseconds.
    pub ns: u64,
    /// Stack of the culprit, innermost first, if known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// Cgroup of the culprit, if it is a thread and the cgroup is known.
    #[serde(flatten)]
    pub cgroup: Option<Cgroup>,
}

impl Cause {
    /// Creates a cause without a stack or a cgroup.
    pub fn new(kind: CauseKind, who: impl Into<ActorName>, ns: u64) -> Self {
        Cause { kind, who: who.into(), ns, stack: Vec::new(), cgroup: None }
    }
}

/// Kinds of delay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// Interrupts were disabled.
    IrqsOff,
    /// Preemption was disabled.
    PreemptOff,
    /// A hardware interrupt handler ran.
    Irq,
    /// A softirq ran.
    Softirq,
    /// A non-maskable interrupt ran.
    Nmi,
    /// Another thread occupied the CPU.
    Thread,
    /// The worker executed another work item.
    Work,
    /// The workqueue had its maximum number of active items (`max_active`).
    MaxActive,
    /// The CPU came out of an idle state.
    IdleExit,
    /// The wakeup itself was slow.
    Wakeup,
    /// The hypervisor did not run the vCPU (steal).
    Steal,
    /// CPU bandwidth control kept the thread from every CPU: its cgroup had used up its quota (`cpu.max`).
    Throttled,
    /// The thread that was waited for ran (paths only).
    Running,
    /// A block I/O request was at its device (paths only, as all that follow).
    Disk,
    /// A block I/O request was queued for its device.
    DiskQueue,
    /// A timer had not expired yet: a sleep by design, or a timeout.
    Timer,
    /// The thread waited for the network.
    Network,
    /// The thread waited for an interrupt.
    Interrupt,
    /// The thread waited for an RCU grace period.
    Rcu,
    /// The thread waited for something outside this machine or PID namespace.
    Outside,
    /// The thread was stopped: by a signal, a tracer, or a freezer.
    Stopped,
    /// The cause is unknown, or of a kind added in a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

impl CauseKind {
    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            CauseKind::IrqsOff => "irqs_off",
            CauseKind::PreemptOff => "preempt_off",
            CauseKind::Irq => "irq",
            CauseKind::Softirq => "softirq",
            CauseKind::Nmi => "nmi",
            CauseKind::Thread => "thread",
            CauseKind::Work => "work",
            CauseKind::MaxActive => "max_active",
            CauseKind::IdleExit => "idle_exit",
            CauseKind::Wakeup => "wakeup",
            CauseKind::Steal => "steal",
            CauseKind::Throttled => "throttled",
            CauseKind::Running => "running",
            CauseKind::Disk => "disk",
            CauseKind::DiskQueue => "disk_queue",
            CauseKind::Timer => "timer",
            CauseKind::Network => "network",
            CauseKind::Interrupt => "interrupt",
            CauseKind::Rcu => "rcu",
            CauseKind::Outside => "outside",
            CauseKind::Stopped => "stopped",
            CauseKind::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_matches_json() {
        use CauseKind::{
            Disk, DiskQueue, IdleExit, Interrupt, Irq, IrqsOff, MaxActive, Network, Nmi, Outside, PreemptOff, Rcu,
            Running, Softirq, Steal, Stopped, Thread, Throttled, Timer, Unknown, Wakeup, Work,
        };
        let of_cpu = [IrqsOff, PreemptOff, Irq, Softirq, Nmi, Thread, Work, MaxActive];
        let of_paths = [Running, Disk, DiskQueue, Timer, Network, Interrupt, Rcu, Outside, Stopped];
        assert_eq!(serde_json::from_str::<CauseKind>("\"of_the_future\"").expect("it is read"), Unknown);
        for kind in of_cpu.into_iter().chain(of_paths).chain([IdleExit, Wakeup, Steal, Throttled, Unknown]) {
            assert_eq!(serde_json::to_value(kind).expect("a name"), kind.name());
        }
    }
}
