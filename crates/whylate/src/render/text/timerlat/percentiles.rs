// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders percentiles of each latency, raw and corrected for missed periods.

use std::io::{self, Write};

use whylate_model::Histogram;

use super::Unit;
use super::total::{OfCpu, Total};
use crate::render::text::table::Table;

const PERCENTILES: [(&str, f64); 7] = [
    ("p50", 0.5),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p99.9", 0.999),
    ("p99.99", 0.9999),
    ("p99.999", 0.99999),
    ("p99.9999", 0.999999),
];
const ROWS: [&str; 4] = ["IRQ", "Thread", "Ret user", "Thread, corrected"];

/// Writes a row for each latency of each CPU, and of all CPUs.
pub fn write(out: &mut dyn Write, total: &Total, unit: Unit, with_user: bool) -> io::Result<()> {
    let figures = PERCENTILES.map(|(name, _)| name).join(", ");
    let mut table = Table::new(&format!("CPU, <LATENCY, COUNT, {figures}, max"));
    for (cpu, of_cpu) in total.cpus.iter().filter(|(_, of_cpu)| of_cpu.count() > 0) {
        rows(&mut table, &cpu.to_string(), of_cpu, unit, with_user);
    }
    rows(&mut table, "ALL", &total.all(), unit, with_user);
    writeln!(out, "Percentiles ({}); corrected: as if every period that was missed had been seen", unit.short())?;
    table.write(out, None)
}

fn rows(table: &mut Table, cpu: &str, of_cpu: &OfCpu, unit: Unit, with_user: bool) {
    let [irq, thread, user] = &of_cpu.latencies;
    for (name, latencies) in ROWS.into_iter().zip([irq, thread, user, &of_cpu.corrected]) {
        if latencies.is_empty() || (name == ROWS[2] && !with_user) {
            continue;
        }
        let mut cells = vec![cpu.to_owned(), name.to_owned(), latencies.count().to_string()];
        cells.extend(PERCENTILES.iter().map(|&(_, quantile)| figure(latencies.quantile_ns(quantile), unit)));
        cells.push(figure(latencies.max_ns(), unit));
        table.row(cells);
    }
}

fn figure(ns: u64, unit: Unit) -> String {
    (ns / unit.ns()).to_string()
}

pub fn write_missed(out: &mut dyn Write, total: &Total) -> io::Result<()> {
    let all = total.all();
    let periods = all.missed + all.latencies.iter().map(Histogram::count).max().unwrap_or(0);
    let share = all.missed as f64 * 100.0 / periods.max(1) as f64;
    writeln!(out, "missed: {} of {periods} periods ({share:.2}%): thread still late for an earlier one", all.missed)?;
    match all.overdue {
        0 => Ok(()),
        overdue => writeln!(out, "overdue: {overdue} more periods in which the thread had not run by the end"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::total::sample;
    use super::*;
    use crate::render::text::text_of;

    #[test]
    fn every_latency_has_its_percentiles() {
        insta::assert_snapshot!(text_of(|out| {
            write(out, &sample::total(), Unit::Microseconds, true)?;
            write_missed(out, &sample::total())
        }));
    }

    #[test]
    fn renders_overdue_activations() {
        let mut total = sample::total();
        total.cpus.values_mut().for_each(|of_cpu| of_cpu.overdue = 3);
        let mut out = Vec::new();
        write_missed(&mut out, &total).expect("a vector takes everything");
        let overdue = format!("overdue: {} more", 3 * total.cpus.len());
        assert!(String::from_utf8(out).expect("text").contains(&overdue));
    }

    #[test]
    fn omits_user_row_without_user_latency() {
        assert!(!text_of(|out| write(out, &sample::total(), Unit::Nanoseconds, false)).contains("Ret user"));
    }
}
