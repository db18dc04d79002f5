// SPDX-License-Identifier: MIT OR Apache-2.0
//! A synthetic recording of more culprits than an exporter shows, each in a container.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use whylate_model::late::CGROUP;
use whylate_model::recording::{End, FORMAT, Frame, Header, Line, Measured};
use whylate_model::snapshot::SCHEMA;
use whylate_model::{ActorName, Cause, CauseKind, Cgroup, LateEvent, Snapshot};

const MS: u64 = 1_000_000;
const TICK_NS: u64 = 1_000 * MS;
/// Number of ticks of a second.
pub const TICKS: u64 = 16;
/// Number of culprits. An exporter shows 100 of them at a time.
pub const CULPRITS: u64 = 150;
/// 2026-11-26T10:00:00Z.
const START_NS: u64 = 1_795_687_200_000 * MS;

/// Returns the ID of a culprit's container.
pub fn container(culprit: u64) -> String {
    format!("{culprit:064x}")
}

/// Returns the cgroup of a culprit's container.
pub fn cgroup(culprit: u64) -> String {
    format!("/kubepods/burstable/pod{culprit}/{}", container(culprit))
}

/// Returns the delay that a culprit causes in a tick. Those that cause most are others in each tick, and some never are.
fn cost_ns(culprit: u64, tick: u64) -> u64 {
    let is_heavy = (culprit + CULPRITS * tick - 30 * tick) % CULPRITS < 20;
    if is_heavy { 220 * MS } else { 21 * MS }
}

/// Returns the delay of the whole recording in seconds.
pub fn total_seconds() -> f64 {
    (0..TICKS).flat_map(|tick| (0..CULPRITS).map(move |culprit| cost_ns(culprit, tick))).sum::<u64>() as f64 / 1e9
}

fn tick(number: u64) -> Snapshot {
    let mut snapshot = Snapshot::new("offcpu", "made", "web1", START_NS + number * TICK_NS);
    snapshot.duration_ns = TICK_NS;
    let late = (0..CULPRITS).map(|culprit| {
        let ns = cost_ns(culprit, number);
        // The number is a part of the name, and not one of a pool.
        let who = ActorName::thread(format!("culprit{culprit}"), 5_000 + culprit as u32);
        let of = Cause { cgroup: Some(Cgroup::new(&cgroup(culprit))), ..Cause::new(CauseKind::Thread, who, ns) };
        LateEvent {
            subject: "victim:7".to_owned(),
            labels: [(CGROUP.to_owned(), cgroup((culprit + 1) % CULPRITS))].into(),
            at_unix_ns: snapshot.start_unix_ns + 500 * MS,
            latency_ns: ns,
            causes: vec![of],
            ..LateEvent::default()
        }
    });
    snapshot.late = late.collect();
    snapshot
}

/// Writes the recording.
pub fn recording(directory: &Path) -> Result<PathBuf> {
    let measured = Measured { source: "offcpu".to_owned(), backend: "made".to_owned(), ..Measured::default() };
    let header = Header {
        recording: FORMAT,
        schema: SCHEMA,
        start_unix_ns: START_NS,
        host: "web1".to_owned(),
        sources: vec![measured],
        ..Header::default()
    };
    let ticks = (0..TICKS).map(|number| Line::Snapshot(Box::new(tick(number))));
    let end = Line::End(End { at_unix_ns: START_NS + TICKS * TICK_NS });
    let mut bytes = Vec::new();
    for line in std::iter::once(Line::Header(header)).chain(ticks).chain([end]) {
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        let mut frame = Frame::new()?;
        frame.add(&text, line.span_unix_ns())?;
        let (compressed, index) = frame.finish()?;
        bytes.extend(index.to_bytes());
        bytes.extend(compressed);
    }
    let path = directory.join("crowd.whylate");
    fs::write(&path, bytes)?;
    Ok(path)
}
