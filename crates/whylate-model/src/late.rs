// SPDX-License-Identifier: MIT OR Apache-2.0
//! One latency over the user's threshold.

use serde::{Deserialize, Serialize};

use crate::blame::Evidence;
use crate::cgroup::Cgroup;
use crate::path::PathSegment;
use crate::snapshot::Labels;

/// Something that waited longer than the user allows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LateEvent {
    /// What was late, in a word: `ext4_end_io_rsv_work`, `CPU 3`, `postgres:4711`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// What waited, e.g. `handler` and `workqueue`, and who asked for it.
    pub labels: Labels,
    /// When the wait ended, in nanoseconds since 1970 (UTC).
    #[serde(rename = "at", with = "crate::units::rfc3339")]
    pub at_unix_ns: u64,
    /// The same on CLOCK_MONOTONIC of the machine that measures, which nobody can set; in JSON it has no meaning.
    #[serde(skip)]
    pub at_ns: u64,
    /// How long it waited.
    pub latency_ns: u64,
    /// How long it waited at most, where `latency_ns` is only what it waited at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most_ns: Option<u64>,
    /// Where it was served.
    pub cpu: u32,
    /// The named parts of the wait in order; they add up to `latency_ns`. Empty where the source has no parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<(String, u64)>,
    /// The kernel stack of whoever asked for the work, innermost first; empty unless asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// The kernel stack that was found while it waited, innermost first, where a source can look.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inside: Vec<String>,
    /// What made it wait; they add up to `latency_ns`. Empty unless `--why` asks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    /// The wait in order of time, along who ended it: these add up to `latency_ns` as well, and `causes` are their sums.
    /// Empty where the source follows no paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<PathSegment>,
    /// What the causes were told from; kept only where it is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Box<Evidence>>,
}

/// The label that says what a thread is to the kernel, whatever it calls itself; most are nothing special.
pub const ROLE: &str = "role";
/// The label of a long wait that is not late, as another thread slept or waited with a timeout meanwhile, which may be by
/// design: that thread.
pub const SLEEPER: &str = "sleeper";
/// The label that says which cgroup a thread that was late is in.
pub const CGROUP: &str = "cgroup";
/// [`ROLE`] of a worker of workqueues; with the label `handler` where it has an item.
pub const WORKER: &str = "worker";
/// [`ROLE`] of a submission thread of io_uring.
pub const SUBMISSION_THREAD: &str = "submission_thread";

/// The subject of an event in which an interrupt or a timer of a CPU was late.
pub fn cpu_subject(cpu: u32) -> String {
    format!("CPU {cpu}")
}

/// A part of a late event's time and who had it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    /// What kind of delay it is.
    pub kind: CauseKind,
    /// Who caused it, e.g. `dd:4242` or a handler's name.
    pub who: String,
    /// The time it took.
    pub ns: u64,
    /// The stack of whoever caused it, innermost first, where known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// The cgroup of the thread that caused it, where one did and it is known.
    #[serde(flatten)]
    pub cgroup: Option<Cgroup>,
}

impl Cause {
    /// Without a stack or a cgroup.
    pub fn new(kind: CauseKind, who: impl Into<String>, ns: u64) -> Self {
        Cause { kind, who: who.into(), ns, stack: Vec::new(), cgroup: None }
    }
}

/// The kinds of delay that whylate tells apart.
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
    /// Another thread had the CPU.
    Thread,
    /// Another work item had the worker.
    Work,
    /// The workqueue had its maximum of items active.
    MaxActive,
    /// The CPU came out of an idle state.
    IdleExit,
    /// The wakeup itself took long.
    Wakeup,
    /// The hypervisor ran something else.
    Steal,
    /// CPU bandwidth control kept the thread from every CPU: its cgroup had used up its quota (`cpu.max`).
    Throttled,
    /// The one that was waited for did its own work (paths alone).
    Running,
    /// A request was at its device (paths alone, as all that follow).
    Disk,
    /// A request waited for its device.
    DiskQueue,
    /// A timer was not due yet: a sleep by design, or a timeout.
    Timer,
    /// Something was to come over the network.
    Network,
    /// An interrupt was to come.
    Interrupt,
    /// An RCU grace period was to end.
    Rcu,
    /// Somebody beyond this machine or PID namespace was waited for.
    Outside,
    /// The thread was stopped: by a signal, a tracer, or a freezer.
    Stopped,
    /// It cannot be told apart; or a newer version told of a kind that this one does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

impl CauseKind {
    /// Its name in JSON.
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
    fn names_are_those_of_json() {
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
