// SPDX-License-Identifier: MIT OR Apache-2.0
//! Classifies the wait of a thread off its CPU, from its state, system call and stack.

mod calls;
mod classes;
mod rules;
mod stop;

pub use calls::{CallWaits, is_sleep, of_syscall};
pub use classes::{Classes, ClassesError};
use serde::{Deserialize, Serialize};
pub use stop::Stop;

use rules::Frames::{Kernel, User};
use rules::{BY_FRAME, ByFrame, FILE_LOCK, FREEZE_LOCK, IN_KERNEL, KERNEL_LOOPS, OF_FILE_SYSTEM};

/// State of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Running on a CPU.
    OnCpu,
    /// Runnable, while another thread occupies the CPU.
    Ready,
    /// Runnable, but throttled by its cgroup's CPU quota.
    Throttled,
    /// Interruptible sleep.
    Sleeping,
    /// Uninterruptible sleep.
    Uninterruptible,
    /// Uninterruptible sleep that does not count as load, as of idle kernel threads (TASK_IDLE).
    Idle,
    /// Stopped by a signal.
    Stopped,
    /// Stopped by a debugger or another tracer.
    Traced,
    /// Frozen with its cgroup or the whole system.
    Frozen,
    /// A parked kernel thread, as of an offline CPU.
    Parked,
    /// Any other state.
    Other,
}

impl State {
    /// Returns the letter of ps(1).
    pub fn letter(self) -> char {
        match self {
            State::OnCpu | State::Ready | State::Throttled => 'R',
            State::Sleeping => 'S',
            State::Uninterruptible => 'D',
            State::Idle => 'I',
            State::Stopped => 'T',
            State::Traced => 't',
            // ps shows S or D, depending on the kernel.
            State::Frozen => 'F',
            State::Parked => 'P',
            State::Other => '?',
        }
    }

    /// Returns the letter as text.
    pub fn name(self) -> String {
        self.letter().to_string()
    }

    /// Returns the state of a stopped thread, which does not wait for what it was doing.
    pub fn of_stop(stop: Stop) -> Self {
        match stop {
            Stop::Signal => State::Stopped,
            Stop::Tracer => State::Traced,
            Stop::Freezer => State::Frozen,
        }
    }
}

/// Submitted requests that a thread waits for (libaio, io_uring).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InFlight {
    /// Unknown.
    #[default]
    Unknown,
    /// Requests completed by an event: of sockets, pipes, timers.
    Events,
    /// Disk requests: one of them ended the wait.
    Disk,
}

/// Class of a wait: what the thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum WaitClass {
    /// No wait: it is running.
    OnCpu,
    /// Idle by design: threads that wait for work, events or their children.
    Idle,
    /// A disk, or writeback to one.
    Disk,
    /// Data from or to a socket.
    Network,
    /// A lock that another thread holds.
    Lock,
    /// Data or room in a pipe.
    Pipe,
    /// Input or output of a terminal.
    Terminal,
    /// A message in a queue, or room for one.
    MessageQueue,
    /// Free memory: reclaim, and the limits of memory cgroups.
    Memory,
    /// Memory that is being read in or created.
    PageFault,
    /// A timeout that has been set.
    Timer,
    /// A CPU that another thread occupies.
    Cpu,
    /// The next quota period of the thread's cgroup.
    Throttled,
    /// The end of a stop: by a signal, a tracer, a freezer; a child that uses its memory (vfork), a core dump.
    Stopped,
    /// No rule applies.
    Other,
}

impl WaitClass {
    /// Returns the name of the class in words.
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

    /// Returns the frame that stands for the class where no stack is shown.
    pub fn frame(self) -> String {
        format!("[{}]", self.words())
    }
}

/// Class of a wait, and the rule that determines it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Wait {
    /// Class of the wait.
    pub class: WaitClass,
    /// Matching rule, in words.
    pub rule: String,
}

/// Input of the rules.
#[derive(Clone, Copy, Debug)]
pub struct WaitEvidence<'a> {
    /// State of the thread.
    pub state: State,
    /// Whether the kernel counts the wait as I/O wait.
    pub in_iowait: bool,
    /// Whether the thread is a kernel thread.
    pub is_kernel: bool,
    /// System call that the thread is in, if any.
    pub syscall: Option<&'a str>,
    /// Kernel frames, innermost first.
    pub kernel: &'a [String],
    /// User frames, innermost first.
    pub user: &'a [String],
    /// Requests that the thread has submitted.
    pub in_flight: InFlight,
}

