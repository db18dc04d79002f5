// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the lines of a time span of a recording.

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
use whylate_model::recording::{Damage, Gap, Header, Kept, Line, Reader};
use whylate_model::units::{format_ns, printable, rfc3339};

use super::times::Given;
use crate::errors::{UsageError, existing};
use whylate_model::units::counted;

/// Maximum number of gaps that are reported individually.
const GAPS: usize = 20;

/// A time span of a recording.
#[derive(Clone, Debug, Default)]
pub struct Span {
    /// Start of the span. `None` for that of the recording.
    pub from: Option<Given>,
    /// End of the span. `None` for that of the recording.
    pub to: Option<Given>,
}

/// A recording file, and the span to replay.
#[derive(Clone, Debug)]
pub struct Recording {
    pub path: PathBuf,
    pub span: Span,
    /// Speed relative to real time. `None` for as fast as it can be read.
    pub speed: Option<f64>,
    /// Command line that replays this span; `None` if it was not read by `whylate replay`.
    pub command: Option<String>,
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
    /// Number of gaps beyond `GAPS`.
    more_gaps: u64,
    /// Reasons why the file was written, at most `GAPS`.
    kept: Vec<Kept>,
    is_ended: bool,
    /// Whether lines remain unread, of which one may end the recording.
    has_more: bool,
    last_ns: u64,
}

impl Recording {
    /// Opens the recording and resolves its span.
    ///
    /// # Errors
    /// Fails if the file is not a recording, or its span is out of range or ends before it begins.
    pub fn play(&self) -> anyhow::Result<Played> {
        let played = self.play_with_clocks()?;
        Ok(Played { reader: played.reader.within(played.from_ns, played.to_ns), ..played })
    }

    /// Opens the recording like `play`, for callers that need the clock readings before the span: frames outside of it
    /// are read as well.
    ///
    /// # Errors
    /// Fails as `play` does.
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
            return Err(UsageError(anyhow!("the span ends before it begins: swap the two times")).into());
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
            kept: Vec::new(),
            is_ended: false,
            has_more: true,
            last_ns: 0,
        })
    }
}

/// Returns the error of every command, with status 1, for a span of a recording that has nothing to show. Reads the
/// recording to its end.
pub fn nothing_in_span(path: &Path) -> anyhow::Error {
    let name = printable(&path.to_string_lossy());
    match covered(path) {
        Ok(Some((start_ns, end_ns))) => anyhow!(
            "{name} has no snapshots in that span: it covers {} to {}",
            rfc3339::format(start_ns),
            rfc3339::format(end_ns)
        ),
        Ok(None) => anyhow!("{name} has no snapshots: it was cut off before the first one"),
        Err(error) => error,
    }
}

/// Returns start and end of the snapshots of a recording; `None` if it has none.
fn covered(path: &Path) -> anyhow::Result<Option<(u64, u64)>> {
    let mut reader = open(path)?;
    let mut covered: Option<(u64, u64)> = None;
    while let Some(line) = reader.next_line().with_context(|| format!("cannot read {}", path.display()))? {
        if let (Line::Snapshot(_), Some((from_ns, to_ns))) = (&line, line.span_unix_ns()) {
            covered = Some(covered.map_or((from_ns, to_ns), |(start, end)| (start.min(from_ns), end.max(to_ns))));
        }
    }
    Ok(covered)
}

fn open(path: &Path) -> anyhow::Result<Reader<File>> {
    let name = printable(&path.to_string_lossy());
    let cannot = || format!("cannot read {name}");
    // Does not wait for the writer of a FIFO.
    let without_waiting = OFlags::NONBLOCK.bits() as i32;
    let file = existing(OpenOptions::new().read(true).custom_flags(without_waiting).open(path)).with_context(cannot)?;
    // A FIFO or a terminal may never end, and cannot be searched.
    if !file.metadata().with_context(cannot)?.is_file() {
        bail!("cannot read {name}: it is not a regular file (name a recording)");
    }
    Reader::new(file).with_context(cannot)
}

impl Played {
    /// Returns the recording's header.
    pub fn header(&self) -> &Header {
        self.reader.header()
    }

    /// Returns start and end of the span, in nanoseconds since 1970: 0 and `u64::MAX` if they were not given.
    pub fn span_unix_ns(&self) -> (u64, u64) {
        (self.from_ns, self.to_ns)
    }

