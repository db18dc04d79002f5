// SPDX-License-Identifier: MIT OR Apache-2.0
//! Turns the lines of a recording into rows of flat tables, whatever the file format.
//!
//! A function per table fills its rows. The columns of a table are those of a row of default values. Column names avoid
//! SQL keywords, which would need quotes: `ended` is `at` in JSON, and `for_whom` is `for`.

use std::borrow::Cow;

use serde::Serialize;
use whylate_model::path::PathSegment;
use whylate_model::recording::{Header, Line};
use whylate_model::units::{is_printable, printable};
use whylate_model::{ActorName, Cause, Histogram, Labels, LateEvent, Series, Snapshot, Stack};

use super::Export;

/// Labels that have a column of their own. The column `labels` has all of them, as JSON.
const LABELS: [&str; 12] = [
    "process",
    "pid",
    "thread",
    "tid",
    "cgroup",
    "handler",
    "workqueue",
    "module",
    "device",
    "operation",
    "kind",
    "function",
];

/// A value in a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell<'a> {
    Text(Option<Cow<'a, str>>),
    Count(Option<u64>),
    Number(Option<f64>),
    Flag(Option<bool>),
    /// A timestamp in nanoseconds since 1970.
    Stamp(Option<u64>),
}

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Text,
    Count,
    Number,
    Flag,
    Stamp,
}

/// A row, in the order of the columns.
pub type Row<'a> = Vec<(&'static str, Cell<'a>)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: &'static str,
    pub kind: Kind,
}

/// A table. Its discriminant is its index in `ALL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    Snapshots,
    Series,
    Buckets,
    Late,
    Causes,
    Path,
    Stacks,
    Lost,
}

/// Writes rows as they come.
pub trait Sink {
    /// Begins another recording, where several follow each other in one file.
    ///
    /// # Errors
    /// Fails if the rows of the previous one cannot be written.
    fn begin_recording(&mut self, _header: &Header) -> anyhow::Result<()> {
        Ok(())
    }

    /// # Errors
    /// Fails if the row cannot be written.
    fn add(&mut self, table: Table, row: Row<'_>) -> anyhow::Result<()>;

    /// # Errors
    /// Fails if the remaining rows cannot be written.
    fn end(self: Box<Self>) -> anyhow::Result<()>;
}

impl Table {
    pub const ALL: [Table; 8] = [
        Table::Snapshots,
        Table::Series,
        Table::Buckets,
        Table::Late,
        Table::Causes,
        Table::Path,
        Table::Stacks,
        Table::Lost,
    ];

    /// Returns the file name without extension.
    pub fn name(self) -> &'static str {
        match self {
            Table::Snapshots => "snapshots",
            Table::Series => "series",
            Table::Buckets => "buckets",
            Table::Late => "late",
            Table::Causes => "causes",
            Table::Path => "path",
            Table::Stacks => "stacks",
            Table::Lost => "lost",
        }
    }

    pub fn columns(self) -> Vec<Column> {
        let snapshot = Snapshot::new("", "", "", 0);
        let snapshot_rows = SnapshotRows { number: 0, snapshot: &snapshot };
        let event = LateEvent::default();
        let late_rows = LateRows { snapshot_rows: &snapshot_rows, number: 0, event: &event };
        let (cause, segment) = (Cause::new(Default::default(), "", 0), PathSegment::default());
        let (series, stack) = (Series::default(), Stack::default());
        let row = match self {
            Table::Snapshots => snapshot_rows.row(),
            Table::Series => snapshot_rows.series(0, &series, "", None, None),
            Table::Buckets => snapshot_rows.bucket(0, "", (0, 0), 0),
            Table::Late => late_rows.row(),
            Table::Causes => late_rows.cause(0, &cause),
            Table::Path => late_rows.segment(0, 0, &segment),
            Table::Stacks => snapshot_rows.stack(0, &stack),
            Table::Lost => lost(None, "", (0, None), "", 0, false),
        };
        let kind = |cell: &Cell<'_>| match cell {
            Cell::Text(_) => Kind::Text,
            Cell::Count(_) => Kind::Count,
            Cell::Number(_) => Kind::Number,
            Cell::Flag(_) => Kind::Flag,
            Cell::Stamp(_) => Kind::Stamp,
        };
        row.iter().map(|(name, cell)| Column { name, kind: kind(cell) }).collect()
    }
}

