// SPDX-License-Identifier: MIT OR Apache-2.0
//! How late timers and the threads that they wake are, on each CPU.
//!
//! Backend `tracer`: the kernel's timerlat tracer measures threads of its own, or ones in user space that read its
//! files, and samples their latencies.
//!
//! Backend `bpf`: a real-time thread on each CPU sleeps until absolute times on CLOCK_MONOTONIC, as cyclictest's do;
//! BPF programs tell when its timer's interrupt came and it ran, as the kernel's tracer would. Where no program is let
//! in at a function's exit, and where causes are told, thread latency ends when it had the CPU, up to 1 us before.
//!
#![doc = include_str!("how.md")]

mod activation;
mod attached;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod handover;
pub mod idle;
mod late;
mod latest;
mod locked;
mod missed;
pub mod placement;
mod programs;
mod ran;
mod tally;
mod threads;
mod tracer;
mod workload;

pub use attached::AttachedTimerlat;
pub use latest::Activated;
pub use tally::StepWidth;
pub use threads::{Policy, Stop};
pub use tracer::{Record, TraceEvent};

use whylate_model::sources;

use crate::heartbeat::Period;
use crate::session::Session;
use crate::source::{
    Asked, AttachError, BackendInfo, MapKind, Measuring, Need, Source, SourceInfo, Takes, first_that_works,
};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/timerlat/timerlat.skel.rs"));
}

/// Periods that the kernel's tracer takes too, in nanoseconds.
pub const PERIODS_NS: std::ops::RangeInclusive<u64> = 100_000..=1_000_000_000;

/// How often late events are to be drained, which takes in what was measured: the room for it is for twice as long.
pub const POLLED_EVERY: std::time::Duration = std::time::Duration::from_millis(250);

pub(crate) const BPF: &str = "bpf";
const TRACER: &str = "tracer";
/// What `bpf` uses, and the tracer for causes.
const NEEDS: [Need; 6] = [
    Need::Btf,
    Need::TpBtfPrograms,
    Need::Tracepoint("timer:hrtimer_expire_entry"),
    Need::Tracepoint("sched:sched_switch"),
    Need::Map(MapKind::Array),
    Need::Map(MapKind::RingBuf),
];

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    card: &sources::TIMERLAT,
    backends: &[
        BackendInfo { name: TRACER, needs: &[Need::Tracer(tracer::TRACER), Need::KernelsNumbers], weaker: "" },
        BackendInfo { name: BPF, needs: &NEEDS, weaker: "" },
    ],
};

/// Whose threads are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// Those in user space where there is a way, or the kernel's.
    #[default]
    Any,
    /// Threads in user space.
    User,
    /// The tracer's threads in the kernel.
    Kernel,
    /// Whoever reads the tracer's files.
    Others,
}

/// What to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimerlatOptions {
    /// Name of the backend to use; `None` takes the tracer where there is one.
    pub backend: Option<String>,
    /// Whose threads are measured. All but those in user space need the tracer.
    pub threads: Threads,
    /// Record what is to be saved: with the tracer its events, without it the latest activations.
    pub record: Option<Record>,
    /// From one activation to the next.
    pub period_ns: u64,
    /// From an activation to that of the next CPU; `None` where they need not keep step.
    pub aligned_ns: Option<u64>,
    /// Take a longer period than that where a timer's interrupt is dear.
    pub is_frugal: bool,
    /// CPUs with a measured thread; empty for those of the session, which are the usable ones.
    pub cpus: Vec<u32>,
    /// How urgent the measured threads are.
    pub policy: Policy,
    /// Yield a late event with its causes for each thread latency of at least this.
    pub explain_over_ns: Option<u64>,
    /// The same for each latency of the interrupt of at least this.
    pub explain_irq_over_ns: Option<u64>,
    /// Yield late events of which the worst of each CPU, so many, are the worst there were.
    pub explain_worst: Option<usize>,
    /// Late events carry the kernel stack that the timer's interrupt found.
    pub stacks: bool,
    /// From which thread latency on what is recorded has that stack.
    pub stack_over_ns: Option<u64>,
    /// Stop measuring at such latencies.
    pub stop: Stop,
    /// Count by equal steps too.
    pub steps: Option<StepWidth>,
    /// Late events also carry what their causes were told from.
    pub keep_evidence: bool,
}

impl Default for TimerlatOptions {
    fn default() -> Self {
        TimerlatOptions {
            backend: None,
            threads: Threads::Any,
            record: None,
            period_ns: 1_000_000,
            aligned_ns: None,
            is_frugal: false,
            cpus: Vec::new(),
            policy: Policy::Fifo(95),
            explain_over_ns: None,
            explain_irq_over_ns: None,
            explain_worst: None,
            stacks: false,
            stack_over_ns: None,
            stop: Stop::default(),
            steps: None,
            keep_evidence: false,
        }
    }
}

impl TimerlatOptions {
    fn needs_tracer(&self) -> bool {
        matches!(self.threads, Threads::Kernel | Threads::Others)
            || self.record.as_ref().is_some_and(|record| !record.events.is_empty())
    }

    /// Whether late events are asked for.
    pub fn explains(&self) -> bool {
        self.explain_over_ns.is_some() || self.explain_irq_over_ns.is_some() || self.explain_worst.is_some()
    }

    /// Starts measuring.
    ///
    /// # Errors
    /// When the kernel or the caller's privileges do not allow it; nothing stays attached then.
    pub fn start(&self, session: &Session) -> Result<Measuring<AttachedTimerlat>, AttachError> {
        if !PERIODS_NS.contains(&self.period_ns) {
            return Err(AttachError::Contradiction("a period is from 100 us to 1 s long".to_owned()));
        }
        if self.is_frugal {
            let period = Period::affordable(session.cpus(&self.cpus)?.at_least_one()?);
            let ns = period.ns.max(self.period_ns);
            let remark = period.remark("its threads are woken", "timerlat top wakes them each millisecond");
            let mut started = TimerlatOptions { period_ns: ns, is_frugal: false, ..self.clone() }.start(session)?;
            started.chosen = remark.filter(|_| ns > self.period_ns);
            return Ok(started);
        }
        first_that_works(self, self.backend.as_deref(), session, |backend| {
            Ok(Box::new(AttachedTimerlat::new(self, session, backend == TRACER)?))
        })
    }
}

impl Source for TimerlatOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: Asked) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
    }

    fn takes(&self, backend: &str) -> Takes {
        match backend {
            BPF if self.needs_tracer() => Takes::Never(
                "-k, -U and -e need the kernel's timerlat tracer: leave them out, or leave --backend bpf out",
            ),
            _ => Takes::Unasked,
        }
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        let Measuring { backend, fallback_reason, attached } = self.start(session)?;
        Ok(Measuring { backend, fallback_reason, attached })
    }
}
