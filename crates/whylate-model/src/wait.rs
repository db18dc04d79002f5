// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a thread that is off its CPU waits for, told from its state, its system call and its stack by rules in words.

use serde::{Deserialize, Serialize};

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

/// Which frames a rule applies to.
enum Frames {
    Kernel,
    User,
}

use Frames::{Kernel, User};

/// Frames by the beginnings of their names, what a wait with one of them is for, and why. The first one that applies counts; those that say
/// more come first.
const BY_FRAME: &[(Frames, &[&str], WaitClass, &str)] = &[
    (
        Kernel,
        &[
            "handle_mm_fault",
            "do_user_addr_fault",
            "handle_userfault",
            "do_swap_page",
            "filemap_fault",
            "do_page_fault",
        ],
        WaitClass::PageFault,
        "is in a page fault",
    ),
    (
        Kernel,
        &[
            "__mutex_lock",
            "rwsem_down_",
            "down_",
            "__down",
            "percpu_rwsem_wait",
            "__percpu_down",
            "rt_mutex_",
            "rtlock_slowlock",
            "__rt_mutex",
            "mutex_lock",
        ],
        WaitClass::Lock,
        "waits for a lock in the kernel",
    ),
    (
        Kernel,
        &["flock_lock_inode_wait", "locks_lock_inode_wait", "posix_lock_inode_wait", "fcntl_setlk", "__break_lease"],
        WaitClass::Lock,
        "waits for a file lock",
    ),
    (
        User,
        &[
            "pthread_mutex_",
            "__pthread_mutex_",
            "___pthread_mutex_",
            "__lll_lock_wait",
            "pthread_rwlock_",
            "__pthread_rwlock_",
            "___pthread_rwlock_",
            "std::sys::sync::mutex",
            "std::sys::sync::rwlock",
            "parking_lot::raw_mutex",
        ],
        WaitClass::Lock,
        "waits for a lock of its process",
    ),
    (
        User,
        &[
            "pthread_cond_",
            "__pthread_cond_",
            "___pthread_cond_",
            "std::sys::sync::condvar",
            "std::thread::park",
            "std::sys::sync::thread_parking",
        ],
        WaitClass::Idle,
        "waits for another thread to tell it of work (condition variable)",
    ),
    (
        Kernel,
        &["futex_wait", "futex_lock_pi", "__futex_wait"],
        WaitClass::Lock,
        "waits in a futex that another thread has to release",
    ),
    (
        Kernel,
        &[
            "io_schedule",
            "folio_wait",
            "wait_on_page",
            "__wait_on_buffer",
            "submit_bio_wait",
            "blk_",
            "blkdev_issue_",
            "jbd2_log_wait_commit",
            "wait_on_commit",
            "balance_dirty_pages",
            "rq_qos_wait",
            "wbt_wait",
            "xlog_wait",
            "nfs_wait",
            "wb_wait_for_completion",
        ],
        WaitClass::Disk,
        "waits for blocks to be read or written",
    ),
    (
        Kernel,
        &["pipe_read", "pipe_write", "pipe_wait", "fifo_open", "wait_for_partner", "anon_pipe_read", "anon_pipe_write"],
        WaitClass::Pipe,
        "waits for the other end of a pipe",
    ),
    (
        Kernel,
        &["do_epoll_wait", "ep_poll", "do_poll", "do_sys_poll", "do_select", "core_sys_select"],
        WaitClass::Idle,
        "waits for events (poll, select or epoll)",
    ),
    (
        Kernel,
        &["inet_csk_accept", "inet_csk_wait_for_connect", "unix_accept", "vsock_accept"],
        WaitClass::Idle,
        "waits for a connection to accept",
    ),
    (
        Kernel,
        &[
            "sk_wait_data",
            "tcp_recvmsg",
            "tcp_sendmsg",
            "sk_stream_wait",
            "__skb_wait_for_more_packets",
            "__skb_recv",
            "unix_stream_",
            "unix_dgram_",
            "unix_wait_for_peer",
            "inet_wait_for_connect",
            "inet_stream_connect",
            "sock_wait",
            "sock_alloc_send",
            "udp_recvmsg",
            "netlink_recvmsg",
            "rpc_wait",
            "vsock_",
        ],
        WaitClass::Network,
        "waits for data from or to a socket",
    ),
    (
        Kernel,
        &["do_wait", "kernel_wait4", "do_sigtimedwait", "sigsuspend", "__do_sys_pause", "ksys_pause"],
        WaitClass::Idle,
        "waits for a child or a signal",
    ),
    (
        Kernel,
        &[
            "n_tty_read",
            "signalfd_read",
            "eventfd_read",
            "inotify_read",
            "fanotify_read",
            "timerfd_read",
            "io_cqring_wait",
            "read_events",
            "wait_for_space",
            "do_syslog",
            "devkmsg_read",
            "evdev_read",
            "fuse_dev_do_read",
            "io_wqe_worker",
            "io_wq_worker",
            "vhost_task_fn",
            "vhost_worker",
        ],
        WaitClass::Idle,
        "waits for input or work",
    ),
    (
        Kernel,
        &["hrtimer_nanosleep", "do_nanosleep", "clock_nanosleep", "common_nsleep"],
        WaitClass::Timer,
        "sleeps for a time that it chose",
    ),
    (
        Kernel,
        &["kernel_clone", "wait_for_vfork_done", "do_exit", "do_group_exit"],
        WaitClass::Other,
        "waits for a process to begin or end",
    ),
];

