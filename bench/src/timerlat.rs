// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency of threads by `whylate timerlat` and by cyclictest, and the cost of an activation with each; and latencies by
//! both backends and by `rtla timerlat`, in one boot of a virtual machine with the tracer.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use whylate_model::Snapshot;

use crate::drivers::{Rounds, count_beside_empty, in_rounds};
use crate::results::{Arguments, Section};
use crate::subject::Subject;
use crate::table::{Figure, Show, column, grid, median_of};
use crate::{child, kernel, machine, vm};

/// Startup costs the same in runs of any length, so the difference of two runs is the cost of activations.
const SHORT_S: u64 = 2;
const LONG_S: u64 = 7;
/// About 1 kHz and 10 kHz. No multiple equals a tick's period, so that ticks come in at any phase.
const PERIODS_US: [u64; 2] = [1_007, 101];
const SUBJECTS: [&str; 2] = ["`whylate timerlat`", "`cyclictest`"];
const OURS: usize = 0;

/// The kernel's own count samples at ticks, and a tick that was due while interrupts were off comes in just when a
/// thread returns to user space.
const USER_TIME: &str = include_str!("user_time.bt");

/// Activations and mean latency in one run of a program, and periods missed and unseen; NaN if it does not report them.
#[derive(Clone, Copy)]
struct Report {
    activations: f64,
    mean_us: f64,
    missed: f64,
    unseen: f64,
}

/// Figures of one program at one period: CPU times are per activation, in user space only and with the kernel.
struct Sample {
    report: Report,
    user_us: f64,
    cpu_us: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let tools = [("cyclictest", "no cyclictest to compare with")];
    let Some(program) = arguments.prepare("bench-timerlat", &tools)? else { return Ok(true) };
    let rounds = arguments.rounds;
    let by_period = PERIODS_US.map(|period_us| {
        let measured = in_rounds(&format!("every {period_us} us"), (rounds, false), &SUBJECTS, |which| match which {
            OURS => ours(&program, period_us),
            _ => cyclictest(period_us),
        });
        Ok((period_us, measured?))
    });
    let by_period = by_period.into_iter().collect::<Result<Vec<(u64, Rounds<Sample>)>>>()?;
    let mean_us = |which| by_period[0].1.median(which, |sample| sample.report.mean_us);
    let apart = (mean_us(OURS) / mean_us(1) - 1.0).abs() * 100.0;
    let mut figures = vec![Figure::new("mean latency, difference from cyclictest's in %", apart, 2).at_most(20.0)];
    for (period_us, measured) in &by_period {
        let name = format!("user space an activation, every {period_us} us (us; the limit is cyclictest's)");
        let [ours, theirs] = [OURS, 1].map(|which| measured.median(which, |sample| sample.user_us));
        figures.push(Figure::new(name, ours, 2).at_most(theirs));
    }
    let (awake, halting) = (&["--dma-latency", "0"][..], ", with CPUs that halt when they are idle");
    let mut texts = Vec::new();
    for (period_us, options, how) in
        [(PERIODS_US[0], awake, ""), (PERIODS_US[1], awake, ""), (PERIODS_US[0], &[], halting)]
    {
        let costs = (0..rounds).map(|_| bpf(&program, period_us, options)).collect::<Result<Vec<_>>>()?;
        let [ns, runs, empty_ns] = [0, 1, 2].map(|index: usize| median_of(&costs, |cost| cost[index]));
        let own_ns = ns - runs * empty_ns;
        let name = format!("BPF an activation, every {period_us} us{how}, without the clock reads of the count (ns)");
        figures.push(Figure::new(name, own_ns, 2).at_most(300.0));
        let how = if how.is_empty() { String::new() } else { format!("{how} and find nothing in a cache afterwards") };
        texts.push(format!(
            "BPF every {period_us} us{how}: {ns:.0} ns in {runs:.2} runs an activation by the kernel's count; an empty program \
             takes {empty_ns:.0} ns by it; without it {own_ns:.0} ns."
        ));
    }
    let columns = [
        column("mean latency (us)", Show::Median(2), "", |sample: &Sample| sample.report.mean_us),
        column("user space (us)", Show::Median(2), "", |sample| sample.user_us),
        column("all CPU time (us)", Show::Median(2), "", |sample| sample.cpu_us),
        column("missed periods", Show::Median(0), "", |sample| sample.report.missed),
        column("unseen", Show::Median(0), "", |sample| sample.report.unseen),
    ];
    let labels = |period_us| SUBJECTS.map(|name| format!("{name} | {period_us}"));
    let rows = by_period.iter().flat_map(|(period_us, measured)| measured.rows(labels(period_us)));
    Section::new(arguments, "timerlat")
        .figures(figures)
        .values(&[("bpf", &texts.join("\n\n")), ("short_s", &SHORT_S), ("long_s", &LONG_S)])
        .add("table", grid("program | period (us)", &columns, rows))
        .publish()
}

