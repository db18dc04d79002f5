// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders sources that measure latencies by phase: histograms or a table, late events as they arrive, and the ranking
//! of culprits. Below a replay, where all events are there at once, the ranking comes first.

use std::cmp::Reverse;
use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::late::Thresholds;
use whylate_model::units::{counted, format_ns, format_round_ns, printable};
use whylate_model::{Card, Culprits, Histogram, LateEvent, Series, Snapshot};

use crate::render::text::fit::command_lines;
use crate::render::text::next::Next;
use crate::render::text::table::Table;
use crate::render::text::{Output, footer, histogram, text_of, why};

/// Maximum number of late events that are held back until the ranking is known. If there are more, they are printed as
/// they arrive.
const MAX_HELD: usize = 10_000;

/// Parts of the output.
#[derive(Clone, Copy, Debug)]
pub struct LatencyOptions {
    /// Late events that have a line, and those that are explained.
    pub thresholds: Thresholds,
    /// How culprits are grouped.
    pub rank_by: By,
    /// Prints only late events and their culprits.
    pub lines_only: bool,
    /// Prints all that is known of each late event, and lost events by reason.
    pub is_verbose: bool,
}

/// What is specific to a source.
pub trait LatencyView {
    fn card(&self) -> &'static Card;

    /// Names the measured latency, for the first line.
    fn title(&self) -> String;

    fn write_late_heading(&self, out: &mut dyn Write, is_verbose: bool) -> io::Result<()>;

    fn write_late(&self, out: &mut dyn Write, event: &LateEvent, zone: &TimeZone, is_verbose: bool) -> io::Result<()>;

    /// Returns the table of the snapshot; `None` if histograms are wanted.
    fn table(&self, snapshot: &Snapshot) -> Option<Table>;

    /// Returns series with a histogram each, below its heading.
    fn histograms(&self, snapshot: &Snapshot) -> Vec<(String, Series)>;

    /// Returns whether each phase has a histogram, not only the whole latency.
    fn has_phases(&self) -> bool;
}

pub struct LatencyText<V> {
    view: V,
    shown: LatencyOptions,
    zone: TimeZone,
    terminal_columns: Option<usize>,
    culprits: Culprits,
    next: Next,
    /// Late events that the ranking precedes.
    held: Vec<LateEvent>,
    /// Whether late events are held back.
    holds: bool,
    /// Whether nothing was written yet.
    is_empty: bool,
}

impl<V: LatencyView> LatencyText<V> {
    /// Creates the output. Timestamps are in the system's time zone; tables fit the terminal, if there is one.
    pub fn new(view: V, shown: LatencyOptions, terminal_columns: Option<usize>, next: Next) -> Self {
        LatencyText {
            view,
            shown,
            zone: TimeZone::system(),
            terminal_columns,
            culprits: Culprits::by(shown.rank_by),
            holds: shown.lines_only && shown.thresholds.explain_ns.is_some() && matches!(next, Next::Replay(..)),
            next,
            held: Vec::new(),
            is_empty: true,
        }
    }

    #[cfg(test)]
    pub fn in_utc(self) -> Self {
        LatencyText { zone: TimeZone::UTC, ..self }
    }

    /// Writes the ranking of culprits, the late events that it precedes, and the command to run next.
    fn write_why(&mut self, out: &mut dyn Write, snapshot: &Snapshot, threshold_ns: u64) -> io::Result<()> {
        let words = self.view.card().words;
        self.culprits.add_unexplained(snapshot.unexplained);
        let ranking = self.culprits.take();
        if ranking.is_empty() {
            let over = format_round_ns(threshold_ns);
            match (self.view.card().figures)(snapshot).count_from(threshold_ns) {
                0 => writeln!(out, "No {} {} {over} or longer.", words.event, words.lasted)?,
                late => {
                    let no_causes = match (&self.next, late) {
                        (Next::Replay(..), 1) => "the recording has no causes of it",
                        (Next::Replay(..), _) => "the recording has no causes of them",
                        (Next::Live(_), 1) => "its causes are unknown",
                        (Next::Live(_), _) => "their causes are unknown",
                    };
                    writeln!(out, "{} {} {over} or longer; {no_causes}.", counted(late, words.event), words.lasted)?;
                }
            }
            return self.write_held(out);
        }
        if !self.is_empty {
            writeln!(out)?;
        }
        why::write_ranking(out, &ranking, words)?;
        self.write_held(out)?;
        if self.shown.thresholds.worst.is_some() {
            let worst = &snapshot.late;
            writeln!(out, "\nLongest {}: {} of {}", words.latencies, worst.len(), ranking.events)?;
            self.view.write_late_heading(out, self.shown.is_verbose)?;
            worst.iter().try_for_each(|event| self.write_late(out, event))?;
        }
        if self.shown.lines_only {
            writeln!(out, "\nNEXT")?;
            let next = self.next.lines(self.view.card(), &ranking);
            let columns = self.terminal_columns.unwrap_or(usize::MAX);
            let lines = next.iter().flat_map(|line| command_lines(line, 2, columns));
            lines.into_iter().try_for_each(|line| writeln!(out, "{line}"))?;
        }
        Ok(())
    }

