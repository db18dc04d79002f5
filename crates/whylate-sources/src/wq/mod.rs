// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency of work items until a worker runs them, and their run time.
//!
#![doc = include_str!("how.md")]

mod attached;
mod explain;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod gather;
mod late;
mod unfinished;

use whylate_model::sources;

use crate::source::session::Session;
use crate::source::{
    AttachError, Attached, BackendInfo, CommonOptions, MapKind, Measuring, Need, Source, SourceInfo, first_that_works,
};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/wq/wq.skel.rs"));
}

const FENTRY: &str = "fentry";
const TRACEPOINT: &str = "tracepoint";

/// Kernel version from which process_one_work() is entered only by the worker that runs the item. Before, a worker that
/// finds the item running elsewhere enters it too, and leaves the item to that worker.
const OWN_WORKER_ONLY: Need = Need::Since { version: "6.6", function: "wq_affn_dfl_set" };

static INFO: SourceInfo = SourceInfo {
    card: &sources::WQ,
    backends: &[
        BackendInfo {
            name: FENTRY,
            needs: &[
                Need::Btf,
                Need::Tracepoint("workqueue:workqueue_queue_work"),
                Need::Tracepoint("workqueue:workqueue_activate_work"),
                Need::Tracepoint("workqueue:workqueue_execute_end"),
                Need::TpBtfPrograms,
                Need::Function("process_one_work"),
                OWN_WORKER_ONLY,
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
                Need::Map(MapKind::StackTrace),
            ],
            limitations: "",
        },
        BackendInfo {
            name: TRACEPOINT,
            needs: &[
                Need::Btf,
                Need::Tracepoint("workqueue:workqueue_queue_work"),
                Need::Tracepoint("workqueue:workqueue_activate_work"),
                Need::Tracepoint("workqueue:workqueue_execute_start"),
                Need::Tracepoint("workqueue:workqueue_execute_end"),
                Need::TpBtfPrograms,
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
                Need::Map(MapKind::StackTrace),
            ],
            limitations: "an item that is queued again while its worker takes it is recognized only afterwards",
        },
    ],
};

/// Options of the source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WqOptions {
    /// Name of the backend to use; `None` takes the best one that works.
    pub backend: Option<String>,
    /// Measures only items of this handler.
    pub only: Option<String>,
    /// Aggregation of series.
    pub by: By,
    /// Measures every phase and the run time, not only the latency.
    pub phases: bool,
    /// Reports a late event for each latency of at least this, in ns.
    pub late_over_ns: Option<u64>,
    /// Adds to late events the kernel stack that queued the item.
    pub stacks: bool,
    /// Reports a late event with its causes for each latency of at least this, in ns.
    pub explain_over_ns: Option<u64>,
    /// Adds to late events the evidence from which their causes were derived.
    pub keep_evidence: bool,
}

/// Aggregation of series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// One series for all items.
    #[default]
    Nothing,
    /// By handler and workqueue.
    Handler,
    /// By workqueue.
    Workqueue,
    /// By the CPU that ran the item.
    Cpu,
    /// By worker pool.
    Pool,
}

impl Source for WqOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: CommonOptions) {
        (self.explain_over_ns, self.keep_evidence) = (asked.explain_over_ns, asked.keep_evidence);
        if asked.in_detail {
            (self.by, self.phases) = (By::Handler, true);
        }
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        first_that_works(self, self.backend.as_deref(), session, |backend| -> Result<Box<dyn Attached>, _> {
            Ok(Box::new(attached::AttachedWq::new(self, session, backend)?))
        })
    }
}
