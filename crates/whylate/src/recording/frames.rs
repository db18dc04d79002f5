// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines of a recording as frames.

use std::io;

use whylate_model::Snapshot;
use whylate_model::recording::{Frame, Gap, Index, Line, MOST_LINE_BYTES};

use crate::output::json::write_line;

/// A frame has at most so many ticks, which is what is lost where it is damaged.
pub const TICKS: u32 = 16;
/// One with more is ended before.
pub const BYTES: usize = 8 << 20;
/// A line with more is told without some of its late events: readers have a limit.
const LINE_BYTES: usize = MOST_LINE_BYTES as usize / 2;

/// Room for most lines.
const LINE: usize = 16 << 10;

/// Adds the lines of a tick to a frame. Returns how long they are.
///
/// # Errors
/// When there is no memory.
pub fn add(frame: &mut Frame, lines: &[Line]) -> io::Result<usize> {
    let mut bytes = 0;
    for line in lines {
        let (text, gap) = within_limit(line, LINE_BYTES)?;
        frame.add(&text, line.span_unix_ns())?;
        bytes += text.len();
        if let Some(gap) = gap {
            let mut text = Vec::new();
            write_line(&mut text, &gap)?;
            frame.add(&text, gap.span_unix_ns())?;
        }
    }
    Ok(bytes)
}

/// A frame of these lines.
///
/// # Errors
/// When there is no memory.
pub fn of(lines: &[Line]) -> io::Result<(Index, Vec<u8>)> {
    let mut frame = Frame::new()?;
    add(&mut frame, lines)?;
    let (bytes, index) = frame.finish()?;
    Ok((index, bytes))
}

/// A line's text, with as many of its late events as there is room for, and how many are not in it.
///
/// # Errors
/// When there is no memory.
fn within_limit(line: &Line, most: usize) -> io::Result<(Vec<u8>, Option<Line>)> {
    let mut text = Vec::with_capacity(LINE);
    write_line(&mut text, line)?;
    let Line::Snapshot(whole) = line else { return Ok((text, None)) };
    let mut kept = whole.late.len();
    while text.len() > most && kept > 0 {
        kept /= 2;
        text.clear();
        let late = whole.late[..kept].to_vec();
        let rest = Snapshot { late: Vec::new(), ..(**whole).clone() };
        write_line(&mut text, &Line::Snapshot(Box::new(Snapshot { late, ..rest })))?;
    }
    let count = (whole.late.len() - kept) as u64;
    let start_unix_ns = whole.start_unix_ns.saturating_add(whole.duration_ns);
    let gap = Gap { start_unix_ns, duration_ns: 0, reason: "late_events".to_owned(), count };
    Ok((text, (count > 0).then_some(Line::Gap(gap))))
}
