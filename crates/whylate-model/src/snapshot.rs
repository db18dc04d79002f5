// SPDX-License-Identifier: MIT OR Apache-2.0
//! A snapshot: what one source saw in one span of time.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::programs::Programs;
use crate::{ActorName, Histogram, Labels, LateEvent, Stack, Steps, WaitClass};

/// Version of the JSON format; a reader refuses a higher one.
pub const SCHEMA: u32 = 1;

/// Everything one source saw since its previous snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Snapshot {
    /// Version of this format, [`SCHEMA`].
    pub schema: u32,
    /// The source's name, e.g. `wq`.
    pub source: String,
    /// Backend of the source that measured.
    pub backend: String,
    /// The machine's host name.
    pub host: String,
    /// The PID namespace of the TIDs, by its inode; `None` for the initial namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u32>,
    /// Start of the span, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "crate::units::rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub start_unix_ns: u64,
    /// Duration of the span in nanoseconds.
    pub duration_ns: u64,
    /// End of the span on CLOCK_MONOTONIC of the measuring machine, which cannot be set; not in JSON, where it has no
    /// meaning.
    #[serde(skip)]
    pub ended_ns: u64,
    /// Distributions and figures by label.
    pub series: Vec<Series>,
    /// Call stacks with their weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<Stack>,
    /// Late events, if a threshold was given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late: Vec<LateEvent>,
    /// Threads in long uninterruptible sleep at the end of the span, longest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uninterruptible: Vec<Sleeper>,
    /// Programs by the share of time that they were held up, if the source follows waits.
    #[serde(default, skip_serializing_if = "Programs::is_none")]
    pub programs: Programs,
    /// Late events that were too many to explain, and have no causes, if causes are requested.
    #[serde(default, skip_serializing_if = "Unexplained::is_none")]
    pub unexplained: Unexplained,
    /// Events that could not be counted, by reason. Reasons that did not occur may be zero or absent.
    pub lost: BTreeMap<String, u64>,
    /// Cost of measuring.
    pub probe: Probe,
    /// Number of notes on the precision of the source on this machine that were not printed; not in JSON.
    #[serde(skip)]
    pub notes: u64,
}

/// The distributions and figures of one label set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Series {
    /// Labels of the figures' subject.
    pub labels: Labels,
    /// Distributions by name, e.g. `latency`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub histograms: BTreeMap<String, Histogram>,
    /// Counts in equal steps by name, if requested.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub steps: BTreeMap<String, Steps>,
    /// Single figures by name: counts are integers, shares are fractions from 0 to 1.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", serialize_with = "crate::units::figure::write_all")]
    #[cfg_attr(test, schemars(with = "BTreeMap<String, f64>"))]
    pub values: BTreeMap<String, f64>,
}

/// A thread in uninterruptible sleep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Sleeper {
    /// The thread.
    pub who: ActorName,
    /// Label of its process, `name:pid`, if the name differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// Time asleep so far, in nanoseconds.
    pub asleep_ns: u64,
    /// Innermost kernel function on its stack, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_in: Option<String>,
    /// Class of the wait.
    pub class: WaitClass,
}

/// The run time of the source's own BPF programs, from `kernel.bpf_stats_enabled`.
///
/// Both are zero unless the kernel counts (`sysctl kernel.bpf_stats_enabled=1`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Probe {
    /// Run time in nanoseconds.
    pub run_ns: u64,
    /// Number of runs.
    pub runs: u64,
}

/// Late events without causes, which no ranking of culprits covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Unexplained {
    /// Number of events.
    pub events: u64,
    /// Total latency in nanoseconds.
    pub total_ns: u64,
    /// Thresholds, if a recording counted these events from a lower one than the requested one; not in JSON.
    #[serde(skip)]
    pub recorded: Option<RecordedFrom>,
}

