// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kinds of stops, which keep a thread stopped whatever it was doing.

use serde::{Deserialize, Serialize};

/// Kind of a stop. A stopped thread neither waits for what it was doing nor sleeps voluntarily.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// SIGSTOP, SIGTSTP, SIGTTIN or SIGTTOU, until SIGCONT.
    Signal,
    /// A debugger or a tracer (`ptrace`).
    Tracer,
    /// The freezer, of its cgroup or of a suspended system.
    Freezer,
}

impl Stop {
    /// Describes the state of the thread in words.
    pub fn words(self) -> &'static str {
        match self {
            Stop::Signal => "stopped by a signal",
            Stop::Tracer => "stopped by a tracer",
            Stop::Freezer => "frozen",
        }
    }

    /// Returns the culprit where no thread is known that stopped or resumed it.
    pub fn who(self) -> &'static str {
        match self {
            Stop::Signal => "signal",
            Stop::Tracer => "tracer",
            Stop::Freezer => "freezer",
        }
    }
}
