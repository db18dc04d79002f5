// SPDX-License-Identifier: MIT OR Apache-2.0
//! One module per command: its arguments, and how it runs.

pub mod arguments;
pub mod block;
pub mod completions;
pub mod diff;
pub mod doctor;
mod exit_status;
pub mod export;
pub mod foreign;
pub mod generate;
pub mod help;
mod help_layout;
pub mod import;
pub mod inject;
pub mod irqsoff;
pub mod offcpu;
pub mod overview;
pub mod parser;
pub mod program;
pub mod record;
pub mod replay;
pub mod report;
pub mod run;
pub mod runner;
pub mod selftest;
pub mod serve;
pub mod sqpoll;
pub mod timerlat;
pub mod top;
pub mod values;
pub mod wq;

use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::CommandFactory as _;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use whylate_model::sources::{CARDS, TIMERLAT, named};
use whylate_sources::AttachError;
use whylate_sources::kernel::pid_namespace;
use whylate_sources::kernel::restore::{self, PutBack};

pub use exit_status::{FAILURE, LATE, SUCCESS, THRESHOLD_HIT};

use crate::cli::exit_status::{NOT_POSSIBLE, of_usage_error};
use crate::cli::parser::{Cli, Command, Refusal};
use crate::errors::what_to_do;
pub use crate::errors::{UsageError, existing};
use crate::render::text::fit::Fit;
use crate::render::{color, text};
use crate::store::play::Recording;

/// Origin of snapshots.
#[derive(Clone, Debug)]
pub enum Origin {
    /// This machine, now.
    Live,
    Recording(Recording),
}

impl Origin {
    pub fn is_live(&self) -> bool {
        matches!(self, Origin::Live)
    }
}

/// Restores kernel settings, and removes tracing instances and cgroups, left by a killed whylate.
fn recover() {
    let left = restore::recover();
    if left != PutBack::default() {
        say!(
            "whylate: an earlier whylate was killed: restored {} kernel settings and removed {} tracing instances and {} cgroups that it had left behind",
            left.settings,
            left.instances,
            left.cgroups
        );
    }
}

/// Runs a command and turns its error into one line on standard error and an exit status.
pub fn run(cli: Cli) -> ExitCode {
    color::set(cli.color.unwrap_or(color::When::Auto));
    if cli.help_lost {
        return end(help_lost().map(|()| SUCCESS));
    }
    if !matches!(cli.command, Some(Command::Generate(_) | Command::Help(_) | Command::Completions(_))) {
        recover();
    }
    if prints_numbers(cli.command.as_ref())
        && let Some(notice) = pid_namespace::notice()
    {
        say!("whylate: {notice}");
    }
    perform(cli, &Origin::Live)
}

/// Runs a command on this machine or on a recording.
fn perform(cli: Cli, origin: &Origin) -> ExitCode {
    // A replayed command may have the option, too.
    cli.color.into_iter().for_each(color::set);
    let Some(command) = cli.command else { return end(overview::run(&cli.look, origin)) };
    let usage = of_usage_error(matches!(command, Command::Timerlat(_)).then_some(TIMERLAT.name));
    let result = match command {
        Command::Wq(arguments) => wq::run(&arguments, origin),
        Command::Timerlat(arguments) => timerlat::run(&arguments, origin),
        Command::Irqsoff(arguments) => irqsoff::run(&arguments, origin),
        Command::Offcpu(arguments) => offcpu::run(&arguments, origin),
        Command::Sqpoll(arguments) => sqpoll::run(&arguments, origin),
        Command::Block(arguments) => block::run(&arguments, origin),
        Command::Top(arguments) => top::run(&arguments, origin).map(|()| SUCCESS),
        Command::Serve(arguments) => serve::run(&arguments, origin).map(|()| SUCCESS),
        _ if !origin.is_live() => {
            let known = "wq, timerlat, irqsoff, offcpu, sqpoll, block, top, serve, or none for the overview";
            Err(UsageError(anyhow!("that command cannot be replayed (choose from: {known})")).into())
        }
        Command::Record(arguments) => record::run(&arguments).map(|()| SUCCESS),
        Command::Replay(arguments) => return perform_on(&arguments),
        Command::Diff(arguments) => diff::run(&arguments).map(|()| SUCCESS),
        Command::Export(arguments) => export::run(&arguments).map(|()| SUCCESS),
        Command::Import(arguments) => import::run(&arguments).map(|()| SUCCESS),
        Command::Report(arguments) => report::run(&arguments).map(|()| SUCCESS),
        Command::Run(arguments) => run::run(&arguments),
        Command::Selftest(arguments) => selftest::run(&arguments),
        Command::Inject(arguments) => inject::run(&arguments).map(|()| SUCCESS),
        Command::Doctor(arguments) => doctor::run(&arguments).map(|()| SUCCESS),
        Command::Help(arguments) => help::run(&arguments, parser::command()).map(|()| SUCCESS),
        Command::Completions(arguments) => completions::run(&arguments, &Cli::command()).map(|()| SUCCESS),
        Command::Generate(arguments) => generate::run(&arguments, &Cli::command()).map(|()| SUCCESS),
    };
    end_with(result, usage)
}

