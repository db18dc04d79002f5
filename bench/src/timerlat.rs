// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency of threads by `whylate timerlat` and by cyclictest, and the cost of an activation with each.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use whylate_model::Snapshot;

use crate::figures::{Check, median_of};
use crate::{figures, floor, kernel, machine, programs, results, user_time, whylate};

/// Limit of the difference of the mean latencies, in percent of cyclictest's.
const MEAN_LIMIT: f64 = 20.0;
/// Limit of the BPF run time per activation.
const BPF_LIMIT_NS: f64 = 300.0;
/// Startup costs the same in runs of any length, so the difference of two runs is the cost of activations.
const SHORT_S: u64 = 2;
const LONG_S: u64 = 7;
/// About 1 kHz and 10 kHz. No multiple equals a tick's period, so that ticks come in at any phase.
const PERIODS_US: [u64; 2] = [1_007, 101];

/// Figures of one program at one period.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    mean_us: f64,
    /// CPU time per activation: user space only, and with the kernel.
    user_us: f64,
    cpu_us: f64,
    missed: f64,
    unseen: f64,
}

/// Samples of both programs, by period.
type Round = [[Sample; 2]; PERIODS_US.len()];

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if machine::is_skipped(&[("cyclictest", "no cyclictest to compare with")]) {
        return Ok(true);
    }
    let program = whylate::build("bench-timerlat")?;
    let (mut rounds, mut costs): (Vec<Round>, _) = (Vec::new(), [const { Vec::new() }; PERIODS_US.len()]);
    let mut halted = Vec::new();
    for number in 1..=arguments.rounds {
        eprintln!("round {number} of {}", arguments.rounds);
        let mut round = Round::default();
        for (index, period_us) in PERIODS_US.into_iter().enumerate() {
            // They take turns at being first.
            for turn in 0..2 {
                let which = (turn + number as usize) % 2;
                round[index][which] = if which == 0 { ours(&program, period_us)? } else { cyclictest(period_us)? };
            }
        }
        rounds.push(round);
        for (costs, period_us) in costs.iter_mut().zip(PERIODS_US) {
            costs.push(bpf(&program, period_us, &["--dma-latency", "0"])?);
        }
        halted.push(bpf(&program, PERIODS_US[0], &[])?);
    }
    let bpf = costs.map(|costs| Bpf::median(&costs));
    let halted = Bpf::median(&halted);
    let checks = checks(&rounds, &bpf, &halted);
    arguments.publish("timerlat", &markdown(&rounds, &checks, &bpf, &halted))?;
    Ok(checks.iter().all(Check::is_within))
}

fn ours(program: &Path, period_us: u64) -> Result<Sample> {
    let words = |seconds| format!("timerlat hist --json --dma-latency 0 -p {period_us} -d {seconds}");
    let run = |seconds: u64| -> Result<(Snapshot, Duration)> {
        let (out, cpu) = measured(Command::new(program).args(words(seconds).split(' ')))?;
        Ok((serde_json::from_str(&out).context("it printed no snapshot")?, cpu))
    };
    let ((_, short), (snapshot, long)) = (run(SHORT_S)?, run(LONG_S)?);
    let user = snapshot.total("user");
    let activations = user.count() as f64 * (LONG_S - SHORT_S) as f64 / LONG_S as f64;
    Ok(Sample {
        mean_us: user.mean_ns() as f64 / 1e3,
        user_us: user_us(|seconds| {
            let (ns, out) = user_time::measure(program, &words(seconds))?;
            let json = out.lines().find(|line| line.starts_with('{')).context("it printed no snapshot")?;
            Ok((ns, serde_json::from_str::<Snapshot>(json)?.total("user").count() as f64))
        })?,
        cpu_us: (long.as_secs_f64() - short.as_secs_f64()) * 1e6 / activations,
        missed: snapshot.series.iter().map(|series| series.values["missed"]).sum(),
        unseen: snapshot.lost["unseen"] as f64,
    })
}