/// Returns a text cell with control characters escaped: names come from processes, and the output may be read in a
/// terminal. An empty text is a missing value.
fn text<'a>(text: impl Into<Cow<'a, str>>) -> Cell<'a> {
    let text = text.into();
    let text = if text.chars().all(is_printable) { text } else { printable(&text).into() };
    Cell::Text((!text.is_empty()).then_some(text))
}

/// Returns a list or map that has no table of its own as JSON. An empty one is a missing value.
fn json<'a>(value: &(impl Serialize + ?Sized), is_empty: bool) -> Cell<'a> {
    match serde_json::to_string(value) {
        Ok(json) if !is_empty => Cell::Text(Some(printable(&json).into())),
        _ => Cell::Text(None),
    }
}

fn count<'a>(count: u64) -> Cell<'a> {
    Cell::Count(Some(count))
}

fn stamp<'a>(unix_ns: u64) -> Cell<'a> {
    Cell::Stamp(Some(unix_ns))
}

fn add_labels<'a>(row: &mut Row<'a>, labels: &'a Labels) {
    row.extend(LABELS.map(|name| (name, text(labels.get(name).map_or("", String::as_str)))));
    row.push(("labels", json(labels, labels.is_empty())));
}

/// Makes the rows of a snapshot, numbered from the beginning of the export.
struct SnapshotRows<'a> {
    number: u64,
    snapshot: &'a Snapshot,
}

impl SnapshotRows<'_> {
    fn row(&self) -> Row<'_> {
        let Snapshot { backend, host, start_unix_ns, duration_ns, unexplained, probe, .. } = self.snapshot;
        let mut row = self.head();
        row.extend([
            ("backend", text(backend)),
            ("host", text(host)),
            ("duration_ns", count(*duration_ns)),
            ("ended", stamp(start_unix_ns.saturating_add(*duration_ns))),
            ("late", count(self.snapshot.late.len() as u64)),
            ("unexplained", count(unexplained.events)),
            ("unexplained_ns", count(unexplained.total_ns)),
            ("probe_run_ns", count(probe.run_ns)),
            ("probe_runs", count(probe.runs)),
        ]);
        row
    }

    /// Returns the columns that begin each row about a snapshot.
    fn head(&self) -> Row<'_> {
        vec![
            ("snapshot", count(self.number)),
            ("source", text(&self.snapshot.source)),
            ("start", stamp(self.snapshot.start_unix_ns)),
        ]
    }

    /// Returns a row of a histogram or of a single value of a series.
    fn series<'a>(
        &'a self,
        number: usize,
        series: &'a Series,
        name: &'a str,
        histogram: Option<&Histogram>,
        value: Option<f64>,
    ) -> Row<'a> {
        let figure = |of: fn(&Histogram) -> u64| Cell::Count(histogram.map(of));
        let mut row = self.head();
        row.extend([("duration_ns", count(self.snapshot.duration_ns)), ("series", count(number as u64))]);
        row.extend([("cpu", text(series.labels.get("cpu").map_or("", String::as_str)))]);
        add_labels(&mut row, &series.labels);
        row.extend([
            ("name", text(name)),
            ("count", figure(Histogram::count)),
            ("min_ns", figure(Histogram::min_ns)),
            ("mean_ns", figure(Histogram::mean_ns)),
            ("p50_ns", figure(|of| of.quantile_ns(0.5))),
            ("p90_ns", figure(|of| of.quantile_ns(0.9))),
            ("p99_ns", figure(|of| of.quantile_ns(0.99))),
            ("p999_ns", figure(|of| of.quantile_ns(0.999))),
            ("max_ns", figure(Histogram::max_ns)),
            ("sum_ns", figure(|of| u64::try_from(of.sum_ns()).unwrap_or(u64::MAX))),
            ("value", Cell::Number(value)),
        ]);
        row
    }

    fn bucket<'a>(&'a self, series: usize, name: &'a str, (from_ns, to_ns): (u64, u64), of: u64) -> Row<'a> {
        let mut row = self.head();
        row.extend([
            ("series", count(series as u64)),
            ("name", text(name)),
            ("from_ns", count(from_ns)),
            ("to_ns", count(to_ns)),
            ("count", count(of)),
        ]);
        row
    }

    fn stack<'a>(&'a self, number: usize, stack: &'a Stack) -> Row<'a> {
        let Stack { labels, state, samples, weight_ns, waits, wait, kernel, user, waker, .. } = stack;
        let mut row = self.head();
        row.push(("stack", count(number as u64)));
        add_labels(&mut row, labels);
        row.extend([
            ("state", text(state)),
            ("samples", count(*samples)),
            ("weight_ns", count(*weight_ns)),
            ("waits", count(*waits)),
            ("wait", text(wait.as_ref().map_or("", |wait| wait.class.words()))),
            ("rule", text(wait.as_ref().map_or("", |wait| wait.rule.as_str()))),
            ("waker", text(waker.as_ref().map_or("", |waker| waker.name()))),
            ("kernel", json(kernel, kernel.is_empty())),
            ("user", json(user, user.is_empty())),
        ]);
        row
    }
}

