// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders snapshots of `whylate block`.

mod late;
pub mod shape;

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::sources::BLOCK;
use whylate_model::units::format_ns;
use whylate_model::{Card, LateEvent, Series, Snapshot};

use self::shape::{Key, Shape, Sort};
use crate::render::text::latency::{LatencyText, LatencyView, figures, late_figures, sort_rows};
use crate::render::text::table::Table;

pub type BlockText<'a> = LatencyText<&'a Shape>;

impl LatencyView for &Shape {
    fn card(&self) -> &'static Card {
        &BLOCK
    }

    fn title(&self) -> String {
        "I/O request latency".to_owned()
    }

    fn write_late_heading(&self, out: &mut dyn Write, is_verbose: bool) -> io::Result<()> {
        late::write_heading(out, is_verbose)
    }

    fn write_late(&self, out: &mut dyn Write, event: &LateEvent, zone: &TimeZone, is_verbose: bool) -> io::Result<()> {
        late::write(out, event, zone, is_verbose)
    }

    fn table(&self, snapshot: &Snapshot) -> Option<Table> {
        self.table.then(|| table_of(snapshot, labels_of(self.by.unwrap_or(Key::Operation)), self.sort))
    }

    fn histograms(&self, snapshot: &Snapshot) -> Vec<(String, Series)> {
        let labels = labels_of(self.by.unwrap_or(Key::Device));
        let heading = |series: &Series| {
            labels.iter().map(|label| format!("{label} = {}", series.label(label))).collect::<Vec<_>>().join(", ")
        };
        snapshot.merged_by_all(labels).into_iter().map(|series| (heading(&series), series)).collect()
    }

    fn has_phases(&self) -> bool {
        self.phases
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

fn table_of(snapshot: &Snapshot, labels: &[&str], sort: Sort) -> Table {
    let names: Vec<String> = labels
        .iter()
        .map(|label| match *label {
            "device" => "<DISK".to_owned(),
            "operation" => "<OP".to_owned(),
            "pid" | "tid" => label.to_uppercase(),
            label => format!("<{}", label.to_uppercase()),
        })
        .collect();
    let columns = "COUNT, REQ/S, MB/S, MEAN, P50, P99, MAX, THROTTLED, QUEUED, DEVICE, COMPLETION, DEPTH";
    let table = Table::new(&format!("{}, {columns}", names.join(", ")));
    let mut table = table.hiding_first("THROTTLED, COMPLETION, REQ/S, MEAN, DEPTH, QUEUED, DEVICE, MB/S, P50");
    let seconds = snapshot.duration_ns as f64 / 1e9;
    let mut rows = snapshot.merged_by_all(labels);
    sort_rows(&mut rows, |series| {
        let latency = series.histogram("latency");
        match sort {
            Sort::Count => latency.count(),
            Sort::Bytes => series.value("bytes") as u64,
            Sort::Mean => latency.mean_ns(),
            Sort::P50 => latency.quantile_ns(0.5),
            Sort::P99 => latency.quantile_ns(0.99),
            Sort::Max => latency.max_ns(),
            Sort::Name => 0,
        }
    });
    for series in &rows {
        let latency = series.histogram("latency");
        let mut cells: Vec<String> = labels.iter().map(|label| series.label(label).to_owned()).collect();
        let rate = |figure: f64| if seconds > 0.0 { figure / seconds } else { 0.0 };
        cells.push(latency.count().to_string());
        cells.push(format!("{:.1}", rate(latency.count() as f64)));
        cells.push(format!("{:.1}", rate(series.value("bytes")) / 1e6));
        let late = late_figures(latency, &BLOCK, cells.len());
        cells.extend(figures(latency));
        let phases = ["throttled", "queued", "device", "completion"];
        // A recording of all sources has no phases.
        let mean = |phase| match series.histogram(phase) {
            times if times.is_empty() => "-".to_owned(),
            times => format_ns(times.mean_ns()),
        };
        cells.extend(phases.map(mean));
        // Little's law: the mean number of requests is the arrival rate times the mean latency.
        let depth = if snapshot.duration_ns > 0 { latency.sum_ns() as f64 / snapshot.duration_ns as f64 } else { 0.0 };
        cells.push(format!("{depth:.1}"));
        table.late_row(cells, &late);
    }
    table
}

#[cfg(test)]
mod tests {
    use whylate_model::culprits::By;
    use whylate_model::late::Thresholds;
    use whylate_model::{Cause, CauseKind, Histogram};

    use super::*;
    use crate::render::color::tests::colored;
    use crate::render::text::latency::LatencyOptions;
    use crate::render::text::next::Next;
    use crate::render::text::{Output as _, text_of, whole_output};
    use crate::store::late_buffer::Keep;

    fn shape(line: &str) -> Shape {
        crate::cli::parsed(line.split_whitespace()).expect("a line that is taken")
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

    fn text<'a>(shape: &'a Shape, explain_ns: Option<u64>, lines_only: bool) -> BlockText<'a> {
        let thresholds = Thresholds { explain_ns, ..Thresholds::default() };
        let shown = LatencyOptions { thresholds, rank_by: By::Culprit, lines_only, is_verbose: false };
        BlockText::new(shape, shown, None, Next::Live(|_| None)).in_utc()
    }

    fn written(output: &mut BlockText<'_>, snapshot: Snapshot) -> String {
        text_of(|out| output.snapshot(out, snapshot))
    }

    #[test]
    fn a_row_per_device_and_operation() {
        let shape = shape("--table");
        insta::assert_snapshot!(written(&mut text(&shape, None, false), snapshot()));
    }

    #[test]
    fn only_latencies_over_the_limit_are_colored() {
        let (shape, mut snapshot) = (shape("--table"), snapshot());
        snapshot.series.push(series("vdb", "read", &[10_000, 120_000_000]));
        let colored = colored(|| written(&mut text(&shape, None, false), snapshot));
        assert_eq!(colored, ["120ms", "120ms"]);
    }

    #[test]
    fn a_histogram_per_device() {
        let shape = shape("");
        insta::assert_snapshot!(written(&mut text(&shape, None, false), snapshot()));
    }

    #[test]
    fn late_requests_are_explained_and_ranked() {
        let shape = shape("");
        let mut output = text(&shape, Some(1_000_000), true);
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
        insta::assert_snapshot!(whole_output(&mut output, Keep::Nothing, vec![event], snapshot()));
    }
}
