// SPDX-License-Identifier: MIT OR Apache-2.0
//! The interface of sources: a description, a way to attach, and snapshots from then on.

pub(crate) mod explain_budget;
pub(crate) mod floors;
pub mod session;

use std::ops::{Deref, DerefMut};

use whylate_model::{Card, LateEvent, Snapshot};

pub use crate::kernel::error::AttachError;
pub use crate::kernel::need::{BackendInfo, MapKind, Need};

use crate::kernel::attach::silence_libbpf;
use crate::source::session::Session;

/// A source with its own options, which attaches to the kernel and yields snapshots from then on.
pub trait Source {
    /// Returns the description of the source: its measurements and needs.
    fn info(&self) -> &'static SourceInfo;

    /// Sets the options common to all sources.
    fn ask(&mut self, asked: CommonOptions);

    /// Returns the needs of a backend for the requested measurement.
    fn needs(&self, backend: &'static BackendInfo) -> &'static [Need] {
        backend.needs
    }

    /// Returns when the source would use a backend for the requested measurement.
    fn takes(&self, _backend: &str) -> BackendUse {
        BackendUse::Automatic
    }

    /// Returns the backends that attaching would choose by itself, each with its needs for the requested measurement.
    fn automatic_backends(&self) -> Vec<BackendInfo> {
        let backends = self.info().backends.iter();
        let taken = backends.filter(|backend| self.takes(backend.name) == BackendUse::Automatic);
        taken.map(|backend| BackendInfo { needs: self.needs(backend), ..*backend }).collect()
    }

    /// Begins what takes long and needs nothing of other sources, on threads of its own. Is called for each of several
    /// sources before the first one is attached.
    fn prepare(&self, _session: &Session) {}

    /// Starts measuring.
    ///
    /// # Errors
    /// Fails if the kernel or the caller's privileges do not allow it; nothing stays attached then.
    fn attach(&self, session: &Session) -> Result<Measuring, AttachError>;
}

/// Condition under which a source uses a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendUse {
    /// Automatically, if the backend works and no better one does.
    Automatic,
    /// Only if the backend is named.
    Named,
    /// Never, as the backend does not support the request; names an alternative.
    Never(&'static str),
}

/// An attached source with its backend.
pub struct Measuring<A: Attached + ?Sized = dyn Attached> {
    /// The backend in use, as `--backend` takes it.
    pub backend: &'static str,
    /// Reason why no better backend is in use; `None` if this is the best.
    pub fallback_reason: Option<String>,
    /// The attached source.
    pub attached: Box<A>,
}

impl<A: Attached + ?Sized> Deref for Measuring<A> {
    type Target = A;

    fn deref(&self) -> &A {
        &self.attached
    }
}

impl<A: Attached + ?Sized> DerefMut for Measuring<A> {
    fn deref_mut(&mut self) -> &mut A {
        &mut self.attached
    }
}

/// Returns the backend that [`first_that_works`] would try first, if any.
pub(crate) fn first_candidate(source: &dyn Source, wanted: Option<&str>, session: &Session) -> Option<&'static str> {
    silence_libbpf();
    let wanted = wanted.filter(|&name| name != "auto");
    let is_candidate = |backend: &&'static BackendInfo| match source.takes(backend.name) {
        BackendUse::Never(_) => false,
        BackendUse::Named => wanted == Some(backend.name),
        BackendUse::Automatic => wanted.is_none_or(|name| name == backend.name),
    };
    let mut candidates = source.info().backends.iter().filter(is_candidate);
    candidates.find(|backend| session.lacks(source.needs(backend)).is_none()).map(|backend| backend.name)
}

