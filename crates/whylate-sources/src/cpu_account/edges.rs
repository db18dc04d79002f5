// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wakeup edges (waker and wakee) without a source.

use std::rc::Rc;

use super::rings::Rings;
use super::{Account, History, SharedAccount, Stream, Timers, Wakeups};
use crate::kernel::error::AttachError;

/// Records the scheduling timeline of all CPUs until dropped.
pub struct Edges {
    account: Account,
}

impl Edges {
    /// Starts recording. Uses the CPUs' ticks to detect disabled interrupts, from some milliseconds on: a 1 ms timer on
    /// each CPU would slow a command by some percent in a virtual machine.
    ///
    /// # Errors
    /// Fails if the kernel refuses a BPF program.
    pub fn attach() -> Result<Self, AttachError> {
        let mut account = Account::load(&SharedAccount::new(false, &[]), Timers::Ticks, Wakeups::OfAll)?;
        account.attach()?;
        Ok(Edges { account })
    }

    /// Returns the timeline of all CPUs before `until_ns` (CLOCK_MONOTONIC), newest slice first.
    pub fn history(&self, until_ns: u64) -> Option<History> {
        self.account.history(until_ns)
    }

    /// Streams the run slices of all CPUs from now on.
    pub fn stream(&self) -> Option<Stream> {
        self.account.stream()
    }

    /// Events lost since the last call, by reason.
    pub fn take_lost(&mut self) -> Vec<(&'static str, u64)> {
        self.account.take_lost()
    }
}

impl Account {
    /// Returns the timeline of all CPUs before `until_ns`, newest first. `None` if only workers' wakeups are recorded.
    pub(crate) fn history(&self, until_ns: u64) -> Option<History> {
        self.edges().map(|rings| History::new(rings, until_ns))
    }

    /// Streams the run slices of all CPUs from now on. `None` if only workers' wakeups are recorded.
    pub(crate) fn stream(&self) -> Option<Stream> {
        self.edges().map(Stream::new)
    }

    fn edges(&self) -> Option<Rc<Rings>> {
        let state = self.state.borrow();
        (state.wakeups == Wakeups::OfAll).then(|| Rc::clone(&state.rings))
    }
}
