// SPDX-License-Identifier: MIT OR Apache-2.0
//! The families of metrics: names, labels and meanings, as docs/serve.md lists them.

use whylate_model::Histogram as Latencies;
use whylate_model::sources::lost_events;
use whylate_model::totals::{Example, Group, SourceTotals, Totals};

use super::buckets::{self, Native, SCHEMA};
use super::messages::{
    Bucket, BucketSpan, Counter, Exemplar, Gauge, Histogram, Label, Metric, MetricFamily, Timestamp, Type,
};

/// Labels of what is not shown by its own name. No comm is that long, and no path of a cgroup begins so.
const OTHERS: &str = "(other culprits)";
const OTHER_CGROUPS: &str = "(others)";
/// Maximum number of characters in an exemplar's labels, names and values together (OpenMetrics 1.0.0).
const MAX_EXEMPLAR_CHARS: usize = 128;

/// Cost of the exporter, and what it exports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Own {
    /// CPU time of this process since its start, in seconds.
    pub cpu_seconds: f64,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Memory of BPF maps in bytes.
    pub map_bytes: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Start of this process, in seconds since 1970.
    pub started_seconds: f64,
    /// Each source that was requested: its name, and its backend if it measures.
    pub sources: Vec<(&'static str, Option<String>)>,
    /// When the metrics of a recording were updated, in nanoseconds since 1970; `None` if they are live.
    pub replayed_unix_ns: Option<u64>,
    /// Connections that were closed because there were too many.
    pub refused: u64,
}

/// Families under construction.
struct Families {
    families: Vec<MetricFamily>,
    start: Timestamp,
}

type Labels<'a> = &'a [(&'a str, &'a str)];

