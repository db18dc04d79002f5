// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate generate`: writes the man pages and shell completions for `make install`.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, Command, ValueEnum};
use clap_complete::{Generator as _, Shell};
use clap_mangen::Man;
use whylate_model::sources::CARDS;

use crate::cli::exit_status;

const NAME: &str = "whylate";
/// Beginning of the examples in the help of a command. A comment precedes each command.
pub const EXAMPLES: &str = "examples:\n";
/// Date of the man pages: that of the last change of the command line.
const DATE: &str = "2026-12-01";
/// Maximum length of a line of a man page, in bytes.
const WIDTH: usize = 79;
/// Man page of the file format: name and text.
const RECORDING_PAGE: (&str, &str) = ("whylate-recording.5", include_str!("../../../../docs/whylate-recording.5"));

/// Environment variables.
const ENVIRONMENT: [(&str, &str); 4] = [
    ("NO_COLOR", "If set and not empty, nothing is colored."),
    ("TZ", "Time zone of the times that are read and printed."),
    ("LC_ALL, LC_CTYPE, LANG", "If the locale has UTF-8, the screen of whylate top draws with it."),
    ("WHYLATE_HOST", "Name of this machine in recordings and reports, instead of its host name."),
];
/// Files.
const FILES: [(&str, &str); 2] = [
    ("/run/whylate/", "Kernel settings that whylate has changed. If it is killed, the next whylate restores them."),
    (
        "/sys/kernel/tracing/instances/whylate\\-PID",
        "Tracing instance of a running whylate, where it uses the kernel's tracers.",
    ),
];

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

/// Writes the files for the command line `all`.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn run(arguments: &Arguments, all: &Command) -> anyhow::Result<()> {
    let directory = &arguments.directory;
    fs::create_dir_all(directory).with_context(|| format!("cannot create the directory {}", directory.display()))?;
    match arguments.what {
        What::Man => man_pages(all, directory)
            .and_then(|()| fs::write(directory.join(RECORDING_PAGE.0), RECORDING_PAGE.1))
            .with_context(|| format!("cannot write the man pages to {}", directory.display()))?,
        What::Completions => write_completions(all, directory)?,
    }
    Ok(())
}

/// Writes the man pages of all visible commands.
fn man_pages(all: &Command, directory: &Path) -> io::Result<()> {
    fn write(command: &Command, directory: &Path) -> io::Result<()> {
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            write(command, directory)?;
        }
        let page =
            Man::new(command.clone()).source(format!("whylate {}", env!("CARGO_PKG_VERSION"))).manual("User Commands");
        let name = page.get_filename();
        let title = name.trim_end_matches(".1").to_uppercase();
        let text = man_page(&page.title(title).date(DATE), command)?;
        fs::write(directory.join(name), tidy(&String::from_utf8_lossy(&text)))
    }
    let mut command = documented_command(all);
    command.build();
    write(&command, directory)
}

/// Returns the man page of a command: clap's text, and sections as in man-pages(7).
fn man_page(page: &Man, command: &Command) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    page.render_title(&mut out)?;
    page.render_name_section(&mut out)?;
    write_synopsis(&mut out, command)?;
    page.render_description_section(&mut out)?;
    page.render_options_section(&mut out)?;
    if command.get_subcommands().any(|command| !command.is_hide_set()) {
        page.render_subcommands_section(&mut out)?;
    }
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (examples, notes) = after.split_once("\n\n").unwrap_or((&after, ""));
    if !notes.is_empty() {
        writeln!(out, ".SH NOTES\n{}", escaped(notes))?;
    }
    writeln!(out, ".SH EXAMPLES\n.nf\n{}\n.fi", escaped(examples.strip_prefix(EXAMPLES).unwrap_or_default()))?;
    let path = command.get_bin_name().unwrap_or(NAME);
    let heads = |heading: &str, rows: &[(&str, &str)]| {
        let rows: String = rows.iter().map(|(head, text)| format!(".TP\n\\fB{head}\\fR\n{text}\n")).collect();
        format!(".SH {heading}\n{rows}")
    };
    out.extend(heads("EXIT STATUS", &exit_status::statuses_of(path.split(' ').nth(1).unwrap_or_default())).bytes());
    out.extend(heads("ENVIRONMENT", &ENVIRONMENT).bytes());
    out.extend(heads("FILES", &FILES).bytes());
    let parent = path.rsplit_once(' ').map_or(NAME, |(parent, _)| parent).replace(' ', "\\-");
    let children = command.get_subcommands().filter(|command| !command.is_hide_set());
    let children = children.map(|command| format!("{path} {}", command.get_name()).replace(' ', "\\-"));
    let mut others: Vec<String> = std::iter::once(parent).chain(children).filter(|other| *other != path).collect();
    others.sort();
    let others: String = others.iter().map(|other| format!(".BR {other} (1),\n")).collect();
    writeln!(out, ".SH SEE ALSO\n{others}.BR whylate\\-recording (5)")?;
    page.render_version_section(&mut out)?;
    Ok(out)
}

