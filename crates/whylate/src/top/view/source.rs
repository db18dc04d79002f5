// SPDX-License-Identifier: MIT OR Apache-2.0
//! View of a source: series, distribution, hints, stacks, and late events.

use std::collections::{BTreeMap, BTreeSet};

use whylate_model::sources::{Merging, SeriesColumn, lost_events};
use whylate_model::units::format_ns;
use whylate_model::{Card, Histogram, Labels, Series, Snapshot};

use super::{frames, late};
use crate::render::text::fit::fitted;
use crate::render::text::{histogram, text_of};
use crate::top::panel::{Cell, Panel, Row};
use crate::top::program_filter::{Stacks, agree};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

/// Text of a source without a snapshot.
const NOTHING_SEEN: &str = "It saw nothing in this span.";
/// Columns before the text of a panel.
const INDENT: usize = 2;
/// Figures of the main distribution of a series, and of its phases, the most important first.
const FIGURES: [&str; 4] = ["COUNT", "P50", "P99", "MAX"];
const FIGURES_OF_PHASE: [&str; 4] = ["MAX", "P99", "P50", "COUNT"];

pub fn panels(window: &Window, card: &'static Card, columns: usize) -> Vec<Panel> {
    let Some(snapshot) = window.merged(card) else {
        let missing = window.look.unmeasured.iter().find(|of| of.source == card.name);
        let why = missing.map_or_else(|| NOTHING_SEEN.to_owned(), |of| format!("Not measured: {}", of.reason));
        return vec![text_panel("series", card.name, &why, columns)];
    };
    // Without names and distributions, there is nothing to choose: such values describe the measurement itself.
    let has_rows = snapshot.series.iter().any(|series| !series.labels.is_empty() || !series.histograms.is_empty());
    let mut panels: Vec<Panel> = has_rows.then(|| series(card, &snapshot)).into_iter().collect();
    let figures = figures_of(window, card);
    let text = distribution(card, &snapshot, &figures, window);
    if !text.is_empty() {
        panels.push(text_panel("distribution", "Distribution and advice", &text, columns));
    }
    panels.extend(frames::panels(window, card, &snapshot.stacks, &Stacks::All, columns));
    panels.push(late::panel(window, |of, _| of.name == card.name));
    if !has_rows {
        panels.push(series(card, &snapshot));
    }
    panels
}

/// Returns a panel of text that is broken at spaces.
fn text_panel(id: &'static str, title: &str, text: &str, columns: usize) -> Panel {
    let lines = text.lines().flat_map(|line| fitted(line, columns.saturating_sub(INDENT)));
    Panel::text(id, title, &lines.collect::<Vec<_>>().join("\n"))
}

/// Returns the distribution that the source's limit applies to.
fn figures_of(window: &Window, card: &Card) -> Histogram {
    let mut found = window.ticks().filter_map(|tick| tick.summary(card));
    let Some(mut sum) = found.next().cloned() else { return Histogram::default() };
    found.for_each(|later| sum.add(later));
    sum.figures()
}

fn distribution(card: &Card, snapshot: &Snapshot, figures: &Histogram, window: &Window) -> String {
    let mut text = String::new();
    if !figures.is_empty() {
        text += &format!("{}:\n", card.judged.of);
        text += &text_of(|out| histogram::write_filled(out, figures));
    }
    for limitation in window.look.limitations.iter().filter(|of| of.source == card.name) {
        let what = if limitation.is_about_cpus() { "not on all CPUs" } else { "less precise here" };
        text += &format!("{what}: {}\n", limitation.reason);
    }
    (card.advice)(snapshot).iter().for_each(|advice| text += &format!("{advice}\n"));
    for (reason, count) in lost_events(card.name, &snapshot.lost) {
        text += &format!("lost: {count} {}", reason.replace('_', " "));
        text += &card.meaning(reason).map_or_else(|| "\n".to_owned(), |meaning| format!(": {meaning}\n"));
    }
    if let Some(headline) = window.look.sources.iter().find(|headline| headline.source == card.name) {
        let of_events = headline.late_of.as_ref().map(|of| &of.next);
        let held_up = headline.held_up.as_ref().map(|of| &of.next);
        for next in [Some(&headline.next), of_events, held_up].into_iter().flatten() {
            text += &format!("For more: {next}\n");
        }
    }
    text
}

