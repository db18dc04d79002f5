// SPDX-License-Identifier: MIT OR Apache-2.0
//! The series of a source as a table, whatever its labels, distributions and figures are.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt::Write as _;

use whylate_model::merge::Merging;
use whylate_model::{Card, Histogram, Series, Snapshot};

use super::markup;

/// So many groups of series are shown.
pub const GROUPS: usize = 50;

/// A column, and what its cells are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Column {
    Label(String),
    /// A figure of the distribution of this name.
    Of(String, Figure),
    Value(String, Kind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    Count,
    P50,
    P99,
    Max,
}

/// What a value is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ns,
    Share,
    Number,
}

const FIGURES: [(Figure, &str, &str); 4] = [
    (Figure::Count, "count", "Count"),
    (Figure::P50, "p50", "p50"),
    (Figure::P99, "p99", "p99"),
    (Figure::Max, "max", "Max"),
];

impl Column {
    /// What all series of these snapshots have.
    pub fn all<'a>(card: &Card, snapshots: impl IntoIterator<Item = &'a Snapshot>) -> Vec<Column> {
        let all: Vec<&Series> = snapshots.into_iter().flat_map(|snapshot| &snapshot.series).collect();
        let (mut labels, mut histograms, mut values) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for series in &all {
            labels.extend(series.labels.keys());
            histograms.extend(series.histograms.keys());
            values.extend(series.values.keys());
        }
        let of = |name: &String| FIGURES.map(|(figure, ..)| Column::Of(name.clone(), figure));
        let value = |name: &String| Column::Value(name.clone(), kind(card, name, &all));
        let columns = labels.into_iter().cloned().map(Column::Label);
        columns.chain(histograms.into_iter().flat_map(of)).chain(values.into_iter().map(value)).collect()
    }

    /// As it stands above; `<` before names.
    fn heading(&self, tells_distribution: bool) -> String {
        match self {
            Column::Label(name) => format!("<{}", words(name)),
            Column::Of(name, of) => {
                let told = FIGURES.iter().find(|(figure, ..)| figure == of).map_or("", |(.., told)| *told);
                if tells_distribution { format!("{} {told}", words(name)) } else { told.to_owned() }
            }
            Column::Value(name, _) => words(name.strip_suffix("_ns").unwrap_or(name)),
        }
    }

    /// For the script: what it is of, and how it is shown.
    pub fn told(&self) -> [String; 3] {
        let owned = |parts: [&str; 3]| parts.map(str::to_owned);
        match self {
            Column::Label(name) => owned(["label", name, ""]),
            Column::Of(name, of) => {
                owned(["of", name, FIGURES.iter().find(|(figure, ..)| figure == of).map_or("", |(_, name, _)| *name)])
            }
            Column::Value(name, Kind::Ns) => owned(["value", name, "ns"]),
            Column::Value(name, Kind::Share) => owned(["value", name, "share"]),
            Column::Value(name, Kind::Number) => owned(["value", name, "number"]),
        }
    }

    fn cell(&self, series: &Series) -> String {
        match self {
            Column::Label(name) => markup::named(series.labels.get(name).map_or("-", String::as_str)),
            Column::Of(name, figure) => {
                let of = series.histograms.get(name).filter(|of| !of.is_empty());
                match figure {
                    Figure::Count => markup::count(of.map(Histogram::count)),
                    Figure::P50 => markup::ns(of.map(|of| of.quantile_ns(0.5))),
                    Figure::P99 => markup::ns(of.map(|of| of.quantile_ns(0.99))),
                    Figure::Max => markup::ns(of.map(Histogram::max_ns)),
                }
            }
            Column::Value(name, kind) => match (series.values.get(name), kind) {
                (None, _) => markup::none(),
                (Some(value), Kind::Ns) => markup::ns(Some(value.max(0.0) as u64)),
                (Some(value), Kind::Share) => markup::share(*value),
                (Some(value), Kind::Number) => markup::number(*value),
            },
        }
    }
}

fn words(name: &str) -> String {
    name.replace('_', " ").replace('<', "?")
}

fn kind(card: &Card, name: &str, all: &[&Series]) -> Kind {
    let is_share = matches!((card.merging)(name), Merging::OverSpan | Merging::OverPresence | Merging::Derived(_));
    let mut values = all.iter().filter_map(|series| series.values.get(name));
    match name {
        _ if name.ends_with("_ns") => Kind::Ns,
        _ if is_share && !name.ends_with("_per_s") && values.all(|value| (0.0..=1.0).contains(value)) => Kind::Share,
        _ => Kind::Number,
    }
}

/// The series in the order in which they are shown: of CPUs by their number, and else those first that took longest in all.
pub fn in_order(snapshot: &Snapshot) -> Vec<&Series> {
    let mut order: Vec<&Series> = snapshot.series.iter().collect();
    let number = |series: &Series| series.labels.values().next().and_then(|label| label.parse::<u64>().ok());
    if order.iter().all(|series| number(series).is_some()) {
        order.sort_by_key(|series| number(series));
    } else {
        let total = |series: &Series| series.histograms.values().map(Histogram::sum_ns).sum::<u128>();
        order.sort_by_key(|series| Reverse(total(series)));
    }
    order
}

