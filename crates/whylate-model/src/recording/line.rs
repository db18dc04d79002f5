// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lines of a recording.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::credible::is_credible;
use crate::Snapshot;
use crate::look::Unmeasured;
use crate::units::rfc3339;

/// The version of the container and of the lines that are no snapshots.
pub const FORMAT: u32 = 1;

/// What a recording is made of. A snapshot has no `line`, so that its line is that of `--json`.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// The first line.
    Header(Header),
    /// What a source saw.
    Snapshot(Box<Snapshot>),
    /// What the account of the CPUs, which several sources share, has lost since the previous such line.
    Account(Account),
    /// What time it was, by each clock.
    Clock(Clock),
    /// A time of which nothing is recorded, or not all.
    Gap(Gap),
    /// The last line of a recording that was ended.
    End(End),
    /// Of a kind that this version does not know.
    Other,
}

/// What is recorded, where, and how.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub recording: u32,
    /// That of the snapshots, [`crate::snapshot::SCHEMA`].
    pub schema: u32,
    /// The version of the program.
    #[serde(default)]
    pub whylate: String,
    /// When the recording began, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "rfc3339")]
    pub start_unix_ns: u64,
    /// The machine's host name.
    #[serde(default)]
    pub host: String,
    /// The kernel's release, as uname(1) tells it.
    #[serde(default)]
    pub kernel: String,
    /// The kernel's random number for this boot: CLOCK_MONOTONIC of two recordings compares only where it is the same.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// How many CPUs were online.
    #[serde(default)]
    pub cpus: u32,
    /// The PID namespace whose numbers threads have, by its inode; `None` where it is the machine's first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u32>,
    /// The machine's time zone, e.g. `Europe/Berlin`; empty where it is not known by a name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub time_zone: String,
    /// What measures.
    #[serde(default)]
    pub sources: Vec<Measured>,
    /// What cannot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unmeasured: Vec<Unmeasured>,
    /// What is told less well than it could be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weaker: Vec<Unmeasured>,
    /// From one snapshot to the next; `None` where a command decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ns: Option<u64>,
}

/// A source that measures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Its name.
    pub source: String,
    /// How it measures.
    pub backend: String,
    /// From where on late events are recorded; `None` where none are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late_from_ns: Option<u64>,
    /// Why there was nothing to measure when it began, if there was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nothing: Option<String>,
}

/// What the shared account has lost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// When it was asked.
    #[serde(rename = "at", with = "rfc3339")]
    pub at_unix_ns: u64,
    /// Events by reason.
    pub lost: BTreeMap<String, u64>,
}

/// One moment on three clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// CLOCK_REALTIME.
    #[serde(rename = "at", with = "rfc3339")]
    pub at_unix_ns: u64,
    /// CLOCK_MONOTONIC, on which other traces of the machine are.
    pub monotonic_ns: u64,
    /// CLOCK_BOOTTIME, which goes on while the machine is suspended.
    pub boottime_ns: u64,
}

/// What is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// When it began.
    #[serde(rename = "start", with = "rfc3339")]
    pub start_unix_ns: u64,
    /// How long it was; 0 where only single events are missing.
    pub duration_ns: u64,
    /// Why: `suspended`, `clock_set`, `overload`, `slow_screen`, `disk_full`, `write_failed`, `late_events`.
    pub reason: String,
    /// How many snapshots or events are missing, where that is known.
    #[serde(default)]
    pub count: u64,
}

/// How it ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// When.
    #[serde(rename = "at", with = "rfc3339")]
    pub at_unix_ns: u64,
}

/// What tells the kinds apart; it comes first.
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
            Line::End(of) => Tagged { line: "end", of }.serialize(serializer),
            Line::Other => serializer.serialize_unit(),
        }
    }
}

impl Line {
    /// Reads a line. Fields that are not known are ignored.
    ///
    /// # Errors
    /// When it is no JSON, or no line of a recording.
    pub fn parse(text: &[u8]) -> Result<Line, serde_json::Error> {
        // As it is written, a line that is no snapshot says so first.
        if !text.starts_with(b"{\"line\"") && text.starts_with(b"{\"schema\"") {
            return Line::snapshot(text);
        }
        Ok(match serde_json::from_slice::<Kind>(text)?.line.as_deref() {
            None => Line::snapshot(text)?,
            Some("header") => Line::Header(serde_json::from_slice(text)?),
            Some("account") => Line::Account(serde_json::from_slice(text)?),
            Some("clock") => Line::Clock(serde_json::from_slice(text)?),
            Some("gap") => Line::Gap(serde_json::from_slice(text)?),
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

    /// When what it tells of began and ended, in nanoseconds since 1970; `None` for what has no time.
    pub fn span_unix_ns(&self) -> Option<(u64, u64)> {
        let moment = |at_ns| Some((at_ns, at_ns));
        match self {
            Line::Header(header) => moment(header.start_unix_ns),
            Line::Snapshot(snapshot) => {
                Some((snapshot.start_unix_ns, snapshot.start_unix_ns.saturating_add(snapshot.duration_ns)))
            }
            Line::Account(account) => moment(account.at_unix_ns),
            Line::Clock(clock) => moment(clock.at_unix_ns),
            Line::Gap(gap) => Some((gap.start_unix_ns, gap.start_unix_ns.saturating_add(gap.duration_ns))),
            Line::End(end) => moment(end.at_unix_ns),
            Line::Other => None,
        }
    }
}