/// Names of labels, distributions and values of the series, the most important column first.
fn columns_of<'a>(card: &Card, snapshot: &'a Snapshot) -> Vec<SeriesColumn<'a>> {
    let mut columns = BTreeSet::new();
    for series in &snapshot.series {
        columns.extend(series.labels.keys().map(|name| SeriesColumn::Label(name)));
        columns.extend(series.histograms.keys().map(|name| SeriesColumn::Distribution(name)));
        columns.extend(series.values.keys().map(|name| SeriesColumn::Value(name)));
    }
    let mut columns: Vec<SeriesColumn<'_>> = columns.into_iter().collect();
    card.sort_columns(&mut columns);
    columns
}

/// Returns the headings of a part of the series. Names of keys are cut last; the figures of the main distribution need no
/// name.
fn headings_of(column: SeriesColumn<'_>, main: Option<&str>, is_key: bool) -> Vec<String> {
    match column {
        SeriesColumn::Label(name) => vec![format!("{}{}", if is_key { '<' } else { '~' }, heading(name))],
        SeriesColumn::Value(name) => vec![heading(name.strip_suffix("_ns").unwrap_or(name))],
        SeriesColumn::Distribution(name) if main == Some(name) => FIGURES.map(str::to_owned).to_vec(),
        SeriesColumn::Distribution(name) => {
            FIGURES_OF_PHASE.map(|figure| format!("{} {figure}", heading(name))).to_vec()
        }
    }
}

fn series(card: &'static Card, snapshot: &Snapshot) -> Panel {
    let parts = columns_of(card, snapshot);
    let main =
        parts.iter().find_map(|part| if let SeriesColumn::Distribution(name) = part { Some(*name) } else { None });
    let keys = parts.iter().take_while(|part| matches!(part, SeriesColumn::Label(_))).count();
    // A label between two values describes the value before it.
    let is_between = |part: &SeriesColumn<'_>| {
        let is_it = |of: &[SeriesColumn<'_>]| {
            matches!(of, [SeriesColumn::Value(_), SeriesColumn::Label(_), SeriesColumn::Value(_)]) && of[1] == *part
        };
        card.columns.windows(3).any(is_it)
    };
    let is_key = |at: usize, part: &SeriesColumn<'_>| at < keys || is_between(part);
    let headings = parts.iter().enumerate().flat_map(|(at, part)| headings_of(*part, main, is_key(at, part)));
    let headings: Vec<String> = headings.collect();
    let mut order: Vec<&Series> = snapshot.series.iter().collect();
    let total = |series: &Series| series.histograms.values().map(Histogram::sum_ns).sum::<u128>();
    order.sort_by_key(|series| std::cmp::Reverse(total(series)));
    let rows = order.into_iter().map(|series| {
        let cells = parts.iter().flat_map(|part| match *part {
            SeriesColumn::Label(name) => vec![series.labels.get(name).map_or(Cell::Missing, |value| of_label(value))],
            SeriesColumn::Value(name) => vec![of_value(card, name, series.values.get(name))],
            SeriesColumn::Distribution(name) => {
                let [count, p50, p99, max] = of_histogram(series.histograms.get(name));
                if main == Some(name) { vec![count, p50, p99, max] } else { vec![max, p99, p50, count] }
            }
        });
        Row {
            key: format!("{:?}", series.labels),
            cells: cells.collect(),
            is_late: false,
            opens: Some(ViewKind::Series(card.name, series.labels.clone())),
        }
    });
    let title = format!("{} over {}, longest total time first", card.name, format_ns(snapshot.duration_ns));
    Panel::table("series", title, &headings.join(","), rows.collect(), "no series")
}

/// Returns a name as a column heading, without the characters that are syntax there.
fn heading(name: &str) -> String {
    words(name).replace([',', '<', '~', '='], "?").to_uppercase()
}

