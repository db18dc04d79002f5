// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws the series of a source as a table, whatever its labels, distributions and figures are.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt::Write as _;

use whylate_model::sources::Merging;
use whylate_model::{Card, Histogram, Series, Snapshot};

use super::markup;

/// Maximum number of groups of series.
pub const GROUPS: usize = 50;

/// A column of a table of series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Column {
    Label(String),
    /// A figure of the distribution of this name.
    Statistic(String, Statistic),
    Value(String, Kind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistic {
    Count,
    P50,
    P99,
    Max,
}

/// The unit of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ns,
    Share,
    Number,
}

const STATISTICS: [(Statistic, &str, &str); 4] = [
    (Statistic::Count, "count", "Count"),
    (Statistic::P50, "p50", "p50"),
    (Statistic::P99, "p99", "p99"),
    (Statistic::Max, "max", "Max"),
];

impl Column {
    /// Returns the columns of all series in the snapshots.
    pub fn all<'a>(card: &Card, snapshots: impl IntoIterator<Item = &'a Snapshot>) -> Vec<Column> {
        let all: Vec<&Series> = snapshots.into_iter().flat_map(|snapshot| &snapshot.series).collect();
        let (mut labels, mut histograms, mut values) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for series in &all {
            labels.extend(series.labels.keys());
            histograms.extend(series.histograms.keys());
            values.extend(series.values.keys());
        }
        let of = |name: &String| STATISTICS.map(|(figure, ..)| Column::Statistic(name.clone(), figure));
        let value = |name: &String| Column::Value(name.clone(), value_kind(card, name, &all));
        // The whole latency comes first, where it is inside the page.
        let place = |name: &str| card.phases.iter().position(|(phase, _)| *phase == name).unwrap_or(usize::MAX);
        let mut histograms: Vec<&String> = histograms.into_iter().collect();
        histograms.sort_by_key(|name| (name.as_str() != "latency", place(name)));
        let columns = labels.into_iter().cloned().map(Column::Label);
        columns.chain(histograms.into_iter().flat_map(of)).chain(values.into_iter().map(value)).collect()
    }

    /// Returns the heading. `<` marks a column of text.
    fn heading(&self, has_distribution_name: bool) -> String {
        match self {
            Column::Label(name) => format!("<{}", spaced(name)),
            Column::Statistic(name, of) => {
                let heading = STATISTICS.iter().find(|(figure, ..)| figure == of).map_or("", |(.., heading)| *heading);
                if has_distribution_name { format!("{} {heading}", spaced(name)) } else { heading.to_owned() }
            }
            Column::Value(name, _) => spaced(name.strip_suffix("_ns").unwrap_or(name)),
        }
    }

    /// Returns the column for the script: type, name, and format.
    pub fn for_script(&self) -> [String; 3] {
        let owned = |parts: [&str; 3]| parts.map(str::to_owned);
        match self {
            Column::Label(name) => owned(["label", name, ""]),
            Column::Statistic(name, of) => owned([
                "of",
                name,
                STATISTICS.iter().find(|(figure, ..)| figure == of).map_or("", |(_, name, _)| *name),
            ]),
            Column::Value(name, Kind::Ns) => owned(["value", name, "ns"]),
            Column::Value(name, Kind::Share) => owned(["value", name, "share"]),
            Column::Value(name, Kind::Number) => owned(["value", name, "number"]),
        }
    }

    fn cell(&self, series: &Series) -> String {
        match self {
            Column::Label(name) => markup::name_cell(series.labels.get(name).map_or("-", String::as_str)),
            Column::Statistic(name, figure) => {
                let of = series.histograms.get(name).filter(|of| !of.is_empty());
                match figure {
                    Statistic::Count => markup::count(of.map(Histogram::count)),
                    Statistic::P50 => markup::ns(of.map(|of| of.quantile_ns(0.5))),
                    Statistic::P99 => markup::ns(of.map(|of| of.quantile_ns(0.99))),
                    Statistic::Max => markup::ns(of.map(Histogram::max_ns)),
                }
            }
            Column::Value(name, kind) => match (series.values.get(name), kind) {
                (None, _) => markup::empty_cell(),
                (Some(value), Kind::Ns) => markup::ns(Some(value.max(0.0) as u64)),
                (Some(value), Kind::Share) => markup::share(*value),
                (Some(value), Kind::Number) => markup::number(*value),
            },
        }
    }
}

fn spaced(name: &str) -> String {
    name.replace('_', " ").replace('<', "?")
}

fn value_kind(card: &Card, name: &str, all: &[&Series]) -> Kind {
    let is_share = matches!((card.merging)(name), Merging::OverSpan | Merging::OverPresence | Merging::Derived(_));
    let mut values = all.iter().filter_map(|series| series.values.get(name));
    match name {
        _ if name.ends_with("_ns") => Kind::Ns,
        _ if is_share && !name.ends_with("_per_s") && values.all(|value| (0.0..=1.0).contains(value)) => Kind::Share,
        _ => Kind::Number,
    }
}

/// Returns the series in display order: by CPU number, or else by total time.
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

