// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate doctor`.

use clap::Args;

/// Placeholder.
#[derive(Debug, Args)]
pub struct Arguments {}

pub fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Ok(())
}
