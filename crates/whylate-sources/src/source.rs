// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every source is: a description, a way to attach, and snapshots from then on.

use std::ops::{Deref, DerefMut};

use thiserror::Error;
use whylate_model::{Card, LateEvent, Snapshot};

use crate::attach::silence_libbpf;
use crate::session::Session;

/// What attaches to the kernel and yields snapshots from then on: a source with its own options.
pub trait Source {
    /// What it measures and what it needs.
    fn info(&self) -> &'static SourceInfo;

    /// Sets what all sources understand.
    fn ask(&mut self, asked: Asked);

    /// What one of its backends needs for what the source is asked.
    fn needs(&self, backend: &'static BackendInfo) -> &'static [Need] {
        backend.needs
    }

    /// Whether it would use one of its backends for what it is asked.
    fn takes(&self, _backend: &str) -> Takes {
        Takes::Unasked
    }

    /// Starts measuring.
    ///
    /// # Errors
    /// When the kernel or the caller's privileges do not allow it; nothing stays attached then.
    fn attach(&self, session: &Session) -> Result<Measuring, AttachError>;
}

/// When a source uses a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// Wherever it works and no better one does.
    Unasked,
    /// Where it is named.
    Asked,
    /// It cannot do what is asked for; what to do instead.
    Never(&'static str),
}

/// A source that measures, in one way.
pub struct Measuring<A: Attached + ?Sized = dyn Attached> {
    /// The backend in use, as `--backend` takes it.
    pub backend: &'static str,
    /// Why a better one is not in use; `None` when this is the best.
    pub fallback_reason: Option<String>,
    /// What measures.
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

/// Starts the best backend that this kernel has and lets in, of those that the source uses for what it is asked, or
/// the one that is named. The kernel is asked first for what a backend needs, as `doctor` asks it.
///
/// # Errors
/// Those of the last backend, or when the one that is named is not known or cannot do what is asked for.
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
            Takes::Never(instead) => {
                never.get_or_insert(instead);
                continue;
            }
            Takes::Asked if wanted.is_none() => continue,
            Takes::Asked | Takes::Unasked => {}
        }
        let lacks = session.lacks(source.needs(backend));
        let is_lack = lacks.is_some();
        let outcome = lacks.map_or_else(|| start(backend.name), |lacks| Err(AttachError::Unsupported(lacks)));
        match outcome {
            Ok(attached) => {
                // One that is no worse needs no excuse where the other one is just not there.
                let told = refused.filter(|(error, is_lack)| {
                    !(backend.weaker.is_empty() && (*is_lack || matches!(error, AttachError::NotPermitted)))
                });
                let fallback_reason = told.map(|(error, _)| error.to_string());
                return Ok(Measuring { backend: backend.name, fallback_reason, attached });
            }
            // What goes wrong says more than that a fallback is not there either.
            Err(_) if is_lack && matches!(refused, Some((_, false))) => {}
            Err(error) => refused = Some((error, is_lack)),
        }
    }
    Err(match (refused.map(|(error, _)| error), never) {
        // One that fails is there, and says itself what is wrong.
        (Some(AttachError::Unsupported(lacks)), Some(instead)) => {
            AttachError::Unsupported(format!("{lacks}; {instead}"))
        }
        (Some(error), _) => error,
        (None, Some(instead)) => AttachError::Contradiction(instead.to_owned()),
        (None, None) => AttachError::Unsupported("there is no backend".to_owned()),
    })
}

/// A source that measures. Dropping it detaches it and restores every kernel setting it changed.
pub trait Attached {
    /// Everything seen since the previous call, or since attaching. The caller drives the cadence.
    ///
    /// # Errors
    /// When the kernel refuses to hand over what was gathered.
    fn snapshot(&mut self) -> anyhow::Result<Snapshot>;