/// Returns the table, with at most `max_rows` rows.
pub fn table(columns: &[Column], snapshot: &Snapshot, class: &str, max_rows: usize) -> String {
    let distributions: BTreeSet<&String> = columns
        .iter()
        .filter_map(|column| if let Column::Statistic(name, _) = column { Some(name) } else { None })
        .collect();
    let headings: Vec<String> = columns.iter().map(|column| column.heading(distributions.len() > 1)).collect();
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let mut out = format!("<div class=\"wide\"><table class=\"{class}\">{}<tbody>", markup::head(&headings));
    for (number, series) in in_order(snapshot).into_iter().take(max_rows).enumerate() {
        let cells: String = columns.iter().map(|column| column.cell(series)).collect();
        let _ = writeln!(out, "<tr data-row=\"{number}\">{cells}</tr>");
    }
    out += "</tbody></table></div>\n";
    let more = snapshot.series.len().saturating_sub(max_rows);
    if more > 0 {
        let _ = write!(out, "<p class=\"note\">{more} more are not shown; the recording inside has them.</p>");
    }
    out
}

/// Returns the series' shares of time, as bars with labels.
pub fn shares(card: &Card, snapshot: &Snapshot) -> String {
    let mut out = String::new();
    let rows = snapshot.series.iter().filter(|series| card.shares.iter().any(|name| series.values.contains_key(*name)));
    for series in rows {
        let name: Vec<&str> = series.labels.values().map(String::as_str).collect();
        let _ = write!(out, "<li>{} ", markup::text(&name.join(" ")));
        let mut picture = String::new();
        let (mut legend, mut at) = (Vec::new(), 0.0);
        for (rank, share) in card.shares.iter().enumerate() {
            let Some(value) = series.values.get(*share) else { continue };
            let width = value.clamp(0.0, 1.0) * 1000.0;
            let _ = write!(picture, "<path class=\"c{rank}\" d=\"M{at:.0} 0h{width:.0}v10h-{width:.0}z\"/>");
            at += width;
            legend.push(format!("{}{share} {:.1}%", super::timeline::swatch(&format!("c{rank}")), value * 100.0));
        }
        let _ = write!(
            out,
            "<svg class=\"share\" viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\">{picture}</svg> {}</li>",
            legend.join(", ")
        );
    }
    if out.is_empty() {
        out
    } else {
        format!("<h4 class=\"whole-only\">Shares of time</h4><ul class=\"shares\">{out}</ul>")
    }
}

/// Adds up the series by the label of the source. `None` if the source has no such label, or there are no
/// distributions.
pub fn added_up(card: &Card, snapshot: &Snapshot) -> Option<(&'static str, Snapshot)> {
    let label = card.grouped_by?;
    let mut by_label = snapshot.clone();
    by_label.series = snapshot.merged_by(label).into_iter().filter(|series| !series.histograms.is_empty()).collect();
    for series in &mut by_label.series {
        series.labels.retain(|name, _| name == label);
        // Values such as a maximum do not add up.
        series.values.clear();
    }
    (!by_label.series.is_empty()).then_some((label, by_label))
}

/// Returns the series, added up by the label of the source, as a table.
pub fn grouped(card: &Card, snapshot: &Snapshot) -> String {
    let draw = |(label, by_label)| {
        format!(
            "<h4 class=\"whole-only\">By {label}</h4>{}",
            table(&Column::all(card, [&by_label]), &by_label, "grouped", GROUPS)
        )
    };
    added_up(card, snapshot).map(draw).unwrap_or_default()
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
    fn sorts_cpus_numerically() {
        let of = |cpu| series(&[("cpu", cpu)], &[5], &[]);
        let snapshot = snapshot(&TIMERLAT, vec![of("10"), of("9"), of("0")]);
        let order: Vec<&str> = in_order(&snapshot).iter().map(|series| series.labels["cpu"].as_str()).collect();
        assert_eq!(order, ["0", "9", "10"]);
    }

    #[test]
    fn table_has_labels_and_values() {
        let rows = vec![series(&[("tid", "7"), ("process", "<b>")], &[], &[("working", 0.25), ("sqes_per_s", 1.5)])];
        let of_rows = snapshot(&SQPOLL, rows.clone());
        let written = table(&Column::all(&SQPOLL, [&of_rows]), &of_rows, "series", 9);
        for expected in ["&lt;b&gt;", ">25.0%<", ">1.50<", "sqes per s"] {
            assert!(written.contains(expected), "{expected}: {written}");
        }
        assert!(shares(&SQPOLL, &snapshot(&SQPOLL, rows)).contains("working 25.0%"));
    }

    #[test]
    fn latency_comes_before_its_phases() {
        let of = |name: &str| (name.to_owned(), [5_u64].into_iter().collect::<Histogram>());
        let names = ["completion", "device", "latency", "queued", "throttled"];
        let all = Series { histograms: names.map(of).into(), ..series(&[("device", "vda")], &[], &[]) };
        let columns = Column::all(&BLOCK, [&snapshot(&BLOCK, vec![all])]);
        let order = columns.iter().filter_map(|column| match column {
            Column::Statistic(name, Statistic::Max) => Some(name.as_str()),
            _ => None,
        });
        assert_eq!(order.collect::<Vec<_>>(), ["latency", "throttled", "queued", "device", "completion"]);
    }

    #[test]
    fn groups_requests_by_device() {
        let of = |operation, ns| series(&[("device", "vda"), ("operation", operation)], &[ns], &[("bytes", 4096.0)]);
        let written = grouped(&BLOCK, &snapshot(&BLOCK, vec![of("read", 1_000), of("write", 9_000)]));
        assert!(written.contains("data-v=\"2\"") && written.contains("vda") && !written.contains("read"), "{written}");
        assert_eq!(grouped(&TIMERLAT, &snapshot(&TIMERLAT, Vec::new())), "");
    }
}
