// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate`: tells why Linux is late.

mod cli;
mod commands;
mod output;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no failures; a closed pipe does not matter for them either.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { commands::usage_status() } else { 0 });
        }
    };
    commands::run(cli)
}
