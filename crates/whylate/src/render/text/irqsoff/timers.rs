// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders snapshots of `whylate irqsoff --timers`.

use std::cmp::Reverse;
use std::io::{self, Write};

use whylate_model::units::{format_ns, printable};
use whylate_model::{LateEvent, Series, Snapshot};

use crate::render::text::table::Table;
use crate::render::text::{Output, footer, histogram};

#[derive(Debug)]
pub struct TimerText {
    with_histograms: bool,
    is_verbose: bool,
    terminal_columns: Option<usize>,
    is_first: bool,
}

impl TimerText {
    /// Creates the output; with `is_verbose`, it lists lost events by reason. Tables fit the terminal, if there is one.
    pub fn new(with_histograms: bool, is_verbose: bool, terminal_columns: Option<usize>) -> Self {
        TimerText { with_histograms, is_verbose, terminal_columns, is_first: true }
    }
}

impl Output for TimerText {
    fn activity(&self) -> Option<String> {
        Some("Tracing every hrtimer".to_owned())
    }

    fn begin(&mut self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }

    fn late(&mut self, _out: &mut dyn Write, _event: &LateEvent) -> io::Result<()> {
        Ok(())
    }

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()> {
        let mut rows: Vec<&Series> = snapshot.series.iter().collect();
        rows.sort_by_key(|series| Reverse(series.histogram("latency").max_ns()));
        if !std::mem::take(&mut self.is_first) {
            writeln!(out)?;
        }
        if rows.is_empty() {
            writeln!(out, "No hrtimer came in.")?;
        } else {
            table_of(&rows).write(out, self.terminal_columns)?;
        }
        if self.with_histograms {
            for series in &rows {
                let label = |name: &str| printable(series.label(name));
                writeln!(out, "\n{} on CPU {} ({})", label("callback"), label("cpu"), label("mode"))?;
                histogram::write(out, series.histogram("latency"))?;
            }
        }
        footer::write(out, &snapshot, self.is_verbose)
    }
}

fn table_of(rows: &[&Series]) -> Table {
    let columns = "<CALLBACK, CPU, <MODE, COUNT, P50, P99, MAX, RUN-P50, RUN-MAX, PERIOD, OVERRUNS";
    let mut table = Table::new(columns).hiding_first("RUN-P50, RUN-MAX, PERIOD, MODE, P50");
    for series in rows {
        let label = |name: &str| series.label(name).to_owned();
        let (latency, runtime) = (series.histogram("latency"), series.histogram("runtime"));
        let mut cells = vec![label("callback"), label("cpu"), label("mode"), latency.count().to_string()];
        let figures = [latency.quantile_ns(0.5), latency.quantile_ns(0.99), latency.max_ns()];
        cells.extend(figures.map(format_ns));
        cells.extend([runtime.quantile_ns(0.5), runtime.max_ns()].map(format_ns));
        // A timer without a period misses none.
        let period_ns = series.values.get("period_ns").map(|&ns| ns as u64);
        cells.push(period_ns.map_or_else(|| "-".to_owned(), format_ns));
        cells.push(if period_ns.is_some() { series.value("overruns").to_string() } else { "-".to_owned() });
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::text::{screens_of, whole_output};
    use crate::store::late_buffer::Keep;

    #[test]
    fn timers_in_order_of_their_lateness() {
        let series = |callback: &str, mode: &str, latencies_ns: &[u64], values: &[(&str, f64)]| {
            let labels = [("callback", callback), ("cpu", "1"), ("mode", mode)];
            let histograms = [("latency", latencies_ns), ("runtime", &[900, 1_100][..])];
            Series {
                labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
                histograms: histograms.map(|(name, ns)| (name.to_owned(), ns.iter().copied().collect())).into(),
                values: values.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
                ..Series::default()
            }
        };
        let mut snapshot = Snapshot::new("irqsoff", "timers", "web1", 0);
        snapshot.series = vec![
            series("hrtimer_wakeup", "hard", &[2_000, 60_000], &[("overruns", 0.0)]),
            series("tick_nohz_handler", "hard", &[1_000, 9_656_000], &[("overruns", 2.0), ("period_ns", 4e6)]),
            series("tcp_pace_kick", "soft", &[8_000], &[("overruns", 0.0)]),
        ];
        let mut text = TimerText::new(false, false, None);
        insta::assert_snapshot!(whole_output(&mut text, Keep::Nothing, Vec::new(), snapshot.clone()));
        let screen =
            |out: &mut dyn Write, columns| TimerText::new(false, false, columns).snapshot(out, snapshot.clone());
        insta::assert_snapshot!("timers_on_a_terminal", screens_of(screen));
    }
}
