// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums up snapshots since the start.

use std::collections::BTreeMap;

use whylate_model::{Histogram, Probe, Series, Snapshot, Steps};

/// Names of the latencies, in the order of their columns.
pub const KINDS: [&str; 3] = ["irq", "thread", "user"];
/// Index of the interrupt latency in [`KINDS`].
pub const IRQ: usize = 0;
/// Index of the thread latency in [`KINDS`].
pub const THREAD: usize = 1;
/// Name of the thread latency corrected for missed periods.
pub const CORRECTED: &str = "thread_corrected";

/// Sums by CPU.
#[derive(Clone, Debug, Default)]
pub struct Total {
    pub cpus: BTreeMap<u32, OfCpu>,
    pub duration_ns: u64,
    pub lost: BTreeMap<String, u64>,
    pub probe: Probe,
}

/// Sums of one CPU.
#[derive(Clone, Debug, Default)]
pub struct OfCpu {
    /// Latencies in the order of [`KINDS`].
    pub latencies: [Histogram; 3],
    /// Whether each of the latencies is measured.
    pub is_measured: [bool; 3],
    pub corrected: Histogram,
    pub last_ns: [u64; 3],
    /// Counts by equal steps, for `timerlat hist`.
    pub steps: [Steps; 3],
    /// Periods in which the thread was still late for an earlier one.
    pub missed: u64,
    /// Activations due by the end of the last span, and periods after them, in which the thread had not run yet.
    pub overdue: u64,
}

impl OfCpu {
    /// Returns the number of activations.
    pub fn count(&self) -> u64 {
        self.latencies.iter().map(Histogram::count).max().unwrap_or(0)
    }
}

impl Total {
    /// Adds a snapshot.
    pub fn add(&mut self, snapshot: &Snapshot) {
        self.duration_ns += snapshot.duration_ns;
        for (reason, count) in &snapshot.lost {
            *self.lost.entry(reason.clone()).or_default() += count;
        }
        self.probe.run_ns += snapshot.probe.run_ns;
        self.probe.runs += snapshot.probe.runs;
        for series in &snapshot.series {
            if let Some(cpu) = series.labels.get("cpu").and_then(|cpu| cpu.parse().ok()) {
                self.cpus.entry(cpu).or_default().add(series);
            }
        }
    }

    /// Returns the sum of all CPUs, without last latencies.
    pub fn all(&self) -> OfCpu {
        let mut all = OfCpu::default();
        for of_cpu in self.cpus.values() {
            for kind in 0..KINDS.len() {
                all.latencies[kind].merge(&of_cpu.latencies[kind]);
                // All CPUs have the same steps.
                all.steps[kind].merge(&of_cpu.steps[kind]);
            }
            all.corrected.merge(&of_cpu.corrected);
            all.missed += of_cpu.missed;
            all.overdue += of_cpu.overdue;
        }
        all
    }

    /// Returns the sums as a snapshot; everything else is from the latest one.
    pub fn into_snapshot(self, latest: Snapshot) -> Snapshot {
        let start_unix_ns = (latest.start_unix_ns + latest.duration_ns).saturating_sub(self.duration_ns);
        let series = self.cpus.into_iter().map(|(cpu, of_cpu)| of_cpu.into_series(cpu)).collect();
        let (duration_ns, lost, probe) = (self.duration_ns, self.lost, self.probe);
        Snapshot { start_unix_ns, duration_ns, series, lost, probe, ..latest }
    }
}

