// SPDX-License-Identifier: MIT OR Apache-2.0
//! Known disturbances, and the sources' measurements of them.

use serde::{Deserialize, Serialize};

use crate::snapshot::SCHEMA;
use crate::units::rfc3339;

/// Minimum percentage of a disturbance's events that must name it as the first cause.
const MIN_RIGHT_PERCENT: u64 = 95;

/// Unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(rename = "CheckUnit"))]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// A fraction from 0 to 1.
    Share,
    /// A number of events.
    Count,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The figure and the cause are right.
    Pass,
    /// The figure or the cause is wrong.
    Fail,
    /// The check could not run here.
    Skip,
}

/// Score of one true cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Score {
    /// The true cause, as the source names it.
    pub cause: String,
    /// Number of events that name it first.
    pub right: u64,
    /// Number of events expected.
    pub events: u64,
}

impl Score {
    fn is_right(&self) -> bool {
        self.events > 0 && self.right * 100 >= self.events * MIN_RIGHT_PERCENT
    }
}

/// A known figure, and its measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Check {
    /// Name of the source.
    pub source: String,
    /// Backend that measured; empty if none.
    pub backend: String,
    /// The injected disturbance.
    pub injected: String,
    /// Name of the compared figure.
    pub figure: String,
    /// Unit of the figure.
    pub unit: Unit,
    /// True value, from the injector.
    #[serde(serialize_with = "crate::units::figure::write")]
    #[cfg_attr(test, schemars(with = "f64"))]
    pub expected: f64,
    /// Value that the source measured.
    #[serde(serialize_with = "crate::units::figure::write")]
    #[cfg_attr(test, schemars(with = "f64"))]
    pub measured: f64,
    /// Maximum difference.
    #[serde(serialize_with = "crate::units::figure::write")]
    #[cfg_attr(test, schemars(with = "f64"))]
    pub tolerance: f64,
    /// Cause that the source blames, if it explains events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<Score>,
    /// Result.
    pub verdict: Verdict,
    /// Number of tries, as other programs may disturb the machine too.
    pub tries: u32,
    /// Reason why the trial was skipped; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

impl Check {
    /// Creates a check that was run.
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

    /// Adds the figures and derives the result.
    #[must_use]
    pub fn compare(mut self, unit: Unit, expected: f64, measured: f64, tolerance: f64) -> Self {
        (self.unit, self.expected, self.measured, self.tolerance) = (unit, expected, measured, tolerance);
        self.judge()
    }

    /// Adds the blamed cause, which has to be right as well.
    #[must_use]
    pub fn blames(mut self, cause: &str, right: u64, events: u64) -> Self {
        self.found = Some(Score { cause: cause.to_owned(), right, events });
        self.judge()
    }

    /// Creates a check that was skipped.
    pub fn skipped(source: &str, injected: &str, reason: String) -> Self {
        Check { verdict: Verdict::Skip, tries: 0, reason, ..Check::new(source, "", injected, "") }
    }

    /// Returns the measured value minus the true value.
    pub fn error(&self) -> f64 {
        self.measured - self.expected
    }

    fn judge(mut self) -> Self {
        let is_right = self.error().abs() <= self.tolerance && self.found.as_ref().is_none_or(Score::is_right);
        self.verdict = if is_right { Verdict::Pass } else { Verdict::Fail };
        self
    }
}

/// All checks of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Selftest {
    /// Version of this schema.
    pub schema: u32,
    /// Host name of the machine.
    pub host: String,
    /// Start, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub start_unix_ns: u64,
    /// CPU that was disturbed.
    pub cpu: u32,
    /// Checks in the order of the run.
    pub checks: Vec<Check>,
    /// Number of passed checks.
    pub passed: usize,
    /// Number of failed checks.
    pub failed: usize,
    /// Number of skipped checks.
    pub skipped: usize,
}

impl Selftest {
    /// Creates the result of a run of these checks.
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
    fn figure_within_tolerance_passes() {
        assert_eq!(check().compare(Unit::Count, 50.0, 50.0, 0.0).verdict, Verdict::Pass);
        assert_eq!(check().compare(Unit::Ns, 1e6, 1.02e6, 1e4).verdict, Verdict::Fail);
        assert_eq!(check().compare(Unit::Ns, 1e6, f64::NAN, 1e4).verdict, Verdict::Fail);
    }

    #[test]
    fn cause_must_nearly_always_be_right() {
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
