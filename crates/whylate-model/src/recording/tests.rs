// SPDX-License-Identifier: MIT OR Apache-2.0

use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::path::PathSegment;
use crate::{LateEvent, Snapshot, Stack};

fn bytes_of(line: &Line) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(line).expect("a line serialises");
    bytes.push(b'\n');
    bytes
}

fn header() -> Line {
    Line::Header(Header { recording: FORMAT, schema: 1, start_unix_ns: 1_000, ..Header::default() })
}

fn snapshot(number: u64) -> Line {
    let mut snapshot = Snapshot::new("wq", "bpf", "host", number * 1_000_000_000);
    snapshot.duration_ns = 1_000_000_000;
    snapshot.lost.insert("unmatched".to_owned(), number);
    Line::Snapshot(Box::new(snapshot))
}

/// Builds a recording of frames with these numbers of snapshots; the last frame is unfinished if `is_open`.
fn file(frames: &[u64], is_open: bool) -> Vec<u8> {
    let mut file = Vec::new();
    let mut number = 0;
    let mut frame = Frame::new().expect("memory");
    frame.add(&bytes_of(&header()), header().span_unix_ns()).expect("memory");
    let (rest, index) = frame.finish().expect("memory");
    file.extend(index.to_bytes());
    file.extend(rest);
    for (at, &snapshots) in frames.iter().enumerate() {
        let mut frame = Frame::new().expect("memory");
        let mut bytes = Vec::new();
        for _ in 0..snapshots {
            let line = snapshot(number);
            frame.add(&bytes_of(&line), line.span_unix_ns()).expect("memory");
            bytes.extend(frame.flush().expect("memory"));
            number += 1;
        }
        let is_last = at + 1 == frames.len();
        let (rest, index) = frame.finish().expect("memory");
        if is_open && is_last {
            file.extend(Index::default().to_bytes());
            file.extend(bytes);
        } else {
            file.extend(index.to_bytes());
            file.extend(bytes);
            file.extend(rest);
        }
    }
    file
}

/// Returns the numbers of the snapshots that could be read, and the damage.
fn read(file: &[u8], span: (u64, u64)) -> Result<(Vec<u64>, Damage), ReadError> {
    let mut reader = Reader::new(Cursor::new(file))?.within(span.0, span.1);
    let mut numbers = Vec::new();
    while let Some(line) = reader.next_line()? {
        if let Line::Snapshot(snapshot) = line {
            numbers.push(snapshot.lost["unmatched"]);
        }
    }
    Ok((numbers, reader.damage()))
}

const ALWAYS: (u64, u64) = (0, u64::MAX);

#[test]
fn returns_all_lines_in_order() {
    let (numbers, damage) = read(&file(&[3, 4, 1], false), ALWAYS).expect("a recording");
    assert_eq!(numbers, (0..8).collect::<Vec<_>>());
    assert_eq!(damage, Damage::default());
    // Any zstd reader sees the same lines.
    let text = zstd::decode_all(Cursor::new(file(&[3, 4], false))).expect("frames");
    assert_eq!(text.iter().filter(|&&byte| byte == b'\n').count(), 8);
}

