// SPDX-License-Identifier: MIT OR Apache-2.0
//! Causes of a wait: a kind of delay and the actor that caused it.

use serde::{Deserialize, Serialize};

use crate::{ActorName, Cgroup};

/// A part of a late event's time and the actor it is attributed to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
#[cfg_attr(test, derive(schemars::JsonSchema))]
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

/// Name of the disk of a request that was overwritten in the record of requests.
pub(crate) const OVERWRITTEN: &str = "unknown (its request was overwritten)";
/// Name of a timer of unknown purpose.
pub(crate) const TIMER: &str = "timer";
/// Name of an interrupt without a name of its own.
pub(crate) const INTERRUPT: &str = "interrupt";
/// Name of what sent a packet.
pub(crate) const NETWORK: &str = "network";
/// Name of the cause where a thread was migrated more often than is recorded.
pub(crate) const RUN_QUEUE_UNKNOWN: &str = "its run queue between migrations was not recorded";

impl CauseKind {
    /// Returns whether `who` names no actor: only the kind of the wait is known.
    pub fn is_unnamed(self, who: &ActorName) -> bool {
        match self {
            CauseKind::Disk => *who == OVERWRITTEN,
            CauseKind::Timer => *who == TIMER,
            CauseKind::Interrupt => *who == INTERRUPT,
            CauseKind::Network => *who == NETWORK,
            _ => false,
        }
    }

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
