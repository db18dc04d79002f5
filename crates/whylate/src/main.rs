// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate`: tells why Linux is late.

// Who cannot be told anything is no reason to panic: `say!` does not.
#![deny(clippy::print_stderr)]

#[macro_use]
mod say;

mod arguments;
mod cli;
mod commands;
mod export;
mod files;
mod output;
mod recording;
mod report;
mod top;
mod values;

use std::process::ExitCode;

use anyhow::Context as _;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use whylate_sources::credentials::keep_capabilities;
use whylate_sources::memory::Memory;

#[global_allocator]
static MEMORY: Memory = Memory;

/// Some sources have several descriptors per CPU, and the usual limit of 1024 is kept for programs that use select(2).
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // Where it is refused, whoever runs out of descriptors says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn main() -> ExitCode {
    let cli = match cli::parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no failures; a closed pipe does not matter for them either.
            let printed = cli::print(&error).map_err(anyhow::Error::from);
            return match error.use_stderr() {
                true => ExitCode::from(commands::usage_status()),
                false => commands::end(printed.context("cannot write to standard output").map(|()| commands::SUCCESS)),
            };
        }
    };
    // Nothing that whylate starts needs them: not the command of `run`, no shell of `timerlat`, no fio.
    if let Err(error) = keep_capabilities() {
        return commands::end(Err(error).context("cannot clear the inheritable capabilities"));
    }
    // A command that is run has its own limit.
    if !matches!(cli.command, Some(cli::Command::Run(_))) {
        allow_descriptors();
    }
    commands::run(cli)
}