#[test]
fn each_line_kind_round_trips() {
    let lines = [
        header(),
        snapshot(7),
        Line::Account(Account { at_unix_ns: 5_000, lost: [("torn".to_owned(), 2)].into() }),
        Line::Clock(Clock { at_unix_ns: 5_000, monotonic_ns: 6, boottime_ns: 7 }),
        Line::Gap(Gap { start_unix_ns: 5_000, duration_ns: 3, reason: "suspended".to_owned(), count: 0 }),
        Line::Kept(Kept { at_unix_ns: 5_000, reason: "pressure".to_owned(), detail: "cpu.some".to_owned() }),
        Line::Kept(Kept { at_unix_ns: 5_000, reason: "signal".to_owned(), detail: String::new() }),
        Line::End(End { at_unix_ns: 5_000 }),
    ];
    for line in lines {
        assert_eq!(Line::parse(&bytes_of(&line)).expect("a line"), line);
    }
    assert_eq!(Line::parse(br#"{"line":"of next year","x":1}"#).expect("a line"), Line::Other);
}

#[test]
fn skipped_snapshot_does_not_leak_stacks() {
    let mut asleep = Snapshot::new("offcpu", "sample", "host", 2_000_000_000);
    asleep.stacks.push(Stack { samples: 3, kernel: vec!["schedule".to_owned()], ..Stack::default() });
    let mut frame = Frame::new().expect("memory");
    for line in [header(), Line::Snapshot(Box::new(asleep)), snapshot(2)] {
        frame.add(&bytes_of(&line), line.span_unix_ns()).expect("memory");
    }
    let (bytes, index) = frame.finish().expect("memory");
    let file = [&index.to_bytes()[..], &bytes].concat();
    for is_taken in [true, false] {
        let mut reader = Reader::new(Cursor::new(&file)).expect("a recording");
        reader.repeat(|_, _| false);
        assert!(matches!(reader.next_line(), Ok(Some(Line::Snapshot(_)))));
        if is_taken {
            assert_eq!(reader.take_repeated().map(|stacks| stacks[0].samples), Some(3));
        }
        assert!(matches!(reader.next_line(), Ok(Some(Line::Snapshot(_)))));
        assert!(reader.take_repeated().is_none());
        let lines = reader.take_repeated_lines();
        assert!(matches!(Line::parse(&lines["offcpu"]), Ok(Line::Snapshot(of)) if of.stacks.len() == 1));
    }
}

#[test]
fn reads_flushed_part_of_unfinished_frame() {
    let open = file(&[3, 4], true);
    let (numbers, damage) = read(&open, ALWAYS).expect("a recording");
    assert_eq!((numbers.len(), damage.is_cut), (7, true));
}

#[test]
fn reads_only_frames_of_the_span() {
    let file = file(&[4, 4, 4, 1], false);
    let (numbers, _) = read(&file, (5_500_000_000, 6_000_000_000)).expect("a recording");
    // And the last one, which shows whether the recording was finished.
    assert_eq!(numbers, [4, 5, 6, 7, 12]);
}

#[test]
fn counts_damaged_frame_and_reads_the_rest() {
    let mut file = file(&[4, 4, 4], false);
    let second = (0..2).map(|number| bytes_of_frame(&file, number)).sum::<usize>();
    file[second + INDEX_BYTES + 20] ^= 0x55;
    let (numbers, damage) = read(&file, ALWAYS).expect("a recording");
    assert_eq!(numbers, [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(damage, Damage { frames: 1, lines: 4, is_cut: false });
}

#[test]
fn reader_resumes_after_overwritten_index() {
    for (at, flipped) in [(0, 0x55), (1, 0xff), (5, 0x40), (20, 0x01)] {
        let mut file = file(&[4, 4, 4], false);
        let second = bytes_of_frame(&file, 0);
        file[second + at] ^= flipped;
        let (numbers, damage) = read(&file, ALWAYS).expect("a recording");
        assert!(numbers.ends_with(&[4, 5, 6, 7, 8, 9, 10, 11]), "{at}: {numbers:?}, {damage:?}");
    }
}

#[test]
fn end_line_is_returned_for_any_span() {
    let mut file = file(&[4, 4], false);
    let mut frame = Frame::new().expect("memory");
    let end = Line::End(End { at_unix_ns: 8_000_000_000 });
    frame.add(&bytes_of(&end), end.span_unix_ns()).expect("memory");
    let (bytes, index) = frame.finish().expect("memory");
    file.extend(index.to_bytes());
    file.extend(bytes);
    for span in [(0, 1), (u64::MAX - 1, u64::MAX)] {
        let mut reader = Reader::new(Cursor::new(&file)).expect("a recording").within(span.0, span.1);
        let lines: Vec<Line> = std::iter::from_fn(|| reader.next_line().expect("read")).collect();
        assert!(matches!(lines.last(), Some(Line::End(_))), "{lines:?}");
    }
}

#[test]
fn malicious_lines_count_as_damage() {
    let of_depth = |depth| {
        let segment = PathSegment { depth, ..PathSegment::default() };
        let late = vec![LateEvent { path: vec![segment], ..LateEvent::default() }];
        Line::Snapshot(Box::new(Snapshot { late, ..Snapshot::new("offcpu", "made", "host", 0) }))
    };
    assert!(Line::parse(&bytes_of(&of_depth(64))).is_ok());
    assert!(Line::parse(&bytes_of(&of_depth(1_000_000))).is_err());
    // Frames of other programs, each of a few bytes, and one line that is too long.
    let mut file = file(&[2], false);
    let small = zstd::encode_all(&b"\n"[..], 3).expect("a frame");
    let long = zstd::encode_all(&vec![b' '; MAX_LINE_BYTES as usize + 9][..], 1).expect("a frame");
    (0..20_000).for_each(|_| file.extend(&small));
    file.extend(long);
    let (numbers, damage) = read(&file, ALWAYS).expect("a recording");
    assert_eq!((numbers.len(), damage.lines), (2, 20_001));
}

/// Returns the length of a frame, including its index.
fn bytes_of_frame(file: &[u8], number: usize) -> usize {
    let mut at = 0;
    for _ in 0..number {
        at += INDEX_BYTES + index_at(file, at).bytes as usize;
    }
    INDEX_BYTES + index_at(file, at).bytes as usize
}

fn index_at(file: &[u8], at: usize) -> Index {
    Index::from_bytes(file[at..at + INDEX_BYTES].try_into().expect("an index")).expect("an index")
}

#[test]
fn refuses_other_files_and_newer_recordings() {
    assert!(matches!(Reader::new(Cursor::new(b"")), Err(ReadError::Empty)));
    for bytes in [&b"no"[..], b"{\"schema\":1}\n", &[0; 100], &zstd::encode_all(&b"hello\n"[..], 3).expect("a frame")] {
        assert!(matches!(Reader::new(Cursor::new(bytes)), Err(ReadError::NoRecording)), "{bytes:?}");
    }
    let newer =
        Line::Header(Header { recording: FORMAT + 1, schema: 1, whylate: "9.0".to_owned(), ..Header::default() });
    let bytes = zstd::encode_all(&bytes_of(&newer)[..], 3).expect("a frame");
    let refused = Reader::new(Cursor::new(bytes)).err().expect("a newer one").to_string();
    assert!(refused.contains("whylate 9.0"), "{refused}");
}

proptest! {
    /// After a cut at any offset, everything flushed before it is readable.
    #[test]
    fn truncation_loses_only_later_lines(cut in 0usize..2_000, is_open: bool) {
        let whole = file(&[3, 4, 2], is_open);
        let cut = cut.min(whole.len());
        let ends: Vec<usize> = (0..=9).map(|snapshots| end_of(&[3, 4, 2], snapshots)).collect();
        match read(&whole[..cut], ALWAYS) {
            Ok((numbers, _)) => {
                let min_lines = ends.iter().filter(|&&end| end <= cut).count().saturating_sub(1);
                prop_assert!(numbers.len() >= min_lines, "{} of at least {min_lines} at {cut}", numbers.len());
                prop_assert!(numbers.iter().copied().eq(0..numbers.len() as u64));
            }
            Err(ReadError::NoRecording | ReadError::Empty) => prop_assert!(cut < ends[0]),
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn damaged_file_does_not_panic(at in 0usize..2_000, bytes in prop::collection::vec(any::<u8>(), 1..20)) {
        let mut damaged = file(&[3, 4, 2], false);
        let at = at.min(damaged.len() - 1);
        for (into, byte) in damaged[at..].iter_mut().zip(bytes) {
            *into = byte;
        }
        if let Ok((numbers, _)) = read(&damaged, ALWAYS) {
            prop_assert!(numbers.len() <= 9);
        }
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&bytes, ALWAYS);
    }
}

/// Returns the end offset of a file with this number of flushed snapshots.
fn end_of(frames: &[u64], snapshots: u64) -> usize {
    let mut left = snapshots;
    let mut kept = Vec::new();
    if left == 0 {
        return file(&[], false).len();
    }
    for &frame in frames {
        kept.push(frame.min(left));
        left -= frame.min(left);
        if left == 0 {
            break;
        }
    }
    file(&kept, true).len()
}
