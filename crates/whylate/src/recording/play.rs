// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a recording has of a span of time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use jiff::tz::TimeZone;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use whylate_model::Snapshot;
use whylate_model::recording::{Damage, Gap, Header, Line, Reader};
use whylate_model::units::{format_ns, printable, rfc3339};

use super::times::Given;
use crate::commands::Senseless;

/// A part of a recording.
#[derive(Clone, Debug, Default)]
pub struct Span {
    /// Its beginning; `None` for that of the recording.
    pub from: Option<Given>,
    /// Its end.
    pub to: Option<Given>,
}

/// A file, and which part of it is played.
#[derive(Clone, Debug)]
pub struct Recording {
    pub path: PathBuf,
    pub span: Span,
    /// So many times as fast as it was; `None` for as fast as it can be read.
    pub speed: Option<f64>,
}

/// A recording that is being read.
pub struct Played {
    reader: Reader<File>,
    name: String,
    path: PathBuf,
    from_ns: u64,
    to_ns: u64,
    speed: Option<f64>,
    gaps: Vec<Gap>,
    is_ended: bool,
    last_ns: u64,
}

impl Recording {
    /// Opens it and finds its span.
    ///
    /// # Errors
    /// When it is none, or its span makes no sense.
    pub fn play(&self) -> anyhow::Result<Played> {
        let played = self.play_with_clocks()?;
        Ok(Played { reader: played.reader.within(played.from_ns, played.to_ns), ..played })
    }

    /// The same for whoever needs the clocks before the span: frames without a line of it are read as well.
    ///
    /// # Errors
    /// As above.
    pub fn play_with_clocks(&self) -> anyhow::Result<Played> {
        let name = printable(&self.path.to_string_lossy());
        let reader = open(&self.path)?;
        let first_ns = reader.header().start_unix_ns;
        let zone = TimeZone::system();
        let of = |given: &Option<Given>, otherwise| match given {
            Some(given) => given.within(first_ns, &zone).ok_or_else(|| anyhow!("that time is on no calendar")),
            None => Ok(otherwise),
        };
        let (from_ns, to_ns) = (of(&self.span.from, 0)?, of(&self.span.to, u64::MAX)?);
        if from_ns > to_ns {
            return Err(Senseless(anyhow!("the span ends before it begins: swap its ends")).into());
        }
        let path = self.path.clone();
        Ok(Played {
            reader,
            name,
            path,
            from_ns,
            to_ns,
            speed: self.speed,
            gaps: Vec::new(),
            is_ended: false,
            last_ns: 0,
        })
    }
}

fn open(path: &Path) -> anyhow::Result<Reader<File>> {
    let name = printable(&path.to_string_lossy());
    let cannot = || format!("cannot read {name}");
    let file = File::open(path).with_context(cannot)?;
    // Reading a FIFO or a terminal has no end, and nothing can be passed over in one.
    if !file.metadata().with_context(cannot)?.is_file() {
        bail!("cannot read {name}: it is no plain file (name a recording)");
    }
    Reader::new(file).with_context(cannot)
}

impl Played {
    /// What is recorded.
    pub fn header(&self) -> &Header {
        self.reader.header()
    }

    /// From when to when, in nanoseconds since 1970; of an end that was not asked for, the least or the most.
    pub fn span_unix_ns(&self) -> (u64, u64) {
        (self.from_ns, self.to_ns)
    }

