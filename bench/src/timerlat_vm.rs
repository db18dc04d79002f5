// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares both backends of `whylate timerlat` with `rtla timerlat`, in one boot of a virtual machine with the tracer.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use whylate_model::Snapshot;

use crate::results::{Arguments, Section};
use crate::table::{Figure, Show, column, median_of};
use crate::{machine, vm};

const KERNEL: &str = "6.12-rt";
const SECONDS: u64 = 3;
/// Maximum difference of the median latencies: one of the two.
const APART_PERCENT: f64 = 10.0;
const APART_US: f64 = 2.0;

/// Figures and cost of one run.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    irq_us: f64,
    thread_us: f64,
    activations: f64,
    user_us: f64,
    /// Activations delivered and missed, less those due; NaN if the tool does not report them.
    off_schedule: f64,
    lost: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    if !machine::has("rtla") {
        println!("skipped: no rtla to compare with (scripts/install-deps bench)");
        return Ok(true);
    }
    let (rounds, seconds) = (arguments.rounds.to_string(), SECONDS.to_string());
    let script = [vm::KEEP_ENABLED, include_str!("timerlat_vm.sh")].concat();
    let text = vm::run(KERNEL, &["--timeout", "3000", "--with", "rtla", "--"], &script, &[&rounds, &seconds])?;
    let samples = samples(&text)?;
    let columns = [
        column("IRQ latency (us)", Show::Spread(2), "", |sample: &Sample| sample.irq_us),
        column("thread latency (us)", Show::Spread(2), "", |sample| sample.thread_us),
        column("user space (us an activation)", Show::Spread(2), "", |sample| sample.user_us),
        column("off schedule (periods)", Show::Spread(2), "", |sample| sample.off_schedule),
    ];
    let title = "Timer latency beside rtla, in a virtual machine";
    let command = format!("timerlat-vm --rounds {rounds}");
    Section::new(arguments, "timerlat-vm", title, "bench-timerlat-vm", &command)
        .fact(&format!("in the machine: Debian's {KERNEL}, CPUs that QEMU emulates; rtla 6.1 with the kernel's threads"))
        .figures(figures(&samples)?)
        .text(&format!(
            "All in one boot, in turn, each for {SECONDS} s, two of each a round. Medians of all rounds; of each run the mean over the CPUs, and in brackets the \
             rounds' smallest and largest. An emulated CPU is slow, and slower for BPF programs than for the kernel: times are not those of a machine."
        ))
        .grid("run", &columns, samples.iter().map(|(name, samples)| (name.clone(), samples.iter().collect())))
        .publish()
}

fn figures(samples: &BTreeMap<String, Vec<Sample>>) -> Result<Vec<Figure>> {
    let all = |name: &str| samples.get(name).with_context(|| format!("{name} was not measured"));
    let median = |name: &str, figure: fn(&Sample) -> f64| Ok::<_, anyhow::Error>(median_of(all(name)?, figure));
    let mut figures = Vec::new();
    for backend in ["tracer", "bpf"] {
        let kinds: [(_, fn(&Sample) -> f64); 2] =
            [("the interrupt", |sample| sample.irq_us), ("the thread", |sample| sample.thread_us)];
        for (kind, figure) in kinds {
            let (ours, rtlas) = (median(backend, figure)?, median("rtla", figure)?);
            let what = format!("median latency of {kind}, {backend}: apart from rtla's (us)");
            let limit = APART_US.max(rtlas * APART_PERCENT / 100.0);
            figures.push(Figure::new(what, (ours - rtlas).abs(), 2).at_most(limit));
        }
    }
    for name in ["tracer", "bpf", "tracer-10kHz"] {
        let most = all(name)?.iter().map(|sample| sample.off_schedule).fold(0.0, f64::max);
        let what = format!("off schedule in any run, {name} (periods of a CPU)");
        figures.push(Figure::new(what, most, 2).at_most(1.0));
    }
    for suffix in ["", "-10kHz"] {
        let [ours, rtlas] = ["tracer", "rtla"].map(|name| median(&format!("{name}{suffix}"), |sample| sample.user_us));
        let what = format!("user space an activation, tracer{suffix} (us; the limit is rtla's)");
        figures.push(Figure::new(what, ours?, 2).at_most(rtlas?));
        let lost = median(&format!("tracer{suffix}"), |sample| sample.lost)?;
        figures.push(Figure::new(format!("lost samples, tracer{suffix}"), lost, 2).at_most(0.0));
    }
    Ok(figures)
}

