// SPDX-License-Identifier: MIT OR Apache-2.0
//! Classifies the timers that end waits, by their function in the kernel.

use crate::ActorName;
use crate::cause::TIMER;
use crate::wait::is_sleep;

/// Kind of a timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TimerKind {
    /// Unknown, or set by a program.
    #[default]
    Other,
    /// Wakes the thread that set it: a sleep, or a timeout of a wait.
    Wakeup,
    /// TCP delays an acknowledgment, to send it with data.
    TcpDelayedAck,
    /// TCP retransmits unacknowledged data.
    TcpRetransmission,
    /// TCP probes whether its peer is alive.
    TcpKeepalive,
    /// TCP paces its transmissions.
    TcpPacing,
    /// The journal of a file system commits.
    JournalInterval,
    /// A delayed work item is queued.
    DelayedWork,
    /// A cgroup's block I/O was throttled.
    DiskLimit,
    /// A writer was throttled until disks keep up (`balance_dirty_pages`).
    DirtyThrottling,
    /// A writer was throttled so that reads stay fast (writeback throttling, `wbt`).
    WritebackThrottling,
    /// A thread was throttled by the memory limit of its cgroup (`memory.high`), or waited for reclaim.
    MemoryLimit,
}

const TIMEOUT: &str = "timeout of the wait";
/// Prefixes of culprits that are timers of a program, before the system call.
const IN_CALL: [&str; 2] = ["timeout in ", "timer in "];

impl TimerKind {
    /// The kernel's timer functions and their kinds.
    pub const FUNCTIONS: [(&str, TimerKind); 15] = [
        ("hrtimer_wakeup", TimerKind::Wakeup),
        ("process_timeout", TimerKind::Wakeup),
        ("tcp_delack_timer", TimerKind::TcpDelayedAck),
        ("tcp_compressed_ack_kick", TimerKind::TcpDelayedAck),
        ("tcp_write_timer", TimerKind::TcpRetransmission),
        ("reqsk_timer_handler", TimerKind::TcpRetransmission),
        ("tcp_keepalive_timer", TimerKind::TcpKeepalive),
        ("tcp_pace_kick", TimerKind::TcpPacing),
        ("commit_timeout", TimerKind::JournalInterval),
        ("delayed_work_timer_fn", TimerKind::DelayedWork),
        ("throtl_pending_timer_fn", TimerKind::DiskLimit),
        ("iocg_waitq_timer_fn", TimerKind::DiskLimit),
        ("ioc_timer_fn", TimerKind::DiskLimit),
        ("blkiolatency_timer_fn", TimerKind::DiskLimit),
        ("blk_stat_timer_fn", TimerKind::WritebackThrottling),
    ];

    const ALL: [TimerKind; 12] = [
        TimerKind::Other,
        TimerKind::Wakeup,
        TimerKind::TcpDelayedAck,
        TimerKind::TcpRetransmission,
        TimerKind::TcpKeepalive,
        TimerKind::TcpPacing,
        TimerKind::JournalInterval,
        TimerKind::DelayedWork,
        TimerKind::DiskLimit,
        TimerKind::DirtyThrottling,
        TimerKind::WritebackThrottling,
        TimerKind::MemoryLimit,
    ];

    /// Returns the kind of a kernel function.
    pub fn of_function(function: &str) -> Self {
        let known = Self::FUNCTIONS.iter().find(|(known, _)| *known == function);
        known.map_or_else(Self::default, |&(_, kind)| kind)
    }

    /// Reverses `as u8`; `None` if there is no such kind.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Returns whether the waiter itself may have set the timer, so that no other actor made it wait.
    pub fn is_own(self) -> bool {
        matches!(self, TimerKind::Other | TimerKind::Wakeup)
    }