/// Returns a name in words, in American spelling: JSON keeps the spelling of its first version.
fn words(name: &str) -> String {
    name.replace('_', " ").replace("utilisation", "utilization")
}

/// Sorts labels that are numbers, such as CPUs, by number.
fn of_label(value: &str) -> Cell {
    match value.parse::<u64>() {
        // Inverted, as numbers sort descending and labels should ascend.
        Ok(number) => Cell::Ordered(value.to_owned(), u64::MAX - number),
        Err(_) => Cell::Text(value.to_owned()),
    }
}

fn of_histogram(histogram: Option<&Histogram>) -> [Cell; 4] {
    match histogram.filter(|histogram| !histogram.is_empty()) {
        Some(of) => {
            let quantile = |share| Cell::Ns(of.quantile_ns(share));
            [Cell::Count(of.count()), quantile(0.5), quantile(0.99), Cell::Ns(of.max_ns())]
        }
        None => [Cell::Missing, Cell::Missing, Cell::Missing, Cell::Missing],
    }
}

fn of_value(card: &Card, name: &str, value: Option<&f64>) -> Cell {
    let Some(&value) = value else { return Cell::Missing };
    let is_share = matches!((card.merging)(name), Merging::OverSpan | Merging::OverPresence | Merging::Derived(_));
    match name {
        _ if name.ends_with("_ns") => Cell::Ns(value.max(0.0) as u64),
        _ if is_share && !name.ends_with("_per_s") && (0.0..=1.0).contains(&value) => Cell::Share(value),
        _ => Cell::Number(value),
    }
}

/// Returns the view of a series: its distributions and values, the stacks with its labels, and its late events.
pub fn of_series(window: &Window, card: &'static Card, labels: &Labels, columns: usize) -> Vec<Panel> {
    let Some(snapshot) = window.merged(card) else {
        return vec![Panel::text("series", card.name, NOTHING_SEEN)];
    };
    let named: Vec<String> = labels.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let title = if named.is_empty() { card.name.to_owned() } else { format!("{}: {}", card.name, named.join(", ")) };
    let Some(series) = snapshot.series.iter().find(|series| series.labels == *labels) else {
        return vec![Panel::text("series", title, "Not seen in this span.")];
    };
    // The latency comes before its phases.
    let mut order: Vec<SeriesColumn<'_>> =
        series.histograms.keys().map(|name| SeriesColumn::Distribution(name)).collect();
    card.sort_columns(&mut order);
    let distributions = order.iter().filter_map(|of| match of {
        SeriesColumn::Distribution(name) => series.histograms.get_key_value(*name),
        _ => None,
    });
    let rows = distributions.clone().map(|(name, histogram)| {
        let mut cells = vec![Cell::Text(name.clone())];
        cells.extend(of_histogram(Some(histogram)));
        cells.extend([Cell::Ns(histogram.mean_ns()), Cell::Ns(u64::try_from(histogram.sum_ns()).unwrap_or(u64::MAX))]);
        Row { key: name.clone(), cells, is_late: false, opens: None }
    });
    let names = "<DISTRIBUTION, COUNT, P50, P99, MAX, MEAN, TOTAL";
    let mut panels = vec![Panel::table("series", title, names, rows.collect(), "no distributions")];
    let mut text: BTreeMap<&str, String> = BTreeMap::new();
    series.values.iter().for_each(|(name, value)| {
        text.insert(name, of_value(card, name, Some(value)).text());
    });
    let mut lines: String = text.iter().map(|(name, value)| format!("{}: {value}\n", words(name))).collect();
    for (name, of) in distributions {
        lines += &format!("{}:\n{}", words(name), text_of(|out| histogram::write_filled(out, of)));
    }
    panels.push(text_panel("figures", "Figures", &lines, columns));
    panels.extend(frames::panels(window, card, &snapshot.stacks, &Stacks::Series(labels.clone()), columns));
    panels.push(late::panel(window, |of, event| {
        of.name == card.name && (labels.is_empty() || agree(&event.labels, labels))
    }));
    panels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_names_are_escaped() {
        assert_eq!(heading("a,<b_c"), "A??B C");
    }
}
