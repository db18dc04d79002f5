// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate diff`: compares two recordings, or two spans of one.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use jiff::tz::TimeZone;
use whylate_model::Snapshot;
use whylate_model::diff::{About, Comparison, Diff, Lengths, block_ns};
use whylate_model::recording::{Header, Line};
use whylate_model::sources::{SHARED, count_lost};

use crate::cli::UsageError;
use crate::cli::values::span;
use crate::engine::replay::Replay;
use crate::engine::ticks::{Lines, drive};
use crate::json::write_line;
use crate::render::text::diff::{self, Screen};
use crate::render::text::fit::{Fit, terminal_columns};
use crate::store::Span;
use crate::store::play::{Recording, nothing_in_span};
use crate::store::times::{Given, given};

/// Show what differs between two recordings, or between two spans of one
///
/// It compares who makes others late, what is late and how often, rates and latencies of each series, and where
/// threads wait. A row is shown if a Mann-Whitney U test over blocks of time finds a difference. The test's variance
/// is corrected for autocorrelation, and the Benjamini-Hochberg procedure limits the false discovery rate to 5 %. Rows
/// with too little data are not tested. Increases come first.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # what got worse on Tuesday, and who caused it
    whylate diff monday.whylate tuesday.whylate
    # before and after a change at 10:30
    whylate diff web1.whylate --split 10:30
    # two spans of one recording
    whylate diff web1.whylate --before 10:00..10:05 --after 10:20..
    # from 09:00 on, both days
    whylate diff mon.whylate tue.whylate --before 09:00.. --after 09:00..
    # every row, for a program
    whylate diff old.whylate new.whylate --all --json")]
pub struct Arguments {
    /// First recording
    #[arg(value_name = "BEFORE")]
    file: PathBuf,
    /// Second recording (omit to compare spans of BEFORE)
    #[arg(value_name = "AFTER")]
    other: Option<PathBuf>,
    /// Compare the spans before and after this time
    #[arg(long, value_name = "TIME", value_parser = given, conflicts_with_all = ["other", "before", "after"])]
    split: Option<Given>,
    /// Only this span of BEFORE, e.g. 10:00..10:05, ..10:05, or 'yesterday 14:30'..
    #[arg(long, value_name = "FROM..TO", value_parser = span)]
    before: Option<Span>,
    /// Only this span of AFTER
    #[arg(long, value_name = "FROM..TO", value_parser = span)]
    after: Option<Span>,
    /// Also show rows that do not differ or have too little data
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Also print the statistical test and its parameters
    #[arg(short, long)]
    verbose: bool,
}

impl Arguments {
    /// Returns the two sides to compare.
    fn sides(&self) -> anyhow::Result<[Recording; 2]> {
        let (before, after) = match &self.split {
            Some(split) => {
                let (from, to) = (Some(split.clone()), Some(split.clone()));
                (Span { from: None, to }, Span { from, to: None })
            }
            None if self.other.is_none() && (self.before.is_none() || self.after.is_none()) => {
                let what = "name two recordings, or give spans of one with --split, or with --before and --after";
                return Err(UsageError(anyhow!(what)).into());
            }
            None => (self.before.clone().unwrap_or_default(), self.after.clone().unwrap_or_default()),
        };
        let other = self.other.as_ref().unwrap_or(&self.file);
        let of = |path: &PathBuf, span| Recording { path: path.clone(), span, speed: None, command: None };
        Ok([of(&self.file, before), of(other, after)])
    }
}

/// Compares the two sides, and prints the differences.
///
/// # Errors
/// Fails if a file is not a recording, or has no snapshots within its span.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut found = compare(&arguments.sides()?, true)?;
    if !arguments.all {
        found.rows.retain(|row| row.outcome.differs());
    }
    let mut out = Fit::stdout(!arguments.json);
    if arguments.json {
        write_line(&mut out, &found)?;
    } else {
        let (columns, is_verbose, zone) = (terminal_columns(), arguments.verbose, TimeZone::system());
        diff::write(&mut out, &found, &Screen { columns, is_verbose, zone })?;
    }
    Ok(out.flush()?)
}

