// SPDX-License-Identifier: MIT OR Apache-2.0
//! A synthetic recording of one second in each of two hours: needs neither root nor time.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use whylate_model::path::PathSegment;
use whylate_model::recording::{Account, Clock, End, FORMAT, Frame, Gap, Header, Kept, Line, Measured};
use whylate_model::snapshot::SCHEMA;
use whylate_model::{ActorName, Cause, CauseKind, Labels, LateEvent, Series, Snapshot, Stack};

pub const MS: u64 = 1_000_000;
pub const HOUR_NS: u64 = 3_600_000 * MS;
/// 2026-11-26T10:00:00Z.
pub const START_NS: u64 = 1_795_687_200_000 * MS;
/// CLOCK_BOOTTIME at that time, and the time that the machine had been suspended.
pub const BOOT_NS: u64 = 5_000_000 * MS;
pub const ASLEEP_NS: u64 = 77_000 * MS;
/// Offset from the start of each hour at which two overlapping waits ended.
pub const LATE_AT_NS: u64 = 600 * MS;
/// Total number of late events.
pub const LATE: usize = 8;
pub const CULPRIT: &str = "dd:4242";
/// A hostile thread name.
pub const EVIL: &str = "=cmd|'\u{1b}[2J\",x:7";

fn labels(of: &[(&str, &str)]) -> Labels {
    of.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn cause(kind: CauseKind, who: &str, ns: u64) -> Cause {
    Cause::new(kind, who.parse::<ActorName>().expect("any text"), ns)
}

/// Returns a snapshot of work items; in the second hour the items of `slow_work` take much longer.
fn items(hour: u64) -> Snapshot {
    let start_ns = START_NS + hour * HOUR_NS;
    let mut snapshot = Snapshot::new("wq", "made", "web1", start_ns);
    snapshot.duration_ns = 1_000 * MS;
    let series = |handler: &str, latencies_ns: Vec<u64>| Series {
        labels: labels(&[("handler", handler), ("workqueue", "events")]),
        histograms: [("latency".to_owned(), latencies_ns.into_iter().collect())].into(),
        values: [("queued".to_owned(), 2.0)].into(),
        ..Series::default()
    };
    let slow = (1..=250).map(|number| number * 7_919 * (1 + hour * 20)).collect();
    snapshot.series = vec![series("slow_work", slow), series("vmstat_update", (1..=100).map(|n| n * 1_000).collect())];
    let at_ns = start_ns + LATE_AT_NS;
    let late = |at_unix_ns, latency_ns, cpu, causes: Vec<Cause>| LateEvent {
        subject: "slow_work".to_owned(),
        labels: labels(&[("handler", "slow_work"), ("workqueue", "events")]),
        at_unix_ns,
        latency_ns,
        cpu,
        phases: vec![("queued".to_owned(), 10 * MS), ("waiting".to_owned(), latency_ns - 10 * MS)],
        stack: vec!["queue_work_on".to_owned(), "worker_thread".to_owned()],
        causes,
        ..LateEvent::default()
    };
    let first = vec![cause(CauseKind::Thread, CULPRIT, 25 * MS + hour), cause(CauseKind::IrqsOff, EVIL, 5 * MS - hour)];
    let second = vec![
        cause(CauseKind::Work, "other_work", 30 * MS),
        cause(CauseKind::Thread, "dd:4243", 9 * MS - 10),
        // Each has a thread.
        cause(CauseKind::DiskQueue, "fio:88 (writes)", 1),
        cause(CauseKind::Disk, "259:3 (read by fio:88)", 2),
        cause(CauseKind::Timer, "timeout in poll (curl:77)", 3),
        cause(CauseKind::Timer, "sleep:5823", 4),
        cause(CauseKind::Unknown, "not recorded", MS),
    ];
    snapshot.late = vec![late(at_ns, 30 * MS, 0, first), late(at_ns - 10 * MS, 40 * MS, 1, second)];
    snapshot.lost = [("unmatched".to_owned(), 3 * hour), ("evicted".to_owned(), 0)].into();
    snapshot
}

/// Returns a snapshot of threads, one of which waited for another.
fn threads(hour: u64) -> Snapshot {
    let start_ns = START_NS + hour * HOUR_NS;
    let mut snapshot = Snapshot::new("offcpu", "made", "web1", start_ns);
    snapshot.duration_ns = 1_000 * MS;
    snapshot.stacks = vec![Stack {
        labels: labels(&[("process", "postgres"), ("thread", "postgres"), ("pid", "4700")]),
        state: "S".to_owned(),
        samples: 9,
        weight_ns: 900 * MS,
        kernel: vec!["futex_wait".to_owned(), "do_futex".to_owned()],
        ..Stack::default()
    }];
    let segment = |ns, kind, who: &str, depth| PathSegment {
        ns,
        kind,
        who: who.parse().expect("any text"),
        via: (depth > 0).then(|| "futex".to_owned()),
        waiter: (depth > 0).then(|| ActorName::thread("postgres", 4711)),
        depth,
        ..PathSegment::default()
    };
    let path = vec![
        segment(50 * MS, CauseKind::Disk, "vda (write by writer:99)", 1),
        segment(150 * MS, CauseKind::Running, "writer:99", 1),
        segment(0, CauseKind::Wakeup, "writer:99", 1),
        segment(7 * MS, CauseKind::Thread, EVIL, 0),
    ];
    let causes =
        [1, 0, 3].map(|number: usize| Cause::new(path[number].kind, path[number].who.clone(), path[number].ns));
    let of_postgres = [("process", "postgres"), ("pid", "4700"), ("thread", "postgres"), ("tid", "4711")];
    let waited = LateEvent {
        subject: "postgres:4711".to_owned(),
        labels: labels(&of_postgres),
        at_unix_ns: start_ns + 900 * MS,
        latency_ns: 207 * MS,
        path: path.clone(),
        causes: causes.into(),
        ..LateEvent::default()
    };
    let ready = LateEvent {
        subject: "postgres:4711".to_owned(),
        labels: labels(&of_postgres),
        at_unix_ns: start_ns + 400 * MS,
        latency_ns: 22 * MS,
        causes: vec![cause(CauseKind::Thread, CULPRIT, 22 * MS)],
        ..LateEvent::default()
    };
    snapshot.late = vec![waited, ready];
    // The wait in the second hour was not followed: its causes have no positions.
    if hour == 1 {
        snapshot.late[0].path.clear();
    }
    snapshot
}

/// Moves a line in time.
fn shifted(line: Line, by_ns: u64) -> Line {
    match line {
        Line::Header(of) => Line::Header(Header { start_unix_ns: of.start_unix_ns + by_ns, ..of }),
        Line::Clock(of) => Line::Clock(Clock { at_unix_ns: of.at_unix_ns + by_ns, ..of }),
        Line::Account(of) => Line::Account(Account { at_unix_ns: of.at_unix_ns + by_ns, ..of }),
        Line::Gap(of) => Line::Gap(Gap { start_unix_ns: of.start_unix_ns + by_ns, ..of }),
        Line::Kept(of) => Line::Kept(Kept { at_unix_ns: of.at_unix_ns + by_ns, ..of }),
        Line::End(of) => Line::End(End { at_unix_ns: of.at_unix_ns + by_ns }),
        Line::Snapshot(mut of) => {
            of.start_unix_ns += by_ns;
            of.late.iter_mut().for_each(|event| event.at_unix_ns += by_ns);
            Line::Snapshot(of)
        }
        Line::Other => Line::Other,
    }
}

/// Writes the recording.
pub fn recording(directory: &Path) -> Result<PathBuf> {
    recording_of(directory, "web1", 0)
}

/// Writes the recording as that of another host, later by this time.
pub fn recording_of(directory: &Path, host: &str, later_ns: u64) -> Result<PathBuf> {
    let measured =
        |source: &str| Measured { source: source.to_owned(), backend: "made".to_owned(), ..Measured::default() };
    let header = Header {
        recording: FORMAT,
        schema: SCHEMA,
        whylate: "0.1.0".to_owned(),
        start_unix_ns: START_NS,
        host: host.to_owned(),
        boot_id: "a".to_owned(),
        cpus: 2,
        sources: vec![measured("wq"), measured("offcpu")],
        ..Header::default()
    };
    let clock = |after_ns| {
        let boottime_ns = BOOT_NS + after_ns;
        Line::Clock(Clock { at_unix_ns: START_NS + after_ns, monotonic_ns: boottime_ns - ASLEEP_NS, boottime_ns })
    };
    let of_hour = |hour: u64| {
        let at_unix_ns = START_NS + hour * HOUR_NS + 1_000 * MS;
        vec![
            Line::Snapshot(Box::new(items(hour))),
            Line::Snapshot(Box::new(threads(hour))),
            Line::Account(Account { at_unix_ns, lost: [("occupancy_stacks".to_owned(), 2)].into() }),
        ]
    };
    let gap = Gap {
        start_unix_ns: START_NS + HOUR_NS / 2,
        duration_ns: 5_000 * MS,
        reason: "suspended".to_owned(),
        count: 0,
    };
    let mut second = of_hour(1);
    second.insert(0, Line::Gap(gap));
    second.insert(0, clock(HOUR_NS / 2));
    let frames = [
        vec![Line::Header(header), clock(0)],
        of_hour(0),
        second,
        vec![Line::End(End { at_unix_ns: START_NS + HOUR_NS + 2_000 * MS })],
    ];
    let mut bytes = Vec::new();
    for lines in frames {
        let mut frame = Frame::new()?;
        for line in lines {
            let line = shifted(line, later_ns);
            let mut text = serde_json::to_vec(&line)?;
            text.push(b'\n');
            frame.add(&text, line.span_unix_ns())?;
        }
        let (compressed, index) = frame.finish()?;
        bytes.extend(index.to_bytes());
        bytes.extend(compressed);
    }
    let path = directory.join("web1.whylate");
    fs::write(&path, bytes)?;
    Ok(path)
}
