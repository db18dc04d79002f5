// SPDX-License-Identifier: MIT OR Apache-2.0
//! Time of io_uring's submission threads (`IORING_SETUP_SQPOLL`): working, spinning, sleeping or waiting for a CPU.
//!
//! Backend `bpf` takes no lock of a ring: programs at the events of a thread's rounds distinguish work from spinning,
//! iterators read the scheduler's counters. `fdinfo` reads what the kernel prints of a ring, which blocks the ring's
//! thread.
//!
#![doc = include_str!("how.md")]

mod attached;
mod bpf_backend;
mod fdinfo;
mod fdinfo_backend;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod iterators;
mod never_sleeps;
mod programs;
mod samples;
mod states;

pub use attached::AttachedSqpoll;

use whylate_model::sources;

use crate::source::session::Session;
use crate::source::{
    AttachError, BackendInfo, BackendUse, CommonOptions, MapKind, Measuring, Need, Source, SourceInfo, Threads,
    first_that_works,
};

#[allow(missing_docs, unsafe_code, dead_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/sqpoll/sqpoll.skel.rs"));
}

const BPF: &str = "bpf";
const FDINFO: &str = "fdinfo";

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    card: &sources::SQPOLL,
    backends: &[
        BackendInfo {
            name: BPF,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::Tracepoint("sched:sched_switch"),
                Need::Tracepoint("sched:sched_process_exit"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            limitations: "",
        },
        BackendInfo {
            name: FDINFO,
            needs: &[],
            limitations: "reading a ring makes it wait; work is counted from Linux 6.9 on, by the tick, and as that kernel defines it",
        },
    ],
};

/// Options of the sqpoll source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SqpollOptions {
    /// Name of the backend to use; `None` uses the best that works.
    pub backend: Option<String>,
    /// Threads to measure; they can only be selected by process.
    pub threads: Threads,
    /// Detect work by the entry and exit of the functions that do it.
    pub precise: bool,
    /// Detect work by samples, as before 6.9, even if the tracepoints of rounds exist.
    pub sampled: bool,
    /// Emit a late event with its causes for each wait for a CPU of at least this, in nanoseconds.
    pub explain_over_ns: Option<u64>,
    /// Add to late events the evidence that their causes were derived from.
    pub keep_evidence: bool,
}

impl SqpollOptions {
    /// Starts measuring.
    ///
    /// # Errors
    /// Fails if the kernel or the caller's privileges do not allow it; nothing stays attached then.
    pub fn start(&self, session: &Session) -> Result<Measuring<AttachedSqpoll>, AttachError> {
        first_that_works(self, self.backend.as_deref(), session, |backend| {
            Ok(Box::new(AttachedSqpoll::new(self, session, backend)?))
        })
    }
}

impl Source for SqpollOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: CommonOptions) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
        self.threads = asked.threads;
    }

    fn takes(&self, backend: &str) -> BackendUse {
        match backend {
            FDINFO if self.precise || self.explain_over_ns.is_some() => BackendUse::Never(
                "--precise and --why need the bpf backend: leave them out, or leave --backend fdinfo out",
            ),
            _ => BackendUse::Automatic,
        }
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        let Measuring { backend, fallback_reason, attached } = self.start(session)?;
        Ok(Measuring { backend, fallback_reason, attached })
    }
}
