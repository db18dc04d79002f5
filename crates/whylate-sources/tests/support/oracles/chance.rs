// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides comparisons on a shared machine by bounds with a stated false-alarm rate.

#[path = "../machine/steal.rs"]
mod steal;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use whylate_sources::AttachError;

use steal::{is_too_much, stolen};

/// Returns whether this kernel runs on an emulator. The host may then stop a CPU for milliseconds between any two
/// instructions, or between two records of one event: of many comparisons the typical one counts, not the worst.
pub fn is_emulated() -> bool {
    std::env::var_os("WHYLATE_EMULATED").is_some()
}

/// False-alarm rate: a test of correct code may fail in one of this number of runs.
const RUNS_A_FALSE_ALARM: f64 = 10_000.0;

/// Returns the largest number of failures to accept in `trials` independent trials, if each fails by chance with at
/// most `probability`. Correct code exceeds the bound in at most one of 10,000 runs.
pub fn by_chance(trials: usize, probability: f64) -> usize {
    // Sums the binomial distribution from below, by logarithms, as single terms may underflow.
    let odds = probability / (1.0 - probability);
    let mut log_exactly = trials as f64 * (1.0 - probability).ln();
    let mut at_most = log_exactly.exp();
    let mut failures = 0;
    while failures < trials && 1.0 - at_most > 1.0 / RUNS_A_FALSE_ALARM {
        log_exactly += (odds * (trials - failures) as f64 / (failures + 1) as f64).ln();
        at_most += log_exactly.exp();
        failures += 1;
    }
    failures
}

/// The sequential verdict on rounds of one comparison (Wald's sequential probability ratio test): passes, fails, or
/// undecided. A failed round counts to the end: passed rounds have to outweigh it.
///
/// The product of likelihood ratios is a martingale where failures are by chance, so it reaches 10,000 in at most one
/// of 10,000 runs (Ville's inequality). The price of deciding on a first passed round: a defect is found in each run if
/// it shows in each round, in 56 % of the runs if it shows in 60 % of the rounds, and rarely if it shows rarely. What
/// has to hold exactly belongs into an assertion, which no other round forgives.
#[derive(Debug)]
pub struct Verdict {
    by_chance: f64,
    log_ratio: f64,
}

/// Minimum probability that a round fails if there is a defect.
const BY_DEFECT: f64 = 0.6;

impl Verdict {
    /// `by_chance` is the maximum probability that a round fails without a defect.
    pub fn new(by_chance: f64) -> Verdict {
        Verdict { by_chance, log_ratio: 0.0 }
    }

    /// Takes in a round's outcome. Returns the verdict, or `None` if more rounds are needed.
    pub fn after(&mut self, passed: bool) -> Option<bool> {
        let ratio = if passed { (1.0 - BY_DEFECT) / (1.0 - self.by_chance) } else { BY_DEFECT / self.by_chance };
        self.log_ratio += ratio.ln();
        if self.log_ratio < 0.0 {
            return Some(true);
        }
        (self.log_ratio >= RUNS_A_FALSE_ALARM.ln()).then_some(false)
    }
}

/// Probability that a round fails because another task ran between two readings that belong together.
const ROUND_BY_CHANCE: f64 = 0.05;
/// As above on an emulated CPU, which stops at any time.
const ROUND_BY_CHANCE_EMULATED: f64 = 0.15;
const UNJUDGED: u32 = 4;

/// The error of a round that is inconclusive, as something outside of the test disturbed it.
#[derive(Debug)]
pub struct Unjudged(pub String);

impl Display for Unjudged {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Error for Unjudged {}

/// Decides a comparison of times by rounds. A failed round is not judged if the hypervisor stole CPU time during it (by
/// the kernel's count), or if its error is [`Unjudged`]. After [`UNJUDGED`] such rounds without a judged failure the
/// test is inconclusive and says so; a test run fails if more than a few tests are.
pub fn in_rounds(mut round: impl FnMut() -> Result<()>) -> Result<()> {
    let mut verdict = Verdict::new(if is_emulated() { ROUND_BY_CHANCE_EMULATED } else { ROUND_BY_CHANCE });
    let (mut rounds, mut unjudged, mut last) = (0, 0, None);
    loop {
        let (began, before) = (Instant::now(), stolen());
        let outcome = round();
        let refused = |error: &anyhow::Error| {
            matches!(error.downcast_ref(), Some(AttachError::Unsupported(_) | AttachError::NotPermitted))
        };
        if outcome.as_ref().is_err_and(refused) {
            // Unsupported here: further rounds would end in the same way.
            return outcome;
        }
        let stolen = stolen().saturating_sub(before);
        let is_stolen = is_too_much(stolen, began.elapsed());
        let is_judged = match &outcome {
            Ok(()) => true,
            Err(error) => !is_stolen && !error.is::<Unjudged>(),
        };
        if let (false, Err(error)) = (is_judged, &outcome) {
            unjudged += 1;
            println!("not judged, the hypervisor took {stolen:?} during it: {error:#}");
            if unjudged < UNJUDGED {
                continue;
            }
            return match last {
                None => {
                    println!("inconclusive: {error:#}");
                    Ok(())
                }
                Some(failure) => Err(anyhow::Error::context(failure, "of the rounds that are judged all fail")),
            };
        }
        rounds += 1;
        let passed = outcome.is_ok();
        if let Err(error) = outcome {
            println!("a round fails: {error:#}");
            last = Some(error);
        }
        match (verdict.after(passed), last.take()) {
            (Some(true), _) => return Ok(()),
            (Some(false), Some(error)) => return Err(error.context(format!("too many of {rounds} rounds fail"))),
            (_, error) => last = error,
        }
    }
}

/// Returns, by TID, the run-queue wait so far of each thread with a name that starts with `name`
/// (proc_pid_schedstat(5)).
pub fn waited_for_a_cpu(name: &str) -> Result<BTreeMap<u32, Duration>> {
    let mut waited = BTreeMap::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let is_named = fs::read_to_string(entry.path().join("comm")).is_ok_and(|comm| comm.starts_with(name));
        // The thread may have ended since.
        let Ok(text) = fs::read_to_string(entry.path().join("schedstat")) else { continue };
        if is_named {
            let ns = text.split_whitespace().nth(1).context("schedstat has three fields")?.parse()?;
            waited.insert(tid, Duration::from_nanos(ns));
        }
    }
    Ok(waited)
}