/// Makes a page as mandoc(1) wants it: without needless breaks, and with lines of at most 80 bytes outside of examples.
fn tidy(page: &str) -> String {
    let (mut tidy, mut is_filled) = (String::new(), true);
    for line in page.replace(".br\n\n.br\n", ".sp\n").replace("\n\n.br\n", "\n.sp\n").lines() {
        is_filled = line != ".nf" && (is_filled || line == ".fi");
        let mut width = 0;
        for word in line.split(' ') {
            let is_next = width > 0 && is_filled && !line.starts_with('.') && width + 1 + word.len() > WIDTH;
            match width {
                0 => {}
                _ if is_next => tidy.push('\n'),
                _ => tidy.push(' '),
            }
            if is_next {
                width = 0;
                // At the start of a line, these would begin a request.
                if word.starts_with(['.', '\'']) {
                    tidy.push_str("\\&");
                }
            }
            tidy.push_str(word);
            width += word.len() + 1;
        }
        tidy.push('\n');
    }
    tidy
}

/// Writes the synopsis, with the values of options.
fn write_synopsis(out: &mut dyn io::Write, command: &Command) -> io::Result<()> {
    let path = command.get_bin_name().unwrap_or(NAME);
    writeln!(out, ".SH SYNOPSIS\n\\fB{path}\\fR")?;
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let names = arg.get_value_names().unwrap_or_default();
        let names: Vec<String> = match arg.get_action().takes_values() {
            true if names.is_empty() => vec![arg.get_id().as_str().to_uppercase()],
            true => names.iter().map(ToString::to_string).collect(),
            false => Vec::new(),
        };
        let values: String = names.iter().map(|name| format!(" \\fI{}\\fR", escaped(name))).collect();
        let option = match (arg.get_short(), arg.get_long()) {
            (Some(short), _) => format!("\\fB\\-{short}\\fR{values}"),
            (None, Some(long)) => format!("\\fB{}\\fR{values}", escaped(&format!("--{long}"))),
            (None, None) => values.trim_start().to_owned(),
        };
        writeln!(out, "{}", if arg.is_required_set() { option } else { format!("[{option}]") })?;
    }
    if command.get_subcommands().any(|command| !command.is_hide_set()) {
        writeln!(out, ".br\n\\fB{path}\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR]")?;
    }
    Ok(())
}

/// Escapes text for roff: no character begins a request or is replaced.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    let lines: Vec<String> =
        text.lines().map(|line| format!("{}{line}", if line.starts_with('.') { "\\&" } else { "" })).collect();
    lines.join("\n")
}

fn write_completions(all: &Command, directory: &Path) -> anyhow::Result<()> {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        fs::write(directory.join(shell.file_name(NAME)), completions(all, shell))
            .with_context(|| format!("cannot write the {shell} completions to {}", directory.display()))?;
    }
    Ok(())
}

/// Returns the completions for a shell. In memory, as clap_complete panics where it cannot write.
pub fn completions(all: &Command, shell: Shell) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut completed_command(all), NAME, &mut text);
    text
}

/// Returns the command line without hidden commands.
fn documented_command(all: &Command) -> Command {
    let shown = Command::new(NAME)
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .disable_help_subcommand(true)
        .subcommand_required(all.is_subcommand_required_set())
        .args(all.get_arguments().cloned())
        .subcommands(all.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
    with_texts_of(all, shown)
}

fn with_texts_of(all: &Command, mut shown: Command) -> Command {
    if let Some(about) = all.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(about) = all.get_long_about() {
        shown = shown.long_about(about.clone());
    }
    if let Some(after) = all.get_after_help() {
        shown = shown.after_help(after.clone());
    }
    shown
}

/// Returns a name for a new command or option: clap takes only those that are never freed. The process ends soon.
fn kept(name: &str) -> &'static str {
    Box::leak(name.to_owned().into_boxed_str())
}

/// Returns the command line to complete.
fn completed_command(all: &Command) -> Command {
    let topics = all.get_subcommands().filter(|command| !command.is_hide_set()).map(|of| kept(of.get_name()));
    let topics: Vec<&str> = topics.chain(["lost"]).collect();
    let topics = PossibleValuesParser::new(topics);
    completed(all)
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .mut_subcommand("help", |help| help.mut_arg("topic", |topic| topic.value_parser(topics)))
}

/// Returns a command without hidden commands and options, which include former names: clap's completions would offer
/// them, and clap cannot remove one.
fn completed(all: &Command) -> Command {
    let shown = Command::new(kept(all.get_name()))
        .disable_help_subcommand(true)
        .args(all.get_arguments().filter(|arg| !arg.is_hide_set()).map(completed_arg))
        .subcommands(all.get_subcommands().filter(|command| !command.is_hide_set()).map(completed));
    with_texts_of(all, shown)
}