    /// Writes the late events that were held back, longest first.
    fn write_held(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let mut held = std::mem::take(&mut self.held);
        if held.is_empty() {
            return Ok(());
        }
        held.sort_by_key(|event| Reverse(event.latency_ns));
        writeln!(out)?;
        self.view.write_late_heading(out, self.shown.is_verbose)?;
        held.iter().try_for_each(|event| self.write_late(out, event))
    }

    fn write_late(&self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
        self.view.write_late(out, event, &self.zone, self.shown.is_verbose)
    }

    fn write_histograms(&self, out: &mut dyn Write, snapshot: &Snapshot) -> io::Result<()> {
        writeln!(out, "Printing histogram")?;
        for (heading, series) in self.view.histograms(snapshot) {
            if !heading.is_empty() {
                writeln!(out, "\n{}", printable(&heading))?;
            }
            if !self.view.has_phases() {
                histogram::write(out, series.histogram("latency"))?;
                continue;
            }
            for (phase, meaning) in self.view.card().phases {
                writeln!(out, "\n{phase}: {meaning}")?;
                histogram::write(out, series.histogram(phase))?;
            }
        }
        Ok(())
    }
}

impl<V: LatencyView> Output for LatencyText<V> {
    fn activity(&self) -> Option<String> {
        Some(format!("Tracing {}", self.view.title()))
    }

    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()> {
        // With --worst, the longest are printed below a heading of their own.
        let Thresholds { show_ns, explain_ns, worst } = self.shown.thresholds;
        let has_lines = show_ns.is_some() || explain_ns.is_some() && worst.is_none();
        self.is_empty = !has_lines || self.holds;
        if self.is_empty { Ok(()) } else { self.view.write_late_heading(out, self.shown.is_verbose) }
    }

    fn late(&mut self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
        self.culprits.add(self.view.card(), event);
        if self.shown.thresholds.worst.is_some() && !event.causes.is_empty() {
            return Ok(());
        }
        if self.holds && self.held.len() < MAX_HELD {
            self.held.push(event.clone());
            return Ok(());
        }
        if std::mem::take(&mut self.holds) {
            self.view.write_late_heading(out, self.shown.is_verbose)?;
            let held = std::mem::take(&mut self.held);
            held.iter().try_for_each(|event| self.write_late(out, event))?;
        }
        self.is_empty = false;
        self.write_late(out, event)
    }

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()> {
        if let Some(threshold_ns) = self.shown.thresholds.explain_ns {
            self.write_why(out, &snapshot, threshold_ns)?;
            self.is_empty = false;
        }
        if !self.shown.lines_only {
            if !std::mem::take(&mut self.is_empty) {
                writeln!(out)?;
            }
            match self.view.table(&snapshot) {
                Some(table) => table.write(out, self.terminal_columns)?,
                None => self.write_histograms(out, &snapshot)?,
            }
        }
        let footer = text_of(|out| footer::write(out, &snapshot, self.shown.is_verbose));
        if self.shown.lines_only && !footer.is_empty() {
            writeln!(out)?;
        }
        out.write_all(footer.as_bytes())
    }
}

/// Returns the cells below MEAN, P50, P99 and MAX.
pub fn figures(latency: &Histogram) -> [String; 4] {
    [latency.mean_ns(), latency.quantile_ns(0.5), latency.quantile_ns(0.99), latency.max_ns()].map(format_ns)
}

/// Returns which of the columns P99 and MAX have a latency over the limit of the source. `mean` is the column of MEAN.
pub fn late_figures(latency: &Histogram, card: &Card, mean: usize) -> Vec<usize> {
    let figures = [(mean + 2, latency.quantile_ns(0.99)), (mean + 3, latency.max_ns())];
    let late = figures.into_iter().filter(|(_, ns)| *ns >= card.judged.late_from_ns);
    late.map(|(column, _)| column).collect()
}

/// Minimum share of an event's latency for a phase without a column to be named.
const NAMED_SHARE: f64 = 0.01;

/// Renders the phases without a column that are a part of the event's latency worth naming, each after a comma.
pub fn other_phases(event: &LateEvent, names: &[&str]) -> String {
    let named = names.iter().filter_map(|name| {
        let ns = event.phase_ns(name)?;
        let is_named = ns > 0 && ns as f64 >= event.latency_ns as f64 * NAMED_SHARE;
        is_named.then(|| format!(", {name} {}", format_ns(ns)))
    });
    named.collect()
}