/// Makes the rows of a late event, numbered from the beginning of the export.
struct LateRows<'a> {
    snapshot_rows: &'a SnapshotRows<'a>,
    number: u64,
    event: &'a LateEvent,
}

impl LateRows<'_> {
    fn head(&self) -> Row<'_> {
        vec![
            ("snapshot", count(self.snapshot_rows.number)),
            ("event", count(self.number)),
            ("source", text(&self.snapshot_rows.snapshot.source)),
            ("subject", text(&self.event.subject)),
            ("ended", stamp(self.event.at_unix_ns)),
        ]
    }

    fn start_unix_ns(&self) -> u64 {
        self.event.at_unix_ns.saturating_sub(self.event.latency_ns)
    }

    fn row(&self) -> Row<'_> {
        let LateEvent { labels, latency_ns, at_most_ns, cpu, phases, stack, inside, .. } = self.event;
        let mut row = self.head();
        row.extend([
            ("start", stamp(self.start_unix_ns())),
            ("latency_ns", count(*latency_ns)),
            ("at_most_ns", Cell::Count(*at_most_ns)),
            ("cpu", count((*cpu).into())),
        ]);
        add_labels(&mut row, labels);
        row.extend([
            ("phases", json(phases, phases.is_empty())),
            ("stack", json(stack, stack.is_empty())),
            ("inside", json(inside, inside.is_empty())),
        ]);
        row
    }

    fn cause<'a>(&'a self, number: usize, cause: &'a Cause) -> Row<'a> {
        let cgroup = cause.cgroup.as_ref();
        let mut row = self.head();
        row.extend([
            ("cause", count(number as u64)),
            ("kind", text(cause.kind.name())),
            ("who", text(cause.who.to_string())),
            ("ns", count(cause.ns)),
            ("cgroup", text(cgroup.map_or("", |cgroup| cgroup.path.as_str()))),
            ("container", text(cgroup.and_then(|cgroup| cgroup.container.as_deref()).unwrap_or(""))),
            ("stack", json(&cause.stack, cause.stack.is_empty())),
        ]);
        row
    }

    fn segment<'a>(&'a self, number: usize, start_unix_ns: u64, segment: &'a PathSegment) -> Row<'a> {
        let PathSegment { ns, kind, who, ready, via, waiter, stack, depth, .. } = segment;
        let named = |name: &Option<ActorName>| name.as_ref().map(ActorName::to_string).unwrap_or_default();
        let mut row = self.head();
        row.extend([
            ("segment", count(number as u64)),
            ("start", stamp(start_unix_ns)),
            ("ns", count(*ns)),
            ("kind", text(kind.name())),
            ("who", text(who.to_string())),
            ("for_whom", text(named(ready))),
            ("waiter", text(named(waiter))),
            ("via", text(via.as_deref().unwrap_or(""))),
            ("depth", count((*depth).into())),
            ("stack", json(stack, stack.is_empty())),
        ]);
        row
    }
}