fn labels(of: Labels<'_>) -> Vec<Label> {
    let label = |&(name, value): &(&str, &str)| Label { name: name.to_owned(), value: value.to_owned() };
    // An empty label is the same as none.
    of.iter().filter(|(_, value)| !value.is_empty()).map(label).collect()
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl Families {
    fn family(&mut self, name: &str, of: Type, help: &str) {
        let family = MetricFamily { name: name.to_owned(), help: help.to_owned(), r#type: of.into(), metric: vec![] };
        self.families.push(family);
    }

    fn add(&mut self, metric: Metric) {
        if let Some(family) = self.families.last_mut() {
            family.metric.push(metric);
        }
    }

    fn gauge(&mut self, of: Labels<'_>, value: f64) {
        self.add(Metric { label: labels(of), gauge: Some(Gauge { value }), ..Metric::default() });
    }

    fn counter(&mut self, of: Labels<'_>, value: f64) {
        self.counter_since(of, value, self.start);
    }

    fn counter_since(&mut self, of: Labels<'_>, value: f64, start: Timestamp) {
        let counter = Counter { value, start_timestamp: Some(start) };
        self.add(Metric { label: labels(of), counter: Some(counter), ..Metric::default() });
    }

    fn histogram(&mut self, of: Labels<'_>, source: &SourceTotals, waits: &Latencies) {
        let native = Native::new(waits);
        let mut bucket: Vec<Bucket> = Vec::new();
        for (upper_bound, count) in buckets::classic(waits) {
            let before = bucket.last().map_or(0, |bucket| bucket.cumulative_count);
            bucket.push(Bucket { cumulative_count: before + count, upper_bound, exemplar: None });
        }
        for example in source.examples.values() {
            bucket[buckets::classic_index(example.latency_ns)].exemplar = Some(exemplar(example));
        }
        // A span without buckets marks a native histogram that is empty.
        let spans = if native.spans.is_empty() { vec![(0, 0)] } else { native.spans };
        let histogram = Histogram {
            sample_count: waits.count(),
            sample_sum: waits.sum_ns() as f64 / 1e9,
            bucket,
            schema: SCHEMA,
            zero_threshold: 0.0,
            zero_count: native.zeros,
            positive_span: spans.into_iter().map(|(offset, length)| BucketSpan { offset, length }).collect(),
            positive_delta: native.deltas,
            start_timestamp: Some(self.start),
            exemplars: source.examples.values().map(exemplar).collect(),
        };
        self.add(Metric { label: labels(of), histogram: Some(histogram), ..Metric::default() });
    }
}

/// Names the largest cause of a late event.
fn exemplar(example: &Example) -> Exemplar {
    let cpu = example.cpu.to_string();
    let fixed = [("kind", example.kind.name()), ("cpu", cpu.as_str())];
    let used: usize = fixed.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() + "who".len();
    let who: String = example.who.chars().take(MAX_EXEMPLAR_CHARS - used).collect();
    Exemplar {
        label: labels(&[fixed[0], ("who", &who), fixed[1]]),
        value: seconds(example.latency_ns),
        timestamp: Some(Timestamp::new(example.at_unix_ns)),
    }
}

/// Returns all families, in the order of names within each group.
pub fn of(totals: &Totals, own: &Own) -> Vec<MetricFamily> {
    let mut all = Families { families: Vec::new(), start: Timestamp::new(totals.started_unix_ns) };
    waits(&mut all, totals);
    culprits(&mut all, totals);
    about(&mut all, totals, own);
    all.families.retain(|family| !family.metric.is_empty());
    all.families
}

/// What waited, and for how long.
fn waits(all: &mut Families, totals: &Totals) {
    let measured = || totals.sources.iter().filter(|(_, of)| !of.backend.is_empty());
    all.family("whylate_wait_seconds", Type::Histogram, "Latencies by source, late or not.");
    let with_latencies = || measured().filter_map(|(source, of)| Some((source, of, of.waits.as_ref()?)));
    with_latencies().for_each(|(source, of, waits)| all.histogram(&[("source", source)], of, waits));
    all.family("whylate_wait_max_seconds", Type::Gauge, "Longest latency of the last interval.");
    with_latencies().for_each(|(source, of, _)| all.gauge(&[("source", source)], seconds(of.longest_ns)));
    all.family("whylate_late_total", Type::Counter, "Latencies over the source's limit.");
    measured().for_each(|(source, of)| all.counter(&[("source", source)], of.late as f64));
    all.family("whylate_late_seconds_total", Type::Counter, "Total of the latencies over the source's limit.");
    measured().for_each(|(source, of)| all.counter(&[("source", source)], seconds(of.late_ns)));
    all.family(
        "whylate_unexplained_seconds_total",
        Type::Counter,
        "Total of the latencies over the limit that exceeded the budget for explanations; part of whylate_late_seconds_total.",
    );
    measured().for_each(|(source, of)| all.counter(&[("source", source)], seconds(of.unexplained.1)));
}

/// Who made others late.
fn culprits(all: &mut Families, totals: &Totals) {
    all.family(
        "whylate_caused_seconds_total",
        Type::Counter,
        "Delay of late events by what caused it; the causes of one event add up to its latency. The largest 100, and the others.",
    );
    for (by, ns, since_unix_ns) in totals.caused.shown() {
        let Group { container, path } = &by.cgroup;
        let of = [
            ("source", by.source),
            ("kind", by.kind.name()),
            ("who", by.who.as_str()),
            ("container_id", container),
            ("cgroup", path),
        ];
        all.counter_since(&of, seconds(ns), Timestamp::new(since_unix_ns));
    }
    all.counter(&[("who", OTHERS)], seconds(totals.caused.others_ns()));
    all.family(
        "whylate_stalled_seconds_total",
        Type::Counter,
        "Delay that one container or cgroup caused to another, or to itself. The largest 100 pairs, and the others.",
    );
    for (pair, ns, since_unix_ns) in totals.pairs.shown() {
        let of = [
            ("culprit_container_id", pair.culprit.container.as_str()),
            ("culprit_cgroup", &pair.culprit.path),
            ("victim_container_id", &pair.victim.container),
            ("victim_cgroup", &pair.victim.path),
        ];
        all.counter_since(&of, seconds(ns), Timestamp::new(since_unix_ns));
    }
    all.counter(
        &[("culprit_cgroup", OTHER_CGROUPS), ("victim_cgroup", OTHER_CGROUPS)],
        seconds(totals.pairs.others_ns()),
    );
}

/// How well it measures, and what that costs.
fn about(all: &mut Families, totals: &Totals, own: &Own) {
    all.family("whylate_lost_total", Type::Counter, "Events that could not be counted, by reason (whylate help lost).");
    for (source, of) in &totals.sources {
        for (reason, count) in lost_events(source, &of.lost) {
            all.counter(&[("source", source), ("reason", reason)], count as f64);
        }
    }
    all.family(
        "whylate_series_overflow_total",
        Type::Counter,
        "Number of delays added to the series of the others, because at most 100 series are shown.",
    );
    for (metric, beyond) in
        [("whylate_caused_seconds", totals.caused.beyond()), ("whylate_stalled_seconds", totals.pairs.beyond())]
    {
        all.counter(&[("metric", metric)], beyond as f64);
    }
    all.family("whylate_attached", Type::Gauge, "1 if the source measures, 0 if not.");
    for (source, backend) in &own.sources {
        let value = f64::from(u8::from(backend.is_some()));
        all.gauge(&[("source", source), ("backend", backend.as_deref().unwrap_or_default())], value);
    }
    all.family("whylate_build_info", Type::Gauge, "Version of whylate.");
    all.gauge(&[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    all.family("whylate_last_interval_timestamp_seconds", Type::Gauge, "End of the last interval that is counted.");
    all.gauge(&[], seconds(own.replayed_unix_ns.unwrap_or(totals.ended_unix_ns)));
    all.family(
        "whylate_bpf_seconds_total",
        Type::Counter,
        "CPU time of BPF programs; 0 unless kernel.bpf_stats_enabled is set.",
    );
    for (source, of) in totals.sources.iter().filter(|(_, of)| !of.backend.is_empty()) {
        all.counter(&[("source", source)], seconds(of.probe_ns));
    }
    all.family("whylate_map_bytes", Type::Gauge, "Kernel memory of BPF maps.");
    all.gauge(&[], own.map_bytes as f64);
    all.family(
        "whylate_connections_refused_total",
        Type::Counter,
        "Connections that were closed because there were too many.",
    );
    all.counter(&[], own.refused as f64);
    all.family("process_cpu_seconds_total", Type::Counter, "CPU time of whylate.");
    all.counter(&[], own.cpu_seconds);
    all.family("process_resident_memory_bytes", Type::Gauge, "Resident memory of whylate.");
    all.gauge(&[], own.resident_bytes as f64);
    all.family("process_open_fds", Type::Gauge, "Open descriptors of whylate.");
    all.gauge(&[], own.descriptors as f64);
    all.family("process_start_time_seconds", Type::Gauge, "Start of whylate, since 1970.");
    all.gauge(&[], own.started_seconds);
}
