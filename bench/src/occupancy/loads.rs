// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loads that run while a subject watches.

use std::env;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::kernel;

/// CPU of the loads of one CPU, and CPU of the tools' user space.
pub const LOAD_CPU: usize = 1;
pub const TOOLS_CPU: usize = 0;

/// The index of the paced load among those that are measured.
pub const PACED: usize = 1;

/// Rate of the paced load without a watcher.
const SWITCHES_PER_SECOND: f64 = 100_000.0;
/// Turns of each of the two threads of the paced load; fewer to calibrate a turn.
const PACED_ROUNDS: u64 = 5_000;
/// Runs of the paced load per sample.
const PACED_RUNS: usize = 10;
const TRIAL_ROUNDS: u64 = 5_000;
const TRIALS: usize = 10;

const PIPE_LOOPS: &str = "300000";
/// The pipe load of which the fastest run counts: a third as long, and several runs.
const SHORT_PIPE_LOOPS: &str = "100000";
const SHORT_PIPE_RUNS: usize = 6;
const MESSAGING: [&str; 4] = ["-g", "5", "-l", "300"];

/// A program that runs for about a second and prints how many seconds its switches took.
pub struct Load {
    pub name: String,
    pub what: &'static str,
    /// Whether it runs on `LOAD_CPU` only.
    pub is_pinned: bool,
    command: Vec<String>,
    /// Runs per sample.
    pub runs: usize,
    /// It does not print its time, so it is timed here.
    is_silent: bool,
}

/// Figures of a load for one sample.
#[derive(Clone, Debug)]
pub struct Run {
    /// Seconds of each run.
    pub elapsed_s: Vec<f64>,
    /// CPU time of all runs together, without the time of other tasks.
    pub cpu_s: f64,
    /// Context switches of all runs together.
    pub switches: u64,
}

impl Run {
    pub fn mean_s(&self) -> f64 {
        self.elapsed_s.iter().sum::<f64>() / self.elapsed_s.len().max(1) as f64
    }

    /// Other tasks on the machine only make a run longer.
    pub fn fastest_s(&self) -> f64 {
        self.elapsed_s.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub fn switches_per_second(&self) -> f64 {
        self.switches as f64 / self.elapsed_s.iter().sum::<f64>()
    }
}

impl Load {
    pub fn pipe() -> Self {
        Self::pipe_of(PIPE_LOOPS)
    }

    /// Several short runs in a row.
    pub fn short_pipes() -> Self {
        Self { runs: SHORT_PIPE_RUNS, ..Self::pipe_of(SHORT_PIPE_LOOPS) }
    }

    fn pipe_of(loops: &str) -> Self {
        let cpu = LOAD_CPU.to_string();
        let what = "two processes of one CPU that do nothing but wake each other";
        Self::new(&["taskset", "-c", &cpu, "perf", "bench", "-f", "simple", "sched", "pipe", "-l", loops], what)
    }

    pub fn messaging() -> Self {
        let mut load = Self::new(&["perf", "bench", "-f", "simple", "sched", "messaging"], "200 processes on all CPUs");
        load.command.extend(MESSAGING.map(str::to_owned));
        Self { name: load.command.join(" "), is_pinned: false, ..load }
    }

    /// With work that fills the time that 100,000 switches a second leave.
    pub fn paced() -> Result<Self> {
        Ok(Self { runs: PACED_RUNS, ..Self::turns(PACED_ROUNDS, paced_steps()?)? })
    }

    /// Returns a paced load of about this length as a shell command. It pauses each second: on some kernels no worker
    /// of that CPU runs beside two threads that never rest.
    pub fn paced_for(time: Duration) -> Result<[String; 3]> {
        let load = Self::turns((SWITCHES_PER_SECOND / 2.0) as u64, paced_steps()?)?;
        let words: Vec<String> = load.command.iter().map(|word| format!("'{word}'")).collect();
        let script =
            format!("for second in $(seq {}); do {} || exit 1; sleep 0.01; done", time.as_secs(), words.join(" "));
        Ok(["sh".to_owned(), "-c".to_owned(), script])
    }

