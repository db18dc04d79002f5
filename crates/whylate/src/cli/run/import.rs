// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate run --import`: explains a command from a trace of ftrace, trace-cmd or perf.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use whylate_model::path::command::Explained;
use whylate_model::path::import::{Command, End, Trace, Wanted, WhyThis};
use whylate_model::units::printable;

use crate::cli::{existing, undid};
use crate::render::json::write_line;
use crate::render::text::run as text;

/// Output of `--json`.
#[derive(Serialize)]
struct ExplainedLine<'a> {
    command: &'a str,
    /// Whether the trace has the creation of the thread, and (`is_whole`) also its exit.
    is_born: bool,
    is_whole: bool,
    #[serde(flatten)]
    explained: &'a Explained,
    lost: &'a BTreeMap<String, u64>,
    #[serde(rename = "weaker")]
    limitations: &'a [&'static str],
}

/// Reads the file, and prints the path of the given thread, or of the one that the trace seems to be about.
///
/// # Errors
/// Fails if the file cannot be read, has no context switches, or does not have the thread.
pub fn run(file: &Path, pid: Option<u32>, comm: Option<&str>, json: bool) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let named = || format!("cannot import {}", file.display());
    let input: Box<dyn BufRead> = if file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(BufReader::with_capacity(1 << 20, existing(File::open(file)).with_context(named)?))
    };
    let wanted = pid.map(Wanted::Pid).or_else(|| comm.map(Wanted::Comm)).unwrap_or(Wanted::Any);
    show(input, wanted, json, &mut out).with_context(named)?;
    Ok(out.flush()?)
}

fn show(input: impl BufRead, wanted: Wanted<'_>, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut trace = Trace::read(input)?;
    undid(&trace.undone);
    let command = trace.command(wanted)?;
    let lost: BTreeMap<String, u64> = trace.lost.iter().map(|(reason, &count)| ((*reason).to_owned(), count)).collect();
    let Command { name, explained, is_born, end, .. } = &command;
    if json {
        let (is_born, is_whole) = (*is_born, *is_born && *end == End::Exit);
        write_line(
            out,
            &ExplainedLine {
                command: name,
                is_born,
                is_whole,
                explained,
                lost: &lost,
                limitations: &trace.limitations,
            },
        )?;
        return Ok(());
    }
    writeln!(out, "{}", about(&command))?;
    for limitation in &trace.limitations {
        writeln!(out, "note: {limitation}")?;
    }
    text::write(out, name, explained, &lost, None)?;
    Ok(())
}

/// Renders which thread is explained, why, and for which span.
fn about(command: &Command) -> String {
    let why = match command.why {
        WhyThis::Named(0) => String::new(),
        WhyThis::Named(others) => format!(", one of {} threads that match", others + 1),
        WhyThis::FirstExec => ", the first thread that executes a program".to_owned(),
        WhyThis::RanLongest => ", the thread that ran longest".to_owned(),
    };
    let from = if command.is_born { "its creation" } else { "the start of the trace" };
    let to = match &command.end {
        End::Exit => "its exit".to_owned(),
        End::StillThere(last) => {
            format!("the last time that {} was on a CPU (the trace ends before the exit)", printable(last))
        }
    };
    format!("{}{why}, from {from} to {to}:", printable(&command.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = include_str!("../../../../whylate-model/tests/traces/tracefs.txt");

    fn printed(wanted: Wanted<'_>, json: bool) -> String {
        let mut out = Vec::new();
        show(TRACE.as_bytes(), wanted, json, &mut out).expect("a trace");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn explains_command_from_trace() {
        insta::assert_snapshot!(printed(Wanted::Comm("sh"), false));
    }

    #[test]
    fn json_has_a_path_that_adds_up() {
        let line: serde_json::Value = serde_json::from_str(&printed(Wanted::Pid(19025), true)).expect("JSON");
        let parts = line["path"].as_array().expect("parts").iter();
        assert_eq!(Some(parts.filter_map(|part| part["ns"].as_u64()).sum()), line["elapsed_ns"].as_u64());
        assert_eq!((line["command"].as_str(), line["is_whole"].as_bool()), (Some("sh:19025"), Some(true)));
    }
}