/// Sorts rows by a figure, largest first; equal rows stay in the order of their names.
pub fn sort_rows(rows: &mut [Series], figure: impl Fn(&Series) -> u64) {
    rows.sort_by_key(|series| Reverse(figure(series)));
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::WQ;
    use whylate_model::{Cause, CauseKind};

    use super::*;
    use crate::render::text::whole_output;
    use crate::store::late_buffer::Keep;

    struct View;

    impl LatencyView for View {
        fn card(&self) -> &'static Card {
            &WQ
        }

        fn title(&self) -> String {
            String::new()
        }

        fn write_late_heading(&self, out: &mut dyn Write, _: bool) -> io::Result<()> {
            writeln!(out, "HEADING")
        }

        fn write_late(&self, out: &mut dyn Write, event: &LateEvent, _: &TimeZone, _: bool) -> io::Result<()> {
            writeln!(out, "event of {}", event.latency_ns)
        }

        fn table(&self, _: &Snapshot) -> Option<Table> {
            None
        }

        fn histograms(&self, _: &Snapshot) -> Vec<(String, Series)> {
            Vec::new()
        }

        fn has_phases(&self) -> bool {
            false
        }
    }

    fn written(next: Next, latencies_ns: impl Iterator<Item = u64>) -> String {
        let thresholds = Thresholds { explain_ns: Some(1), ..Thresholds::default() };
        let shown = LatencyOptions { thresholds, rank_by: By::Culprit, lines_only: true, is_verbose: false };
        let late = latencies_ns.map(|latency_ns| {
            let causes = vec![Cause::new(CauseKind::Work, "hog", latency_ns)];
            LateEvent { latency_ns, causes, ..LateEvent::default() }
        });
        let mut text = LatencyText::new(View, shown, None, next).in_utc();
        whole_output(&mut text, Keep::Nothing, late.collect(), Snapshot::new("wq", "fentry", "host", 0))
    }

    fn replay() -> Next {
        Next::Replay("whylate replay a.whylate".to_owned(), Vec::new())
    }

    #[test]
    fn ranking_leads_below_a_replay() {
        let ranking = "2 late items waited 12ns in total. Who caused it:\n    100.0%  hog delayed 2 items of 1 handler \
                       by 12ns in total, worst 9ns\n";
        let what = "  # workqueue latency, from queued to started";
        let live = written(Next::Live(|_| None), [3, 9].into_iter());
        assert_eq!(
            live,
            format!("HEADING\nevent of 3\nevent of 9\n\n{ranking}\nNEXT\n{what}\n  whylate wq --table -d 10s\n")
        );
        let replayed = written(replay(), [3, 9].into_iter());
        let next = "whylate replay a.whylate wq --table";
        assert_eq!(replayed, format!("{ranking}\nHEADING\nevent of 9\nevent of 3\n\nNEXT\n{what}\n  {next}\n"));
        assert_eq!(written(replay(), [].into_iter()), "No item waited 1ns or longer.\n");
    }

    #[test]
    fn late_latencies_without_causes_are_counted() {
        let thresholds = Thresholds { explain_ns: Some(10_000_000), ..Thresholds::default() };
        let shown = LatencyOptions { thresholds, rank_by: By::Culprit, lines_only: true, is_verbose: false };
        let written = |next| {
            let mut snapshot = Snapshot::new("wq", "fentry", "host", 0);
            let latency: Histogram = [1_000, 30_000_000, 40_000_000].into_iter().collect();
            let histograms = [("latency".to_owned(), latency)].into();
            snapshot.series = vec![Series { histograms, ..Series::default() }];
            let mut text = LatencyText::new(View, shown, None, next).in_utc();
            whole_output(&mut text, Keep::Nothing, Vec::new(), snapshot)
        };
        assert_eq!(written(replay()), "2 items waited 10ms or longer; the recording has no causes of them.\n");
        let live = "HEADING\n2 items waited 10ms or longer; their causes are unknown.\n";
        assert_eq!(written(Next::Live(|_| None)), live);
    }

    #[test]
    fn more_events_than_can_be_held_are_written_as_they_arrive() {
        let all = written(replay(), 1..=MAX_HELD as u64 + 2);
        let lines: Vec<&str> = all.lines().take(MAX_HELD + 3).collect();
        let expected: Vec<String> = (1..=MAX_HELD + 2).map(|ns| format!("event of {ns}")).collect();
        assert_eq!((lines[0], &lines[1..]), ("HEADING", &expected.iter().map(String::as_str).collect::<Vec<_>>()[..]));
        assert_eq!(all.matches("HEADING").count(), 1);
    }
}
