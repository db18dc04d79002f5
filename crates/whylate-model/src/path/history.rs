// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scheduling timeline of all CPUs: run slices with switch-in and switch-out.

use super::timer::TimerKind;
use crate::ActorName;
use crate::wait::Stop;

/// A `comm` as the kernel keeps it: up to 15 bytes, padded with zeros. Also the name of an interrupt or softirq.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub [u8; 16]);

impl Name {
    /// Copies the first 15 bytes of a name.
    pub fn new(name: &str) -> Self {
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(name.bytes().take(15)).for_each(|(to, from)| *to = from);
        Name(bytes)
    }

    /// Returns the name as text.
    pub fn text(self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }
}

/// The actor on a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holder {
    /// The actor was not recorded.
    #[default]
    Unrecorded,
    /// The CPU is idle.
    Idle,
    /// A thread, by its TID as shown.
    Thread(u32),
    /// A kworker that executes a work item.
    Work {
        /// TID of the worker.
        tid: u32,
        /// ID of the item's function, which [`super::Names`] resolves.
        handler: u64,
    },
    /// A hardware interrupt, nested on a thread.
    Irq {
        /// Minimum delay of the interrupt: interrupts were off on the CPU for at least this long before it.
        late_ns: u64,
    },
    /// A softirq, nested on a thread.
    Softirq,
}

impl Holder {
    /// Returns the TID, if the actor is a thread.
    pub fn tid(self) -> Option<u32> {
        match self {
            Holder::Thread(tid) | Holder::Work { tid, .. } => Some(tid),
            _ => None,
        }
    }
}

/// Start of a run slice (switch-in).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwitchIn {
    /// The same thread continues after an interrupt. Also used for interrupt slices.
    #[default]
    GoesOn,
    /// The thread was preempted, and has been runnable since it lost its last CPU.
    Preempted {
        /// Time of the preemption.
        at_ns: u64,
    },
    /// The thread was woken, or is new.
    Woken {
        /// Time of the wakeup, as the waker recorded it.
        at_ns: u64,
        /// Waker.
        by: Waker,
        /// CPU on which the wakeup happened.
        cpu: u32,
    },
    /// The worker was on the CPU already, and starts an item.
    Queued {
        /// Time at which the item was queued, as the queuer recorded it.
        at_ns: u64,
        /// Queuer.
        by: Waker,
        /// CPU on which the item was queued.
        cpu: u32,
    },
    /// The switch-in was not recorded.
    Unseen,
}

/// A migration of a runnable thread between the run queues of two CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Time of the migration (CLOCK_MONOTONIC).
    pub at_ns: u64,
    /// CPU of the previous run queue.
    pub from_cpu: u32,
}

/// Migrations of a runnable thread between run queues during one wait for a CPU: the last one, and the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moves {
    /// Last migration.
    pub last: Move,
    /// First migration, if it is another one.
    pub first: Option<Move>,
    /// Whether migrations before the last one are missing: the run queue between the recorded ones is unknown.
    pub has_gap: bool,
}

impl Moves {
    /// Returns the moves of a thread that was migrated once.
    pub fn one(last: Move) -> Self {
        Moves { last, first: None, has_gap: false }
    }

    /// Returns the moves of a thread that was migrated `count` times, of which these are recorded.
    pub fn recorded(last: Move, first: Option<Move>, count: u32) -> Self {
        Moves { last, first, has_gap: count > 1 + u32::from(first.is_some()) }
    }

    /// Returns the moves with a later one.
    #[must_use]
    pub fn and_then(self, last: Move) -> Self {
        Moves { last, first: Some(self.first.unwrap_or(self.last)), has_gap: self.has_gap || self.first.is_some() }
    }
}

/// Waker that ended a wait, or queuer of a work item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waker {
    /// A thread, by its TID.
    Thread(u32),
    /// Not a wakeup: the thread is new, and this parent created it.
    Parent(u32),
    /// A timer that expired.
    Timer(TimerKind),
    /// A packet from the network.
    Network,
    /// The end of an RCU grace period.
    Rcu,
    /// Any other softirq, the one that ran on the CPU at that time.
    Softirq,
    /// Any other hardware interrupt, the one that ran on the CPU at that time.
    Irq,
    /// Completion of a block I/O request.
    Disk(Request),
}

/// A completed request of a block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Request {
    /// Time at which the request was created or inserted.
    pub queued_ns: u64,
    /// Time at which the request was issued to the device.
    pub issued_ns: u64,
    /// Device number: major << 20 | minor.
    pub device: u32,
    /// Operation of the request.
    pub operation: Operation,
    /// TID of the submitter as shown; 0 if unknown.
    pub submitter: u32,
}

