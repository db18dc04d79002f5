// SPDX-License-Identifier: MIT OR Apache-2.0
//! The attached source `sqpoll`.

use std::time::Duration;

use whylate_model::{LateEvent, Snapshot};

use super::bpf_backend::BpfBackend;
use super::fdinfo_backend::FdinfoBackend;
use super::programs::Way;
use super::states::{self, ThreadStates};
use super::{BPF, INFO, SqpollOptions};
use crate::cpu_account::{Account, Timers, Wakeups};
use crate::kernel::attach::Meter;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

enum Reader {
    Kernel(Box<BpfBackend>),
    Proc(FdinfoBackend),
    /// No thread yet: programs are attached when the first one appears.
    Waiting(Box<Waiting>),
}

/// Options and session with which the programs are attached later.
struct Waiting {
    options: SqpollOptions,
    session: Session,
    account: Account,
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
    /// Whether `before` was read after the span began.
    is_late: bool,
}

impl AttachedSqpoll {
    pub(super) fn new(options: &SqpollOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        let mut reader = match backend {
            BPF => match Waiting::begin(options, session)? {
                Some(waiting) => Reader::Waiting(Box::new(waiting)),
                None => Reader::Kernel(Box::new(BpfBackend::attach(options, session)?)),
            },
            _ => Reader::Proc(FdinfoBackend::new(options.threads.process)),
        };
        let before = reader.read()?;
        let span = Span::begin(INFO.card, session);
        Ok(AttachedSqpoll { reader, backend, before, span, meter: Meter::default(), is_late: false })
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
            Reader::Waiting(_) => "waiting",
        }
    }

    /// Attaches the programs if the first thread has appeared.
    fn attach_if_needed(&mut self) -> anyhow::Result<()> {
        let Reader::Waiting(waiting) = &self.reader else { return Ok(()) };
        if !waiting.account.has_sq_thread() {
            return Ok(());
        }
        let mut reader = BpfBackend::attach(&waiting.options, &waiting.session)?;
        self.before = reader.read()?;
        self.is_late = true;
        self.reader = Reader::Kernel(Box::new(reader));
        Ok(())
    }
}

impl Waiting {
    /// Waits for the first thread if there is none, and other sources need the account that detects it. `None` if the
    /// programs are to be attached now.
    fn begin(options: &SqpollOptions, session: &Session) -> Result<Option<Self>, AttachError> {
        if !session.has_several() || options.precise || options.sampled || options.explain_over_ns.is_none() {
            return Ok(None);
        }
        let mut account = Account::load(session.account(), Timers::Heartbeats, Wakeups::OfWorkers)?;
        account.attach()?;
        let has_thread = account.find_sq_thread()?;
        let (options, session) = (options.clone(), session.for_later());
        Ok((!has_thread).then_some(Waiting { options, session, account }))
    }
}

impl Reader {
    fn read(&mut self) -> anyhow::Result<ThreadStates> {
        match self {
            Reader::Kernel(reader) => reader.read(),
            Reader::Proc(reader) => reader.read(),
            Reader::Waiting(_) => Ok(ThreadStates::default()),
        }
    }
}

impl Attached for AttachedSqpoll {
    fn sees_nothing(&self) -> Option<&str> {
        self.before.is_empty().then_some(NO_THREAD)
    }

    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.attach_if_needed()?;
        let now = self.reader.read()?;
        let mut snapshot = self.span.end(self.backend);
        let is_late = std::mem::take(&mut self.is_late);
        snapshot.series = states::series(&self.before, &now, snapshot.duration_ns, is_late);
        let named = |(reason, count): (&'static str, u64)| (reason.to_owned(), count);
        match &mut self.reader {
            Reader::Kernel(reader) => {
                self.meter.report(reader.programs.statistics(), &mut snapshot);
                snapshot.lost.extend(reader.take_lost().map(named));
                reader.programs.account.iter_mut().for_each(|account| account.report(&mut snapshot));
            }
            Reader::Proc(reader) => snapshot.lost.extend(reader.take_lost().map(named)),
            Reader::Waiting(waiting) => waiting.account.report(&mut snapshot),
        }
        self.before = now;
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        self.attach_if_needed()?;
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
            Reader::Waiting(waiting) => waiting.account.limitations(),
        }
    }
}
