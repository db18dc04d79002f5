// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the result of the self-test: expected and measured figures, and verdicts.

use std::io::{self, Write};

use whylate_model::selftest::{Check, Selftest, Unit, Verdict};
use whylate_model::units::{format_ns, printable};

use super::table::Table;

/// Writes a table, the checks that were skipped or failed to run, and the totals.
pub fn write(out: &mut dyn Write, result: &Selftest, terminal_columns: Option<usize>) -> io::Result<()> {
    let columns = "<RESULT, <SOURCE, <INJECTED, <FIGURE, EXPECTED, MEASURED, ERROR, ALLOWED, TRIES, <CAUSE FOUND";
    let mut table = Table::new(columns).hiding_first("TRIES, ALLOWED, ERROR, CAUSE FOUND");
    for check in result.checks.iter().filter(|check| !check.figure.is_empty()) {
        table.row(row(check));
    }
    table.without_empty_columns().write(out, terminal_columns)?;
    for check in result.checks.iter().filter(|check| check.figure.is_empty()) {
        let what = if check.verdict == Verdict::Skip { "not tried" } else { "failed" };
        writeln!(out, "{what}: {}, {}: {}", check.source, check.injected, printable(&check.reason))?;
    }
    writeln!(out, "{} passed, {} failed, {} skipped", result.passed, result.failed, result.skipped)
}

fn row(check: &Check) -> Vec<String> {
    let verdict = match check.verdict {
        Verdict::Pass => "pass",
        Verdict::Fail => "FAIL",
        Verdict::Skip => "skip",
    };
    let tries = if check.tries > 1 { check.tries.to_string() } else { String::new() };
    let figure = |value: f64| format(check.unit, value);
    let sign = if check.error() < 0.0 { "-" } else { "+" };
    let found = check.found.as_ref();
    vec![
        verdict.to_owned(),
        check.source.clone(),
        check.injected.clone(),
        check.figure.clone(),
        figure(check.expected),
        figure(check.measured),
        format!("{sign}{}", figure(check.error().abs())),
        figure(check.tolerance),
        tries,
        found.map_or_else(String::new, |found| format!("{}: {} of {}", found.cause, found.right, found.events)),
    ]
}

fn format(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Ns => format_ns(value.round() as u64),
        Unit::Share => format!("{:.1}%", value * 100.0),
        Unit::Count => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::text::{screens_of, text_of};

    fn example() -> Selftest {
        let checks = vec![
            Check::new("wq", "fentry", "50 work items", "mean run time")
                .compare(Unit::Ns, 1_000_500.0, 1_003_000.0, 80_000.0)
                .blames("bpf_wq_work", 48, 48),
            Check { tries: 3, ..Check::new("sqpoll", "bpf", "a load", "share of work") }.compare(
                Unit::Share,
                0.37,
                0.31,
                0.02,
            ),
            Check::new("timerlat", "bpf", "a softirq", "waits of injected length")
                .compare(Unit::Count, 20.0, 0.0, 1.0)
                .blames("softirq hrtimer", 0, 20),
            Check::skipped("irqsoff", "interrupts off", "this kernel has none\u{1b}".to_owned()),
        ];
        Selftest::new("host", 0, 1, checks)
    }

    #[test]
    fn a_run_is_a_table_and_a_sum() {
        insta::assert_snapshot!(text_of(|out| write(out, &example(), None)));
    }

    #[test]
    fn fits_terminals() {
        insta::assert_snapshot!(screens_of(|out, columns| write(out, &example(), columns)));
    }
}
