// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shows events of interrupts in a trace like a measurement of `irqsoff`.

use std::io::{self, BufRead, Write};

use jiff::tz::TimeZone;
use whylate_model::ftrace::{ImportOptions, import};
use whylate_model::units::{format_ns, printable};
use whylate_model::{LateEvent, Series, Snapshot, TopN};

use super::undid;
use crate::render::json::JsonLines;
use crate::render::text::fit::{Fit, terminal_columns};
use crate::render::text::irqsoff::{IrqsoffText, IrqsoffTextOptions};
use crate::render::text::table::Table;
use crate::render::text::{Output, why};
use crate::store::late_buffer::{Keep, LateBuffer};

/// Default number of longest sections in JSON.
const WORST_IN_JSON: usize = 20;

/// What to print of a trace, and how.
#[derive(Clone, Copy, Debug, Default)]
pub struct Selection {
    /// Print a histogram of lengths per culprit.
    pub histogram: bool,
    /// Print a line for each section of this length or longer, in nanoseconds.
    pub lines_from_ns: Option<u64>,
    /// Number of longest sections to print.
    pub worst: Option<usize>,
    /// Print JSON.
    pub json: bool,
    /// Print lost events by reason.
    pub is_verbose: bool,
}

/// Reads a trace, and prints the result.
///
/// # Errors
/// Fails if the trace cannot be read or has no such events, or the output cannot be written.
pub fn print(selection: Selection, input: impl BufRead) -> anyhow::Result<()> {
    let mut out = Fit::stdout(!selection.json);
    show(selection, input, &mut out)?;
    Ok(out.flush()?)
}

fn show(selection: Selection, input: impl BufRead, out: &mut dyn Write) -> anyhow::Result<()> {
    let Selection { histogram, lines_from_ns, json, .. } = selection;
    let worst = selection.worst.unwrap_or(WORST_IN_JSON);
    let options = ImportOptions { late_over_ns: lines_from_ns, worst };
    let mut timers = TopN::new(worst);
    let shown = IrqsoffTextOptions {
        rank_by: None,
        histogram,
        timer_test: None,
        preempt: false,
        is_import: true,
        lines_from_ns,
        worst: selection.worst,
        from_ns: 0,
        is_verbose: selection.is_verbose,
    };
    // The console level of this machine says nothing about the traced one. Trace timestamps start at boot.
    let mut output: Box<dyn Output> = match json {
        true => Box::new(JsonLines),
        false => Box::new(IrqsoffText::new(shown, terminal_columns(), None).in_utc()),
    };
    output.begin(out)?;
    let keep = if json { Keep::worst(selection.worst) } else { Keep::Nothing };
    let (mut kept, mut written) = (LateBuffer::new(keep), Ok(()));
    let (mut snapshot, undone) = import(input, "", options, &mut |event| {
        if !json && event.labels.contains_key("callback") {
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
    if !json && !of_timers.is_empty() {
        write_timers(out, &of_timers, &timers)?;
    }
    Ok(())
}

/// Returns the series of timers, latest first.
fn timers_of(snapshot: &Snapshot) -> Vec<Series> {
    let mut series: Vec<Series> =
        snapshot.series.iter().filter(|series| series.labels.contains_key("callback")).cloned().collect();
    series.sort_by_key(|series| std::cmp::Reverse(series.histogram("lateness").max_ns()));
    series
}

fn write_timers(out: &mut dyn Write, timers: &[Series], late: &TopN) -> io::Result<()> {
    let mut table =
        Table::new("COUNT, LATE-P99, LATE-MAX, OVERRUNS, CPU, <CALLBACK").hiding_first("CPU, OVERRUNS, LATE-MAX");
    for series in timers {
        let lateness = series.histogram("lateness");
        let label = |name: &str| series.label(name).to_owned();
        table.row(vec![
            lateness.count().to_string(),
            format_ns(lateness.quantile_ns(0.99)),
            format_ns(lateness.max_ns()),
            series.value("overruns").to_string(),
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
    let label = |name: &str| printable(event.label(name));
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
    use super::*;

    const LATENCY: &str = include_str!("../../../../whylate-model/tests/ftrace/irqsoff-5.4.txt");
    const PIPE: &str = include_str!("../../../../whylate-model/tests/ftrace/trace-pipe-5.4.txt");

    const LONGEST: Selection =
        Selection { histogram: false, lines_from_ns: None, worst: Some(1), json: false, is_verbose: false };

    fn printed(selection: Selection, text: &str) -> String {
        let mut out = Vec::new();
        show(selection, text.as_bytes(), &mut out).expect("a trace");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_report_with_a_latency_trace_and_a_capture() {
        insta::assert_snapshot!(printed(LONGEST, &format!("{LATENCY}\n{PIPE}")));
    }

    #[test]
    fn a_capture_line_by_line() {
        insta::assert_snapshot!(printed(Selection { lines_from_ns: Some(1_000_000), ..Selection::default() }, PIPE));
    }

    #[test]
    fn json_has_the_window_and_the_overruns() {
        let json = printed(Selection { json: true, ..Selection::default() }, PIPE);
        let snapshot: Snapshot = serde_json::from_str(&json).expect("a snapshot");
        assert_eq!((snapshot.backend.as_str(), snapshot.late.len()), ("import", 2));
        assert_eq!(snapshot.late.iter().filter(|event| event.labels.contains_key("callback")).count(), 1);
    }
}
