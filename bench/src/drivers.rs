// SPDX-License-Identifier: MIT OR Apache-2.0
//! The drivers of comparisons: rounds in which subjects take turns, watched runs between unwatched ones, and a count of
//! BPF run times beside that of an empty program.

use anyhow::{Context, Result, ensure};

use crate::loads::{Load, Run};
use crate::programs::Counts;
use crate::subject::{Running, Subject};
use crate::table;

/// Samples by round and subject.
pub struct Rounds<T>(pub Vec<Vec<T>>);

impl<T> Rounds<T> {
    pub fn subject(&self, which: usize) -> Vec<&T> {
        self.0.iter().map(|round| &round[which]).collect()
    }

    pub fn values(&self, which: usize, figure: impl Fn(&T) -> f64) -> Vec<f64> {
        self.0.iter().map(|round| figure(&round[which])).collect()
    }

    pub fn median(&self, which: usize, figure: impl Fn(&T) -> f64) -> f64 {
        table::median(&self.values(which, figure))
    }

    /// Returns a part of each sample, or another figure of it.
    pub fn map<'a, U>(&'a self, part: impl Fn(&'a T) -> U) -> Rounds<U> {
        Rounds(self.0.iter().map(|round| round.iter().map(&part).collect()).collect())
    }

    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten()
    }

    /// Returns a row per subject for [`table::grid`].
    pub fn rows<'a>(
        &'a self,
        labels: impl IntoIterator<Item = String> + 'a,
    ) -> impl Iterator<Item = (String, Vec<&'a T>)> {
        labels.into_iter().enumerate().map(|(which, label)| (label, self.subject(which)))
    }
}

/// Measures all rounds, after one that does not count if `has_warm_up`. Each round begins with another subject.
pub fn in_rounds<T>(
    what: &str,
    (count, has_warm_up): (u32, bool),
    subjects: &[&str],
    mut measure: impl FnMut(usize) -> Result<T>,
) -> Result<Rounds<T>> {
    let mut rounds = Vec::new();
    for round in usize::from(!has_warm_up)..=count as usize {
        eprintln!("{what}: round {round} of {count}{}", if round == 0 { " (does not count)" } else { "" });
        let mut samples: Vec<Option<T>> = subjects.iter().map(|_| None).collect();
        for turn in 0..subjects.len() {
            let which = (round + turn) % subjects.len();
            samples[which] = Some(measure(which).with_context(|| format!("cannot measure {}", subjects[which]))?);
        }
        if round > 0 {
            rounds.push(samples.into_iter().flatten().collect());
        }
    }
    Ok(Rounds(rounds))
}

/// A watched run, and the unwatched runs right before and right after it.
#[derive(Clone, Debug)]
pub struct Slowdown {
    pub before: Run,
    pub watched: Run,
    pub after: Run,
}

impl Slowdown {
    /// Returns how much longer the watched run took than the unwatched ones, in percent.
    pub fn percent(&self) -> f64 {
        100.0 * (2.0 * self.watched.mean_s() / (self.before.mean_s() + self.after.mean_s()) - 1.0)
    }

    /// Returns how much more CPU time the watched run took, in percent; without the time of other threads.
    pub fn cpu_percent(&self) -> f64 {
        100.0 * (2.0 * self.watched.cpu_s / (self.before.cpu_s + self.after.cpu_s) - 1.0)
    }

    /// Returns the CPU time that is added to a switch.
    pub fn added_ns_per_switch(&self) -> f64 {
        let per_switch_ns = |run: &Run| run.cpu_s * 1e9 / run.switches.max(1) as f64;
        per_switch_ns(&self.watched) - (per_switch_ns(&self.before) + per_switch_ns(&self.after)) / 2.0
    }

    /// Returns how much more of its time a spinning thread lost, in percent of that time.
    pub fn lost_percent(&self) -> f64 {
        self.watched.lost_percent - (self.before.lost_percent + self.after.lost_percent) / 2.0
    }

    /// Returns how much longer the second unwatched run took, in percent.
    pub fn noise_percent(&self) -> f64 {
        100.0 * (self.after.mean_s() / self.before.mean_s() - 1.0)
    }
}

/// Measures a load that each subject watches, each time between two unwatched runs.
pub fn slowdowns(load: &Load, subjects: &[Subject], rounds: u32) -> Result<Rounds<Slowdown>> {
    let mut before = load.run().with_context(|| format!("cannot run {}", load.name))?;
    let names: Vec<&str> = subjects.iter().map(|subject| subject.name).collect();
    in_rounds(&load.name, (rounds, true), &names, |which| {
        let (sample, _) = slowdown(load, load, &subjects[which], before.clone())?;
        before.clone_from(&sample.after);
        Ok(sample)
    })
}

/// Measures one watched run after the unwatched run `before`, and another unwatched one after it. Returns the subject's
/// standard error too.
pub fn slowdown(watched: &Load, unwatched: &Load, subject: &Subject, before: Run) -> Result<(Slowdown, String)> {
    let (run, errors) = subject.watch(watched.is_pinned, |running| {
        let run = watched.run()?;
        fail_if_counted(running)?;
        Ok(run)
    })?;
    subject.remove_recording(run.switches)?;
    Ok((Slowdown { before, watched: run, after: unwatched.run()? }, errors))
}

/// With run time counting, each run costs two more clock readings.
fn fail_if_counted(running: &Running) -> Result<()> {
    let is_counted = running.programs()?.values().any(|counts| counts.runs > 0);
    ensure!(!is_counted, "the kernel counts run times of BPF programs, which slows them: end what asked for that");
    Ok(())
}

/// Counts a subject's programs during the work. Returns the mean run time of an empty program at each switch too, which
/// is mostly the time of counting. The caller has the kernel count run times.
pub fn count_beside_empty<T>(running: &Running, work: impl FnOnce() -> Result<T>) -> Result<(T, Vec<Counts>, f64)> {
    let empty = Subject::empty_at_switches().start(false)?;
    let ((done, programs), floor) = empty.count(|| running.count(work))?;
    let floor = floor.iter().find(|counts| counts.runs > 0).context("the empty program has not run")?;
    Ok((done, programs, floor.mean_ns()))
}

#[cfg(test)]
#[path = "../unit/drivers.rs"]
mod tests;
