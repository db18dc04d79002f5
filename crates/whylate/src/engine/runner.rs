// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drives one source, live or recorded, into an output: late events as they arrive, and snapshots at each interval.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use whylate_model::units::format_ns;
use whylate_model::{Card, Labels, LateEvent, Merger, Snapshot, TopN};
use whylate_sources::{Attached, Measuring, Session, Source};

use crate::cli::arguments::{Explain, Schedule};
use crate::cli::{Origin, record, what_to_do};
use crate::engine::watch::{Ended, Watch};
use crate::render::json::JsonLines;
use crate::render::text::Output;
use crate::store::play::nothing_in_span;
use crate::store::{Played, Recorder, about};

/// Poll interval while late events are printed as they arrive.
const AT_ONCE: Duration = Duration::from_millis(100);
/// Poll interval while late events are only summarized.
pub const NOW_AND_THEN: Duration = Duration::from_millis(200);
/// Longest interval between snapshots of a recording that is made while text is printed.
const RECORD_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of late events of a snapshot, which bounds memory. Others are counted as lost.
const MAX_LATE_EVENTS: usize = 4_000;

/// Late events that a snapshot carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// No late events: they are printed as they arrive.
    Nothing,
    All,
    /// The N worst late events with causes, and all late events without causes.
    TopN(usize),
    /// The N worst late events with causes, and no others.
    OnlyWorst(usize),
}

impl Keep {
    /// Chooses by the options: all late events (or the worst) for JSON, the worst for `--worst`, otherwise none.
    pub fn for_options(schedule: Schedule, explain: Explain) -> Self {
        match explain.worst.map(usize::from) {
            worst if schedule.json => Keep::worst(worst),
            Some(limit) => Keep::OnlyWorst(limit),
            None => Keep::Nothing,
        }
    }

    /// Keeps the `limit` worst late events, or all without a limit.
    pub fn worst(limit: Option<usize>) -> Self {
        limit.map_or(Keep::All, Keep::TopN)
    }
}

/// Buffers late events until the next snapshot.
#[derive(Debug)]
pub struct PendingLate {
    keep: Keep,
    late: Vec<LateEvent>,
    worst: Option<TopN>,
    beyond_limit: u64,
}

impl PendingLate {
    pub fn new(keep: Keep) -> Self {
        let worst = match keep {
            Keep::TopN(limit) | Keep::OnlyWorst(limit) => Some(TopN::new(limit)),
            Keep::Nothing | Keep::All => None,
        };
        PendingLate { keep, late: Vec::new(), worst, beyond_limit: 0 }
    }

    pub fn add(&mut self, event: LateEvent) {
        match &mut self.worst {
            _ if self.keep == Keep::Nothing => {}
            Some(worst) if !event.causes.is_empty() => worst.add(event),
            _ if matches!(self.keep, Keep::OnlyWorst(_)) => {}
            _ if self.late.len() < MAX_LATE_EVENTS => self.late.push(event),
            _ => self.beyond_limit += 1,
        }
    }

    /// Moves the buffered late events into a snapshot: first those without causes, then the worst, longest first.
    pub fn move_into(&mut self, snapshot: &mut Snapshot) {
        snapshot.late.append(&mut self.late);
        snapshot.late.extend(self.worst.iter_mut().flat_map(TopN::take));
        let beyond_limit = std::mem::take(&mut self.beyond_limit);
        if beyond_limit > 0 {
            *snapshot.lost.entry("late_events".to_owned()).or_default() += beyond_limit;
        }
    }
}

/// An attached source, and its late events until the next snapshot.
pub struct Feed<S: Attached + ?Sized = dyn Attached> {
    pub card: &'static Card,
    pub source: Measuring<S>,
    kept: PendingLate,
    /// Sum of the snapshots since the last one that was printed.
    recorded: Merger,
}

