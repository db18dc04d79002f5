// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statistical comparison of two spans of time, of one recording or of two.
//!
//! Time is split into blocks of equal length on both sides ([`block_ns`]). Each compared quantity, such as the delay
//! that a culprit causes, has one value per block, and the values of both sides are tested against each other
//! ([`rank::mann_whitney`]): a quantity that comes in bursts also differs from block to block, so it does not count as
//! a difference. With many comparisons some differ by chance; [`rank::benjamini_hochberg`] keeps the share of these
//! below [`FALSE_SHARE`]. A difference must also be large enough to matter ([`MIN_CHANGE`]).
//!
//! No verdict is given on what is too rare or occurs in too few blocks ([`Outcome::TooLittle`]). Missing values are not
//! replaced: a side without values has no percentiles, and a source that was measured on only one side is not compared.

mod block;
mod blocks;
mod key;
pub mod rank;
mod rows;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use blocks::{Comparison, Lengths, block_ns};
pub use key::What;

use crate::recording::Unmeasured;
use crate::snapshot::SCHEMA;
use crate::units::rfc3339;

#[cfg(test)]
mod tests;

/// Name of the test, as outputs show it.
pub const TEST: &str = "two-sided Mann–Whitney U, variance corrected for the autocorrelation of blocks";
/// Correction for multiple comparisons.
pub const CORRECTION: &str = "Benjamini–Hochberg";
/// Accepted false discovery rate.
pub const FALSE_SHARE: f64 = 0.05;
/// Minimum change, as a fraction of the larger side; a smaller one is no difference, however significant.
pub const MIN_CHANGE: f64 = 0.1;
/// Minimum number of blocks of a side for a test.
pub const MIN_BLOCKS: usize = 8;

/// Comparison of two spans of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Diff {
    /// Version of this schema.
    pub schema: u32,
    /// The earlier or first side.
    pub before: About,
    /// The other side.
    pub after: About,
    /// Parameters of the test.
    pub test: Test,
    /// Number of rows that were tested.
    pub compared: u64,
    /// Number of tested rows that differ.
    pub differ: u64,
    /// Number of further rows with too few values for a test.
    pub too_little: u64,
    /// Sources and quantities that only one side has or that cannot be compared, with reasons.
    pub not_compared: Vec<Unmeasured>,
    /// Late events, culprits and held-up programs that occur on only one side, or ten times as often there, and are too
    /// rare or too bursty for the test.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bursts: Vec<Row>,
    /// All rows: increases before decreases, each with culprits first; then rows without a difference.
    pub rows: Vec<Row>,
}

/// One side of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct About {
    /// Name of the recording file.
    pub name: String,
    /// Host name of the machine.
    #[serde(default)]
    pub host: String,
    /// Kernel release.
    #[serde(default)]
    pub kernel: String,
    /// Start of the first snapshot, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub start_unix_ns: u64,
    /// Total snapshot time of the source that has most.
    pub duration_ns: u64,
    /// Number of lost events by source; `all` for those that affect every source.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lost: BTreeMap<String, u64>,
}

/// Parameters of the test.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Test {
    /// Name of the test, [`TEST`].
    pub name: String,
    /// Correction for the number of rows, [`CORRECTION`].
    pub correction: String,
    /// False discovery rate, [`FALSE_SHARE`].
    pub false_share: f64,
    /// Minimum change of a row that differs, as a share of its larger value, [`MIN_CHANGE`].
    pub least_change: f64,
    /// Length of a block.
    pub block_ns: u64,
    /// Number of blocks of the earlier side.
    pub blocks_before: u64,
    /// Number of blocks of the later side.
    pub blocks_after: u64,
}

/// One compared quantity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Row {
    /// Name of the source; empty if the row covers all sources.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// Subject of the row.
    #[serde(flatten)]
    pub what: What,
    /// Name of the figure.
    pub figure: String,
    /// Name of the distribution, if the figure is one of a distribution.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub distribution: String,
    /// Unit of the values.
    pub unit: Unit,
    /// Value of the earlier side.
    pub before: Measure,
    /// Value of the later side.
    pub after: Measure,
    /// Verdict.
    #[serde(rename = "told")]
    pub outcome: Outcome,
    /// Probability that chance alone separates the sides as much; `None` if not tested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p: Option<f64>,
    /// `p`, corrected for the number of tested rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q: Option<f64>,
}

