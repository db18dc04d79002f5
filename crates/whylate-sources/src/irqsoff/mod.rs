// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who keeps interrupts off, and for how long.
//!
//! Backend `events`: the kernel's events at the beginning and the end of each section, where it has them.
//!
//! Backend `tracer`: the kernel's tracers of the longest section.
//!
//! Backend `ticks`: a timer of each CPU is due once in a period, which is as short as its interrupts are cheap. When its interrupt comes late
//! although no handler ran and no hypervisor had the CPU, interrupts were off, and it comes in where they were enabled again: the stack that it
//! finds names who did that.
//!
//! Backend `need_resched`, for preemption alone: how long a CPU goes on with a thread that is marked to be switched.
//!
#![doc = include_str!("how.md")]

mod events;
mod need_resched;
mod ticks;
mod timers;
mod tracer;
mod wanted;

pub use crate::heartbeat::DEFAULT_PERIODS_NS;

use whylate_model::sources;

use crate::attach;
use crate::session::Session;
use crate::source::{Asked, AttachError, Attached, BackendInfo, MapKind, Need, Source, SourceInfo};

/// Periods that a timer may have, in nanoseconds: the kernel throttles timers that are due more often.
pub const PERIODS_NS: std::ops::RangeInclusive<u64> = 100_000..=1_000_000_000;
/// The shortest lateness that counts unless asked for another one: a hypervisor makes timers late by tens of microseconds.
pub const DEFAULT_FROM_NS: u64 = 100_000;

const EVENTS: &str = "events";
const TRACER: &str = "tracer";
const TICKS: &str = "ticks";
const NEED_RESCHED: &str = "need_resched";

/// Starts measuring in one way; the text is why a better one is not in use.
type Attach = fn(&IrqsoffOptions, &Session, Option<String>) -> Result<Box<dyn Attached>, AttachError>;

/// How each backend is started, by its name.
const BACKENDS: [(&str, Attach); 4] =
    [(EVENTS, events::attach), (TRACER, tracer::attach), (TICKS, ticks::attach), (NEED_RESCHED, need_resched::attach)];

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    card: &sources::IRQSOFF,
    backends: &[
        BackendInfo {
            name: EVENTS,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::Tracepoint("preemptirq:irq_disable"),
                Need::Tracepoint("preemptirq:irq_enable"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            weaker: "",
        },
        BackendInfo {
            name: TRACER,
            needs: &[Need::Tracer("irqsoff")],
            weaker: "of each 2 ms (30 ms where a trace is late) it tells the longest section alone, and none during which another CPU ended a long one",
        },
        BackendInfo {
            name: TICKS,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::Tracepoint("timer:hrtimer_expire_entry"),
                Need::Tracepoint("timer:hrtimer_expire_exit"),
                Need::Tracepoint("irq:irq_handler_entry"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
                Need::Map(MapKind::StackTrace),
            ],
            weaker: "a section is seen only if a tick falls into it, and may last up to a period longer than reported",
        },
        BackendInfo {
            name: NEED_RESCHED,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::Tracepoint("sched:sched_set_need_resched_tp"),
                Need::Tracepoint("sched:sched_entry_tp"),
                Need::Tracepoint("timer:hrtimer_expire_entry"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            weaker: "preemption only: a section counts from when a thread has to wait, and not at all if none does",
        },
    ],
    // The tracer tells the longest section alone, and may miss one while it hands over another; the other one tells of preemption.
    only_asked: &[TRACER, NEED_RESCHED],
};

/// What is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// Interrupts.
    #[default]
    Irqs,
    /// Preemption.
    Preemption,
}

/// What to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrqsoffOptions {
    /// Name of the backend to use; `None` takes the best that works.
    pub backend: Option<String>,
    /// What is off.
    pub what: What,
    /// `tracer` records each function that is called meanwhile, which makes sections longer.
    pub functions: bool,
    /// How often each CPU's timer is due, for `ticks`; `None` takes one of [`DEFAULT_PERIODS_NS`] by what an interrupt costs here, which is
    /// measured for some 10 ms.
    pub period_ns: Option<u64>,
    /// CPUs to measure; empty for all that are online.
    pub cpus: Vec<u32>,
    /// Shorter ones do not count.
    pub from_ns: u64,
    /// Yield a late event for each length of at least this.
    pub late_over_ns: Option<u64>,
    /// Yield a late event with its causes for each length of at least this.
    pub explain_over_ns: Option<u64>,
    /// Yield late events of which the longest with interrupts off, so many, are the longest there were since the last snapshot.
    pub worst: Option<usize>,
    /// With `ticks`, count all ticks of each CPU: how late they were, and the periods that they have missed.
    pub timer_test: bool,
    /// Measure every hrtimer instead, by its function.
    pub timers: bool,
    /// Late events also carry what their causes were told from.
    pub keep_evidence: bool,
}

