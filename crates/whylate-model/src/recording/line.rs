// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines of a recording.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::credible::is_credible;
use crate::Snapshot;
use crate::units::rfc3339;

/// Version of the container and of the lines other than snapshots.
pub const FORMAT: u32 = 1;

/// A line of a recording. A snapshot has no `line` field: it is written as by `--json`.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// The first line.
    Header(Header),
    /// A snapshot of one source.
    Snapshot(Box<Snapshot>),
    /// Events that the CPU account, shared by several sources, has lost since the previous such line.
    Account(Account),
    /// One instant on each clock.
    Clock(Clock),
    /// A span with nothing or not everything recorded.
    Gap(Gap),
    /// Reason why a flight recorder wrote the file.
    Kept(Kept),
    /// Last line of a finished recording.
    End(End),
    /// A line of a kind unknown to this version.
    Other,
}

/// Description of the recording: its contents, machine and backends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Header {
    /// Version of the recording format, [`FORMAT`].
    pub recording: u32,
    /// Version of the snapshots, [`crate::snapshot::SCHEMA`].
    pub schema: u32,
    /// Version of whylate.
    #[serde(default)]
    pub whylate: String,
    /// Start of the recording, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub start_unix_ns: u64,
    /// Host name of the machine.
    #[serde(default)]
    pub host: String,
    /// Kernel release, as of uname(1).
    #[serde(default)]
    pub kernel: String,
    /// The kernel's boot ID: CLOCK_MONOTONIC of two recordings is comparable only if it is equal.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// Number of online CPUs.
    #[serde(default)]
    pub cpus: u32,
    /// Inode of the PID namespace of all TIDs and PIDs; `None` for the initial one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u32>,
    /// Time zone of the machine, e.g. `Europe/Berlin`; empty if its name is unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub time_zone: String,
    /// Sources that measure.
    #[serde(default)]
    pub sources: Vec<Measured>,
    /// Sources that cannot measure, with reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unmeasured: Vec<Unmeasured>,
    /// Sources with limitations here, with reasons.
    #[serde(default, rename = "weaker", skip_serializing_if = "Vec::is_empty")]
    pub limitations: Vec<Unmeasured>,
    /// Time between snapshots; `None` where a command decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ns: Option<u64>,
}

/// A source that measures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Measured {
    /// Name of the source.
    pub source: String,
    /// Backend that it measures with.
    pub backend: String,
    /// Threshold of recorded late events; `None` if none are recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late_from_ns: Option<u64>,
    /// Reason why there was nothing to measure at the start, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nothing: Option<String>,
}

/// A source that did not measure, or with limitations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Unmeasured {
    /// The source's name.
    pub source: String,
    /// Reason.
    pub reason: String,
    /// The source measures, but not on all CPUs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves_cpus_out: bool,
}

impl Unmeasured {
    /// Creates a note on a source that did not measure for this reason, or measures with this limitation.
    pub fn new(source: impl Into<String>, reason: impl Into<String>) -> Self {
        Unmeasured { source: source.into(), reason: reason.into(), leaves_cpus_out: false }
    }

    /// Returns whether the source measures, but not on all CPUs. Older recordings have only the text.
    pub fn is_about_cpus(&self) -> bool {
        self.leaves_cpus_out || self.reason.contains(" left out: ")
    }
}

/// Events that the shared CPU account has lost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Account {
    /// Time at which the counters were read.
    #[serde(rename = "at", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub at_unix_ns: u64,
    /// Lost events by reason.
    pub lost: BTreeMap<String, u64>,
}

/// One instant on three clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Clock {
    /// CLOCK_REALTIME.
    #[serde(rename = "at", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub at_unix_ns: u64,
    /// CLOCK_MONOTONIC, which other traces of the machine use.
    pub monotonic_ns: u64,
    /// CLOCK_BOOTTIME, which includes suspend.
    pub boottime_ns: u64,
}

