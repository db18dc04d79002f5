// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line as clap sees it. Each command's arguments stand with the command.

use clap::{Parser, Subcommand};

use crate::commands::{doctor, generate, inject, irqsoff, look, offcpu, selftest, sqpoll, timerlat, wq};

/// Tells why Linux is late: where work items, timers, interrupts and threads wait, for how long, and what made them wait.
///
/// Without a command, it takes one look at this machine with everything that it has.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, disable_help_subcommand = true, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub look: look::Arguments,
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
    Inject(inject::Arguments),
    Selftest(selftest::Arguments),
    Doctor(doctor::Arguments),
    #[command(hide = true)]
    Generate(generate::Arguments),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
