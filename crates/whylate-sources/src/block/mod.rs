// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency of block I/O requests, by phase: throttled, queued, at the device, completion.
//!
#![doc = include_str!("how.md")]

mod attached;
mod gather;
mod late;
mod names;

use whylate_model::sources;

pub use names::disk_of;

use crate::source::session::Session;
use crate::source::{
    AttachError, Attached, BackendInfo, CommonOptions, MapKind, Measuring, Need, Source, SourceInfo, first_candidate,
    first_that_works,
};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/block/block.skel.rs"));
}

const FEXIT: &str = "fexit";
const IO_START: &str = "io_start";
const INSERT: &str = "insert";

/// Lists the needs of a backend: those of all, and its own.
macro_rules! needs {
    ($($own:expr),+) => {
        &[
            Need::Btf,
            Need::TpBtfPrograms,
            $($own,)+
            Need::Tracepoint("block:block_bio_queue"),
            Need::Tracepoint("block:block_rq_issue"),
            Need::Tracepoint("block:block_rq_merge"),
            Need::Tracepoint("block:block_rq_complete"),
            Need::Map(MapKind::Array),
            Need::Map(MapKind::RingBuf),
        ]
    };
}

static INFO: SourceInfo = SourceInfo {
    card: &sources::BLOCK,
    backends: &[
        BackendInfo {
            name: FEXIT,
            needs: needs![Need::Tracepoint("block:block_io_start"), Need::Function("__blk_throtl_bio")],
            limitations: "",
        },
        BackendInfo {
            name: IO_START,
            needs: needs![Need::Tracepoint("block:block_io_start")],
            limitations: "a request held back by io.max starts when it is released, and the worker that releases it counts as its submitter",
        },
        BackendInfo {
            name: INSERT,
            needs: needs![Need::Tracepoint("block:block_rq_insert")],
            limitations: "a request is first seen when it is queued or issued, and a worker that does so counts as its submitter; time held back by io.max is not seen",
        },
    ],
};

/// Options of the source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockOptions {
    /// Name of the backend to use; `None` takes the best one that works.
    pub backend: Option<String>,
    /// Measures only requests of this device, by its name in `/dev`.
    pub device: Option<String>,
    /// Aggregation of series, in addition to device and operation.
    pub by: By,
    /// Reports a late event for each latency of at least this, in ns.
    pub late_over_ns: Option<u64>,
    /// Reports a late event with its causes for each latency of at least this, in ns.
    pub explain_over_ns: Option<u64>,
    /// Adds to late events the evidence from which their causes were derived.
    pub keep_evidence: bool,
    /// PID of a process that is not measured: its requests count only as competitors of others.
    pub leave_out: Option<u32>,
    /// Adds histograms of the phases, and splits `completion` from `device`, which needs programs at interrupts.
    pub phases: bool,
    /// Maximum number of series in the BPF tables, if less than the default.
    pub most_series: Option<u32>,
}

/// Aggregation of series, in addition to device and operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// By device and operation only.
    #[default]
    Device,
    /// By the submitting process.
    Process,
    /// By the submitting thread: file systems have threads of their own.
    Thread,
    /// By the cgroup that a request is charged to.
    Cgroup,
}

impl Source for BlockOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: CommonOptions) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
        if asked.in_detail {
            (self.by, self.phases) = (By::Process, true);
        }
        self.leave_out = Some(std::process::id());
    }

    fn prepare(&self, session: &Session) {
        let Some(backend) = first_candidate(self, self.backend.as_deref(), session) else { return };
        attached::LoadingBlock::begin(self, session, backend)
            .into_iter()
            .for_each(|loading| session.keep_prepared(loading));
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        first_that_works(self, self.backend.as_deref(), session, |backend| -> Result<Box<dyn Attached>, _> {
            Ok(Box::new(attached::AttachedBlock::new(self, session, backend)?))
        })
    }
}
