// SPDX-License-Identifier: MIT OR Apache-2.0
//! Identity of a compared quantity across runs: PIDs and TIDs differ from run to run.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::sources::Judged;
use crate::{ActorName, Cause, CauseKind, Labels};

/// Subject of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// Delay that a culprit caused to late events.
    Culprit {
        /// Kind of the delay.
        kind: CauseKind,
        /// Name of the culprit, without PID or TID.
        who: ActorName,
    },
    /// Late events.
    Late {
        /// Name of the late events, such as `work items`.
        late: String,
    },
    /// Time for which a program was held up.
    HeldUp {
        /// Name of the program, without PID.
        program: String,
    },
    /// A series.
    Series {
        /// Labels of the series, without PIDs and TIDs.
        labels: Labels,
    },
    /// All series of a source, merged.
    Total,
    /// Threads that wait with one stack, outermost frame first.
    Stack {
        /// Process and frames, separated by semicolons.
        frames: String,
    },
}

/// Labels that differ from run to run.
const ID_LABELS: [&str; 2] = ["pid", "tid"];
/// Labels with thread names.
const NAME_LABELS: [&str; 3] = ["process", "thread", "by"];

impl What {
    /// Returns the key of a cause's culprit.
    pub(super) fn culprit(cause: &Cause) -> What {
        let who = match cause.kind {
            // These have no thread, or are identified by what they are.
            CauseKind::Irq | CauseKind::Softirq | CauseKind::Nmi | CauseKind::Work | CauseKind::Interrupt => {
                cause.who.clone()
            }
            _ => cause.who.alike(),
        };
        What::Culprit { kind: cause.kind, who }
    }

    /// Returns the key of the late events of that kind.
    pub(super) fn late(judged: &Judged) -> What {
        // A source without thresholds for figures has no name for its events.
        let late = if judged.of.is_empty() { "late events" } else { judged.of };
        What::Late { late: late.to_owned() }
    }

    /// Returns the key of a program that was held up.
    pub(super) fn held_up(program: &ActorName) -> What {
        What::HeldUp { program: program.alike().to_string() }
    }

    pub(super) fn series(labels: &Labels) -> What {
        let stable = labels.iter().filter(|(name, _)| !ID_LABELS.contains(&name.as_str()));
        let stable = stable.map(|(name, value)| {
            let is_name = NAME_LABELS.contains(&name.as_str());
            let Ok(called) = value.parse::<ActorName>();
            (name.clone(), if is_name { called.alike().to_string() } else { value.clone() })
        });
        What::Series { labels: stable.collect() }
    }
}

/// One quantity, with one value per block.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    /// Index of the source's card; `None` for all sources.
    pub card: Option<usize>,
    pub what: What,
    pub of: Quantity,
}

/// Quantity of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Quantity {
    /// Number of events and their total time.
    Events,
    /// Number of values in the series' longest distribution.
    Count,
    /// The distribution of this name.
    Histogram(String),
    /// Figure of this name: a share of time, or a rate per second.
    Value(String),
}

/// Maximum number of stacks, which have long names, and of other keys. Keys beyond these count only in totals.
const MAX_STACKS: usize = 30_000;
const MAX_OTHERS: usize = 100_000;

/// Interns keys as numbers.
#[derive(Debug, Default)]
pub(super) struct Keys {
    numbers: HashMap<Key, u32>,
    stacks: usize,
    /// Number of values dropped for lack of room.
    pub dropped: u64,
}

impl Keys {
    /// Returns the number of a key; `None` if there are too many keys.
    pub fn number(&mut self, key: Key) -> Option<u32> {
        let next = self.numbers.len();
        let is_stack = matches!(key.what, What::Stack { .. });
        let has_room = if is_stack { self.stacks < MAX_STACKS } else { next - self.stacks < MAX_OTHERS };
        match self.numbers.get(&key) {
            Some(&known) => Some(known),
            None if has_room => {
                self.stacks += usize::from(is_stack);
                self.numbers.insert(key, next as u32);
                Some(next as u32)
            }
            None => {
                self.dropped += 1;
                None
            }
        }
    }

    /// Returns all keys, sorted, with their numbers.
    pub fn sorted(self) -> Vec<(Key, u32)> {
        let mut all: Vec<(Key, u32)> = self.numbers.into_iter().collect();
        all.sort();
        all
    }
}
