// SPDX-License-Identifier: MIT OR Apache-2.0
//! View of a source: series, distribution, hints, stacks, and late events.

use std::collections::{BTreeMap, BTreeSet};

use whylate_model::sources::{Merging, lost_events};
use whylate_model::units::format_ns;
use whylate_model::{Card, Histogram, Labels, Series, Snapshot};

use super::{frames, late};
use crate::render::text::{histogram, text_of};
use crate::top::panel::{Cell, Panel, Row};
use crate::top::program_filter::{Stacks, agree};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

pub fn panels(window: &Window, card: &'static Card, columns: usize) -> Vec<Panel> {
    let Some(snapshot) = window.merged(card) else {
        return vec![Panel::text("series", card.name, "It saw nothing in this span.")];
    };
    let mut panels = vec![series(card, &snapshot)];
    let figures = figures_of(window, card);
    let text = distribution(card, &snapshot, &figures, window);
    if !text.is_empty() {
        panels.push(Panel::text("distribution", "Distribution and advice", &text));
    }
    panels.extend(frames::panels(window, card, &snapshot.stacks, &Stacks::All, columns));
    panels.push(late::panel(window, |of, _| of.name == card.name));
    panels
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
        text += &text_of(|out| histogram::write(out, figures));
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

/// Label names that differ between series, histogram names, and value names.
#[derive(Default)]
struct ColumnNames<'a> {
    labels: BTreeSet<&'a str>,
    histograms: BTreeSet<&'a str>,
    values: BTreeSet<&'a str>,
}

fn series(card: &'static Card, snapshot: &Snapshot) -> Panel {
    let mut names = ColumnNames::default();
    for series in &snapshot.series {
        names.labels.extend(series.labels.keys().map(String::as_str));
        names.histograms.extend(series.histograms.keys().map(String::as_str));
        names.values.extend(series.values.keys().map(String::as_str));
    }
    let mut columns: Vec<String> = names.labels.iter().map(|name| format!("<{}", heading(name))).collect();
    for name in &names.histograms {
        let prefix = if names.histograms.len() > 1 { format!("{} ", heading(name)) } else { String::new() };
        columns.extend(["COUNT", "P50", "P99", "MAX"].map(|figure| format!("{prefix}{figure}")));
    }
    columns.extend(names.values.iter().map(|name| heading(name)));
    let mut order: Vec<&Series> = snapshot.series.iter().collect();
    let total = |series: &Series| series.histograms.values().map(Histogram::sum_ns).sum::<u128>();
    order.sort_by_key(|series| std::cmp::Reverse(total(series)));
    let rows = order.into_iter().map(|series| {
        let labels =
            names.labels.iter().map(|name| series.labels.get(*name).map_or(Cell::Missing, |value| of_label(value)));
        let histograms = names.histograms.iter().flat_map(|name| of_histogram(series.histograms.get(*name)));
        let values = names.values.iter().map(|name| of_value(card, name, series.values.get(*name)));
        Row {
            key: format!("{:?}", series.labels),
            cells: labels.chain(histograms).chain(values).collect(),
            is_late: false,
            opens: Some(ViewKind::Series(card.name, series.labels.clone())),
        }
    });
    let title = format!("{} over {}, longest total time first", card.name, format_ns(snapshot.duration_ns));
    Panel::table("series", title, &columns.join(","), rows.collect(), "no series")
}

/// Returns a name as a column heading, without the characters that are syntax there.
fn heading(name: &str) -> String {
    name.replace('_', " ").replace([',', '<', '~', '='], "?").to_uppercase()
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
        return vec![Panel::text("series", card.name, "It saw nothing in this span.")];
    };
    let named: Vec<String> = labels.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let title = format!("{}: {}", card.name, named.join(", "));
    let Some(series) = snapshot.series.iter().find(|series| series.labels == *labels) else {
        return vec![Panel::text("series", title, "Not seen in this span.")];
    };
    let distributions = series.histograms.iter().map(|(name, histogram)| {
        let mut cells = vec![Cell::Text(name.clone())];
        cells.extend(of_histogram(Some(histogram)));
        cells.extend([Cell::Ns(histogram.mean_ns()), Cell::Ns(u64::try_from(histogram.sum_ns()).unwrap_or(u64::MAX))]);
        Row { key: name.clone(), cells, is_late: false, opens: None }
    });
    let names = "<DISTRIBUTION, COUNT, P50, P99, MAX, MEAN, TOTAL";
    let mut panels = vec![Panel::table("series", title, names, distributions.collect(), "no distributions")];
    let mut text: BTreeMap<&str, String> = BTreeMap::new();
    series.values.iter().for_each(|(name, value)| {
        text.insert(name, of_value(card, name, Some(value)).text());
    });
    let mut lines: String = text.iter().map(|(name, value)| format!("{}: {value}\n", name.replace('_', " "))).collect();
    for (name, of) in &series.histograms {
        lines += &format!("{}:\n{}", name.replace('_', " "), text_of(|out| histogram::write(out, of)));
    }
    panels.push(Panel::text("figures", "Figures", &lines));
    panels.extend(frames::panels(window, card, &snapshot.stacks, &Stacks::Series(labels.clone()), columns));
    panels.push(late::panel(window, |of, event| of.name == card.name && agree(&event.labels, labels)));
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