/// Thresholds of a recording and of a reader of it who asks for longer latencies only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedFrom {
    /// Minimum latency of the recorded late events, in nanoseconds.
    pub recorded_ns: u64,
    /// Minimum latency of the requested ones, in nanoseconds.
    pub asked_ns: u64,
}

impl Unexplained {
    /// Returns whether all events have causes.
    pub fn is_none(&self) -> bool {
        self.events == 0
    }

    /// Returns the share of the late time that causes explain, in percent, given `explained_ns`; `None` if it is all of
    /// it.
    pub fn explained_percent(&self, explained_ns: u64) -> Option<f64> {
        let all_ns = explained_ns.saturating_add(self.total_ns);
        // Almost all is not shown as all.
        let percent = || (explained_ns as f64 * 100.0 / all_ns.max(1) as f64).min(99.9);
        (!self.is_none()).then(percent)
    }
}

impl Snapshot {
    /// Creates an empty snapshot of `source`.
    pub fn new(source: &str, backend: &str, host: &str, start_unix_ns: u64) -> Self {
        Snapshot {
            schema: SCHEMA,
            source: source.to_owned(),
            backend: backend.to_owned(),
            host: host.to_owned(),
            pid_namespace: None,
            start_unix_ns,
            duration_ns: 0,
            ended_ns: 0,
            series: Vec::new(),
            stacks: Vec::new(),
            late: Vec::new(),
            uninterruptible: Vec::new(),
            programs: Programs::default(),
            unexplained: Unexplained::default(),
            lost: BTreeMap::new(),
            probe: Probe::default(),
            notes: 0,
        }
    }

    /// Merges the series by one label: all series with the same value of `label` become one, sorted by that value.
    /// Their other labels list each value once, separated by commas; a comma within a value has a backslash before it.
    pub fn merged_by(&self, label: &str) -> Vec<Series> {
        self.merged_by_all(&[label])
    }

    /// Merges the series by several labels, as [`Snapshot::merged_by`] does by one.
    pub fn merged_by_all(&self, by: &[&str]) -> Vec<Series> {
        /// Values by the name of their label.
        type Labels<'a> = BTreeMap<&'a str, Vec<&'a str>>;
        let mut merged: BTreeMap<Vec<&str>, (Series, Labels<'_>)> = BTreeMap::new();
        for series in &self.series {
            let (into, labels) = merged.entry(by.iter().map(|label| series.label(label)).collect()).or_default();
            into.absorb(series);
            for (name, value) in &series.labels {
                let values = labels.entry(name).or_default();
                if !values.contains(&value.as_str()) {
                    values.push(value);
                }
            }
        }
        let series = merged.into_values().map(|(series, labels)| {
            let listed = |(name, values): (&str, Vec<&str>)| {
                let text = if by.contains(&name) { values.concat() } else { list(&values) };
                (name.to_owned(), text)
            };
            Series { labels: labels.into_iter().map(listed).collect(), ..series }
        });
        series.collect()
    }

    /// Returns the distribution `name` over all series.
    pub fn total(&self, name: &str) -> Histogram {
        let mut total = Histogram::default();
        for histogram in self.series.iter().filter_map(|series| series.histograms.get(name)) {
            total.merge(histogram);
        }
        total
    }
}

/// Joins values to one text, with separators escaped.
fn list(values: &[&str]) -> String {
    let escaped: Vec<String> = values.iter().map(|value| value.replace('\\', "\\\\").replace(',', "\\,")).collect();
    escaped.join(",")
}

impl Series {
    /// Returns a label's value; an empty text without the label.
    pub fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }

    /// Returns a figure; 0 without it.
    pub fn value(&self, name: &str) -> f64 {
        self.values.get(name).copied().unwrap_or(0.0)
    }

    /// Returns a distribution; an empty one without it.
    pub fn histogram(&self, name: &str) -> &Histogram {
        static NONE: LazyLock<Histogram> = LazyLock::new(Histogram::default);
        self.histograms.get(name).unwrap_or(&NONE)
    }

