// SPDX-License-Identifier: MIT OR Apache-2.0
//! Classes of waits by stack and state.

use proptest::prelude::*;

use super::*;

fn frames(names: &str) -> Vec<String> {
    names.split_whitespace().map(str::to_owned).collect()
}

/// A thread that sleeps with this kernel stack.
fn seen_in(kernel: &[String]) -> WaitEvidence<'_> {
    WaitEvidence {
        state: State::Sleeping,
        in_iowait: false,
        is_kernel: false,
        syscall: None,
        kernel,
        user: &[],
        in_flight: InFlight::Unknown,
    }
}

fn class_of(state: State, kernel: &str, user: &str) -> WaitClass {
    let (kernel, user) = (frames(kernel), frames(user));
    let is_kernel = kernel.iter().any(|frame| frame == "kthread");
    classify(&WaitEvidence { state, is_kernel, user: &user, ..seen_in(&kernel) }, &Classes::default()).class
}

#[test]
fn classifies_a_stack_of_each_class() {
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
        (Sleeping, "io_sq_thread ret_from_fork ret_from_fork_asm", "", WaitClass::Idle),
        (Uninterruptible, "io_sq_thread ret_from_fork ret_from_fork_asm", "", WaitClass::Other),
        (Uninterruptible, "wait_transaction_locked add_transaction_credits start_this_handle", "", WaitClass::Disk),
        (Uninterruptible, "jbd2_journal_lock_updates ext4_change_inode_journal_flag", "", WaitClass::Disk),
        (Uninterruptible, "xlog_grant_head_wait xlog_grant_head_check xfs_log_reserve", "", WaitClass::Disk),
        (Uninterruptible, "xfs_buf_iowait xfs_buf_read_map xfs_trans_read_buf_map", "", WaitClass::Disk),
        (Uninterruptible, "wait_current_trans start_transaction btrfs_create", "", WaitClass::Disk),
        (Uninterruptible, "__bio_queue_enter __submit_bio submit_bio_noacct", "", WaitClass::Disk),
        (Sleeping, "anon_pipe_read vfs_read ksys_read", "", WaitClass::Pipe),
        (Uninterruptible, "anon_pipe_write vfs_write ksys_write", "", WaitClass::Lock),
        (Sleeping, "flock_lock_inode_wait __do_sys_flock", "", WaitClass::Lock),
        (Sleeping, "wait_woken sk_wait_data tcp_recvmsg_locked", "", WaitClass::Network),
        (Sleeping, "inet_csk_accept inet_accept", "", WaitClass::Idle),
        (Uninterruptible, "io_schedule folio_wait_bit filemap_read", "", WaitClass::Disk),
        (Uninterruptible, "io_schedule folio_wait_bit_common filemap_fault handle_mm_fault", "", WaitClass::PageFault),
        (Uninterruptible, "rwsem_down_write_slowpath down_write", "", WaitClass::Lock),
        (Uninterruptible, "something_new", "", WaitClass::Other),
        // A stop takes precedence over what the thread was doing.
        (State::Stopped, "do_nanosleep hrtimer_nanosleep", "clock_nanosleep", WaitClass::Stopped),
        (State::Traced, "ptrace_stop ptrace_do_notify", "", WaitClass::Stopped),
        (State::Frozen, "do_nanosleep hrtimer_nanosleep", "clock_nanosleep", WaitClass::Stopped),
        (Sleeping, "do_freezer_trap get_signal", "", WaitClass::Stopped),
        (Uninterruptible, "wait_for_vfork_done kernel_clone __x64_sys_vfork", "", WaitClass::Stopped),
        (Uninterruptible, "kernel_clone __do_sys_clone3", "", WaitClass::Stopped),
        (Uninterruptible, "copy_process kernel_clone", "", WaitClass::Other),
        // A user thread that sleeps in the state of idle kernel threads.
        (State::Idle, "coredump_task_exit do_exit do_group_exit", "", WaitClass::Stopped),
        (State::Idle, "do_exit do_group_exit", "clock_nanosleep", WaitClass::Stopped),
        (Uninterruptible, "exit_mm do_exit do_group_exit", "", WaitClass::Other),
        (Sleeping, "wait_woken n_tty_write file_tty_write", "", WaitClass::Terminal),
        (Sleeping, "wait_woken n_tty_read", "", WaitClass::Idle),
        (Sleeping, "wq_sleep do_mq_timedreceive", "", WaitClass::MessageQueue),
        (Sleeping, "do_msgrcv __x64_sys_msgrcv", "", WaitClass::MessageQueue),
        (Sleeping, "read_events do_io_getevents", "", WaitClass::Disk),
        (Uninterruptible, "__mem_cgroup_handle_over_high resume_user_mode_work", "", WaitClass::Memory),
        (Uninterruptible, "try_to_free_mem_cgroup_pages try_charge handle_mm_fault", "", WaitClass::Memory),
        (Uninterruptible, "io_schedule_timeout balance_dirty_pages ext4_buffered_write_iter", "", WaitClass::Disk),
        (Uninterruptible, "io_schedule folio_wait_bit_common __folio_lock truncate_inode_pages", "", WaitClass::Lock),
        (Sleeping, "alarmtimer_do_nsleep alarm_timer_nsleep", "", WaitClass::Timer),
    ] {
        assert_eq!(class_of(state, kernel, user), class, "{state:?} {kernel}");
    }
}

