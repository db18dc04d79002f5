// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the histogram of `timerlat hist`.

use std::io::{self, Write};

use whylate_model::{Histogram, Steps};

use super::total::{OfCpu, Total};
use super::{Unit, stamp};

const NAMES: [&str; 3] = ["IRQ", "Thr", "Usr"];

#[derive(Clone, Copy, Debug, Default)]
pub struct HistogramOptions {
    pub unit: Unit,
    /// Columns to show: latency of the interrupt, of the thread, of the return to user space.
    pub kinds: [bool; 3],
    pub without_header: bool,
    pub without_index: bool,
    pub without_summary: bool,
    /// Also show steps with a count of zero.
    pub with_zeros: bool,
}

/// Writes the histogram of all activations so far.
pub fn write(out: &mut dyn Write, total: &Total, shown: &HistogramOptions) -> io::Result<()> {
    let cpus: Vec<_> = total.cpus.iter().filter(|(_, of_cpu)| of_cpu.count() > 0).collect();
    if !shown.without_header {
        let long = if shown.unit == Unit::Nanoseconds { "nanoseconds" } else { "microseconds" };
        writeln!(out, "# RTLA timerlat histogram")?;
        writeln!(out, "# Time unit is {long} ({})", shown.unit.short())?;
        writeln!(out, "# Duration: {}", stamp(total.duration_ns))?;
        let heads =
            cpus.iter().flat_map(|(cpu, _)| kinds(shown).map(move |kind| format!("   {}-{cpu:03}", NAMES[kind])));
        writeln!(out, "{}{}", if shown.without_index { "" } else { "Index" }, heads.collect::<String>())?;
    }
    let columns: Vec<Column> = cpus.iter().flat_map(|(_, of_cpu)| columns(of_cpu, shown)).collect();
    let width = columns.iter().map(|column| column.steps.counts.len()).max().unwrap_or(0);
    for step in 0..width {
        let counts: Vec<u64> =
            columns.iter().map(|column| column.steps.counts.get(step).copied().unwrap_or(0)).collect();
        if shown.with_zeros || counts.iter().any(|&count| count > 0) {
            let step_ns = columns.first().map_or(0, |column| column.steps.step_ns);
            let index = format!("{:<6}", step as u64 * step_ns / shown.unit.ns());
            line(out, shown, &index, counts.iter().map(|count| Some(*count)))?;
        }
    }
    line(out, shown, "over: ", columns.iter().map(|column| Some(column.steps.over)))?;
    if shown.without_summary {
        return Ok(());
    }
    summary(out, shown, &columns)?;
    let all = total.all();
    let heads: String = kinds(shown).map(|kind| format!("{:>9} ", NAMES[kind])).collect();
    writeln!(out, "{}{}", if shown.without_index { "" } else { "ALL:  " }, heads.trim_end())?;
    summary(out, shown, &columns_of(&all, shown))
}

struct Column<'a> {
    steps: &'a Steps,
    latencies: &'a Histogram,
}

fn kinds(shown: &HistogramOptions) -> impl Iterator<Item = usize> + use<> {
    let kinds = shown.kinds;
    (0..NAMES.len()).filter(move |&kind| kinds[kind])
}

fn columns<'a>(of_cpu: &'a OfCpu, shown: &HistogramOptions) -> impl Iterator<Item = Column<'a>> + use<'a> {
    kinds(shown).map(|kind| Column { steps: &of_cpu.steps[kind], latencies: &of_cpu.latencies[kind] })
}

fn columns_of<'a>(of_cpu: &'a OfCpu, shown: &HistogramOptions) -> Vec<Column<'a>> {
    columns(of_cpu, shown).collect()
}

fn summary(out: &mut dyn Write, shown: &HistogramOptions, columns: &[Column]) -> io::Result<()> {
    line(out, shown, "count:", columns.iter().map(|column| Some(column.latencies.count())))?;
    let mut figures = |name, figure: fn(&Histogram) -> u64| {
        let cells = columns
            .iter()
            .map(|column| (!column.latencies.is_empty()).then(|| figure(column.latencies) / shown.unit.ns()));
        line(out, shown, name, cells)
    };
    figures("min:  ", Histogram::min_ns)?;
    figures("avg:  ", Histogram::mean_ns)?;
    figures("max:  ", Histogram::max_ns)
}

fn line(
    out: &mut dyn Write,
    shown: &HistogramOptions,
    index: &str,
    cells: impl Iterator<Item = Option<u64>>,
) -> io::Result<()> {
    let cells: String =
        cells.map(|cell| cell.map_or_else(|| format!("{:>9} ", "-"), |figure| format!("{figure:9} "))).collect();
    writeln!(out, "{}{cells}", if shown.without_index { "" } else { index })
}

#[cfg(test)]
mod tests {
    use super::super::total::sample;
    use super::*;

    fn written(shown: HistogramOptions) -> String {
        crate::render::text::text_of(|out| write(out, &sample::total(), &shown))
    }

    #[test]
    fn the_histogram_is_rtlas() {
        insta::assert_snapshot!(written(HistogramOptions { kinds: [true; 3], ..HistogramOptions::default() }));
    }

    #[test]
    fn each_part_can_be_left_out() {
        let all = HistogramOptions { kinds: [true; 3], ..HistogramOptions::default() };
        let no_irq = written(HistogramOptions { kinds: [false, true, true], ..all });
        assert!(!no_irq.contains("IRQ") && no_irq.contains("Thr-000") && no_irq.contains("Usr-012"));
        let no_thread = written(HistogramOptions { kinds: [true, false, true], ..all });
        assert!(!no_thread.contains("Thr") && no_thread.contains("IRQ-012"));
        let no_header = written(HistogramOptions { without_header: true, ..all });
        assert!(!no_header.contains('#') && !no_header.contains("Index"));
        let no_summary = written(HistogramOptions { without_summary: true, ..all });
        assert!(no_summary.contains("over:") && !no_summary.contains("ALL:") && !no_summary.contains("count:"));
        let no_index = written(HistogramOptions { without_index: true, with_zeros: true, ..all });
        assert!(!no_index.contains("Index") && !no_index.contains("over"));
        assert_eq!(
            written(HistogramOptions { with_zeros: true, without_summary: true, without_header: true, ..all })
                .lines()
                .count(),
            257
        );
    }

    #[test]
    fn nanoseconds_are_shown_whole() {
        let text =
            written(HistogramOptions { kinds: [true; 3], unit: Unit::Nanoseconds, ..HistogramOptions::default() });
        assert!(text.contains("# Time unit is nanoseconds (ns)") && text.contains("min:       4900"));
    }
}