/// The table, with at most so many rows.
pub fn table(columns: &[Column], snapshot: &Snapshot, class: &str, most: usize) -> String {
    let distributions: BTreeSet<&String> =
        columns.iter().filter_map(|column| if let Column::Of(name, _) = column { Some(name) } else { None }).collect();
    let headings: Vec<String> = columns.iter().map(|column| column.heading(distributions.len() > 1)).collect();
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let mut out = format!("<div class=\"wide\"><table class=\"{class}\">{}<tbody>", markup::head(&headings));
    for (number, series) in in_order(snapshot).into_iter().take(most).enumerate() {
        let cells: String = columns.iter().map(|column| column.cell(series)).collect();
        let _ = writeln!(out, "<tr data-row=\"{number}\">{cells}</tr>");
    }
    out += "</tbody></table></div>\n";
    let more = snapshot.series.len().saturating_sub(most);
    if more > 0 {
        let _ = write!(out, "<p class=\"note\">{more} more are not shown; the recording inside has them.</p>");
    }
    out
}

/// What shares of its time each series has, as bars with words.
pub fn shares(card: &Card, snapshot: &Snapshot) -> String {
    let mut out = String::new();
    let rows = snapshot.series.iter().filter(|series| card.shares.iter().any(|name| series.values.contains_key(*name)));
    for series in rows {
        let name: Vec<&str> = series.labels.values().map(String::as_str).collect();
        let _ = write!(out, "<li>{} ", markup::text(&name.join(" ")));
        let mut picture = String::new();
        let (mut words, mut at) = (Vec::new(), 0.0);
        for (rank, share) in card.shares.iter().enumerate() {
            let Some(value) = series.values.get(*share) else { continue };
            let width = value.clamp(0.0, 1.0) * 1000.0;
            let _ = write!(picture, "<path class=\"c{rank}\" d=\"M{at:.0} 0h{width:.0}v10h-{width:.0}z\"/>");
            at += width;
            words.push(format!("{}{share} {:.1}%", super::timeline::swatch(&format!("c{rank}")), value * 100.0));
        }
        let _ = write!(
            out,
            "<svg class=\"share\" viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\">{picture}</svg> {}</li>",
            words.join(", ")
        );
    }
    if out.is_empty() {
        out
    } else {
        format!("<h4 class=\"whole-only\">Shares of time</h4><ul class=\"shares\">{out}</ul>")
    }
}

/// The series added up by the label that the source is read by; `None` where it is read by none.
pub fn added_up(card: &Card, snapshot: &Snapshot) -> Option<(&'static str, Snapshot)> {
    let label = card.grouped_by?;
    let mut by_label = snapshot.clone();
    by_label.series = snapshot.merged_by(label).into_iter().filter(|series| !series.histograms.is_empty()).collect();
    for series in &mut by_label.series {
        series.labels.retain(|name, _| name == label);
        // Figures such as the longest of a kind do not add up.
        series.values.clear();
    }
    (!by_label.series.is_empty()).then_some((label, by_label))
}

/// The same as a table.
pub fn grouped(card: &Card, snapshot: &Snapshot) -> String {
    let told = |(label, by_label)| {
        format!(
            "<h4 class=\"whole-only\">By {label}</h4>{}",
            table(&Column::all(card, [&by_label]), &by_label, "grouped", GROUPS)
        )
    };
    added_up(card, snapshot).map(told).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::{BLOCK, SQPOLL, TIMERLAT};

    use super::*;

    fn series(labels: &[(&str, &str)], latencies_ns: &[u64], values: &[(&str, f64)]) -> Series {
        let name = "latency".to_owned();
        Series {
            labels: labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            histograms: if latencies_ns.is_empty() {
                [].into()
            } else {
                [(name, latencies_ns.iter().copied().collect())].into()
            },
            values: values.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
            ..Series::default()
        }
    }

    fn snapshot(card: &Card, series: Vec<Series>) -> Snapshot {
        Snapshot { series, ..Snapshot::new(card.name, "made", "web1", 0) }
    }

    #[test]
    fn cpus_are_in_the_order_of_their_numbers() {
        let of = |cpu| series(&[("cpu", cpu)], &[5], &[]);
        let snapshot = snapshot(&TIMERLAT, vec![of("10"), of("9"), of("0")]);
        let order: Vec<&str> = in_order(&snapshot).iter().map(|series| series.labels["cpu"].as_str()).collect();
        assert_eq!(order, ["0", "9", "10"]);
    }

    #[test]
    fn a_table_has_what_the_series_have() {
        let rows = vec![series(&[("tid", "7"), ("process", "<b>")], &[], &[("working", 0.25), ("sqes_per_s", 1.5)])];
        let of_rows = snapshot(&SQPOLL, rows.clone());
        let written = table(&Column::all(&SQPOLL, [&of_rows]), &of_rows, "series", 9);
        for told in ["&lt;b&gt;", ">25.0%<", ">1.50<", "sqes per s"] {
            assert!(written.contains(told), "{told}: {written}");
        }
        assert!(shares(&SQPOLL, &snapshot(&SQPOLL, rows)).contains("working 25.0%"));
    }

    #[test]
    fn requests_are_added_up_by_device() {
        let of = |operation, ns| series(&[("device", "vda"), ("operation", operation)], &[ns], &[("bytes", 4096.0)]);
        let written = grouped(&BLOCK, &snapshot(&BLOCK, vec![of("read", 1_000), of("write", 9_000)]));
        assert!(written.contains("data-v=\"2\"") && written.contains("vda") && !written.contains("read"), "{written}");
        assert_eq!(grouped(&TIMERLAT, &snapshot(&TIMERLAT, Vec::new())), "");
    }
}
