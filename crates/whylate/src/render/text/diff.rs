// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a comparison of two recordings: its main change as a sentence, and a table.

mod headline;

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::diff::{About, Diff, MIN_BLOCKS, Measure, Outcome, Row, Test, Unit, What};
use whylate_model::sources::{CARDS, Judged};
use whylate_model::units::{format_ns, printable};

use super::fit::without_middle;
use super::table::Table;
use super::time_of_day::in_zone;
use super::why;

/// Maximum number of rows of stacks.
const STACKS: usize = 10;
/// Maximum number of rows of bursts.
const BURSTS: usize = 10;
/// Maximum number of characters of a stack.
const FRAMES: usize = 90;

/// How much is written, and for which place.
#[derive(Debug)]
pub struct Screen {
    /// Width of the terminal; `None` for a file or a pipe.
    pub columns: Option<usize>,
    /// Whether the test and its parameters are written.
    pub is_verbose: bool,
    /// Time zone of the times of day.
    pub zone: TimeZone,
}

/// Writes the comparison as text.
///
/// # Errors
/// Fails if the output does.
pub fn write(out: &mut dyn Write, diff: &Diff, screen: &Screen) -> io::Result<()> {
    let (terminal_columns, zone) = (screen.columns, &screen.zone);
    writeln!(out, "{}\n", headline::sentence(diff))?;
    for (side, about) in [("before", &diff.before), ("after", &diff.after)] {
        writeln!(out, "{side:<7} {}", printable(&heading(about, zone)))?;
    }
    writeln!(out)?;
    let Diff { differ, too_little, .. } = diff;
    let is_all = diff.rows.len() as u64 > *differ;
    if !diff.rows.is_empty() {
        let (stacks, others): (Vec<&Row>, Vec<&Row>) = diff.rows.iter().partition(|row| is_stack(row));
        let shown = if is_all { stacks.len() } else { stacks.len().min(STACKS) };
        // With all rows, the order is kept.
        let rows: Vec<&Row> =
            if is_all { diff.rows.iter().collect() } else { [&others[..], &stacks[..shown]].concat() };
        table(&rows, change).write(out, terminal_columns)?;
        if stacks.len() > shown {
            writeln!(out, "... and {}", why::counted((stacks.len() - shown) as u64, "more stack"))?;
        }
        writeln!(out)?;
    }
    let shown = if is_all { "" } else { " (--all shows every row)" };
    if !diff.bursts.is_empty() {
        writeln!(out, "On one side only, or ten times as many there, in bursts that the test cannot judge:")?;
        let shown = &diff.bursts[..if is_all { diff.bursts.len() } else { diff.bursts.len().min(BURSTS) }];
        table(&shown.iter().collect::<Vec<_>>(), change_of_burst).write(out, terminal_columns)?;
        if diff.bursts.len() > shown.len() {
            writeln!(out, "... and {}", why::counted((diff.bursts.len() - shown.len()) as u64, "more row"))?;
        }
        writeln!(out)?;
    }
    let compared = match (differ, diff.compared) {
        (0, compared) => format!("{compared} rows were compared"),
        (_, compared) => format!("{differ} of {compared} rows differ"),
    };
    writeln!(out, "{compared}; {too_little} more have too little data{shown}.")?;
    if screen.is_verbose {
        write_test(out, &diff.test)?;
    }
    if !diff.not_compared.is_empty() {
        writeln!(out, "\nNot compared, or of limited comparability:")?;
    }
    diff.not_compared
        .iter()
        .try_for_each(|item| writeln!(out, "    {:<9} {}", printable(&item.source), printable(&item.reason)))
}

/// Renders how many rows differ.
pub fn outcome(diff: &Diff) -> String {
    let Diff { compared, differ, test, .. } = diff;
    match differ {
        0 if test.are_too_few() => format!("Too short to compare: {compared} rows were compared"),
        0 if !diff.bursts.is_empty() => format!("By the test no row differs: {compared} rows were compared"),
        0 => format!("Nothing differs: {compared} rows were compared"),
        _ => format!("{differ} of {compared} rows differ"),
    }
}

