// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where threads that are off their CPUs wait, and for how long.
//!
//! A BPF program walks over all threads at a fixed rate. One that has not run since the last walk only adds time to its
//! place; of others the kernel and user stack are taken, told apart and stored in the kernel, and named when asked for.
//!
#![doc = include_str!("how.md")]

mod attached;
mod budget;
mod choice;
mod code_files;
mod disks;
mod elf;
mod explained;
mod far_files;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod holders;
mod mappings;
mod mounts;
mod named;
mod names;
mod pace;
mod patience;
mod perf_map;
mod places;
mod proc;
mod process;
mod rules;
mod sampler;
mod state;
mod submitted;
mod tracers;

pub use attached::AttachedOffcpu;
pub use choice::{Choice, Often};
pub use sampler::Met;
pub(crate) use sampler::iterate;
pub(crate) use submitted::Rings;

use whylate_model::sources;
use whylate_model::wait::Classes;

use crate::session::Session;
use crate::source::{
    Asked, AttachError, Attached, BackendInfo, MapKind, Measuring, Need, Source, SourceInfo, Takes, Threads,
    first_that_works,
};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/offcpu/offcpu.skel.rs"));
}

/// Walks a second unless another rate is asked for: few enough to cost little, and no divisor of common periods.
pub const DEFAULT_HZ: u32 = 9;

/// Rates that make sense, in walks a second.
pub const RATES_HZ: std::ops::RangeInclusive<u32> = 1..=999;

/// A look at all threads at a fixed rate.
pub const SAMPLE: &str = "sample";

/// Each switch of threads.
pub const TRACE: &str = "trace";

/// Files of /proc.
pub const PROC: &str = "proc";

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    card: &sources::OFFCPU,
    backends: &[
        BackendInfo { name: SAMPLE, needs: &[Need::Btf, Need::Map(MapKind::Array), SLEEPABLE], weaker: "" },
        BackendInfo {
            name: TRACE,
            needs: &[Need::Btf, Need::Map(MapKind::Array), SLEEPABLE],
            weaker: "its overhead grows with the rate of context switches",
        },
        BackendInfo {
            name: PROC,
            needs: &[Need::Proc],
            weaker: "kernel frames alone, and twenty microseconds for each thread",
        },
    ],
};

/// Why wakers are refused with other backends.
pub const WAKERS_NEED_TRACE: &str =
    "only the trace backend shows who woke a thread: leave --wakers out, or use --backend trace";

/// Programs that may read the memory of other processes, and loops in them.
const SLEEPABLE: Need = Need::Since { version: "5.18", function: "bpf_copy_from_user_task" };

/// Which of the kernel's own threads are of interest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelThreads {
    /// They and those of processes.
    #[default]
    Yes,
    /// Those of processes only.
    No,
    /// They only.
    Only,
}

/// How the callers of user frames are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallGraph {
    /// By the unwind information of the code (`.eh_frame`); by frame pointers where there is none, as in a JIT's code.
    #[default]
    Rules,
    /// By unwind information for the innermost function, which often keeps no frame pointer, then by frame pointers.
    FramePointers,
}

/// What to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffcpuOptions {
    /// Name of the backend to use; `None` samples with BPF if that works, and reads /proc if not.
    pub backend: Option<String>,
    /// Walks a second.
    pub rate_hz: u32,
    /// The part of one CPU that walks may take, in millionths, which tells the rate instead.
    pub budget_ppm: Option<u32>,
    /// Only these threads.
    pub threads: Threads,
    /// Only while in one of these states, in the letters of ps(1), and F for frozen; empty for all.
    pub states: String,
    /// Which of the kernel's threads.
    pub kernel_threads: KernelThreads,
    /// User frames too.
    pub user_stacks: bool,
    /// How callers are told.
    pub call_graph: CallGraph,
    /// File and line of each user frame, and functions that the compiler has inlined, where debug information tells.
    pub lines: bool,
    /// Who ended each wait, which [`TRACE`] alone tells: it is then the backend unless another one is named.
    pub wakers: bool,
    /// Each thread for itself.
    pub by_thread: bool,
    /// With that, whom each thread that waits at the end of a span waits for, as far as the kernel's locks tell.
    pub holders: bool,
    /// At most so many frames of each stack, the innermost ones.
    pub max_depth: u32,
    /// Rules of one's own for what waits are for.
    pub classes: Classes,
    /// Yield a late event with its causes for each wait for a CPU of at least this.
    pub explain_over_ns: Option<u64>,
    /// With that, the same of waits for others: of each a path along who ended it.
    pub explain_sleeps_over_ns: Option<u64>,
    /// Explain waits of threads that are idle by design too.
    pub idle: bool,
    /// Of waits for others explain only those that somebody here held up, by work or for want of a CPU, disk or lock.
    pub held_up_alone: bool,
    /// Late events also carry what their causes were told from.
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
    /// Starts to measure with BPF programs alone, and explains nothing.
    ///
    /// # Errors
    /// When the kernel or the caller's privileges do not allow it.
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

    fn ask(&mut self, asked: Asked) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
        if let Some(over_ns) = asked.explain_held_up_over_ns {
            (self.explain_sleeps_over_ns, self.held_up_alone) = (Some(over_ns), true);
        }
        self.threads = asked.threads;
    }

    fn takes(&self, backend: &str) -> Takes {
        match backend {
            SAMPLE | PROC if self.wakers => Takes::Never(WAKERS_NEED_TRACE),
            PROC if self.holders => Takes::Never(
                "the proc backend knows neither how long threads have waited nor for whom: leave --blocked out, or use the sample backend, which loads BPF programs",
            ),
            PROC if self.threads.cgroup.is_some() => {
                Takes::Never("the proc backend cannot select threads by cgroup: leave --cgroup out")
            }
            PROC if self.lines || self.call_graph != CallGraph::Rules => {
                Takes::Never("the proc backend sees kernel frames only: leave --lines and --call-graph out")
            }
            TRACE if !self.wakers => Takes::Asked,
            _ => Takes::Unasked,
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
