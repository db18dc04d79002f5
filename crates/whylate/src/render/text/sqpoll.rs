// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders submission threads as a table, with advice below.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::late::Thresholds;
use whylate_model::sources::SQPOLL;
use whylate_model::sqpoll::{is_part_of, is_thread, verdicts};
use whylate_model::units::{format_ns, printable};
use whylate_model::{Culprits, LateEvent, Series, Snapshot};

use super::Output;
use super::table::Table;
use super::why;
use super::{footer, waits};

const COLUMNS: &str = "<PROCESS, PID, TID, CPU, IDLE, RINGS, WORK%, SPIN%, SLEEP%, STARVED%, UTIL%, SQES/s, WAKES/s";

/// Text output: a row per thread, and a row per ring of a thread with several rings.
#[derive(Debug)]
pub struct SqpollText {
    thresholds: Thresholds,
    zone: TimeZone,
    terminal_columns: Option<usize>,
    culprits: Culprits,
    /// Whether lost events are listed by reason.
    pub is_verbose: bool,
    is_first: bool,
}

impl SqpollText {
    /// Creates the output. The longest events of a limited number are printed with each table, others as they arrive.
    pub fn new(thresholds: Thresholds, terminal_columns: Option<usize>) -> Self {
        let (zone, culprits) = (TimeZone::system(), Culprits::default());
        SqpollText { thresholds, zone, terminal_columns, culprits, is_verbose: false, is_first: true }
    }

    /// Sets how culprits are grouped.
    pub fn by(self, by: By) -> Self {
        SqpollText { culprits: Culprits::by(by), ..self }
    }
}

impl Output for SqpollText {
    fn activity(&self) -> Option<String> {
        Some("Watching io_uring submission threads".to_owned())
    }

    fn begin(&mut self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }

    fn late(&mut self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
        self.culprits.add(&SQPOLL, event);
        if self.thresholds.worst.is_some() { Ok(()) } else { waits::write(out, event, &self.zone) }
    }

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()> {
        if !std::mem::take(&mut self.is_first) {
            writeln!(out)?;
        }
        write_table(out, &snapshot, self.terminal_columns)?;
        for verdict in verdicts(&snapshot) {
            writeln!(out, "{}", printable(&verdict))?;
        }
        if self.thresholds.explain_ns.is_some() {
            self.culprits.add_unexplained(snapshot.unexplained);
            let ranking = self.culprits.take();
            if !ranking.is_empty() {
                for event in &snapshot.late {
                    writeln!(out)?;
                    waits::write(out, event, &self.zone)?;
                }
                writeln!(out)?;
                why::write_ranking(out, &ranking, SQPOLL.words)?;
            }
        }
        footer::write(out, &snapshot, self.is_verbose)
    }
}

fn write_table(out: &mut dyn Write, snapshot: &Snapshot, terminal_columns: Option<usize>) -> io::Result<()> {
    let mut table = Table::new(COLUMNS).hiding_first("WAKES/s, RINGS, CPU, UTIL%, IDLE, SQES/s, TID");
    let mut is_empty = true;
    for series in snapshot.series.iter().filter(|series| is_thread(series)) {
        is_empty = false;
        table.row(row(series));
        let parts = || snapshot.series.iter().filter(|part| is_part_of(part, series));
        let rings: Vec<&Series> = parts().filter(|part| part.labels.contains_key("ring")).collect();
        for ring in rings.iter().filter(|_| rings.len() > 1) {
            let mut cells = vec![String::new(); 12];
            cells[0] = format!("  {}", ring.labels["ring"]);
            cells[11] = count(ring.values.get("sqes_per_s"));
            table.row(cells);
        }
    }
    if is_empty {
        return writeln!(out, "no submission thread in {}", format_ns(snapshot.duration_ns));
    }
    table.write(out, terminal_columns)
}

fn row(series: &Series) -> Vec<String> {
    let label = |name: &str| series.labels.get(name).cloned().unwrap_or_default();
    let value = |name: &str| series.values.get(name);
    let whole = |name: &str| value(name).map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"));
    // If work and spinning cannot be distinguished, the time on CPU is the upper bound of spinning.
    let spinning = value("spinning").map_or_else(
        || value("running").map_or_else(|| "-".to_owned(), |share| format!("<={}", percent(Some(share)))),
        |share| percent(Some(share)),
    );
    vec![
        label("process"),
        label("pid"),
        label("tid"),
        whole("cpu"),
        value("idle_ms").map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0}ms")),
        whole("rings"),
        percent(value("working")),
        spinning,
        percent(value("sleeping")),
        percent(value("starved")),
        percent(value("utilisation")),
        count(value("sqes_per_s")),
        count(value("wakeups_per_s")),
    ]
}

fn percent(share: Option<&f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1}", share * 100.0))
}

