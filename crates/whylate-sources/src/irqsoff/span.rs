// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPUs and the time that a snapshot is about.

use anyhow::Context as _;
use whylate_model::Snapshot;

use super::INFO;
use crate::source::AttachError;
use crate::{clock, cpus};

/// The CPUs that are asked for: all that are online where none is.
pub(super) fn wanted_cpus(asked: &[u32]) -> Result<Vec<u32>, AttachError> {
    let online = cpus::online().context("cannot tell which CPUs are online")?;
    if let Some(cpu) = asked.iter().find(|cpu| !online.contains(cpu)) {
        return Err(AttachError::Unsupported(format!("CPU {cpu} is not online: choose others")));
    }
    Ok(if asked.is_empty() { online } else { asked.to_vec() })
}

/// The time since the last snapshot.
#[derive(Debug)]
pub(super) struct Span {
    host: String,
    since_unix_ns: u64,
    since_monotonic_ns: u64,
}

impl Span {
    /// From now on.
    pub(super) fn begin() -> Self {
        Span {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            since_unix_ns: clock::unix_ns(),
            since_monotonic_ns: clock::monotonic_ns(),
        }
    }

    /// A snapshot of it, empty as yet. The next one begins now.
    pub(super) fn end(&mut self, backend: &str) -> Snapshot {
        let (now_monotonic_ns, now_unix_ns) = (clock::monotonic_ns(), clock::unix_ns());
        let mut snapshot = Snapshot::new(INFO.name, backend, &self.host, self.since_unix_ns);
        snapshot.duration_ns = now_monotonic_ns - self.since_monotonic_ns;
        (self.since_monotonic_ns, self.since_unix_ns) = (now_monotonic_ns, now_unix_ns);
        snapshot
    }
}