fn ours(program: &Path, period_us: u64) -> Result<Sample> {
    sample(program, &format!("timerlat hist --json --dma-latency 0 -p {period_us} -d "), |output| {
        let snapshot = snapshot(output)?;
        let user = snapshot.total("user");
        Ok(Report {
            activations: user.count() as f64,
            mean_us: user.mean_ns() as f64 / 1e3,
            missed: snapshot.series.iter().map(|series| series.values["missed"]).sum(),
            unseen: snapshot.lost["unseen"] as f64,
        })
    })
}

fn snapshot(output: &str) -> Result<Snapshot> {
    let line = output.lines().find(|line| line.starts_with('{')).context("whylate printed no snapshot")?;
    Ok(serde_json::from_str(line)?)
}

fn cyclictest(period_us: u64) -> Result<Sample> {
    let directory = tempfile::tempdir()?;
    let json = directory.path().join("cyclictest.json");
    let options = format!("-m -S -p95 -d0 -q -i{period_us} --json={} -D", json.display());
    sample(Path::new("/usr/bin/cyclictest"), &options, |_| {
        let report: Value = serde_json::from_str(&fs::read_to_string(&json)?).context("cyclictest wrote no JSON")?;
        let threads = report["thread"].as_object().context("cyclictest reports no thread")?;
        let (mut cycles, mut sum_us) = (0.0, 0.0);
        for thread in threads.values() {
            let count = thread["cycles"].as_f64().context("cyclictest reports no cycles")?;
            cycles += count;
            sum_us += count * thread["avg"].as_f64().context("cyclictest reports no average")?;
        }
        ensure!(cycles > 0.0, "cyclictest measured nothing");
        Ok(Report { activations: cycles, mean_us: sum_us / cycles, missed: f64::NAN, unseen: f64::NAN })
    })
}

/// Measures a program by a short run and a long one. User space is measured in runs of their own, as that slows both
/// programs down. `options` end with that of the time.
fn sample(program: &Path, options: &str, report: impl Fn(&str) -> Result<Report>) -> Result<Sample> {
    let run = |seconds: u64| -> Result<(Report, Duration)> {
        let options = format!("{options}{seconds}");
        let (output, cpu) = child::run_for_cpu(Command::new(program).args(options.split(' ')))?;
        Ok((report(&String::from_utf8_lossy(&output.stdout))?, cpu))
    };
    // None of the arguments has a blank.
    let run_for_user = |seconds: u64| -> Result<(f64, f64)> {
        let line = format!("{} {options}{seconds}", program.display());
        let output = child::run(Command::new("bpftrace").args(["-e", USER_TIME, "-c", &line]))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let user_ns = text.lines().find_map(|line| line.strip_prefix("@user: ")).context("bpftrace printed no time")?;
        Ok((user_ns.trim().parse().context("bpftrace printed no number")?, report(&text)?.activations))
    };
    let ((_, short), (report, long)) = (run(SHORT_S)?, run(LONG_S)?);
    let ((short_ns, few), (long_ns, many)) = (run_for_user(SHORT_S)?, run_for_user(LONG_S)?);
    ensure!(many > few, "the longer run has no more activations");
    let activations = report.activations * (LONG_S - SHORT_S) as f64 / LONG_S as f64;
    Ok(Sample {
        report,
        user_us: (long_ns - short_ns) / 1e3 / (many - few),
        cpu_us: (long.as_secs_f64() - short.as_secs_f64()) * 1e6 / activations,
    })
}

/// Measures BPF run time and runs per activation, and the run time of an empty program, on an idle machine: other
/// switches and timers are included.
fn bpf(program: &Path, period_us: u64, more: &[&str]) -> Result<[f64; 3]> {
    let _counting = kernel::count_run_times()?;
    let options = format!("timerlat hist --json -d 5 -p {period_us}");
    let mut command = Command::new(program);
    command.args(options.split(' ')).args(more);
    let (output, _, empty_ns) = count_beside_empty(&Subject::nothing().start(false)?, || child::run(&mut command))?;
    let snapshot = snapshot(&String::from_utf8_lossy(&output.stdout))?;
    let activations = snapshot.total("user").count().max(1) as f64;
    Ok([snapshot.probe.run_ns as f64 / activations, snapshot.probe.runs as f64 / activations, empty_ns])
}

const KERNEL: &str = "6.12-rt";
const SECONDS: u64 = 3;

#[derive(Default)]
struct VmSample {
    irq_us: f64,
    thread_us: f64,
    activations: f64,
    user_us: f64,
    /// Activations delivered and missed, less those due; NaN if the tool does not report them.
    off_schedule: f64,
    lost: f64,
}

