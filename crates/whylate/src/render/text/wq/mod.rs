// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders snapshots of `whylate wq`.

mod late;
pub mod shape;

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::sources::WQ;
use whylate_model::units::{format_ns, printable};
use whylate_model::{Card, LateEvent, Series, Snapshot};

use self::shape::{By, Shape, Sort};
use crate::render::text::latency::{LatencyText, LatencyView, figures, late_figures, sort_rows};
use crate::render::text::table::Table;

#[derive(Clone, Copy, Debug)]
pub struct WqView<'a> {
    /// Output about all items: histograms or a table.
    pub shape: &'a Shape,
    /// The only handler that is measured.
    pub handler: Option<&'a str>,
}

pub type WqText<'a> = LatencyText<WqView<'a>>;

impl LatencyView for WqView<'_> {
    fn card(&self) -> &'static Card {
        &WQ
    }

    fn title(&self) -> String {
        let latency = "work queue latency";
        self.handler.map_or_else(|| latency.to_owned(), |handler| format!("{latency} of {}", printable(handler)))
    }

    fn write_late_heading(&self, out: &mut dyn Write, is_verbose: bool) -> io::Result<()> {
        late::write_heading(out, is_verbose)
    }

    fn write_late(&self, out: &mut dyn Write, event: &LateEvent, zone: &TimeZone, is_verbose: bool) -> io::Result<()> {
        late::write(out, event, zone, is_verbose)
    }

    fn table(&self, snapshot: &Snapshot) -> Option<Table> {
        let label = self.shape.label().unwrap_or(HANDLER);
        self.shape.table.then(|| table_of(snapshot, label, self.shape.sort))
    }

    fn histograms(&self, snapshot: &Snapshot) -> Vec<(String, Series)> {
        let Some(label) = self.shape.label().or(self.shape.works.then_some(HANDLER)) else {
            let mut all = Series::default();
            snapshot.series.iter().for_each(|series| all.absorb(series));
            return vec![(String::new(), all)];
        };
        let key = if label == HANDLER { "work handler" } else { label };
        let heading = |series: &Series| format!("{key} = {}", name_of(series, label));
        snapshot.merged_by(label).into_iter().map(|series| (heading(&series), series)).collect()
    }

    fn has_phases(&self) -> bool {
        self.shape.phases
    }
}

/// Label of the function that executes an item.
const HANDLER: &str = By::Handler.label();

/// Returns the value of a label. A handler in a module is `function [module]`, as the kernel prints it.
fn name_of(series: &Series, label: &str) -> String {
    match series.labels.get("module") {
        Some(module) if label == HANDLER => format!("{} [{module}]", series.label(label)),
        _ => series.label(label).to_owned(),
    }
}

fn table_of(snapshot: &Snapshot, label: &str, sort: Sort) -> Table {
    let with_workqueue = label == HANDLER;
    let workqueue = if with_workqueue { ", <WORKQUEUE" } else { "" };
    let (title, columns) = (label.to_uppercase(), "COUNT, MEAN, P50, P99, MAX, RUN-MEAN, RUN-MAX");
    let table = Table::new(&format!("<{title}, {columns}{workqueue}"));
    let mut table = table.hiding_first("WORKQUEUE, RUN-MEAN, MEAN, P50, RUN-MAX");
    let mut rows = snapshot.merged_by(label);
    sort_rows(&mut rows, |series| {
        let latency = series.histogram("latency");
        match sort {
            Sort::Count => latency.count(),
            Sort::Mean => latency.mean_ns(),
            Sort::P50 => latency.quantile_ns(0.5),
            Sort::P99 => latency.quantile_ns(0.99),
            Sort::Max => latency.max_ns(),
            Sort::Runtime => series.histogram("runtime").max_ns(),
            Sort::Name => 0,
        }
    });
    for series in &rows {
        let (latency, runtime) = (series.histogram("latency"), series.histogram("runtime"));
        let name = Some(name_of(series, label)).filter(|name| !name.is_empty());
        // A recording of all sources has one series for all handlers.
        let mut cells = vec![name.unwrap_or_else(|| "(all)".to_owned()), latency.count().to_string()];
        let late = late_figures(latency, &WQ, cells.len());
        cells.extend(figures(latency));
        cells.extend([runtime.mean_ns(), runtime.max_ns()].map(format_ns));
        cells.extend(with_workqueue.then(|| series.label("workqueue").to_owned()));
        table.late_row(cells, &late);
    }
    table
}

#[cfg(test)]
mod tests {
    use whylate_model::{Cause, CauseKind, Cgroup, Histogram};

    use super::*;
    use crate::cli::parsed;
    use crate::cli::wq::Arguments;
    use crate::render::color::tests::colored;
    use crate::render::json::JsonLines;
    use crate::render::text::next::Next;
    use crate::render::text::{Output, whole_output};
    use crate::store::late_buffer::Keep;

