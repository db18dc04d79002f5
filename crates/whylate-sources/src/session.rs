// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the sources of one run share, and the time that a snapshot is about.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use whylate_model::{Card, Snapshot};

use crate::capabilities::KernelFacts;
use crate::clock;
use crate::cpus::Choice;
use crate::occupancy::AccountState;
use crate::pid_namespace;
use crate::source::{AttachError, Need};
use crate::symbols::{KernelSymbols, ReadOnce};

/// What is there once, however many sources measure. The account of the CPUs costs as much for several as for one; the
/// first source that needs it says which timers it watches, so one with timers of its own on each CPU comes first.
pub struct Session {
    host: String,
    /// Whether several sources share the account; then none of them tells its cost.
    has_several: bool,
    /// CPUs that are asked for; empty for the usable ones.
    asked_cpus: Vec<u32>,
    cpus: RefCell<Option<Rc<Choice>>>,
    account: RefCell<Option<Rc<RefCell<AccountState>>>>,
    kernel: RefCell<Option<KernelFacts>>,
    symbols: KernelSymbols,
    /// Until all sources are attached.
    read_once: RefCell<Option<ReadOnce>>,
}

impl Session {
    /// For one source, whose figures tell what its account costs and loses.
    pub fn of_one() -> Self {
        Self::new(false, &[])
    }

    /// For sources that are attached one after the other: late events have causes from [`Session::begin`] on.
    pub fn of_several() -> Self {
        Self::of_several_on(&[])
    }

    /// The same, with threads and timers on these CPUs; on the usable ones where there is none.
    pub fn of_several_on(cpus: &[u32]) -> Self {
        Self::new(true, cpus)
    }

    fn new(has_several: bool, asked_cpus: &[u32]) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Session {
            host,
            has_several,
            asked_cpus: asked_cpus.to_vec(),
            cpus: RefCell::default(),
            account: RefCell::default(),
            kernel: RefCell::default(),
            symbols: KernelSymbols::default(),
            read_once: RefCell::new(has_several.then(ReadOnce::begin)),
        }
    }

    /// The machine's name.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The CPUs that are measured with threads or timers of this process: those that a source is asked for, or those of
    /// the session. All sources get one answer, which is found before the first thread or timer is started.
    ///
    /// # Errors
    /// When a CPU that is asked for cannot be used, or the kernel does not list its CPUs.
    pub fn cpus(&self, asked: &[u32]) -> Result<Rc<Choice>, AttachError> {
        let known = self.cpus.borrow().clone();
        match known {
            Some(known) if asked.is_empty() || known.measured == asked => Ok(known),
            Some(_) => Choice::here(asked).map(Rc::new),
            None => {
                let choice = Choice::here(if asked.is_empty() { &self.asked_cpus } else { asked })?;
                Ok(Rc::clone(self.cpus.borrow_mut().insert(Rc::new(choice))))
            }
        }
    }

    /// Names of kernel addresses, which are read once.
    pub(crate) fn symbols(&self) -> KernelSymbols {
        self.symbols.shared()
    }

    /// What this kernel surely lacks of what is needed. What it has is looked up once.
    pub(crate) fn lacks(&self, needs: &[Need]) -> Option<String> {
        let mut known = self.kernel.borrow_mut();
        let lacks = known.get_or_insert_with(KernelFacts::here).lacks(needs);
        // The kernel's types take megabytes, and are not kept beside the programs that are loaded next.
        if lacks.is_none() && !self.has_several {
            *known = None;
        }
        lacks
    }

    /// Lets the account run, once all sources are attached.
    ///
    /// # Errors
    /// When the kernel does not let its programs in.
    pub fn begin(&self) -> Result<(), AttachError> {
        *self.kernel.borrow_mut() = None;
        *self.read_once.borrow_mut() = None;
        self.account.borrow().as_ref().map_or(Ok(()), |kept| kept.borrow_mut().attach(true))
    }

    /// Events that the account has lost since the last call, by reason.
    pub fn take_lost(&self) -> BTreeMap<String, u64> {
        let account = self.account.borrow();
        let lost = account.iter().flat_map(|kept| kept.borrow_mut().take_lost());
        lost.map(|(reason, count)| (reason.to_owned(), count)).collect()
    }

    /// The account that is shared, which `load` makes for the first source; `None` where the only source has its own.
    pub(crate) fn account(
        &self,
        load: impl FnOnce() -> Result<AccountState, AttachError>,
    ) -> Result<Option<Rc<RefCell<AccountState>>>, AttachError> {
        if !self.has_several {
            return Ok(None);
        }
        let known = self.account.borrow().clone();
        let kept = match known {
            Some(kept) => kept,
            None => Rc::new(RefCell::new(load()?)),
        };
        Ok(Some(Rc::clone(self.account.borrow_mut().insert(kept))))
    }
}

/// The time since the last snapshot of a source.
pub(crate) struct Span {
    card: &'static Card,
    symbols: KernelSymbols,
    host: String,
    since_unix_ns: u64,
    since_monotonic_ns: u64,
}

impl Span {
    /// From now on.
    pub fn begin(card: &'static Card, session: &Session) -> Self {
        let host = session.host.clone();
        let symbols = session.symbols();
        Span { card, symbols, host, since_unix_ns: clock::unix_ns(), since_monotonic_ns: clock::monotonic_ns() }
    }

    /// From then on, on CLOCK_MONOTONIC.
    pub fn begin_at(&mut self, monotonic_ns: u64) {
        (self.since_monotonic_ns, self.since_unix_ns) = (monotonic_ns, clock::unix_ns_of(monotonic_ns));
    }

    /// When it began, on CLOCK_MONOTONIC.
    pub fn began_ns(&self) -> u64 {
        self.since_monotonic_ns
    }

    /// A snapshot of it, empty as yet. The next one begins now.
    pub fn end(&mut self, backend: &str) -> Snapshot {
        // What is gone by now does not run in the next span.
        self.symbols.list_code();
        let (now_monotonic_ns, now_unix_ns) = (clock::monotonic_ns(), clock::unix_ns());
        let mut snapshot = Snapshot::new(self.card.name, backend, &self.host, self.since_unix_ns);
        snapshot.pid_namespace = pid_namespace::own();
        snapshot.ended_ns = now_monotonic_ns;
        // It may begin a moment after attaching.
        snapshot.duration_ns = now_monotonic_ns.saturating_sub(self.since_monotonic_ns);
        self.symbols.span_ended(self.card.name, self.since_monotonic_ns);
        (self.since_monotonic_ns, self.since_unix_ns) = (now_monotonic_ns, now_unix_ns);
        snapshot
    }
}