fn cyclictest(period_us: u64) -> Result<Sample> {
    let directory = tempfile::tempdir()?;
    let json = directory.path().join("cyclictest.json");
    let words = |seconds| format!("-m -S -p95 -d0 -q -i{period_us} -D{seconds} --json={}", json.display());
    let read =
        || -> Result<Value> { serde_json::from_str(&fs::read_to_string(&json)?).context("cyclictest wrote no JSON") };
    let run = |seconds: u64| -> Result<(Value, Duration)> {
        let (_, cpu) = measured(Command::new("cyclictest").args(words(seconds).split(' ')))?;
        Ok((read()?, cpu))
    };
    let ((_, short), (report, long)) = (run(SHORT_S)?, run(LONG_S)?);
    let threads = report["thread"].as_object().context("cyclictest reports no thread")?;
    let (mut cycles, mut sum_us) = (0.0, 0.0);
    for thread in threads.values() {
        let count = thread["cycles"].as_f64().context("cyclictest tells no cycles")?;
        cycles += count;
        sum_us += count * thread["avg"].as_f64().context("cyclictest tells no average")?;
    }
    ensure!(cycles > 0.0, "cyclictest measured nothing");
    let activations = cycles * (LONG_S - SHORT_S) as f64 / LONG_S as f64;
    Ok(Sample {
        mean_us: sum_us / cycles,
        user_us: user_us(|seconds| {
            let (ns, _) = user_time::measure(Path::new("/usr/bin/cyclictest"), &words(seconds))?;
            let report = read()?;
            let threads = report["thread"].as_object().context("cyclictest reports no thread")?;
            Ok((ns, threads.values().filter_map(|thread| thread["cycles"].as_f64()).sum()))
        })?,
        cpu_us: (long.as_secs_f64() - short.as_secs_f64()) * 1e6 / activations,
        ..Sample::default()
    })
}

/// Returns the user time per activation, from a short run and a long one. In runs of their own, as measuring it slows
/// both programs down.
fn user_us(run: impl Fn(u64) -> Result<(u64, f64)>) -> Result<f64> {
    let ((short_ns, short), (long_ns, long)) = (run(SHORT_S)?, run(LONG_S)?);
    ensure!(long > short, "the longer run has no more activations");
    Ok((long_ns as f64 - short_ns as f64) / 1e3 / (long - short))
}

/// Returns the output, and the CPU time of the process and its threads.
fn measured(command: &mut Command) -> Result<(String, Duration)> {
    let before = kernel::usage_of_children()?.cpu;
    let output = kernel::die_with_parent(command.stdin(Stdio::null()).stderr(Stdio::inherit())).output()?;
    let cpu = kernel::usage_of_children()?.cpu - before;
    if !output.status.success() {
        bail!("{command:?} failed, {}", output.status);
    }
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), cpu))
}

/// BPF run time per activation.
#[derive(Clone, Copy, Debug)]
struct Bpf {
    ns: f64,
    runs: f64,
    /// Run time of an empty program by the same count: the kernel's own clock readings.
    floor_ns: f64,
}

impl Bpf {
    fn median(values: &[Bpf]) -> Bpf {
        let floor_ns = median_of(values, |bpf| bpf.floor_ns);
        Bpf { ns: median_of(values, |bpf| bpf.ns), runs: median_of(values, |bpf| bpf.runs), floor_ns }
    }

    fn without_clock_reads_ns(&self) -> f64 {
        self.ns - self.runs * self.floor_ns
    }
}

/// Measures BPF run time on an idle machine: other switches and timers are included.
fn bpf(program: &Path, period_us: u64, more: &[&str]) -> Result<Bpf> {
    let _counting = kernel::count_run_times()?;
    let _floor = floor::attach_to_switches()?;
    let before = programs::of_process(std::process::id())?;
    let period = period_us.to_string();
    let (out, _) =
        measured(Command::new(program).args(["timerlat", "hist", "--json", "-d", "5", "-p", &period]).args(more))?;
    let empty = programs::difference(&before, &programs::of_process(std::process::id())?);
    let floor_ns = empty.iter().map(programs::Counts::mean_ns).fold(0.0, f64::max);
    let snapshot: Snapshot = serde_json::from_str(&out)?;
    let activations = snapshot.total("user").count().max(1) as f64;
    let (ns, runs) = (snapshot.probe.run_ns as f64 / activations, snapshot.probe.runs as f64 / activations);
    Ok(Bpf { ns, runs, floor_ns })
}

