// SPDX-License-Identifier: MIT OR Apache-2.0
//! Off-CPU time by stack: where blocked and runnable threads wait, and for how long.
//!
//! A BPF program walks over all threads at a fixed rate. A thread that has not run since the last walk only adds time
//! to its stack; for other threads the kernel and user stack are captured, deduplicated in the kernel, and symbolized
//! when a snapshot is taken.
//!
#![doc = include_str!("how.md")]

mod attached;
mod budget;
mod choice;
mod code_files;
pub mod cpu_samples;
mod disks;
mod eh_frame;
mod elf;
mod explained;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod holders;
mod mappings;
mod named;
mod names;
mod nesting;
mod perf_map;
mod places;
mod proc;
mod process;
mod remote_files;
mod rules;
mod sampler;
mod stack;
mod state;
mod tracers;
mod walk_timer;
mod watchdog;

pub use attached::AttachedOffcpu;
pub use choice::{Choice, Often};
pub use sampler::Met;

use whylate_model::sources;
use whylate_model::wait::Classes;

use crate::kernel::attach::silence_libbpf;
use crate::source::session::Session;
use crate::source::{
    AttachError, Attached, BackendInfo, BackendUse, CommonOptions, MapKind, Measuring, Need, Source, SourceInfo,
    Threads, first_that_works,
};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/offcpu/offcpu.skel.rs"));
}

/// Walks per second unless another rate is set: low enough to cost little, and no divisor of common periods.
pub const DEFAULT_HZ: u32 = 9;

/// Walks per second where little CPU time counts for more than stacks of short waits ([`CommonOptions::is_sparing`]).
const SPARING_HZ: u32 = 1;

/// Accepted rates, in walks per second.
pub const RATES_HZ: std::ops::RangeInclusive<u32> = 1..=999;

/// Backend that walks over all threads at a fixed rate.
pub const SAMPLE: &str = "sample";

/// Backend that traces each context switch.
pub const TRACE: &str = "trace";

/// Backend that reads files of /proc.
pub const PROC: &str = "proc";

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    card: &sources::OFFCPU,
    backends: &[
        BackendInfo { name: SAMPLE, needs: &[Need::Btf, Need::Map(MapKind::Array), SLEEPABLE], limitations: "" },
        BackendInfo {
            name: TRACE,
            needs: &[Need::Btf, Need::Map(MapKind::Array), SLEEPABLE],
            limitations: "its overhead grows with the rate of context switches",
        },
        BackendInfo {
            name: PROC,
            needs: &[Need::Proc],
            limitations: "it has kernel frames only, and takes 20 us per thread",
        },
    ],
};

/// Error of `--wakers` with a backend other than [`TRACE`].
pub const WAKERS_NEED_TRACE: &str =
    "only the trace backend shows who woke a thread: leave --wakers out, or use --backend trace";

/// `bpf_copy_from_user_task()`: sleepable programs that read the memory of other processes, with loops.
const SLEEPABLE: Need = Need::Since { version: "5.18", function: "bpf_copy_from_user_task" };

/// Whether kernel threads are included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelThreads {
    /// Kernel threads and threads of processes.
    #[default]
    Yes,
    /// Threads of processes only.
    No,
    /// Kernel threads only.
    Only,
}

/// Method of unwinding user stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallGraph {
    /// Unwinds by the code's unwind information (`.eh_frame`); by frame pointers where it is missing, as in JIT code.
    #[default]
    Rules,
    /// Unwinds the innermost function, which often keeps no frame pointer, by unwind information, the rest by frame
    /// pointers.
    FramePointers,
}