/// Runs the command of `whylate replay` on its recording.
fn perform_on(replay: &replay::Arguments) -> ExitCode {
    match parser::parse_words(&replay.command) {
        Ok(cli) => perform(cli, &replay.origin()),
        Err(refusal) => refuse(&refusal.in_replay()),
    }
}

/// Prints help or a usage error. Help is not a failure, even if the reader has closed the pipe.
pub fn refuse(refusal: &Refusal) -> ExitCode {
    let printed = refusal.print().context("cannot write to standard output");
    if refusal.is_error() { ExitCode::from(refusal.status()) } else { end(printed.map(|()| refusal.status())) }
}

/// Returns whether the command prints PIDs and TIDs of this machine.
fn prints_numbers(command: Option<&Command>) -> bool {
    match command {
        None
        | Some(
            Command::Wq(_)
            | Command::Timerlat(_)
            | Command::Irqsoff(_)
            | Command::Offcpu(_)
            | Command::Sqpoll(_)
            | Command::Block(_)
            | Command::Record(_)
            | Command::Run(_)
            | Command::Top(_)
            | Command::Inject(_)
            | Command::Serve(_),
        ) => true,
        Some(Command::Selftest(arguments)) => !arguments.is_subject(),
        Some(Command::Report(arguments)) => arguments.is_live(),
        Some(
            Command::Replay(_)
            | Command::Diff(_)
            | Command::Export(_)
            | Command::Import(_)
            | Command::Doctor(_)
            | Command::Help(_)
            | Command::Completions(_)
            | Command::Generate(_),
        ) => false,
    }
}

/// Checks that a process exists, and returns its PID.
///
/// # Errors
/// Fails if the process does not exist, e.g. because a PID of another PID namespace is given.
fn present(pid: Option<u32>) -> anyhow::Result<Option<u32>> {
    let Some(wanted) = pid else { return Ok(None) };
    let known = i32::try_from(wanted).ok().and_then(Pid::from_raw).map(test_kill_process);
    match known {
        Some(Ok(()) | Err(Errno::PERM)) => Ok(pid),
        _ if pid_namespace::own().is_some() => {
            Err(UsageError(anyhow!("no process has the PID {wanted} here (give its PID in this PID namespace)")).into())
        }
        _ => Err(UsageError(anyhow!("no process has the PID {wanted} (give the PID of a running process)")).into()),
    }
}

/// Parses the arguments of a command.
#[cfg(test)]
pub(crate) fn parsed<'a, A: clap::Args>(words: impl IntoIterator<Item = &'a str>) -> Result<A, clap::Error> {
    let command = A::augment_args(clap::Command::new("whylate").no_binary_name(true));
    A::from_arg_matches(&command.try_get_matches_from(words)?)
}

/// Explains the reasons for lost events of the source on the command line, or of all sources.
fn help_lost() -> anyhow::Result<()> {
    let asked = std::env::args_os().find_map(|word| word.to_str().and_then(named));
    let mut out = Fit::stdout(true);
    text::lost::write(&mut out, asked.as_ref().map_or(&CARDS[..], std::slice::from_ref))?;
    Ok(out.flush()?)
}

/// Prints the error, if any, and returns the exit code.
pub fn end(result: anyhow::Result<u8>) -> ExitCode {
    end_with(result, of_usage_error(None))
}

/// Prints the error, if any, and returns the exit code, given the status of a usage error.
fn end_with(result: anyhow::Result<u8>, usage: u8) -> ExitCode {
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let message = format!("{error:#}");
            say!("whylate: {message}{}", what_to_do(&message));
            ExitCode::from(status_of(&error, usage))
        }
    }
}

/// Returns whether the reader of standard output has closed the pipe, which is a normal end.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe))
}

fn status_of(error: &anyhow::Error, usage: u8) -> u8 {
    match error.chain().find_map(|cause| cause.downcast_ref::<AttachError>()) {
        Some(AttachError::NotPermitted | AttachError::Unsupported(_)) => NOT_POSSIBLE,
        Some(AttachError::UnknownBackend { .. } | AttachError::Contradiction(_)) => usage,
        _ if error.chain().any(|cause| cause.is::<UsageError>()) => usage,
        _ => FAILURE,
    }
}
