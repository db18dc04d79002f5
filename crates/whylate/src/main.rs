// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate`: shows why Linux is slow or late.

// `eprintln!` panics if standard error cannot be written; `say!` does not.
#![deny(clippy::print_stderr)]

#[macro_use]
mod say;

mod cli;
mod engine;
mod errors;
mod files;
mod json;
mod render;
mod serve;
mod store;
mod terminal;
mod top;

use std::process::ExitCode;

use anyhow::Context as _;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use whylate_sources::kernel::credentials::keep_capabilities;
use whylate_sources::kernel::memory::{Memory, limit_kept};

#[global_allocator]
static MEMORY: Memory = Memory;

/// Raises the soft limit on open files to the hard one: some sources need several descriptors per CPU. The usual soft
/// limit of 1024 is only for programs that use select(2).
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, running out of descriptors is reported later.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn main() -> ExitCode {
    limit_kept();
    let cli = match cli::parser::parse() {
        Ok(cli) => cli,
        Err(refusal) => return cli::refuse(&refusal),
    };
    // No child process needs capabilities: neither the command of `run`, nor the shells of `timerlat`, nor fio.
    if let Err(error) = keep_capabilities() {
        return cli::end(Err(error).context("cannot clear the inheritable capabilities"));
    }
    // The command of `run` must inherit the original limit.
    if !matches!(cli.command, Some(cli::parser::Command::Run(_))) {
        allow_descriptors();
    }
    cli::run(cli)
}
