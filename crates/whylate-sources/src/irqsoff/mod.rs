// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sections with interrupts or preemption off: who causes them, and how long they are.
//!
//! Backend `events`: the kernel's tracepoints at the start and end of each section, where it has them.
//!
//! Backend `tracer`: the kernel's latency tracers, which keep the longest section.
//!
//! Backend `ticks`: each CPU has a timer with a period as short as its interrupts are cheap. If its interrupt is late
//! although no handler ran and no hypervisor ran, interrupts were off, and it comes in where they were enabled
//! again: the interrupted stack names the culprit.
//!
//! Backend `need_resched`, for preemption only: how long a CPU continues with a thread marked to be rescheduled.
//!
#![doc = include_str!("how.md")]

mod events;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod need_resched;
mod ticks;
mod timers;
mod tracer;
mod wanted;

pub use crate::kernel::heartbeat::DEFAULT_PERIODS_NS;

use whylate_model::sources;

use crate::kernel::heartbeat::Period;
use crate::source::session::Session;
use crate::source::{
    AttachError, Attached, BackendInfo, BackendUse, CommonOptions, MapKind, Measuring, Need, Source, SourceInfo,
    first_that_works,
};

/// Valid periods of a timer, in nanoseconds. The kernel throttles timers with shorter ones.
pub const PERIODS_NS: std::ops::RangeInclusive<u64> = 100_000..=1_000_000_000;
/// Default minimum lateness in nanoseconds: a hypervisor makes timers late by tens of microseconds.
pub const DEFAULT_FROM_NS: u64 = 100_000;

const EVENTS: &str = "events";
const TRACER: &str = "tracer";
const TICKS: &str = "ticks";
const NEED_RESCHED: &str = "need_resched";

/// Kernels on which the length of sections without preemption can be measured.
const PREEMPTION_KERNELS: &str = "boot Linux 6.17 to 6.19, or a kernel with CONFIG_PREEMPT_TRACER=y";
/// Needs of `events` for preemption.
const PREEMPT_EVENTS: [Need; 6] = [
    Need::Btf,
    Need::TpBtfPrograms,
    Need::RareTracepoint("preemptirq:preempt_disable", "boot one with CONFIG_PREEMPT_TRACER=y"),
    Need::RareTracepoint("preemptirq:preempt_enable", "boot one with CONFIG_PREEMPT_TRACER=y"),
    Need::Map(MapKind::Array),
    Need::Map(MapKind::RingBuf),
];

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    card: &sources::IRQSOFF,
    backends: &[
        BackendInfo {
            name: EVENTS,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::RareTracepoint("preemptirq:irq_disable", "boot one with CONFIG_IRQSOFF_TRACER=y"),
                Need::RareTracepoint("preemptirq:irq_enable", "boot one with CONFIG_IRQSOFF_TRACER=y"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            limitations: "",
        },
        BackendInfo {
            name: TRACER,
            needs: &[Need::Tracer("irqsoff"), Need::KernelsNumbers],
            limitations: "of each 2 ms (30 ms where a trace is late), only the longest section is reported, and none during which another CPU ended a long one",
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
            limitations: "a section is seen only if a tick falls into it, and may last up to a period longer than reported",
        },
        BackendInfo {
            name: NEED_RESCHED,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::RareTracepoint("sched:sched_set_need_resched_tp", PREEMPTION_KERNELS),
                Need::RareTracepoint("sched:sched_entry_tp", PREEMPTION_KERNELS),
                Need::Tracepoint("timer:hrtimer_expire_entry"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            limitations: "preemption only: a section counts from when a thread has to wait, and not at all if none does",
        },
    ],
};

/// Kind of a section: interrupts or preemption disabled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// Interrupts.
    #[default]
    Irqs,
    /// Preemption.
    Preemption,
}

/// Options of the irqsoff source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrqsoffOptions {
    /// Name of the backend to use; `None` uses the best that works.
    pub backend: Option<String>,
    /// Whether the measured sections disable interrupts or preemption.
    pub what: What,
    /// `tracer` also records each function called in a section, which makes sections longer.
    pub functions: bool,
    /// Period of each CPU's timer, for `ticks`. `None` chooses one of [`DEFAULT_PERIODS_NS`] by the cost of an
    /// interrupt here, measured for some 10 ms.
    pub period_ns: Option<u64>,
    /// CPUs to measure. Empty means all that are online or, with `ticks`, the usable ones of the session.
    pub cpus: Vec<u32>,
    /// Minimum length in nanoseconds; shorter sections do not count.
    pub from_ns: u64,
    /// Emit a late event for each length of at least this.
    pub late_over_ns: Option<u64>,
    /// Emit a late event with its causes for each length of at least this.
    pub explain_over_ns: Option<u64>,
    /// Emit late events that include this many of the longest sections since the last snapshot.
    pub worst: Option<usize>,
    /// Count all ticks of each CPU (backend `ticks`): their lateness, and the periods that they missed.
    pub timer_test: bool,
    /// Measure every hrtimer instead, by its function.
    pub timers: bool,
    /// Maximum number of culprits that `ticks` distinguishes at a time, if lower than the table's size.
    pub most_culprits: Option<u32>,
    /// Add to late events the evidence that their causes were derived from.
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
            most_culprits: None,
            keep_evidence: false,
        }
    }
}