fn count(a_second: Option<&f64>) -> String {
    match a_second {
        None => "-".to_owned(),
        Some(count) if *count > 0.0 && *count < 10.0 => format!("{count:.1}"),
        Some(count) => format!("{count:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::{Cause, CauseKind};

    use super::*;
    use crate::render::text::text_of;

    fn series(labels: &[(&str, &str)], values: &[(&str, f64)]) -> Series {
        Series {
            labels: labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            values: values.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
            ..Series::default()
        }
    }

    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::new("sqpoll", "bpf", "host", 1_795_252_440_000_000_000);
        snapshot.duration_ns = 1_000_000_000;
        let fio = [("process", "fio"), ("pid", "900"), ("tid", "931")];
        let app = [("process", "app\x1b[2J"), ("pid", "77"), ("tid", "78")];
        let part = |whole: &[(&'static str, &'static str)], name, value| {
            let labels: Vec<_> = whole.iter().copied().chain([(name, value)]).collect();
            labels
        };
        snapshot.series = vec![
            series(
                &app,
                &[
                    ("working", 0.004),
                    ("spinning", 0.746),
                    ("sleeping", 0.1),
                    ("starved", 0.15),
                    ("utilisation", 0.005333),
                    ("cpu", 1.0),
                    ("idle_ms", 1000.0),
                    ("rings", 2.0),
                    ("sqes_per_s", 1234.5),
                    ("wakeups_per_s", 0.5),
                ],
            ),
            series(&part(&app, "ring", "fd 5"), &[("sqes_per_s", 1000.0)]),
            series(&part(&app, "ring", "registered 0"), &[("sqes_per_s", 234.5)]),
            series(&part(&app, "by", "stress:9"), &[("starved_by", 0.12)]),
            series(&fio, &[("running", 0.5), ("sleeping", 0.5), ("starved", 0.0), ("rings", 1.0)]),
        ];
        snapshot.lost.insert("busy_rings".to_owned(), 2);
        snapshot
    }

    fn written(output: &mut SqpollText, snapshot: Snapshot) -> String {
        text_of(|out| output.snapshot(out, snapshot))
    }

    fn explained(worst: Option<usize>) -> Thresholds {
        Thresholds { show_ns: None, explain_ns: Some(1_000_000), worst }
    }

    #[test]
    fn a_row_per_thread_and_per_ring_of_several() {
        insta::assert_snapshot!(written(&mut SqpollText::new(Thresholds::default(), None), snapshot()));
    }

    #[test]
    fn v_lists_lost_events_by_reason() {
        let printed = |is_verbose| {
            let mut text = SqpollText { is_verbose, ..SqpollText::new(Thresholds::default(), None) };
            written(&mut text, snapshot())
        };
        assert!(printed(false).ends_with("2 events lost (2.0/s): -v shows why\n"));
        assert!(printed(true).ends_with("lost: 2 busy rings (see whylate help lost)\n"));
    }

    #[test]
    fn renders_no_thread() {
        let mut none = snapshot();
        none.series.clear();
        none.lost.clear();
        assert_eq!(written(&mut SqpollText::new(Thresholds::default(), None), none), "no submission thread in 1.00s\n");
    }

    #[test]
    fn waits_are_explained_as_they_come_and_ranked_at_the_end() {
        let mut output = SqpollText { zone: TimeZone::UTC, ..SqpollText::new(explained(None), None) };
        let labels = [("process", "app"), ("pid", "77"), ("tid", "78")];
        let event = LateEvent {
            subject: "iou-sqp-77:78".to_owned(),
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns: 4_000_000,
            cpu: 1,
            causes: vec![
                Cause::new(CauseKind::Thread, "stress:9", 3_900_000),
                Cause::new(CauseKind::Irq, "local_timer", 100_000),
            ],
            ..LateEvent::default()
        };
        let lines = text_of(|out| output.late(out, &event));
        insta::assert_snapshot!(lines + &written(&mut output, snapshot()));
    }
    #[test]
    fn worst_waits_are_printed_with_table() {
        let mut output = SqpollText::new(explained(Some(5)), None);
        let waits = [9_000_000, 4_000_000, 2_000_000].map(|latency_ns| {
            let causes = vec![Cause::new(CauseKind::Thread, "stress:9", latency_ns)];
            LateEvent { latency_ns, causes, ..LateEvent::default() }
        });
        for wait in &waits {
            let mut before = Vec::new();
            output.late(&mut before, wait).expect("a vector takes everything");
            assert!(before.is_empty(), "they come with the table");
        }
        let text = written(&mut output, Snapshot { late: waits[..2].to_vec(), ..snapshot() });
        let waits: Vec<&str> =
            text.lines().filter(|line| line.contains(" waited ") && line.contains("for CPU")).collect();
        assert_eq!(waits.len(), 2, "{text}");
        assert!(waits[0].contains("9.00ms") && waits[1].contains("4.00ms"), "{text}");
        assert!(text.contains("3 long waits"), "{text}");
    }
}