impl Feed {
    /// Attaches one source on its own, and prints its limitations on this machine to standard error.
    ///
    /// # Errors
    /// Fails if the source cannot attach.
    pub fn attach(source: &dyn Source, keep: Keep) -> anyhow::Result<Self> {
        let card = source.info().card;
        let attached = source.attach(&Session::of_one()).with_context(|| format!("cannot attach {}", card.name))?;
        let feed = Feed::new(card, attached, keep);
        feed.print_limitations();
        Ok(feed)
    }
}

impl<S: Attached + ?Sized> Feed<S> {
    /// Wraps a source that was just attached.
    pub fn new(card: &'static Card, source: Measuring<S>, keep: Keep) -> Self {
        Feed { card, source, kept: PendingLate::new(keep), recorded: Merger::default() }
    }

    /// Prints the source's limitations on this machine to standard error.
    pub fn print_limitations(&self) {
        let Measuring { backend, fallback_reason, .. } = &self.source;
        if let Some(reason) = fallback_reason {
            say!("whylate: {} uses the {backend} backend: {reason}{}", self.card.name, what_to_do(reason));
        }
        let Measuring { attached, .. } = &self.source;
        for note in attached.limitations().into_iter().chain(attached.left_out()).chain(attached.chosen()) {
            say!("whylate: {note}");
        }
    }

    /// Drains the late events that have arrived. Buffers those that `each` returns for the next snapshot.
    ///
    /// # Errors
    /// Fails if the source or `each` fails; `each` is not called again after an error.
    pub fn take_late(
        &mut self,
        each: &mut dyn FnMut(LateEvent) -> anyhow::Result<Option<LateEvent>>,
    ) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let Feed { source, kept, .. } = self;
        source.drain_late(Duration::ZERO, &mut |event| {
            if outcome.is_ok() {
                match each(event) {
                    Ok(event) => event.into_iter().for_each(|event| kept.add(event)),
                    Err(error) => outcome = Err(error),
                }
            }
        })?;
        outcome
    }

    /// Takes a snapshot since the previous call, with the buffered late events.
    ///
    /// # Errors
    /// Fails if the source fails.
    pub fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.snapshot_for(None)
    }

    /// Takes a snapshot since the previous call, with the buffered late events, and records what is not recorded yet.
    ///
    /// # Errors
    /// Fails if the source fails.
    pub fn snapshot_for(&mut self, recorder: Option<&mut Recorder>) -> anyhow::Result<Snapshot> {
        self.record(recorder)?;
        let mut snapshot = self.recorded.take().context("nothing was measured")?;
        self.kept.move_into(&mut snapshot);
        Ok(snapshot)
    }

    /// Records a snapshot since the previous call, and adds it to the next one that is returned.
    ///
    /// # Errors
    /// Fails if the source fails.
    pub fn record(&mut self, recorder: Option<&mut Recorder>) -> anyhow::Result<()> {
        let snapshot = self.source.snapshot()?;
        if let Some(recorder) = recorder {
            recorder.snapshot(&snapshot);
            if let Some(problem) = recorder.take_problem() {
                say!("whylate: {problem}");
            }
        }
        self.recorded.add(snapshot);
        Ok(())
    }

    /// Returns the late events buffered for the next printed snapshot.
    pub fn kept(&mut self) -> &mut PendingLate {
        &mut self.kept
    }
}

/// Returns when the next recording-only snapshot is due. `None` without a recorder, or if the next printed snapshot is
/// less than 1.5 `RECORD_EVERY` away: a replay could not distinguish the two.
pub fn next_record(recorder: Option<&Recorder>, shown: Option<Instant>) -> Option<Instant> {
    let next = recorder.map(|_| Instant::now() + RECORD_EVERY)?;
    shown.is_none_or(|shown| next + RECORD_EVERY / 2 <= shown).then_some(next)
}