    fn turns(rounds: u64, steps: u64) -> Result<Self> {
        let ours = env::current_exe().context("the path of this program is unknown")?;
        let options = format!("paced --cpu {LOAD_CPU} --rounds {rounds} --steps {steps}");
        let mut command = vec![ours.to_string_lossy().into_owned()];
        command.extend(options.split(' ').map(str::to_owned));
        let what = "two threads of one CPU, with as much work in between as makes 100,000 switches a second";
        Ok(Self { name: format!("whylate-bench {options}"), what, is_pinned: true, command, runs: 1, is_silent: false })
    }

    /// Reads blocks of a file in `directory` at random, each many times, from the page cache.
    pub fn fio(directory: &std::path::Path) -> Self {
        let file = format!("--filename={}", directory.join("data").display());
        let options = [
            "--name=read",
            "--rw=randread",
            "--bs=4k",
            "--size=64m",
            "--loops=40",
            "--invalidate=0",
            "--ioengine=psync",
            "--output=/dev/null",
            &file,
        ];
        let mut load = Self::new(&[&["fio"], &options[..]].concat(), "random reads of 4 KiB that the page cache has");
        load.name = load.command[..load.command.len() - 2].join(" ");
        Self { is_silent: true, is_pinned: false, ..load }
    }

    fn new(command: &[&str], what: &'static str) -> Self {
        let command: Vec<String> = command.iter().copied().map(str::to_owned).collect();
        Self { name: command.join(" "), what, is_pinned: true, command, runs: 1, is_silent: false }
    }

    pub fn run(&self) -> Result<Run> {
        let before = kernel::usage_of_children()?;
        let elapsed_s = (0..self.runs).map(|_| self.run_once()).collect::<Result<Vec<_>>>()?;
        let after = kernel::usage_of_children()?;
        Ok(Run { elapsed_s, cpu_s: (after.cpu - before.cpu).as_secs_f64(), switches: after.switches - before.switches })
    }

    /// Runs it once, and returns the seconds.
    fn run_once(&self) -> Result<f64> {
        let (program, arguments) = self.command.split_first().context("a load without a command")?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stderr(Stdio::inherit());
        let began = Instant::now();
        let output = kernel::die_with_parent(&mut command).output().with_context(|| format!("cannot run {program}"))?;
        if self.is_silent && output.status.success() {
            return Ok(began.elapsed().as_secs_f64());
        }
        let seconds = String::from_utf8_lossy(&output.stdout).trim().parse();
        match seconds {
            Ok(elapsed_s) if output.status.success() => Ok(elapsed_s),
            _ => bail!("`{}` failed, {}", self.name, output.status),
        }
    }
}

/// Calibrates the work between two switches of the paced load.
fn paced_steps() -> Result<u64> {
    let [few, many] = [1_000, 10_000];
    let (few_s, many_s) = (turn_s(few)?, turn_s(many)?);
    let step_s = (many_s - few_s) / (many - few) as f64;
    let steps = few as f64 + (1.0 / SWITCHES_PER_SECOND - few_s) / step_s;
    if !steps.is_finite() || steps < 1.0 {
        bail!("this CPU does not switch 100,000 times a second");
    }
    Ok(steps as u64)
}

/// Returns how long one turn takes, with its switch: the minimum of several, as the work is constant.
fn turn_s(steps: u64) -> Result<f64> {
    let trial = Load::turns(TRIAL_ROUNDS, steps)?;
    let mut shortest_s = f64::INFINITY;
    for _ in 0..TRIALS {
        shortest_s = shortest_s.min(trial.run_once()?);
    }
    Ok(shortest_s / (2 * TRIAL_ROUNDS) as f64)
}
