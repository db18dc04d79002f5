// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is known of the past of all CPUs: who had each, how it came by it, and how it left.

use super::timer::TimerKind;
use crate::thread;
use crate::wait::Stop;

/// A thread's or an interrupt's name, as the kernel keeps it: up to 15 bytes, then zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub [u8; 16]);

impl Name {
    /// What fits of a name.
    pub fn of(name: &str) -> Self {
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(name.bytes().take(15)).for_each(|(to, from)| *to = from);
        Name(bytes)
    }

    /// As text.
    pub fn text(self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }
}

/// Who has a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holder {
    /// It was not recorded.
    #[default]
    Nobody,
    /// The CPU is idle.
    Idle,
    /// A thread, by its number as it is shown.
    Thread(u32),
    /// A worker with an item.
    Work {
        /// The worker.
        tid: u32,
        /// The item's function, by a number that [`super::Names`] knows.
        handler: u64,
    },
    /// A hardware interrupt, on top of a thread.
    Irq {
        /// By how much it was late: for so long before it, at least, the CPU had interrupts off.
        late_ns: u64,
    },
    /// A softirq, on top of a thread.
    Softirq,
}

impl Holder {
    /// The thread's number, where it is one.
    pub fn tid(self) -> Option<u32> {
        match self {
            Holder::Thread(tid) | Holder::Work { tid, .. } => Some(tid),
            _ => None,
        }
    }
}

/// How a thread came by its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Entry {
    /// It had it before: an interrupt came in between. Also of interrupts.
    #[default]
    GoesOn,
    /// It could run ever since it lost its last CPU.
    Preempted {
        /// When.
        at_ns: u64,
    },
    /// It was woken, or is new.
    Woken {
        /// When, by whoever woke it.
        at_ns: u64,
        /// By whom.
        by: Waker,
        /// On which CPU that was.
        cpu: u32,
    },
    /// It is a worker that had it before, and begins an item.
    Queued {
        /// When that was queued, by whoever did it.
        at_ns: u64,
        /// By whom.
        by: Waker,
        /// On which CPU that was.
        cpu: u32,
    },
    /// How was not seen.
    Unseen,
}

/// A thread that could run was moved from one CPU's run queue to another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// When, on CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The CPU in whose run queue it was until then.
    pub from_cpu: u32,
}

/// Who ended a wait, or queued a work item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waker {
    /// A thread, by its number.
    Thread(u32),
    /// Nobody: the thread is new, and this one has made it.
    Parent(u32),
    /// A timer, whose time had come.
    Timer(TimerKind),
    /// A packet that came in from elsewhere.
    Network,
    /// The end of an RCU grace period.
    Rcu,
    /// A softirq; whichever had the CPU then.
    Softirq,
    /// A hardware interrupt; whichever had the CPU then.
    Irq,
    /// The end of a request of a disk.
    Disk(Request),
}

/// A request of a block device that is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Request {
    /// When it came into being.
    pub queued_ns: u64,
    /// When it was given to the device.
    pub issued_ns: u64,
    /// Major number << 20 | minor number.
    pub device: u32,
    /// What it does to the disk.
    pub operation: Operation,
    /// The thread that has submitted it, as it is shown; 0 where that is not known.
    pub submitter: u32,
}

/// What a request does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Reads.
    #[default]
    Read,
    /// Writes.
    Write,
    /// Has the device write its own memory out.
    Flush,
    /// Discards, or anything else.
    Other,
}

impl Operation {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Other => "other",
        }
    }
}

/// How a thread left its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exit {
    /// It did not: an interrupt came in. Also of interrupts.
    #[default]
    GoesOn,
    /// It could have gone on.
    Preempted,
    /// It waits.
    Blocked(Blocked),
    /// It has ended.
    Dead,
}

/// In what a thread waits, as far as that is known without its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Blocked {
    /// The number of its system call.
    pub syscall: Option<u16>,
    /// No signal wakes it.
    pub is_uninterruptible: bool,
    /// The kernel counts the wait as one for a device.
    pub in_iowait: bool,
    /// It is a thread of the kernel.
    pub is_kernel: bool,
    /// It was stopped, and does not wait for what it was doing.
    pub stop: Option<Stop>,
}

impl Blocked {
    /// In what it waits outside of system calls, as far as that is known.
    pub fn outside_calls(&self) -> Option<String> {
        let is_for_page = self.is_uninterruptible && self.in_iowait && !self.is_kernel && self.syscall.is_none();
        is_for_page.then(|| "page fault".to_owned())
    }
}

/// One holder of one CPU without a break.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// When it began, on CLOCK_MONOTONIC as all times here.
    pub start_ns: u64,
    /// When the next one began.
    pub end_ns: u64,
    /// Who had the CPU.
    pub holder: Holder,
    /// The thread's, the interrupt's or the softirq's name.
    pub name: Name,
    /// How it came by the CPU.
    pub entry: Entry,
    /// The last move while it waited for a CPU.
    pub moved: Option<Move>,
    /// For how long it was not allowed to run since it was woken or lost its last CPU, as its cgroup's quota was used up.
    pub throttled_ns: u64,
    /// What kept it stopped until it was woken, if anything did.
    pub stopped: Option<Stop>,
    /// The thread's cgroup, by a number that [`super::Names`] knows, where that is known.
    pub cgroup: Option<u64>,
    /// How it left it.
    pub exit: Exit,
    /// What the hypervisor took of it.
    pub steal_ns: u64,
    /// The thread is new, and belongs to the process of whoever made it.
    pub is_in_parents_process: bool,
    /// The thread belongs to the command that is explained.
    pub is_member: bool,
    /// So does whoever woke it, or made it; which need not be who has the waker's CPU, where a softirq is on top.
    pub is_of_member: bool,
}

impl Slice {
    /// The same, knowing which threads belong to the command, by their number and when.
    pub fn marked(self, is_member: impl Fn(u32, u64) -> bool) -> Self {
        let is_of_member = match self.entry {
            Entry::Woken { by: Waker::Thread(tid) | Waker::Parent(tid), at_ns, .. } => is_member(tid, at_ns),
            _ => false,
        };
        let own = self.holder.tid().is_some_and(|tid| is_member(tid, self.start_ns));
        Slice { is_member: own, is_of_member, ..self }
    }

    /// The thread as it is named.
    pub fn called(&self) -> String {
        self.holder.tid().map_or_else(|| self.name.text(), |tid| thread::called(&self.name.text(), tid))
    }
}

/// The past of each CPU, from its end backwards.
pub trait Past {
    /// How many CPUs there are.
    fn cpus(&self) -> usize;

    /// The slice before the one that was handed out last, and at first the last one; `None` where nothing is known of
    /// earlier times.
    fn previous(&mut self, cpu: usize) -> Option<Slice>;
}

/// A past that is in memory.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// Of each CPU, in order of time.
    pub cpus: Vec<Vec<Slice>>,
}

impl Recorded {
    /// To be gone back through, without being used up.
    pub fn backwards(&self) -> impl Past {
        Backwards { cpus: self.cpus.iter().map(Vec::as_slice).collect() }
    }
}

struct Backwards<'a> {
    cpus: Vec<&'a [Slice]>,
}

impl Past for Backwards<'_> {
    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    fn previous(&mut self, cpu: usize) -> Option<Slice> {
        let left = self.cpus.get_mut(cpu)?;
        let (last, before) = left.split_last()?;
        *left = before;
        Some(*last)
    }
}

impl Past for Recorded {
    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    fn previous(&mut self, cpu: usize) -> Option<Slice> {
        self.cpus.get_mut(cpu)?.pop()
    }
}
