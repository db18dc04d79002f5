// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes recordings of hours from a minute, and measures the memory of `top` that has read one as fast as it can.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use whylate_model::recording::{End, Frame, Line, Reader};

use crate::child::Tool;
use crate::record::cpu_ns;

/// Ticks per frame, as `record` writes them.
const TICKS_PER_FRAME: usize = 16;
/// How long `top` may take to read all of it.
const TIMEOUT: Duration = Duration::from_secs(900);
/// A word on the screen when the history is full; redrawn text may lack spaces.
const FULL: &[u8] = b"dropped";
/// `top` has read all of the recording when it uses less CPU time per second than this.
const IDLE_NS: u64 = 20_000_000;

/// Repeats a recording's contents, each time later, up to this length. Returns the number of ticks.
pub fn lengthen(from: &Path, to: &Path, length_s: u64) -> Result<usize> {
    let mut reader = Reader::new(File::open(from)?).context("nothing was recorded")?;
    let header = Line::Header(reader.header().clone());
    let mut ticks: Vec<Vec<Line>> = Vec::new();
    let mut first = String::new();
    while let Some(line) = reader.next_line()? {
        if let Line::Snapshot(snapshot) = &line {
            if first.is_empty() {
                first.clone_from(&snapshot.source);
            }
            if snapshot.source == first {
                ticks.push(Vec::new());
            }
        }
        if let (Line::Snapshot(_) | Line::Account(_), Some(tick)) = (&line, ticks.last_mut()) {
            tick.push(line);
        }
    }
    ensure!(!ticks.is_empty(), "nothing was recorded");
    let spans = || ticks.iter().flatten().filter_map(Line::span_unix_ns);
    let begins_ns = spans().map(|(first_ns, _)| first_ns).min().unwrap_or(0);
    let each_ns = spans().map(|(_, last_ns)| last_ns).max().unwrap_or(0).saturating_sub(begins_ns);
    let mut out = BufWriter::new(File::create(to)?);
    let mut write = |lines: &[Line]| -> Result<()> {
        let mut frame = Frame::new()?;
        for line in lines {
            let mut text = serde_json::to_vec(line)?;
            text.push(b'\n');
            frame.add(&text, line.span_unix_ns())?;
        }
        let (bytes, index) = frame.finish()?;
        out.write_all(&index.to_bytes())?;
        Ok(out.write_all(&bytes)?)
    };
    write(&[header])?;
    let (mut count, mut later_ns) = (0, 0);
    while later_ns < length_s * 1_000_000_000 {
        for frame in ticks.chunks(TICKS_PER_FRAME) {
            let lines: Vec<Line> = frame.iter().flatten().map(|line| later(line, later_ns)).collect();
            write(&lines)?;
            count += frame.len();
        }
        later_ns += each_ns;
    }
    write(&[Line::End(End { at_unix_ns: begins_ns + later_ns })])?;
    out.flush()?;
    Ok(count)
}

fn later(line: &Line, by_ns: u64) -> Line {
    let mut line = line.clone();
    match &mut line {
        Line::Snapshot(snapshot) => {
            snapshot.start_unix_ns += by_ns;
            snapshot.late.iter_mut().for_each(|event| event.at_unix_ns += by_ns);
        }
        Line::Account(account) => account.at_unix_ns += by_ns,
        _ => {}
    }
    line
}

/// Returns the resident memory in MB of `top` after it has read all of that recording.
///
/// # Errors
///
/// Fails if its history is not full although `is_full` is set.
pub fn resident_mb(program: &Path, recording: &Path, is_full: bool) -> Result<f64> {
    let seen = tempfile::NamedTempFile::new().context("cannot make a file")?;
    let name = seen.path().to_str().context("a plain name")?;
    // Wide enough for all of its first line.
    let words = format!("stty rows 40 cols 400; exec '{}' top '{}'", program.display(), recording.display());
    let mut terminal = Tool::start("script", &["-qfc", &words, name])?;
    let began = Instant::now();
    thread::sleep(Duration::from_secs(2));
    let pid = crate::top::child_of(terminal.pid())?;
    loop {
        let before_ns = cpu_ns(pid)?;
        thread::sleep(Duration::from_secs(1));
        if cpu_ns(pid)?.saturating_sub(before_ns) < IDLE_NS {
            break;
        }
        ensure!(began.elapsed() < TIMEOUT, "the screen does not come to the end of the recording");
    }
    terminal.expect_running()?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the screen has ended")?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the kernel tells no memory")?;
    let kib: f64 = resident.trim().trim_end_matches(" kB").parse()?;
    crate::top::end(pid)?;
    let says_full = fs::read(name)?.windows(FULL.len()).any(|bytes| bytes == FULL);
    ensure!(says_full || !is_full, "the history of the screen is not full");
    Ok(kib * 1024.0 / 1e6)
}
