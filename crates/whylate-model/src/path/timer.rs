// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a timer was for that ended a wait, by its function in the kernel.

use crate::wait::is_sleep;

/// A kind of timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TimerKind {
    /// Not known, or one of a program.
    #[default]
    Other,
    /// It wakes the thread that has set it: a sleep, or a wait that has timed out.
    Wakeup,
    /// TCP kept an acknowledgement back, to send it with data.
    TcpDelayedAck,
    /// TCP sends again what nobody has acknowledged.
    TcpRetransmission,
    /// TCP asks whether its peer is there.
    TcpKeepalive,
    /// TCP sends no faster.
    TcpPacing,
    /// A file system's journal writes down what it has.
    JournalInterval,
    /// A work item was to be queued later.
    DelayedWork,
    /// A cgroup's disk requests were held back.
    DiskLimit,
    /// A thread that had written much was held back until disks keep up.
    DirtyThrottling,
}

/// The word for a timer of which no more is known.
const TIMER: &str = "timer";
const TIMEOUT: &str = "timeout of the wait";
/// How names of culprits begin that are timers of a program, before the call that it waited in.
const IN_CALL: [&str; 2] = ["timeout in ", "timer in "];

impl TimerKind {
    /// The kernel's functions of timers, with what they are for.
    pub const FUNCTIONS: [(&str, TimerKind); 11] = [
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
    ];

    const ALL: [TimerKind; 10] = [
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
    ];

    /// By the function, as the kernel calls it.
    pub fn of(function: &str) -> Self {
        let known = Self::FUNCTIONS.iter().find(|(known, _)| *known == function);
        known.map_or_else(Self::default, |&(_, kind)| kind)
    }

    /// The reverse of `as u8`; of a number that is none, `None`.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Whether it may be whoever waited that wanted to wait no longer, so that nobody else made it wait.
    pub fn is_own(self) -> bool {
        matches!(self, TimerKind::Other | TimerKind::Wakeup)
    }

    /// What made the thread wait that waited in `via`, in words.
    pub fn told(self, via: Option<&str>) -> &'static str {
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
        }
    }

    /// Who is to blame for a wait of thread `waiter` in `via`: that thread if it slept; otherwise the timer, by what it was
    /// for, with the thread in brackets if it may have set it.
    pub fn culprit(self, via: Option<&str>, waiter: Option<&str>) -> String {
        let Some(waiter) = waiter.filter(|_| self.is_own()) else { return self.told(via).to_owned() };
        let [timeout, timer] = IN_CALL;
        match via.filter(|via| !is_sleep(via)) {
            None => waiter.to_owned(),
            Some(via) => format!("{}{via} ({waiter})", if self == TimerKind::Wakeup { timeout } else { timer }),
        }
    }

    /// Whether a culprit that delays by a timer is called by what the timer was for, and not the thread that slept.
    pub fn is_mechanism(culprit: &str) -> bool {
        let is_told = |kind: TimerKind| kind.told(None) == culprit;
        culprit == TIMEOUT
            || IN_CALL.iter().any(|begin| culprit.starts_with(begin))
            || Self::ALL.into_iter().any(is_told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_number() {
        for (number, kind) in (0..).zip(TimerKind::ALL) {
            assert_eq!((kind as u8, TimerKind::from_number(number)), (number, Some(kind)));
        }
        assert_eq!(TimerKind::from_number(TimerKind::ALL.len() as u8), None);
    }

    #[test]
    fn a_timer_is_told_by_its_function_and_by_what_it_ended() {
        let told = |function: &str, via| TimerKind::of(function).told(via);
        assert_eq!(told("tcp_delack_timer", Some("recvfrom")), "TCP's delayed acknowledgement");
        assert_eq!(told("tcp_write_timer", Some("recvfrom")), "TCP retransmission");
        for function in ["hrtimer_wakeup", "process_timeout"] {
            assert_eq!(told(function, Some("clock_nanosleep")), "timer");
            assert_eq!(told(function, Some("poll")), "timeout of the wait");
            // A thread of the kernel, or a wait that began unseen.
            assert_eq!(told(function, None), "timer");
        }
        assert_eq!(told("it_real_fn", Some("read")), "timer");
    }

    #[test]
    fn whoever_slept_is_to_blame_and_no_one_else_for_a_timer_of_the_kernel() {
        let of = |kind: TimerKind, via| kind.culprit(via, Some("sleep:7"));
        for (kind, via, who) in [
            (TimerKind::Wakeup, Some("clock_nanosleep"), "sleep:7"),
            (TimerKind::Other, Some("nanosleep"), "sleep:7"),
            (TimerKind::Wakeup, None, "sleep:7"),
            (TimerKind::Wakeup, Some("poll"), "timeout in poll (sleep:7)"),
            (TimerKind::Other, Some("epoll_wait"), "timer in epoll_wait (sleep:7)"),
            (TimerKind::TcpRetransmission, Some("recvfrom"), "TCP retransmission"),
            (TimerKind::JournalInterval, None, "commit interval of the journal"),
        ] {
            assert_eq!(of(kind, via), who);
            assert_eq!(TimerKind::is_mechanism(who), who != "sleep:7", "{who}");
        }
        // As in recordings of before.
        assert!(TimerKind::is_mechanism("timer") && TimerKind::is_mechanism("timeout of the wait"));
        assert!(!TimerKind::is_mechanism("sleep"));
    }
}
