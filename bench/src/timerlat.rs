// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency of threads by `whylate timerlat` and by cyclictest, and the cost of an activation with each.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use whylate_model::Snapshot;

use crate::child;
use crate::drivers::{Rounds, count_beside_empty, in_rounds};
use crate::kernel;
use crate::results::{Arguments, Section};
use crate::subject::Subject;
use crate::table::{Figure, Show, column, median_of};

/// Limit of the difference of the mean latencies, in percent of cyclictest's.
const MEAN_LIMIT: f64 = 20.0;
/// Limit of the BPF run time per activation.
const BPF_LIMIT_NS: f64 = 300.0;
/// Startup costs the same in runs of any length, so the difference of two runs is the cost of activations.
const SHORT_S: u64 = 2;
const LONG_S: u64 = 7;
/// About 1 kHz and 10 kHz. No multiple equals a tick's period, so that ticks come in at any phase.
const PERIODS_US: [u64; 2] = [1_007, 101];
const SUBJECTS: [&str; 2] = ["`whylate timerlat`", "`cyclictest`"];
const OURS: usize = 0;

/// Sums the time from each return to user space to the next system call, less the time off the CPU. The kernel's own
/// count samples at ticks, and a tick that was due while interrupts were off comes in just when a thread returns.
const USER_TIME: &str = "
tracepoint:raw_syscalls:sys_exit /pid == cpid/ { @since[tid] = nsecs; }
tracepoint:raw_syscalls:sys_enter /@since[tid]/ { @user = sum(nsecs - @since[tid]); delete(@since[tid]); }
tracepoint:sched:sched_switch /@since[args->prev_pid]/ {
    @user = sum(nsecs - @since[args->prev_pid]);
    @away[args->prev_pid] = 1;
    delete(@since[args->prev_pid]);
}
tracepoint:sched:sched_switch /@away[args->next_pid]/ { @since[args->next_pid] = nsecs; delete(@away[args->next_pid]); }
END { clear(@since); clear(@away); }
";

/// What one run of a program reports.
#[derive(Clone, Copy, Debug)]
struct Report {
    activations: f64,
    mean_us: f64,
    /// NaN if the program does not report them.
    missed: f64,
    unseen: f64,
}

/// Figures of one program at one period.
#[derive(Clone, Copy, Debug)]
struct Sample {
    report: Report,
    /// CPU time per activation: user space only, and with the kernel.
    user_us: f64,
    cpu_us: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let tools = [("cyclictest", "no cyclictest to compare with")];
    let Some(program) = arguments.prepare("bench-timerlat", &tools)? else { return Ok(true) };
    let rounds = arguments.rounds;
    let by_period = PERIODS_US.map(|period_us| {
        in_rounds(&format!("every {period_us} us"), (rounds, false), &SUBJECTS, |which| match which {
            OURS => ours(&program, period_us),
            _ => cyclictest(period_us),
        })
    });
    let [slow, fast] = by_period;
    let by_period = [(PERIODS_US[0], slow?), (PERIODS_US[1], fast?)];
    let bpf = |period_us, more: &[&str]| -> Result<Bpf> {
        let costs = (0..rounds).map(|_| bpf(&program, period_us, more)).collect::<Result<Vec<_>>>()?;
        let [ns, runs, empty_ns] = [0, 1, 2].map(|index: usize| median_of(&costs, |cost| cost[index]));
        Ok(Bpf { period_us, ns, runs, empty_ns })
    };
    let [slow, fast] = PERIODS_US.map(|period_us| bpf(period_us, &["--dma-latency", "0"]));
    let (slow, fast, halted) = (slow?, fast?, bpf(PERIODS_US[0], &[])?);