fn samples(text: &str) -> Result<BTreeMap<String, Vec<Sample>>> {
    let mut samples: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
    for (words, rest) in vm::parts(text) {
        let [name, before, _, after, _] = words[..] else { continue };
        if name == "end" || seconds(before).is_none() {
            continue;
        }
        let mut sample = if name.starts_with("rtla") {
            from_rtla(rest)?
        } else {
            from_json(rest, if name.ends_with("10kHz") { 1e5 } else { 1e6 })?
        };
        let user_s = seconds(after).context("no time")? - seconds(before).context("no time")?;
        sample.user_us = user_s * 1e6 / sample.activations.max(1.0);
        samples.entry(name.to_owned()).or_default().push(sample);
    }
    Ok(samples)
}

/// Parses `1m2.34s`.
fn seconds(text: &str) -> Option<f64> {
    let (minutes, seconds) = text.strip_suffix('s')?.split_once('m')?;
    Some(minutes.parse::<f64>().ok()? * 60.0 + seconds.parse::<f64>().ok()?)
}

/// Returns the means over the CPUs of their medians.
fn from_rtla(text: &str) -> Result<Sample> {
    let heading = text.lines().find(|line| line.starts_with("Index")).context("rtla printed no histogram")?;
    let names: Vec<&str> = heading.split_whitespace().collect();
    let rows: Vec<Vec<f64>> = text
        .lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_digit()))
        .map(|line| line.split_whitespace().filter_map(|word| word.parse().ok()).collect())
        .collect();
    let mean_us = |kind: &str| {
        let columns = (1..names.len()).filter(|&column| names[column].starts_with(kind));
        let medians: Vec<f64> = columns.map(|column| median_of_column(&rows, column)).collect();
        medians.iter().sum::<f64>() / medians.len().max(1) as f64
    };
    let counts = text.lines().find_map(|line| line.strip_prefix("count:")).context("rtla printed no counts")?;
    let counts: Vec<f64> = counts.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    // One count of the interrupt and one of the thread, per CPU.
    let activations = counts.iter().sum::<f64>() / 2.0;
    let (irq_us, thread_us) = (mean_us("IRQ"), mean_us("Thr"));
    Ok(Sample { irq_us, thread_us, activations, off_schedule: f64::NAN, ..Sample::default() })
}

/// Returns the median of a column with steps of one microsecond: the middle of the step.
fn median_of_column(rows: &[Vec<f64>], column: usize) -> f64 {
    let at = |row: &Vec<f64>| row.get(column).copied().unwrap_or(0.0);
    let total: f64 = rows.iter().map(at).sum();
    let mut seen = 0.0;
    let found = rows.iter().find(|row| {
        seen += at(row);
        seen * 2.0 >= total
    });
    found.and_then(|row| row.first()).map_or(0.0, |us| us + 0.5)
}

fn from_json(text: &str, period_ns: f64) -> Result<Sample> {
    let line = text.lines().find(|line| line.starts_with('{')).context("whylate printed no snapshot")?;
    let snapshot: Snapshot = serde_json::from_str(line)?;
    let cpus = snapshot.series.len().max(1) as f64;
    let mean_us = |kind: &str| {
        let medians = snapshot.series.iter().map(|series| series.histograms[kind].quantile_ns(0.5) as f64 / 1e3);
        medians.sum::<f64>() / cpus
    };
    let due = snapshot.duration_ns as f64 / period_ns;
    let off = snapshot.series.iter().map(|series| {
        let delivered = series.histograms.get("user").unwrap_or(&series.histograms["thread"]).count() as f64;
        (delivered + series.values["missed"] - due).abs()
    });
    Ok(Sample {
        irq_us: mean_us("irq"),
        thread_us: mean_us("thread"),
        activations: snapshot.total("thread").count() as f64,
        off_schedule: off.fold(0.0, f64::max),
        lost: snapshot.lost.get("samples").copied().unwrap_or(0) as f64,
        ..Sample::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_output_of_rtla() {
        let text = "# RTLA\nIndex   IRQ-000   Thr-000   IRQ-001   Thr-001\n3      5     0     9   0\n7   6   11    2     0\n9 0 0 0 11\n\
                    over:    0 0 0 0\ncount:  11 11 11 11\n";
        let sample = from_rtla(text).expect("read");
        assert_eq!((sample.irq_us, sample.thread_us, sample.activations), ((7.5 + 3.5) / 2.0, (7.5 + 9.5) / 2.0, 22.0));
        assert_eq!(seconds("1m2.50s"), Some(62.5));
    }
}
