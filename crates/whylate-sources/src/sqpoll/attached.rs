// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source `sqpoll`, measuring.

use std::time::Duration;

use whylate_model::{LateEvent, Snapshot};

use super::of_kernel::OfKernel;
use super::of_proc::OfProc;
use super::programs::Way;
use super::seen::{self, Look};
use super::{BPF, INFO, SqpollOptions};
use crate::attach::Meter;
use crate::session::{Session, Span};
use crate::source::{AttachError, Attached};

enum Looks {
    Kernel(Box<OfKernel>),
    Proc(OfProc),
}

/// Why there is nothing to see, and what would be.
const NO_THREAD: &str = "no io_uring submission thread is there (a ring set up with IORING_SETUP_SQPOLL has one)";

/// The source `sqpoll`, measuring until it is dropped.
pub struct AttachedSqpoll {
    looks: Looks,
    backend: &'static str,
    before: Look,
    span: Span,
    meter: Meter,
}

impl AttachedSqpoll {
    pub(super) fn new(options: &SqpollOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        let mut looks = match backend {
            BPF => Looks::Kernel(Box::new(OfKernel::attach(options, session)?)),
            _ => Looks::Proc(OfProc::new(options.threads.process)),
        };
        let before = looks.look()?;
        Ok(AttachedSqpoll { looks, backend, before, span: Span::begin(INFO.card, session), meter: Meter::default() })
    }

    /// How work is told from spinning, for whoever wants to know.
    pub fn way(&self) -> &'static str {
        match &self.looks {
            Looks::Kernel(looks) => match looks.way() {
                Way::Rounds => "rounds",
                Way::Functions => "functions",
                Way::Samples => "samples",
            },
            Looks::Proc(_) => "fdinfo",
        }
    }
}

impl Looks {
    fn look(&mut self) -> anyhow::Result<Look> {
        match self {
            Looks::Kernel(looks) => looks.look(),
            Looks::Proc(looks) => looks.look(),
        }
    }
}

impl Attached for AttachedSqpoll {
    fn sees_nothing(&self) -> Option<&str> {
        self.before.is_empty().then_some(NO_THREAD)
    }

    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let now = self.looks.look()?;
        let mut snapshot = self.span.end(self.backend);
        snapshot.series = seen::series(&self.before, &now, snapshot.duration_ns);
        let mut lost: Vec<(&'static str, u64)> = Vec::new();
        match &mut self.looks {
            Looks::Kernel(looks) => {
                self.meter.tell(looks.programs.statistics(), &mut snapshot);
                lost.extend(looks.take_lost());
                if let Some(account) = &mut looks.programs.account {
                    lost.extend(account.take_lost());
                }
            }
            Looks::Proc(looks) => lost.extend(looks.take_lost()),
        }
        snapshot.lost.extend(lost.into_iter().map(|(reason, count)| (reason.to_owned(), count)));
        if let Looks::Kernel(looks) = &self.looks {
            looks.programs.account.iter().for_each(|account| account.tell_unexplained(&mut snapshot));
        }
        self.before = now;
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        let Looks::Kernel(looks) = &mut self.looks else {
            return Ok(());
        };
        looks.programs.poll(wait)?;
        // Taken out one by one: `each` may take long, and more may come in meanwhile.
        while let Some(event) = looks.take_late() {
            each(event);
        }
        Ok(())
    }

    fn weaker(&self) -> Option<&str> {
        match &self.looks {
            Looks::Kernel(looks) => looks.programs.account.as_ref().and_then(|account| account.weaker()),
            Looks::Proc(looks) => looks.weaker(),
        }
    }
}
