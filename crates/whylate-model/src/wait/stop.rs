// SPDX-License-Identifier: MIT OR Apache-2.0
//! What keeps a thread from going on, whatever it does itself.

use serde::{Deserialize, Serialize};

/// What has stopped a thread: it does not wait for what it was doing, nor by choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// SIGSTOP, SIGTSTP, SIGTTIN or SIGTTOU; SIGCONT ends it.
    Signal,
    /// A debugger or a tracer (`ptrace`).
    Tracer,
    /// The freezer, of its cgroup or of a system that is suspended.
    Freezer,
}

impl Stop {
    /// What the thread is, in words.
    pub fn words(self) -> &'static str {
        match self {
            Stop::Signal => "stopped by a signal",
            Stop::Tracer => "stopped by a tracer",
            Stop::Freezer => "frozen",
        }
    }

    /// Who stopped it, where no thread is known that did or that let it go on.
    pub fn who(self) -> &'static str {
        match self {
            Stop::Signal => "signal",
            Stop::Tracer => "tracer",
            Stop::Freezer => "freezer",
        }
    }
}