/// Functions of the kernel's threads in which they wait for work, by the beginnings of their names.
const KERNEL_LOOPS: &[&str] = &[
    "worker_thread",
    "rescuer_thread",
    "kthreadd",
    "smpboot_thread_fn",
    "rcu_",
    "kswapd",
    "kcompactd",
    "khugepaged",
    "ksmd",
    "kauditd_thread",
    "oom_reaper",
    "irq_thread",
    "kthread_worker_fn",
    "watchdog",
    "khungtaskd",
    "migration",
    "kjournald",
    "scsi_error_handler",
    "devtmpfsd",
    "kdevtmpfs",
    "psi_rimpoll",
    "balloon",
    "hwrng_fillfn",
    "fsnotify_mark",
    "kthread_parkme",
    "srcu_",
    "io_sq_thread",
    "cpuhp",
    "audit_",
    "nfsd",
    "svc_recv",
    "jbd2",
    "xfsaild",
    "loop_",
    "dm_",
    "md_thread",
];

/// What the wait is for.
pub fn classify(seen: &Seen<'_>) -> Wait {
    let wait = |class, rule: &str| Wait { class, rule: rule.to_owned() };
    match seen.state {
        State::OnCpu => return wait(WaitClass::OnCpu, "it has a CPU"),
        State::Ready => return wait(WaitClass::Cpu, "could run, and another thread has the CPU"),
        State::Throttled => {
            return wait(WaitClass::Throttled, "could run, and its cgroup has used up its share of the CPUs");
        }
        State::Idle => return wait(WaitClass::Idle, "a thread of the kernel without work"),
        State::Parked => return wait(WaitClass::Idle, "a thread of the kernel that is put aside"),
        State::Stopped | State::Traced => return wait(WaitClass::Stopped, "a signal or a debugger has stopped it"),
        State::Sleeping | State::Uninterruptible | State::Other => {}
    }
    for (frames, beginnings, class, why) in BY_FRAME {
        let frames = match frames {
            Kernel => seen.kernel,
            User => seen.user,
        };
        if let Some(frame) = frames.iter().find(|frame| beginnings.iter().any(|beginning| frame.starts_with(beginning)))
        {
            // Functions that take locks do not stand in stacks (they are `__sched`), but nobody waits for data without being woken by signals.
            if *class == WaitClass::Pipe && seen.state == State::Uninterruptible {
                return Wait { class: WaitClass::Lock, rule: format!("waits for the pipe's own lock: {frame}") };
            }
            return Wait { class: *class, rule: format!("{why}: {frame}") };
        }
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

fn by_syscall(call: &str) -> Wait {
    let class = match call {
        "nanosleep" | "clock_nanosleep" => WaitClass::Timer,
        "futex" | "futex_wait" | "futex_waitv" | "flock" => WaitClass::Lock,
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
        classify(&seen).class
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
        assert_eq!(classify(&seen).rule, "waits in a futex that another thread has to release: futex_wait_queue");
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
        assert_eq!(classify(&seen(Some("clock_nanosleep"))).class, WaitClass::Timer);
        assert_eq!(classify(&seen(None)).class, WaitClass::Other);
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
            prop_assert!(!classify(&seen).rule.is_empty());
        }
    }
}
