// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a recording has of a span of time.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use jiff::tz::TimeZone;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use whylate_model::Snapshot;
use whylate_model::recording::{Damage, Gap, Header, Line, Reader};
use whylate_model::units::{format_ns, printable, rfc3339};

use super::times::Given;
use crate::commands::Senseless;
use crate::output::why::counted;

/// So many gaps are told one by one.
const GAPS: usize = 20;

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
    /// Gaps beyond those that are told one by one.
    more_gaps: u64,
    is_ended: bool,
    /// Nobody has read what follows, which may say that it was ended.
    has_more: bool,
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
        let of = |given: &Option<Given>, begins_ns, otherwise| match given {
            Some(given) => given
                .within(begins_ns, &zone)
                .ok_or_else(|| anyhow!("that time is out of range (give a date, such as 2026-11-26 10:00)")),
            None => Ok(otherwise),
        };
        let from_ns = of(&self.span.from, first_ns, 0)?;
        // From 23:00 to 01:00 ends on the next day.
        let to_ns = of(&self.span.to, first_ns.max(from_ns), u64::MAX)?;
        if from_ns > to_ns {
            return Err(Senseless(anyhow!("the span ends before it begins: swap the two times")).into());
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
            more_gaps: 0,
            is_ended: false,
            has_more: true,
            last_ns: 0,
        })
    }
}

/// What every command ends with, and so with status 1, when the span of a recording has nothing to show. The name is
/// printable.
pub fn nothing_in_span(name: &str) -> anyhow::Error {
    anyhow!("{name} has no snapshots in that span (choose one within the recording)")
}

fn open(path: &Path) -> anyhow::Result<Reader<File>> {
    let name = printable(&path.to_string_lossy());
    let cannot = || format!("cannot read {name}");
    // Not even a FIFO without a writer is waited for.
    let without_waiting = OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(without_waiting).open(path).with_context(cannot)?;
    // Reading a FIFO or a terminal has no end, and nothing can be passed over in one.
    if !file.metadata().with_context(cannot)?.is_file() {
        bail!("cannot read {name}: it is not a regular file (name a recording)");
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
                if self.gaps.len() < GAPS {
                    self.gaps.push(gap.clone());
                } else {
                    self.more_gaps += 1;
                }
            }
            return Ok(Some(line));
        }
        self.has_more = false;
        Ok(None)
    }

    /// The reader, for what it tells beside lines.
    pub fn reader(&mut self) -> &mut Reader<File> {
        &mut self.reader
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

    /// How much of the first snapshot was before whoever recorded it began to count, or before the span that is asked for.
    pub fn lead_ns(&self, first: &Snapshot) -> u64 {
        let begins_ns = if self.from_ns > 0 { self.from_ns } else { self.header().start_unix_ns };
        begins_ns.saturating_sub(first.start_unix_ns)
    }

    /// Whether a snapshot so long, which ends so long after the beginning, is the last one of so much time: the one that
    /// has more of it than the next; of a command that recorded what it showed, the one at whose end it did so.
    pub fn fills(&self, since_ns: u64, length_ns: u64, asked_ns: u64) -> bool {
        let rest_ns = if self.header().every_ns.is_some() { length_ns / 2 } else { 0 };
        since_ns.saturating_add(rest_ns) >= asked_ns
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
                bail!("{} was recorded without {source} (choose from: {})", self.name, printable(&known.join(", ")))
            }
        }
    }

    /// Says on standard error what is missing of the span.
    pub fn tell_missing(&self) {
        self.missing().iter().for_each(|missing| say!("whylate: {missing}"));
    }

    /// That whoever reads it had no room for so many lines; nothing for none.
    pub fn beyond_in_words(&self, lines: u64) -> Option<String> {
        (lines > 0)
            .then(|| format!("{}: skipped {}, too many between two snapshots", self.name, counted(lines, "line")))
    }

    /// What is missing of the span, a line each.
    pub fn missing(&self) -> Vec<String> {
        let mut told: Vec<String> = self.gaps.iter().map(gap_in_words).collect();
        if self.more_gaps > 0 {
            told.push(format!("and {} (the recording has a line for each)", counted(self.more_gaps, "more gap")));
        }
        let Damage { frames, lines, is_cut } = self.reader.damage();
        if frames > 0 || lines > 0 {
            let frames = (frames > 0).then(|| format!("{} damaged", counted(frames, "frame")));
            let lines = (lines > 0).then(|| format!("{} unreadable", counted(lines, "line")));
            told.push(frames.into_iter().chain(lines).collect::<Vec<String>>().join(", "));
        }
        let last = rfc3339::format(self.last_ns);
        if !(self.is_ended || self.has_more || self.to_ns < self.last_ns) {
            let locked = fs::File::open(&self.path).map(|file| flock(file, FlockOperation::NonBlockingLockShared));
            told.push(match locked {
                Ok(Err(Errno::WOULDBLOCK)) => format!("it is still being recorded; so far it ends at {last}"),
                _ => {
                    let how = if is_cut { "it is cut off" } else { "it was not ended properly" };
                    format!("{how}: whatever came after {last} is missing")
                }
            });
        }
        told.iter().map(|told| format!("{}: {told}", self.name)).collect()
    }
}

/// What is missing, and why.
pub fn gap_in_words(gap: &Gap) -> String {
    let Gap { start_unix_ns, duration_ns, reason, count } = gap;
    let at = rfc3339::format(*start_unix_ns);
    let lasted = format_ns(*duration_ns);
    let snapshots = counted(*count, "snapshot");
    match reason.as_str() {
        "suspended" => format!("at {at} the machine was suspended for {lasted}"),
        "clock_set" => format!("at {at} the clock was set"),
        "overload" => format!("lost {snapshots} in the {lasted} from {at}: the disk was too slow"),
        "slow_screen" => {
            format!("lost {snapshots} in the {lasted} from {at}: the terminal of whylate top was too slow")
        }
        "disk_full" => format!("lost {snapshots} in the {lasted} from {at}: the disk was full"),
        "write_failed" => {
            format!("lost {snapshots} in the {lasted} from {at}: write failed")
        }
        "late_events" => format!("lost {} before {at}: there were too many", counted(*count, "late event")),
        "stacks" | "series" => {
            let of = if reason == "stacks" { "stack" } else { "row" };
            format!("lost {} before {at}: they did not fit into a line of the recording", counted(*count, of))
        }
        other => format!("data is missing for {lasted} from {at} ({})", printable(other)),
    }
}
