// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resolves the CPUs to measure.

use anyhow::Context as _;

use crate::kernel::cpus;
use crate::source::AttachError;

/// Returns the requested CPUs, which must be online, or all online CPUs if none is requested.
pub(super) fn wanted_cpus(asked: &[u32]) -> Result<Vec<u32>, AttachError> {
    cpus::all_online(asked)?;
    Ok(if asked.is_empty() { cpus::online().context("cannot list the online CPUs")? } else { asked.to_vec() })
}