impl OfCpu {
    fn add(&mut self, series: &Series) {
        for (index, kind) in KINDS.into_iter().enumerate() {
            self.is_measured[index] |= series.histograms.contains_key(kind);
            if let Some(histogram) = series.histograms.get(kind).filter(|histogram| !histogram.is_empty()) {
                self.latencies[index].merge(histogram);
                // Without an activation in the interval, the last latency may be from before this measurement.
                self.last_ns[index] = series.values.get(&last(kind)).map_or(0, |&ns| ns as u64);
            }
            if let Some(steps) = series.steps.get(kind) {
                self.steps[index].merge(steps);
            }
        }
        if let Some(corrected) = series.histograms.get(CORRECTED) {
            self.corrected.merge(corrected);
        }
        let value = |name| series.values.get(name).map_or(0, |&value| value as u64);
        self.missed += value("missed");
        // Overdue activations of earlier spans have run, or are still counted.
        self.overdue = value("overdue");
    }

    fn into_series(self, cpu: u32) -> Series {
        let mut series = Series::default();
        series.labels.insert("cpu".to_owned(), cpu.to_string());
        let parts = KINDS.into_iter().zip(self.latencies).zip(self.last_ns).zip(self.steps).zip(self.is_measured);
        for ((((kind, histogram), last_ns), steps), _) in parts.filter(|&(_, is_measured)| is_measured) {
            series.histograms.insert(kind.to_owned(), histogram);
            series.values.insert(last(kind), last_ns as f64);
            if steps.step_ns > 0 {
                series.steps.insert(kind.to_owned(), steps);
            }
        }
        series.histograms.insert(CORRECTED.to_owned(), self.corrected);
        series.values.insert("missed".to_owned(), self.missed as f64);
        series.values.insert("overdue".to_owned(), self.overdue as f64);
        series
    }
}

fn last(kind: &str) -> String {
    format!("{kind}_last_ns")
}

/// Input of the outputs' tests.
#[cfg(test)]
pub(super) mod sample {
    use super::*;

    /// Returns two CPUs, the second one without return-to-user latencies.
    pub fn total() -> Total {
        let mut total = Total::default();
        let mut snapshot = Snapshot::new("timerlat", "bpf", "host", 0);
        snapshot.duration_ns = 6_400_000_000;
        for (cpu, latencies_ns) in [(0, [4_900, 50_000, 73_100]), (12, [150, 9_999, 0])] {
            let is_measured = [true, true, cpu == 0];
            let mut of_cpu = OfCpu { missed: u64::from(cpu), last_ns: latencies_ns, is_measured, ..OfCpu::default() };
            for (kind, &ns) in latencies_ns.iter().enumerate().filter(|&(_, &ns)| ns > 0) {
                let values = [ns, 2 * ns, 3_456 * ns];
                of_cpu.latencies[kind] = values.into_iter().collect();
                let mut steps = Steps { step_ns: 1_000, counts: vec![0; 256], over: 0 };
                for ns in values {
                    match steps.counts.get_mut((ns / 1_000) as usize) {
                        Some(count) => *count += 1,
                        None => steps.over += 1,
                    }
                }
                of_cpu.steps[kind] = steps;
            }
            of_cpu.corrected = of_cpu.latencies[1].clone();
            snapshot.series.push(of_cpu.into_series(cpu));
        }
        snapshot.lost.insert("unseen".to_owned(), 3);
        total.add(&snapshot);
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_total_is_a_snapshot_again() {
        let total = sample::total();
        let before = total.all();
        let mut latest = Snapshot::new("timerlat", "bpf", "host", 9_000_000_000);
        latest.duration_ns = 1_000_000_000;
        let snapshot = total.clone().into_snapshot(latest);
        assert_eq!(snapshot.start_unix_ns, 10_000_000_000 - total.duration_ns);
        let mut again = Total::default();
        again.add(&snapshot);
        let after = again.all();
        assert_eq!((before.latencies, before.steps, before.missed), (after.latencies, after.steps, after.missed));
        assert_eq!(again.lost["unseen"], 3);
        let has_user = |series: &Series| series.histograms.contains_key("user");
        assert!(has_user(&snapshot.series[0]) && !has_user(&snapshot.series[1]));
        assert_eq!(again.cpus[&0].last_ns, [4_900, 50_000, 73_100]);
    }
}
