// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate import`: shows what other tools have recorded. `irqsoff --import`, `run --import` and `offcpu import` call
//! its parts.

pub mod interrupts;
pub mod stacks;
pub mod switches;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use whylate_model::sniff::{Content, HEAD_BYTES, Sniffed, sniff};
use whylate_model::units::printable;

use crate::cli::arguments::Verbosity;
use crate::cli::values::{duration_ns, pid};
use crate::cli::{UsageError, existing};

/// Show what another tool has recorded: traces or stacks
///
/// whylate recognizes the format: text of ftrace (trace, trace_pipe, latency traces), trace-cmd report, perf script,
/// procstat -ka, /proc/PID/stack or folded stacks, also if it was pasted from mails, web pages or logs.
#[derive(Debug, Args)]
#[command(
    mut_arg("verbose", |verbose| verbose.help("Print all rows, the five longest waits, and lost events by reason (traces only)")),
    after_help = "\
examples:
    # a latency trace of ftrace, or a capture of trace_pipe
    whylate import trace.txt
    # the critical path of a command that perf has recorded
    perf script --show-lost-events | whylate import - --comm make
    # its critical path as a flame graph
    whylate import perf.txt --comm make -o path.svg
    # a line for each time that interrupts were off for 1 ms or longer
    whylate import trace_pipe.txt --slower 1ms
    # two samples of FreeBSD's `procstat -ka`, as a flame graph
    whylate import 1.txt 2.txt -o sleep.svg
    # merged by where threads wait
    whylate import --by stack --leaf-first 1.txt -o leaves.svg"
)]
pub struct Arguments {
    /// A trace, or files of stacks, each of which is a sample; - for standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Read the file as this kind, instead of recognizing it
    #[arg(long = "as", value_enum, value_name = "CONTENT")]
    content: Option<As>,
    /// Write stacks, or the path of a command, to a file: .svg or .folded; of a path also .trace.json
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// Print one JSON object (traces only)
    #[arg(long)]
    json: bool,
    /// Explain the thread with this TID, instead of the first one that executes a program (context switches only)
    #[arg(long, value_parser = pid, conflicts_with = "comm")]
    pid: Option<u32>,
    /// Explain the thread with this name (context switches only)
    #[arg(long, value_name = "NAME")]
    comm: Option<String>,
    /// Print each section of at least this length, e.g. 1ms (interrupts only)
    #[arg(long, value_name = "LENGTH", value_parser = duration_ns)]
    slower: Option<u64>,
    /// Print the N longest sections with their stacks (interrupts only) [default: 1, or none with --slower]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    worst: Option<u16>,
    /// Print a histogram of lengths per culprit (interrupts only)
    #[arg(long)]
    histogram: bool,
    #[command(flatten)]
    verbosity: Verbosity,
    #[command(flatten)]
    layout: stacks::Layout,
}

/// Content that a file is read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum As {
    /// Sections with interrupts or preemption off, handlers and hrtimers, as `irqsoff` shows them
    Interrupts,
    /// Context switches: the critical path of a command, as `run` shows it
    Switches,
    /// Stacks of waiting threads, as `offcpu` shows them
    Stacks,
}

impl From<As> for Content {
    fn from(content: As) -> Content {
        match content {
            As::Interrupts => Content::Interrupts,
            As::Switches => Content::Switches,
            As::Stacks => Content::Stacks,
        }
    }
}

/// Returns the plural name of a content.
fn name_of(content: Content) -> &'static str {
    match content {
        Content::Interrupts => "events of interrupts",
        Content::Switches => "context switches",
        Content::Stacks => "stacks",
    }
}

impl Arguments {
    /// Returns the content to read a file as, by its head.
    fn content(&self, head: &[u8]) -> anyhow::Result<Content> {
        if let Some(content) = self.content {
            return Ok(content.into());
        }
        let Sniffed { content, has_switches } = sniff(head)?;
        if content == Content::Interrupts && has_switches {
            say!("whylate: the file has context switches as well: --as switches explains the time of a command");
        }
        Ok(content)
    }

