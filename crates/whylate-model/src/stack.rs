// SPDX-License-Identifier: MIT OR Apache-2.0
//! Call stacks with their observed weight.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde::{Deserialize, Serialize};

use crate::holders::Chain;
use crate::object::Object;
use crate::wait::Wait;
use crate::{Histogram, Labels};

/// One distinct call stack of a thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Stack {
    /// Owner of the stack, e.g. `process` and `thread`.
    pub labels: Labels,
    /// The scheduler state in `ps` letters, e.g. `S`; empty where it does not apply.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub state: String,
    /// Number of samples.
    pub samples: u64,
    /// Time that the stack stands for, in nanoseconds.
    pub weight_ns: u64,
    /// Number of separate waits in the samples, if known.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub waits: u64,
    /// Reason of the wait, if the source reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<Wait>,
    /// Age of the waits still in progress at the end of the span.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub age: Histogram,
    /// Kernel frames, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<String>,
    /// User frames, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<String>,
    /// Waker that ended the waits, if enabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waker: Option<Waker>,
    /// Holders that the thread waits for at the end of the span, if enabled and known to the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<Chain>,
    /// What the thread waits for at the end of the span, if enabled and known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<Object>,
}

impl Stack {
    /// Returns whether both are of equal threads, stacks, waits and wakers: over time these are merged.
    pub fn is_same_place(&self, other: &Stack) -> bool {
        self.labels == other.labels
            && self.state == other.state
            && self.wait == other.wait
            && self.kernel == other.kernel
            && self.user == other.user
            && self.waker == other.waker
    }

    /// Returns a hash of what [`Stack::is_same_place`] compares, stable within one run of the program.
    pub fn place_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.labels, &self.state, &self.kernel, &self.user).hash(&mut hasher);
        if let Some(waker) = &self.waker {
            (&waker.labels, &waker.kernel, &waker.user).hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// Waker of a thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Waker {
    /// Kind of the waker.
    pub by: WokenBy,
    /// For a thread, its `process`, `pid` and `thread`, and `tid` if threads are distinguished.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Kernel frames of the waker at the wakeup, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<String>,
    /// User frames of the waker, innermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<String>,
}

/// Kind of a waker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum WokenBy {
    /// No waker yet: the wait is in progress, or was at the end of the span.
    #[default]
    #[serde(rename = "nobody")]
    NotYet,
    /// A thread.
    Thread,
    /// An interrupt, e.g. of a timer, or a softirq on its stack, e.g. network receive.
    Interrupt,
    /// The wakeup was not seen.
    Unseen,
}

impl WokenBy {
    /// Returns the frame that stands for the waker; `None` for threads, which have their own frames.
    pub fn frame(self) -> Option<&'static str> {
        match self {
            WokenBy::NotYet => Some("[not woken yet]"),
            WokenBy::Thread => None,
            WokenBy::Interrupt => Some("[interrupt]"),
            WokenBy::Unseen => Some("[waker not seen]"),
        }
    }
}

impl Waker {
    /// Returns the outermost frame: the thread's name, or the kind of waker.
    pub fn name(&self) -> &str {
        self.by.frame().or_else(|| self.labels.get("thread").map(String::as_str)).unwrap_or("?")
    }
}
