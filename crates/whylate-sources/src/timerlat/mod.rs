// SPDX-License-Identifier: MIT OR Apache-2.0
//! How late timers and the threads that they wake are, on each CPU.
//!
//! Backend `bpf`: a real-time thread on each CPU sleeps until absolute times on CLOCK_MONOTONIC, as cyclictest's do; BPF programs tell it
//! when its timer's interrupt and when it itself had the CPU, as the kernel's timerlat tracer would.

mod activation;
mod attached;
mod floors;
pub mod idle;
pub mod placement;
mod tally;
mod threads;

pub use attached::AttachedTimerlat;
pub use tally::StepWidth;
pub use threads::{Policy, Stop};

use crate::attach;
use crate::source::{AttachError, Attached, BackendInfo, MapKind, Need, Options, Source, SourceInfo};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/timerlat.skel.rs"));
}

/// Periods that the kernel's tracer takes too, in nanoseconds.
pub const PERIODS_NS: std::ops::RangeInclusive<u64> = 100_000..=1_000_000_000;

const BPF: &str = "bpf";

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    name: "timerlat",
    waits: "a timer and the thread it wakes",
    from: "due",
    to: "the thread runs",
    backends: &[BackendInfo {
        name: BPF,
        needs: &[
            Need::Btf,
            Need::TpBtfPrograms,
            Need::Tracepoint("timer:hrtimer_expire_entry"),
            Need::Tracepoint("sched:sched_switch"),
            Need::Map(MapKind::Array),
            Need::Map(MapKind::RingBuf),
        ],
        weaker: "",
    }],
};

/// What to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimerlatOptions {
    /// From one activation to the next.
    pub period_ns: u64,
    /// CPUs with a measured thread; empty for all that are online.
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
            period_ns: 1_000_000,
            cpus: Vec::new(),
            policy: Policy::Fifo(95),
            explain_over_ns: None,
            explain_irq_over_ns: None,
            explain_worst: None,
            stacks: false,
            stop: Stop::default(),
            steps: None,
            keep_evidence: false,
        }
    }
}

impl TimerlatOptions {
    fn explains(&self) -> bool {
        self.explain_over_ns.is_some() || self.explain_irq_over_ns.is_some() || self.explain_worst.is_some()
    }
}

/// The source `timerlat`.
#[derive(Debug)]
pub struct Timerlat;

impl Source for Timerlat {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn attach(&self, options: &Options) -> Result<Box<dyn Attached>, AttachError> {
        let ours = TimerlatOptions {
            explain_over_ns: options.explain_over_ns,
            stacks: options.stacks,
            keep_evidence: options.keep_evidence,
            ..TimerlatOptions::default()
        };
        Ok(Box::new(attach(&ours)?))
    }
}

/// Starts measuring.
///
/// # Errors
/// When the kernel or the caller's privileges do not allow it; nothing stays attached then.
pub fn attach(options: &TimerlatOptions) -> Result<AttachedTimerlat, AttachError> {
    if !PERIODS_NS.contains(&options.period_ns) {
        return Err(AttachError::Unsupported("a period is from 100 us to 1 s long".to_owned()));
    }
    attach::require_btf()?;
    attach::silence_libbpf();
    AttachedTimerlat::new(options)
}
