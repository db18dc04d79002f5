// SPDX-License-Identifier: MIT OR Apache-2.0
//! Classes of waits by system call, for threads without a known stack.

use super::WaitClass;

/// Wait of a thread that sleeps in a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallWaits {
    /// The call exists to wait for this.
    For(WaitClass),
    /// Depends on the call's arguments: a file, a command, flags.
    Depends,
    /// The call waits for nothing by itself, but may sleep for locks, memory and disks in the kernel.
    Within,
}

/// Calls that only sleep for a time that the caller chooses.
const SLEEPS: &str = "nanosleep clock_nanosleep clock_nanosleep_time64";

/// Calls with a wait as their purpose, by class.
const WAITS_FOR: &[(WaitClass, &str)] = &[
    // Events, children, connections, signals.
    (
        WaitClass::Idle,
        "poll ppoll ppoll_time64 select pselect6 pselect6_time64 epoll_wait epoll_wait_old epoll_pwait \
         epoll_pwait2 accept accept4 wait4 waitid pause rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 \
         syslog",
    ),
    (WaitClass::Timer, SLEEPS),
    // `fcntl` waits for a file lock.
    (WaitClass::Lock, "futex futex_time64 futex_wait futex_waitv flock fcntl semop semtimedop semtimedop_time64"),
    (WaitClass::Network, "recvfrom recvmsg recvmmsg recvmmsg_time64 sendto sendmsg sendmmsg connect"),
    (WaitClass::MessageQueue, "msgsnd msgrcv mq_timedsend mq_timedsend_time64 mq_timedreceive mq_timedreceive_time64"),
    (WaitClass::Pipe, "tee vmsplice"),
    // Requests submitted by libaio.
    (
        WaitClass::Disk,
        "fsync fdatasync sync syncfs msync sync_file_range readahead swapon swapoff io_getevents io_pgetevents \
         io_pgetevents_time64 io_submit io_destroy",
    ),
    (WaitClass::Memory, "process_mrelease"),
    // The parent is suspended until its child calls execve or exits (CLONE_VFORK).
    (WaitClass::Stopped, "vfork clone clone3"),
];

/// Calls with a wait that depends on the arguments.
const DEPENDING: &str = "
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 ioctl open openat openat2 creat
    open_by_handle_at close close_range dup2 dup3 sendfile splice copy_file_range io_uring_enter
    io_uring_register restart_syscall ptrace execve execveat exit exit_group keyctl request_key add_key
    membarrier getrandom shutdown setsockopt
";

/// Calls that wait for nothing by themselves.
const WITHIN: &str = "
    stat fstat lstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn access pipe
    sched_yield mremap mincore madvise shmget shmat shmctl dup getitimer alarm setitimer getpid socket bind
    listen getsockname getpeername socketpair getsockopt fork kill uname semget semctl shmdt msgget msgctl
    truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir link unlink symlink readlink chmod
    fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times getuid getgid setuid
    setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid
    getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending rt_sigqueueinfo
    sigaltstack utime mknod uselib personality ustat statfs fstatfs sysfs getpriority setpriority
    sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup modify_ldt
    pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot acct settimeofday mount umount2 reboot
    sethostname setdomainname iopl ioperm create_module init_module delete_module get_kernel_syms query_module
    quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid setxattr lsetxattr fsetxattr
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill
    time sched_setaffinity sched_getaffinity set_thread_area io_setup io_cancel get_thread_area lookup_dcookie
    epoll_create epoll_ctl_old remap_file_pages getdents64 set_tid_address fadvise64 timer_create
    timer_settime timer_gettime timer_getoverrun timer_delete clock_settime clock_gettime clock_getres
    epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_notify
    mq_getsetattr kexec_load ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch
    migrate_pages mkdirat mknodat fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat
    fchmodat faccessat unshare set_robust_list get_robust_list move_pages utimensat signalfd timerfd_create
    eventfd fallocate timerfd_settime timerfd_gettime signalfd4 eventfd2 epoll_create1 pipe2 inotify_init1
    rt_tgsigqueueinfo perf_event_open fanotify_init fanotify_mark prlimit64 name_to_handle_at clock_adjtime
    setns getcpu process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2
    seccomp memfd_create kexec_file_load bpf userfaultfd mlock2 pkey_mprotect pkey_alloc pkey_free statx rseq
    uretprobe uprobe pidfd_send_signal io_uring_setup open_tree move_mount fsopen fsconfig fsmount fspick
    pidfd_open pidfd_getfd faccessat2 process_madvise mount_setattr quotactl_fd landlock_create_ruleset
    landlock_add_rule landlock_restrict_self memfd_secret set_mempolicy_home_node cachestat fchmodat2
    map_shadow_stack futex_wake futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr
    lsm_list_modules mseal setxattrat getxattrat listxattrat removexattrat open_tree_attr file_getattr
    file_setattr fstatat clock_gettime64 clock_settime64 clock_adjtime64 clock_getres_time64 timer_gettime64
    timer_settime64 timerfd_gettime64 timerfd_settime64 utimensat_time64 sched_rr_get_interval_time64
";

/// Returns the wait of a thread that sleeps in this call; `None` for an unknown call.
pub fn of_syscall(name: &str) -> Option<CallWaits> {
    let is_in = |names: &str| names.split_ascii_whitespace().any(|known| known == name);
    let class = WAITS_FOR.iter().find(|(_, names)| is_in(names)).map(|&(class, _)| CallWaits::For(class));
    class
        .or_else(|| is_in(DEPENDING).then_some(CallWaits::Depends))
        .or_else(|| is_in(WITHIN).then_some(CallWaits::Within))
}

/// Returns whether a call only sleeps for a time that the caller chooses.
pub fn is_sleep(name: &str) -> bool {
    SLEEPS.split_ascii_whitespace().any(|known| known == name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_call_is_in_one_list() {
        let all = WAITS_FOR.iter().map(|&(_, names)| names).chain([DEPENDING, WITHIN]);
        let mut known = HashSet::new();
        for name in all.flat_map(str::split_ascii_whitespace) {
            assert!(known.insert(name), "{name} stands there twice");
        }
    }

    #[test]
    fn purpose_of_call_decides_idleness() {
        use CallWaits::{Depends, For, Within};
        for (name, waits) in [
            ("epoll_wait", Some(For(WaitClass::Idle))),
            ("io_getevents", Some(For(WaitClass::Disk))),
            ("io_uring_enter", Some(Depends)),
            ("msgrcv", Some(For(WaitClass::MessageQueue))),
            ("vfork", Some(For(WaitClass::Stopped))),
            ("read", Some(Depends)),
            ("getpid", Some(Within)),
            ("of_the_future", None),
        ] {
            assert_eq!(of_syscall(name), waits, "{name}");
        }
        assert!(is_sleep("clock_nanosleep") && !is_sleep("poll") && !is_sleep("stopped by a signal"));
    }
}
