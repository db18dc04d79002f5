// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line for clap. The arguments of each command are in the module of the command.

use std::ffi::OsString;
use std::io::{self, Write as _};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use whylate_model::sources;
use whylate_model::units::is_printable;

use crate::cli::{
    block, diff, doctor, export, generate, inject, irqsoff, offcpu, overview, record, replay, report, run, selftest,
    sqpoll, timerlat, top, wq,
};

/// Shows why Linux is late: which work items, timers, interrupts and threads wait, for how long, and who made them
/// wait.
///
/// Without a command, it watches this machine for 10 s with every available source; with -p, --comm or --cgroup, it
/// shows what one program does with its time.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub look: overview::Arguments,
    /// Explain each reason for lost events (`lost: ...`), of this source or of all
    #[arg(long, global = true)]
    pub help_lost: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Wq(wq::Arguments),
    Timerlat(Box<timerlat::Arguments>),
    Irqsoff(irqsoff::Arguments),
    Offcpu(Box<offcpu::Arguments>),
    Sqpoll(sqpoll::Arguments),
    Block(block::Arguments),
    Top(Box<top::Arguments>),
    Run(run::Arguments),
    Record(record::Arguments),
    Replay(replay::Arguments),
    Diff(Box<diff::Arguments>),
    Export(export::Arguments),
    Report(report::Arguments),
    Inject(inject::Arguments),
    Selftest(selftest::Arguments),
    Doctor(doctor::Arguments),
    #[command(hide = true)]
    Generate(generate::Arguments),
}

/// Help template with the examples before the list of options.
const EXAMPLES_FIRST: &str = "{about}{after-help}\n\n{usage-heading} {usage}\n\n{all-args}";
/// Commands that are not sources, grouped for the help.
const OTHERS: [(&str, &[&str]); 5] = [
    ("Live screen", &["top"]),
    ("Programs", &["run"]),
    ("Recordings", &["record", "replay", "report", "diff", "export"]),
    ("Proof", &["selftest", "inject"]),
    ("Machine", &["doctor"]),
];

pub fn parse() -> Result<Cli, clap::Error> {
    arranged(Cli::command()).try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches))
}

/// Parses the command that `whylate replay` shows a recording as.
pub fn parse_words(words: &[OsString]) -> Result<Cli, clap::Error> {
    let line = std::iter::once(OsString::from("whylate")).chain(words.iter().cloned());
    arranged(Cli::command()).try_get_matches_from(line).and_then(|matches| Cli::from_arg_matches(&matches))
}

/// Prints help or a usage error. Escapes words of the command line that are not printable.
///
/// # Errors
/// Fails if the output cannot be written.
pub fn print(error: &clap::Error) -> io::Result<()> {
    let is_safe = |word: OsString| word.to_string_lossy().chars().all(is_printable);
    if error.use_stderr() && !std::env::args_os().all(is_safe) {
        error.render().to_string().lines().for_each(|line| say!("{line}"));
        return Ok(());
    }
    error.print().and_then(|()| io::stdout().flush())
}

/// Adds help templates: commands in groups, and each command's examples before its options.
fn arranged(command: clap::Command) -> clap::Command {
    let line = |command: &clap::Command| {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        format!("  {:<10} {about}\n", command.get_name())
    };
    let shown = || command.get_subcommands().filter(|command| !command.is_hide_set());
    let mut groups = "Look:\n  (none)     Watch this machine for 10 s with every available source\n  \
                      -p PID     Show what a program does with its time (also --comm, --cgroup)\n"
        .to_owned();
    groups += "\nSources:\n";
    groups.extend(shown().filter(|command| sources::named(command.get_name()).is_some()).map(line));
    for (heading, names) in OTHERS {
        groups += &format!("\n{heading}:\n");
        groups.extend(names.iter().filter_map(|name| command.find_subcommand(name)).map(line));
    }
    let template = format!("{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}\nOptions:\n{{options}}");
    command.help_template(template).mut_subcommands(with_examples_first)
}

fn with_examples_first(command: clap::Command) -> clap::Command {
    let has_examples = command.get_after_help().is_some_and(|help| help.to_string().starts_with("examples:"));
    let command = if has_examples { command.help_template(EXAMPLES_FIRST) } else { command };
    command.disable_help_subcommand(true).mut_subcommands(with_examples_first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn rejects_import_options_with_command() {
        let accepts = |line: &str| Cli::try_parse_from(line.split(' ')).is_ok();
        for line in
            ["run true", "run --help-lost", "run --import x --pid 5", "run --import x --comm y", "run true --pid 5"]
        {
            assert!(accepts(&format!("whylate {line}")), "{line}");
        }
        for line in
            ["run", "run --pid 5", "run --pid 5 true", "run --comm x -- true", "run --import x --pid 5 --comm y"]
        {
            assert!(!accepts(&format!("whylate {line}")), "{line}");
        }
    }

    #[test]
    fn rejects_by_without_ranking() {
        let accepts = |line: &str| Cli::try_parse_from(line.split(' ')).is_ok();
        for line in ["-d 1s --by cgroup", "sqpoll --why 1ms --by cgroup", "-p 1", "sqpoll"] {
            assert!(accepts(&format!("whylate {line}")), "{line}");
        }
        for line in ["-p 1 --by cgroup", "--comm x --by culprit", "--cgroup /x --by cgroup", "sqpoll --by cgroup"] {
            assert!(!accepts(&format!("whylate {line}")), "{line}");
        }
    }

    #[test]
    fn every_command_is_in_a_help_group() {
        let help = arranged(Cli::command()).render_help().to_string();
        for command in Cli::command().get_subcommands() {
            let lines = help.lines().filter(|line| line.split_whitespace().next() == Some(command.get_name()));
            assert_eq!(lines.count(), usize::from(!command.is_hide_set()), "{}: {help}", command.get_name());
        }
    }

    #[test]
    fn help_of_each_command_starts_with_examples() {
        fn check(command: &mut clap::Command) {
            for command in
                command.get_subcommands_mut().filter(|command| !command.is_hide_set() && command.get_name() != "help")
            {
                let help = command.render_help().to_string();
                let (examples, usage) = (help.find("examples:"), help.find("Usage:"));
                assert!(examples.is_some() && examples < usage, "{help}");
                check(command);
            }
        }
        let mut command = arranged(Cli::command());
        command.build();
        check(&mut command);
    }
}