/// Options of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffcpuOptions {
    /// Name of the backend to use; `None` samples with BPF if that works, and reads /proc if not.
    pub backend: Option<String>,
    /// Walks per second.
    pub rate_hz: u32,
    /// CPU time that walks may take, in millionths of one CPU. Replaces `rate_hz` if set.
    pub budget_ppm: Option<u32>,
    /// Selected threads.
    pub threads: Threads,
    /// States that count, in the letters of ps(1), and F for frozen; empty for all.
    pub states: String,
    /// Whether kernel threads are included.
    pub kernel_threads: KernelThreads,
    /// Whether user stacks are captured too.
    pub user_stacks: bool,
    /// Method of unwinding user stacks.
    pub call_graph: CallGraph,
    /// Resolves file and line of each user frame, and inlined functions, from debug information.
    pub lines: bool,
    /// Records the waker of each wait. Only [`TRACE`] can, and is then the default backend.
    pub wakers: bool,
    /// Keeps threads of one name apart, by TID.
    pub by_thread: bool,
    /// Adds the chain of lock holders of each thread that waits at the end of a snapshot interval; needs `by_thread`.
    pub holders: bool,
    /// Adds the object of each wait of at least this at the end of a snapshot interval, in ns; needs `by_thread`.
    pub objects_over_ns: Option<u64>,
    /// Maximum number of frames of each stack; the innermost ones are kept.
    pub max_depth: u32,
    /// Custom rules that classify waits.
    pub classes: Classes,
    /// Reports a late event with its causes for each run-queue wait of at least this, in ns.
    pub explain_over_ns: Option<u64>,
    /// Reports blocked waits of at least this, in ns, each with the path along its wakers; needs `explain_over_ns`.
    pub explain_sleeps_over_ns: Option<u64>,
    /// Also explains waits of threads that are idle by design.
    pub idle: bool,
    /// Explains only blocked waits that something on this machine prolonged: work, or a wait for a CPU, disk or lock.
    pub held_up_alone: bool,
    /// Adds to late events the evidence from which their causes were derived.
    pub keep_evidence: bool,
}

impl Default for OffcpuOptions {
    fn default() -> Self {
        OffcpuOptions {
            backend: None,
            rate_hz: DEFAULT_HZ,
            budget_ppm: None,
            threads: Threads::default(),
            states: String::new(),
            kernel_threads: KernelThreads::Yes,
            user_stacks: true,
            call_graph: CallGraph::Rules,
            lines: false,
            wakers: false,
            by_thread: false,
            holders: false,
            objects_over_ns: None,
            max_depth: 127,
            classes: Classes::default(),
            explain_over_ns: None,
            explain_sleeps_over_ns: None,
            idle: false,
            held_up_alone: false,
            keep_evidence: false,
        }
    }
}

impl OffcpuOptions {
    /// Attaches the BPF programs, without explanations of late events.
    ///
    /// # Errors
    /// Fails if the kernel or the caller's privileges do not allow it.
    pub fn start(&self, session: &Session) -> Result<Measuring<AttachedOffcpu>, AttachError> {
        let unless_named = if self.wakers { TRACE } else { SAMPLE };
        let named = self.backend.as_deref().filter(|name| *name != "auto").unwrap_or(unless_named);
        first_that_works(self, Some(named), session, |backend| match backend {
            PROC => Err(AttachError::Contradiction("the backend proc has no BPF programs".to_owned())),
            backend => Ok(Box::new(AttachedOffcpu::new(self, session, backend)?)),
        })
    }
}

impl Source for OffcpuOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: CommonOptions) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
        if let Some(over_ns) = asked.explain_held_up_over_ns {
            (self.explain_sleeps_over_ns, self.held_up_alone) = (Some(over_ns), true);
        }
        self.threads = asked.threads;
        if asked.is_sparing {
            (self.rate_hz, self.user_stacks) = (SPARING_HZ, false);
        }
    }

    fn takes(&self, backend: &str) -> BackendUse {
        match backend {
            SAMPLE | PROC if self.wakers => BackendUse::Never(WAKERS_NEED_TRACE),
            PROC if self.holders => BackendUse::Never(
                "the proc backend knows neither how long threads have waited nor who holds what they wait for: leave --blocked out, or use the sample backend, which loads BPF programs",
            ),
            PROC if self.threads.cgroup.is_some() => {
                BackendUse::Never("the proc backend cannot select threads by cgroup: leave --cgroup out")
            }
            PROC if self.lines || self.call_graph != CallGraph::Rules => {
                BackendUse::Never("the proc backend sees kernel frames only: leave --lines and --call-graph out")
            }
            TRACE if !self.wakers => BackendUse::Named,
            _ => BackendUse::Automatic,
        }
    }

    fn prepare(&self, session: &Session) {
        if self.backend.as_deref() == Some(SAMPLE) {
            silence_libbpf();
            // Attaching tries again, and reports the error.
            attached::BeginningSampler::new(self, SAMPLE)
                .into_iter()
                .for_each(|sampler| session.keep_prepared(sampler));
        }
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        let plain = first_that_works(self, self.backend.as_deref(), session, |backend| {
            Ok(match backend {
                PROC => Box::new(proc::AttachedProc::new(self, session)?) as Box<dyn Attached>,
                backend => Box::new(AttachedOffcpu::new(self, session, backend)?),
            })
        })?;
        let Some(over_ns) = self.explain_over_ns else { return Ok(plain) };
        let explained = explained::Explained::new(plain.attached, self, session, over_ns)?;
        Ok(Measuring { attached: Box::new(explained), ..plain })
    }
}