    /// Refuses options of another content.
    fn check(&self, content: Content) -> anyhow::Result<()> {
        use Content::{Interrupts, Stacks, Switches};
        let options: [(&str, bool, &[Content]); 10] = [
            ("-v", self.verbosity.verbose, &[Interrupts, Switches]),
            ("-o", self.output.is_some(), &[Switches, Stacks]),
            ("--json", self.json, &[Interrupts, Switches]),
            ("--pid", self.pid.is_some(), &[Switches]),
            ("--comm", self.comm.is_some(), &[Switches]),
            ("--slower", self.slower.is_some(), &[Interrupts]),
            ("--worst", self.worst.is_some(), &[Interrupts]),
            ("--histogram", self.histogram, &[Interrupts]),
            ("--by", self.layout.by.is_some(), &[Stacks]),
            ("--leaf-first", self.layout.leaf_first, &[Stacks]),
        ];
        let wrong = options.iter().find(|(_, is_given, of)| *is_given && !of.contains(&content));
        let Some((option, _, of)) = wrong else { return Ok(()) };
        let of: Vec<&str> = of.iter().copied().map(name_of).collect();
        let what = format!("it has {}, and {option} is for {}: omit it", name_of(content), of.join(" and "));
        Err(UsageError(anyhow!(what)).into())
    }
}

/// Reads the files, and prints what they have.
///
/// # Errors
/// Fails if a file cannot be read, is in no known format, or has no data, or the output cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut all = stacks::Files::new(&arguments.layout);
    for file in &arguments.files {
        let is_only = arguments.files.len() == 1;
        read(file, |mut input| {
            let mut head = Vec::new();
            input.by_ref().take(HEAD_BYTES).read_to_end(&mut head).context("cannot read it")?;
            let content = arguments.content(&head)?;
            arguments.check(content)?;
            if content != Content::Stacks && !is_only {
                return Err(UsageError(anyhow!("it has {}: import it alone", name_of(content))).into());
            }
            let input = Cursor::new(head).chain(input);
            match content {
                Content::Interrupts => {
                    let worst = arguments.worst.map(usize::from);
                    let unless_asked = (!arguments.json && arguments.slower.is_none()).then_some(1);
                    let selection = interrupts::Selection {
                        histogram: arguments.histogram,
                        lines_from_ns: arguments.slower,
                        worst: worst.or(unless_asked),
                        json: arguments.json,
                        is_verbose: arguments.verbosity.verbose,
                    };
                    interrupts::print(selection, input)
                }
                Content::Switches => {
                    let wanted = switches::wanted(arguments.pid, arguments.comm.as_deref());
                    let printed =
                        switches::PrintOptions { json: arguments.json, is_verbose: arguments.verbosity.verbose };
                    switches::print(input, wanted, printed, arguments.output.as_deref())
                }
                Content::Stacks => all.add(input),
            }
        })?;
    }
    all.print(arguments.output.as_deref())
}

/// Reads a file to import, or standard input for `-`.
///
/// # Errors
/// Fails if the file cannot be opened, or `show` fails.
pub fn read(file: &Path, show: impl FnOnce(Box<dyn BufRead>) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let named = || format!("cannot import {}", printable(&file.to_string_lossy()));
    if file == Path::new("-") {
        return show(Box::new(io::stdin().lock())).with_context(named);
    }
    let input = BufReader::with_capacity(1 << 20, existing(File::open(file)).with_context(named)?);
    show(Box::new(input)).with_context(named)
}

/// Prints which modifications of a file's lines were undone, as undoing may change names.
fn undid(undone: &[String]) {
    if !undone.is_empty() {
        say!("whylate: undid what was done to the file's lines: {}", undone.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parsed;

    fn refused(line: &str, content: Content) -> String {
        let arguments: Arguments = parsed(["x"].into_iter().chain(line.split_whitespace())).expect("valid options");
        arguments.check(content).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn options_of_another_content_are_refused() {
        for (line, content, what) in [
            ("--pid 1", Content::Stacks, "it has stacks, and --pid is for context switches: omit it"),
            ("--by stack", Content::Switches, "it has context switches, and --by is for stacks: omit it"),
            ("-o x.svg", Content::Interrupts, "and -o is for context switches and stacks: omit it"),
            ("--json", Content::Stacks, "and --json is for events of interrupts and context switches: omit it"),
            ("-v", Content::Stacks, "and -v is for events of interrupts and context switches: omit it"),
            ("--pid 1 --json -v -o x.svg", Content::Switches, ""),
            ("--slower 1ms --worst 2 --histogram --json", Content::Interrupts, ""),
            ("--by stack --leaf-first -o x.svg", Content::Stacks, ""),
        ] {
            let said = refused(line, content);
            assert!(said.contains(what) && what.is_empty() == said.is_empty(), "{line}: {said}");
        }
    }
}