pub fn run_in_vm(arguments: &Arguments) -> Result<bool> {
    if !machine::has("rtla") {
        println!("skipped: no rtla to compare with (scripts/install-deps bench)");
        return Ok(true);
    }
    let (rounds, seconds) = (arguments.rounds.to_string(), SECONDS.to_string());
    let script = [vm::KEEP_ENABLED, include_str!("timerlat_vm.sh")].concat();
    let text = vm::run(KERNEL, &["--timeout", "3000", "--with", "rtla", "--"], &script, &[&rounds, &seconds])?;
    let samples = samples(&text)?;
    let columns = [
        column("IRQ latency (us)", Show::Spread(2), "", |sample: &VmSample| sample.irq_us),
        column("thread latency (us)", Show::Spread(2), "", |sample| sample.thread_us),
        column("user space (us an activation)", Show::Spread(2), "", |sample| sample.user_us),
        column("off schedule (periods)", Show::Spread(2), "", |sample| sample.off_schedule),
    ];
    let rows = samples.iter().map(|(name, samples)| (name.clone(), samples.iter().collect()));
    Section::new(arguments, "timerlat-vm")
        .figures(figures(&samples)?)
        .values(&[("kernel", &KERNEL), ("seconds", &SECONDS), ("table", &grid("run", &columns, rows))])
        .publish()
}

fn figures(samples: &BTreeMap<String, Vec<VmSample>>) -> Result<Vec<Figure>> {
    let all = |name: &str| samples.get(name).with_context(|| format!("{name} was not measured"));
    let median = |name: &str, figure: &dyn Fn(&VmSample) -> f64| anyhow::Ok(median_of(all(name)?, figure));
    let mut figures = Vec::new();
    for (backend, kind) in [("tracer", "interrupt"), ("tracer", "thread"), ("bpf", "interrupt"), ("bpf", "thread")] {
        let figure = |sample: &VmSample| if kind == "thread" { sample.thread_us } else { sample.irq_us };
        let (ours, rtlas) = (median(backend, &figure)?, median("rtla", &figure)?);
        let what = format!("median latency of the {kind}, {backend}: apart from rtla's (us)");
        figures.push(Figure::new(what, (ours - rtlas).abs(), 2).at_most(f64::max(2.0, 0.1 * rtlas)));
    }
    for name in ["tracer", "bpf", "tracer-10kHz"] {
        let most = all(name)?.iter().map(|sample| sample.off_schedule).fold(0.0, f64::max);
        let what = format!("off schedule in any run, {name} (periods of a CPU)");
        figures.push(Figure::new(what, most, 2).at_most(1.0));
    }
    for suffix in ["", "-10kHz"] {
        let [ours, rtlas] = ["tracer", "rtla"].map(|name| median(&format!("{name}{suffix}"), &|sample| sample.user_us));
        let what = format!("user space an activation, tracer{suffix} (us; the limit is rtla's)");
        figures.push(Figure::new(what, ours?, 2).at_most(rtlas?));
        let lost = median(&format!("tracer{suffix}"), &|sample| sample.lost)?;
        figures.push(Figure::new(format!("lost samples, tracer{suffix}"), lost, 2).at_most(0.0));
    }
    Ok(figures)
}

fn samples(text: &str) -> Result<BTreeMap<String, Vec<VmSample>>> {
    let mut samples: BTreeMap<String, Vec<VmSample>> = BTreeMap::new();
    for (words, rest) in vm::parts(text) {
        let [name, before, _, after, _] = words[..] else { continue };
        if name == "end" || seconds(before).is_none() {
            continue;
        }
        let period_ns = if name.ends_with("10kHz") { 1e5 } else { 1e6 };
        let mut sample = if name.starts_with("rtla") { from_rtla(rest)? } else { from_json(rest, period_ns)? };
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
fn from_rtla(text: &str) -> Result<VmSample> {
    let heading = text.lines().find(|line| line.starts_with("Index")).context("rtla printed no histogram")?;
    let names: Vec<&str> = heading.split_whitespace().collect();
    let numbers = |line: &str| line.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<f64>>();
    let rows = text.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    let rows: Vec<Vec<f64>> = rows.map(numbers).collect();
    let mean_us = |kind: &str| {
        let columns = (1..names.len()).filter(|&column| names[column].starts_with(kind));
        let medians: Vec<f64> = columns.map(|column| median_of_column(&rows, column)).collect();
        medians.iter().sum::<f64>() / medians.len().max(1) as f64
    };
    let counts = text.lines().find_map(|line| line.strip_prefix("count:")).context("rtla printed no counts")?;
    // One count of the interrupt and one of the thread, per CPU.
    let activations = numbers(counts).iter().sum::<f64>() / 2.0;
    let (irq_us, thread_us) = (mean_us("IRQ"), mean_us("Thr"));
    Ok(VmSample { irq_us, thread_us, activations, off_schedule: f64::NAN, ..VmSample::default() })
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

fn from_json(text: &str, period_ns: f64) -> Result<VmSample> {
    let snapshot = snapshot(text)?;
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
    Ok(VmSample {
        irq_us: mean_us("irq"),
        thread_us: mean_us("thread"),
        activations: snapshot.total("thread").count() as f64,
        off_schedule: off.fold(0.0, f64::max),
        lost: snapshot.lost.get("samples").copied().unwrap_or(0) as f64,
        ..VmSample::default()
    })
}

#[cfg(test)]
#[path = "../unit/timerlat.rs"]
mod tests;