    /// The file's name, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The next line of the span but for headers, gaps and clocks; gaps are kept.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn next_line(&mut self) -> anyhow::Result<Option<Line>> {
        while let Some(line) = self.next_of_all()? {
            if matches!(line, Line::Snapshot(_) | Line::Account(_)) {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }

    /// The next line of the span of any kind, and any clock before its end; gaps are kept as well.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn next_of_all(&mut self) -> anyhow::Result<Option<Line>> {
        while let Some(line) = self.reader.next_line().with_context(|| format!("cannot read {}", self.name))? {
            let Some((first_ns, last_ns)) = line.span_unix_ns() else { continue };
            self.is_ended |= matches!(line, Line::End(_));
            self.last_ns = self.last_ns.max(last_ns);
            // A snapshot that ends when the span begins has nothing of it.
            let is_moment = first_ns == last_ns;
            let is_before = if is_moment { last_ns < self.from_ns } else { last_ns <= self.from_ns };
            if is_before && !matches!(line, Line::Clock(_)) || first_ns > self.to_ns {
                continue;
            }
            if let Line::Gap(gap) = &line {
                self.gaps.push(gap.clone());
            }
            return Ok(Some(line));
        }
        Ok(None)
    }

    /// The next snapshot of that source.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn next_snapshot(&mut self, source: &str) -> anyhow::Result<Option<Snapshot>> {
        while let Some(line) = self.next_line()? {
            if let Line::Snapshot(snapshot) = line
                && snapshot.source == source
            {
                self.pace(snapshot.duration_ns);
                return Ok(Some(*snapshot));
            }
        }
        Ok(None)
    }

    /// Lets as much time pass as did then, where that is asked for.
    pub fn pace(&self, span_ns: u64) {
        if let Some(speed) = self.speed {
            thread::sleep(Duration::from_secs_f64((span_ns as f64 / 1e9 / speed).min(3600.0)));
        }
    }

    /// From where on late events of that source are recorded.
    ///
    /// # Errors
    /// When the source was not recorded.
    pub fn late_from_ns(&self, source: &str) -> anyhow::Result<Option<u64>> {
        let sources = &self.header().sources;
        match sources.iter().find(|measured| measured.source == source) {
            Some(measured) => Ok(measured.late_from_ns),
            None => {
                let known: Vec<&str> = sources.iter().map(|measured| measured.source.as_str()).collect();
                bail!("{} has no {source} (it has: {})", self.name, printable(&known.join(", ")))
            }
        }
    }

    /// Says on standard error what is missing of the span.
    pub fn tell_missing(&self) {
        for gap in &self.gaps {
            say!("whylate: {}: {}", self.name, gap_in_words(gap));
        }
        let Damage { frames, lines, is_cut } = self.reader.damage();
        if frames > 0 || lines > 0 {
            say!("whylate: {}: {frames} frames are damaged; {lines} lines of them cannot be read", self.name);
        }
        let last = rfc3339::format(self.last_ns);
        if self.is_ended || self.to_ns < self.last_ns {
            return;
        }
        match fs::File::open(&self.path).map(|file| flock(file, FlockOperation::NonBlockingLockShared)) {
            Ok(Err(Errno::WOULDBLOCK)) => say!("whylate: {}: it is still being recorded, by now to {last}", self.name),
            _ => {
                let how = if is_cut { "it is cut off" } else { "recording was not ended" };
                say!("whylate: {}: {how}: what came after {last} is missing", self.name);
            }
        }
    }
}

/// What is missing, and why.
fn gap_in_words(gap: &Gap) -> String {
    let Gap { start_unix_ns, duration_ns, reason, count } = gap;
    let at = rfc3339::format(*start_unix_ns);
    let lasted = format_ns(*duration_ns);
    match reason.as_str() {
        "suspended" => format!("at {at} the machine was suspended for {lasted}"),
        "clock_set" => format!("at {at} the clock was set"),
        "overload" => format!("{count} snapshots are missing from {at} on, for {lasted}: the disk was too slow"),
        "disk_full" => format!("{count} snapshots are missing from {at} on, for {lasted}: the disk was full"),
        "write_failed" => {
            format!("{count} snapshots are missing from {at} on, for {lasted}: they could not be written")
        }
        "late_events" => format!("{count} late events are missing before {at}: there were too many"),
        other => format!("from {at} on, for {lasted}, something is missing ({})", printable(other)),
    }
}
