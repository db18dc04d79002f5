// SPDX-License-Identifier: MIT OR Apache-2.0
//! A synthetic, deterministic recording of all sources, of any length: each second differs.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use whylate_model::histogram::fine_bucket_of;
use whylate_model::object::{Object, ObjectKind};
use whylate_model::path::PathSegment;
use whylate_model::programs::{HeldUpBy, HeldUpPart, HeldUpProgram, Programs};
use whylate_model::recording::{Account, End, FORMAT, Frame, Header, Line, Measured};
use whylate_model::snapshot::SCHEMA;
use whylate_model::sources::CARDS;
use whylate_model::wait::Wait;
use whylate_model::{
    ActorName, Cause, CauseKind, Cgroup, Histogram, Labels, LateEvent, Series, Snapshot, Stack, WaitClass,
};

pub const MS: u64 = 1_000_000;
pub const SECOND_NS: u64 = 1_000 * MS;
/// 2026-11-26T10:00:00Z.
pub const START_NS: u64 = 1_795_687_200 * SECOND_NS;
pub const CULPRIT: &str = "hog:4242";
/// Hostile names: markup, bidirectional overrides, a program opener, and very long names.
pub const EVIL: [&str; 4] = [
    "</script><img src=x onerror=\"document.title='owned'\">",
    "abc\u{202e}gpj.exe\u{2066}\u{200f}\u{1b}[2J",
    "javascript:document.title='owned'",
    "<!--<script>'\"><svg/onload=document.title=`owned`>&lt;",
];

/// Appended to each hostile name: bidirectional marks, a zero-width space, a tag, control characters and a line end.
pub const MARKS: &str = "\u{202e}\u{2066}\u{200b}\u{e0041}\u{9b}31m\u{1b}[31m\u{2028}\n";

/// Names of things in the recording.
pub struct NameSet {
    is_evil: bool,
}

impl NameSet {
    fn of(&self, plain: &str, number: usize) -> String {
        match self.is_evil {
            false => plain.to_owned(),
            true if number % 5 == 4 => "x".repeat(4_096),
            true => format!("{}{MARKS}{plain}", EVIL[number % 5]),
        }
    }

    fn name(&self, plain: &str, number: usize) -> ActorName {
        self.of(plain, number).parse().expect("any text")
    }

    fn labels(&self, of: &[(&str, &str)]) -> Labels {
        of.iter().zip(0..).map(|(&(name, value), number)| (name.to_owned(), self.of(value, number))).collect()
    }
}

fn latencies(second: u64, scale_ns: u64, count: u64) -> Histogram {
    (0..count).map(|number| scale_ns * (1 + (number * 37 + second * 11) % 90)).collect()
}

/// Returns a histogram of the fine layout, as `timerlat` uses it.
fn fine(second: u64, scale_ns: u64, count: u64) -> Histogram {
    let mut values: Vec<u64> =
        (0..count).map(|number| scale_ns * (1 + (number * 37 + second * 11) % 90) + number * 997).collect();
    values.sort_unstable();
    let mut buckets: Vec<(u32, u64)> = Vec::new();
    for &ns in &values {
        let bucket = fine_bucket_of(ns) as u32;
        match buckets.last_mut() {
            Some((last, count)) if *last == bucket => *count += 1,
            _ => buckets.push((bucket, 1)),
        }
    }
    let (first, last) = (values.first().copied().unwrap_or(0), values.last().copied().unwrap_or(0));
    Histogram::from_fine_buckets(buckets, values.iter().sum(), first, last).unwrap_or_default()
}

fn series(labels: Labels, histograms: &[(&str, Histogram)], values: &[(&str, f64)]) -> Series {
    Series {
        labels,
        histograms: histograms.iter().map(|(name, of)| ((*name).to_owned(), of.clone())).collect(),
        values: values.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
        ..Series::default()
    }
}

fn late(subject: String, at_unix_ns: u64, causes: Vec<Cause>) -> LateEvent {
    let latency_ns = causes.iter().map(|cause| cause.ns).sum();
    LateEvent { subject, at_unix_ns, latency_ns, causes, ..LateEvent::default() }
}

