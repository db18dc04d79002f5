// SPDX-License-Identifier: MIT OR Apache-2.0
//! Known disturbances, and what the sources told of them.

use serde::{Deserialize, Serialize};

use crate::snapshot::SCHEMA;
use crate::units::rfc3339;

/// Of the events that a disturbance has caused, so many in a hundred must name it first.
const RIGHT_PERCENT: u64 = 95;

/// What a figure is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// A fraction from 0 to 1.
    Share,
    /// A number of events.
    Count,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The figure is right, and so is the cause.
    Pass,
    /// One of them is not.
    Fail,
    /// It could not be tried here.
    Skip,
}

/// How often the true cause was named first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The true cause, as the source names it.
    pub cause: String,
    /// How many events name it first.
    pub right: u64,
    /// How many there should be.
    pub events: u64,
}

impl Found {
    fn is_right(&self) -> bool {
        self.events > 0 && self.right * 100 >= self.events * RIGHT_PERCENT
    }
}

/// A figure that is known, and what was measured of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// The source's name.
    pub source: String,
    /// How it measured; empty where it did not.
    pub backend: String,
    /// What was done.
    pub injected: String,
    /// What is compared.
    pub figure: String,
    /// What it is in.
    pub unit: Unit,
    /// The truth, from whoever made the disturbance.
    pub expected: f64,
    /// What the source told.
    pub measured: f64,
    /// How far apart they may be.
    pub tolerance: f64,
    /// Whom the source blames, where it explains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<Found>,
    /// How it ended.
    pub verdict: Verdict,
    /// How often it was tried, as others may disturb the machine too.
    pub tries: u32,
    /// Why it was not tried; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

impl Check {
    /// One that was tried.
    pub fn new(source: &str, backend: &str, injected: &str, figure: &str) -> Self {
        Check {
            source: source.to_owned(),
            backend: backend.to_owned(),
            injected: injected.to_owned(),
            figure: figure.to_owned(),
            unit: Unit::Count,
            expected: 0.0,
            measured: 0.0,
            tolerance: 0.0,
            found: None,
            verdict: Verdict::Fail,
            tries: 1,
            reason: String::new(),
        }
    }

    /// With its figures, which tell how it ended.
    #[must_use]
    pub fn compare(mut self, unit: Unit, expected: f64, measured: f64, tolerance: f64) -> Self {
        (self.unit, self.expected, self.measured, self.tolerance) = (unit, expected, measured, tolerance);
        self.judge()
    }

    /// With whom the source blames, which has to be right as well.
    #[must_use]
    pub fn blames(mut self, cause: &str, right: u64, events: u64) -> Self {
        self.found = Some(Found { cause: cause.to_owned(), right, events });
        self.judge()
    }

    /// One that could not be tried.
    pub fn skipped(source: &str, injected: &str, reason: String) -> Self {
        Check { verdict: Verdict::Skip, tries: 0, reason, ..Check::new(source, "", injected, "") }
    }

    /// What was measured, less the truth.
    pub fn error(&self) -> f64 {
        self.measured - self.expected
    }

    fn judge(mut self) -> Self {
        let is_right = self.error().abs() <= self.tolerance && self.found.as_ref().is_none_or(Found::is_right);
        self.verdict = if is_right { Verdict::Pass } else { Verdict::Fail };
        self
    }
}

/// All checks of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Selftest {
    /// Version of this form.
    pub schema: u32,
    /// The machine's host name.
    pub host: String,
    /// When it began, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "rfc3339")]
    pub start_unix_ns: u64,
    /// The CPU that was disturbed.
    pub cpu: u32,
    /// In the order in which they were tried.
    pub checks: Vec<Check>,
    /// How many ended so.
    pub passed: usize,
    /// The same.
    pub failed: usize,
    /// The same.
    pub skipped: usize,
}

impl Selftest {
    /// Counts how they ended.
    pub fn new(host: &str, start_unix_ns: u64, cpu: u32, checks: Vec<Check>) -> Self {
        let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
        Selftest {
            schema: SCHEMA,
            host: host.to_owned(),
            start_unix_ns,
            cpu,
            passed: count(Verdict::Pass),
            failed: count(Verdict::Fail),
            skipped: count(Verdict::Skip),
            checks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check() -> Check {
        Check::new("wq", "fentry", "work", "items")
    }

    #[test]
    fn a_figure_within_its_tolerance_passes() {
        assert_eq!(check().compare(Unit::Count, 50.0, 50.0, 0.0).verdict, Verdict::Pass);
        assert_eq!(check().compare(Unit::Ns, 1e6, 1.02e6, 1e4).verdict, Verdict::Fail);
        assert_eq!(check().compare(Unit::Ns, 1e6, f64::NAN, 1e4).verdict, Verdict::Fail);
    }

    #[test]
    fn the_cause_has_to_be_right_nearly_always() {
        let right = |right, events| check().compare(Unit::Count, 1.0, 1.0, 0.0).blames("x", right, events).verdict;
        assert_eq!((right(19, 20), right(18, 20), right(0, 0)), (Verdict::Pass, Verdict::Fail, Verdict::Fail));
        // A right cause does not make a wrong figure right.
        assert_eq!(check().compare(Unit::Count, 1.0, 2.0, 0.0).blames("x", 20, 20).verdict, Verdict::Fail);
    }

    #[test]
    fn all_are_counted() {
        let checks = vec![
            check(),
            check().compare(Unit::Count, 1.0, 1.0, 0.0),
            Check::skipped("wq", "work", "no reason".to_owned()),
        ];
        let run = Selftest::new("host", 1_000_000_000, 1, checks);
        assert_eq!((run.passed, run.failed, run.skipped), (1, 1, 1));
        let text = serde_json::to_string(&run).expect("it is plain data");
        assert_eq!(serde_json::from_str::<Selftest>(&text).expect("it is its own form"), run);
    }
}
