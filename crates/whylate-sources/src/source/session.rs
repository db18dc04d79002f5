// SPDX-License-Identifier: MIT OR Apache-2.0
//! State that the sources of one run share, and the time span of a snapshot.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use whylate_model::{Card, Snapshot};

use crate::capabilities::KernelFacts;
use crate::cpu_account::SharedAccount;
use crate::kernel::clock;
use crate::kernel::cpu_choice::Choice;
use crate::kernel::distribution::{BucketPages, SharedPages};
use crate::kernel::host;
use crate::kernel::pid_namespace;
use crate::kernel::symbols::{KernelSymbols, ReadOnce};
use crate::source::explain_budget::ExplainBudget;
use crate::source::{AttachError, Need};

/// State that exists once, however many sources measure. The CPU account costs as much for several sources as for one;
/// the first source that needs it determines its timers, so one with heartbeats on each CPU comes first.
pub struct Session {
    host: String,
    /// Whether several sources measure.
    has_several: bool,
    account: Rc<SharedAccount>,
    /// Memory for histograms of sources with many series.
    pages: SharedPages,
    kernel: RefCell<Option<KernelFacts>>,
    symbols: KernelSymbols,
    explain_budget: ExplainBudget,
    /// `Some` until all sources are attached.
    read_once: RefCell<Option<ReadOnce>>,
    /// What sources have started before they are attached.
    prepared: RefCell<Vec<Box<dyn Any>>>,
}

impl Session {
    /// Creates a session of one source, which reports the costs and losses of its account.
    pub fn of_one() -> Self {
        Self::new(false, &[])
    }

    /// Creates a session of sources that are attached one after another: late events have causes from [`Session::begin`] on.
    pub fn of_several() -> Self {
        Self::of_several_on(&[])
    }

    /// Creates a session of several sources, with threads and timers on these CPUs; on the usable ones if empty.
    pub fn of_several_on(cpus: &[u32]) -> Self {
        Self::new(true, cpus)
    }

    fn new(has_several: bool, asked_cpus: &[u32]) -> Self {
        Session {
            host: host::name(),
            has_several,
            account: Rc::new(SharedAccount::new(has_several, asked_cpus)),
            pages: SharedPages::default(),
            kernel: RefCell::default(),
            symbols: KernelSymbols::default(),
            explain_budget: ExplainBudget::default(),
            read_once: RefCell::new(has_several.then(ReadOnce::begin)),
            prepared: RefCell::default(),
        }
    }

    /// Returns the same session for a source that attaches programs later.
    pub(crate) fn for_later(&self) -> Session {
        Session {
            host: self.host.clone(),
            has_several: self.has_several,
            account: Rc::clone(&self.account),
            pages: SharedPages::default(),
            kernel: RefCell::default(),
            symbols: self.symbols(),
            explain_budget: self.explain_budget.clone(),
            read_once: RefCell::default(),
            prepared: RefCell::default(),
        }
    }

    /// Takes over what sources have started with another session.
    pub fn take_over(&self, before: &Session) {
        self.prepared.borrow_mut().append(&mut before.prepared.borrow_mut());
        self.pages.take_over(&before.pages);
    }

