// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate replay`: runs any command on a recording.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::cli::parser;
use crate::cli::{Origin, SUCCESS, perform, usage_status};
use crate::store::Span;
use crate::store::play::Recording;
use crate::store::times::{Given, given};

/// Show a recording as if it were live, as the overview or any other command
///
/// Times are in this system's time zone unless they name another one (TZ=UTC shows all in UTC).
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    whylate replay web1.whylate               # the overview of all of it
    whylate replay web1.whylate --from 10:00 --to 10:05
                                              # over five minutes
    whylate replay web1.whylate wq --table 60 # a table each minute
    whylate replay web1.whylate --at '2026-11-26 03:12' block --why 20ms
                                              # of one instant
    whylate replay web1.whylate offcpu -o sleep.svg
                                              # a flame graph")]
pub struct Arguments {
    /// A recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Start at this time, e.g. 10:00, 10m ago, yesterday 14:30 or 2026-11-26T10:00:00Z
    #[arg(long, value_name = "TIME", value_parser = given)]
    from: Option<Given>,
    /// End at this time
    #[arg(long, value_name = "TIME", value_parser = given)]
    to: Option<Given>,
    /// Only the snapshots at this time
    #[arg(long, value_name = "TIME", value_parser = given, conflicts_with_all = ["from", "to"])]
    at: Option<Given>,
    /// Replay at N times the original speed [default: as fast as it can be read]
    #[arg(long, value_name = "N", value_parser = speed)]
    speed: Option<f64>,
    /// The command to show output of, with its options; none for the overview
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

fn speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.trim_end_matches('x').parse().map_err(|_| "give a number, such as 10")?;
    if (0.01..=1e6).contains(&speed) { Ok(speed) } else { Err("give a number from 0.01 to 1000000".to_owned()) }
}

/// Shows the recording by the given command. Returns the exit status.
///
/// # Errors
/// Fails if the file is not a recording, or has no data for the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<u8> {
    let cli = match parser::parse_words(&arguments.command) {
        Ok(cli) => cli,
        Err(error) => {
            parser::print(&error)?;
            return Ok(if error.use_stderr() { usage_status() } else { SUCCESS });
        }
    };
    let span = match &arguments.at {
        Some(at) => Span { from: Some(at.clone()), to: Some(at.clone()) },
        None => Span { from: arguments.from.clone(), to: arguments.to.clone() },
    };
    let recording = Recording { path: arguments.file.clone(), span, speed: arguments.speed };
    perform(cli, &Origin::Recording(recording))
}
