// SPDX-License-Identifier: MIT OR Apache-2.0
//! Error of attaching to the kernel.

use thiserror::Error;

/// Why a source could not attach.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The caller lacks a privilege.
    #[error("not permitted (run as root, or grant CAP_BPF and CAP_PERFMON)")]
    NotPermitted,
    /// The kernel lacks a feature.
    #[error("{0}")]
    Unsupported(String),
    /// The request contradicts itself, or is invalid on any kernel.
    #[error("{0}")]
    Contradiction(String),
    /// The source has no backend of this name.
    #[error("no backend is named {name} (choose from: auto, {known})")]
    UnknownBackend {
        /// The requested name.
        name: String,
        /// The known names, separated by commas.
        known: String,
    },
    /// Loading or attaching failed for another reason.
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}
