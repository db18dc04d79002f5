// SPDX-License-Identifier: MIT OR Apache-2.0
//! The attached source `sqpoll`.

use std::time::Duration;

use whylate_model::{LateEvent, Snapshot};

use super::bpf_backend::BpfBackend;
use super::fdinfo_backend::FdinfoBackend;
use super::programs::Way;
use super::states::{self, ThreadStates};
use super::{BPF, INFO, SqpollOptions};
use crate::kernel::attach::Meter;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

enum Reader {
    Kernel(Box<BpfBackend>),
    Proc(FdinfoBackend),
}

/// Printed if there is no submission thread, with what would start one.
const NO_THREAD: &str = "no io_uring submission thread is there (a ring set up with IORING_SETUP_SQPOLL has one)";

/// The attached source `sqpoll`; it measures until dropped.
pub struct AttachedSqpoll {
    reader: Reader,
    backend: &'static str,
    before: ThreadStates,
    span: Span,
    meter: Meter,
}

impl AttachedSqpoll {
    pub(super) fn new(options: &SqpollOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        let mut reader = match backend {
            BPF => Reader::Kernel(Box::new(BpfBackend::attach(options, session)?)),
            _ => Reader::Proc(FdinfoBackend::new(options.threads.process)),
        };
        let before = reader.read()?;
        Ok(AttachedSqpoll { reader, backend, before, span: Span::begin(INFO.card, session), meter: Meter::default() })
    }

    /// Returns how work is distinguished from spinning, for tests and diagnostics.
    pub fn way(&self) -> &'static str {
        match &self.reader {
            Reader::Kernel(reader) => match reader.way() {
                Way::Rounds => "rounds",
                Way::Functions => "functions",
                Way::Samples => "samples",
            },
            Reader::Proc(_) => "fdinfo",
        }
    }
}

impl Reader {
    fn read(&mut self) -> anyhow::Result<ThreadStates> {
        match self {
            Reader::Kernel(reader) => reader.read(),
            Reader::Proc(reader) => reader.read(),
        }
    }
}

impl Attached for AttachedSqpoll {
    fn sees_nothing(&self) -> Option<&str> {
        self.before.is_empty().then_some(NO_THREAD)
    }

    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let now = self.reader.read()?;
        let mut snapshot = self.span.end(self.backend);
        snapshot.series = states::series(&self.before, &now, snapshot.duration_ns);
        let named = |(reason, count): (&'static str, u64)| (reason.to_owned(), count);
        match &mut self.reader {
            Reader::Kernel(reader) => {
                self.meter.report(reader.programs.statistics(), &mut snapshot);
                snapshot.lost.extend(reader.take_lost().map(named));
                reader.programs.account.iter_mut().for_each(|account| account.report(&mut snapshot));
            }
            Reader::Proc(reader) => snapshot.lost.extend(reader.take_lost().map(named)),
        }
        self.before = now;
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        let Reader::Kernel(reader) = &mut self.reader else {
            return Ok(());
        };
        reader.programs.poll(wait)?;
        // One at a time: `each` may take long, and more may come in concurrently.
        while let Some(event) = reader.take_late() {
            each(event);
        }
        Ok(())
    }

    fn limitations(&self) -> Option<&str> {
        match &self.reader {
            Reader::Kernel(reader) => reader.programs.account.as_ref().and_then(|account| account.limitations()),
            Reader::Proc(reader) => reader.limitations(),
        }
    }
}