#[test]
fn program_function_is_more_specific() {
    let cond = "futex_wait_queue __futex_wait futex_wait";
    for (kernel, user, class) in [
        ("ep_poll do_epoll_wait", "epoll_wait WaitEventSetWait WaitLatch ProcSleep LockAcquire", WaitClass::Lock),
        ("ep_poll do_epoll_wait", "epoll_wait WaitEventSetWait secure_read PostgresMain", WaitClass::Idle),
        (cond, "pthread_cond_timedwait take_gil PyEval_RestoreThread", WaitClass::Lock),
        ("do_poll", "poll __res_context_send getaddrinfo", WaitClass::Network),
        ("__do_semtimedop __x64_sys_semop", "semop main", WaitClass::Lock),
        // The page fault comes before the wait for its lock.
        ("folio_wait_bit filemap_fault handle_mm_fault", "ProcSleep", WaitClass::PageFault),
    ] {
        assert_eq!(class_of(State::Sleeping, kernel, user), class, "{user}");
    }
}

#[test]
fn own_rules_and_innermost_frames_have_priority() {
    let own = Classes::parse("idle queue_pop\nlock take_*\ndisk ep_poll\n").expect("rules");
    let classify_frames = |state, kernel: &str, user: &str| {
        let (kernel, user) = (frames(kernel), frames(user));
        classify(&WaitEvidence { state, user: &user, ..seen_in(&kernel) }, &own)
    };
    let asleep = State::Sleeping;
    let wait = classify_frames(asleep, "futex_wait", "pthread_mutex_lock queue_pop main");
    assert_eq!((wait.class, wait.rule.as_str()), (WaitClass::Idle, "a rule of --classes: queue_pop"));
    assert_eq!(classify_frames(asleep, "futex_wait", "take_it queue_pop").class, WaitClass::Lock);
    assert_eq!(classify_frames(asleep, "futex_wait", "queue_pop take_it").class, WaitClass::Idle);
    assert_eq!(classify_frames(asleep, "ep_poll", "queue_pop").class, WaitClass::Disk);
    assert_eq!(classify_frames(asleep, "futex_wait", "main").class, WaitClass::Lock);
    assert_eq!(classify_frames(State::Ready, "futex_wait", "queue_pop").class, WaitClass::Cpu);
}

#[test]
fn rule_names_matching_frame() {
    let kernel = frames("futex_wait_queue __futex_wait futex_wait");
    let seen = WaitEvidence { syscall: Some("futex"), ..seen_in(&kernel) };
    assert_eq!(
        classify(&seen, &Classes::default()).rule,
        "waits in a futex that another thread has to release: futex_wait_queue"
    );
}

#[test]
fn eventfd_read_is_no_wait_for_a_child() {
    let rule = |kernel: &str| classify(&seen_in(&frames(kernel)), &Classes::default()).rule;
    for file in ["eventfd_read", "timerfd_read_iter", "userfaultfd_read"] {
        let actual = rule(&format!("do_wait_intr_irq {file} vfs_read ksys_read"));
        assert_eq!(actual, format!("waits for input or work: {file}"));
    }
    assert_eq!(rule("do_wait kernel_wait4"), "waits for a child or a signal: do_wait");
}

#[test]
fn system_call_decides_without_stack() {
    let class = |syscall| classify(&WaitEvidence { syscall, ..seen_in(&[]) }, &Classes::default()).class;
    assert_eq!(class(Some("clock_nanosleep")), WaitClass::Timer);
    assert_eq!(class(None), WaitClass::Other);
}

proptest! {
    #[test]
    fn any_stack_has_class_and_rule(names in prop::collection::vec(".*", 0..8)) {
        let seen = WaitEvidence { user: &names, ..seen_in(&names) };
        prop_assert!(!classify(&seen, &Classes::default()).rule.is_empty());
    }
}

#[test]
fn submitted_requests_are_disk_or_events() {
    let kernel = frames("io_cqring_wait __do_sys_io_uring_enter");
    let class = |in_iowait, in_flight| {
        let seen = WaitEvidence { in_iowait, in_flight, ..seen_in(&kernel) };
        classify(&seen, &Classes::default()).class
    };
    assert_eq!(class(true, InFlight::Unknown), WaitClass::Disk);
    assert_eq!(class(false, InFlight::Disk), WaitClass::Disk);
    assert_eq!(class(false, InFlight::Unknown), WaitClass::Idle, "none is in flight");
    assert_eq!(class(true, InFlight::Events), WaitClass::Idle, "a server of the network");
}

#[test]
fn detects_only_writers_to_frozen_file_systems() {
    for (kernel, is_frozen) in [
        ("percpu_rwsem_wait __percpu_down_read vfs_write ksys_pwrite64", true),
        ("percpu_rwsem_wait __percpu_down_read mnt_want_write filename_create do_mkdirat", true),
        ("percpu_rwsem_wait __percpu_down_read ext4_page_mkwrite do_page_mkwrite handle_mm_fault", true),
        ("percpu_rwsem_wait __percpu_down_read do_ftruncate do_sys_ftruncate", true),
        ("percpu_rwsem_wait __percpu_down_read io_submit_one __x64_sys_io_submit", true),
        ("percpu_rwsem_wait __percpu_down_read gfs2_page_mkwrite", true),
        ("percpu_rwsem_wait __percpu_down_read copy_process kernel_clone", false),
        ("percpu_rwsem_wait __percpu_down_read cpus_read_lock vfs_write", false),
        ("folio_wait_bit vfs_write", false),
    ] {
        let kernel = frames(kernel);
        assert_eq!(thaw_that_is_awaited(&kernel).is_some(), is_frozen, "{kernel:?}");
        let wait = classify(&seen_in(&kernel), &Classes::default());
        assert_eq!(wait.rule.contains("frozen"), is_frozen, "{wait:?}");
    }
}
