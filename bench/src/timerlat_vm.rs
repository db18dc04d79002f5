// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares both backends of `whylate timerlat` with `rtla timerlat`, in one boot of a virtual machine with the tracer.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use whylate_model::Snapshot;

use crate::figures::{Check, Spread, median_of};
use crate::{figures, machine, results, vm};

const KERNEL: &str = "6.12-rt";
const SECONDS: u64 = 3;
/// Maximum difference of the median latencies: one of the two.
const APART_PERCENT: f64 = 10.0;
const APART_US: f64 = 2.0;

/// Each run is preceded by a line with its name, and with the CPU times so far, before and after it.
const SCRIPT: &str = concat!(
    include_str!("../../xtask/keep-enabled.sh"),
    r#"
    cd /tmp
    measure() {
        name=$1
        shift
        # In a pipe, `times` would be of another shell.
        times >before
        "$@" >out 2>/dev/null || true
        times >after
        echo "@ $name $(sed -n 2p before) $(sed -n 2p after)"
        cat out
    }
    rtla() { measure rtla$1 /usr/bin/rtla timerlat hist -p $2 -d ${3}s -b 1 -E 8192; }
    tracer() { measure tracer$1 whylate timerlat hist -k -p $2 --json -d ${3}s; }
    bpf() { measure bpf$1 whylate timerlat hist --backend bpf -p $2 --json -d ${3}s; }
    # So that no program always follows the same one.
    for round in $(seq $1); do
        rtla "" 1000 $2; tracer "" 1000 $2; bpf "" 1000 $2
        tracer "" 1000 $2; rtla "" 1000 $2; bpf "" 1000 $2
    done
    for round in $(seq $(($1 / 2 + 1))); do
        rtla -10kHz 100 $2; tracer -10kHz 100 $2
    done
    echo "@ end 0m0s 0m0s 0m0s 0m0s"
"#
);

/// Figures and cost of one run.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    irq_us: f64,
    thread_us: f64,
    activations: f64,
    user_us: f64,
    /// Activations delivered and missed, less those due, if reported.
    off_schedule: f64,
    lost: f64,
}

type Figure = fn(&Sample) -> f64;

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if !machine::has("rtla") {
        println!("skipped: no rtla to compare with (scripts/install-deps bench)");
        return Ok(true);
    }
    let (rounds, seconds) = (arguments.rounds.to_string(), SECONDS.to_string());
    let text = vm::run(KERNEL, &["--timeout", "3000", "--with", "rtla", "--"], SCRIPT, &[&rounds, &seconds])?;
    let samples = samples(&text)?;
    let checks = checks(&samples)?;
    arguments.publish("timerlat-vm", &markdown(&samples, &checks, arguments.rounds.into()))?;
    Ok(checks.iter().all(Check::is_within))
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
    let of = |kind: &str| {
        let columns = (1..names.len()).filter(|&column| names[column].starts_with(kind));
        let medians: Vec<f64> = columns.map(|column| median_of_column(&rows, column)).collect();
        medians.iter().sum::<f64>() / medians.len().max(1) as f64
    };
    let counts = text.lines().find_map(|line| line.strip_prefix("count:")).context("rtla printed no counts")?;
    let counts: Vec<f64> = counts.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    // One count of the interrupt and one of the thread, per CPU.
    let activations = counts.iter().sum::<f64>() / 2.0;
    Ok(Sample { irq_us: of("IRQ"), thread_us: of("Thr"), activations, ..Sample::default() })
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
    let of = |kind: &str| {
        let medians = snapshot.series.iter().map(|series| series.histograms[kind].quantile_ns(0.5) as f64 / 1e3);
        medians.sum::<f64>() / cpus
    };
    let due = snapshot.duration_ns as f64 / period_ns;
    let off = snapshot.series.iter().map(|series| {
        let delivered = series.histograms.get("user").unwrap_or(&series.histograms["thread"]).count() as f64;
        (delivered + series.values["missed"] - due).abs()
    });
    Ok(Sample {
        irq_us: of("irq"),
        thread_us: of("thread"),
        activations: snapshot.total("thread").count() as f64,
        off_schedule: off.fold(0.0, f64::max),
        lost: snapshot.lost.get("samples").copied().unwrap_or(0) as f64,
        ..Sample::default()
    })
}