fn fill(snapshot: &mut Snapshot, second: u64, names: &NameSet) {
    let at_ns = snapshot.start_unix_ns + 500 * MS;
    let cause = |kind, who: &str, number, ns| Cause::new(kind, names.name(who, number), ns);
    let stack = |frames: &str| -> Vec<String> {
        frames.split(' ').enumerate().map(|(number, frame)| names.of(frame, number)).collect()
    };
    match snapshot.source.as_str() {
        "wq" => {
            for (handler, scale_ns) in [("vmstat_update", 1_000), ("flush_to_ldisc", 90_000)] {
                let labels = names.labels(&[("handler", handler), ("workqueue", "events")]);
                let pool = latencies(second, scale_ns / 2, 7);
                snapshot.series.push(series(
                    labels,
                    &[("latency", latencies(second, scale_ns, 40)), ("pool", pool)],
                    &[("queued", (second % 3) as f64)],
                ));
            }
            if second % 5 == 2 {
                let causes = vec![
                    Cause {
                        stack: stack("console_unlock vprintk"),
                        ..cause(CauseKind::IrqsOff, "dd:7", 0, 3 * MS + second)
                    },
                    cause(CauseKind::Work, "wb_workfn", 1, 9 * MS),
                ];
                let mut event = late(names.of("vmstat_update", 0), at_ns, causes);
                event.labels = names.labels(&[("handler", "vmstat_update"), ("queued_by", "cron:9")]);
                event.phases = vec![("activate".to_owned(), MS), ("pool".to_owned(), event.latency_ns - MS)];
                event.stack = stack("queue_work_on process_one_work");
                snapshot.late.push(event);
            }
            snapshot.lost.insert("unmatched".to_owned(), second % 2);
        }
        "timerlat" => {
            for cpu in 0..2_u64 {
                let labels = [("cpu".to_owned(), cpu.to_string())].into();
                // Some are late, of which only a few are recorded as events.
                let of = fine(second + cpu, 60_000, 60);
                snapshot.series.push(series(
                    labels,
                    &[("irq", fine(second, 900, 60)), ("thread", of)],
                    &[("missed", 1.0)],
                ));
            }
            if second % 4 == 1 {
                let causes = vec![
                    cause(CauseKind::Thread, CULPRIT, 2, 6 * MS),
                    cause(CauseKind::Steal, "hypervisor", 3, second * 1_000 + 1),
                ];
                snapshot.late.push(LateEvent { cpu: 1, ..late("CPU 1".to_owned(), at_ns, causes) });
            }
        }
        "irqsoff" => {
            let labels = names.labels(&[("function", "console_unlock"), ("kind", "irqs_off")]);
            snapshot.series.push(series(
                labels.clone(),
                &[("length", latencies(second, 2_000, 5))],
                &[("share", 0.001 * (second % 7) as f64)],
            ));
            snapshot.stacks.push(Stack {
                labels,
                samples: 2,
                weight_ns: MS,
                kernel: stack("_raw_spin_unlock_irqrestore console_unlock"),
                ..Stack::default()
            });
        }
        "offcpu" => {
            threads(snapshot, second, names);
            snapshot.programs = programs(second, names);
        }
        "sqpoll" => {
            let labels = [
                ("process".to_owned(), names.of("app", 0)),
                ("pid".to_owned(), "77".to_owned()),
                ("tid".to_owned(), "78".to_owned()),
            ];
            let starved = if second.is_multiple_of(6) { 0.4 } else { 0.05 };
            let shares = [
                ("working", 0.2),
                ("spinning", 0.3),
                ("sleeping", 0.5 - starved),
                ("starved", starved),
                ("utilisation", 0.4),
                ("idle_ms", 100.0),
            ];
            // Comes and goes.
            if second % 7 > 1 {
                snapshot.series.push(series(labels.into(), &[], &shares));
            }
        }
        _ => {
            for (operation, scale_ns) in [("read", 80_000), ("write", 700_000)] {
                let labels = names.labels(&[("device", "vda"), ("operation", operation)]);
                snapshot.series.push(series(
                    labels,
                    &[("latency", latencies(second, scale_ns, 9))],
                    &[("bytes", 4096.0)],
                ));
            }
            let causes = vec![
                cause(CauseKind::DiskQueue, "fio:4332 (writes)", 3, 40 * MS),
                cause(CauseKind::Disk, "vda", 4, 12 * MS + second),
            ];
            snapshot.late.push(late(names.of("reads of vda", 3), at_ns + second, causes));
        }
    }
}

/// Share of an odd second for which a program is held up, in percent. Other seconds hold nothing up.
pub const HELD_UP_PERCENT: u64 = 80;

fn programs(second: u64, names: &NameSet) -> Programs {
    let ns = HELD_UP_PERCENT * SECOND_NS / 100;
    let part = HeldUpPart {
        by: HeldUpBy::Lock,
        via: Some("flock".to_owned()),
        object: Some(Object::with_path(ObjectKind::FileLock, names.of("/var/lib/app/lock", 2))),
        object_waits: 5,
        ns,
        latency: (0..20).map(|_| ns / 20).collect(),
        causes: vec![Cause::new(CauseKind::Running, names.name("indexer:812", 1), ns)],
    };
    let who = names.name("service:900", 0);
    let program = HeldUpProgram { who, lived_ns: SECOND_NS, parts: vec![part], ..HeldUpProgram::default() };
    let held_up = if second.is_multiple_of(2) { Vec::new() } else { vec![program] };
    Programs { covered_ns: SECOND_NS, held_up, ..Programs::default() }
}

