// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drives one source, live or recorded, into an output: late events as they arrive, and snapshots at each interval.

use std::fs;
use std::io::{self, IsTerminal as _, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use whylate_model::late::Thresholds;
use whylate_model::snapshot::RecordedFrom;
use whylate_model::units::format_round_ns;
use whylate_model::{Card, Labels, LateEvent, Merger, Snapshot};
use whylate_sources::Source;

use crate::cli::arguments::{Explain, Schedule};
use crate::cli::{Origin, record};
use crate::engine::feed::Feed;
use crate::engine::live::{AT_ONCE, Live, Pace};
use crate::engine::replay::Replay;
use crate::engine::ticks::{self, Sink, Tick};
use crate::engine::watch::Watch;
use crate::render::json::JsonLines;
use crate::render::text::Output;
use crate::render::text::fit::Fit;
use crate::render::text::next::Next;
use crate::store::late_buffer::{Keep, LateBuffer};
use crate::store::play::{Played, Recording};
use crate::store::{Recorder, about};

/// Selection of what a command measures and prints.
pub struct Query<'a> {
    /// The source, for a live run; for a replay, only its card is used.
    pub source: &'a dyn Source,
    pub schedule: Schedule,
    /// Thresholds as given, which decide what is late.
    pub explain: Explain,
    /// Prints how precise the source is on this machine.
    pub is_verbose: bool,
    pub keep: Keep,
    /// Thresholds of late events; `None` if late events are not read.
    pub late: Option<Thresholds>,
    /// Filter of series and late events of a recording. A live source filters by its options.
    pub only: &'a dyn Fn(&Labels) -> bool,
}

/// Where ticks come from: an attached source, or a recording.
pub enum Stream {
    Live(Box<Live>),
    Recorded(Box<Replay>),
}

impl Stream {
    /// Attaches the source and creates the file to record to, if any, or opens the recording.
    ///
    /// # Errors
    /// Fails if the source cannot attach, or the recording cannot be read or written.
    pub fn open(origin: &Origin, query: &Query<'_>, record_to: Option<&Path>) -> anyhow::Result<Self> {
        let card = query.source.info().card;
        let Schedule { interval, duration, .. } = query.schedule;
        let recording = match origin {
            Origin::Recording(recording) => recording,
            Origin::Live => {
                let watch = Watch::new().context("cannot watch for Ctrl-C")?;
                // Fails before anything is attached if the file cannot be written.
                let store = record_to.map(record::file).transpose()?;
                let feed = Feed::attach(query.source, query.is_verbose)?;
                let late_from_ns = query.late.map(|late| late.min_ns().unwrap_or(0));
                let header = about::of_one(card.name, feed.source.backend, late_from_ns);
                let recorder = store.map(|store| Recorder::start(store, header)).transpose()?;
                let has_late = query.late.is_some() || feed.source.fills_between_snapshots();
                let pace = Pace {
                    interval: interval.map(Duration::from_nanos),
                    duration: duration.map(Duration::from_nanos),
                    poll: has_late.then_some(AT_ONCE),
                    ..Pace::default()
                };
                let mut live = Live::of_one(feed, watch, pace);
                live.record(recorder);
                return Ok(Stream::Live(Box::new(live)));
            }
        };
        record::refuse(record_to)?;
        let played = recording.play()?;
        let recorded_from_ns = played.late_from_ns(card.name)?;
        if let Some(late) = query.late {
            let asked_ns = late.min_ns().unwrap_or(0);
            match recorded_from_ns {
                None => say!("whylate: {} was recorded without late events of {}", played.name(), card.name),
                Some(from_ns) if from_ns > asked_ns && asked_ns > 0 => {
                    say!("whylate: {} has late events of {} and longer only", played.name(), format_round_ns(from_ns));
                }
                Some(_) => {}
            }
        }
        Ok(Stream::Recorded(Box::new(Replay::of_source(played, card, interval, duration))))
    }

    /// Returns the attached source; `None` for a recording.
    pub fn feed(&self) -> Option<&Feed> {
        match self {
            Stream::Live(live) => live.feed(),
            Stream::Recorded(_) => None,
        }
    }

    /// Returns where the next command measures, or which recording it shows.
    pub fn next(&self, origin: &Origin) -> Next {
        match (self, origin) {
            (Stream::Recorded(replay), Origin::Recording(Recording { command: Some(command), .. })) => {
                Next::Replay(command.clone(), replay.header().sources.iter().map(|of| of.source.clone()).collect())
            }
            _ => Next::Live(process_of),
        }
    }
}

