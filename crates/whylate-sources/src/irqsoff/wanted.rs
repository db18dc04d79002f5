// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resolves the CPUs to measure.

use anyhow::Context as _;

use crate::kernel::cpus;
use crate::source::AttachError;

/// Returns the requested CPUs, which must be online, or all online CPUs if none is requested.
pub(super) fn wanted_cpus(asked: &[u32]) -> Result<Vec<u32>, AttachError> {
    let online = cpus::online().context("cannot list the online CPUs")?;
    if let Some(cpu) = asked.iter().find(|cpu| !online.contains(cpu)) {
        return Err(AttachError::Contradiction(format!("CPU {cpu} is not online: choose others")));
    }
    Ok(if asked.is_empty() { online } else { asked.to_vec() })
}
