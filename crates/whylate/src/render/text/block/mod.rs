// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders snapshots of `whylate block`.

mod late;
pub mod shape;

use std::cmp::Reverse;
use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::sources::BLOCK;
use whylate_model::units::{format_ns, printable};
use whylate_model::{Culprits, Histogram, LateEvent, Series, Snapshot};

use self::shape::{Key, Shape, Sort};
use crate::cli::arguments::Explain;
use crate::render::text::table::Table;
use crate::render::text::{Output, footer, histogram, why};

/// The phases of a request in chronological order, with their descriptions.
const PHASES: [(&str, &str); 5] = [
    ("latency", "from submission until done"),
    ("throttled", "held back by io.max or writeback throttling, or no request was free"),
    ("queued", "in the queue, until issued to the driver"),
    ("device", "at the device (service time)"),
    ("completion", "from the device's interrupt until done"),
];

#[derive(Clone, Copy, Debug)]
pub struct BlockTextOptions<'a> {
    /// Output about all requests: histograms or a table.
    pub shape: &'a Shape,
    /// Late requests that are explained.
    pub explain: Explain,
    /// How culprits are grouped.
    pub rank_by: By,
    /// Late requests that are not explained have a line too.
    pub has_slower: bool,
    /// Prints only late requests and their culprits.
    pub lines_only: bool,
}

pub struct BlockText<'a> {
    shown: BlockTextOptions<'a>,
    zone: TimeZone,
    terminal_columns: Option<usize>,
    culprits: Culprits,
}

impl<'a> BlockText<'a> {
    /// Creates the output. Timestamps are in the system's time zone; tables fit the terminal, if there is one.
    pub fn new(shown: BlockTextOptions<'a>, terminal_columns: Option<usize>) -> Self {
        BlockText { shown, zone: TimeZone::system(), terminal_columns, culprits: Culprits::by(shown.rank_by) }
    }

    /// Writes the worst late events, if only those are printed, and the ranking of culprits.
    fn write_why(&mut self, out: &mut dyn Write, snapshot: &Snapshot, threshold_ns: u64) -> io::Result<()> {
        let worst = &snapshot.late;
        self.culprits.add_unexplained(snapshot.unexplained);
        let ranking = self.culprits.take();
        if ranking.is_empty() {
            return writeln!(out, "No request took {} or longer.", format_ns(threshold_ns));
        }
        if self.shown.explain.worst.is_some() {
            writeln!(out, "\nLongest requests: {} of {}", worst.len(), ranking.events)?;
            late::write_heading(out)?;
            for event in worst {
                late::write(out, event, &self.zone)?;
            }
        }
        writeln!(out)?;
        why::write_ranking(out, &ranking, why::REQUESTS)
    }
}

impl Output for BlockText<'_> {
    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "Tracing I/O request latency ... Hit Ctrl-C to end.")?;
        // With --worst, the longest are printed below a heading of their own.
        let has_lines = self.shown.has_slower || self.shown.explain.why.is_some() && self.shown.explain.worst.is_none();
        if has_lines { late::write_heading(out) } else { Ok(()) }
    }

    fn late(&mut self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
        self.culprits.add(&BLOCK, event);
        let comes_later = self.shown.explain.worst.is_some() && !event.causes.is_empty();
        if comes_later { Ok(()) } else { late::write(out, event, &self.zone) }
    }

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()> {
        if let Some(threshold_ns) = self.shown.explain.why {
            self.write_why(out, &snapshot, threshold_ns)?;
        }
        if !self.shown.lines_only {
            writeln!(out)?;
            if self.shown.shape.table {
                let key = self.shown.shape.by.unwrap_or(Key::Operation);
                table_of(&snapshot, key, self.shown.shape.sort).write(out, self.terminal_columns)?;
            } else {
                write_histograms(out, self.shown.shape, &snapshot)?;
            }
        }
        footer::write(out, &snapshot)
    }
}

/// Returns the labels to group series by, in the order of the columns.
fn labels_of(key: Key) -> &'static [&'static str] {
    match key {
        Key::Device => &["device"],
        Key::Operation => &["device", "operation"],
        Key::Process => &["device", "operation", "process", "pid"],
        Key::Thread => &["device", "operation", "thread", "tid"],
        Key::Cgroup => &["device", "operation", "cgroup"],
    }
}