/// Operation of a block I/O request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Read.
    #[default]
    Read,
    /// Write.
    Write,
    /// Flush of the device's write cache.
    Flush,
    /// Discard, or any other.
    Other,
}

impl Operation {
    /// Returns the name of the operation.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Other => "other",
        }
    }
}

/// End of a run slice (switch-out).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwitchOut {
    /// An interrupt came in and the thread continues. Also used for interrupt slices.
    #[default]
    GoesOn,
    /// The thread was preempted and stays runnable.
    Preempted,
    /// The thread blocks.
    Blocked(Blocked),
    /// The thread exited.
    Dead,
}

/// Wait of a thread, as far as known without its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Blocked {
    /// Number of the system call.
    pub syscall: Option<u16>,
    /// The thread is in uninterruptible sleep.
    pub is_uninterruptible: bool,
    /// The kernel counts the wait as I/O wait (`in_iowait`).
    pub in_iowait: bool,
    /// The thread is a kernel thread.
    pub is_kernel: bool,
    /// The thread was stopped, rather than waiting in what it was doing.
    pub stop: Option<Stop>,
}

impl Blocked {
    /// Returns the wait outside of system calls, if known.
    pub fn outside_calls(&self) -> Option<String> {
        let is_for_page = self.is_uninterruptible && self.in_iowait && !self.is_kernel && self.syscall.is_none();
        is_for_page.then(|| "page fault".to_owned())
    }
}

/// A run slice: one actor on one CPU without interruption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunSlice {
    /// Start on CLOCK_MONOTONIC, as all times here.
    pub start_ns: u64,
    /// End, which is the start of the next slice.
    pub end_ns: u64,
    /// Actor on the CPU.
    pub holder: Holder,
    /// Name of the thread, interrupt or softirq.
    pub name: Name,
    /// Switch-in.
    pub entry: SwitchIn,
    /// Migrations while the thread waited for a CPU.
    pub moved: Option<Moves>,
    /// Time throttled by its cgroup's CPU quota since the thread was woken or preempted.
    pub throttled_ns: u64,
    /// Why the thread was stopped until it was woken, if it was.
    pub stopped: Option<Stop>,
    /// Cgroup ID of the thread, which [`super::Names`] resolves, if known.
    pub cgroup: Option<u64>,
    /// Switch-out.
    pub exit: SwitchOut,
    /// Time stolen by the hypervisor during the slice.
    pub steal_ns: u64,
    /// The thread is new, and belongs to its creator's process.
    pub is_in_parents_process: bool,
    /// The thread belongs to the command that is explained.
    pub is_member: bool,
    /// The waker or parent belongs to the command. It need not be the thread on the waker's CPU, where a softirq is
    /// nested.
    pub is_of_member: bool,
}

impl RunSlice {
    /// Returns the slice with the membership flags set; `is_member` takes a TID and a time.
    pub fn marked(self, is_member: impl Fn(u32, u64) -> bool) -> Self {
        let is_of_member = match self.entry {
            SwitchIn::Woken { by: Waker::Thread(tid) | Waker::Parent(tid), at_ns, .. } => is_member(tid, at_ns),
            _ => false,
        };
        let own = self.holder.tid().is_some_and(|tid| is_member(tid, self.start_ns));
        RunSlice { is_member: own, is_of_member, ..self }
    }

    /// Returns the label of the thread (`name:tid`), or the name of another actor.
    pub fn called(&self) -> String {
        self.holder.tid().map_or_else(|| self.name.text(), |tid| ActorName::thread(self.name.text(), tid).to_string())
    }
}

/// A per-CPU scheduling timeline that is read backwards.
pub trait CpuTimeline {
    /// Returns the number of CPUs.
    fn cpus(&self) -> usize;

    /// Returns the slice before the one returned last for this CPU, starting with the newest; `None` if nothing earlier
    /// is known.
    fn previous(&mut self, cpu: usize) -> Option<RunSlice>;
}

/// A timeline in memory.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// Slices of each CPU in order of time.
    pub cpus: Vec<Vec<RunSlice>>,
}

impl Recorded {
    /// Returns a reader of the timeline that does not consume it.
    pub fn backwards(&self) -> impl CpuTimeline {
        Backwards { cpus: self.cpus.iter().map(Vec::as_slice).collect() }
    }
}

struct Backwards<'a> {
    cpus: Vec<&'a [RunSlice]>,
}

impl CpuTimeline for Backwards<'_> {
    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    fn previous(&mut self, cpu: usize) -> Option<RunSlice> {
        let left = self.cpus.get_mut(cpu)?;
        let (last, before) = left.split_last()?;
        *left = before;
        Some(*last)
    }
}

impl CpuTimeline for Recorded {
    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    fn previous(&mut self, cpu: usize) -> Option<RunSlice> {
        self.cpus.get_mut(cpu)?.pop()
    }
}