/// Renders a side: file, duration, host, kernel, start, and lost events.
pub fn heading(about: &About, zone: &TimeZone) -> String {
    let start = in_zone(about.start_unix_ns, zone, "%Y-%m-%d %H:%M:%S");
    let About { name, host, kernel, lost, .. } = about;
    let mut text = format!("{name}: {} of {host} ({kernel}) from {start} on", format_ns(about.duration_ns));
    let events: u64 = lost.values().sum();
    if events > 0 {
        let by_source: Vec<String> = lost.iter().map(|(source, count)| format!("{count} ({source})")).collect();
        text += &format!("; lost {}: {}", why::counted(events, "event"), by_source.join(", "));
    }
    text
}

/// Writes the statistical test and its parameters.
pub fn write_test(out: &mut dyn Write, test: &Test) -> io::Result<()> {
    let Test { name, correction, false_share, least_change, block_ns, blocks_before, blocks_after } = test;
    writeln!(
        out,
        "Test: {name}, over {blocks_before} and {blocks_after} blocks of {}. {correction} keeps the expected share of \
         false differences at {:.0}% or less. Changes of less than {:.0}% count as none.",
        format_ns(*block_ns),
        false_share * 100.0,
        least_change * 100.0,
    )?;
    if test.are_too_few() {
        let what = format!("each side has to last at least {MIN_BLOCKS} times the longest snapshot");
        writeln!(out, "Fewer than {MIN_BLOCKS} blocks are too few to test: {what}.")?;
    }
    Ok(())
}

fn is_stack(row: &Row) -> bool {
    matches!(row.what, What::Stack { .. })
}

fn table(rows: &[&Row], change: fn(&Row) -> String) -> Table {
    let columns = "<SOURCE, <WHAT, <FIGURE, BEFORE, AFTER, CHANGE, % BEFORE, % AFTER, N BEFORE, N AFTER";
    let mut table = Table::new(columns).hiding_first("N BEFORE, N AFTER, % BEFORE, % AFTER, CHANGE, BEFORE, AFTER");
    for row in rows {
        let source = if row.source.is_empty() { "all" } else { &row.source };
        table.row(vec![
            source.to_owned(),
            what(&row.what),
            figure(row),
            value(&row.before, row.unit),
            value(&row.after, row.unit),
            change(row),
            share(&row.before).unwrap_or_default(),
            share(&row.after).unwrap_or_default(),
            row.before.count.to_string(),
            row.after.count.to_string(),
        ]);
    }
    table.without_empty_columns()
}

/// Renders the figure of a row, e.g. `latency p99`.
pub fn figure(row: &Row) -> String {
    match row.distribution.is_empty() {
        true => row.figure.replace('_', " "),
        false => format!("{} {}", row.distribution.replace('_', " "), row.figure),
    }
}

/// Renders the subject of a row: a culprit, late events, a program, a series or a stack.
pub fn what(what: &What) -> String {
    match what {
        What::Culprit { kind, who } => why::culprit(*kind, who),
        What::Late { late } => row_of(late).map_or_else(|| late.clone(), str::to_owned),
        What::HeldUp { program } => format!("program {program}"),
        What::Series { labels } => labels.values().map(String::as_str).collect::<Vec<_>>().join(" "),
        What::Total => "all of them".to_owned(),
        What::Stack { frames } => without_middle(frames, FRAMES),
    }
}

/// Returns the name that the overview's row has for these late events.
fn row_of(late: &str) -> Option<&'static str> {
    judged(late).map(|judged| judged.row)
}

/// Returns the latency that these late events exceed.
fn judged(late: &str) -> Option<&'static Judged> {
    let judged = CARDS.into_iter().flat_map(|card| [Some(&card.judged), card.events.as_ref(), card.held_up.as_ref()]);
    judged.flatten().find(|judged| judged.of == late)
}

