// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs ranked by the share of time for which they were held up: on run queues, by locks, disks, quotas, memory limits,
//! or by other programs that answer their requests. Sleeps and waits for work do not count.

mod call;
mod judge;
mod merge;
mod seen_objects;
mod tally;
mod thread;

use serde::{Deserialize, Serialize};

pub use call::CallKind;
pub use judge::{LIMIT, MIN_COVERED_NS, MIN_WAITS};
pub use tally::{HeldUpThreads, Leader, Pair, Sample, Tally, WaitLookup};

use crate::object::Object;
use crate::{ActorName, Cause, Histogram};

/// What threads of programs did in a span of time, and the programs that were held up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Programs {
    /// Time of the span that was read from the CPU trace, in nanoseconds. Shares are of this time.
    pub covered_ns: u64,
    /// Time of all threads of programs on CPUs, in nanoseconds.
    pub on_cpu_ns: u64,
    /// Waits of all threads of programs for a CPU, in nanoseconds.
    pub ready_ns: u64,
    /// Threads that were held up, longest first; in a snapshot, also threads below the limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_up: Vec<HeldUpProgram>,
    /// Programs that others started again and again, most often first. Their threads are one culprit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spawned: Vec<Spawned>,
}

/// Short-lived processes of one name that one thread started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Spawned {
    /// Name of the processes, when they exited.
    pub name: String,
    /// The thread that started them.
    pub by: ActorName,
    /// Number of processes that exited.
    pub runs: u64,
}

/// A thread of a program, or all short-lived threads of one name, with what held it up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HeldUpProgram {
    /// The thread; without a TID, all threads with this name that have exited.
    pub who: ActorName,
    /// The thread's process, if its name or PID differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ActorName>,
    /// Number of other threads and processes of this program that were also held up, and are not listed.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub others: u64,
    /// Time for which the threads lived within the span, in nanoseconds.
    pub lived_ns: u64,
    /// Time on CPUs, in nanoseconds.
    pub on_cpu_ns: u64,
    /// Parts of the time for which it was held up, longest first.
    pub parts: Vec<HeldUpPart>,
}

/// Waits of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HeldUpPart {
    /// What held the program up.
    pub by: HeldUpBy,
    /// System call that the thread waited in, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<String>,
    /// Object of these waits, such as the path of a lock file: the same in most of the waits in which it was read. Its peers
    /// are those of one of these waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<Object>,
    /// Number of waits in which this object was read, less those of other spans in which another one was.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub object_waits: u64,
    /// Total time, in nanoseconds.
    pub ns: u64,
    /// Distribution of the waits' durations.
    pub latency: Histogram,
    /// Causes of the time, longest first; from the paths of a sample of the waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
}

/// Kind of what held a program up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum HeldUpBy {
    /// Other threads occupied the CPU.
    RunQueue,
    /// The CPU quota of its cgroup.
    Quota,
    /// A lock.
    Lock,
    /// A disk.
    Disk,
    /// Reclaim, or the memory limit of its cgroup.
    Memory,
    /// Another program, which had to answer a request or to read output.
    Program,
    /// A kind added in a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

impl Programs {
    /// Returns whether nothing was measured.
    pub fn is_none(&self) -> bool {
        self.covered_ns == 0
    }

    /// Returns whether too little of the time was read to judge programs.
    pub fn are_unjudged(&self) -> bool {
        (1..MIN_COVERED_NS).contains(&self.covered_ns)
    }

    /// Keeps the threads that were held up longest, and sorts them. Returns the number of waits of the others.
    pub fn keep_longest(&mut self, max: usize) -> u64 {
        self.held_up.sort_by(|a, b| (b.held_up_ns(), &a.who).cmp(&(a.held_up_ns(), &b.who)));
        let left_out = self.held_up.split_off(self.held_up.len().min(max));
        left_out.iter().map(|program| program.latency().count()).sum()
    }
}

impl HeldUpProgram {
    /// Returns the time for which it was held up, in nanoseconds.
    pub fn held_up_ns(&self) -> u64 {
        self.parts.iter().map(|part| part.ns).fold(0, u64::saturating_add)
    }

    /// Returns the durations of all its waits.
    pub fn latency(&self) -> Histogram {
        let mut all = Histogram::default();
        self.parts.iter().for_each(|part| all.merge(&part.latency));
        all
    }

    /// Returns the process, or the thread if it is the first thread of its process.
    pub fn program(&self) -> &ActorName {
        self.process.as_ref().unwrap_or(&self.who)
    }

    /// Returns the share of the time for which it was held up, as a fraction: of the covered time, or of the threads' total
    /// lifetime if that is longer. At most 1, even if a wait began before a short span and counts whole in it.
    pub fn share(&self, covered_ns: u64) -> f64 {
        (self.held_up_ns() as f64 / self.lived_ns.max(covered_ns).max(1) as f64).min(1.0)
    }

    /// Returns the cause with the largest share, over all parts.
    pub fn main_cause(&self) -> Option<(&HeldUpPart, &Cause)> {
        let causes = self.parts.iter().flat_map(|part| part.causes.iter().map(move |cause| (part, cause)));
        causes.max_by_key(|(_, cause)| cause.ns)
    }
}