fn checks(rounds: &[Round], bpf: &[Bpf; 2], halted: &Bpf) -> Vec<Check> {
    let of = |period: usize, which: usize, figure: fn(&Sample) -> f64| {
        median_of(rounds, |round| figure(&round[period][which]))
    };
    let apart = (of(0, 0, |sample| sample.mean_us) / of(0, 1, |sample| sample.mean_us) - 1.0).abs() * 100.0;
    let mut checks = vec![Check::new("mean latency beside cyclictest's, apart in %", apart, "", MEAN_LIMIT)];
    for (period, period_us) in PERIODS_US.into_iter().enumerate() {
        let name = format!("user space an activation, every {period_us} us (us; the limit is cyclictest's)");
        let [ours, theirs] = [0, 1].map(|which| of(period, which, |sample| sample.user_us));
        checks.push(Check::new(name, ours, "", theirs));
    }
    for (bpf, period_us) in bpf.iter().zip(PERIODS_US) {
        let name = format!("BPF an activation, every {period_us} us, without the clock reads of the count (ns)");
        checks.push(Check::new(name, bpf.without_clock_reads_ns(), "", BPF_LIMIT_NS));
    }
    let name = format!("the same every {} us, with CPUs that halt when they are idle (ns)", PERIODS_US[0]);
    checks.push(Check::new(name, halted.without_clock_reads_ns(), "", BPF_LIMIT_NS));
    checks
}

fn markdown(rounds: &[Round], checks: &[Check], bpf: &[Bpf; 2], halted: &Bpf) -> String {
    let command = format!("timerlat --rounds {}", rounds.len());
    let mut text = results::heading("Timer latency", "bench-timerlat", &command) + &figures::table(checks, [2, 2]);
    let halted =
        (halted, (PERIODS_US[0], ", with CPUs that halt when they are idle and find nothing in a cache afterwards"));
    for (cost, (period_us, how)) in bpf.iter().zip(PERIODS_US.map(|period_us| (period_us, ""))).chain([halted]) {
        let Bpf { ns, runs, floor_ns } = cost;
        let without_ns = cost.without_clock_reads_ns();
        text += &format!(
            "\nBPF every {period_us} us{how}: {ns:.0} ns in {runs:.2} runs an activation by the kernel's count; an empty program takes \
             {floor_ns:.0} ns by it; without it {without_ns:.0} ns.\n"
        );
    }
    text += &format!(
        "\nBoth run for {SHORT_S} s and for {LONG_S} s, in turn, with a FIFO:95 thread on each CPU and `/dev/cpu_dma_latency` at 0; what an \
         activation costs is the difference. User space is from each return to it to the next system call, by bpftrace, in runs of their own. \
         The latency is that of the return to user space, which is what cyclictest measures. \
         Medians of all rounds.\n\n\
         | program | period (us) | mean latency (us) | user space (us) | all CPU time (us) | missed periods | unseen |\n\
         |---|--:|--:|--:|--:|--:|--:|\n"
    );
    for (period, period_us) in PERIODS_US.into_iter().enumerate() {
        for (which, name) in ["`whylate timerlat`", "`cyclictest`"].into_iter().enumerate() {
            let of = |figure: fn(&Sample) -> f64| median_of(rounds, |round| figure(&round[period][which]));
            let own = |figure: fn(&Sample) -> f64| {
                if which == 0 { format!("{:.0}", of(figure)) } else { "not told".to_owned() }
            };
            text += &format!(
                "| {name} | {period_us} | {:.2} | {:.2} | {:.2} | {} | {} |\n",
                of(|sample| sample.mean_us),
                of(|sample| sample.user_us),
                of(|sample| sample.cpu_us),
                own(|sample| sample.missed),
                own(|sample| sample.unseen),
            );
        }
    }
    text
}
