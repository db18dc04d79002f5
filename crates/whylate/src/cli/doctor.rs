// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate doctor`: shows what this kernel supports.

use std::io::{self, BufWriter, Write};

use clap::Args;

use crate::render::text::fit::terminal_columns;
use crate::render::text::{doctor, doctor_json};

/// Show what this kernel can do, source by source, and what would enable more
///
/// Changes nothing and needs no privileges: what it cannot find out is shown as unknown, with the reason.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # what each source uses here, and what would make it better
    whylate doctor
    # the same, for a bug report
    whylate doctor --json")]
pub struct Arguments {
    /// Write one JSON object on one line.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let found = whylate_sources::probe();
    let mut out = BufWriter::new(io::stdout().lock());
    if arguments.json {
        doctor_json::write(&found, &mut out)?;
    } else {
        doctor::write(&found, terminal_columns(), &mut out)?;
    }
    out.flush()?;
    Ok(())
}