/// Merges series with the same values of the key's labels.
fn merged(snapshot: &Snapshot, key: Key) -> Vec<Series> {
    let mut rows: Vec<Series> = Vec::new();
    for series in &snapshot.series {
        let mut labels = series.labels.clone();
        labels.retain(|name, _| labels_of(key).contains(&name.as_str()));
        match rows.iter_mut().find(|row| row.labels == labels) {
            Some(row) => row.absorb(series),
            None => rows.push(Series { labels, ..series.clone() }),
        }
    }
    rows.sort_by(|a, b| names_of(a, key).cmp(&names_of(b, key)));
    rows
}

fn names_of(series: &Series, key: Key) -> Vec<&str> {
    labels_of(key).iter().map(|name| series.labels.get(*name).map_or("", String::as_str)).collect()
}

fn write_histograms(out: &mut dyn Write, shape: &Shape, snapshot: &Snapshot) -> io::Result<()> {
    writeln!(out, "Printing histogram")?;
    let key = shape.by.unwrap_or(Key::Device);
    for series in merged(snapshot, key) {
        let heading: Vec<String> = labels_of(key)
            .iter()
            .zip(names_of(&series, key))
            .map(|(label, name)| format!("{label} = {}", printable(name)))
            .collect();
        writeln!(out, "\n{}", heading.join(", "))?;
        let of = |phase: &str| series.histograms.get(phase).cloned().unwrap_or_default();
        if !shape.phases {
            histogram::write(out, &of("latency"))?;
            continue;
        }
        for (phase, meaning) in PHASES {
            writeln!(out, "\n{phase}: {meaning}")?;
            histogram::write(out, &of(phase))?;
        }
    }
    Ok(())
}

fn table_of(snapshot: &Snapshot, key: Key, sort: Sort) -> Table {
    let names: Vec<String> = labels_of(key)
        .iter()
        .map(|label| match *label {
            "device" => "<DISK".to_owned(),
            "operation" => "<OP".to_owned(),
            "pid" | "tid" => label.to_uppercase(),
            label => format!("<{}", label.to_uppercase()),
        })
        .collect();
    let figures = "COUNT, REQ/S, MB/S, MEAN, P50, P99, MAX, THROTTLED, QUEUED, DEVICE, COMPLETION, DEPTH";
    let mut table = Table::new(&format!("{}, {figures}", names.join(", ")));
    let seconds = snapshot.duration_ns as f64 / 1e9;
    let mut rows = merged(snapshot, key);
    // The sort is stable: equal rows stay in the order of their names.
    rows.sort_by_key(|series| Reverse(rank(series, sort)));
    for series in &rows {
        let none = Histogram::default();
        let of = |phase: &str| series.histograms.get(phase).unwrap_or(&none);
        let latency = of("latency");
        let mut cells: Vec<String> = names_of(series, key).into_iter().map(str::to_owned).collect();
        let rate = |figure: f64| if seconds > 0.0 { figure / seconds } else { 0.0 };
        cells.push(latency.count().to_string());
        cells.push(format!("{:.1}", rate(latency.count() as f64)));
        cells.push(format!("{:.1}", rate(series.values.get("bytes").copied().unwrap_or(0.0)) / 1e6));
        cells.extend(
            [latency.mean_ns(), latency.quantile_ns(0.5), latency.quantile_ns(0.99), latency.max_ns()].map(format_ns),
        );
        cells.extend(["throttled", "queued", "device", "completion"].map(|phase| format_ns(of(phase).mean_ns())));
        // Little's law: the mean number of requests is the arrival rate times the mean latency.
        let depth = if snapshot.duration_ns > 0 { latency.sum_ns() as f64 / snapshot.duration_ns as f64 } else { 0.0 };
        cells.push(format!("{depth:.1}"));
        table.row(cells);
    }
    table
}