/// Waits until a time, a signal or a closed output. Calls `round` once every `every`; ends when it returns true.
///
/// # Errors
/// Fails if poll(2) or `round` fails.
pub fn wait(
    watch: &Watch,
    until: Option<Instant>,
    every: Duration,
    round: &mut dyn FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<Ended> {
    loop {
        let soon = Instant::now() + every;
        let ended = watch.until(Some(until.map_or(soon, |until| until.min(soon))))?;
        if round()? || ended != Ended::Time || until.is_some_and(|until| Instant::now() >= until) {
            return Ok(ended);
        }
    }
}

/// Selection of what a command measures and prints.
pub struct Query<'a> {
    /// The source, for a live run; for a replay, only its card is used.
    pub source: &'a dyn Source,
    pub schedule: Schedule,
    pub keep: Keep,
    /// Thresholds of late events; `None` if late events are not read.
    pub late: Option<Lates>,
    /// Filter of series and late events of a recording. A live source filters by its options.
    pub only: &'a dyn Fn(&Labels) -> bool,
}

/// Latency thresholds of late events, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lates {
    /// Events from this latency on are printed.
    pub slower_ns: Option<u64>,
    /// Events from this latency on have causes.
    pub why_ns: Option<u64>,
}

impl Lates {
    /// Returns the lower of the two thresholds; `None` if the source chooses.
    pub fn min_ns(self) -> Option<u64> {
        self.slower_ns.into_iter().chain(self.why_ns).min()
    }

    /// Applies the thresholds: drops the event below both, and its causes below `why_ns`.
    fn apply(self, mut event: LateEvent) -> Option<LateEvent> {
        let Some(from_ns) = self.min_ns() else { return Some(event) };
        if event.latency_ns < from_ns {
            return None;
        }
        if self.why_ns.is_none_or(|why_ns| event.latency_ns < why_ns) {
            (event.causes, event.path) = (Vec::new(), Vec::new());
        }
        Some(event)
    }
}

/// Origin of snapshots: an attached source, or a recording.
pub enum Stream {
    Live { feed: Box<Feed>, watch: Watch, recorder: Option<Recorder> },
    Recorded(Box<Played>),
}

impl Stream {
    /// Attaches the source and creates the file to record to, if any, or opens the recording.
    ///
    /// # Errors
    /// Fails if the source cannot attach, or the recording cannot be read or written.
    pub fn open(origin: &Origin, query: &Query<'_>, record_to: Option<&Path>) -> anyhow::Result<Self> {
        let card = query.source.info().card;
        let recording = match origin {
            Origin::Recording(recording) => recording,
            Origin::Live => {
                let watch = Watch::new().context("cannot watch for Ctrl-C")?;
                // Fails before anything is attached if the file cannot be written.
                let store = record_to.map(record::file).transpose()?;
                let feed = Feed::attach(query.source, query.keep)?;
                let late_from_ns = query.late.map(|late| late.min_ns().unwrap_or(0));
                let header = about::of_one(card.name, feed.source.backend, late_from_ns);
                let recorder = store.map(|store| Recorder::start(store, header)).transpose()?;
                return Ok(Stream::Live { feed: Box::new(feed), watch, recorder });
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
                    say!("whylate: {} has late events of {} and longer only", played.name(), format_ns(from_ns));
                }
                Some(_) => {}
            }
        }
        Ok(Stream::Recorded(Box::new(played)))
    }

    /// Returns the attached source; `None` for a recording.
    pub fn feed(&self) -> Option<&Feed> {
        match self {
            Stream::Live { feed, .. } => Some(feed),
            Stream::Recorded(_) => None,
        }
    }
}