/// Returns a row of events that could not be counted, or of a gap in the recording.
fn lost<'a>(
    snapshot: Option<u64>,
    source: &'a str,
    (start_unix_ns, duration_ns): (u64, Option<u64>),
    reason: &'a str,
    of: u64,
    is_gap: bool,
) -> Row<'a> {
    vec![
        ("snapshot", Cell::Count(snapshot)),
        ("source", text(source)),
        ("start", stamp(start_unix_ns)),
        ("duration_ns", Cell::Count(duration_ns)),
        ("reason", text(reason)),
        ("count", count(of)),
        ("is_gap", Cell::Flag(Some(is_gap))),
    ]
}

/// Writes the lines of a recording to a sink, as rows.
pub struct TableExport {
    sink: Box<dyn Sink>,
    snapshots: u64,
    events: u64,
}

impl TableExport {
    pub fn new(sink: Box<dyn Sink>) -> Self {
        TableExport { sink, snapshots: 0, events: 0 }
    }

    fn snapshot(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        let snapshot_rows = SnapshotRows { number: self.snapshots, snapshot };
        self.snapshots += 1;
        self.sink.add(Table::Snapshots, snapshot_rows.row())?;
        for (number, series) in snapshot.series.iter().enumerate() {
            for (name, histogram) in &series.histograms {
                self.sink.add(Table::Series, snapshot_rows.series(number, series, name, Some(histogram), None))?;
                for (range, count) in histogram.iter() {
                    self.sink.add(Table::Buckets, snapshot_rows.bucket(number, name, range.into_inner(), count))?;
                }
            }
            for (name, value) in &series.values {
                self.sink.add(Table::Series, snapshot_rows.series(number, series, name, None, Some(*value)))?;
            }
        }
        for event in &snapshot.late {
            let late_rows = LateRows { snapshot_rows: &snapshot_rows, number: self.events, event };
            self.events += 1;
            self.sink.add(Table::Late, late_rows.row())?;
            for (number, cause) in event.causes.iter().enumerate() {
                self.sink.add(Table::Causes, late_rows.cause(number, cause))?;
            }
            let mut at_ns = late_rows.start_unix_ns();
            for (number, segment) in event.path.iter().enumerate() {
                self.sink.add(Table::Path, late_rows.segment(number, at_ns, segment))?;
                at_ns = at_ns.saturating_add(segment.ns);
            }
        }
        for (number, stack) in snapshot.stacks.iter().enumerate() {
            self.sink.add(Table::Stacks, snapshot_rows.stack(number, stack))?;
        }
        let span = (snapshot.start_unix_ns, Some(snapshot.duration_ns));
        for (reason, &count) in snapshot.lost.iter().filter(|(_, count)| **count > 0) {
            self.sink
                .add(Table::Lost, lost(Some(snapshot_rows.number), &snapshot.source, span, reason, count, false))?;
        }
        Ok(())
    }
}

impl Export for TableExport {
    fn line(&mut self, line: &Line) -> anyhow::Result<()> {
        match line {
            Line::Snapshot(snapshot) => self.snapshot(snapshot)?,
            Line::Account(account) => {
                for (reason, &count) in &account.lost {
                    self.sink.add(Table::Lost, lost(None, "", (account.at_unix_ns, None), reason, count, false))?;
                }
            }
            Line::Gap(gap) => {
                let span = (gap.start_unix_ns, Some(gap.duration_ns));
                self.sink.add(Table::Lost, lost(None, "", span, &gap.reason, gap.count, true))?;
            }
            Line::Header(header) => self.sink.begin_recording(header)?,
            Line::Clock(_) | Line::Kept(_) | Line::End(_) | Line::Other => {}
        }
        Ok(())
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        self.sink.end()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn tables_are_ordered_and_column_names_unique() {
        for (number, table) in Table::ALL.into_iter().enumerate() {
            assert_eq!(table as usize, number);
            let columns = table.columns();
            let names: HashSet<&str> = columns.iter().map(|column| column.name).collect();
            assert_eq!(names.len(), columns.len(), "{}: {columns:?}", table.name());
        }
    }

    #[test]
    fn escapes_control_characters_in_names() {
        assert_eq!(text("a\x1b[2Jb\u{9b}"), Cell::Text(Some("a?[2Jb?".into())));
        assert_eq!(text(""), Cell::Text(None));
        let labels: Labels = [("thread".to_owned(), "\u{9b}2J\n".to_owned())].into();
        assert_eq!(json(&labels, false), Cell::Text(Some(r#"{"thread":"?2J\n"}"#.into())));
    }
}