    /// Returns the file name, with control characters escaped.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the next line of the span, or a clock reading before its end. Gaps are also collected for `missing`.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn next_line(&mut self) -> anyhow::Result<Option<Line>> {
        while let Some(line) = self.reader.next_line().with_context(|| format!("cannot read {}", self.name))? {
            let Some((first_ns, last_ns)) = line.span_unix_ns() else { continue };
            self.is_ended |= matches!(line, Line::End(_));
            self.last_ns = self.last_ns.max(last_ns);
            // A snapshot that ends when the span begins is outside of it.
            let is_instant = first_ns == last_ns;
            let is_before = if is_instant { last_ns < self.from_ns } else { last_ns <= self.from_ns };
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
            if let Line::Kept(kept) = &line
                && self.kept.len() < GAPS
            {
                self.kept.push(kept.clone());
            }
            return Ok(Some(line));
        }
        self.has_more = false;
        Ok(None)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the reader, for its features other than lines.
    pub fn reader(&mut self) -> &mut Reader<File> {
        &mut self.reader
    }

    /// Returns how much of the first snapshot precedes the start of the recording or of the requested span.
    pub fn lead_ns(&self, first: &Snapshot) -> u64 {
        let begins_ns = if self.from_ns > 0 { self.from_ns } else { self.header().start_unix_ns };
        begins_ns.saturating_sub(first.start_unix_ns)
    }

    /// Returns whether a snapshot of `length_ns`, which ends `since_ns` after the beginning, completes an interval of
    /// `asked_ns`. Snapshots of a fixed period complete it if they have more of the interval than the next one. A
    /// command that records its own output takes its snapshots at the ends of the intervals.
    pub fn completes_interval(&self, since_ns: u64, length_ns: u64, asked_ns: u64) -> bool {
        let rest_ns = if self.header().every_ns.is_some() { length_ns / 2 } else { 0 };
        since_ns.saturating_add(rest_ns) >= asked_ns
    }

    /// Sleeps as long as the span took, scaled by the requested speed, for at most an hour.
    pub fn pace(&self, span_ns: u64) {
        if let Some(speed) = self.speed {
            thread::sleep(Duration::from_secs_f64((span_ns as f64 / 1e9 / speed).min(3600.0)));
        }
    }

    /// Returns the minimum latency of the recorded late events of a source.
    ///
    /// # Errors
    /// Fails if the source was not recorded.
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

    /// Reports on standard error why the file was written, and the missing parts of the span.
    pub fn report_notes(&self) {
        self.kept.iter().for_each(|kept| say!("whylate: {}: {}", self.name, kept_message(kept)));
        self.missing().iter().for_each(|missing| say!("whylate: {missing}"));
    }

    /// Returns a message for each part of the span that is missing.
    pub fn missing(&self) -> Vec<String> {
        let mut messages: Vec<String> = self.gaps.iter().map(gap_message).collect();
        if self.more_gaps > 0 {
            messages.push(format!("and {} (the recording has a line for each)", counted(self.more_gaps, "more gap")));
        }
        let Damage { frames, lines, is_cut } = self.reader.damage();
        if frames > 0 || lines > 0 {
            let frames = (frames > 0).then(|| format!("{} damaged", counted(frames, "frame")));
            let lines = (lines > 0).then(|| format!("{} unreadable", counted(lines, "line")));
            messages.push(frames.into_iter().chain(lines).collect::<Vec<String>>().join(", "));
        }
        let last = rfc3339::format(self.last_ns);
        if !(self.is_ended || self.has_more || self.to_ns < self.last_ns) {
            let locked = fs::File::open(&self.path).map(|file| flock(file, FlockOperation::NonBlockingLockShared));
            messages.push(match locked {
                Ok(Err(Errno::WOULDBLOCK)) => format!("it is still being recorded; so far it ends at {last}"),
                _ => {
                    let how = if is_cut { "it is cut off" } else { "it was not ended properly" };
                    format!("{how}: whatever came after {last} is missing")
                }
            });
        }
        messages.iter().map(|message| format!("{}: {message}", self.name)).collect()
    }
}

/// Returns a message about why a recording was written.
pub fn kept_message(kept: &Kept) -> String {
    let Kept { at_unix_ns, reason, detail } = kept;
    let at = rfc3339::format(*at_unix_ns);
    match (reason.as_str(), printable(detail)) {
        ("signal", _) => format!("kept because of SIGUSR1 at {at}"),
        ("request", _) => format!("kept by request at {at}"),
        ("late" | "pressure", detail) => format!("kept because of {detail} at {at}"),
        (other, detail) => format!("kept at {at} ({} {detail})", printable(other)),
    }
}

/// Returns a message about a gap: what is missing and why.
pub fn gap_message(gap: &Gap) -> String {
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