    /// Keeps what a source has started until it is attached.
    pub(crate) fn keep_prepared<T: 'static>(&self, prepared: T) {
        self.prepared.borrow_mut().push(Box::new(prepared));
    }

    /// Returns what a source has started, if it has, by its type.
    pub(crate) fn take_prepared<T: 'static>(&self) -> Option<T> {
        let mut prepared = self.prepared.borrow_mut();
        let at = prepared.iter().position(|of| of.is::<T>())?;
        prepared.swap_remove(at).downcast().ok().map(|of| *of)
    }

    /// Returns whether several sources measure.
    pub(crate) fn has_several(&self) -> bool {
        self.has_several
    }

    /// Returns the host name of the machine.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the CPUs that are measured with threads or timers of this process: those requested of a source, or those
    /// of the session. All sources get the same answer, which is determined before the first thread or timer starts.
    ///
    /// # Errors
    /// Fails if a requested CPU cannot be used, or the kernel does not list its CPUs.
    pub fn cpus(&self, asked: &[u32]) -> Result<Rc<Choice>, AttachError> {
        self.account.cpus(asked)
    }

    /// Limits the CPU time for explaining late events to a share of the machine, in parts per million. Events beyond the
    /// limit count as unexplained. By default there is no limit.
    pub fn limit_explaining(&self, share_ppm: u32) {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        self.explain_budget.limit(share_ppm, cpus);
    }

    /// Returns the budget for explanations, which all sources share.
    pub(crate) fn explain_budget(&self) -> ExplainBudget {
        self.explain_budget.clone()
    }

    /// Returns the CPU account of the session.
    pub(crate) fn account(&self) -> &SharedAccount {
        &self.account
    }

    /// Returns the memory for histograms of a source that needs `pages`.
    pub(crate) fn pages(&self, pages: u32) -> Result<BucketPages, AttachError> {
        if self.has_several { self.pages.lend(pages) } else { Ok(BucketPages::of_one(pages)) }
    }

    /// Returns the names of kernel addresses, which are read once.
    pub(crate) fn symbols(&self) -> KernelSymbols {
        self.symbols.shared()
    }

    /// Returns a need that this kernel surely does not meet. Facts about the kernel are determined once.
    pub(crate) fn lacks(&self, needs: &[Need]) -> Option<String> {
        let mut known = self.kernel.borrow_mut();
        let lacks = known.get_or_insert_with(KernelFacts::here).lacks(needs);
        // The kernel's BTF takes megabytes, and is not kept while the next programs are loaded.
        if lacks.is_none() && !self.has_several {
            *known = None;
        }
        lacks
    }

    /// Starts the account, once all sources are attached.
    ///
    /// # Errors
    /// Fails if the kernel refuses a BPF program.
    pub fn begin(&self) -> Result<(), AttachError> {
        *self.kernel.borrow_mut() = None;
        self.pages.close();
        // The symbols are read again: they now include the programs that were attached since.
        self.symbols.find_fixed_code();
        *self.read_once.borrow_mut() = None;
        self.account.begin()
    }

    /// Detaches the account before sources are dropped. Then the kernel does not wait for programs of theirs that the
    /// account called.
    pub fn end(&self) {
        self.account.end();
    }

    /// Returns the number of events that the account has lost since the last call, by reason.
    pub fn take_lost(&self) -> BTreeMap<String, u64> {
        self.account.take_lost()
    }
}

/// Time since the last snapshot of a source.
pub(crate) struct Span {
    card: &'static Card,
    symbols: KernelSymbols,
    host: String,
    since_unix_ns: u64,
    since_monotonic_ns: u64,
}

impl Span {
    /// Starts now.
    pub fn begin(card: &'static Card, session: &Session) -> Self {
        let host = session.host.clone();
        let symbols = session.symbols();
        Span { card, symbols, host, since_unix_ns: clock::unix_ns(), since_monotonic_ns: clock::monotonic_ns() }
    }

    /// Restarts at `monotonic_ns` (CLOCK_MONOTONIC).
    pub fn begin_at(&mut self, monotonic_ns: u64) {
        (self.since_monotonic_ns, self.since_unix_ns) = (monotonic_ns, clock::unix_ns_of(monotonic_ns));
    }

    /// Returns the start on CLOCK_MONOTONIC.
    pub fn began_ns(&self) -> u64 {
        self.since_monotonic_ns
    }

    /// Ends the span and starts the next one now. Returns a snapshot without series.
    pub fn end(&mut self, backend: &str) -> Snapshot {
        // Code that is unloaded by now does not run in the next span.
        self.symbols.list_code();
        let (now_monotonic_ns, now_unix_ns) = (clock::monotonic_ns(), clock::unix_ns());
        let mut snapshot = Snapshot::new(self.card.name, backend, &self.host, self.since_unix_ns);
        snapshot.pid_namespace = pid_namespace::own();
        snapshot.ended_ns = now_monotonic_ns;
        // The span may start a little after attaching.
        snapshot.duration_ns = now_monotonic_ns.saturating_sub(self.since_monotonic_ns);
        self.symbols.span_ended(self.card.name, self.since_monotonic_ns);
        (self.since_monotonic_ns, self.since_unix_ns) = (now_monotonic_ns, now_unix_ns);
        snapshot
    }
}