/// Compares two sides, including rows that do not differ. With `reports_missing`, prints gaps of the recordings to
/// standard error.
///
/// # Errors
/// Fails as `run` does.
pub fn compare(sides: &[Recording; 2], reports_missing: bool) -> anyhow::Result<Diff> {
    // The length of blocks depends on the lengths of both sides, so each is read twice.
    let measured = [measure(&sides[0], reports_missing)?, measure(&sides[1], reports_missing)?];
    let block_ns = block_ns([&measured[0].lengths, &measured[1].lengths]);
    let mut comparison = Comparison::new(measured.each_ref().map(|side| side.header.sources.as_slice()), block_ns);
    comparison.compare_cpus(measured.each_ref().map(|side| &side.header));
    for (number, (side, measured)) in sides.iter().zip(&measured).enumerate() {
        each_line(side, false, &mut |line| {
            if let Line::Snapshot(snapshot) = line {
                let middle_ns = middle_unix_ns(&snapshot).saturating_sub(measured.about.start_unix_ns);
                comparison.add(number, middle_ns, *snapshot);
            }
        })?;
    }
    Ok(comparison.finish(measured.map(|side| side.about)))
}

/// Summary of a side from the first pass.
struct Side {
    header: Header,
    about: About,
    lengths: Lengths,
}

fn measure(recording: &Recording, reports_missing: bool) -> anyhow::Result<Side> {
    let mut about = About { start_unix_ns: u64::MAX, ..About::default() };
    let mut lengths = Lengths::default();
    let mut lost: BTreeMap<String, u64> = BTreeMap::new();
    let header = each_line(recording, reports_missing, &mut |line| match line {
        Line::Snapshot(snapshot) => {
            about.start_unix_ns = about.start_unix_ns.min(snapshot.start_unix_ns);
            lengths.add(&snapshot);
            *lost.entry(snapshot.source.clone()).or_default() += count_lost(&snapshot.source, &snapshot.lost);
        }
        Line::Account(account) => {
            *lost.entry(SHARED.to_owned()).or_default() += account.lost.values().sum::<u64>();
        }
        _ => {}
    })?;
    let name = recording.path.to_string_lossy().into_owned();
    if lengths.covered_ns() == 0 {
        return Err(nothing_in_span(&recording.path));
    }
    lost.retain(|_, count| *count > 0);
    let about = About { name, host: header.host.clone(), kernel: header.kernel.clone(), lost, ..about };
    Ok(Side { header, about, lengths })
}

/// Passes the lines of a side to `take`, and returns its header. A snapshot belongs to the span that has its middle.
fn each_line(recording: &Recording, reports_missing: bool, take: &mut dyn FnMut(Line)) -> anyhow::Result<Header> {
    let mut replay = Replay::new(recording.play()?);
    let (from_ns, to_ns) = replay.played().span_unix_ns();
    let mut add = |line| {
        match &line {
            Line::Snapshot(snapshot) if !(from_ns..to_ns).contains(&middle_unix_ns(snapshot)) => {}
            _ => take(line),
        }
        Ok(())
    };
    drive(&mut replay, &mut Lines(&mut add))?;
    if reports_missing {
        replay.played().report_notes();
    }
    Ok(replay.header().clone())
}

fn middle_unix_ns(snapshot: &Snapshot) -> u64 {
    snapshot.start_unix_ns.saturating_add(snapshot.duration_ns / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_follow_from_options() {
        let sides = |line: &str| {
            let arguments: Arguments = crate::cli::parsed(line.split(' ')).map_err(anyhow::Error::from)?;
            arguments.sides().map(|sides| sides.map(|side| side.path.to_string_lossy().into_owned()))
        };
        for (line, names) in [
            ("a b", ["a", "b"]),
            ("a a", ["a", "a"]),
            ("a --split 10:00", ["a", "a"]),
            ("a --before ..10:00 --after 11:00..", ["a", "a"]),
            ("a b --after 11:00..", ["a", "b"]),
        ] {
            assert_eq!(sides(line).expect("two sides"), names, "{line}");
        }
        for line in ["a", "a --before ..10:00", "a b --split 10:00", "a --split 10:00 --after 10:00..", "a b c"] {
            assert!(sides(line).is_err(), "{line}");
        }
    }
}