    fn series(handler: &str, workqueue: &str, latencies_ns: &[u64], runtimes_ns: &[u64]) -> Series {
        let mut labels = whylate_model::Labels::new();
        let (function, module) = handler.split_once('@').unwrap_or((handler, ""));
        labels.insert("handler".to_owned(), function.to_owned());
        labels.insert("workqueue".to_owned(), workqueue.to_owned());
        if !module.is_empty() {
            labels.insert("module".to_owned(), module.to_owned());
        }
        let latency: Histogram = latencies_ns.iter().copied().collect();
        let runtime: Histogram = runtimes_ns.iter().copied().collect();
        let zero = Histogram::zeros(latency.count());
        let histograms = [
            ("latency", latency.clone()),
            ("activate", zero.clone()),
            ("pool", latency),
            ("runtime", runtime.clone()),
            ("on_cpu", runtime),
            ("asleep", zero.clone()),
            ("ready", zero),
        ];
        Series {
            labels,
            histograms: histograms.map(|(name, histogram)| (name.to_owned(), histogram)).into(),
            ..Series::default()
        }
    }

    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::new("wq", "fentry", "web1", 1_795_252_440_000_000_000);
        snapshot.duration_ns = 5_000_000_000;
        snapshot.series = vec![
            series("flush_to_ldisc", "events_unbound", &[3_000, 20_000, 21_000, 22_000], &[2_000, 2_000, 9_000, 4_000]),
            series("nvme_scan_work@nvme_core", "nvme-wq", &[12_000_000], &[48_000_000]),
            series("vmstat_update", "mm_percpu_wq", &[5_000, 9_000, 10_000, 17_000], &[900; 4]),
            series("vmstat_update", "events", &[6_000], &[700]),
        ];
        snapshot.lost = [("unmatched".to_owned(), 2), ("late_events".to_owned(), 1), ("reused".to_owned(), 0)].into();
        snapshot
    }

    /// Returns a late item with these causes, if any.
    fn late_item(at_ms: u64, handler: &str, causes: &[(CauseKind, &str, u64, &str)]) -> LateEvent {
        let causes: Vec<Cause> = causes
            .iter()
            .map(|&(kind, who, ns, stack)| {
                let stack = stack.split_whitespace().map(str::to_owned).collect();
                Cause { stack, ..Cause::new(kind, who, ns) }
            })
            .collect();
        let labels = [
            ("handler", handler),
            ("workqueue", "writeback"),
            ("worker", "kworker/u4:1"),
            ("queued_by", "sync"),
            ("queued_by_pid", "4311"),
        ];
        let latency_ns = causes.iter().map(|cause| cause.ns).sum::<u64>().max(1_500_000);
        LateEvent {
            subject: handler.to_owned(),
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            at_unix_ns: 1_795_252_440_000_000_000 + at_ms * 1_000_000,
            latency_ns,
            cpu: 1,
            phases: vec![("activate".to_owned(), 0), ("pool".to_owned(), latency_ns)],
            causes,
            ..LateEvent::default()
        }
    }

    fn late_items() -> Vec<LateEvent> {
        let console = "_raw_spin_unlock_irqrestore serial8250_console_write console_flush_all console_unlock vprintk_emit \
                       devkmsg_write vfs_write ksys_write do_syscall_64 entry_SYSCALL_64_after_hwframe";
        let mut first = late_item(
            100,
            "wb_workfn",
            &[
                (CauseKind::IrqsOff, "dd\x1b[2J:4242", 10_960_000, console),
                (CauseKind::Thread, "stress-ng:77", 1_160_000, ""),
                (CauseKind::Softirq, "timer", 33_000, ""),
                (CauseKind::Unknown, "before a worker was woken", 3_000, ""),
            ],
        );
        first.stack = vec!["__queue_work".to_owned(), "wb_queue_work".to_owned()];
        let hog = |ns| (CauseKind::Work, "wb_workfn", ns, "");
        vec![
            first,
            late_item(200, "too_short_for_why", &[]),
            late_item(300, "vmstat_update", &[hog(48_000_000)]),
            late_item(400, "vmstat_shepherd", &[(CauseKind::Thread, "stress-ng:77", 9_000_000, ""), hog(3_000_000)]),
        ]
    }

    fn printed(line: &str) -> String {
        printed_with(line, Vec::new())
    }

    fn printed_with(line: &str, late: Vec<LateEvent>) -> String {
        let arguments: Arguments = parsed(line.split_whitespace()).expect("a valid command line");
        let mut text = WqText::new(arguments.view(), arguments.shown(), None, Next::Live(|_| None)).in_utc();
        let output: &mut dyn Output = if arguments.schedule.json { &mut JsonLines } else { &mut text };
        whole_output(output, Keep::for_output(arguments.schedule.json, arguments.thresholds()), late, snapshot())
    }

    #[test]
    fn a_histogram_per_handler() {
        insta::assert_snapshot!(printed("-W"));
    }

    #[test]
    fn one_handler() {
        insta::assert_snapshot!(printed("-w flush_to_ldisc"));
    }

    #[test]
    fn phases() {
        insta::assert_snapshot!(printed("--phases"));
    }

    #[test]
    fn table() {
        insta::assert_snapshot!(printed("--table"));
    }

    #[test]
    fn only_latencies_over_the_limit_are_colored() {
        // The run time of 48 ms has no limit.
        assert_eq!(colored(|| printed("--table")), ["12.0ms", "12.0ms"]);
    }

    #[test]
    fn table_by_workqueue_ordered_by_count() {
        insta::assert_snapshot!(printed("--table --by workqueue --sort count"));
    }

    #[test]
    fn only_lines_of_late_items() {
        insta::assert_snapshot!(printed("--slower 10ms"));
    }
    #[test]
    fn longest_waits_are_explained_ones() {
        let text = printed_with("--why 2ms --slower 1ms --worst 2", late_items());
        assert_eq!(text.matches("too_short_for_why").count(), 1, "{text}");
        assert!(text.contains("Longest waits: 2 of "), "{text}");
    }

    #[test]
    fn causes_of_late_items() {
        insta::assert_snapshot!(printed_with("--why 2ms --slower 1ms --stack", late_items()));
    }

    #[test]
    fn the_longest_waits() {
        insta::assert_snapshot!(printed_with("--why 2ms --worst 2", late_items().split_off(2)));
    }

    #[test]
    fn culprits_are_ranked_by_their_cgroups() {
        let mut items = vec![
            late_item(
                100,
                "wb_workfn",
                &[(CauseKind::Thread, "a:1", 9_000_000, ""), (CauseKind::Thread, "b:2", 1_000_000, "")],
            ),
            late_item(
                200,
                "vmstat_update",
                &[(CauseKind::Thread, "b:2", 3_000_000, ""), (CauseKind::Thread, "c:3", 7_000_000, "")],
            ),
        ];
        for cause in items.iter_mut().flat_map(|item| &mut item.causes) {
            cause.cgroup = Some(Cgroup::new(if cause.who == "c:3" { "/pod2" } else { "/pod1" }));
        }
        let printed = |line: &str| printed_with(line, items.clone());
        let ranked = |text: &str| -> Vec<String> {
            let ranking = text.lines().skip_while(|line| !line.ends_with("Who caused it:")).skip(1);
            ranking.take_while(|line| line.starts_with("    ")).map(|line| line.trim().to_owned()).collect()
        };
        // Two handlers; one of them waited for threads of both names.
        assert_eq!(
            ranked(&printed("--why 2ms --rank-by cgroup")),
            [
                "65.0%  threads of cgroup /pod1 delayed 2 items of 2 handlers by 13.0ms in total, worst 10.0ms",
                "35.0%  threads of cgroup /pod2 delayed 1 item by 7.00ms",
            ]
        );
        // The former spelling.
        assert_eq!(ranked(&printed("--why 2ms --by cgroup")).len(), 2);
        assert_eq!(ranked(&printed("--why 2ms")).len(), 3);
    }

    #[test]
    fn nothing_was_late_enough_to_explain() {
        insta::assert_snapshot!(printed("--why 10s"));
    }

    #[test]
    fn causes_in_json() {
        let line = printed_with("--json --why 2ms", late_items());
        let snapshot: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        insta::assert_snapshot!(serde_json::to_string_pretty(&snapshot["late"][0]).expect("JSON"));
    }

    #[test]
    fn the_longest_waits_in_json() {
        let line = printed_with("--json --why 2ms --worst 2", late_items().split_off(2));
        let snapshot: Snapshot = serde_json::from_str(&line).expect("a snapshot");
        let handlers: Vec<&str> = snapshot.late.iter().map(|event| event.labels["handler"].as_str()).collect();
        assert_eq!(handlers, ["vmstat_update", "vmstat_shepherd"]);
        // Late events that were not requested are not lost.
        assert_eq!(snapshot.lost["late_events"], 1);
    }

    #[test]
    fn why_goes_with_what_it_needs() {
        for line in ["--stack", "--why 1ms --worst 0", "--why 0", "--why 5", "--rank-by pool", "--by name"] {
            assert!(parsed::<Arguments>(line.split_whitespace()).is_err(), "{line}");
        }
        let words = ["--why", "1ms", "--stack", "--worst", "3"];
        let options = parsed::<Arguments>(words).expect("a valid command line").options();
        assert_eq!((options.explain_over_ns, options.late_over_ns), (Some(1_000_000), None));
        assert!(options.phases && options.stacks);
        // The source's own limit.
        for words in [&["--worst", "3"][..], &["--fail-if-late"]] {
            let arguments: Arguments = parsed(words.iter().copied()).expect("a valid command line");
            assert_eq!(arguments.options().explain_over_ns, Some(WQ.events().late_from_ns));
        }
    }
}
