// SPDX-License-Identifier: MIT OR Apache-2.0
//! What differs between two spans of time, of one recording or of two.
//!
//! Time is cut into blocks, equally long on both sides ([`block_ns`]). Of each thing that is compared, such as the delay
//! that a culprit causes, every block has one value, and the values of one side are compared with those of the other
//! ([`rank::mann_whitney`]): what happens in bursts differs from block to block as well, and so is no difference. Of many
//! comparisons some find something by chance; [`rank::benjamini_hochberg`] keeps these below [`FALSE_SHARE`] of what is
//! found. Beside that, a difference has to be worth a word ([`LEAST_CHANGE`]).
//!
//! Of what is too rare, or is in too few blocks, nothing is said ([`Told::TooLittle`]). Nothing is added for a side that
//! has none: it has no percentiles there, and a source that one side did not measure is not compared.

mod blocks;
mod key;
pub mod rank;
mod rows;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use blocks::{Comparison, Lengths, block_ns};
pub use key::What;

use crate::look::Unmeasured;
use crate::snapshot::SCHEMA;
use crate::units::rfc3339;

#[cfg(test)]
mod tests;

/// The test, as it is called where results are shown.
pub const TEST: &str = "two-sided Mann–Whitney U, variance corrected for the autocorrelation of blocks";
/// What is done about the number of comparisons.
pub const CORRECTION: &str = "Benjamini–Hochberg";
/// The share of false finds among all finds that is put up with.
pub const FALSE_SHARE: f64 = 0.05;
/// A change that is less of the larger side is no difference, however sure it is.
pub const LEAST_CHANGE: f64 = 0.1;
/// A side with fewer blocks tells too little.
pub const LEAST_BLOCKS: usize = 8;

/// Two spans of time, compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Diff {
    /// Version of this form.
    pub schema: u32,
    /// The earlier side, or the first one.
    pub before: About,
    /// The other.
    pub after: About,
    /// How it was decided what differs.
    pub test: Test,
    /// How many rows were compared.
    pub compared: u64,
    /// How many of them differ.
    pub differ: u64,
    /// How many more there are of which there is too little.
    pub too_little: u64,
    /// What is on one side alone, or cannot be compared, and why.
    pub not_compared: Vec<Unmeasured>,
    /// Late events and culprits that are on one side alone, or ten times as many there, and too rare or too much in bursts for the
    /// test.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bursts: Vec<Row>,
    /// What differs: what has grown before what has shrunk, and of each who makes others late first; then the others.
    pub rows: Vec<Row>,
}

/// One side.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// The file's name.
    pub name: String,
    /// The machine's host name.
    #[serde(default)]
    pub host: String,
    /// The kernel's release.
    #[serde(default)]
    pub kernel: String,
    /// When the first snapshot of it began, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "rfc3339")]
    pub start_unix_ns: u64,
    /// How long the snapshots of the source are that has most.
    pub duration_ns: u64,
    /// How many events could not be counted, by source; those of what all share as `all`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lost: BTreeMap<String, u64>,
}

/// How it was decided what differs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// [`TEST`].
    pub name: String,
    /// [`CORRECTION`].
    pub correction: String,
    /// [`FALSE_SHARE`].
    pub false_share: f64,
    /// [`LEAST_CHANGE`].
    pub least_change: f64,
    /// How long a block is.
    pub block_ns: u64,
    /// How many there are before.
    pub blocks_before: u64,
    /// And after.
    pub blocks_after: u64,
}

/// One thing that is compared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The source's name; empty where it is of all of them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// What it is of.
    #[serde(flatten)]
    pub what: What,
    /// Which of its figures.
    pub figure: String,
    /// Of which distribution, where it is of one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub distribution: String,
    /// What the values are in.
    pub unit: Unit,
    /// The earlier side.
    pub before: Measure,
    /// The other.
    pub after: Measure,
    /// What can be said.
    pub told: Told,
    /// How likely chance alone separates the sides as far; `None` where nothing was tested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p: Option<f64>,
    /// The same, corrected for the number of rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q: Option<f64>,
}

/// A figure of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Of how many events, values or samples.
    pub count: u64,
    /// `None` where it is of none.
    pub value: Option<f64>,
    /// Of a delay, its share of all delays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
}

/// What a value is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// Nanoseconds in each second.
    NsPerSecond,
    /// So many in each second.
    #[default]
    PerSecond,
    /// So many in each hour.
    PerHour,
    /// A fraction of 1.
    Share,
}

/// What can be said of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// It has grown.
    More,
    /// It has shrunk.
    Less,
    /// Chance alone would do as much, or it is too small a change.
    NoDifference,
    /// There is too little of it.
    TooLittle,
    /// There is no test for it: one event makes a maximum.
    Untested,
}

impl Told {
    /// Whether it is a difference.
    pub fn differs(self) -> bool {
        matches!(self, Told::More | Told::Less)
    }
}

impl Test {
    /// Whether a side is too short for anything to be tested.
    pub fn are_too_few(&self) -> bool {
        self.blocks_before.min(self.blocks_after) < LEAST_BLOCKS as u64
    }

    fn of(block_ns: u64, blocks: [usize; 2]) -> Self {
        Test {
            name: TEST.to_owned(),
            correction: CORRECTION.to_owned(),
            false_share: FALSE_SHARE,
            least_change: LEAST_CHANGE,
            block_ns,
            blocks_before: blocks[0] as u64,
            blocks_after: blocks[1] as u64,
        }
    }
}

/// Fewer events are no burst, on one side and for as long as the other one is.
const LEAST_OF_BURST: f64 = 3.0;
/// How many times as many events in the same time as on the other side.
const TIMES_OF_BURST: f64 = 10.0;
/// Less delay is negligible, in nanoseconds a second: as of culprits that the test finds.
const LEAST_DELAY: f64 = 200_000.0;

impl Row {
    /// Whether something is late, or makes others late, nearly on one side alone, which the test has not found; the sides
    /// last this long.
    fn is_burst(&self, spans_ns: [u64; 2]) -> bool {
        let is_of_interest = match &self.what {
            What::Late { .. } => true,
            What::Culprit { .. } => {
                let delay = |side: &Measure| side.value.unwrap_or(0.0);
                delay(&self.before).max(delay(&self.after)) >= LEAST_DELAY
            }
            _ => false,
        };
        let counts = [self.before.count as f64, self.after.count as f64];
        // What one side would have had for as long as the other one is.
        let is_more = |more: usize, less: usize| {
            let expected = counts[more] * spans_ns[less] as f64 / spans_ns[more].max(1) as f64;
            counts[more].min(expected) >= LEAST_OF_BURST && expected >= TIMES_OF_BURST * counts[less]
        };
        is_of_interest && !self.told.differs() && (is_more(0, 1) || is_more(1, 0))
    }
}

impl Diff {
    fn new(sides: [About; 2], test: Test, rows: Vec<Row>, not_compared: Vec<Unmeasured>) -> Self {
        let count = |is_of: fn(Told) -> bool| rows.iter().filter(|row| is_of(row.told)).count() as u64;
        let (differ, too_little) = (count(Told::differs), count(|told| told == Told::TooLittle));
        let compared = differ + count(|told| told == Told::NoDifference);
        let [before, after] = sides;
        let spans_ns = [before.duration_ns, after.duration_ns];
        let bursts = rows.iter().filter(|row| row.is_burst(spans_ns)).cloned().collect();
        Diff { schema: SCHEMA, before, after, test, compared, differ, too_little, not_compared, bursts, rows }
    }
}