/// Returns the process of a thread that still runs.
fn process_of(tid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// Describes the measurement on a terminal, and how to end it unless it ends by itself.
pub fn announce(activity: &str, ends: bool) {
    if io::stderr().is_terminal() {
        say!("{}", announcement(activity, ends));
    }
}

fn announcement(activity: &str, ends: bool) -> String {
    let hint = if ends { "" } else { " Hit Ctrl-C to end." };
    format!("{activity} ...{hint}")
}

/// Starts the output, prints late events as they arrive, a snapshot at each interval, and one at the end. Calls `seen`
/// with each snapshot before it is printed. Returns whether anything was late.
///
/// # Errors
/// Fails if the source fails, the recording cannot be read, or the output cannot be written.
pub fn drive(
    stream: Stream,
    query: &Query<'_>,
    text: &mut dyn Output,
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<bool> {
    let output = if query.schedule.json { &mut JsonLines } else { text };
    if let (Stream::Live(_), Some(activity)) = (&stream, output.activity()) {
        let Schedule { duration, count, .. } = query.schedule;
        announce(&activity, duration.is_some() || count.is_some());
    }
    let out = &mut Fit::stdout(!query.schedule.json);
    output.begin(out)?;
    out.flush()?;
    let (merger, kept, printed) = (Merger::default(), LateBuffer::new(query.keep), 0);
    let recorded = match &stream {
        Stream::Recorded(replay) => recorded_from(replay.played(), query),
        Stream::Live(_) => None,
    };
    let (is_live, has_late) = (false, false);
    let notes = stream.feed().map_or(0, Feed::precision_notes);
    let mut printer = Printer { query, output, out, seen, merger, kept, printed, is_live, has_late, recorded, notes };
    match stream {
        Stream::Live(mut live) => {
            printer.is_live = true;
            ticks::drive(&mut *live, &mut printer)?;
            let is_closed = live.is_output_closed();
            if !is_closed {
                printer.print()?;
            }
            live.finish()?;
            // A closed pipe is a normal end, whatever was seen.
            if is_closed { Err(io::Error::from(io::ErrorKind::BrokenPipe).into()) } else { Ok(printer.has_late) }
        }
        Stream::Recorded(mut replay) => {
            ticks::drive(&mut *replay, &mut printer)?;
            printer.print()?;
            replay.finish().map(|()| printer.has_late)
        }
    }
}

/// Returns the thresholds of the recording's late events and of those to explain.
fn recorded_from(played: &Played, query: &Query<'_>) -> Option<RecordedFrom> {
    let asked_ns = query.late?.explain_ns?;
    let recorded_ns = played.late_from_ns(query.source.info().card.name).ok()??;
    Some(RecordedFrom { recorded_ns, asked_ns })
}

/// Prints late events as they arrive, and the snapshots of each interval merged into one.
struct Printer<'a> {
    query: &'a Query<'a>,
    output: &'a mut dyn Output,
    out: &'a mut dyn Write,
    /// Is called with each snapshot before it is printed.
    seen: &'a mut dyn FnMut(&Snapshot),
    merger: Merger,
    kept: LateBuffer,
    printed: u64,
    /// Whether the source has filtered by its options what comes.
    is_live: bool,
    /// Whether anything was late so far.
    has_late: bool,
    /// Thresholds of the recording and of `--why`; `None` without them.
    recorded: Option<RecordedFrom>,
    /// Number of notes on the source's precision, until the first snapshot is printed.
    notes: u64,
}

impl Printer<'_> {
    /// Prints what was not printed yet, if anything.
    fn print(&mut self) -> anyhow::Result<()> {
        let Some(mut snapshot) = self.merger.take() else { return Ok(()) };
        self.kept.move_into(&mut snapshot);
        snapshot.notes = std::mem::take(&mut self.notes);
        if let Some(from) = self.recorded {
            self.query.source.info().card.limit_unexplained(&mut snapshot, from);
        }
        (self.seen)(&snapshot);
        self.has_late |= self.query.explain.judges_late_snapshot(self.query.source.info().card, &snapshot);
        self.output.snapshot(self.out, snapshot)?;
        self.printed += 1;
        Ok(self.out.flush()?)
    }
}

impl Sink for Printer<'_> {
    fn late(&mut self, card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        let shown = match self.query.late.filter(|_| (self.query.only)(&event.labels)) {
            _ if self.is_live => Some(event),
            late => late.and_then(|late| late.apply(event)),
        };
        if let Some(event) = shown {
            self.has_late |= self.query.explain.judges_late(card, &event);
            self.output.late(self.out, &event)?;
            self.kept.add(event);
        }
        Ok(None)
    }

    fn poll(&mut self) -> anyhow::Result<ControlFlow<()>> {
        self.out.flush()?;
        Ok(ControlFlow::Continue(()))
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        if tick.is_after_gap {
            self.print()?;
        }
        tick.report_problems();
        let is_due = tick.is_due;
        for mut snapshot in tick.into_snapshots() {
            if !self.is_live {
                snapshot.series.retain(|series| series.labels.is_empty() || (self.query.only)(&series.labels));
            }
            self.merger.add(snapshot);
        }
        if is_due {
            self.print()?;
        }
        let is_over = self.query.schedule.count.is_some_and(|count| self.printed >= count);
        Ok(if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_endless_measurement_has_to_be_ended() {
        let of = |ends| announcement("Tracing every hrtimer", ends);
        assert_eq!(
            [of(false), of(true)],
            ["Tracing every hrtimer ... Hit Ctrl-C to end.", "Tracing every hrtimer ..."]
        );
    }
}
