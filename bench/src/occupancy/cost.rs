// SPDX-License-Identifier: MIT OR Apache-2.0
//! The run time of BPF programs per event, as the kernel counts it.

use anyhow::{Context, Result, bail};

use super::loads::Load;
use super::subjects::{Subject, Tools};
use crate::kernel;
use crate::programs::{self, Counts};

/// One run of a load.
#[derive(Clone, Debug)]
pub struct Sample {
    pub programs: Vec<Counts>,
    pub switches: u64,
}

impl Sample {
    /// Returns the run time of all programs per context switch.
    pub fn ns_per_switch(&self) -> f64 {
        self.programs.iter().map(|program| program.run_ns as f64).sum::<f64>() / self.switches.max(1) as f64
    }

    /// Returns the mean run time of the program at a context switch; 0 without one.
    pub fn at_switch_ns(&self) -> f64 {
        self.programs.iter().find(|program| is_at_switch(&program.name)).map_or(0.0, Counts::mean_ns)
    }
}

/// Matches `on_sched_switch`, runqlat's `sched_switch` and the floor's `on_switch`.
fn is_at_switch(name: &str) -> bool {
    name.ends_with("_switch")
}

/// Samples by load and subject.
pub type Round = Vec<Vec<Sample>>;

/// Measures all rounds; the kernel counts run times only during them.
pub fn measure(tools: &Tools, loads: &[Load], rounds: u32) -> Result<Vec<Round>> {
    let _counting = kernel::count_run_times()?;
    let mut counted = Vec::new();
    for round in 1..=rounds as usize {
        eprintln!("cost of an event: round {round} of {rounds}");
        let samples = loads.iter().map(|load| under_load(tools, load, round)).collect::<Result<_>>()?;
        counted.push(samples);
    }
    Ok(counted)
}

fn under_load(tools: &Tools, load: &Load, round: usize) -> Result<Vec<Sample>> {
    let subjects = Subject::WITH_PROGRAMS;
    let mut samples = vec![None; subjects.len()];
    for turn in 0..subjects.len() {
        let which = (round + turn) % subjects.len();
        let sample = sample(tools, load, subjects[which]);
        samples[which] = Some(sample.with_context(|| format!("cannot measure {}", subjects[which].name()))?);
    }
    Ok(samples.into_iter().flatten().collect())
}

fn sample(tools: &Tools, load: &Load, subject: Subject) -> Result<Sample> {
    let running = subject.start(tools, load.is_pinned)?;
    let before = running.programs()?;
    let run = load.run()?;
    let programs = programs::difference(&before, &running.programs()?);
    subject.end(tools, running, run.switches)?;
    match programs.iter().find(|program| is_at_switch(&program.name)) {
        // The kernel skips a program that would run inside itself.
        Some(program) if program.runs + program.missed >= run.switches => {
            Ok(Sample { programs, switches: run.switches })
        }
        Some(program) => bail!("its program {} ran {} times for {} switches", program.name, program.runs, run.switches),
        None => bail!("none of these is its program at a context switch: {programs:?}"),
    }
}
