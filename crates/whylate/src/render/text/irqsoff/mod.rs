// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders snapshots of `whylate irqsoff`.

mod line;
pub mod timers;

use std::cmp::Reverse;
use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::irqsoff::{NO_RESCHEDULE_POINT, advice};
use whylate_model::sources::IRQSOFF;
use whylate_model::units::{format_ns, printable};
use whylate_model::{CauseKind, Culprits, Histogram, LateEvent, Series, Snapshot, TopN};

use crate::render::text::table::Table;
use crate::render::text::{Output, footer, histogram, why};

#[derive(Clone, Copy, Debug)]
pub struct IrqsoffTextOptions {
    /// Print histograms of lengths too.
    pub histogram: bool,
    /// Period of the tested timers, in nanoseconds, with `--timer-test`.
    pub timer_test: Option<u64>,
    /// Disabled preemption is measured, not disabled interrupts.
    pub preempt: bool,
    /// The events come from a trace, not from a measurement.
    pub is_import: bool,
    /// Sections of this length or longer are printed as they happen, in nanoseconds.
    pub lines_from_ns: Option<u64>,
    /// Number of longest sections to print.
    pub worst: Option<usize>,
    /// How the culprits of explained sections are ranked, if they are.
    pub rank_by: Option<By>,
    /// Sections shorter than this are ignored, in nanoseconds.
    pub from_ns: u64,
    /// Print lost events by reason.
    pub is_verbose: bool,
}

pub struct IrqsoffText {
    shown: IrqsoffTextOptions,
    zone: TimeZone,
    terminal_columns: Option<usize>,
    console_level: Option<u32>,
    /// The longest sections with interrupts off, and the latest interrupts for other reasons.
    worst: Option<(TopN, TopN)>,
    /// The culprits of explained sections, if they are ranked.
    culprits: Option<Culprits>,
    /// Whether nothing was written yet, and whether the heading of late events was.
    is_empty: bool,
    has_heading: bool,
}

impl IrqsoffText {
    /// Creates the output. Timestamps are in the system's time zone; tables fit the terminal, if there is one.
    pub fn new(shown: IrqsoffTextOptions, terminal_columns: Option<usize>, console_level: Option<u32>) -> Self {
        IrqsoffText {
            shown,
            zone: TimeZone::system(),
            terminal_columns,
            console_level,
            worst: shown.worst.map(|count| (TopN::new(count), TopN::new(count))),
            culprits: shown.rank_by.map(Culprits::by),
            is_empty: true,
            has_heading: false,
        }
    }

    /// Prints timestamps in UTC: in a trace, they start at the boot of the traced machine.
    pub fn in_utc(self) -> Self {
        IrqsoffText { zone: TimeZone::UTC, ..self }
    }

    /// Writes the longest sections, and returns their events.
    fn write_worst(&mut self, out: &mut dyn Write) -> io::Result<Vec<LateEvent>> {
        let Some((irqs_off, others)) = &mut self.worst else { return Ok(Vec::new()) };
        let (irqs_off, others) = (irqs_off.take(), others.take());
        let (heading, shown) = match irqs_off.is_empty() {
            true => ("Latest", others),
            false if self.shown.preempt => ("Longest with preemption off", irqs_off),
            false => ("Longest with interrupts off", irqs_off),
        };
        if !shown.is_empty() {
            writeln!(out, "\n{heading}:")?;
            line::write_heading(out)?;
        }
        for event in &shown {
            line::write_whole(out, event, &self.zone)?;
        }
        Ok(shown)
    }
}

impl Output for IrqsoffText {
    fn activity(&self) -> Option<String> {
        let what = if self.shown.preempt { "preemption that is" } else { "interrupts that are" };
        Some(self.shown.timer_test.map_or_else(
            || format!("Tracing {what} off"),
            |period_ns| format!("Testing a timer of {} per CPU, printing when it misses periods", format_ns(period_ns)),
        ))
    }

    fn begin(&mut self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }

