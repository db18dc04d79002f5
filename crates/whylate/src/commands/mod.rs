// SPDX-License-Identifier: MIT OR Apache-2.0
//! One module a command: its arguments and what it does.

pub mod doctor;
pub mod generate;
pub mod inject;
pub mod watch;
pub mod wq;

use std::error::Error;
use std::fmt;
use std::io;
use std::process::ExitCode;

use whylate_sources::AttachError;

use crate::cli::Command;

/// Exit status of a run that failed.
const FAILURE: u8 = 1;
/// Exit status of a command line that makes no sense.
pub const USAGE: u8 = 2;
/// Exit status where the machine or the caller's privileges do not allow it.
const NOT_POSSIBLE: u8 = 3;

/// Arguments that are sound one by one, and make no sense together.
#[derive(Debug)]
pub struct Senseless(pub anyhow::Error);

impl fmt::Display for Senseless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Senseless {}

/// Runs a command and turns its error into one line on standard error and an exit status.
pub fn run(command: Command) -> ExitCode {
    let result = match command {
        Command::Wq(arguments) => wq::run(&arguments),
        Command::Inject(arguments) => inject::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("whylate: {error:#}");
            ExitCode::from(exit_status(&error))
        }
    }
}

/// True when whoever read our output has had enough, which is a normal end.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe))
}

fn exit_status(error: &anyhow::Error) -> u8 {
    match error.chain().find_map(|cause| cause.downcast_ref::<AttachError>()) {
        Some(AttachError::NotPermitted | AttachError::Unsupported(_)) => NOT_POSSIBLE,
        Some(AttachError::UnknownBackend { .. }) => USAGE,
        _ if error.chain().any(|cause| cause.is::<Senseless>()) => USAGE,
        _ => FAILURE,
    }
}