    let [ours_us, theirs_us] = [0, 1].map(|which| by_period[0].1.median(which, |sample| sample.report.mean_us));
    let apart = (ours_us / theirs_us - 1.0).abs() * 100.0;
    let mut figures =
        vec![Figure::new("mean latency, difference from cyclictest's in %", apart, 2).at_most(MEAN_LIMIT)];
    for (period_us, measured) in &by_period {
        let name = format!("user space an activation, every {period_us} us (us; the limit is cyclictest's)");
        let [ours, theirs] = [0, 1].map(|which| measured.median(which, |sample| sample.user_us));
        figures.push(Figure::new(name, ours, 2).at_most(theirs));
    }
    let halting = ", with CPUs that halt when they are idle";
    for (bpf, how) in [(&slow, ""), (&fast, ""), (&halted, halting)] {
        let name =
            format!("BPF an activation, every {} us{how}, without the clock reads of the count (ns)", bpf.period_us);
        figures.push(Figure::new(name, bpf.without_clock_reads_ns(), 2).at_most(BPF_LIMIT_NS));
    }
    let columns = [
        column("mean latency (us)", Show::Median(2), "", |sample: &Sample| sample.report.mean_us),
        column("user space (us)", Show::Median(2), "", |sample| sample.user_us),
        column("all CPU time (us)", Show::Median(2), "", |sample| sample.cpu_us),
        column("missed periods", Show::Median(0), "", |sample| sample.report.missed),
        column("unseen", Show::Median(0), "", |sample| sample.report.unseen),
    ];
    let rows = by_period.iter().flat_map(|(period_us, measured): &(u64, Rounds<Sample>)| {
        measured.rows(SUBJECTS.map(|name| format!("{name} | {period_us}")))
    });
    let command = format!("timerlat --rounds {rounds}");
    Section::new(arguments, "timerlat", "Timer latency", "bench-timerlat", &command)
        .figures(figures)
        .text(&slow.text(""))
        .text(&fast.text(""))
        .text(&halted.text(&format!("{halting} and find nothing in a cache afterwards")))
        .text(&format!(
            "Both run for {SHORT_S} s and for {LONG_S} s, in turn, with a FIFO:95 thread on each CPU and `/dev/cpu_dma_latency` at 0; what an \
             activation costs is the difference. User space is from each return to it to the next system call, by bpftrace, in runs of their own. \
             The latency is that of the return to user space, which is what cyclictest measures. \
             Medians of all rounds."
        ))
        .grid("program | period (us)", &columns, rows)
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

/// Parses the only line of JSON of an output.
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
        let (output, cpu) = child::run_for_cpu(Command::new(program).args(words(&options)))?;
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

fn words(options: &str) -> impl Iterator<Item = &str> {
    options.split(' ')
}

/// BPF run time per activation.
#[derive(Clone, Copy, Debug)]
struct Bpf {
    period_us: u64,
    ns: f64,
    runs: f64,
    /// Run time of an empty program by the same count: the kernel's own clock readings.
    empty_ns: f64,
}

impl Bpf {
    fn without_clock_reads_ns(&self) -> f64 {
        self.ns - self.runs * self.empty_ns
    }

    fn text(&self, how: &str) -> String {
        let Bpf { period_us, ns, runs, empty_ns } = self;
        let without_ns = self.without_clock_reads_ns();
        format!(
            "BPF every {period_us} us{how}: {ns:.0} ns in {runs:.2} runs an activation by the kernel's count; an empty program takes \
             {empty_ns:.0} ns by it; without it {without_ns:.0} ns."
        )
    }
}

/// Measures BPF run time and runs per activation, and the run time of an empty program, on an idle machine: other
/// switches and timers are included.
fn bpf(program: &Path, period_us: u64, more: &[&str]) -> Result<[f64; 3]> {
    let _counting = kernel::count_run_times()?;
    let options = format!("timerlat hist --json -d 5 -p {period_us}");
    let mut command = Command::new(program);
    command.args(words(&options)).args(more);
    let (output, _, empty_ns) = count_beside_empty(&Subject::nothing().start(false)?, || child::run(&mut command))?;
    let snapshot = snapshot(&String::from_utf8_lossy(&output.stdout))?;
    let activations = snapshot.total("user").count().max(1) as f64;
    Ok([snapshot.probe.run_ns as f64 / activations, snapshot.probe.runs as f64 / activations, empty_ns])
}
