// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source with late events: which CPU occupants delayed threads that waited on a run queue.

use std::time::Duration;

use whylate_model::{LateEvent, Snapshot};

use super::{KernelThreads, OffcpuOptions};
use crate::kernel::attach::Meter;
use crate::runnable::{WaitSelection, Waits};
use crate::source::session::Session;
use crate::source::{AttachError, Attached};

/// The attached source, with late events.
pub(super) struct Explained {
    waits: Waits,
    meter: Meter,
    attached: Box<dyn Attached>,
    limitations: Option<String>,
}

impl Explained {
    pub(super) fn new(
        attached: Box<dyn Attached>,
        options: &OffcpuOptions,
        session: &Session,
        explain_over_ns: u64,
    ) -> Result<Self, AttachError> {
        let wanted = WaitSelection {
            explain_over_ns,
            explain_sleeps_over_ns: options.explain_sleeps_over_ns,
            idle: options.idle,
            held_up_alone: options.held_up_alone,
            keep_evidence: options.keep_evidence,
            threads: options.threads.clone(),
            kernel_threads: options.kernel_threads != KernelThreads::No,
            user_threads: options.kernel_threads != KernelThreads::Only,
        };
        let waits = Waits::attach(&wanted, session)?;
        let limitations: Vec<&str> = attached.limitations().into_iter().chain(waits.limitations()).collect();
        let limitations = (!limitations.is_empty()).then(|| limitations.join("; "));
        Ok(Explained { waits, meter: Meter::default(), attached, limitations })
    }
}

impl Attached for Explained {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let mut snapshot = self.attached.snapshot()?;
        self.meter.report(self.waits.statistics(), &mut snapshot);
        for (reason, count) in self.waits.take_lost() {
            *snapshot.lost.entry(reason.to_owned()).or_default() += count;
        }
        self.waits.report_unexplained(&mut snapshot);
        self.waits.report_programs(&mut snapshot);
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        self.waits.drain(wait, each)
    }

    fn explain_pending(&mut self, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        self.waits.explain_pending(each);
        Ok(())
    }

    fn limitations(&self) -> Option<&str> {
        self.limitations.as_deref()
    }
}
