// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency of timer interrupts and of the threads that they wake, on each CPU.
//!
//! Backend `tracer`: the kernel's timerlat tracer measures its own kernel threads, or user threads that read its files,
//! and samples their latencies.
//!
//! Backend `bpf`: a real-time thread on each CPU sleeps until absolute times on CLOCK_MONOTONIC, as cyclictest's do;
//! BPF programs record when its timer interrupt came and when it ran, as the kernel's tracer would. If fexit programs
//! are not permitted, and if causes are reported, thread latency ends at the switch-in, up to 1 us earlier.
//!
#![doc = include_str!("how.md")]

mod activation;
mod activation_queue;
mod attached;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
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

use crate::kernel::heartbeat::Period;
use crate::source::session::Session;
use crate::source::{
    AttachError, BackendInfo, BackendUse, CommonOptions, MapKind, Measuring, Need, Source, SourceInfo, first_that_works,
};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/timerlat/timerlat.skel.rs"));
}

/// Accepted periods in ns, which are those of the kernel's tracer.
pub const PERIODS_NS: std::ops::RangeInclusive<u64> = 100_000..=1_000_000_000;

/// Period where little CPU time counts for more than every short delay ([`CommonOptions::is_sparing`]).
const SPARING_PERIOD_NS: u64 = 20_000_000;

/// Interval at which late events are to be drained, which also collects activations: buffers last for twice as long.
pub const POLLED_EVERY: std::time::Duration = std::time::Duration::from_millis(250);

pub(crate) const BPF: &str = "bpf";
const TRACER: &str = "tracer";
/// Needs of the backend `bpf`, and of the tracer if causes are reported.
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
        BackendInfo { name: TRACER, needs: &[Need::Tracer(tracer::TRACER), Need::KernelsNumbers], limitations: "" },
        BackendInfo { name: BPF, needs: &NEEDS, limitations: "" },
    ],
};

/// Measured threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// User threads if the kernel or BPF can measure them, otherwise kernel threads.
    #[default]
    Any,
    /// User threads of whylate.
    User,
    /// The tracer's kernel threads.
    Kernel,
    /// Threads of other programs that read the tracer's files.
    Others,
}

/// Options of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimerlatOptions {
    /// Name of the backend to use; `None` prefers the tracer.
    pub backend: Option<String>,
    /// Measured threads. All but user threads need the tracer.
    pub threads: Threads,
    /// Records data that can be saved later: with the tracer its trace events, otherwise the latest activations.
    pub record: Option<Record>,
    /// Period of the activations.
    pub period_ns: u64,
    /// Offset of the activations of consecutive CPUs; `None` if they need not be aligned.
    pub aligned_ns: Option<u64>,
    /// Raises the period if timer interrupts are expensive, as on virtual machines.
    pub is_frugal: bool,
    /// CPUs with a measured thread; empty for the usable CPUs of the session.
    pub cpus: Vec<u32>,
    /// Scheduling policy of the measured threads.
    pub policy: Policy,
    /// Reports a late event with its causes for each thread latency of at least this.
    pub explain_over_ns: Option<u64>,
    /// Reports a late event with its causes for each interrupt latency of at least this.
    pub explain_irq_over_ns: Option<u64>,
    /// Reports late events such that this many of each CPU are its worst ones.
    pub explain_worst: Option<usize>,
    /// Adds to late events the kernel stack that the timer interrupt interrupted.
    pub stacks: bool,
    /// Minimum thread latency for that stack in the tracer's recording.
    pub stack_over_ns: Option<u64>,
    /// Latencies at which measurement stops.
    pub stop: Stop,
    /// Also counts latencies in linear buckets.
    pub steps: Option<StepWidth>,
    /// Adds to late events the evidence from which their causes were derived.
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

    /// Returns whether late events are wanted.
    pub fn explains(&self) -> bool {
        self.explain_over_ns.is_some() || self.explain_irq_over_ns.is_some() || self.explain_worst.is_some()
    }

    /// Starts measuring.
    ///
    /// # Errors
    /// Fails if the kernel or the caller's privileges do not allow it; nothing stays attached then.
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

    fn ask(&mut self, asked: CommonOptions) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
        if asked.is_sparing {
            self.period_ns = self.period_ns.max(SPARING_PERIOD_NS);
        }
    }

    fn takes(&self, backend: &str) -> BackendUse {
        match backend {
            BPF if self.needs_tracer() => BackendUse::Never(
                "-k, -U and -e need the kernel's timerlat tracer: leave them out, or leave --backend bpf out",
            ),
            _ => BackendUse::Automatic,
        }
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        let Measuring { backend, fallback_reason, attached } = self.start(session)?;
        Ok(Measuring { backend, fallback_reason, attached })
    }
}