/// Starts the best backend that works on this kernel, of those that the source uses for the request, or the named one.
/// The kernel is checked first for what a backend needs, as by `doctor`.
///
/// # Errors
/// Fails with the error of the last backend, or if the named one is unknown or cannot do what is requested.
pub(crate) fn first_that_works<A: Attached + ?Sized>(
    source: &dyn Source,
    wanted: Option<&str>,
    session: &Session,
    mut start: impl FnMut(&'static str) -> Result<Box<A>, AttachError>,
) -> Result<Measuring<A>, AttachError> {
    silence_libbpf();
    let (backends, wanted) = (source.info().backends, wanted.filter(|&name| name != "auto"));
    if let Some(name) = wanted.filter(|name| backends.iter().all(|backend| backend.name != *name)) {
        let known: Vec<&str> = backends.iter().map(|backend| backend.name).collect();
        return Err(AttachError::UnknownBackend { name: name.to_owned(), known: known.join(", ") });
    }
    let (mut refused, mut never) = (None, None);
    for backend in backends.iter().filter(|backend| wanted.is_none_or(|name| name == backend.name)) {
        match source.takes(backend.name) {
            BackendUse::Never(instead) => {
                never.get_or_insert(instead);
                continue;
            }
            BackendUse::Named if wanted.is_none() => continue,
            BackendUse::Named | BackendUse::Automatic => {}
        }
        let lacks = session.lacks(source.needs(backend));
        let is_lack = lacks.is_some();
        let outcome = lacks.map_or_else(|| start(backend.name), |lacks| Err(AttachError::Unsupported(lacks)));
        match outcome {
            Ok(attached) => {
                // An equivalent backend needs no reason if the other one is just missing.
                let reason = refused.filter(|(error, is_lack)| {
                    !(backend.limitations.is_empty() && (*is_lack || matches!(error, AttachError::NotPermitted)))
                });
                let fallback_reason = reason.map(|(error, _)| error.to_string());
                return Ok(Measuring { backend: backend.name, fallback_reason, attached });
            }
            // A failure says more than a fallback that is missing too.
            Err(_) if is_lack && matches!(refused, Some((_, false))) => {}
            Err(error) => refused = Some((error, is_lack)),
        }
    }
    Err(match (refused.map(|(error, _)| error), never) {
        // An error of an available backend speaks for itself.
        (Some(AttachError::Unsupported(lacks)), Some(instead)) => {
            AttachError::Unsupported(format!("{lacks}; {instead}"))
        }
        (Some(error), _) => error,
        (None, Some(instead)) => AttachError::Contradiction(instead.to_owned()),
        (None, None) => AttachError::Unsupported("there is no backend".to_owned()),
    })
}

/// An attached source. Dropping it detaches it and restores every kernel setting it changed.
pub trait Attached {
    /// Returns everything seen since the previous call, or since attaching. The caller drives the cadence.
    ///
    /// # Errors
    /// Fails if the kernel refuses to return the data.
    fn snapshot(&mut self) -> anyhow::Result<Snapshot>;

    /// Passes the late events that have come in to `each`, waiting at most `wait` for the first one.
    ///
    /// # Errors
    /// Fails if the kernel refuses to return the data.
    fn drain_late(&mut self, wait: std::time::Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()>;

    /// Passes to `each` the late events that a snapshot would explain and keep until the next [`Attached::drain_late`]: their
    /// paths take up to 150 KB each.
    ///
    /// # Errors
    /// Fails if the kernel refuses to return the data.
    fn explain_pending(&mut self, _each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        Ok(())
    }

    /// Whether tables of the programs may fill between two snapshots: `drain_late` is called several times a second
    /// then.
    fn fills_between_snapshots(&self) -> bool {
        false
    }

    /// Returns why there was nothing at all to measure, if so.
    fn sees_nothing(&self) -> Option<&str> {
        None
    }

    /// Returns the limitation of the requested measurement on this kernel, if any.
    fn limitations(&self) -> Option<&str> {
        None
    }

    /// Returns the CPUs excluded from measuring with threads or timers of this process, and how to measure these.
    fn left_out(&self) -> Option<&str> {
        None
    }

    /// Returns the choice made for this machine that makes values coarser, and how to change it, if any.
    fn chosen(&self) -> Option<&str> {
        None
    }
}

/// A source's description, the same on every machine.
#[derive(Debug)]
pub struct SourceInfo {
    /// Description of the source that is common to all parts of whylate.
    pub card: &'static Card,
    /// Backends, best first.
    pub backends: &'static [BackendInfo],
}

/// Options common to all sources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommonOptions {
    /// Emit a late event with its causes for each latency of at least this, in nanoseconds.
    pub explain_over_ns: Option<u64>,
    /// Emit a late event with its causes for each blocked wait of at least this that another thread held up, by sources
    /// that follow those.
    pub explain_held_up_over_ns: Option<u64>,
    /// Distinguish as many series as the source can without more programs.
    pub in_detail: bool,
    /// Measure at longer intervals and capture no user stacks, for a run without an end that reports no stacks, and
    /// whose other results are sums of many seconds.
    pub is_sparing: bool,
    /// Add to late events the evidence that their causes were derived from.
    pub keep_evidence: bool,
    /// Threads to measure, for sources that measure threads.
    pub threads: Threads,
}

/// Selects threads: those for which all of this holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Threads {
    /// Threads of this process.
    pub process: Option<u32>,
    /// Threads of this name, compared up to the kernel's length limit.
    pub name: Option<String>,
    /// Threads of processes of this name.
    pub process_name: Option<String>,
    /// Threads in the cgroup with this ID, or below it.
    pub cgroup: Option<u64>,
}

impl Threads {
    /// Selects all threads of one process.
    pub fn of_process(process: u32) -> Self {
        Threads { process: Some(process), ..Threads::default() }
    }
}
