// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate replay`: runs any command on a recording.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use whylate_model::units::printable;

use crate::cli::Origin;
use crate::cli::arguments::Within;
use crate::say::quoted;
use crate::store::play::Recording;

/// Show a recording with the overview or any other command, as if it were live
///
/// Times are in this system's time zone unless they are given with another one (TZ=UTC shows all in UTC).
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # the overview of all of it
    whylate replay web1.whylate
    # the overview of five minutes
    whylate replay web1.whylate --at 10:00..10:05
    # a table each minute
    whylate replay web1.whylate wq --table 60
    # late disk requests at one time
    whylate replay web1.whylate --at 'yesterday 03:12' block --why 20ms
    # a flame graph
    whylate replay web1.whylate offcpu -o sleep.svg")]
pub struct Arguments {
    /// A recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    within: Within,
    /// Replay at N times the original speed [default: as fast as it can be read]
    #[arg(long, value_name = "N", value_parser = speed)]
    speed: Option<f64>,
    /// Show the output of this command, with its options [default: the overview]
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

fn speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.trim_end_matches('x').parse().map_err(|_| "give a number, such as 10")?;
    if (0.01..=1e6).contains(&speed) { Ok(speed) } else { Err("give a number from 0.01 to 1000000".to_owned()) }
}

impl Arguments {
    /// Returns the recording as the origin of the command's data.
    pub fn origin(&self) -> Origin {
        let command = Some(self.own_words());
        Origin::Recording(Recording { path: self.file.clone(), span: self.within.span(), speed: self.speed, command })
    }

    /// Returns the command line of this process without the replayed command and without `--color`.
    fn own_words(&self) -> String {
        let words: Vec<OsString> = std::env::args_os().skip(1).collect();
        let mut shown = vec!["whylate".to_owned()];
        let mut own = words[..words.len().saturating_sub(self.command.len())].iter();
        while let Some(word) = own.next() {
            let word = word.to_string_lossy();
            if word == "--color" {
                own.next();
            } else if !word.starts_with("--color=") {
                shown.push(quoted(&printable(&word)));
            }
        }
        shown.join(" ")
    }
}