fn median_of_runs(samples: &BTreeMap<String, Vec<Sample>>, name: &str, figure: Figure) -> Result<f64> {
    let of = samples.get(name).with_context(|| format!("{name} was not measured"))?;
    Ok(median_of(of, figure))
}

fn checks(samples: &BTreeMap<String, Vec<Sample>>) -> Result<Vec<Check>> {
    let kinds = [("the interrupt", (|sample| sample.irq_us) as Figure), ("the thread", |sample| sample.thread_us)];
    let mut checks = Vec::new();
    for backend in ["tracer", "bpf"] {
        for (kind, figure) in kinds {
            let (ours, rtlas) = (median_of_runs(samples, backend, figure)?, median_of_runs(samples, "rtla", figure)?);
            let limit = APART_US.max(rtlas * APART_PERCENT / 100.0);
            let what = format!("median latency of {kind}, {backend}: apart from rtla's (us)");
            checks.push(Check::new(what, (ours - rtlas).abs(), "", limit));
        }
    }
    for name in ["tracer", "bpf", "tracer-10kHz"] {
        let of = samples.get(name).with_context(|| format!("{name} was not measured"))?;
        let most = of.iter().map(|sample| sample.off_schedule).fold(0.0, f64::max);
        checks.push(Check::new(format!("off schedule in any run, {name} (periods of a CPU)"), most, "", 1.0));
    }
    for suffix in ["", "-10kHz"] {
        let user = |name: &str| median_of_runs(samples, &format!("{name}{suffix}"), |sample| sample.user_us);
        let name = format!("user space an activation, tracer{suffix} (us; the limit is rtla's)");
        checks.push(Check::new(name, user("tracer")?, "", user("rtla")?));
        let lost = median_of_runs(samples, &format!("tracer{suffix}"), |sample| sample.lost)?;
        checks.push(Check::new(format!("lost samples, tracer{suffix}"), lost, "", 0.0));
    }
    Ok(checks)
}

fn markdown(samples: &BTreeMap<String, Vec<Sample>>, checks: &[Check], rounds: u64) -> String {
    let title = "Timer latency beside rtla, in a virtual machine";
    let mut text = results::heading(title, "bench-timerlat-vm", &format!("timerlat-vm --rounds {rounds}"));
    text += &format!(
        "- in the machine: Debian's {KERNEL}, CPUs that QEMU emulates; rtla 6.1 with the kernel's threads\n{}",
        figures::table(checks, [2, 2])
    );
    text += &format!(
        "\nAll in one boot, in turn, each for {SECONDS} s, two of each a round. Medians of all rounds; of each run the mean over the CPUs, and in brackets the \
         rounds' smallest and largest. An emulated CPU is slow, and slower for BPF programs than for the kernel: times are not those of a \
         machine.\n\n| run | IRQ latency (us) | thread latency (us) | user space (us an activation) | off schedule (periods) |\n\
         |---|--:|--:|--:|--:|\n"
    );
    for (name, of) in samples {
        let shown = |figure: fn(&Sample) -> f64| {
            let Spread { median, min, max } = Spread::from_values(&of.iter().map(figure).collect::<Vec<_>>());
            format!("{median:.2} ({min:.2} to {max:.2})")
        };
        let schedule =
            if name.starts_with("rtla") { "not told".to_owned() } else { shown(|sample| sample.off_schedule) };
        text += &format!(
            "| {name} | {} | {} | {} | {schedule} |\n",
            shown(|sample| sample.irq_us),
            shown(|sample| sample.thread_us),
            shown(|sample| sample.user_us),
        );
    }
    text
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
