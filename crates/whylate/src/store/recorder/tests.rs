// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::BTreeMap;
use std::fs::{self, File};

use whylate_model::Snapshot;
use whylate_model::recording::Reader;

use super::*;
use crate::store::FileStore;

const SECOND_NS: u64 = 1_000_000_000;

/// A file of which some writes fail.
struct Flaky {
    file: FileStore,
    /// Calls so far, and which of them fail.
    calls: u32,
    fails: std::ops::Range<u32>,
    error: Errno,
}

impl Flaky {
    fn call(&mut self) -> io::Result<()> {
        self.calls += 1;
        if self.fails.contains(&self.calls) { Err(self.error.into()) } else { Ok(()) }
    }
}

impl Store for Flaky {
    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        self.call().and_then(|()| self.file.begin_frame(header))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = self.call() {
            // A full disk takes a part.
            self.file.write(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        self.file.write(bytes)
    }

    fn end_frame(&mut self, index: &Index) -> io::Result<()> {
        self.call().and_then(|()| self.file.end_frame(index))
    }

    fn discard_frame(&mut self) {
        self.file.discard_frame();
    }

    fn finish(&mut self) -> io::Result<()> {
        self.file.finish()
    }

    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.file.files()
    }
}

fn snapshot(number: u64) -> Snapshot {
    let mut snapshot = Snapshot::new("wq", "made", "host", number * SECOND_NS);
    snapshot.duration_ns = SECOND_NS;
    snapshot.lost = BTreeMap::from([("unmatched".to_owned(), number)]);
    snapshot
}

fn tick(number: u64) -> Tick {
    vec![Line::Snapshot(Box::new(snapshot(number)))]
}

fn lines(path: &std::path::Path) -> (Vec<Line>, bool) {
    let mut reader = Reader::new(File::open(path).expect("there")).expect("a recording");
    let mut lines = Vec::new();
    while let Some(line) = reader.next_line().expect("it is read") {
        lines.push(line);
    }
    (lines, reader.damage() == whylate_model::recording::Damage::default())
}

fn numbers(lines: &[Line]) -> Vec<u64> {
    let number = |line: &Line| match line {
        Line::Snapshot(snapshot) => Some(snapshot.lost["unmatched"]),
        _ => None,
    };
    lines.iter().filter_map(number).collect()
}

fn writer(store: impl Store + 'static) -> Writer {
    let header = Header { recording: 1, schema: 1, ..Header::default() };
    Writer { retry: Duration::ZERO, ..Writer::new(Box::new(store), header, Arc::default()) }
}

fn end(mut writer: Writer) {
    let (sender, receiver) = sync_channel(1);
    drop(sender);
    writer.run(&receiver);
}

#[test]
fn transient_write_errors_lose_only_counted_snapshots() {
    let directory = tempfile::tempdir().expect("a directory");
    for error in [Errno::NOSPC, Errno::IO] {
        for first in 1..36 {
            let path = directory.path().join(format!("{first}.whylate"));
            let file = FileStore::create(&path, 0).expect("made");
            let mut writer = writer(Flaky { file, calls: 0, fails: first..first + 1 + first % 5, error });
            (0..40).for_each(|number| writer.tick(tick(number)));
            end(writer);
            let (lines, is_whole) = lines(&path);
            let reported = numbers(&lines);
            let missed: u64 = lines.iter().map(|line| if let Line::Gap(gap) = line { gap.count } else { 0 }).sum();
            assert!(is_whole && reported.is_sorted_by(|a, b| a < b), "{first}: {reported:?}");
            assert_eq!(reported.len() as u64 + missed, 40, "{first}: {reported:?}");
            let reasons: Vec<&str> = lines
                .iter()
                .filter_map(|line| if let Line::Gap(gap) = line { Some(gap.reason.as_str()) } else { None })
                .collect();
            let reason = if error == Errno::NOSPC { "disk_full" } else { "write_failed" };
            assert!(reasons.iter().all(|reported| *reported == reason), "{reasons:?}");
        }
    }
}

#[test]
fn lines_before_a_permanent_failure_are_readable() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a.whylate");
    let file = FileStore::create(&path, 0).expect("made");
    let mut writer = writer(Flaky { file, calls: 0, fails: 9..u32::MAX, error: Errno::NOSPC });
    (0..40).for_each(|number| writer.tick(tick(number)));
    assert!(
        writer
            .status
            .problem
            .lock()
            .expect("lock")
            .as_ref()
            .is_some_and(|reported| reported.contains("free some space"))
    );
    end(writer);
    let (lines, is_whole) = lines(&path);
    assert!(numbers(&lines).len() >= 6 && !is_whole, "{lines:?}");
}

#[test]
fn records_suspends_and_clock_steps() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a.whylate");
    let mut writer = writer(FileStore::create(&path, 0).expect("made"));
    writer.clock = Clock { at_unix_ns: 1_000 * SECOND_NS, monotonic_ns: 10 * SECOND_NS, boottime_ns: 10 * SECOND_NS };
    // The machine is suspended for an hour, then the clock is set back by a minute.
    writer.now =
        || Clock { at_unix_ns: 4_601 * SECOND_NS, monotonic_ns: 11 * SECOND_NS, boottime_ns: 3_611 * SECOND_NS };
    writer.tick(tick(1));
    writer.now =
        || Clock { at_unix_ns: 4_542 * SECOND_NS, monotonic_ns: 12 * SECOND_NS, boottime_ns: 3_612 * SECOND_NS };
    writer.tick(tick(2));
    end(writer);
    let gaps: Vec<(String, u64)> = lines(&path)
        .0
        .into_iter()
        .filter_map(
            |line| if let Line::Gap(gap) = line { Some((gap.reason, gap.duration_ns / SECOND_NS)) } else { None },
        )
        .collect();
    assert_eq!(gaps, [("suspended".to_owned(), 3_600), ("clock_set".to_owned(), 0)]);
}

#[test]
fn file_is_private_and_locked_by_its_writer() {
    use std::os::unix::fs::MetadataExt as _;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a.whylate");
    let header = Header { recording: 1, schema: 1, ..Header::default() };
    let mut recorder = Recorder::start(Box::new(FileStore::create(&path, 0).expect("made")), header).expect("started");
    let refused = FileStore::create(&path, 0).expect_err("it is being written").to_string();
    assert!(refused.contains("another whylate"), "{refused}");
    (0..3).for_each(|number| recorder.tick(tick(number)));
    recorder.end().expect("all is written");
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
    let (lines, is_whole) = lines(&path);
    assert!(is_whole && numbers(&lines) == [0, 1, 2]);
    assert!(matches!(lines.last(), Some(Line::End(_))));
}
