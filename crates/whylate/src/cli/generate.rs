// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate generate`: writes the man pages and shell completions for `make install`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Command, CommandFactory, ValueEnum};
use clap_complete::{Generator as _, Shell};

use crate::cli::parser::Cli;

const NAME: &str = "whylate";
/// Man page of the file format: name and text.
const RECORDING_PAGE: (&str, &str) = ("whylate-recording.5", include_str!("../../../../docs/whylate-recording.5"));

/// Write the man pages or the shell completions, for packaging
#[derive(Debug, Args)]
pub struct Arguments {
    /// What to write
    #[arg(value_enum)]
    what: What,

    /// Directory to write to; created if it does not exist
    #[arg(long = "to", value_name = "DIR")]
    directory: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum What {
    /// One page for `whylate`, one for each command, and one for recordings
    Man,
    /// Completions for bash, zsh and fish
    Completions,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let directory = &arguments.directory;
    fs::create_dir_all(directory).with_context(|| format!("cannot create the directory {}", directory.display()))?;
    match arguments.what {
        What::Man => clap_mangen::generate_to(documented_command(), directory)
            .and_then(|()| fs::write(directory.join(RECORDING_PAGE.0), RECORDING_PAGE.1))
            .with_context(|| format!("cannot write the man pages to {}", directory.display()))?,
        What::Completions => write_completions(directory)?,
    }
    Ok(())
}

fn write_completions(directory: &Path) -> anyhow::Result<()> {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        // In memory, as clap_complete panics where it cannot write.
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut documented_command(), NAME, &mut text);
        fs::write(directory.join(shell.file_name(NAME)), text)
            .with_context(|| format!("cannot write the {shell} completions to {}", directory.display()))?;
    }
    Ok(())
}

/// Returns the command line without hidden commands: clap's completions would offer them, and clap cannot remove one.
fn documented_command() -> Command {
    let all = Cli::command();
    let mut shown = Command::new(NAME)
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .disable_help_subcommand(true)
        .subcommand_required(all.is_subcommand_required_set())
        .args(all.get_arguments().cloned())
        .subcommands(all.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
    if let Some(about) = all.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(about) = all.get_long_about() {
        shown = shown.long_about(about.clone());
    }
    if let Some(after) = all.get_after_help() {
        shown = shown.after_help(after.clone());
    }
    if let Some(after) = all.get_after_long_help() {
        shown = shown.after_long_help(after.clone());
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn generate(what: What) -> (tempfile::TempDir, BTreeSet<String>) {
        let parent = tempfile::tempdir().expect("a temporary directory");
        let directory = parent.path().join("made/on/demand");
        run(&Arguments { what, directory: directory.clone() }).expect("the files are written");
        let names = fs::read_dir(directory)
            .expect("the directory is there")
            .map(|file| file.expect("a file").file_name().to_string_lossy().into_owned())
            .collect();
        (parent, names)
    }

    #[test]
    fn every_visible_command_has_man_page() {
        let (_parent, pages) = generate(What::Man);
        assert!(pages.contains("whylate.1") && pages.contains(RECORDING_PAGE.0), "{pages:?}");
        for command in Cli::command().get_subcommands() {
            let page = format!("whylate-{}.1", command.get_name());
            assert_eq!(pages.contains(&page), !command.is_hide_set(), "{page} in {pages:?}");
        }
    }

    #[test]
    fn each_shell_has_completions_without_hidden_commands() {
        let (parent, names) = generate(What::Completions);
        assert_eq!(names.iter().map(String::as_str).collect::<Vec<_>>(), ["_whylate", "whylate.bash", "whylate.fish"]);
        for name in names {
            let text = fs::read_to_string(parent.path().join("made/on/demand").join(&name)).expect("a text file");
            assert!(text.contains("doctor"), "{name} offers no doctor");
            assert!(!text.contains("generate"), "{name} offers the hidden command");
        }
    }

    #[test]
    fn error_names_directory() {
        let error =
            run(&Arguments { what: What::Man, directory: "/dev/null/man".into() }).expect_err("not a directory");
        assert!(format!("{error:#}").starts_with("cannot create the directory /dev/null/man: "), "{error:#}");
    }
}
