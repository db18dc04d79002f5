// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a comparison as a sentence: the main change, or why there is none.

use std::path::Path;

use whylate_model::diff::{Diff, MIN_BLOCKS, Measure, Row, What};
use whylate_model::units::printable;

use super::{figure, judged, share, short, value, what};

/// Returns the sentence.
pub fn sentence(diff: &Diff) -> String {
    let names = sides(diff);
    let burst = diff.bursts.first().map(|row| change(row, &names));
    if let Some(row) = diff.rows.iter().find(|row| row.outcome.differs()) {
        return change(row, &names);
    }
    match burst {
        burst if diff.test.are_too_few() => {
            let burst = burst.map_or_else(String::new, |burst| format!(" Untested: {burst}"));
            format!(
                "Too short to compare: each side must last at least {MIN_BLOCKS} times its longest snapshot.{burst}"
            )
        }
        Some(burst) => format!("The test finds no difference; untested bursts differ: {burst}"),
        None => {
            let [before, after] = &names;
            format!("Nothing differs by {:.0}% or more in {before} and {after}.", diff.test.least_change * 100.0)
        }
    }
}

/// Returns names for both sides: their files, or their order if it is one file.
fn sides(diff: &Diff) -> [String; 2] {
    let name = |path: &str| {
        Path::new(path).file_name().map_or_else(|| printable(path), |name| printable(&name.to_string_lossy()))
    };
    let names = [&diff.before, &diff.after].map(|side| name(&side.name));
    match diff.before.name == diff.after.name {
        true => ["the first span", "the second span"].map(str::to_owned),
        false if names[0] == names[1] => [&diff.before, &diff.after].map(|side| printable(&side.name)),
        false => names,
    }
}

/// Renders the change of a row.
fn change(row: &Row, [before, after]: &[String; 2]) -> String {
    let (subject, many) = match &row.what {
        What::Culprit { .. } => (format!("has delay caused by {}", what(&row.what)), "as much"),
        What::Late { late } => (format!("has {} over their limit", events(late)), "as many"),
        What::HeldUp { program } => (format!("has {} held up", printable(program)), "as long"),
        What::Stack { frames } => (format!("has wait time in {}", place(frames)), "as much"),
        What::Series { .. } | What::Total => (
            format!("has a {} of {} ({})", figure(row), printable(&what(&row.what)), printable(&row.source)),
            "as high",
        ),
    };
    let [was, is] = [&row.before, &row.after].map(|measure| match share(measure) {
        Some(share) => format!("{} ({share} of all delay)", value(measure, row.unit)),
        None => value(measure, row.unit),
    });
    let amount = |measure: &Measure| measure.value.filter(|&value| value > 0.0);
    let sentence = match (amount(&row.before), amount(&row.after)) {
        (Some(was_ns), Some(is_ns)) if is_ns >= was_ns => {
            format!("{after} {subject}, {} times {many} as {before}: {is}, not {was}", short(is_ns / was_ns))
        }
        (Some(was_ns), Some(is_ns)) => {
            format!("{after} {subject}, {:.0}% less than {before}: {is}, not {was}", (1.0 - is_ns / was_ns) * 100.0)
        }
        (None, _) => format!("{after} {subject}, and {before} does not: {is}"),
        (_, None) => format!("{before} {subject}, and {after} does not: {was}"),
    };
    let mut letters = sentence.chars();
    // A span has no name of its own.
    match letters.next() {
        Some(first) if sentence.starts_with("the ") => format!("{}{}.", first.to_uppercase(), letters.as_str()),
        _ => format!("{sentence}."),
    }
}

/// Returns the name of several late events of a kind.
fn events(late: &str) -> String {
    judged(late).map_or_else(|| printable(late), |judged| judged.late[1].to_owned())
}

/// Renders a stack by the function that waits, and the process.
fn place(frames: &str) -> String {
    match frames.split_once(';') {
        Some((process, stack)) => {
            let innermost = stack.rsplit(';').next().unwrap_or(stack);
            format!("{} of {}", printable(innermost), printable(process))
        }
        None => printable(frames),
    }
}
