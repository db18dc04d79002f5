// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders sources that measure latencies by phase: histograms or a table, late events as they arrive, and the ranking
//! of culprits.

use std::cmp::Reverse;
use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::late::Thresholds;
use whylate_model::units::{format_ns, printable};
use whylate_model::{Card, Culprits, Histogram, LateEvent, Series, Snapshot};

use crate::render::text::table::Table;
use crate::render::text::{Output, footer, histogram, why};

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
    /// Whether nothing was written yet.
    is_empty: bool,
}

impl<V: LatencyView> LatencyText<V> {
    /// Creates the output. Timestamps are in the system's time zone; tables fit the terminal, if there is one.
    pub fn new(view: V, shown: LatencyOptions, terminal_columns: Option<usize>) -> Self {
        let culprits = Culprits::by(shown.rank_by);
        LatencyText { view, shown, zone: TimeZone::system(), terminal_columns, culprits, is_empty: true }
    }

    #[cfg(test)]
    pub fn in_utc(self) -> Self {
        LatencyText { zone: TimeZone::UTC, ..self }
    }

    /// Writes the worst late events, if only those are printed, and the ranking of culprits.
    fn write_why(&mut self, out: &mut dyn Write, snapshot: &Snapshot, threshold_ns: u64) -> io::Result<()> {
        let (worst, words) = (&snapshot.late, self.view.card().words);
        self.culprits.add_unexplained(snapshot.unexplained);
        let ranking = self.culprits.take();
        if ranking.is_empty() {
            return writeln!(out, "No {} {} {} or longer.", words.event, words.lasted, format_ns(threshold_ns));
        }
        if self.shown.thresholds.worst.is_some() {
            if !self.is_empty {
                writeln!(out)?;
            }
            writeln!(out, "Longest {}: {} of {}", words.latencies, worst.len(), ranking.events)?;
            self.view.write_late_heading(out, self.shown.is_verbose)?;
            worst.iter().try_for_each(|event| self.write_late(out, event))?;
        }
        writeln!(out)?;
        why::write_ranking(out, &ranking, words)
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
        self.is_empty = !has_lines;
        if has_lines { self.view.write_late_heading(out, self.shown.is_verbose) } else { Ok(()) }
    }

    fn late(&mut self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
        self.culprits.add(self.view.card(), event);
        let comes_later = self.shown.thresholds.worst.is_some() && !event.causes.is_empty();
        self.is_empty &= comes_later;
        if comes_later { Ok(()) } else { self.write_late(out, event) }
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
        footer::write(out, &snapshot, self.shown.is_verbose)
    }
}

/// Returns the cells below MEAN, P50, P99 and MAX.
pub fn figures(latency: &Histogram) -> [String; 4] {
    [latency.mean_ns(), latency.quantile_ns(0.5), latency.quantile_ns(0.99), latency.max_ns()].map(format_ns)
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
