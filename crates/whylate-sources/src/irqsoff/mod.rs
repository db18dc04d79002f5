// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who keeps interrupts off, and for how long.
//!
//! Backend `events`: the kernel's events at the beginning and the end of each section, where it has them.
//!
//! Backend `tracer`: the kernel's tracers of the longest section.
//!
//! Backend `ticks`: a timer of each CPU is due once in a period, which is as short as its interrupts are cheap. When
//! its interrupt is late although no handler ran and no hypervisor had the CPU, interrupts were off, and it comes in
//! where they were enabled again: the stack found there names who did that.
//!
//! Backend `need_resched`, for preemption alone: how long a CPU goes on with a thread that is marked to be switched.
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

pub use crate::heartbeat::DEFAULT_PERIODS_NS;

use whylate_model::sources;

use crate::session::Session;
use crate::source::{
    Asked, AttachError, Attached, BackendInfo, MapKind, Measuring, Need, Source, SourceInfo, Takes, first_that_works,
};

/// Periods that a timer may have, in nanoseconds: the kernel throttles timers that are due more often.
pub const PERIODS_NS: std::ops::RangeInclusive<u64> = 100_000..=1_000_000_000;
/// The shortest lateness that counts by default: a hypervisor makes timers late by tens of microseconds.
pub const DEFAULT_FROM_NS: u64 = 100_000;

const EVENTS: &str = "events";
const TRACER: &str = "tracer";
const TICKS: &str = "ticks";
const NEED_RESCHED: &str = "need_resched";

/// Kernels that tell how long preemption is off.
const TELLS_PREEMPTION: &str = "boot Linux 6.17 to 6.19, or a kernel with CONFIG_PREEMPT_TRACER=y";
/// What `events` needs of preemption.
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
            weaker: "",
        },
        BackendInfo {
            name: TRACER,
            needs: &[Need::Tracer("irqsoff"), Need::KernelsNumbers],
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
                Need::RareTracepoint("sched:sched_set_need_resched_tp", TELLS_PREEMPTION),
                Need::RareTracepoint("sched:sched_entry_tp", TELLS_PREEMPTION),
                Need::Tracepoint("timer:hrtimer_expire_entry"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            weaker: "preemption only: a section counts from when a thread has to wait, and not at all if none does",
        },
    ],
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
    /// How often each CPU's timer is due, for `ticks`; `None` takes one of [`DEFAULT_PERIODS_NS`] by what an interrupt
    /// costs here, which is measured for some 10 ms.
    pub period_ns: Option<u64>,
    /// CPUs to measure; empty for all that are online or, with `ticks`, for those of the session, which are the usable ones.
    pub cpus: Vec<u32>,
    /// Shorter ones do not count.
    pub from_ns: u64,
    /// Yield a late event for each length of at least this.
    pub late_over_ns: Option<u64>,
    /// Yield a late event with its causes for each length of at least this.
    pub explain_over_ns: Option<u64>,
    /// Yield late events that include the longest with interrupts off, so many, since the last snapshot.
    pub worst: Option<usize>,
    /// With `ticks`, count all ticks of each CPU: how late they were, and the periods that they have missed.
    pub timer_test: bool,
    /// Measure every hrtimer instead, by its function.
    pub timers: bool,
    /// Culprits that `ticks` tells apart at a time, where that is to be less than there is memory for.
    pub most_culprits: Option<u32>,
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
            most_culprits: None,
            keep_evidence: false,
        }
    }
}

impl IrqsoffOptions {
    /// From which length on an event is handed over, whatever else was seen.
    fn late_from_ns(&self) -> u64 {
        self.late_over_ns.into_iter().chain(self.explain_over_ns).min().unwrap_or(u64::MAX)
    }
}

impl Source for IrqsoffOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: Asked) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
    }

    fn needs(&self, backend: &'static BackendInfo) -> &'static [Need] {
        match (backend.name, self.what) {
            (EVENTS, What::Preemption) => &PREEMPT_EVENTS,
            (TRACER, What::Preemption) => &[Need::Tracer("preemptoff")],
            _ => backend.needs,
        }
    }

    fn takes(&self, backend: &str) -> Takes {
        let is_named = self.backend.as_deref() == Some(backend);
        match (backend, self.what) {
            // Only there the timer is our own.
            (EVENTS | TRACER | NEED_RESCHED, _) | (TICKS, What::Preemption) if self.timer_test => {
                Takes::Never("only the ticks backend can do --timer-test: leave --timer-test or --backend out")
            }
            (TICKS, What::Preemption) | (NEED_RESCHED, What::Irqs) if !is_named => Takes::Asked,
            (TICKS, What::Preemption) => {
                Takes::Never("the ticks backend cannot see disabled preemption: leave --backend ticks out")
            }
            (NEED_RESCHED, What::Irqs) => {
                Takes::Never("the need_resched backend sees disabled preemption only: add --preempt")
            }
            // It tells the longest section alone, and may miss one while it hands over another.
            (TRACER, _) => Takes::Asked,
            _ => Takes::Unasked,
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
        // Whatever the way, a CPU that is not there is none.
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

/// The level up to which the kernel prints messages on consoles; `None` where it does not tell.
pub fn console_level() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/printk").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
