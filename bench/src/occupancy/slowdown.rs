// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much longer a load takes while it is watched.

use anyhow::{Context, Result, bail};

use super::loads::{Load, Run};
use super::subjects::{Subject, Tools};
use crate::child::Running;

/// A watched run, and the unwatched runs right before and right after it.
#[derive(Clone, Debug)]
pub struct Sample {
    pub before: Run,
    pub watched: Run,
    pub after: Run,
}

impl Sample {
    /// Returns how much longer the watched run took, as a fraction of the unwatched time.
    pub fn slowdown(&self) -> f64 {
        2.0 * self.watched.mean_s() / (self.before.mean_s() + self.after.mean_s()) - 1.0
    }

    /// Returns how much more CPU time the watched run took, as a fraction.
    pub fn cpu_slowdown(&self) -> f64 {
        2.0 * self.watched.cpu_s / (self.before.cpu_s + self.after.cpu_s) - 1.0
    }

    /// Returns the CPU time that is added to a switch.
    pub fn added_ns_per_switch(&self) -> f64 {
        let per_switch_ns = |run: &Run| run.cpu_s * 1e9 / run.switches.max(1) as f64;
        per_switch_ns(&self.watched) - (per_switch_ns(&self.before) + per_switch_ns(&self.after)) / 2.0
    }

    /// Returns the difference of the two unwatched runs, as a fraction.
    pub fn noise(&self) -> f64 {
        self.after.mean_s() / self.before.mean_s() - 1.0
    }
}

/// Samples by load and subject.
pub type Round = Vec<Vec<Sample>>;

/// Measures all rounds, after one that does not count. Each round starts with another subject.
pub fn measure(tools: &Tools, loads: &[Load], rounds: u32) -> Result<Vec<Round>> {
    let mut counted = Vec::new();
    let names = Subject::ALL.map(Subject::name);
    for round in 0..=rounds as usize {
        eprintln!("slowdown: round {round} of {rounds}{}", if round == 0 { " (does not count)" } else { "" });
        let of_load = |load| of_round(load, &names, round, |which| watched(tools, load, Subject::ALL[which]));
        let samples = loads.iter().map(of_load).collect::<Result<_>>()?;
        if round > 0 {
            counted.push(samples);
        }
    }
    Ok(counted)
}

/// Measures one run for each subject, between two unwatched ones. Subjects take turns at being first.
pub fn of_round(
    load: &Load,
    subjects: &[&str],
    round: usize,
    mut watched: impl FnMut(usize) -> Result<Run>,
) -> Result<Vec<Sample>> {
    let mut samples = vec![None; subjects.len()];
    let mut before = load.run()?;
    for turn in 0..subjects.len() {
        let which = (round + turn) % subjects.len();
        let watched = watched(which).with_context(|| format!("cannot measure {}", subjects[which]))?;
        let after = load.run()?;
        samples[which] = Some(Sample { before, watched, after: after.clone() });
        before = after;
    }
    Ok(samples.into_iter().flatten().collect())
}

fn watched(tools: &Tools, load: &Load, subject: Subject) -> Result<Run> {
    let running = subject.start(tools, load.is_pinned)?;
    let run = load.run()?;
    fail_if_counted(&running)?;
    subject.end(tools, running, run.switches)?;
    Ok(run)
}

/// With run time counting, each run costs two more clock readings.
fn fail_if_counted(running: &Running) -> Result<()> {
    if running.programs()?.values().any(|counts| counts.runs > 0) {
        bail!("somebody has the kernel count run times of BPF programs, which slows them: try again later");
    }
    Ok(())
}