    /// Adds the figures of `other`; takes the larger of those named `oldest_…` and of `period_ns`. Keeps its own
    /// labels.
    pub fn absorb(&mut self, other: &Series) {
        for (name, histogram) in &other.histograms {
            self.histograms.entry(name.clone()).or_default().merge(histogram);
        }
        for (name, steps) in &other.steps {
            self.steps.entry(name.clone()).or_default().merge(steps);
        }
        for (name, value) in &other.values {
            let mine = self.values.entry(name.clone()).or_default();
            *mine = if name.starts_with("oldest_") || name == "period_ns" { mine.max(*value) } else { *mine + value };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(handler: &str, workqueue: &str, latencies_ns: &[u64]) -> Series {
        Series {
            labels: [("handler", handler), ("workqueue", workqueue)].map(|(k, v)| (k.into(), v.into())).into(),
            histograms: [("latency".to_owned(), latencies_ns.iter().copied().collect())].into(),
            ..Series::default()
        }
    }

    #[test]
    fn merging_by_handler_adds_its_workqueues() {
        let mut snapshot = Snapshot::new("wq", "fentry", "host", 0);
        snapshot.series =
            vec![series("b", "events", &[1]), series("a", "events", &[5, 7]), series("a", "kblockd", &[9])];
        let merged = snapshot.merged_by("handler");
        assert_eq!(merged.len(), 2);
        assert_eq!(merged[0].labels["handler"], "a");
        assert_eq!(merged[0].labels["workqueue"], "events,kblockd");
        assert_eq!(merged[0].histograms["latency"].count(), 3);
        assert_eq!(snapshot.total("latency").sum_ns(), 22);
    }

    #[test]
    fn commas_in_names_are_escaped() {
        let of = |workqueues: &[&str]| {
            let mut snapshot = Snapshot::new("wq", "fentry", "host", 0);
            snapshot.series = workqueues.iter().map(|workqueue| series("a", workqueue, &[1])).collect();
            snapshot.merged_by("handler")[0].labels["workqueue"].clone()
        };
        assert_eq!(of(&["x", "y", "x"]), "x,y");
        assert_eq!(of(&["x,y", "x"]), r"x\,y,x");
        let joined = [&["x,y"][..], &["x", "y"], &[r"x\", "y"], &[r"x\,y"], &["x,y", "x,y"]].map(of);
        assert_eq!(joined, [r"x\,y", "x,y", r"x\\,y", r"x\\\,y", r"x\,y"]);
        let mut snapshot = Snapshot::new("wq", "fentry", "host", 0);
        snapshot.series = vec![series("a,b", "x", &[1]), series("a,b", "y", &[1])];
        assert_eq!(
            snapshot.merged_by("handler")[0].labels["handler"],
            "a,b",
            "the label that they are merged by is one value"
        );
    }

    #[test]
    fn counts_are_integers_in_json() {
        let values = [("threads", 95.0), ("share", 0.25), ("none", -0.0), ("huge", 1e300)];
        let values = values.map(|(name, figure)| (name.to_owned(), figure)).into();
        let text = serde_json::to_string(&Series { values, ..Series::default() }).expect("a series serializes");
        assert!(text.contains(r#""values":{"huge":1e+300,"none":0,"share":0.25,"threads":95}"#), "{text}");
        assert_eq!(serde_json::from_str::<Series>(&text).expect("and parses").value("threads"), 95.0);
    }

    #[test]
    fn json_restores_the_snapshot() {
        let mut snapshot = Snapshot::new("wq", "fentry", "host", 1_795_252_440_123_000_000);
        snapshot.series = vec![series("a", "events", &[5, 7])];
        snapshot.lost.insert("unmatched".into(), 3);
        let text = serde_json::to_string(&snapshot).expect("a snapshot serialises");
        assert_eq!(serde_json::from_str::<Snapshot>(&text).expect("and parses"), snapshot);
    }
}