/// Figure of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Measure {
    /// Number of events, values or samples that the figure is based on.
    pub count: u64,
    /// The figure; `None` if it is based on nothing.
    #[serde(serialize_with = "crate::units::figure::write_if_known")]
    #[cfg_attr(test, schemars(with = "Option<f64>"))]
    pub value: Option<f64>,
    /// A culprit's share of all delays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
}

/// Unit of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// Nanoseconds per second.
    NsPerSecond,
    /// Number per second.
    #[default]
    PerSecond,
    /// Number per hour.
    PerHour,
    /// Fraction of 1.
    Share,
}

/// Verdict on a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The value has increased.
    More,
    /// The value has decreased.
    Less,
    /// The change is within chance, or too small.
    NoDifference,
    /// There are too few values.
    TooLittle,
    /// No test applies: one event alone determines a maximum.
    Untested,
}

impl Outcome {
    /// Returns whether the verdict is a difference.
    pub fn differs(self) -> bool {
        matches!(self, Outcome::More | Outcome::Less)
    }
}

impl Test {
    /// Returns whether a side has too few blocks for any test.
    pub fn are_too_few(&self) -> bool {
        self.blocks_before.min(self.blocks_after) < MIN_BLOCKS as u64
    }

    fn new(block_ns: u64, blocks: [usize; 2]) -> Self {
        Test {
            name: TEST.to_owned(),
            correction: CORRECTION.to_owned(),
            false_share: FALSE_SHARE,
            least_change: MIN_CHANGE,
            block_ns,
            blocks_before: blocks[0] as u64,
            blocks_after: blocks[1] as u64,
        }
    }
}

/// Minimum number of events of a burst, on one side and scaled to the length of the other.
const MIN_BURST_EVENTS: f64 = 3.0;
/// Minimum ratio of event rates between the sides.
const MIN_BURST_RATIO: f64 = 10.0;
/// Minimum delay in nanoseconds per second, as for culprits that the test finds.
const MIN_BURST_DELAY: f64 = 200_000.0;
/// Minimum share of the time of the side for which a program was held up.
const MIN_BURST_SHARE: f64 = 0.02;

impl Row {
    /// Returns whether the row is a late event, culprit or held-up program that occurs almost only on one side and that the
    /// test has not found. `spans_ns` are the lengths of the sides.
    fn is_burst(&self, spans_ns: [u64; 2]) -> bool {
        let [before, after] = [&self.before, &self.after].map(|side| side.value.unwrap_or(0.0));
        let is_of_interest = match &self.what {
            What::Late { .. } => true,
            What::Culprit { .. } => before.max(after) >= MIN_BURST_DELAY,
            What::HeldUp { .. } => before.max(after) >= MIN_BURST_SHARE,
            _ => false,
        };
        let counts = [self.before.count as f64, self.after.count as f64];
        // Number of events expected in the other side's length.
        let is_more = |more: usize, less: usize| {
            let expected = counts[more] * spans_ns[less] as f64 / spans_ns[more].max(1) as f64;
            counts[more].min(expected) >= MIN_BURST_EVENTS && expected >= MIN_BURST_RATIO * counts[less]
        };
        is_of_interest && !self.outcome.differs() && (is_more(0, 1) || is_more(1, 0))
    }
}

impl Diff {
    fn new(sides: [About; 2], test: Test, rows: Vec<Row>, not_compared: Vec<Unmeasured>) -> Self {
        let count = |is_of: fn(Outcome) -> bool| rows.iter().filter(|row| is_of(row.outcome)).count() as u64;
        let (differ, too_little) = (count(Outcome::differs), count(|verdict| verdict == Outcome::TooLittle));
        let compared = differ + count(|verdict| verdict == Outcome::NoDifference);
        let [before, after] = sides;
        let spans_ns = [before.duration_ns, after.duration_ns];
        let bursts = rows.iter().filter(|row| row.is_burst(spans_ns)).cloned().collect();
        Diff { schema: SCHEMA, before, after, test, compared, differ, too_little, not_compared, bursts, rows }
    }
}