/// Returns an option without rules about other options, which may be hidden.
fn completed_arg(arg: &Arg) -> Arg {
    let mut shown = Arg::new(arg.get_id().clone())
        .action(arg.get_action().clone())
        .global(arg.is_global_set())
        .last(arg.is_last_set())
        .trailing_var_arg(arg.is_trailing_var_arg_set())
        .allow_hyphen_values(arg.is_allow_hyphen_values_set());
    if arg.get_action().takes_values() {
        shown = shown.value_parser(arg.get_value_parser().clone()).value_hint(arg.get_value_hint());
        if arg.get_id() == "sources" {
            shown = shown.value_parser(PossibleValuesParser::new(CARDS.map(|card| card.name)));
        }
        if let Some(names) = arg.get_value_names() {
            shown = shown.value_names(names.to_vec());
        }
        if let Some(count) = arg.get_num_args() {
            shown = shown.num_args(count);
        }
    }
    if let Some(short) = arg.get_short() {
        shown = shown.short(short);
    }
    if let Some(long) = arg.get_long() {
        shown = shown.long(kept(long));
    }
    if let Some(help) = arg.get_help() {
        shown = shown.help(help.clone());
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::parser::Cli;

    fn generate(what: What) -> (tempfile::TempDir, BTreeSet<String>) {
        let parent = tempfile::tempdir().expect("a temporary directory");
        let directory = parent.path().join("made/on/demand");
        run(&Arguments { what, directory: directory.clone() }, &Cli::command()).expect("the files are written");
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
    fn man_pages_have_the_usual_sections() {
        let (parent, pages) = generate(What::Man);
        for page in pages.iter().filter(|page| page.ends_with(".1")) {
            let text = fs::read_to_string(parent.path().join("made/on/demand").join(page)).expect("a text file");
            let sections =
                ["NAME", "SYNOPSIS", "OPTIONS", "EXAMPLES", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"];
            let at: Vec<_> = sections.iter().map(|name| text.find(&format!(".SH {name}\n"))).collect();
            assert!(at.iter().all(Option::is_some) && at.is_sorted(), "{page}: {at:?}");
            assert!(text.contains(".SH EXAMPLES\n.nf\n    # "), "{page}: {text}");
        }
        let wq = fs::read_to_string(parent.path().join("made/on/demand/whylate-wq.1")).expect("a text file");
        assert!(wq.contains("[\\fB\\-\\-why\\fR \\fITHRESHOLD\\fR]") && wq.contains("[\\fIINTERVAL\\fR]"), "{wq}");
        assert!(wq.contains("Color what is late"), "{wq}");
    }

    #[test]
    fn mandoc_finds_nothing_wrong_with_man_pages() {
        let (parent, pages) = generate(What::Man);
        let mut lint = std::process::Command::new("mandoc");
        lint.args(["-T", "lint"]).args(&pages).current_dir(parent.path().join("made/on/demand"));
        let Ok(output) = lint.output() else {
            println!("skipped: mandoc is not installed");
            return;
        };
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.is_empty(), "{said}");
    }

    #[test]
    fn long_lines_of_man_pages_are_wrapped() {
        let long = format!("{} .svg and more", "word ".repeat(15).trim_end());
        let page = format!("{long}\n.nf\n{long}\n.fi\nx\n.br\n\n.br\ny\n");
        let wrapped = long.replace(" .svg", "\n\\&.svg");
        assert_eq!(tidy(&page), format!("{wrapped}\n.nf\n{long}\n.fi\nx\n.sp\ny\n"));
    }

    #[test]
    fn each_shell_has_completions_without_hidden_commands() {
        let (parent, names) = generate(What::Completions);
        assert_eq!(names.iter().map(String::as_str).collect::<Vec<_>>(), ["_whylate", "whylate.bash", "whylate.fish"]);
        for name in names {
            let text = fs::read_to_string(parent.path().join("made/on/demand").join(&name)).expect("a text file");
            assert!(text.contains("doctor"), "{name} offers no doctor");
            for hidden in ["generate", "help-lost", "--perfetto", "--parquet"] {
                assert!(!text.contains(hidden), "{name} offers {hidden}, which is hidden");
            }
            // Topics of `whylate help`, and values of --sources.
            for offered in ["completions lost", "wq timerlat"] {
                assert!(text.contains(offered) || name != "whylate.bash", "{name} does not offer {offered}");
            }
        }
    }

    #[test]
    fn error_names_directory() {
        let arguments = Arguments { what: What::Man, directory: "/dev/null/man".into() };
        let error = run(&arguments, &Cli::command()).expect_err("not a directory");
        assert!(format!("{error:#}").starts_with("cannot create the directory /dev/null/man: "), "{error:#}");
    }
}
