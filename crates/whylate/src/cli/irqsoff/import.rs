// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate irqsoff --import`: shows output of ftrace like a measurement.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use anyhow::Context as _;
use jiff::tz::TimeZone;
use whylate_model::ftrace::{ImportOptions, import};
use whylate_model::units::{format_ns, printable};
use whylate_model::{LateEvent, Series, Snapshot, TopN};

use super::Arguments;
use crate::cli::{existing, undid};
use crate::engine::late_buffer::LateBuffer;
use crate::render::json::JsonLines;
use crate::render::text::irqsoff::IrqsoffText;
use crate::render::text::table::{Table, terminal_columns};
use crate::render::text::{Output, why};

/// Default number of longest sections in JSON.
const WORST_IN_JSON: usize = 20;

/// Reads the file, and prints the result.
///
/// # Errors
/// Fails if the file cannot be read or has no known trace, or the output cannot be written.
pub fn run(arguments: &Arguments, file: &Path) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let named = || format!("cannot import {}", file.display());
    let input: Box<dyn BufRead> = if file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(BufReader::with_capacity(1 << 20, existing(File::open(file)).with_context(named)?))
    };
    show(arguments, input, &mut out).with_context(named)?;
    Ok(out.flush()?)
}

fn show(arguments: &Arguments, input: impl BufRead, out: &mut dyn Write) -> anyhow::Result<()> {
    let worst = arguments.worst().unwrap_or(WORST_IN_JSON);
    let options = ImportOptions { late_over_ns: arguments.lines().then(|| arguments.lines_from_ns()), worst };
    let mut timers = TopN::new(worst);
    // The console level of this machine says nothing about the traced one. Trace timestamps start at boot.
    let mut output: Box<dyn Output> = if arguments.schedule.json {
        Box::new(JsonLines)
    } else {
        Box::new(IrqsoffText::new(arguments.shown(), terminal_columns(), None).in_utc())
    };
    output.begin(out)?;
    let (mut kept, mut written) = (LateBuffer::new(arguments.keep()), Ok(()));
    let (mut snapshot, undone) = import(input, "", options, &mut |event| {
        if !arguments.schedule.json && event.labels.contains_key("callback") {
            timers.add(event);
        } else if written.is_ok() {
            written = output.late(out, &event);
            kept.add(event);
        }
    })?;
    undid(&undone);
    written?;
    kept.move_into(&mut snapshot);
    let of_timers = timers_of(&snapshot);
    output.snapshot(out, snapshot)?;
    if !arguments.schedule.json && !of_timers.is_empty() {
        write_timers(out, &of_timers, &timers)?;
    }
    Ok(())
}

/// Returns the series of timers, latest first.
fn timers_of(snapshot: &Snapshot) -> Vec<Series> {
    let mut series: Vec<Series> =
        snapshot.series.iter().filter(|series| series.labels.contains_key("callback")).cloned().collect();
    series.sort_by_key(|series| std::cmp::Reverse(series.histograms.get("lateness").map_or(0, |late| late.max_ns())));
    series
}

fn write_timers(out: &mut dyn Write, timers: &[Series], late: &TopN) -> io::Result<()> {
    let mut table = Table::new("COUNT, LATE-P99, LATE-MAX, OVERRUNS, CPU, <CALLBACK");
    for series in timers {
        let lateness = series.histograms.get("lateness").cloned().unwrap_or_default();
        let label = |name: &str| series.labels.get(name).cloned().unwrap_or_default();
        table.row(vec![
            lateness.count().to_string(),
            format_ns(lateness.quantile_ns(0.99)),
            format_ns(lateness.max_ns()),
            format!("{}", series.values.get("overruns").copied().unwrap_or(0.0)),
            label("cpu"),
            label("callback"),
        ]);
    }
    writeln!(out)?;
    table.write(out, terminal_columns())?;
    for event in late.iter() {
        write_timer(out, event)?;
    }
    Ok(())
}

fn write_timer(out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
    let label = |name: &str| printable(event.labels.get(name).map_or("", String::as_str));
    let missed = match label("overruns").as_str() {
        "0" => String::new(),
        "1" => ", and missed a period".to_owned(),
        missed => format!(", and missed {missed} periods"),
    };
    let late = format_ns(event.latency_ns);
    let at = crate::render::text::time_of_day::time_of_day(event.at_unix_ns, &TimeZone::UTC);
    writeln!(out, "\n{at} the timer {} on CPU {} was late by {late}{missed}:", label("callback"), event.cpu)?;
    why::write_causes(out, event)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        arguments: Arguments,
    }

    const LATENCY: &str = include_str!("../../../../whylate-model/tests/ftrace/irqsoff-5.4.txt");
    const PIPE: &str = include_str!("../../../../whylate-model/tests/ftrace/trace-pipe-5.4.txt");

    fn printed(line: &str, text: &str) -> String {
        let words = ["irqsoff", "--import", "x"].into_iter().chain(line.split_whitespace());
        let arguments = CommandLine::try_parse_from(words).expect("a valid command line").arguments;
        let mut out = Vec::new();
        show(&arguments, text.as_bytes(), &mut out).expect("a trace");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_report_with_a_latency_trace_and_a_capture() {
        insta::assert_snapshot!(printed("", &format!("{LATENCY}\n{PIPE}")));
    }

    #[test]
    fn a_capture_line_by_line() {
        insta::assert_snapshot!(printed("--slower 1ms", PIPE));
    }

    #[test]
    fn json_has_the_window_and_the_overruns() {
        let snapshot: Snapshot = serde_json::from_str(&printed("--json", PIPE)).expect("a snapshot");
        assert_eq!((snapshot.backend.as_str(), snapshot.late.len()), ("import", 2));
        assert_eq!(snapshot.late.iter().filter(|event| event.labels.contains_key("callback")).count(), 1);
    }

    #[test]
    fn rejects_measurement_options_with_import() {
        for line in ["1", "-d 5s", "--backend ticks", "-c 0"] {
            let words = ["irqsoff", "--import", "x"].into_iter().chain(line.split_whitespace());
            assert!(CommandLine::try_parse_from(words).is_err(), "{line}");
        }
    }
}
