// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long I/O requests take: held back, queued, and at their device.
//!
#![doc = include_str!("how.md")]

mod attached;
mod gather;
mod late;
mod names;

use whylate_model::sources;

pub use names::disk_of;

use crate::session::Session;
use crate::source::{
    Asked, AttachError, Attached, BackendInfo, MapKind, Measuring, Need, Source, SourceInfo, first_that_works,
};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/block/block.skel.rs"));
}

const FEXIT: &str = "fexit";
const IO_START: &str = "io_start";
const INSERT: &str = "insert";

static INFO: SourceInfo = SourceInfo {
    card: &sources::BLOCK,
    backends: &[
        BackendInfo {
            name: FEXIT,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::Tracepoint("block:block_io_start"),
                Need::Tracepoint("block:block_bio_queue"),
                Need::Tracepoint("block:block_rq_issue"),
                Need::Tracepoint("block:block_rq_merge"),
                Need::Tracepoint("block:block_rq_complete"),
                Need::Function("__blk_throtl_bio"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            weaker: "",
        },
        BackendInfo {
            name: IO_START,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::Tracepoint("block:block_io_start"),
                Need::Tracepoint("block:block_bio_queue"),
                Need::Tracepoint("block:block_rq_issue"),
                Need::Tracepoint("block:block_rq_merge"),
                Need::Tracepoint("block:block_rq_complete"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            weaker: "a request held back by io.max starts when it is released, and the worker that releases it counts as its submitter",
        },
        BackendInfo {
            name: INSERT,
            needs: &[
                Need::Btf,
                Need::TpBtfPrograms,
                Need::Tracepoint("block:block_bio_queue"),
                Need::Tracepoint("block:block_rq_insert"),
                Need::Tracepoint("block:block_rq_issue"),
                Need::Tracepoint("block:block_rq_merge"),
                Need::Tracepoint("block:block_rq_complete"),
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
            ],
            weaker: "a request is first seen when it is queued or issued, and a worker that does so counts as its submitter; time held back by io.max is not seen",
        },
    ],
};

/// What to measure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockOptions {
    /// Name of the backend to use; `None` takes the best that works.
    pub backend: Option<String>,
    /// Only requests of this device, by its name in `/dev`.
    pub device: Option<String>,
    /// How series are told apart, beside their device and operation.
    pub by: By,
    /// Yield a late event for each latency of at least this.
    pub late_over_ns: Option<u64>,
    /// Yield a late event with its causes for each latency of at least this.
    pub explain_over_ns: Option<u64>,
    /// Late events also carry what their causes were told from.
    pub keep_evidence: bool,
    /// A process whose requests only count for those that they make wait; `None` leaves nobody out.
    pub leave_out: Option<u32>,
    /// Also gather histograms of the phases, and tell `completion` apart from `device`, which takes programs at interrupts.
    pub phases: bool,
    /// Series that the programs tell apart at a time, where that is to be less than there is memory for.
    pub most_series: Option<u32>,
}

/// How series are told apart, beside their device and operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// In no other way.
    #[default]
    Device,
    /// By the process that submits.
    Process,
    /// By the thread that submits: file systems have some of their own.
    Thread,
    /// By the cgroup that a request is charged to.
    Cgroup,
}

impl Source for BlockOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: Asked) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
        if asked.in_detail {
            (self.by, self.phases) = (By::Process, true);
        }
        self.leave_out = Some(std::process::id());
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        first_that_works(self, self.backend.as_deref(), session, |backend| -> Result<Box<dyn Attached>, _> {
            Ok(Box::new(attached::AttachedBlock::new(self, session, backend)?))
        })
    }
}
