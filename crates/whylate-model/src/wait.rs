// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a thread that is off its CPU waits for, told from its state, its system call and its stack by rules in words.

mod calls;
mod classes;
mod rules;
mod stop;

pub use calls::{CallWaits, is_sleep, of_syscall};
pub use classes::{Classes, ClassesError};
use serde::{Deserialize, Serialize};
pub use stop::Stop;

use rules::Frames::{Kernel, User};
use rules::{BY_FRAME, ByFrame, FREEZE_LOCK, IN_KERNEL, KERNEL_LOOPS, OF_FILE_SYSTEM};

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has a CPU.
    OnCpu,
    /// It could run, and another thread has the CPU.
    Ready,
    /// It could run, and its cgroup has used its share of the CPUs up.
    Throttled,
    /// It sleeps, and a signal wakes it.
    Sleeping,
    /// It sleeps, and no signal wakes it.
    Uninterruptible,
    /// It sleeps so that the load does not count it, as a thread of the kernel does that has nothing to do.
    Idle,
    /// A signal has stopped it.
    Stopped,
    /// A debugger or another tracer holds it.
    Traced,
    /// It is frozen, with its cgroup or the whole system.
    Frozen,
    /// A thread of the kernel that is put aside, as of a CPU that is off.
    Parked,
    /// Anything else.
    Other,
}

impl State {
    /// The letter of ps(1).
    pub fn letter(self) -> char {
        match self {
            State::OnCpu | State::Ready | State::Throttled => 'R',
            State::Sleeping => 'S',
            State::Uninterruptible => 'D',
            State::Idle => 'I',
            State::Stopped => 'T',
            State::Traced => 't',
            // ps has S for it or D, as kernels differ.
            State::Frozen => 'F',
            State::Parked => 'P',
            State::Other => '?',
        }
    }

    /// The letter as text.
    pub fn name(self) -> String {
        self.letter().to_string()
    }

    /// The state of a thread that is stopped, and does not wait for what it was doing.
    pub fn of_stop(stop: Stop) -> Self {
        match stop {
            Stop::Signal => State::Stopped,
            Stop::Tracer => State::Traced,
            Stop::Freezer => State::Frozen,
        }
    }
}

/// What a thread has submitted for whose requests it waits (libaio, io_uring).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InFlight {
    /// That is not known.
    #[default]
    Unknown,
    /// Some that are done when something happens: of sockets, pipes, timers.
    Events,
    /// Some of disks: one of these ended the wait.
    Disk,
}

/// What a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitClass {
    /// It does not wait: it has a CPU.
    OnCpu,
    /// Nothing is to be done: threads that wait for work, events or their children.
    Idle,
    /// A disk, or what is written to one.
    Disk,
    /// Data from or to a socket.
    Network,
    /// Another thread that has a lock.
    Lock,
    /// Data or room in a pipe.
    Pipe,
    /// A terminal that takes output or sends it.
    Terminal,
    /// A message in a queue, or room there.
    MessageQueue,
    /// Memory that is to be free: reclaim, and the limits of memory cgroups.
    Memory,
    /// Memory that is being read in, or made.
    PageFault,
    /// A time that has been set.
    Timer,
    /// A CPU that another thread has.
    Cpu,
    /// The cgroup's next share of the CPUs.
    Throttled,
    /// Whoever has stopped it: a signal, a tracer, a freezer; a child that has its memory (vfork), a core dump.
    Stopped,
    /// No rule tells.
    Other,
}

impl WaitClass {
    /// Its name in words.
    pub fn words(self) -> &'static str {
        match self {
            WaitClass::OnCpu => "on a CPU",
            WaitClass::Idle => "idle by design",
            WaitClass::Disk => "disk",
            WaitClass::Network => "network",
            WaitClass::Lock => "lock",
            WaitClass::Pipe => "pipe",
            WaitClass::Terminal => "terminal",
            WaitClass::MessageQueue => "message queue",
            WaitClass::Memory => "memory",
            WaitClass::PageFault => "page fault",
            WaitClass::Timer => "timer",
            WaitClass::Cpu => "waiting for a CPU",
            WaitClass::Throttled => "throttled by cgroup",
            WaitClass::Stopped => "stopped",
            WaitClass::Other => "other",
        }
    }

    /// The frame that stands for it where stacks do not tell.
    pub fn frame(self) -> String {
        format!("[{}]", self.words())
    }
}

/// What a wait is for, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// What for.
    pub class: WaitClass,
    /// The rule that tells, in words.
    pub rule: String,
}

/// What a rule looks at.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// What the thread does.
    pub state: State,
    /// The kernel counts its wait as one for a device.
    pub in_iowait: bool,
    /// It is a thread of the kernel.
    pub is_kernel: bool,
    /// Its system call, if it is in one.
    pub syscall: Option<&'a str>,
    /// Kernel frames, innermost first.
    pub kernel: &'a [String],
    /// User frames, innermost first.
    pub user: &'a [String],
    /// What it has submitted.
    pub in_flight: InFlight,
}

