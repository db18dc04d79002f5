// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recognizes whylate's own threads by their names.

use crate::ActorName;

/// Names of the threads that measure.
const MEASURING: [&str; 19] = [
    "whylate",
    "whylate-loads",
    "whylate-locks",
    "whylate-maxima",
    "whylate-measure",
    "whylate-network",
    "whylate-objects",
    "whylate-offcpu",
    "whylate-perfmap",
    "whylate-profile",
    "whylate-reads",
    "whylate-record",
    "whylate-replay",
    "whylate-run",
    "whylate-serve",
    "whylate-waits",
    "heartbeats",
    "heartbeat-cost",
    "sq-samples",
];
/// Beginnings of the names of threads that measure timers, before the number of their CPU.
const MEASURING_TIMERS: [&str; 2] = ["timerlat/", "timerlatu/"];
/// Beginning of the names of all other threads: those of `whylate inject`.
const INJECTED: &str = "whylate-";

/// Activity of a thread of whylate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// The thread measures: what it delays is the cost of measuring.
    Measures,
    /// The thread delays others on purpose (`whylate inject`), as a program of the user would.
    Injects,
}

/// Returns what a thread of this `comm` does; `None` if it is not one of whylate's.
pub fn own(comm: &str) -> Option<Own> {
    // A normalized name has `*` instead of the CPU.
    let is_cpu = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'*');
    let measures_timers = || MEASURING_TIMERS.iter().any(|beginning| comm.strip_prefix(beginning).is_some_and(is_cpu));
    match comm {
        _ if MEASURING.contains(&comm) || measures_timers() => Some(Own::Measures),
        _ if comm.starts_with(INJECTED) => Some(Own::Injects),
        _ => None,
    }
}

impl ActorName {
    /// Returns whether the actor is a thread of whylate that measures. What the user injects is not.
    pub fn is_own(&self) -> bool {
        self.is_thread() && self.comm().and_then(own) == Some(Own::Measures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn injected_threads_do_not_measure() {
        let measuring = ["whylate", "whylate-record", "sq-samples", "timerlat/1", "timerlatu/12", "timerlat/*"];
        assert!(measuring.iter().all(|comm| own(comm) == Some(Own::Measures)));
        assert!(["whylate-hog", "whylate-irqsoff", "whylate-load"].iter().all(|comm| own(comm) == Some(Own::Injects)));
        assert!(["whylater", "timerlat/a", "dd", ""].iter().all(|comm| own(comm).is_none()));
    }

    #[test]
    fn own_is_the_thread_and_not_what_it_uses() {
        let is_own = |who: &str| who.parse::<ActorName>().expect("any text").is_own();
        assert!(is_own("whylate:938") && ActorName::program("whylate").is_own());
        assert!(ActorName::thread("timerlat/1", 7).alike().is_own());
        assert!(!is_own("whylate-hog:7") && !is_own("vda (write by whylate:938)") && !is_own("whylate"));
    }
}
