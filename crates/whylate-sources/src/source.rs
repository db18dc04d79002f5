// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every source is: a description, a way to attach, and snapshots from then on.

use thiserror::Error;
use whylate_model::{Card, LateEvent, Snapshot};

use crate::session::Session;

/// What attaches to the kernel and yields snapshots from then on: a source with its own options.
pub trait Source {
    /// What it measures and what it needs.
    fn info(&self) -> &'static SourceInfo;

    /// Sets what all sources understand.
    fn ask(&mut self, asked: &Asked);

    /// Starts measuring.
    ///
    /// # Errors
    /// When the kernel or the caller's privileges do not allow it; nothing stays attached then.
    fn attach(&self, session: &Session) -> Result<Box<dyn Attached>, AttachError>;
}

/// A source that measures. Dropping it detaches it and restores every kernel setting it changed.
pub trait Attached {
    /// The backend in use, and why it is not a better one.
    fn backend(&self) -> Backend<'_>;

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

    /// Why there was nothing at all to measure, if there was not.
    fn sees_nothing(&self) -> Option<&str> {
        None
    }

    /// What cannot be told on this kernel of what was asked for, if anything.
    fn weaker(&self) -> Option<&str> {
        None
    }

    /// What was chosen for this machine and makes figures coarser, and how to have it otherwise, if anything.
    fn chosen(&self) -> Option<&str> {
        None
    }
}

/// The way a source measures on this kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend<'a> {
    /// Its name, as `--backend` takes it.
    pub name: &'a str,
    /// Why a better one is not in use; `None` when this is the best.
    pub fallback_reason: Option<&'a str>,
}

/// A source's description, the same on every machine.
#[derive(Debug)]
pub struct SourceInfo {
    /// What everything that speaks of all sources knows of it.
    pub card: &'static Card,
    /// Its ways to measure, best first.
    pub backends: &'static [BackendInfo],
    /// Those of them that plain use never takes by itself.
    pub only_asked: &'static [&'static str],
}

impl SourceInfo {
    /// Whether plain use takes this backend where it can.
    pub fn takes_unasked(&self, backend: &str) -> bool {
        !self.only_asked.contains(&backend)
    }
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
    /// A kernel function that BTF describes and at whose entry programs can run (`fentry`).
    Function(&'static str),
    /// This kernel version or a later one. Distributions port changes back, so a function that came with it tells, not the number.
    Since {
        /// The version.
        version: &'static str,
        /// The function, which no compiler inlines.
        function: &'static str,
    },
    /// A BPF map type.
    Map(MapKind),
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
    /// Late events also carry what their causes were told from.
    pub keep_evidence: bool,
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