/// Renders a number with up to two decimals, fewer for larger numbers.
fn short(number: f64) -> String {
    match number {
        _ if number == 0.0 || number >= 100.0 => format!("{number:.0}"),
        _ if number >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// Renders a figure of one side, with its unit; `-` if it is missing.
pub fn value(measure: &Measure, unit: Unit) -> String {
    let Some(value) = measure.value else { return "-".to_owned() };
    match unit {
        Unit::Ns => format_ns(value as u64),
        Unit::NsPerSecond => format!("{}/s", format_ns(value as u64)),
        Unit::PerSecond => format!("{}/s", short(value)),
        Unit::PerHour => format!("{}/h", short(value)),
        Unit::Share => format!("{}%", short(value * 100.0)),
    }
}

/// Renders the share of a figure in the total of its side, if it has one.
pub fn share(measure: &Measure) -> Option<String> {
    let share = measure.share.filter(|_| measure.value.is_some_and(|value| value > 0.0))?;
    Some(format!("{}%", short(share * 100.0)))
}

/// Renders the change of a row, or why it has none.
pub fn change(row: &Row) -> String {
    match row.outcome {
        Outcome::NoDifference => return "none".to_owned(),
        Outcome::TooLittle => return "too little".to_owned(),
        Outcome::Untested => return "no test".to_owned(),
        Outcome::More | Outcome::Less => {}
    }
    change_of_burst(row)
}

/// Renders by how much the two sides differ, regardless of the test.
pub fn change_of_burst(row: &Row) -> String {
    match (row.before.value, row.after.value) {
        (None | Some(0.0), _) => "only after".to_owned(),
        (_, None | Some(0.0)) => "only before".to_owned(),
        (Some(before), Some(after)) if after >= 2.0 * before => format!("x {}", short(after / before)),
        (Some(before), Some(after)) => format!("{:+.0}%", (after / before - 1.0) * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::CauseKind;
    use whylate_model::recording::Unmeasured;

    use super::*;

    fn row(source: &str, what: What, figure: &str, distribution: &str, unit: Unit, values: [(u64, f64); 2]) -> Row {
        let measure = |(count, value)| Measure { count, value: (count > 0).then_some(value), share: None };
        let outcome = if values[1].1 > values[0].1 { Outcome::More } else { Outcome::Less };
        let [before, after] = values.map(measure);
        let (source, figure, distribution) = (source.to_owned(), figure.to_owned(), distribution.to_owned());
        Row { source, what, figure, distribution, unit, before, after, outcome, p: Some(1e-6), q: Some(1e-4) }
    }

    fn written(diff: &Diff) -> String {
        written_with(diff, false)
    }

    fn written_with(diff: &Diff, is_verbose: bool) -> String {
        let screen = Screen { columns: None, is_verbose, zone: TimeZone::UTC };
        crate::render::text::text_of(|out| write(out, diff, &screen))
    }

    fn diff() -> Diff {
        let about = |name: &str, lost: &[(&str, u64)]| About {
            name: name.to_owned(),
            host: "web1".to_owned(),
            kernel: "6.12.1".to_owned(),
            start_unix_ns: 1_795_252_440_123_456_789,
            duration_ns: 60_000_000_000,
            lost: lost.iter().map(|&(source, count)| (source.to_owned(), count)).collect(),
        };
        let mut culprit = row(
            "",
            What::Culprit { kind: CauseKind::Thread, who: "evil\x1b[2J".into() },
            "delay",
            "",
            Unit::NsPerSecond,
            [(0, 0.0), (31, 2e8)],
        );
        (culprit.before, culprit.after.share) = (Measure { value: Some(0.0), ..Measure::default() }, Some(0.451));
        let late = What::Late { late: whylate_model::sources::WQ.judged.of.to_owned() };
        let series = What::Series {
            labels: [("handler", "vmstat_update"), ("workqueue", "mm_percpu_wq")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        };
        let rows = vec![
            culprit,
            row("wq", late, "late", "", Unit::PerHour, [(2, 120.0), (31, 1860.0)]),
            row("wq", series.clone(), "p99", "latency", Unit::Ns, [(1000, 1e6), (1200, 1.4e6)]),
            Row {
                outcome: Outcome::Untested,
                ..row("wq", series.clone(), "max", "latency", Unit::Ns, [(1000, 3e6), (1200, 2e6)])
            },
            Row { outcome: Outcome::TooLittle, ..row("wq", series, "p50", "pool", Unit::Ns, [(0, 0.0), (5, 2e3)]) },
            row("irqsoff", What::Total, "rate", "", Unit::PerSecond, [(600, 10.0), (60, 1.0)]),
            row(
                "offcpu",
                What::Stack { frames: "dd;read;-;io_schedule".to_owned() },
                "share",
                "",
                Unit::Share,
                [(9, 0.012), (3, 0.0041)],
            ),
        ];
        let test = Test {
            name: "a test".to_owned(),
            correction: "somebody".to_owned(),
            false_share: 0.05,
            least_change: 0.1,
            block_ns: 2_000_000_000,
            blocks_before: 30,
            blocks_after: 30,
        };
        let not_compared = vec![Unmeasured::new("sqpoll", "it was measured only after")];
        let (before, after) = (about("a.whylate", &[("all", 3), ("wq", 1)]), about("b\n.whylate", &[]));
        Diff {
            schema: 1,
            before,
            after,
            test,
            compared: 212,
            differ: 5,
            too_little: 99,
            not_compared,
            bursts: Vec::new(),
            rows,
        }
    }

    #[test]
    fn main_change_comes_first_and_test_last() {
        insta::assert_snapshot!(written_with(&diff(), true));
        assert!(!written(&diff()).contains("Test: "));
    }

    #[test]
    fn main_change_is_a_sentence() {
        let of = |what: What, unit, values: [(u64, f64); 2]| {
            let row = Row { outcome: Outcome::More, ..row("wq", what, "p99", "latency", unit, values) };
            let changed = Diff { rows: vec![row], differ: 1, ..diff() };
            written(&changed).lines().next().unwrap_or_default().to_owned()
        };
        let disk = || What::Culprit { kind: CauseKind::Disk, who: "vda".into() };
        let delay = |values| of(disk(), Unit::NsPerSecond, values);
        assert_eq!(
            delay([(4, 1e6), (9, 3.1e6)]),
            "b?.whylate has delay caused by disk vda, 3.10 times as much as a.whylate: 3.10ms/s, not 1.00ms/s."
        );
        assert_eq!(
            delay([(4, 2e6), (9, 5e5)]),
            "b?.whylate has delay caused by disk vda, 75% less than a.whylate: 500us/s, not 2.00ms/s."
        );
        let gone = "a.whylate has delay caused by disk vda, and b?.whylate does not: 1.00ms/s.";
        assert_eq!(delay([(4, 1e6), (0, 0.0)]), gone);
        let late = What::Late { late: "workqueue latency, from queued to started".to_owned() };
        assert_eq!(
            of(late, Unit::PerHour, [(2, 120.0), (31, 1860.0)]),
            "b?.whylate has work items over their limit, 15.5 times as many as a.whylate: 1860/h, not 120/h."
        );
        let stack = What::Stack { frames: "dd;read;-;io_schedule".to_owned() };
        assert_eq!(
            of(stack, Unit::Share, [(3, 0.004), (9, 0.012)]),
            "b?.whylate has wait time in io_schedule of dd, 3.00 times as much as a.whylate: 1.20%, not 0.40%."
        );
    }

    #[test]
    fn renders_no_difference() {
        let nothing = Diff { rows: Vec::new(), differ: 0, not_compared: Vec::new(), ..diff() };
        insta::assert_snapshot!(written(&nothing));
        let few = Diff { test: Test { blocks_after: 3, ..nothing.test.clone() }, ..nothing };
        assert!(written_with(&few, true).ends_with("longest snapshot.\n"), "{}", written_with(&few, true));
        assert!(written(&few).starts_with("Too short to compare: "), "{}", written(&few));
    }

    #[test]
    fn renders_untestable_bursts() {
        let culprit = What::Culprit { kind: CauseKind::Thread, who: "hog".into() };
        let burst = row("", culprit, "delay", "", Unit::NsPerSecond, [(0, 0.0), (100, 37_000_000.0)]);
        let bursts = vec![Row { outcome: Outcome::NoDifference, ..burst }];
        insta::assert_snapshot!(written(&Diff { rows: Vec::new(), differ: 0, bursts, ..diff() }));
    }
}
