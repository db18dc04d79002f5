// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long work items wait for a worker, and how long they run.

mod attached;
mod gather;
mod late;

use crate::attach;
use crate::source::{AttachError, Attached, BackendInfo, MapKind, Need, Options, Source, SourceInfo};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/wq.skel.rs"));
}

/// The source `wq`.
pub struct Wq;

const FENTRY: &str = "fentry";
const TRACEPOINT: &str = "tracepoint";

static INFO: SourceInfo = SourceInfo {
    name: "wq",
    waits: "a work item",
    from: "queued",
    to: "a worker starts it",
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
                Need::Map(MapKind::Array),
                Need::Map(MapKind::RingBuf),
                Need::Map(MapKind::StackTrace),
            ],
            weaker: "",
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
            weaker: "an item that is queued again in the instant in which its worker takes it is told apart afterwards",
        },
    ],
};

impl Source for Wq {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn attach(&self, options: &Options) -> Result<Box<dyn Attached>, AttachError> {
        attach::require_btf()?;
        attach::silence_libbpf();
        let mut refused: Option<AttachError> = None;
        for backend in attach::backends_to_try(&INFO, options.backend.as_deref())? {
            let reason = refused.as_ref().map(|error| match error {
                // Root may load some kinds of BPF programs and not others, e.g. where the kernel is locked down.
                AttachError::NotPermitted => "process_one_work cannot be attached to: not permitted".to_owned(),
                error => format!("process_one_work cannot be attached to: {error}"),
            });
            match attached::AttachedWq::new(options, backend, reason) {
                Ok(attached) => return Ok(Box::new(attached)),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.unwrap_or_else(|| AttachError::Unsupported("there is no backend".to_owned())))
    }
}