    fn late(&mut self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
        if self.shown.lines_from_ns.is_some_and(|from_ns| event.latency_ns >= from_ns) {
            if !std::mem::replace(&mut self.has_heading, true) {
                line::write_heading(out)?;
            }
            self.is_empty = false;
            line::write(out, event, &self.zone)?;
        }
        self.culprits.iter_mut().for_each(|culprits| culprits.add(&IRQSOFF, event));
        if let Some((irqs_off, others)) = &mut self.worst {
            let is_off = match event.labels.get("kind") {
                Some(kind) => [CauseKind::IrqsOff.name(), CauseKind::PreemptOff.name(), NO_RESCHEDULE_POINT]
                    .contains(&kind.as_str()),
                None => true,
            };
            let of = if is_off { irqs_off } else { others };
            of.add(event.clone());
        }
        Ok(())
    }

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()> {
        if !std::mem::take(&mut self.is_empty) {
            writeln!(out)?;
        }
        if self.shown.timer_test.is_some() {
            test_of(&snapshot).write(out, self.terminal_columns)?;
            writeln!(out)?;
        }
        let mut rows: Vec<&Series> =
            snapshot.series.iter().filter(|series| series.histograms.contains_key("length")).collect();
        // The sort is stable: equal rows stay in the order of their names.
        rows.sort_by_key(|series| Reverse(length(series).max_ns()));
        if rows.is_empty() {
            let from = format_ns(self.shown.from_ns);
            match self.shown.preempt {
                _ if self.shown.is_import => writeln!(out, "No section with interrupts or preemption off is in it.")?,
                true if snapshot.backend == "need_resched" => {
                    writeln!(out, "Preemption was never off for {from} or longer while a thread waited for it.")?;
                }
                true => writeln!(out, "Preemption was never off for {from} or longer.")?,
                false => writeln!(out, "No interrupt was late by {from} or longer.")?,
            }
        } else {
            table_of(&rows).write(out, self.terminal_columns)?;
        }
        if self.shown.histogram {
            for series in &rows {
                writeln!(out, "\n{}", printable(&line::who(&series.labels)))?;
                histogram::write(out, length(series))?;
            }
        }
        let shown = self.write_worst(out)?;
        if let Some(culprits) = &mut self.culprits {
            culprits.add_unexplained(snapshot.unexplained);
        }
        if let Some(ranking) = self.culprits.as_mut().map(Culprits::take).filter(|ranking| !ranking.is_empty()) {
            writeln!(out)?;
            why::write_ranking(out, &ranking, IRQSOFF.words)?;
        }
        let advice = advice(&snapshot, &shown, self.console_level);
        if !advice.is_empty() {
            writeln!(out)?;
        }
        for sentence in advice {
            writeln!(out, "{}", printable(&sentence))?;
        }
        footer::write(out, &snapshot, self.shown.is_verbose)
    }
}

fn length(series: &Series) -> &Histogram {
    series.histogram("length")
}

fn table_of(rows: &[&Series]) -> Table {
    let table = Table::new("<KIND, COUNT, MAX, P50, P99, TOTAL, SHARE, <<WHO");
    let mut table = table.hiding_first("SHARE, P50, P99, TOTAL");
    for series in rows {
        let length = length(series);
        let total_ns = u64::try_from(length.sum_ns()).unwrap_or(u64::MAX);
        let share = series.value("share") * 100.0;
        let is_late = |ns: u64| ns >= IRQSOFF.judged.late_from_ns;
        let figures = [(2, length.max_ns()), (4, length.quantile_ns(0.99))];
        let late: Vec<usize> = figures.into_iter().filter(|(_, ns)| is_late(*ns)).map(|(column, _)| column).collect();
        let cells = vec![
            line::kind(&series.labels),
            length.count().to_string(),
            format_ns(length.max_ns()),
            format_ns(length.quantile_ns(0.5)),
            format_ns(length.quantile_ns(0.99)),
            format_ns(total_ns),
            format!("{share:.2}%"),
            line::who(&series.labels),
        ];
        table.late_row(cells, &late);
    }
    table
}

