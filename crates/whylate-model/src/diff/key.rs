// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is one thing on both sides: numbers of processes and threads differ from run to run.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::snapshot::Labels;
use crate::sources::Judged;
use crate::thread::alike;
use crate::{Cause, CauseKind};

/// What a row is of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// The delay that somebody caused to what was late.
    Culprit {
        /// How.
        kind: CauseKind,
        /// Its name, without numbers.
        who: String,
    },
    /// What was late.
    Late {
        /// What it is.
        late: String,
    },
    /// A series.
    Series {
        /// Its labels, without numbers.
        labels: Labels,
    },
    /// All series of a source.
    Total,
    /// Threads at one place, outermost frame first.
    Stack {
        /// The process and its frames, separated by semicolons.
        frames: String,
    },
}

/// Labels that differ from run to run.
const NUMBERS: [&str; 2] = ["pid", "tid"];
/// Labels that are names of threads.
const NAMES: [&str; 3] = ["process", "thread", "by"];

impl What {
    /// Who a cause is laid to.
    pub(super) fn culprit(cause: &Cause) -> What {
        let who = match cause.kind {
            // Those have no thread, or are told by what they are.
            CauseKind::Irq | CauseKind::Softirq | CauseKind::Nmi | CauseKind::Work | CauseKind::Interrupt => {
                cause.who.clone()
            }
            _ => alike(&cause.who),
        };
        What::Culprit { kind: cause.kind, who }
    }

    /// What is late by that.
    pub(super) fn late(judged: &Judged) -> What {
        // A source that judges no figures has no word for them.
        let late = if judged.of.is_empty() { "late events" } else { judged.of };
        What::Late { late: late.to_owned() }
    }

    pub(super) fn series(labels: &Labels) -> What {
        let kept = labels.iter().filter(|(name, _)| !NUMBERS.contains(&name.as_str()));
        let kept = kept.map(|(name, value)| {
            let is_name = NAMES.contains(&name.as_str());
            (name.clone(), if is_name { alike(value) } else { value.clone() })
        });
        What::Series { labels: kept.collect() }
    }
}

/// One thing of which every block has a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    /// The number of the source's card; `None` for all sources.
    pub card: Option<usize>,
    pub what: What,
    pub of: Of,
}

/// Which of the things that a series has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Of {
    /// Events, and how long they took.
    Events,
    /// How many values its longest distribution has.
    Count,
    /// The distribution of this name.
    Histogram(String),
    /// The figure of this name: a share of time, or so many a second.
    Value(String),
}

/// How many stacks are told apart, whose names are long, and how many others. Beyond these, only sums know of them.
const MOST_STACKS: usize = 30_000;
const MOST_OTHERS: usize = 100_000;

/// Numbers for keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    numbers: HashMap<Key, u32>,
    stacks: usize,
    /// Those for which there was no room.
    pub beyond: u64,
}

impl Keys {
    /// The number of a key; `None` where there are too many.
    pub fn number(&mut self, key: Key) -> Option<u32> {
        let next = self.numbers.len();
        let is_stack = matches!(key.what, What::Stack { .. });
        let has_room = if is_stack { self.stacks < MOST_STACKS } else { next - self.stacks < MOST_OTHERS };
        match self.numbers.get(&key) {
            Some(&known) => Some(known),
            None if has_room => {
                self.stacks += usize::from(is_stack);
                self.numbers.insert(key, next as u32);
                Some(next as u32)
            }
            None => {
                self.beyond += 1;
                None
            }
        }
    }

    /// All of them, sorted, with their numbers.
    pub fn sorted(self) -> Vec<(Key, u32)> {
        let mut all: Vec<(Key, u32)> = self.numbers.into_iter().collect();
        all.sort();
        all
    }
}
