// SPDX-License-Identifier: MIT OR Apache-2.0
//! A late event: a latency over the user's threshold.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::blame::Evidence;
use crate::path::PathSegment;
use crate::{Cause, Labels};

/// A wait longer than the user's threshold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(remote = "Self")]
pub struct LateEvent {
    /// Kind of the event; not in JSON, where it follows from the path and the label [`SLEEPER`].
    #[serde(skip)]
    pub kind: LateKind,
    /// Subject of the event: `ext4_end_io_rsv_work`, `CPU 3`, `postgres:4711`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// Labels of the waiter, e.g. `handler` and `workqueue`, and of its requester.
    pub labels: Labels,
    /// End of the wait, in nanoseconds since 1970 (UTC).
    #[serde(rename = "at", with = "crate::units::rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub at_unix_ns: u64,
    /// End of the wait on CLOCK_MONOTONIC of the measuring machine, which cannot be set; not in JSON, where it has no
    /// meaning.
    #[serde(skip)]
    pub at_ns: u64,
    /// Latency in nanoseconds.
    pub latency_ns: u64,
    /// Upper bound of the latency, if `latency_ns` is a lower bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most_ns: Option<u64>,
    /// CPU on which the wait ended.
    pub cpu: u32,
    /// The named parts of the wait in order; they add up to `latency_ns`. Empty where the source has no parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<(String, u64)>,
    /// Kernel stack of the thread that requested the work, innermost first; empty unless requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// Kernel stack sampled during the wait, innermost first, if the source can sample it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inside: Vec<String>,
    /// Causes of the wait, which add up to `latency_ns`. Empty unless `--why` asks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    /// The wait in order of time, along its wakers: the segments add up to `latency_ns` as well, and `causes` are their
    /// sums. Empty if the source follows no paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<PathSegment>,
    /// Evidence from which the causes were derived; only if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Box<Evidence>>,
}

/// Kind of a late event, by what the time was spent with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LateKind {
    /// A latency of the source's subject, such as a work item, an interrupt, or a thread that waits for a CPU.
    #[default]
    Latency,
    /// A thread was blocked until another actor woke it.
    BlockedWait,
    /// A thread was blocked because another thread slept, or waited with a timeout; possibly by design.
    TimerWait,
}

impl Serialize for LateEvent {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        LateEvent::serialize(self, to)
    }
}

impl<'de> Deserialize<'de> for LateEvent {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let event = LateEvent::deserialize(from)?;
        let kind = match event.labels.contains_key(SLEEPER) {
            true => LateKind::TimerWait,
            false if event.path.is_empty() => LateKind::Latency,
            false => LateKind::BlockedWait,
        };
        Ok(LateEvent { kind, ..event })
    }
}

impl LateEvent {
    /// Returns a label's value; an empty text without the label.
    pub fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }

    /// Returns the duration of a phase, in nanoseconds.
    pub fn phase_ns(&self, name: &str) -> Option<u64> {
        self.phases.iter().find(|(phase, _)| phase == name).map(|&(_, ns)| ns)
    }
}

/// Thresholds of the late events that are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thresholds {
    /// Events of this latency and longer are shown, in nanoseconds.
    pub show_ns: Option<u64>,
    /// Events of this latency and longer are shown with their causes, in nanoseconds.
    pub explain_ns: Option<u64>,
    /// Only this number of events with causes is shown, the longest.
    pub worst: Option<usize>,
}

impl Thresholds {
    /// Returns the lower of both latencies; `None` if the source chooses.
    pub fn min_ns(self) -> Option<u64> {
        self.show_ns.into_iter().chain(self.explain_ns).min()
    }

    /// Drops the event if it is below both latencies, and its causes if it is below `explain_ns`.
    pub fn apply(self, mut event: LateEvent) -> Option<LateEvent> {
        let Some(from_ns) = self.min_ns() else { return Some(event) };
        if event.latency_ns < from_ns {
            return None;
        }
        if self.explain_ns.is_none_or(|explain_ns| event.latency_ns < explain_ns) {
            (event.causes, event.path) = (Vec::new(), Vec::new());
        }
        Some(event)
    }
}

/// Label: role of a thread in the kernel, whatever its `comm` is; most threads have none.
pub const ROLE: &str = "role";
/// Label of a long wait that is not late because another thread slept or waited with a timeout, possibly by design:
/// that thread.
pub const SLEEPER: &str = "sleeper";
/// Label: cgroup of the thread that was late.
pub const CGROUP: &str = "cgroup";
/// [`ROLE`] of a workqueue worker; with the label `handler` if it executes an item.
pub const WORKER: &str = "worker";
/// [`ROLE`] of an io_uring submission thread.
pub const SUBMISSION_THREAD: &str = "submission_thread";

/// Returns the subject of an event in which an interrupt or timer of a CPU was late.
pub fn cpu_subject(cpu: u32) -> String {
    format!("CPU {cpu}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::PathSegment;

    #[test]
    fn kind_is_read_from_recording_and_survives_loss_of_path() {
        let sleeper = [(SLEEPER.to_owned(), "sleep:7".to_owned())].into();
        let waits = LateEvent { path: vec![PathSegment::default()], latency_ns: 9, ..LateEvent::default() };
        let events = [LateEvent::default(), waits, LateEvent { labels: sleeper, ..LateEvent::default() }];
        let kinds = events.map(|event| {
            let text = serde_json::to_string(&event).expect("it is written");
            let read: LateEvent = serde_json::from_str(&text).expect("it is read");
            let shown =
                Thresholds { show_ns: Some(0), ..Thresholds::default() }.apply(read).expect("it is over the limit");
            assert!(shown.path.is_empty());
            shown.kind
        });
        assert_eq!(kinds, [LateKind::Latency, LateKind::BlockedWait, LateKind::TimerWait]);
    }
}