fn threads(snapshot: &mut Snapshot, second: u64, names: &NameSet) {
    let frames = |of: &str| -> Vec<String> {
        of.split(' ').enumerate().map(|(number, frame)| names.of(frame, number)).collect()
    };
    let place = |process: &str, state: &str, class, kernel: &str, weight_ns, ages: &[u64]| Stack {
        labels: names.labels(&[("process", process), ("thread", process), ("pid", "4700")]),
        state: state.to_owned(),
        samples: 9,
        waits: 2,
        weight_ns,
        wait: Some(Wait { class, rule: "because".to_owned() }),
        age: ages.iter().copied().collect(),
        kernel: frames(kernel),
        user: frames("read serve main"),
        ..Stack::default()
    };
    let stuck: &[u64] = if second.is_multiple_of(3) { &[2 * SECOND_NS] } else { &[] };
    snapshot.stacks = vec![
        place("postgres", "S", WaitClass::Lock, "futex_wait do_futex", 600 * MS, &[]),
        place("postgres", "D", WaitClass::Disk, "io_schedule ext4_sync", 100 * MS * (1 + second % 3), stuck),
        place("cron", "S", WaitClass::Idle, "do_nanosleep", SECOND_NS, &[]),
        place("postgres", "R", WaitClass::OnCpu, "", 200 * MS, &[]),
    ];
    let at_ns = snapshot.start_unix_ns + 900 * MS;
    if second.is_multiple_of(3) {
        let segment = |ns, kind, who: &str, depth: u32| PathSegment {
            ns,
            kind,
            who: names.name(who, depth as usize + 1),
            via: (depth > 0).then(|| names.of("futex", 0)),
            waiter: (depth > 0).then(|| names.name(if depth > 1 { "writer:99" } else { "postgres:4711" }, 1)),
            stack: if depth > 1 { frames("io_schedule do_fsync") } else { Vec::new() },
            depth,
            ..PathSegment::default()
        };
        let path = vec![
            segment(80 * MS, CauseKind::Disk, "vda (write by writer:99)", 2),
            segment(40 * MS, CauseKind::Running, "writer:99", 1),
            segment(7 * MS + second, CauseKind::Thread, CULPRIT, 0),
        ];
        let causes = path.iter().map(|part| Cause::new(part.kind, part.who.clone(), part.ns)).collect();
        let mut event = late(names.of("postgres:4711", 1), at_ns, causes);
        event.labels =
            names.labels(&[("process", "postgres"), ("pid", "4700"), ("cgroup", "/db"), ("waited_in", "futex")]);
        event.stack = frames("futex_wait do_futex");
        event.path = path;
        snapshot.late.push(event);
    }
    if second.is_multiple_of(4) {
        let of = Cause {
            cgroup: Some(Cgroup::new(&names.of("/batch", 2))),
            ..Cause::new(CauseKind::Thread, names.of(CULPRIT, 2), 25 * MS)
        };
        let mut event = late(names.of("postgres:4711", 1), at_ns - 100 * MS, vec![of]);
        event.labels = names.labels(&[("process", "postgres"), ("pid", "4700")]);
        snapshot.late.push(event);
    }
}

/// Returns the lines of one second.
fn tick(second: u64, names: &NameSet) -> Vec<Line> {
    let mut lines = Vec::new();
    for (card, number) in CARDS.into_iter().zip(0..) {
        // Each source has its turn.
        let start_ns = START_NS + second * SECOND_NS + number * 3 * MS;
        let mut snapshot = Snapshot::new(card.name, "made", &names.of("web1", 0), start_ns);
        snapshot.duration_ns = SECOND_NS;
        fill(&mut snapshot, second, names);
        lines.push(Line::Snapshot(Box::new(snapshot)));
    }
    let at_unix_ns = START_NS + (second + 1) * SECOND_NS + 20 * MS;
    lines.push(Line::Account(Account { at_unix_ns, lost: [("occupancy_stacks".to_owned(), 1)].into() }));
    lines
}

/// Writes the recording.
pub fn recording(directory: &Path, seconds: u64, is_evil: bool) -> Result<PathBuf> {
    let names = NameSet { is_evil };
    let measured = |card: &whylate_model::Card| Measured {
        source: card.name.to_owned(),
        backend: names.of("made", 0),
        late_from_ns: Some(card.events().late_from_ns),
        nothing: None,
    };
    let header = Header {
        recording: FORMAT,
        schema: SCHEMA,
        whylate: "0.1.0".to_owned(),
        start_unix_ns: START_NS,
        host: names.of("web1", 0),
        kernel: names.of("6.12.1", 1),
        cpus: 2,
        time_zone: "Europe/Berlin".to_owned(),
        sources: CARDS.map(measured).into(),
        every_ns: Some(SECOND_NS),
        ..Header::default()
    };
    let end = Line::End(End { at_unix_ns: START_NS + seconds * SECOND_NS + SECOND_NS / 2 });
    let frames = std::iter::once(vec![Line::Header(header)])
        .chain((0..seconds).map(|second| tick(second, &names)))
        .chain(std::iter::once(vec![end]));
    let mut bytes = Vec::new();
    for lines in frames {
        let mut frame = Frame::new()?;
        for line in lines {
            let mut text = serde_json::to_vec(&line)?;
            text.push(b'\n');
            frame.add(&text, line.span_unix_ns())?;
        }
        let (compressed, index) = frame.finish()?;
        bytes.extend(index.to_bytes());
        bytes.extend(compressed);
    }
    let path = directory.join(if is_evil { "evil.whylate" } else { "web1.whylate" });
    fs::write(&path, bytes)?;
    Ok(path)
}