/// What the wait is for, by rules of one's own first.
pub fn classify(seen: &Seen<'_>, own: &Classes) -> Wait {
    let wait = |class, rule: &str| Wait { class, rule: rule.to_owned() };
    match seen.state {
        State::OnCpu => return wait(WaitClass::OnCpu, "it has a CPU"),
        State::Ready => return wait(WaitClass::Cpu, "could run, and another thread has the CPU"),
        State::Throttled => {
            return wait(WaitClass::Throttled, "could run, and its cgroup has used up its share of the CPUs");
        }
        // Threads of processes sleep so too, as for a core dump.
        State::Idle if seen.is_kernel => return wait(WaitClass::Idle, "an idle kernel thread"),
        State::Parked => return wait(WaitClass::Idle, "a parked kernel thread"),
        State::Stopped => return wait(WaitClass::Stopped, "a signal has stopped it"),
        State::Traced => return wait(WaitClass::Stopped, "a tracer holds it"),
        State::Frozen => return wait(WaitClass::Stopped, "it is frozen, with its cgroup or the whole system"),
        State::Sleeping | State::Uninterruptible | State::Idle | State::Other => {}
    }
    if let Some((class, frame)) = own.of(seen.kernel.iter().chain(seen.user)) {
        return Wait { class, rule: format!("a rule of --classes: {frame}") };
    }
    if let Some(frame) = thaw_that_is_awaited(seen.kernel) {
        let why = "waits until its file system is thawed, which is frozen (fsfreeze, a snapshot)";
        return Wait { class: WaitClass::Lock, rule: format!("{why}: {frame}") };
    }
    if let Some(frame) = core_dump_that_is_awaited(seen) {
        let why = "the memory of its process is being dumped (core dump)";
        return Wait { class: WaitClass::Stopped, rule: format!("{why}: {frame}") };
    }
    if let Some(wait) = by_frame(seen, IN_KERNEL) {
        return wait;
    }
    // What a program waits for tells more than how: many wait for locks in epoll_wait or for a condition variable.
    if let Some((class, why, frame)) = classes::of_program(seen.user) {
        return Wait { class, rule: format!("{why}: {frame}") };
    }
    if let Some(wait) = by_submitted(seen) {
        return wait;
    }
    if let Some(wait) = by_frame(seen, BY_FRAME) {
        return wait;
    }
    if seen.in_iowait {
        return wait(WaitClass::Disk, "the kernel counts its wait as one for a device");
    }
    if seen.is_kernel && seen.state == State::Sleeping {
        let frame = seen.kernel.iter().find(|frame| KERNEL_LOOPS.iter().any(|beginning| frame.starts_with(beginning)));
        return match frame {
            Some(frame) => {
                Wait { class: WaitClass::Idle, rule: format!("a thread of the kernel waits for work: {frame}") }
            }
            None => wait(WaitClass::Idle, "a thread of the kernel sleeps, and a signal could wake it"),
        };
    }
    // Where the kernel's stack is not known, as for whoever may not read it.
    match seen.syscall {
        Some(call) if seen.kernel.is_empty() => by_syscall(call),
        _ => wait(WaitClass::Other, "no rule applies"),
    }
}

fn by_frame(seen: &Seen<'_>, rules: &[ByFrame]) -> Option<Wait> {
    rules.iter().find_map(|(frames, beginnings, class, why)| {
        let frames = match frames {
            Kernel => seen.kernel,
            User => seen.user,
        };
        let frame = frames.iter().find(|frame| beginnings.iter().any(|beginning| frame.starts_with(beginning)))?;
        // Stacks lack functions that take locks (`__sched`), but nobody waits for data without being woken by signals.
        if *class == WaitClass::Pipe && seen.state == State::Uninterruptible {
            return Some(Wait { class: WaitClass::Lock, rule: format!("waits for the pipe's own lock: {frame}") });
        }
        Some(Wait { class: *class, rule: format!("{why}: {frame}") })
    })
}

/// The frame that tells that a thread would write to a file system that is frozen, if it would: whoever freezes one has its
/// lock for writing until it is thawed, and nobody else ever has.
pub fn thaw_that_is_awaited(kernel: &[String]) -> Option<&str> {
    let begins = |frame: &str, beginnings: &[&str]| beginnings.iter().any(|beginning| frame.starts_with(beginning));
    let lock = kernel.iter().position(|frame| begins(frame, FREEZE_LOCK))?;
    // What takes the lock is the next one; processes and CPUs have others of this kind.
    let taker = kernel[lock..].iter().find(|frame| !begins(frame, FREEZE_LOCK))?;
    begins(taker, OF_FILE_SYSTEM).then_some(kernel[lock].as_str())
}

/// The frame that tells that a thread waits until its process is dumped. Compilers make that function a part of
/// `do_exit`, which sleeps nowhere else itself.
fn core_dump_that_is_awaited<'a>(seen: &Seen<'a>) -> Option<&'a str> {
    let innermost = seen.kernel.first().filter(|_| !seen.is_kernel)?;
    ["coredump_task_exit", "do_exit"].iter().any(|name| innermost.starts_with(name)).then_some(innermost.as_str())
}

/// Waits for what the thread has submitted itself: what that is decides.
fn by_submitted(seen: &Seen<'_>) -> Option<Wait> {
    let frame = |names: &[&str]| seen.kernel.iter().find(|frame| names.contains(&frame.as_str()));
    let is_aio = frame(&["read_events"]);
    let place = is_aio.or_else(|| frame(&["io_cqring_wait"]))?;
    // Of io_uring the kernel counts a wait as one for a device where requests are in flight, of sockets too.
    let has_requests = is_aio.is_some() || seen.in_iowait;
    let (class, why) = match seen.in_flight {
        InFlight::Disk => (WaitClass::Disk, "waits for requests that it has submitted, and a disk ended it"),
        InFlight::Unknown if has_requests => (WaitClass::Disk, "waits for requests that it has submitted"),
        InFlight::Unknown | InFlight::Events => (WaitClass::Idle, "waits for events or work that it has submitted"),
    };
    Some(Wait { class, rule: format!("{why}: {place}") })
}

fn by_syscall(call: &str) -> Wait {
    let class = match of_syscall(call) {
        Some(CallWaits::For(class)) => class,
        Some(CallWaits::Depends | CallWaits::Within) | None => WaitClass::Other,
    };
    Wait { class, rule: format!("is in the system call {call}") }
}

#[cfg(test)]
mod tests;