impl IrqsoffOptions {
    /// Returns the minimum length of late events in nanoseconds, regardless of the worst ones.
    fn late_from_ns(&self) -> u64 {
        self.late_over_ns.into_iter().chain(self.explain_over_ns).min().unwrap_or(u64::MAX)
    }
}

impl Source for IrqsoffOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: CommonOptions) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
    }

    fn needs(&self, backend: &'static BackendInfo) -> &'static [Need] {
        match (backend.name, self.what) {
            (EVENTS, What::Preemption) => &PREEMPT_EVENTS,
            (TRACER, What::Preemption) => &[Need::Tracer("preemptoff")],
            _ => backend.needs,
        }
    }

    fn takes(&self, backend: &str) -> BackendUse {
        let is_named = self.backend.as_deref() == Some(backend);
        match (backend, self.what) {
            // Only `ticks` has a timer of its own.
            (EVENTS | TRACER | NEED_RESCHED, _) | (TICKS, What::Preemption) if self.timer_test => {
                BackendUse::Never("only the ticks backend can do --timer-test: leave --timer-test or --backend out")
            }
            (TICKS, What::Preemption) | (NEED_RESCHED, What::Irqs) if !is_named => BackendUse::Named,
            (TICKS, What::Preemption) => {
                BackendUse::Never("the ticks backend cannot see disabled preemption: leave --backend ticks out")
            }
            (NEED_RESCHED, What::Irqs) => {
                BackendUse::Never("the need_resched backend sees disabled preemption only: add --preempt")
            }
            // It reports only the longest section, and may miss one while it reports another.
            (TRACER, _) => BackendUse::Named,
            _ => BackendUse::Automatic,
        }
    }

    fn prepare(&self, session: &Session) {
        if let (None, Ok(choice)) = (self.period_ns, session.cpus(&self.cpus)) {
            // Other sources keep the CPUs busy after this.
            Period::affordable(&choice.measured);
        }
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        if self.timers {
            let attached = Box::new(timers::AttachedTimers::new(&self.cpus, session)?);
            return Ok(Measuring { backend: timers::TIMERS, fallback_reason: None, attached });
        }
        if self.period_ns.is_some_and(|ns| !PERIODS_NS.contains(&ns)) {
            return Err(AttachError::Contradiction("a period is from 100 us to 1 s long".to_owned()));
        }
        // Reject missing CPUs whatever the backend.
        wanted::wanted_cpus(&self.cpus)?;
        first_that_works(self, self.backend.as_deref(), session, |backend| {
            Ok(match backend {
                EVENTS => Box::new(events::AttachedEvents::new(self, session)?) as Box<dyn Attached>,
                TRACER => Box::new(tracer::AttachedTracer::new(self, session)?),
                TICKS => Box::new(ticks::AttachedTicks::new(self, session)?),
                _ => Box::new(need_resched::AttachedMarks::new(self, session)?),
            })
        })
    }
}

/// Returns the kernel's console log level, or `None` if it cannot be read.
pub fn console_level() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/printk").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_unknown_backend_and_invalid_options() {
        let options = IrqsoffOptions { backend: Some("nonsense".to_owned()), ..IrqsoffOptions::default() };
        assert!(matches!(options.attach(&Session::of_one()), Err(AttachError::UnknownBackend { .. })));
        for (backend, what) in [(Some("events"), What::Irqs), (None, What::Preemption)] {
            let backend = backend.map(str::to_owned);
            let options = IrqsoffOptions { timer_test: true, backend, what, ..IrqsoffOptions::default() };
            assert!(matches!(options.attach(&Session::of_one()), Err(AttachError::Contradiction(_))));
        }
        let invalid = IrqsoffOptions { period_ns: Some(1_000), ..IrqsoffOptions::default() };
        assert!(matches!(invalid.attach(&Session::of_one()), Err(AttachError::Contradiction(_))));
    }
}