    /// Hands over the late events that have come in, waiting at most `wait` for the first one.
    ///
    /// # Errors
    /// When the kernel refuses to hand over what was gathered.
    fn drain_late(&mut self, wait: std::time::Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()>;

    /// Whether tables of the programs may fill between two snapshots: `drain_late` is called some times a second then.
    fn fills_between_snapshots(&self) -> bool {
        false
    }

    /// Why there was nothing at all to measure, if there was not.
    fn sees_nothing(&self) -> Option<&str> {
        None
    }

    /// What cannot be told on this kernel of what was asked for, if anything.
    fn weaker(&self) -> Option<&str> {
        None
    }

    /// Which CPUs were left out that no thread or timer of this process measures, and how to measure them, if any.
    fn left_out(&self) -> Option<&str> {
        None
    }

    /// What was chosen for this machine and makes figures coarser, and how to have it otherwise, if anything.
    fn chosen(&self) -> Option<&str> {
        None
    }
}

/// A source's description, the same on every machine.
#[derive(Debug)]
pub struct SourceInfo {
    /// What everything that speaks of all sources knows of it.
    pub card: &'static Card,
    /// Its ways to measure, best first.
    pub backends: &'static [BackendInfo],
}

/// One way to measure.
#[derive(Debug)]
pub struct BackendInfo {
    /// Name, as `--backend` takes it.
    pub name: &'static str,
    /// What it needs of the kernel.
    pub needs: &'static [Need],
    /// What is weaker than with the best one; empty for the best.
    pub weaker: &'static str,
}

/// Something a backend needs of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Type information of the running kernel in `/sys/kernel/btf/vmlinux`.
    Btf,
    /// BPF programs on tracepoints with the kernel's types (`tp_btf`).
    TpBtfPrograms,
    /// A tracepoint, `group:name`.
    Tracepoint(&'static str),
    /// A tracepoint that few kernels have, and which do.
    RareTracepoint(&'static str, &'static str),
    /// A kernel function that BTF describes and at whose entry programs can run (`fentry`).
    Function(&'static str),
    /// This kernel version or later. Distributions backport, so a function that came with it tells, not the number.
    Since {
        /// The version.
        version: &'static str,
        /// The function, which no compiler inlines.
        function: &'static str,
    },
    /// A BPF map type.
    Map(MapKind),
    /// Threads have the kernel's own numbers for this process: it is in the first PID namespace.
    KernelsNumbers,
    /// /proc has the same numbers for processes as this one.
    Proc,
    /// One of ftrace's tracers.
    Tracer(&'static str),
}

/// The BPF map types in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    /// `BPF_MAP_TYPE_ARRAY`
    Array,
    /// `BPF_MAP_TYPE_RINGBUF`
    RingBuf,
    /// `BPF_MAP_TYPE_STACK_TRACE`
    StackTrace,
}

/// What all sources understand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Yield a late event with its causes for each latency of at least this.
    pub explain_over_ns: Option<u64>,
    /// The same of each wait for others of at least this that somebody held up, of sources that follow those.
    pub explain_held_up_over_ns: Option<u64>,
    /// Series tell as much apart as the source can without more programs.
    pub in_detail: bool,
    /// Late events also carry what their causes were told from.
    pub keep_evidence: bool,
    /// Whose latency, for sources that measure threads.
    pub threads: Threads,
}

/// Which threads a source is to measure: those for which all of this holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Threads {
    /// Of this process.
    pub process: Option<u32>,
    /// Of this name, without what the kernel cuts off.
    pub name: Option<String>,
    /// Of processes of this name.
    pub process_name: Option<String>,
    /// In the cgroup of this number, or below.
    pub cgroup: Option<u64>,
}

impl Threads {
    /// All of one process.
    pub fn of(process: u32) -> Self {
        Threads { process: Some(process), ..Threads::default() }
    }
}

/// Why a source could not attach.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The caller lacks a privilege.
    #[error("not permitted (run as root, or grant CAP_BPF and CAP_PERFMON)")]
    NotPermitted,
    /// The kernel lacks something.
    #[error("{0}")]
    Unsupported(String),
    /// What was asked for contradicts itself, or makes no sense on any kernel.
    #[error("{0}")]
    Contradiction(String),
    /// The backend's name is none of this source's.
    #[error("no backend is named {name} (choose from: auto, {known})")]
    UnknownBackend {
        /// What was asked for.
        name: String,
        /// What there is, separated by commas.
        known: String,
    },
    /// Loading or attaching failed for another reason.
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}
