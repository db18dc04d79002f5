// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packs lines of a recording into frames.

use std::io;

use whylate_model::Snapshot;
use whylate_model::recording::{Frame, Gap, Index, Line, MAX_LINE_BYTES};

use crate::json::write_line;

/// Maximum number of ticks in a frame, which damage to the frame loses.
pub const MAX_TICKS: u32 = 16;
/// A frame is ended once its lines have this size, in bytes.
pub const MAX_BYTES: usize = 8 << 20;
/// A larger line is written in part: readers have a limit of size.
const MAX_WRITTEN_LINE_BYTES: usize = MAX_LINE_BYTES as usize / 2;

/// Initial capacity for the text of a line.
const LINE_CAPACITY: usize = 16 << 10;

/// Adds the lines of a tick to a frame. Returns their size in bytes.
///
/// # Errors
/// Fails if memory is exhausted.
pub fn add(frame: &mut Frame, lines: &[Line]) -> io::Result<usize> {
    let mut bytes = 0;
    for line in lines {
        let (text, gaps) = within_limit(line, MAX_WRITTEN_LINE_BYTES)?;
        frame.add(&text, line.span_unix_ns())?;
        bytes += text.len();
        for gap in gaps {
            let mut text = Vec::new();
            write_line(&mut text, &gap)?;
            frame.add(&text, gap.span_unix_ns())?;
        }
    }
    Ok(bytes)
}

/// Packs lines into a frame.
///
/// # Errors
/// Fails if memory is exhausted.
pub fn pack(lines: &[Line]) -> io::Result<(Index, Vec<u8>)> {
    let mut frame = Frame::new()?;
    add(&mut frame, lines)?;
    let (bytes, index) = frame.finish()?;
    Ok((index, bytes))
}

/// A list of a snapshot that a line may omit in part: the reason in its gap, the list's length, and its truncation.
type OmittableList = (&'static str, fn(&Snapshot) -> usize, fn(&mut Snapshot, usize));

/// Lists in the order of omission. Stacks are sorted by weight.
const OMITTABLE: [OmittableList; 3] = [
    ("late_events", |of| of.late.len(), |of, count| of.late.truncate(count)),
    ("stacks", |of| of.stacks.len(), |of, count| of.stacks.truncate(count)),
    ("series", |of| of.series.len(), |of, count| of.series.truncate(count)),
];

/// Returns a line's text, and gaps that count the items omitted from it.
///
/// # Errors
/// Fails if memory is exhausted.
fn within_limit(line: &Line, max_bytes: usize) -> io::Result<(Vec<u8>, Vec<Line>)> {
    let mut text = Vec::with_capacity(LINE_CAPACITY);
    write_line(&mut text, line)?;
    let Line::Snapshot(whole) = line else { return Ok((text, Vec::new())) };
    let mut gaps = Vec::new();
    if text.len() <= max_bytes {
        return Ok((text, gaps));
    }
    let mut rest = (**whole).clone();
    let start_unix_ns = whole.start_unix_ns.saturating_add(whole.duration_ns);
    for (reason, count_of, truncate) in OMITTABLE {
        while text.len() > max_bytes && count_of(&rest) > 0 {
            let half = count_of(&rest) / 2;
            truncate(&mut rest, half);
            text.clear();
            write_line(&mut text, &rest)?;
        }
        let count = (count_of(whole) - count_of(&rest)) as u64;
        if count > 0 {
            gaps.push(Line::Gap(Gap { start_unix_ns, duration_ns: 0, reason: reason.to_owned(), count }));
        }
    }
    Ok((text, gaps))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use whylate_model::recording::{FORMAT, Header, Reader};
    use whylate_model::snapshot::SCHEMA;
    use whylate_model::{LateEvent, Series, Stack};

    use super::*;

    /// Makes a snapshot of stacks, late events and series with names of `name_bytes`.
    fn snapshot(stacks: usize, late: usize, series: usize, name_bytes: usize) -> Line {
        let name = |number: usize| format!("{number}{}", "f".repeat(name_bytes));
        let mut snapshot = Snapshot::new("offcpu", "sample", "a host", 1_000_000_000);
        let stack = |number| Stack { user: vec![name(number)], samples: 1, ..Stack::default() };
        snapshot.stacks = (0..stacks).map(stack).collect();
        snapshot.late = (0..late).map(|number| LateEvent { subject: name(number), ..LateEvent::default() }).collect();
        let labels = |number| [("name".to_owned(), name(number))].into();
        snapshot.series = (0..series).map(|number| Series { labels: labels(number), ..Series::default() }).collect();
        Line::Snapshot(Box::new(snapshot))
    }

    #[test]
    fn oversized_line_omits_and_counts_parts() {
        for ((stacks, late, series), expected) in [
            ((10, 0, 0), vec![]),
            ((10, 30, 0), vec!["late_events"]),
            ((100, 0, 3), vec!["stacks"]),
            ((100, 100, 3), vec!["late_events", "stacks"]),
            ((0, 0, 100), vec!["series"]),
            ((50, 50, 50), vec!["late_events", "stacks", "series"]),
        ] {
            let line = snapshot(stacks, late, series, 1_000);
            let (text, gaps) = within_limit(&line, 30_000).expect("memory");
            assert!(text.len() <= 30_000 && text.ends_with(b"\n"));
            let Ok(Line::Snapshot(read)) = Line::parse(&text) else { panic!("it is read") };
            let Line::Snapshot(whole) = &line else { panic!("it is one") };
            assert!(whole.stacks.starts_with(&read.stacks) && whole.late.starts_with(&read.late));
            let kept = [read.late.len(), read.stacks.len(), read.series.len()];
            let all = [late, stacks, series].iter().sum::<usize>();
            let missing = gaps.iter().map(|gap| match gap {
                Line::Gap(gap) => (gap.reason.as_str(), gap.count as usize),
                other => panic!("{other:?}"),
            });
            let (reasons, counts): (Vec<&str>, Vec<usize>) = missing.unzip();
            assert_eq!((reasons, counts.iter().sum::<usize>() + kept.iter().sum::<usize>()), (expected, all));
        }
    }

    #[test]
    fn line_of_70_megabytes_is_readable() {
        let header = Header { recording: FORMAT, schema: SCHEMA, ..Header::default() };
        let lines = [Line::Header(header), snapshot(70, 0, 1, 1 << 20)];
        let (index, bytes) = pack(&lines).expect("memory");
        let mut reader = Reader::new(Cursor::new([&index.to_bytes()[..], &bytes].concat())).expect("a recording");
        let Ok(Some(Line::Snapshot(read))) = reader.next_line() else { panic!("the snapshot is there") };
        assert!(read.stacks.len() >= 17, "{} stacks", read.stacks.len());
        // Names of more bytes, which older versions recorded, are truncated.
        assert!(read.stacks.iter().all(|stack| stack.user[0].len() <= whylate_model::name::MAX_BYTES));
        let Ok(Some(Line::Gap(gap))) = reader.next_line() else { panic!("the gap is there") };
        assert_eq!((gap.reason.as_str(), gap.count as usize), ("stacks", 70 - read.stacks.len()));
        assert_eq!(reader.damage().lines, 0);
    }
}
