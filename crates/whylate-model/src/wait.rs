// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a thread that is off its CPU waits for, told from its state, its system call and its stack by rules in words.

mod classes;
mod rules;

pub use classes::{Classes, ClassesError};
use serde::{Deserialize, Serialize};

use rules::Frames::{Kernel, User};
use rules::{BY_FRAME, ByFrame, IN_KERNEL, KERNEL_LOOPS};

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
    /// A thread of the kernel that has nothing to do.
    Idle,
    /// A signal or a debugger has stopped it.
    Stopped,
    /// A debugger holds it.
    Traced,
    /// A thread of the kernel that is put aside, as of a CPU that is off.
    Parked,
    /// Anything else, such as frozen.
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
            State::Parked => 'P',
            State::Other => '?',
        }
    }
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
    /// Memory that is being read in, or made.
    PageFault,
    /// A time that has been set.
    Timer,
    /// A CPU that another thread has.
    Cpu,
    /// The cgroup's next share of the CPUs.
    Throttled,
    /// A debugger, or whoever has stopped it.
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
        State::Idle => return wait(WaitClass::Idle, "an idle kernel thread"),
        State::Parked => return wait(WaitClass::Idle, "a parked kernel thread"),
        State::Stopped | State::Traced => return wait(WaitClass::Stopped, "a signal or a debugger has stopped it"),
        State::Sleeping | State::Uninterruptible | State::Other => {}
    }
    if let Some((class, frame)) = own.of(seen.kernel.iter().chain(seen.user)) {
        return Wait { class, rule: format!("a rule of --classes: {frame}") };
    }
    if let Some(wait) = by_frame(seen, IN_KERNEL) {
        return wait;
    }
    // What a program waits for tells more than how: many wait for locks in epoll_wait or for a condition variable.
    if let Some((class, why, frame)) = classes::of_program(seen.user) {
        return Wait { class, rule: format!("{why}: {frame}") };
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

fn by_syscall(call: &str) -> Wait {
    let class = match call {
        "nanosleep" | "clock_nanosleep" => WaitClass::Timer,
        "futex" | "futex_wait" | "futex_waitv" | "flock" | "semop" | "semtimedop" => WaitClass::Lock,
        "epoll_wait" | "epoll_pwait" | "epoll_pwait2" | "poll" | "ppoll" | "select" | "pselect6" | "accept"
        | "accept4" | "wait4" | "waitid" | "pause" | "rt_sigsuspend" | "rt_sigtimedwait" => WaitClass::Idle,
        "recvfrom" | "recvmsg" | "recvmmsg" | "sendto" | "sendmsg" | "sendmmsg" | "connect" => WaitClass::Network,
        "fsync" | "fdatasync" | "sync" | "syncfs" | "msync" | "sync_file_range" => WaitClass::Disk,
        _ => WaitClass::Other,
    };
    Wait { class, rule: format!("is in the system call {call}") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames(names: &str) -> Vec<String> {
        names.split_whitespace().map(str::to_owned).collect()
    }

    fn class_of(state: State, kernel: &str, user: &str) -> WaitClass {
        let (kernel, user) = (frames(kernel), frames(user));
        let seen = Seen { state, in_iowait: false, is_kernel: false, syscall: None, kernel: &kernel, user: &user };
        classify(&seen, &Classes::default()).class
    }

    #[test]
    fn each_class_has_a_stack() {
        use State::{Sleeping, Uninterruptible};
        for (state, kernel, user, class) in [
            (State::OnCpu, "", "", WaitClass::OnCpu),
            (State::Ready, "schedule do_nanosleep", "", WaitClass::Cpu),
            (State::Throttled, "", "", WaitClass::Throttled),
            (State::Idle, "worker_thread kthread", "", WaitClass::Idle),
            (State::Stopped, "do_signal_stop", "", WaitClass::Stopped),
            (Sleeping, "do_nanosleep hrtimer_nanosleep", "clock_nanosleep", WaitClass::Timer),
            (
                Sleeping,
                "futex_wait_queue __futex_wait futex_wait do_futex",
                "__lll_lock_wait pthread_mutex_lock",
                WaitClass::Lock,
            ),
            (Sleeping, "futex_wait_queue __futex_wait futex_wait do_futex", "syscall main", WaitClass::Lock),
            (
                Sleeping,
                "futex_wait_queue __futex_wait futex_wait",
                "__futex_abstimed_wait pthread_cond_wait",
                WaitClass::Idle,
            ),
            (Sleeping, "ep_poll do_epoll_wait", "", WaitClass::Idle),
            (Sleeping, "anon_pipe_read vfs_read ksys_read", "", WaitClass::Pipe),
            (Uninterruptible, "anon_pipe_write vfs_write ksys_write", "", WaitClass::Lock),
            (Sleeping, "flock_lock_inode_wait __do_sys_flock", "", WaitClass::Lock),
            (Sleeping, "wait_woken sk_wait_data tcp_recvmsg_locked", "", WaitClass::Network),
            (Sleeping, "inet_csk_accept inet_accept", "", WaitClass::Idle),
            (Uninterruptible, "io_schedule folio_wait_bit filemap_read", "", WaitClass::Disk),
            (
                Uninterruptible,
                "io_schedule folio_wait_bit_common filemap_fault handle_mm_fault",
                "",
                WaitClass::PageFault,
            ),
            (Uninterruptible, "rwsem_down_write_slowpath down_write", "", WaitClass::Lock),
            (Uninterruptible, "something_new", "", WaitClass::Other),
        ] {
            assert_eq!(class_of(state, kernel, user), class, "{state:?} {kernel}");
        }
    }

    #[test]
    fn what_a_program_waits_for_tells_more_than_how() {
        let cond = "futex_wait_queue __futex_wait futex_wait";
        for (kernel, user, class) in [
            ("ep_poll do_epoll_wait", "epoll_wait WaitEventSetWait WaitLatch ProcSleep LockAcquire", WaitClass::Lock),
            ("ep_poll do_epoll_wait", "epoll_wait WaitEventSetWait secure_read PostgresMain", WaitClass::Idle),
            (cond, "pthread_cond_timedwait take_gil PyEval_RestoreThread", WaitClass::Lock),
            ("do_poll", "poll __res_context_send getaddrinfo", WaitClass::Network),
            ("__do_semtimedop __x64_sys_semop", "semop main", WaitClass::Lock),
            // It does not get as far as to wait for its lock.
            ("folio_wait_bit filemap_fault handle_mm_fault", "ProcSleep", WaitClass::PageFault),
        ] {
            assert_eq!(class_of(State::Sleeping, kernel, user), class, "{user}");
        }
    }

    #[test]
    fn rules_of_ones_own_come_first_and_the_innermost_frame_counts() {
        let own = Classes::parse("idle queue_pop\nlock take_*\ndisk ep_poll\n").expect("rules");
        let told = |state, kernel: &str, user: &str| {
            let (kernel, user) = (frames(kernel), frames(user));
            let seen = Seen { state, in_iowait: false, is_kernel: false, syscall: None, kernel: &kernel, user: &user };
            classify(&seen, &own)
        };
        let asleep = State::Sleeping;
        let wait = told(asleep, "futex_wait", "pthread_mutex_lock queue_pop main");
        assert_eq!((wait.class, wait.rule.as_str()), (WaitClass::Idle, "a rule of --classes: queue_pop"));
        assert_eq!(told(asleep, "futex_wait", "take_it queue_pop").class, WaitClass::Lock);
        assert_eq!(told(asleep, "futex_wait", "queue_pop take_it").class, WaitClass::Idle);
        assert_eq!(told(asleep, "ep_poll", "queue_pop").class, WaitClass::Disk);
        assert_eq!(told(asleep, "futex_wait", "main").class, WaitClass::Lock);
        assert_eq!(told(State::Ready, "futex_wait", "queue_pop").class, WaitClass::Cpu);
    }

    #[test]
    fn the_rule_names_the_frame_that_it_goes_by() {
        let kernel = frames("futex_wait_queue __futex_wait futex_wait");
        let seen = Seen {
            state: State::Sleeping,
            in_iowait: false,
            is_kernel: false,
            syscall: Some("futex"),
            kernel: &kernel,
            user: &[],
        };
        assert_eq!(
            classify(&seen, &Classes::default()).rule,
            "waits in a futex that another thread has to release: futex_wait_queue"
        );
    }

    #[test]
    fn without_a_stack_the_system_call_tells() {
        let seen = |syscall| Seen {
            state: State::Sleeping,
            in_iowait: false,
            is_kernel: false,
            syscall,
            kernel: &[],
            user: &[],
        };
        assert_eq!(classify(&seen(Some("clock_nanosleep")), &Classes::default()).class, WaitClass::Timer);
        assert_eq!(classify(&seen(None), &Classes::default()).class, WaitClass::Other);
    }

    proptest! {
        #[test]
        fn any_stack_has_a_class_and_a_rule(names in prop::collection::vec(".*", 0..8)) {
            let seen = Seen {
                state: State::Sleeping,
                in_iowait: false,
                is_kernel: false,
                syscall: None,
                kernel: &names,
                user: &names,
            };
            prop_assert!(!classify(&seen, &Classes::default()).rule.is_empty());
        }
    }
}
