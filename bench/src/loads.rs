// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loads that run while a subject watches.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::{child, kernel, machine, table, workloads};

/// CPU of the loads of one CPU, and CPU of the tools' user space.
pub const LOAD_CPU: usize = 1;
pub const TOOLS_CPU: usize = 0;

/// Rate of the paced load without a watcher, turns of each of its two threads, and runs per sample.
pub const SWITCHES_PER_SECOND: f64 = 100_000.0;
const PACED_ROUNDS: u64 = 5_000;
pub const PACED_RUNS: usize = 10;
/// How long a thread spins at a time.
pub const SPIN: Duration = Duration::from_millis(100);
/// Gaps between two clock readings, each of which takes far less: from the first on an interrupt or another
/// disturbance, from the second on another task.
const MIN_GAP: Duration = Duration::from_nanos(500);
pub const OTHER_TASK: Duration = Duration::from_micros(200);

/// A program that runs for about a second and prints how many seconds its switches took.
#[derive(Clone)]
pub struct Load {
    pub name: String,
    pub what: &'static str,
    pub is_pinned: bool,
    pub command: Vec<String>,
    pub runs: usize,
    /// It does not print its time, so it is timed here.
    pub is_silent: bool,
    /// A thread spins on this CPU after each run, and counts the time that it loses.
    pub spins_on: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct Run {
    pub elapsed_s: Vec<f64>,
    /// CPU time of all runs together, without the time of other tasks.
    pub cpu_s: f64,
    /// Context switches of all runs together.
    pub switches: u64,
    /// Mean share of its time that a spinning thread lost to interrupts; NaN if no thread spins.
    pub lost_percent: f64,
}

impl Run {
    pub fn mean_s(&self) -> f64 {
        self.elapsed_s.iter().sum::<f64>() / self.elapsed_s.len().max(1) as f64
    }

    pub fn switches_per_second(&self) -> f64 {
        self.switches as f64 / self.elapsed_s.iter().sum::<f64>()
    }
}

impl Load {
    pub fn pipe() -> Self {
        Self::pipe_on(LOAD_CPU, "300000")
    }

    /// The pipe load of which the fastest run counts: a third as long, and several runs.
    pub fn short_pipes() -> Self {
        Self { runs: 6, ..Self::pipe_on(LOAD_CPU, "100000") }
    }

    /// A third of a second, so that the load of other machines on the host changes little during it; then a thread
    /// spins on that CPU.
    pub fn pipe_and_spin(cpu: usize) -> Self {
        Self { spins_on: Some(cpu), ..Self::pipe_on(cpu, "30000") }
    }

    fn pipe_on(cpu: usize, loops: &str) -> Self {
        let what = "two processes of one CPU that do nothing but wake each other";
        Self::new(&format!("taskset -c {cpu} perf bench -f simple sched pipe -l {loops}"), what)
    }

    pub fn messaging() -> Self {
        let load = Self::new("perf bench -f simple sched messaging -g 5 -l 300", "200 processes on all CPUs");
        Self { is_pinned: false, ..load }
    }

    /// With work that fills the time that 100,000 switches a second leave.
    pub fn paced() -> Result<Self> {
        Ok(Self { runs: PACED_RUNS, ..Self::turns(PACED_ROUNDS, paced_steps()?)? })
    }

    /// Returns a paced load of about this length as a shell script. It pauses each second: on some kernels no worker
    /// of that CPU runs beside two threads that never rest.
    pub fn paced_for(time: Duration) -> Result<String> {
        let load = Self::turns((SWITCHES_PER_SECOND / 2.0) as u64, paced_steps()?)?;
        let words: Vec<String> = load.command.iter().map(|word| format!("'{word}'")).collect();
        Ok(format!("for second in $(seq {}); do {} || exit 1; sleep 0.01; done", time.as_secs(), words.join(" ")))
    }