/// Starts the output, prints late events as they arrive, a snapshot at each interval, and one at the end. Calls `seen`
/// with each snapshot before it is printed.
///
/// # Errors
/// Fails if the source fails, the recording cannot be read, or the output cannot be written.
pub fn drive(
    stream: Stream,
    query: &Query<'_>,
    text: &mut dyn Output,
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<()> {
    let output = if query.schedule.json { &mut JsonLines } else { text };
    let out = &mut io::BufWriter::new(io::stdout().lock());
    output.begin(out)?;
    out.flush()?;
    match stream {
        Stream::Live { mut feed, watch, mut recorder } => {
            drive_live(&mut feed, &watch, &mut recorder, query, output, out, seen)?;
            recorder.map_or(Ok(()), Recorder::end)
        }
        Stream::Recorded(mut played) => {
            let has_any = drive_recorded(&mut played, query, output, out, seen)?;
            played.report_missing();
            if has_any { Ok(()) } else { Err(nothing_in_span(played.name())) }
        }
    }
}

fn drive_live(
    feed: &mut Feed,
    watch: &Watch,
    recorder: &mut Option<Recorder>,
    query: &Query<'_>,
    output: &mut dyn Output,
    out: &mut dyn Write,
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<()> {
    let schedule = query.schedule;
    let started = Instant::now();
    let interval = schedule.interval.map(Duration::from_nanos);
    let end = schedule.duration.and_then(|ns| started.checked_add(Duration::from_nanos(ns)));
    for number in 1.. {
        // A fixed schedule: an output that takes long does not shift the ones after it.
        let due = interval.and_then(|interval| started.checked_add(interval.saturating_mul(number)));
        let ended = loop {
            let shown = due.into_iter().chain(end).min();
            let until = shown.into_iter().chain(next_record(recorder.as_ref(), shown)).min();
            let ended = if query.late.is_some() || feed.source.fills_between_snapshots() {
                wait(watch, until, AT_ONCE, &mut || {
                    feed.take_late(&mut |event| {
                        if let Some(recorder) = recorder {
                            recorder.late(&event);
                        }
                        output.late(out, &event)?;
                        Ok(Some(event))
                    })?;
                    out.flush()?;
                    Ok(false)
                })?
            } else {
                watch.until(until)?
            };
            if ended != Ended::Time || due.into_iter().chain(end).any(|at| Instant::now() >= at) {
                break ended;
            }
            feed.record(recorder.as_mut())?;
        };
        if ended == Ended::OutputClosed {
            return Ok(());
        }
        let snapshot = feed.snapshot_for(recorder.as_mut())?;
        seen(&snapshot);
        output.snapshot(out, snapshot)?;
        out.flush()?;
        let last = ended == Ended::Signal
            || interval.is_none()
            || end.is_some_and(|end| Instant::now() >= end)
            || schedule.count.is_some_and(|count| u64::from(number) >= count);
        if last {
            break;
        }
    }
    Ok(())
}

/// Drives the output from a recording: merges snapshots until an interval is complete. Returns false if the span is
/// empty.
fn drive_recorded(
    played: &mut Played,
    query: &Query<'_>,
    output: &mut dyn Output,
    out: &mut dyn Write,
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<bool> {
    let schedule = query.schedule;
    let source = query.source.info().card.name;
    let (mut merger, mut kept) = (Merger::default(), PendingLate::new(query.keep));
    let (mut played_ns, mut printed) = (0_u64, 0);
    // Intervals count from `from_ns`: the start, or the end of the last gap.
    let (mut from_ns, mut full, mut ended_unix_ns, mut lead_ns) = (0_u64, 0, None, None);
    let mut print = |merger: &mut Merger, kept: &mut PendingLate, output: &mut dyn Output, out: &mut dyn Write| {
        let Some(mut snapshot) = merger.take() else { return anyhow::Ok(()) };
        kept.move_into(&mut snapshot);
        seen(&snapshot);
        output.snapshot(out, snapshot)?;
        Ok(out.flush()?)
    };
    while let Some(mut snapshot) = played.next_snapshot(source)? {
        for event in std::mem::take(&mut snapshot.late) {
            let shown = query.late.filter(|_| (query.only)(&event.labels)).and_then(|late| late.apply(event));
            if let Some(event) = shown {
                output.late(out, &event)?;
                kept.add(event);
            }
        }
        snapshot.series.retain(|series| series.labels.is_empty() || (query.only)(&series.labels));
        let length_ns = snapshot.duration_ns;
        let is_after_gap = |end_ns: u64| snapshot.start_unix_ns > end_ns.saturating_add(length_ns);
        if schedule.interval.is_some() && ended_unix_ns.is_some_and(is_after_gap) && merger.duration_ns() > 0 {
            print(&mut merger, &mut kept, output, out)?;
            (from_ns, full, printed) = (played_ns.saturating_sub(lead_ns.unwrap_or(0)), 0, printed + 1);
        }
        ended_unix_ns = Some(snapshot.start_unix_ns.saturating_add(length_ns));
        played_ns = played_ns.saturating_add(length_ns);
        let since_ns = played_ns.saturating_sub(*lead_ns.get_or_insert_with(|| played.lead_ns(&snapshot)));
        merger.add(snapshot);
        let due_ns = schedule.interval.map(|interval| from_ns.saturating_add(interval.saturating_mul(full + 1)));
        if due_ns.is_some_and(|due_ns| played.completes_interval(since_ns, length_ns, due_ns)) {
            print(&mut merger, &mut kept, output, out)?;
            (full, printed) = (full + 1, printed + 1);
        }
        let is_over = schedule.duration.is_some_and(|ns| played.completes_interval(since_ns, length_ns, ns));
        if is_over || schedule.count.is_some_and(|count| printed >= count) {
            break;
        }
    }
    print(&mut merger, &mut kept, output, out)?;
    Ok(ended_unix_ns.is_some())
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::WQ;
    use whylate_model::{Cause, CauseKind};

    use super::*;

    fn snapshot_of(kept: &mut PendingLate) -> Snapshot {
        let mut snapshot = Snapshot::new(WQ.name, "fentry", "host", 0);
        kept.move_into(&mut snapshot);
        snapshot
    }

    #[test]
    fn counts_late_events_beyond_limit_as_lost() {
        let mut kept = PendingLate::new(Keep::All);
        (0..MAX_LATE_EVENTS + 3).for_each(|_| kept.add(LateEvent::default()));
        let snapshot = snapshot_of(&mut kept);
        assert_eq!((snapshot.late.len(), snapshot.lost["late_events"]), (MAX_LATE_EVENTS, 3));
        let next = snapshot_of(&mut kept);
        assert!(next.late.is_empty() && next.lost.is_empty());
    }

    #[test]
    fn keeps_only_worst_late_events() {
        let late = |latency_ns| {
            let causes = vec![Cause::new(CauseKind::Work, "hog", latency_ns)];
            LateEvent { latency_ns, causes, ..LateEvent::default() }
        };
        let mut kept = PendingLate::new(Keep::TopN(2));
        [4, 9, 2].into_iter().for_each(|ns| kept.add(late(ns)));
        let latencies = |snapshot: Snapshot| snapshot.late.iter().map(|event| event.latency_ns).collect::<Vec<_>>();
        assert_eq!(latencies(snapshot_of(&mut kept)), [9, 4]);
        // An event without causes does not compete for the worst.
        kept.add(LateEvent { latency_ns: 1, ..LateEvent::default() });
        assert_eq!(latencies(snapshot_of(&mut kept)), [1]);
        let mut only = PendingLate::new(Keep::OnlyWorst(2));
        [late(7), LateEvent { latency_ns: 1, ..LateEvent::default() }].into_iter().for_each(|event| only.add(event));
        assert_eq!(latencies(snapshot_of(&mut only)), [7]);
        let mut nothing = PendingLate::new(Keep::Nothing);
        nothing.add(late(7));
        assert!(snapshot_of(&mut nothing).late.is_empty());
    }
}