/// Returns the sort key of a row; rows are sorted in descending order.
fn rank(series: &Series, sort: Sort) -> u64 {
    let none = Histogram::default();
    let latency = series.histograms.get("latency").unwrap_or(&none);
    match sort {
        Sort::Count => latency.count(),
        Sort::Bytes => series.values.get("bytes").copied().unwrap_or(0.0) as u64,
        Sort::Mean => latency.mean_ns(),
        Sort::P50 => latency.quantile_ns(0.5),
        Sort::P99 => latency.quantile_ns(0.99),
        Sort::Max => latency.max_ns(),
        Sort::Name => 0,
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches as _};
    use whylate_model::{Cause, CauseKind};

    use super::*;

    fn shape(line: &str) -> Shape {
        let command = Shape::augment_args(clap::Command::new("block").no_binary_name(true));
        let matches = command.try_get_matches_from(line.split_whitespace()).expect("a line that is taken");
        Shape::from_arg_matches(&matches).expect("its arguments")
    }

    fn series(device: &str, operation: &str, device_ns: &[u64]) -> Series {
        let labels = [("device", device), ("operation", operation)];
        let at_once = |ns: u64| device_ns.iter().map(|_| ns).collect::<Histogram>();
        let histograms = [
            ("latency", device_ns.iter().map(|ns| ns + 5_000).collect()),
            ("throttled", at_once(1_000)),
            ("queued", at_once(2_000)),
            ("device", device_ns.iter().copied().collect()),
            ("completion", at_once(2_000)),
        ];
        Series {
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            histograms: histograms.map(|(name, histogram)| (name.to_owned(), histogram)).into(),
            values: [("bytes".to_owned(), 4096.0 * device_ns.len() as f64), ("errors".to_owned(), 0.0)].into(),
            ..Series::default()
        }
    }

    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::new("block", "io_start", "host", 1_795_252_440_000_000_000);
        snapshot.duration_ns = 1_000_000_000;
        snapshot.series = vec![
            series("vda", "read", &[100_000, 200_000, 3_000_000]),
            series("vda", "write", &[50_000; 100]),
            series("evil\x1b[2J", "flush", &[20_000_000]),
        ];
        snapshot.lost.insert("own".to_owned(), 2);
        snapshot
    }

    fn text<'a>(shape: &'a Shape, explain: Explain, lines_only: bool) -> BlockText<'a> {
        let shown = BlockTextOptions { shape, explain, rank_by: By::Culprit, has_slower: false, lines_only };
        BlockText { zone: TimeZone::UTC, ..BlockText::new(shown, None) }
    }

    fn written(output: &mut BlockText<'_>, snapshot: Snapshot) -> String {
        let mut out = Vec::new();
        output.snapshot(&mut out, snapshot).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_row_per_device_and_operation() {
        let shape = shape("--table");
        insta::assert_snapshot!(written(&mut text(&shape, Explain::default(), false), snapshot()));
    }

    #[test]
    fn a_histogram_per_device() {
        let shape = shape("");
        insta::assert_snapshot!(written(&mut text(&shape, Explain::default(), false), snapshot()));
    }

    #[test]
    fn late_requests_are_explained_and_ranked() {
        let shape = shape("");
        let explain = Explain { why: Some(1_000_000), ..Explain::default() };
        let mut output = text(&shape, explain, true);
        let labels = [
            ("device", "vda"),
            ("operation", "read"),
            ("flags", "RS"),
            ("submitter", "cat\x1b[2J:77"),
            ("submitter_tid", "77"),
            ("bytes", "4096"),
            ("sector", "123456"),
            ("error", "EIO"),
        ];
        let phases = [("throttled", 1_000), ("queued", 2_000_000), ("device", 1_000_000), ("completion", 9_000)];
        let event = LateEvent {
            subject: "reads of vda".to_owned(),
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns: 3_010_000,
            phases: phases.map(|(name, ns)| (name.to_owned(), ns)).into(),
            causes: vec![
                Cause::new(CauseKind::DiskQueue, "fio:900 (writes)", 2_001_000),
                Cause::new(CauseKind::Disk, "vda", 1_000_000),
                Cause::new(CauseKind::Softirq, "block", 9_000),
            ],
            ..LateEvent::default()
        };
        let mut out = Vec::new();
        output.begin(&mut out).expect("a vector takes everything");
        output.late(&mut out, &event).expect("a vector takes everything");
        let lines = String::from_utf8(out).expect("text");
        insta::assert_snapshot!(lines + &written(&mut output, snapshot()));
    }
}