    fn turns(rounds: u64, steps: u64) -> Result<Self> {
        let options = format!("paced --cpu {LOAD_CPU} --rounds {rounds} --steps {steps}");
        let what = "two threads of one CPU, with as much work in between as makes 100,000 switches a second";
        Ok(Self { command: workloads::command(&options)?, ..Self::new(&format!("whylate-bench {options}"), what) })
    }

    /// Reads blocks of a file in `directory` at random, each many times, from the page cache.
    pub fn fio(directory: &Path) -> Self {
        let name = "fio --name=read --rw=randread --bs=4k --size=64m --loops=40 --invalidate=0 --ioengine=psync";
        let mut load = Self::new(name, "random reads of 4 KiB that the page cache has");
        load.command.push("--output=/dev/null".to_owned());
        load.command.push(format!("--filename={}", directory.join("data").display()));
        Self { is_silent: true, is_pinned: false, ..load }
    }

    fn new(name: &str, what: &'static str) -> Self {
        let command = name.split(' ').map(str::to_owned).collect();
        Self { name: name.to_owned(), what, is_pinned: true, command, runs: 1, is_silent: false, spins_on: None }
    }

    pub fn run(&self) -> Result<Run> {
        let before = kernel::usage_of_children()?;
        let (mut elapsed_s, mut lost) = (Vec::new(), Vec::new());
        for _ in 0..self.runs {
            elapsed_s.push(self.run_once()?);
            lost.push(self.spins_on.map_or(Ok(f64::NAN), lost_percent)?);
        }
        let after = kernel::usage_of_children()?;
        let lost_percent = lost.iter().sum::<f64>() / lost.len() as f64;
        let cpu_s = (after.cpu - before.cpu).as_secs_f64();
        Ok(Run { elapsed_s, cpu_s, switches: after.switches - before.switches, lost_percent })
    }

    fn run_once(&self) -> Result<f64> {
        let (program, arguments) = self.command.split_first().context("a load without a command")?;
        let began = Instant::now();
        let output = child::run(Command::new(program).args(arguments).stderr(Stdio::inherit()))?;
        if self.is_silent {
            return Ok(began.elapsed().as_secs_f64());
        }
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim().parse().with_context(|| format!("`{}` does not print its time: {text}", self.name))
    }
}

/// Returns the share of its time that a thread loses on this CPU, in percent.
fn lost_percent(cpu: usize) -> Result<f64> {
    let spinning = thread::spawn(move || {
        machine::pin_to(cpu)?;
        let (mut lost, mut away) = (Duration::ZERO, Duration::ZERO);
        let began = Instant::now();
        let mut last = began;
        while last - began < SPIN {
            let now = Instant::now();
            match now - last {
                gap if gap >= OTHER_TASK => away += gap,
                gap if gap >= MIN_GAP => lost += gap,
                _ => {}
            }
            last = now;
        }
        anyhow::Ok(100.0 * lost.as_secs_f64() / (last - began - away).as_secs_f64())
    });
    spinning.join().map_err(|_| anyhow!("the thread that spins failed"))?
}

/// Calibrates the work between two switches of the paced load.
fn paced_steps() -> Result<u64> {
    let [few, many] = [1_000, 10_000];
    let (few_s, many_s) = (turn_s(few)?, turn_s(many)?);
    let step_s = (many_s - few_s) / (many - few) as f64;
    let steps = few as f64 + (1.0 / SWITCHES_PER_SECOND - few_s) / step_s;
    ensure!(steps.is_finite() && steps >= 1.0, "this CPU does not switch 100,000 times a second");
    Ok(steps as u64)
}

/// Returns how long one turn takes, with its switch: the minimum of several, as the work is constant.
fn turn_s(steps: u64) -> Result<f64> {
    let trial = Load::turns(PACED_ROUNDS, steps)?;
    let trials_s = (0..10).map(|_| trial.run_once()).collect::<Result<Vec<_>>>()?;
    Ok(table::min(&trials_s) / (2 * PACED_ROUNDS) as f64)
}