impl Default for IrqsoffOptions {
    fn default() -> Self {
        IrqsoffOptions {
            backend: None,
            what: What::Irqs,
            functions: false,
            period_ns: None,
            cpus: Vec::new(),
            from_ns: DEFAULT_FROM_NS,
            late_over_ns: None,
            explain_over_ns: None,
            worst: None,
            timer_test: false,
            timers: false,
            keep_evidence: false,
        }
    }
}

impl Source for IrqsoffOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: &Asked) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
    }

    fn attach(&self, session: &Session) -> Result<Box<dyn Attached>, AttachError> {
        if self.timers {
            return timers::attach(&self.cpus, session);
        }
        if self.period_ns.is_some_and(|ns| !PERIODS_NS.contains(&ns)) {
            return Err(AttachError::Contradiction("a period is from 100 us to 1 s long".to_owned()));
        }
        let mut refused: Option<AttachError> = None;
        let is_asked = |name: &str| self.backend.as_deref() == Some(name);
        let has_own_timers = self.what == What::Irqs && ![EVENTS, TRACER, NEED_RESCHED].into_iter().any(is_asked);
        if self.timer_test && !has_own_timers {
            let told = "a test of timers needs the timers of ticks: leave --backend and --preempt out";
            return Err(AttachError::Contradiction(told.to_owned()));
        }
        for name in attach::backends_to_try(&INFO, self.backend.as_deref())? {
            let reason = refused.as_ref().map(ToString::to_string);
            let Some((_, start)) = BACKENDS.iter().find(|(backend, _)| *backend == name) else { continue };
            let outcome = match (name, self.what) {
                // An interrupt comes in where preemption is off.
                (TICKS, What::Preemption) if is_asked(TICKS) => Err(no_preemption()),
                (TICKS, What::Preemption) => continue,
                (NEED_RESCHED, What::Irqs) if is_asked(NEED_RESCHED) => Err(only_preemption()),
                (NEED_RESCHED, What::Preemption) => start(self, session, reason),
                (name, _) if !INFO.takes_unasked(name) && !is_asked(name) => continue,
                // Only there the timer is our own.
                (EVENTS | TRACER | NEED_RESCHED, _) if self.timer_test => continue,
                _ => start(self, session, reason),
            };
            match outcome {
                Ok(attached) => return Ok(attached),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.unwrap_or_else(|| AttachError::Unsupported("there is no backend".to_owned())))
    }
}

fn no_preemption() -> AttachError {
    AttachError::Contradiction("ticks come in where preemption is off: leave --backend ticks out".to_owned())
}

fn only_preemption() -> AttachError {
    AttachError::Contradiction("need_resched measures disabled preemption, not interrupts: add --preempt".to_owned())
}

/// The level up to which the kernel prints messages on consoles; `None` where it does not tell.
pub fn console_level() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/printk").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_backend_can_be_started() {
        let described: Vec<&str> = INFO.backends.iter().map(|backend| backend.name).collect();
        assert_eq!(BACKENDS.map(|(name, _)| name).to_vec(), described);
    }

    #[test]
    fn a_name_that_no_backend_has_is_refused() {
        let options = IrqsoffOptions { backend: Some("nonsense".to_owned()), ..IrqsoffOptions::default() };
        assert!(matches!(options.attach(&Session::of_one()), Err(AttachError::UnknownBackend { .. })));
        for (backend, what) in [(Some("events"), What::Irqs), (None, What::Preemption)] {
            let backend = backend.map(str::to_owned);
            let options = IrqsoffOptions { timer_test: true, backend, what, ..IrqsoffOptions::default() };
            assert!(matches!(options.attach(&Session::of_one()), Err(AttachError::Contradiction(_))));
        }
        let senseless = IrqsoffOptions { period_ns: Some(1_000), ..IrqsoffOptions::default() };
        assert!(matches!(senseless.attach(&Session::of_one()), Err(AttachError::Contradiction(_))));
    }
}
