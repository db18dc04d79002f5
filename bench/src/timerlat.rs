// SPDX-License-Identifier: MIT OR Apache-2.0
//! How late threads are by `whylate timerlat` and by cyclictest, and what an activation costs with each.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::geteuid;
use serde_json::Value;
use whylate_model::Snapshot;

use crate::figures::{median, word};
use crate::{floor, kernel, machine, programs, results, user_time, whylate};

/// Of the mean latency, in percent of cyclictest's.
const MEAN_LIMIT: f64 = 20.0;
/// Of the BPF programs, for each activation.
const BPF_LIMIT_NS: f64 = 300.0;
/// Starting costs the same however long a run is, so the difference of two tells what an activation costs.
const SHORT_S: u64 = 2;
const LONG_S: u64 = 7;
/// Some 1 kHz and 10 kHz. No multiple is a tick's length, so that ticks come in at any part of an activation.
const PERIODS_US: [u64; 2] = [1_007, 101];

/// What one program tells and costs at one period.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    mean_us: f64,
    /// User space alone, and with the kernel.
    user_us: f64,
    cpu_us: f64,
    missed: f64,
    unseen: f64,
}

/// Of both programs, by period.
type Round = [[Sample; 2]; PERIODS_US.len()];

/// Returns whether every figure is within its limit.
pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if !geteuid().is_root() {
        println!("skipped: needs root");
        return Ok(true);
    }
    if Command::new("cyclictest").arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("skipped: no cyclictest to compare with");
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
    let text = markdown(&rounds, &bpf, &Bpf::median(&halted));
    arguments.publish("timerlat", &text)?;
    Ok(figures(&rounds, &bpf, &Bpf::median(&halted)).iter().all(|(_, value, limit)| value <= limit))
}

fn ours(program: &Path, period_us: u64) -> Result<Sample> {
    let period = period_us.to_string();
    let run = |seconds: u64| -> Result<(Snapshot, kernel::Usage)> {
        let mut command = Command::new(program);
        let duration = seconds.to_string();
        command.args(["timerlat", "hist", "--json", "--dma-latency", "0", "-p", &period, "-d", &duration]);
        let (out, usage) = measured(&mut command)?;
        Ok((serde_json::from_str(&out).context("it printed no snapshot")?, usage))
    };
    let ((_, short), (snapshot, long)) = (run(SHORT_S)?, run(LONG_S)?);
    let user = snapshot.total("user");
    let activations = user.count() as f64 * (LONG_S - SHORT_S) as f64 / LONG_S as f64;
    Ok(Sample {
        mean_us: user.mean_ns() as f64 / 1e3,
        user_us: user_us(|seconds| {
            let duration = seconds.to_string();
            let words = ["timerlat", "hist", "--json", "--dma-latency", "0", "-p", &period, "-d", &duration];
            let (ns, out) = user_time::of(program, &words)?;
            let json = out.lines().find(|line| line.starts_with('{')).context("it printed no snapshot")?;
            Ok((ns, serde_json::from_str::<Snapshot>(json)?.total("user").count() as f64))
        })?,
        cpu_us: (long.cpu.as_secs_f64() - short.cpu.as_secs_f64()) * 1e6 / activations,
        missed: snapshot.series.iter().map(|series| series.values["missed"]).sum(),
        unseen: snapshot.lost["unseen"] as f64,
    })
}

fn cyclictest(period_us: u64) -> Result<Sample> {
    let folder = tempfile::tempdir()?;
    let json = folder.path().join("cyclictest.json");
    let run = |seconds: u64| -> Result<(Value, kernel::Usage)> {
        let mut command = Command::new("cyclictest");
        let (interval, duration) = (format!("-i{period_us}"), format!("-D{seconds}"));
        command.args(["-m", "-S", "-p95", "-d0", "-q", &interval, &duration]).arg(option("--json=", &json));
        let (_, usage) = measured(&mut command)?;
        Ok((serde_json::from_str(&fs::read_to_string(&json)?).context("cyclictest wrote no JSON")?, usage))
    };
    let ((_, short), (told, long)) = (run(SHORT_S)?, run(LONG_S)?);
    let threads = told["thread"].as_object().context("cyclictest tells of no thread")?;
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
            let [interval, duration] = [format!("-i{period_us}"), format!("-D{seconds}")];
            let told = option("--json=", &json).display().to_string();
            let words = ["-m", "-S", "-p95", "-d0", "-q", &interval, &duration, &told];
            let (ns, _) = user_time::of(Path::new("/usr/bin/cyclictest"), &words)?;
            let told: Value = serde_json::from_str(&fs::read_to_string(&json)?)?;
            let threads = told["thread"].as_object().context("cyclictest tells of no thread")?;
            Ok((ns, threads.values().filter_map(|thread| thread["cycles"].as_f64()).sum()))
        })?,
        cpu_us: (long.cpu.as_secs_f64() - short.cpu.as_secs_f64()) * 1e6 / activations,
        ..Sample::default()
    })
}

/// Of an activation, by a short run and a long one, apart from the others: measuring it slows both programs down.
fn user_us(run: impl Fn(u64) -> Result<(u64, f64)>) -> Result<f64> {
    let ((short_ns, short), (long_ns, long)) = (run(SHORT_S)?, run(LONG_S)?);
    ensure!(long > short, "the longer run has no more activations");
    Ok((long_ns as f64 - short_ns as f64) / 1e3 / (long - short))
}

fn option(name: &str, path: &Path) -> PathBuf {
    PathBuf::from(format!("{name}{}", path.display()))
}

