// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who woke whom, for whoever needs that alone.

use std::rc::Rc;

use super::rings::Rings;
use super::{Account, History, Stream, Timers, Wakeups};
use crate::session::Session;
use crate::source::AttachError;

/// Keeps the past of all CPUs until it is dropped.
pub struct Edges {
    account: Account,
}

impl Edges {
    /// From now on. A timer of its own on each CPU, due each millisecond, would cost a command some percent in a virtual
    /// machine: interrupts that are off are told by ticks, from some milliseconds on.
    ///
    /// # Errors
    /// When the kernel does not let its programs in.
    pub fn attach(session: &Session) -> Result<Self, AttachError> {
        let mut account = Account::load(session, Timers::Ticks, Wakeups::OfAll)?;
        account.attach()?;
        Ok(Edges { account })
    }

    /// What is known of the past of all CPUs, from that moment backwards, on CLOCK_MONOTONIC.
    pub fn history(&self, until_ns: u64) -> Option<History> {
        self.account.history(until_ns)
    }

    /// What all CPUs do from now on.
    pub fn stream(&self) -> Option<Stream> {
        self.account.stream()
    }

    /// Events lost since the last call, by reason.
    pub fn take_lost(&mut self) -> Vec<(&'static str, u64)> {
        self.account.take_lost()
    }
}

impl Account {
    /// The past of all CPUs, from that moment backwards; `None` where only workers' wakeups are kept.
    pub(crate) fn history(&self, until_ns: u64) -> Option<History> {
        self.edges().map(|rings| History::new(rings, until_ns))
    }

    /// The same from now on forwards.
    pub(crate) fn stream(&self) -> Option<Stream> {
        self.edges().map(Stream::new)
    }

    fn edges(&self) -> Option<Rc<Rings>> {
        let kept = self.kept.borrow();
        (kept.wakeups == Wakeups::OfAll).then(|| Rc::clone(&kept.rings))
    }
}