/// Returns a table with a row for the test timer of each CPU.
fn test_of(snapshot: &Snapshot) -> Table {
    let mut table = Table::new("CPU, TICKS, OVERRUNS, P50, P99, MAX");
    for series in &snapshot.series {
        let (Some(lateness), Some(cpu)) = (series.histograms.get("lateness"), series.labels.get("cpu")) else {
            continue;
        };
        let mut cells = vec![cpu.clone(), lateness.count().to_string(), series.value("overruns").to_string()];
        cells.extend([lateness.quantile_ns(0.5), lateness.quantile_ns(0.99), lateness.max_ns()].map(format_ns));
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use whylate_model::{Cause, Labels};

    use super::*;
    use crate::cli::irqsoff::Arguments;
    use crate::cli::parsed;
    use crate::render::color::tests::colored;
    use crate::render::json::JsonLines;
    use crate::render::text::whole_output;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    const CONSOLE: [(&str, &str); 3] =
        [("kind", "irqs_off"), ("function", "_raw_spin_unlock_irqrestore"), ("caller", "serial8250_console_write")];

    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::new("irqsoff", "ticks", "web1", 1_795_252_440_000_000_000);
        snapshot.duration_ns = 5_000_000_000;
        let series = |pairs: &[(&str, &str)], lengths_ns: &[u64]| {
            let length: Histogram = lengths_ns.iter().copied().collect();
            let share = length.sum_ns() as f64 / 10e9;
            let values = [("period_ns".to_owned(), 1e6), ("share".to_owned(), share)];
            let histograms = [("length".to_owned(), length)];
            Series { labels: labels(pairs), histograms: histograms.into(), values: values.into(), ..Series::default() }
        };
        snapshot.series = vec![
            series(&[("kind", "idle_exit")], &[120_000, 130_000]),
            series(&[("kind", "irq"), ("handler", "nvme0q1")], &[2_000_000]),
            series(&CONSOLE, &[10_966_000, 9_000_000, 8_500_000]),
            series(&[("kind", "steal")], &[4_000_000; 7]),
        ];
        let lateness: Histogram = [3_000, 4_000, 10_966_000].into_iter().collect();
        snapshot.series.push(Series {
            labels: labels(&[("cpu", "6")]),
            histograms: [("lateness".to_owned(), lateness)].into(),
            values: [("overruns".to_owned(), 8.0)].into(),
            ..Series::default()
        });
        snapshot.lost = [("unseen".to_owned(), 2), ("stacks".to_owned(), 0)].into();
        snapshot
    }

    fn events() -> Vec<LateEvent> {
        let stack = ["_raw_spin_unlock_irqrestore", "serial8250_console_write", "console_unlock", "evil\x1b[2J"];
        let stack: Vec<String> = stack.map(str::to_owned).to_vec();
        let cause =
            |kind, who: &str, ns, stack: &[String]| Cause { stack: stack.to_vec(), ..Cause::new(kind, who, ns) };
        let mut console = LateEvent {
            labels: labels(&CONSOLE),
            at_unix_ns: 1_795_252_440_100_000_000,
            latency_ns: 10_966_000,
            at_most_ns: Some(11_970_000),
            cpu: 6,
            stack: stack.clone(),
            inside: ["io_serial_in", "wait_for_xmitr", "evil\x1b[2J"].map(str::to_owned).to_vec(),
            causes: vec![
                cause(CauseKind::IrqsOff, "qseecom:6462", 10_900_000, &stack),
                cause(CauseKind::Irq, "nvme0q1", 66_000, &[]),
            ],
            ..LateEvent::default()
        };
        console.labels.insert("task".to_owned(), "qseecom:6462".to_owned());
        console.labels.insert("overruns".to_owned(), "8".to_owned());
        let mut stolen = LateEvent {
            labels: labels(&[("kind", "steal"), ("task", "hog:7")]),
            latency_ns: 14_000_000,
            at_most_ns: Some(15_000_000),
            causes: vec![cause(CauseKind::Steal, "hypervisor", 14_000_000, &[])],
            ..console.clone()
        };
        stolen.stack.clear();
        stolen.inside.clear();
        vec![console, stolen]
    }

    fn printed(line: &str) -> String {
        let arguments: Arguments = parsed(line.split_whitespace()).expect("a valid command line");
        let mut text = IrqsoffText::new(arguments.shown(), None, Some(7)).in_utc();
        let output: &mut dyn Output = if arguments.schedule.json { &mut JsonLines } else { &mut text };
        whole_output(output, arguments.keep(), events(), snapshot())
    }

    #[test]
    fn culprits_and_the_longest() {
        insta::assert_snapshot!(printed(""));
    }

    #[test]
    fn lines_as_it_happens() {
        insta::assert_snapshot!(printed("--slower 12ms"));
    }

    #[test]
    fn causes() {
        insta::assert_snapshot!(printed("--why 5ms"));
    }

    #[test]
    fn only_lengths_over_the_limit_are_colored() {
        assert_eq!(colored(|| printed("")), ["11.0ms", "11.0ms"]);
    }

    #[test]
    fn culprits_by_name() {
        let ranked = printed("--why 5ms --rank-by name");
        let (_, ranking) =
            ranked.split_once("2 late interrupts took 25.0ms in total. Who caused it:\n").expect("a ranking");
        let mut lines = ranking.lines().map(str::trim);
        assert_eq!(lines.next(), Some("56.1%  steal (hypervisor) delayed 1 interrupt by 14.0ms"), "{ranked}");
        assert!(lines.next().is_some_and(|line| line.starts_with("43.7%  interrupts off in qseecom:6462")), "{ranked}");
        assert_eq!(printed("--why 5ms"), ranked, "the default");
    }

    #[test]
    fn histograms() {
        insta::assert_snapshot!(printed("--histogram"));
    }

    #[test]
    fn a_test_of_timers() {
        insta::assert_snapshot!(printed("--timer-test 1.33ms"));
    }

    #[test]
    fn json() {
        insta::assert_snapshot!(printed("--json --worst 1"));
    }

    #[test]
    fn rejects_invalid_options() {
        for line in
            ["0", "--period 1us", "--period 2s", "--worst 0", "--slower 0", "-c x", "--why nonsense", "1 0", "--min -1"]
        {
            assert!(parsed::<Arguments>(line.split_whitespace()).is_err(), "{line}");
        }
    }
}