/// What it prints, and what it and its threads had of all CPUs.
fn measured(command: &mut Command) -> Result<(String, kernel::Usage)> {
    let before = kernel::usage_of_children()?;
    let output = kernel::die_with_parent(command.stdin(Stdio::null()).stderr(Stdio::inherit())).output()?;
    let after = kernel::usage_of_children()?;
    if !output.status.success() {
        bail!("{command:?} failed, {}", output.status);
    }
    let usage = kernel::Usage {
        cpu: after.cpu - before.cpu,
        user: after.user - before.user,
        switches: after.switches - before.switches,
    };
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), usage))
}

/// What BPF programs take for an activation.
#[derive(Clone, Copy, Debug)]
struct Bpf {
    ns: f64,
    runs: f64,
    /// What an empty program takes by the same count: the kernel's own clock reads.
    floor_ns: f64,
}

impl Bpf {
    fn median(of: &[Bpf]) -> Bpf {
        let middle = |figure: fn(&Bpf) -> f64| median(&of.iter().map(figure).collect::<Vec<_>>());
        Bpf { ns: middle(|bpf| bpf.ns), runs: middle(|bpf| bpf.runs), floor_ns: middle(|bpf| bpf.floor_ns) }
    }

    fn without_clock_reads_ns(&self) -> f64 {
        self.ns - self.runs * self.floor_ns
    }
}

/// On an idle machine: other switches and timers are in it too.
fn bpf(program: &Path, period_us: u64, more: &[&str]) -> Result<Bpf> {
    let _counting = kernel::count_run_times().context("the kernel does not count run times")?;
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

fn figures(rounds: &[Round], bpf: &[Bpf; 2], halted: &Bpf) -> Vec<(String, f64, f64)> {
    let of = |period: usize, which: usize, figure: fn(&Sample) -> f64| {
        median(&rounds.iter().map(|round| figure(&round[period][which])).collect::<Vec<_>>())
    };
    let mut figures = Vec::new();
    let apart = (of(0, 0, |sample| sample.mean_us) / of(0, 1, |sample| sample.mean_us) - 1.0).abs() * 100.0;
    figures.push(("mean latency beside cyclictest's, apart in %".to_owned(), apart, MEAN_LIMIT));
    for (period, period_us) in PERIODS_US.into_iter().enumerate() {
        let name = format!("user space an activation, every {period_us} us (us; the limit is cyclictest's)");
        figures.push((name, of(period, 0, |sample| sample.user_us), of(period, 1, |sample| sample.user_us)));
    }
    for (bpf, period_us) in bpf.iter().zip(PERIODS_US) {
        let name = format!("BPF an activation, every {period_us} us, without the clock reads of the count (ns)");
        figures.push((name, bpf.without_clock_reads_ns(), BPF_LIMIT_NS));
    }
    let name = format!("the same every {} us, with CPUs that halt when they are idle (ns)", PERIODS_US[0]);
    figures.push((name, halted.without_clock_reads_ns(), BPF_LIMIT_NS));
    figures
}

fn markdown(rounds: &[Round], bpf: &[Bpf; 2], halted: &Bpf) -> String {
    let mut text = format!(
        "## Timer latency\n\nCommand: `make bench-timerlat` (`cargo run --release -p whylate-bench -- timerlat --rounds {}`)\n\n{}\n\
         | figure | measured | limit | result |\n|---|--:|--:|---|\n",
        rounds.len(),
        machine::describe()
    );
    for (name, value, limit) in figures(rounds, bpf, halted) {
        // A `String` takes everything.
        let _ = writeln!(text, "| {name} | {value:.2} | {limit:.2} | {} |", word(value, limit));
    }
    let halted =
        (halted, (PERIODS_US[0], ", with CPUs that halt when they are idle and find nothing in a cache afterwards"));
    for (cost, (period_us, how)) in bpf.iter().zip(PERIODS_US.map(|period_us| (period_us, ""))).chain([halted]) {
        let Bpf { ns, runs, floor_ns } = cost;
        let without_ns = cost.without_clock_reads_ns();
        let _ = write!(
            text,
            "\nBPF every {period_us} us{how}: {ns:.0} ns in {runs:.2} runs an activation by the kernel's count; an empty program takes \
             {floor_ns:.0} ns by it; without it {without_ns:.0} ns.\n"
        );
    }
    let _ = write!(
        text,
        "\nBoth run for {SHORT_S} s and for {LONG_S} s, in turn, with a FIFO:95 thread on each CPU and `/dev/cpu_dma_latency` at 0; what an \
         activation costs is the difference. User space is from each return to it to the next system call, by bpftrace, in runs of their own. \
         The latency is that of the return to user space, which is what cyclictest measures. \
         Medians of all rounds.\n\n\
         | program | period (us) | mean latency (us) | user space (us) | all CPU time (us) | missed periods | unseen |\n\
         |---|--:|--:|--:|--:|--:|--:|\n"
    );
    for (period, period_us) in PERIODS_US.into_iter().enumerate() {
        for (which, name) in ["`whylate timerlat`", "`cyclictest`"].into_iter().enumerate() {
            let of = |figure: fn(&Sample) -> f64| {
                median(&rounds.iter().map(|round| figure(&round[period][which])).collect::<Vec<_>>())
            };
            let own = |figure: fn(&Sample) -> f64| {
                if which == 0 { format!("{:.0}", of(figure)) } else { "not told".to_owned() }
            };
            let _ = writeln!(
                text,
                "| {name} | {period_us} | {:.2} | {:.2} | {:.2} | {} | {} |",
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
