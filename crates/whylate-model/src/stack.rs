// SPDX-License-Identifier: MIT OR Apache-2.0
//! A call stack with the weight that was seen on it.

use serde::{Deserialize, Serialize};

use crate::snapshot::Labels;

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
    /// Kernel frames, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<String>,
    /// User frames, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<String>,
}
