// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate help`: the help of a command, or the reasons for lost events.

use std::io::Write as _;

use anyhow::anyhow;
use clap::{Args, Command};
use whylate_model::sources::{CARDS, named};

use crate::cli::{UsageError, foreign};
use crate::render::text::fit::Fit;
use crate::render::text::lost;

/// Show the help of a command, or explain the reasons for lost events
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # options and examples of a command
    whylate help offcpu
    # what `lost: 2 unmatched` means, by source
    whylate help lost
    # the reasons of one source
    whylate help lost wq")]
pub struct Arguments {
    /// A command, or `lost`, optionally followed by a source
    #[arg(value_name = "TOPIC")]
    topic: Vec<String>,
}

/// Prints the help of a part of the command line `all`.
///
/// # Errors
/// Fails if there is no such topic, or the output cannot be written.
pub fn run(arguments: &Arguments, mut all: Command) -> anyhow::Result<()> {
    let topic: Vec<&str> = arguments.topic.iter().map(String::as_str).collect();
    let missing = || match topic.first().and_then(|name| foreign::advice(name)) {
        Some(advice) => UsageError(anyhow!(advice)),
        None => UsageError(anyhow!("there is no help on {} (see `whylate --help`)", topic.join(" "))),
    };
    let mut out = Fit::stdout(matches!(topic[..], ["lost", ..]));
    match topic[..] {
        ["lost"] => lost::write(&mut out, &CARDS)?,
        ["lost", source] => lost::write(&mut out, &[named(source).ok_or_else(missing)?])?,
        _ => {
            all.build();
            let mut command = &mut all;
            for name in &topic {
                command = command.find_subcommand_mut(name).ok_or_else(missing)?;
            }
            write!(out, "{}", command.render_long_help())?;
        }
    }
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::parser::Cli;

    #[test]
    fn help_on_another_tool_names_the_command() {
        let refused = |topic: &str| {
            let arguments = Arguments { topic: vec![topic.to_owned()] };
            run(&arguments, Cli::command()).map_err(|error| error.to_string()).expect_err("no such command")
        };
        assert!(refused("offcputime").contains("use `whylate offcpu"), "{}", refused("offcputime"));
        assert_eq!(refused("nonsense"), "there is no help on nonsense (see `whylate --help`)");
    }
}
