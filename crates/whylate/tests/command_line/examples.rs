// SPDX-License-Identifier: MIT OR Apache-2.0
//! Examples of every help and every page that need neither root nor this kernel: each is run as it is written, beside
//! files of the names that it has.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::docs::{commands, pages, words};
use super::running::whylate;
use super::statuses::commands as names_of_commands;
use super::{RECORDINGS, output_of, text};

/// Commands that read files, or print what whylate knows.
const RUN: [&str; 8] = ["replay", "report", "diff", "export", "import", "help", "completions", "doctor"];
/// Commands that need an argument: alone, they are named and not meant to be run.
const NEED_ARGUMENTS: [&str; 6] = ["replay", "report", "diff", "export", "import", "completions"];
/// The recording that each recording of an example is a copy of, and times of its start, middle and end.
const RECORDING: &str = "sources-6.18.whylate";
const TIMES: [&str; 3] = ["2026-11-28T23:18:24Z", "2026-11-28T23:18:26Z", "2026-11-28T23:18:29Z"];
/// What each file of another tool is a copy of, and a thread that is in it.
const TRACE: &str = include_str!("../../../whylate-model/tests/traces/tracefs.txt");
const THREAD: &str = "sh";
const STACKS: &str = "\
  PID    TID COMM             TDNAME           KSTACK
    0 100000 kernel           swapper          mi_switch sleepq_timedwait _sleep swapper btext
";
const FILES: [(&str, &str); 7] = [
    ("trace.txt", TRACE),
    ("trace_pipe.txt", include_str!("../../../whylate-model/tests/ftrace/trace-pipe-5.4.txt")),
    ("perf.txt", TRACE),
    ("procstat.txt", STACKS),
    ("stacks.txt", STACKS),
    ("1.txt", STACKS),
    ("2.txt", STACKS),
];

/// Returns the words after `whylate` of each example in the help of all commands.
fn examples_of_help() -> Result<Vec<Vec<String>>> {
    let mut found = Vec::new();
    for name in names_of_commands()? {
        let help = if name == "overview" { output_of(&["--help"])? } else { output_of(&["help", &name])? };
        let help = text(&help.stdout);
        let (_, examples) = help.split_once("examples:\n").with_context(|| format!("{name} has no examples"))?;
        let lines = examples.lines().take_while(|line| line.starts_with("    "));
        let parts = lines.flat_map(|line| line.split(['|', '(', ')'])).map(str::trim);
        found.extend(parts.filter_map(|part| part.strip_prefix("whylate ")).map(words));
    }
    Ok(found)
}

/// Replaces names that stand for something, and times, by those of the recording and the trace.
fn filled_in(words: &[String]) -> Vec<String> {
    let [start, middle, end] = TIMES;
    let is_import = words[0] == "import";
    let options = [""].into_iter().chain(words.iter().map(String::as_str));
    let filled = options.zip(words).map(|(option, word)| match (option, word.as_str()) {
        ("--from", _) => start.to_owned(),
        ("--to", _) => end.to_owned(),
        ("--split", _) => middle.to_owned(),
        ("--before", _) => format!("{start}..{middle}"),
        ("--after", _) => format!("{middle}..{end}"),
        ("--at", span) if span.contains("..") => format!("{start}..{end}"),
        ("--at", _) => middle.to_owned(),
        ("--comm", _) if is_import => THREAD.to_owned(),
        (_, "FILE") if is_import => "trace.txt".to_owned(),
        (_, "FILE" | "FILE2" | "BEFORE" | "AFTER") => "web1.whylate".to_owned(),
        (_, path) if path.ends_with(".whylate") => path.rsplit('/').next().unwrap_or(path).to_owned(),
        (_, word) => word.to_owned(),
    });
    filled.collect()
}

/// Returns whether the words are a command that can be run here, and not the form of one.
fn can_be_run(words: &[String]) -> bool {
    let Some(command) = words.first().filter(|word| RUN.contains(&word.as_str())) else { return false };
    let is_form = words.iter().any(|word| word.contains(['[', '…', '$']) || word == "..." || word == "COMMAND");
    // Without a file, it measures this machine.
    let is_live = command == "report" && words.get(1).is_none_or(|word| word.starts_with('-'));
    let is_name = words.len() == 1 && NEED_ARGUMENTS.contains(&command.as_str());
    !(is_form || is_live || is_name)
}

/// Runs an example in a directory of its own.
fn run(words: &[String]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let at = |name: &str| directory.path().join(name);
    for word in words {
        if word.ends_with(".whylate") {
            fs::copy(Path::new(RECORDINGS).join(RECORDING), at(word))?;
        } else if let Some((name, content)) = FILES.iter().find(|(name, _)| name == word) {
            fs::write(at(name), content)?;
        }
    }
    fs::write(at("standard-input"), TRACE)?;
    let mut arguments: Vec<&str> = words.iter().map(String::as_str).collect();
    if words.iter().any(|word| word == "serve") {
        // It would serve until it is stopped, at a port that may be in use.
        arguments.extend(["-d", "1ms", "--listen", "127.0.0.1:0"]);
    }
    let mut command = whylate(&arguments);
    let output = command.current_dir(&directory).stdin(File::open(at("standard-input"))?).output()?;
    let status = if arguments.contains(&"--fail-if-late") { 4 } else { 0 };
    ensure!(output.status.code() == Some(status), "{}: {}", output.status, text(&output.stderr));
    Ok(())
}

#[test]
fn examples_that_need_no_root_can_be_run() -> Result<()> {
    let of_pages = pages()?.into_iter().flat_map(|(_, page)| commands(&page));
    let all = examples_of_help()?.into_iter().chain(of_pages).filter(|words| can_be_run(words));
    let all: BTreeSet<Vec<String>> = all.map(|words| filled_in(&words)).collect();
    let mut wrong = Vec::new();
    for words in &all {
        if let Err(error) = run(words) {
            wrong.push(format!("whylate {}: {error:#}", words.join(" ")));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    let tried: BTreeSet<&str> = all.iter().map(|words| words[0].as_str()).collect();
    ensure!(all.len() > 30 && tried == RUN.into(), "only {} examples of {tried:?}", all.len());
    Ok(())
}
