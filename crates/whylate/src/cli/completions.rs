// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate completions`: completions for a shell, on standard output.

use std::io::{self, Write as _};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::cli::generate::completions;

/// Print the completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # for bash, until it exits
    source <(whylate completions bash)
    # for zsh, in a directory of its $fpath
    whylate completions zsh > ~/.zfunc/_whylate
    # for fish
    whylate completions fish > ~/.config/fish/completions/whylate.fish")]
pub struct Arguments {
    /// The shell to complete commands in
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completions of the command line `all`.
///
/// # Errors
/// Fails if the output cannot be written.
pub fn run(arguments: &Arguments, all: &Command) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(&completions(all, arguments.shell))?;
    Ok(out.flush()?)
}