/// Classifies a wait; the user's own rules have priority.
pub fn classify(seen: &WaitEvidence<'_>, own: &Classes) -> Wait {
    let wait = |class, rule: &str| Wait { class, rule: rule.to_owned() };
    match seen.state {
        State::OnCpu => return wait(WaitClass::OnCpu, "runs on a CPU"),
        State::Ready => return wait(WaitClass::Cpu, "could run, but another thread occupies the CPU"),
        State::Throttled => {
            return wait(WaitClass::Throttled, "could run, and its cgroup has used up its share of the CPUs");
        }
        // User threads may sleep in this state too, as for a core dump.
        State::Idle if seen.is_kernel => return wait(WaitClass::Idle, "an idle kernel thread"),
        State::Parked => return wait(WaitClass::Idle, "a parked kernel thread"),
        State::Stopped => return wait(WaitClass::Stopped, "a signal has stopped it"),
        State::Traced => return wait(WaitClass::Stopped, "a tracer holds it"),
        State::Frozen => return wait(WaitClass::Stopped, "it is frozen, with its cgroup or the whole system"),
        State::Sleeping | State::Uninterruptible | State::Idle | State::Other => {}
    }
    if let Some((class, frame)) = own.class_of(seen.kernel.iter().chain(seen.user)) {
        return Wait { class, rule: format!("a rule of --classes: {frame}") };
    }
    if let Some(frame) = thaw_that_is_awaited(seen.kernel) {
        let why = "waits until its file system is thawed, which is frozen (fsfreeze, a snapshot)";
        return Wait { class: WaitClass::Lock, rule: format!("{why}: {frame}") };
    }
    if let Some(frame) = core_dump_frame(seen) {
        let why = "the memory of its process is being dumped (core dump)";
        return Wait { class: WaitClass::Stopped, rule: format!("{why}: {frame}") };
    }
    if let Some(wait) = by_frame(seen, IN_KERNEL) {
        return wait;
    }
    // A program's own function is more specific than the kernel's: many wait for locks in epoll_wait or for a condition
    // variable.
    if let Some((class, why, frame)) = classes::program_rule(seen.user) {
        return Wait { class, rule: format!("{why}: {frame}") };
    }
    if let Some(wait) = classify_submitted(seen) {
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
    // The kernel stack is not known, e.g. for lack of privileges.
    match seen.syscall {
        Some(call) if seen.kernel.is_empty() => by_syscall(call),
        _ => wait(WaitClass::Other, "no rule applies"),
    }
}

fn by_frame(seen: &WaitEvidence<'_>, rules: &[ByFrame]) -> Option<Wait> {
    rules.iter().find_map(|(frames, beginnings, class, why)| {
        let frames = match frames {
            Kernel => seen.kernel,
            User => seen.user,
        };
        let frame = frames.iter().find(|frame| beginnings.iter().any(|beginning| frame.starts_with(beginning)))?;
        // Stacks lack functions that take locks (`__sched`), but a wait for data is interruptible.
        if *class == WaitClass::Pipe && seen.state == State::Uninterruptible {
            return Some(Wait { class: WaitClass::Lock, rule: format!("waits for the pipe's own lock: {frame}") });
        }
        // Workers of io_uring wait for work interruptibly; otherwise they are within a request, or wait for a lock.
        if *class == WaitClass::Idle && frame.starts_with("io_") && seen.state == State::Uninterruptible {
            return None;
        }
        Some(Wait { class: *class, rule: format!("{why}: {frame}") })
    })
}

/// Returns whether these user frames show that the thread waits for a lock of its process.
pub fn is_user_lock(user: &[String]) -> bool {
    let mut rules = BY_FRAME.iter().filter(|(frames, ..)| matches!(frames, User));
    let class = rules.find_map(|(_, beginnings, class, _)| {
        let is_in = |frame: &String| beginnings.iter().any(|beginning| frame.starts_with(beginning));
        user.iter().any(is_in).then_some(*class)
    });
    let class = classes::program_rule(user).map(|(class, ..)| class).or(class);
    class == Some(WaitClass::Lock)
}

/// Returns whether a thread with these kernel frames, innermost first, waits for a lock of a file, and not for the end
/// of a lease.
pub fn is_for_file_lock(kernel: &[String]) -> bool {
    let locks = || FILE_LOCK.iter().filter(|function| **function != "__break_lease");
    kernel.iter().any(|frame| locks().any(|beginning| frame.starts_with(beginning)))
}

/// Returns the frame that shows that a thread waits to write to a frozen file system. The freezer holds that lock for
/// writing until the thaw, and no other thread ever does.
pub fn thaw_that_is_awaited(kernel: &[String]) -> Option<&str> {
    let begins = |frame: &str, beginnings: &[&str]| beginnings.iter().any(|beginning| frame.starts_with(beginning));
    let lock = kernel.iter().position(|frame| begins(frame, FREEZE_LOCK))?;
    // The next frame takes the lock; processes and CPUs have other locks of this kind.
    let taker = kernel[lock..].iter().find(|frame| !begins(frame, FREEZE_LOCK))?;
    begins(taker, OF_FILE_SYSTEM).then_some(kernel[lock].as_str())
}

/// Returns the frame that shows that a thread waits for its process's core dump. Compilers inline that function into
/// `do_exit`, which sleeps nowhere else itself.
fn core_dump_frame<'a>(seen: &WaitEvidence<'a>) -> Option<&'a str> {
    let innermost = seen.kernel.first().filter(|_| !seen.is_kernel)?;
    ["coredump_task_exit", "do_exit"].iter().any(|name| innermost.starts_with(name)).then_some(innermost.as_str())
}

/// Classifies waits for submitted requests by the kind of the requests.
fn classify_submitted(seen: &WaitEvidence<'_>) -> Option<Wait> {
    let frame = |names: &[&str]| seen.kernel.iter().find(|frame| names.contains(&frame.as_str()));
    let is_aio = frame(&["read_events"]);
    let place = is_aio.or_else(|| frame(&["io_cqring_wait"]))?;
    // For io_uring, the kernel counts any wait with requests in flight as I/O wait, even for sockets.
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
