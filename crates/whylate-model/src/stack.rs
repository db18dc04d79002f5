// SPDX-License-Identifier: MIT OR Apache-2.0
//! A call stack with the weight that was seen on it.

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::snapshot::Labels;
use crate::wait::Wait;

/// One distinct call stack of a thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stack {
    /// Whose stack it is, e.g. `process` and `thread`.
    pub labels: Labels,
    /// The scheduler state in `ps` letters, e.g. `S`; empty where it does not apply.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub state: String,
    /// How many times it was seen.
    pub samples: u64,
    /// The time it stands for.
    pub weight_ns: u64,
    /// How many waits of their own the samples are of, where that is known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waits: u64,
    /// What the thread waits for, where the source tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<Wait>,
    /// For how long the threads that are here at the end of the span have been.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub age: Histogram,
    /// Kernel frames, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<String>,
    /// User frames, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<String>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}