/// A gap in the recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Gap {
    /// Start of the gap.
    #[serde(rename = "start", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub start_unix_ns: u64,
    /// Length of the gap; 0 if only single events are missing.
    pub duration_ns: u64,
    /// Reason: `suspended`, `clock_set`, `overload`, `slow_screen`, `disk_full`, `write_failed`, `late_events`.
    pub reason: String,
    /// Number of missing snapshots or events, if known.
    #[serde(default)]
    pub count: u64,
}

/// Reason why a flight recorder wrote the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Kept {
    /// Time at which the reason was seen.
    #[serde(rename = "at", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub at_unix_ns: u64,
    /// Kind of reason: `late`, `pressure`, `signal`, `request`.
    pub reason: String,
    /// What was seen, e.g. `cpu.some 35 % over 2 s`; empty for a signal or a request.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// End of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct End {
    /// Time of the end.
    #[serde(rename = "at", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub at_unix_ns: u64,
}

/// A line with its kind, which comes first.
#[derive(Serialize)]
struct Tagged<'a, T> {
    line: &'static str,
    #[serde(flatten)]
    of: &'a T,
}

#[derive(Deserialize)]
struct Kind {
    line: Option<String>,
}

impl Serialize for Line {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Line::Header(of) => Tagged { line: "header", of }.serialize(serializer),
            Line::Snapshot(snapshot) => snapshot.serialize(serializer),
            Line::Account(of) => Tagged { line: "account", of }.serialize(serializer),
            Line::Clock(of) => Tagged { line: "clock", of }.serialize(serializer),
            Line::Gap(of) => Tagged { line: "gap", of }.serialize(serializer),
            Line::Kept(of) => Tagged { line: "kept", of }.serialize(serializer),
            Line::End(of) => Tagged { line: "end", of }.serialize(serializer),
            Line::Other => serializer.serialize_unit(),
        }
    }
}

impl Line {
    /// Parses a line. Unknown fields are ignored.
    ///
    /// # Errors
    /// Fails if the text is not JSON, or not a line of a recording.
    pub fn parse(text: &[u8]) -> Result<Line, serde_json::Error> {
        // Whylate writes the kind of a line first.
        if !text.starts_with(b"{\"line\"") && text.starts_with(b"{\"schema\"") {
            return Line::snapshot(text);
        }
        Ok(match serde_json::from_slice::<Kind>(text)?.line.as_deref() {
            None => Line::snapshot(text)?,
            Some("header") => Line::Header(serde_json::from_slice(text)?),
            Some("account") => Line::Account(serde_json::from_slice(text)?),
            Some("clock") => Line::Clock(serde_json::from_slice(text)?),
            Some("gap") => Line::Gap(serde_json::from_slice(text)?),
            Some("kept") => Line::Kept(serde_json::from_slice(text)?),
            Some("end") => Line::End(serde_json::from_slice(text)?),
            Some(_) => Line::Other,
        })
    }

    fn snapshot(text: &[u8]) -> Result<Line, serde_json::Error> {
        let snapshot: Snapshot = serde_json::from_slice(text)?;
        match is_credible(&snapshot) {
            true => Ok(Line::Snapshot(Box::new(snapshot))),
            false => Err(serde::de::Error::custom("no stack or path is that deep")),
        }
    }

    /// Returns the span that the line covers, in nanoseconds since 1970; `None` for a line without a time.
    pub fn span_unix_ns(&self) -> Option<(u64, u64)> {
        let instant = |at_ns| Some((at_ns, at_ns));
        match self {
            Line::Header(header) => instant(header.start_unix_ns),
            Line::Snapshot(snapshot) => {
                Some((snapshot.start_unix_ns, snapshot.start_unix_ns.saturating_add(snapshot.duration_ns)))
            }
            Line::Account(account) => instant(account.at_unix_ns),
            Line::Clock(clock) => instant(clock.at_unix_ns),
            Line::Gap(gap) => Some((gap.start_unix_ns, gap.start_unix_ns.saturating_add(gap.duration_ns))),
            Line::Kept(kept) => instant(kept.at_unix_ns),
            Line::End(end) => instant(end.at_unix_ns),
            Line::Other => None,
        }
    }
}
