// SPDX-License-Identifier: MIT OR Apache-2.0
//! Explains a command from the context switches in a trace of ftrace, trace-cmd or perf.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::Context as _;
use whylate_model::ftrace::timeline::{Command, End, Trace, Wanted, WhyThis};
use whylate_model::path::command::CommandReport;
use whylate_model::units::printable;

use super::undid;
use crate::files;
use crate::json::write_line;
use crate::render::extension::report_written;
use crate::render::text::fit::Fit;
use crate::render::text::run as text;

/// Returns the thread to explain.
pub fn wanted(pid: Option<u32>, comm: Option<&str>) -> Wanted<'_> {
    pid.map(Wanted::Pid).or_else(|| comm.map(Wanted::Comm)).unwrap_or(Wanted::Any)
}

/// How a command is printed.
#[derive(Clone, Copy, Debug)]
pub struct PrintOptions {
    /// As a line of JSON.
    pub json: bool,
    /// With all long waits, and lost events by reason.
    pub is_verbose: bool,
}

/// Reads a trace, and prints the path of the wanted thread, or of the one that the trace seems to be about; also writes
/// the path to a file.
///
/// # Errors
/// Fails if the trace cannot be read, has no context switches, or does not have the thread, or an output cannot be
/// written.
pub fn print(
    input: impl BufRead,
    wanted: Wanted<'_>,
    printed: PrintOptions,
    output: Option<&Path>,
) -> anyhow::Result<()> {
    let form = output.map(|path| anyhow::Ok((path, text::form_of(path)?))).transpose()?;
    let mut trace = Trace::read(input)?;
    undid(&trace.undone);
    let command = trace.command(wanted)?;
    let mut out = Fit::stdout(!printed.json);
    show(&trace, &command, printed, &mut out)?;
    out.flush()?;
    if let Some((path, form)) = form {
        let cannot = || format!("cannot write {}", printable(&path.to_string_lossy()));
        files::write(path, |out| text::write_file(out, form, &command.explained)).with_context(cannot)?;
        report_written(path);
    }
    Ok(())
}

fn show(trace: &Trace, command: &Command, printed: PrintOptions, out: &mut dyn Write) -> anyhow::Result<()> {
    let lost: BTreeMap<String, u64> = trace.lost.iter().map(|(reason, &count)| ((*reason).to_owned(), count)).collect();
    let Command { name, explained, is_born, end, .. } = command;
    if printed.json {
        let limitations = trace.limitations.iter().map(|&limitation| limitation.to_owned()).collect();
        let report = CommandReport {
            command: name.clone(),
            is_born: Some(*is_born),
            is_whole: Some(*is_born && *end == End::Exit),
            explained: explained.clone(),
            lost,
            limitations: Some(limitations),
        };
        return Ok(write_line(out, &report)?);
    }
    writeln!(out, "{}", about(command))?;
    for limitation in &trace.limitations {
        writeln!(out, "note: {limitation}")?;
    }
    writeln!(out)?;
    let is_verbose = printed.is_verbose;
    let more = if is_verbose { Vec::new() } else { vec!["-v"] };
    let shown = text::RunScreen { status: None, lost: &lost, members: None, has_tree: false, is_verbose, more };
    Ok(text::write(out, name, explained, &shown)?)
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
        let mut trace = Trace::read(TRACE.as_bytes()).expect("a trace");
        let command = trace.command(wanted).expect("a thread of it");
        let mut out = Vec::new();
        show(&trace, &command, PrintOptions { json, is_verbose: false }, &mut out).expect("written");
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
