// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of a screen that has been up for hours: of a recording of so many hours, which it reads as fast as it can.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use whylate_model::recording::{End, Frame, Line, Reader};

use crate::child::Tool;
use crate::record::cpu_ns;

/// So many moments have a frame, as what `record` writes.
const MOMENTS: usize = 16;
/// How long a screen may take to read all of it.
const PATIENCE: Duration = Duration::from_secs(900);
/// A screen that takes less than this of a second's CPU time has read all.
const IDLE_NS: u64 = 20_000_000;

/// Writes what is recorded in one file again and again, until there are so many hours of it.
pub fn lengthen(from: &Path, to: &Path, hours: u64) -> Result<()> {
    let mut reader = Reader::new(File::open(from)?)?;
    let header = reader.header().clone();
    let (mut lines, mut until_ns) = (Vec::new(), 0);
    while let Some(line) = reader.next_line()? {
        if let (Line::Snapshot(_) | Line::Account(_), Some((_, last_ns))) = (&line, line.span_unix_ns()) {
            until_ns = until_ns.max(last_ns);
            lines.push(line);
        }
    }
    let span_ns = until_ns.saturating_sub(header.start_unix_ns);
    ensure!(span_ns > 0, "nothing was recorded");
    let moment = header.sources.len().max(1);
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
    write(&[Line::Header(header.clone())])?;
    let times = (hours * 3_600_000_000_000).div_ceil(span_ns);
    for _ in 0..times {
        for chunk in lines.chunks(MOMENTS * moment) {
            write(chunk)?;
        }
        lines.iter_mut().for_each(|line| move_on(line, span_ns));
    }
    write(&[Line::End(End { at_unix_ns: header.start_unix_ns + times * span_ns })])?;
    Ok(out.flush()?)
}

fn move_on(line: &mut Line, by_ns: u64) {
    match line {
        Line::Snapshot(snapshot) => {
            snapshot.start_unix_ns += by_ns;
            snapshot.late.iter_mut().for_each(|event| event.at_unix_ns += by_ns);
        }
        Line::Account(account) => account.at_unix_ns += by_ns,
        _ => {}
    }
}

/// What a screen of that recording has in memory, in MB, once it has read all of it.
pub fn resident_mb(program: &Path, recording: &Path) -> Result<f64> {
    let words = format!("stty rows 40 cols 140; exec '{}' top '{}'", program.display(), recording.display());
    let mut terminal = Tool::start("script", &["-qfc", &words, "/dev/null"])?;
    let began = Instant::now();
    thread::sleep(Duration::from_secs(2));
    let pid = crate::top::child_of(terminal.pid())?;
    loop {
        let before_ns = cpu_ns(pid)?;
        thread::sleep(Duration::from_secs(1));
        if cpu_ns(pid)?.saturating_sub(before_ns) < IDLE_NS {
            break;
        }
        ensure!(began.elapsed() < PATIENCE, "the screen does not come to the end of the recording");
    }
    terminal.expect_running()?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the screen has ended")?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the kernel tells no memory")?;
    let kib: f64 = resident.trim().trim_end_matches(" kB").parse()?;
    crate::top::end(pid)?;
    Ok(kib * 1024.0 / 1e6)
}
