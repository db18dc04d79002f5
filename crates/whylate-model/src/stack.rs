// SPDX-License-Identifier: MIT OR Apache-2.0
//! A call stack with the weight that was seen on it.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::holders::Chain;
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
    /// Who ended the waits, where that is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waker: Option<Waker>,
    /// Whom the thread that is here at the end of the span waits for, where that is asked for and the kernel tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<Chain>,
}

impl Stack {
    /// Whether both are of the same threads at the same place, for the same, ended by the same: over time these are one.
    pub fn is_same_place(&self, other: &Stack) -> bool {
        self.labels == other.labels
            && self.state == other.state
            && self.wait == other.wait
            && self.kernel == other.kernel
            && self.user == other.user
            && self.waker == other.waker
    }

    /// The same number for stacks of one place, as long as the program runs.
    pub fn place_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.labels, &self.state, &self.kernel, &self.user).hash(&mut hasher);
        if let Some(waker) = &self.waker {
            (&waker.labels, &waker.kernel, &waker.user).hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// Who ended waits by waking the thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waker {
    /// What it was.
    pub by: WokenBy,
    /// Of a thread: its `process`, `pid` and `thread`, and `tid` where threads are told apart.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Its kernel frames where it woke the thread, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<String>,
    /// Its user frames, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<String>,
}

/// What woke a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WokenBy {
    /// Nothing has: the wait goes on, or went on when the span ended.
    #[default]
    Nobody,
    /// A thread.
    Thread,
    /// An interrupt, e.g. of a timer, or a softirq on its stack, e.g. one that hands packets over.
    Interrupt,
    /// It was not seen.
    Unseen,
}

impl WokenBy {
    /// The frame that stands for it; `None` for threads, which have their own.
    pub fn frame(self) -> Option<&'static str> {
        match self {
            WokenBy::Nobody => Some("[not woken yet]"),
            WokenBy::Thread => None,
            WokenBy::Interrupt => Some("[interrupt]"),
            WokenBy::Unseen => Some("[waker not seen]"),
        }
    }
}

impl Waker {
    /// What its stack ends with: the thread's name, or what else it was.
    pub fn name(&self) -> &str {
        self.by.frame().or_else(|| self.labels.get("thread").map(String::as_str)).unwrap_or("?")
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}
