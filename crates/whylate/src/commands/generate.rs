// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate generate`.

use clap::Args;

/// Placeholder.
#[derive(Debug, Args)]
pub struct Arguments {}

pub fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Ok(())
}