    /// Returns the label of the timer for a thread that waited in `via`.
    pub fn culprit_name(self, via: Option<&str>) -> &'static str {
        match self {
            TimerKind::Wakeup if via.is_some_and(|via| !is_sleep(via)) => TIMEOUT,
            TimerKind::Other | TimerKind::Wakeup => TIMER,
            TimerKind::TcpDelayedAck => "TCP's delayed acknowledgement",
            TimerKind::TcpRetransmission => "TCP retransmission",
            TimerKind::TcpKeepalive => "TCP keepalive",
            TimerKind::TcpPacing => "TCP pacing",
            TimerKind::JournalInterval => "commit interval of the journal",
            TimerKind::DelayedWork => "delay of the work item",
            TimerKind::DiskLimit => "disk limit of a cgroup",
            TimerKind::DirtyThrottling => "dirty throttling",
            TimerKind::WritebackThrottling => "writeback throttling",
            TimerKind::MemoryLimit => "memory limit or reclaim",
        }
    }

    /// Returns the culprit of a wait of thread `waiter` in `via`: the thread if it slept; otherwise the timer's label,
    /// with the thread in parentheses if it may have set the timer.
    pub fn culprit(self, via: Option<&str>, waiter: Option<&ActorName>) -> ActorName {
        let Some(waiter) = waiter.filter(|_| self.is_own()) else { return self.culprit_name(via).into() };
        let [timeout, timer] = IN_CALL;
        let begin = if self == TimerKind::Wakeup { timeout } else { timer };
        match via.filter(|via| !is_sleep(via)) {
            None => waiter.clone(),
            Some(via) => waiter.clone().within(&format!("{begin}{via} ("), ")"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_round_trip_through_numbers() {
        for (number, kind) in (0..).zip(TimerKind::ALL) {
            assert_eq!((kind as u8, TimerKind::from_number(number)), (number, Some(kind)));
        }
        assert_eq!(TimerKind::from_number(TimerKind::ALL.len() as u8), None);
    }

    #[test]
    fn timer_label_depends_on_function_and_wait() {
        let label = |function: &str, via| TimerKind::of_function(function).culprit_name(via);
        assert_eq!(label("tcp_delack_timer", Some("recvfrom")), "TCP's delayed acknowledgement");
        assert_eq!(label("tcp_write_timer", Some("recvfrom")), "TCP retransmission");
        for function in ["hrtimer_wakeup", "process_timeout"] {
            assert_eq!(label(function, Some("clock_nanosleep")), "timer");
            assert_eq!(label(function, Some("poll")), "timeout of the wait");
            // A kernel thread, or a wait without a recorded switch-out.
            assert_eq!(label(function, None), "timer");
        }
        assert_eq!(label("it_real_fn", Some("read")), "timer");
    }

    #[test]
    fn culprit_of_sleep_is_sleeper_and_of_kernel_timer_the_timer() {
        let of = |kind: TimerKind, via| kind.culprit(via, Some(&ActorName::thread("sleep", 7)));
        for (kind, via, who) in [
            (TimerKind::Wakeup, Some("clock_nanosleep"), "sleep:7"),
            (TimerKind::Other, Some("nanosleep"), "sleep:7"),
            (TimerKind::Wakeup, None, "sleep:7"),
            (TimerKind::Wakeup, Some("poll"), "timeout in poll (sleep:7)"),
            (TimerKind::Other, Some("epoll_wait"), "timer in epoll_wait (sleep:7)"),
            (TimerKind::TcpRetransmission, Some("recvfrom"), "TCP retransmission"),
            (TimerKind::JournalInterval, None, "commit interval of the journal"),
            (TimerKind::MemoryLimit, Some("mmap"), "memory limit or reclaim"),
            (TimerKind::of_function("iocg_waitq_timer_fn"), Some("pwrite64"), "disk limit of a cgroup"),
            (TimerKind::of_function("blk_stat_timer_fn"), Some("pwrite64"), "writeback throttling"),
        ] {
            let culprit = of(kind, via);
            assert_eq!(culprit, who);
            assert_eq!(culprit.is_thread(), who == "sleep:7", "{who}");
        }
        // A recording has their texts.
        for who in ["sleep:7", "timer", "timeout of the wait", "timeout in poll (sleep:7)", "TCP retransmission"] {
            assert_eq!(who.parse::<ActorName>().expect("any text").is_thread(), who == "sleep:7", "{who}");
        }
    }
}
