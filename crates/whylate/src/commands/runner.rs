// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one way from sources to outputs: what measures, its late events as they come, and snapshots that carry those
//! that are asked for.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use whylate_model::units::format_ns;
use whylate_model::{Card, Labels, LateEvent, Merger, Snapshot, Worst};
use whylate_sources::{Attached, Measuring, Session, Source};

use super::watch::{Ended, Watch};
use super::{Origin, record, what_to_do};
use crate::arguments::{Explain, Schedule};
use crate::output::Output;
use crate::output::json::JsonLines;
use crate::recording::play::nothing_in_span;
use crate::recording::{Played, Recorder, about};

/// How often late events are taken in that are shown as they come: at once for a person, and little work.
const AT_ONCE: Duration = Duration::from_millis(100);
/// The same of those that are shown at the end.
pub const NOW_AND_THEN: Duration = Duration::from_millis(200);
/// What is recorded while it is shown has snapshots so often, at least.
const RECORD_EVERY: Duration = Duration::from_secs(1);
/// How many late events one snapshot carries at most, so that memory stays bounded; the others are counted as lost.
const LATE_EVENTS: usize = 4_000;

/// Which late events a snapshot carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// None: they are shown as they come.
    Nothing,
    All,
    /// Of those with causes only the worst, so many; and all others.
    Worst(usize),
    /// Only the worst of those with causes, so many: others are shown as they come.
    OnlyWorst(usize),
}

impl Keep {
    /// Late events are shown as they come, but in JSON, and where only the worst are asked for.
    pub fn of(schedule: Schedule, explain: Explain) -> Self {
        match explain.worst.map(usize::from) {
            worst if schedule.json => Keep::worst(worst),
            Some(limit) => Keep::OnlyWorst(limit),
            None => Keep::Nothing,
        }
    }

    /// All of them, or so many of the worst.
    pub fn worst(limit: Option<usize>) -> Self {
        limit.map_or(Keep::All, Keep::Worst)
    }
}

/// Late events until the next snapshot.
#[derive(Debug)]
pub struct Kept {
    keep: Keep,
    late: Vec<LateEvent>,
    worst: Option<Worst>,
    beyond_limit: u64,
}

impl Kept {
    pub fn new(keep: Keep) -> Self {
        let worst = match keep {
            Keep::Worst(limit) | Keep::OnlyWorst(limit) => Some(Worst::new(limit)),
            Keep::Nothing | Keep::All => None,
        };
        Kept { keep, late: Vec::new(), worst, beyond_limit: 0 }
    }

    pub fn add(&mut self, event: LateEvent) {
        match &mut self.worst {
            _ if self.keep == Keep::Nothing => {}
            Some(worst) if !event.causes.is_empty() => worst.add(event),
            _ if matches!(self.keep, Keep::OnlyWorst(_)) => {}
            _ if self.late.len() < LATE_EVENTS => self.late.push(event),
            _ => self.beyond_limit += 1,
        }
    }

    /// Hands over what was kept to a snapshot: others before the worst, and of these the worst first.
    pub fn tell(&mut self, snapshot: &mut Snapshot) {
        snapshot.late.append(&mut self.late);
        snapshot.late.extend(self.worst.iter_mut().flat_map(Worst::take));
        let beyond_limit = std::mem::take(&mut self.beyond_limit);
        if beyond_limit > 0 {
            *snapshot.lost.entry("late_events".to_owned()).or_default() += beyond_limit;
        }
    }
}

/// A source that measures, and its late events until the next snapshot.
pub struct Feed<S: Attached + ?Sized = dyn Attached> {
    pub card: &'static Card,
    pub source: Measuring<S>,
    kept: Kept,
    /// What was recorded since the last snapshot that was shown.
    recorded: Merger,
}

impl Feed {
    /// Attaches a source that measures alone, and says on standard error what is not as good here as it could be.
    ///
    /// # Errors
    /// When it cannot attach.
    pub fn of(source: &dyn Source, keep: Keep) -> anyhow::Result<Self> {
        let card = source.info().card;
        let attached = source.attach(&Session::of_one()).with_context(|| format!("cannot attach {}", card.name))?;
        let feed = Feed::new(card, attached, keep);
        feed.tell();
        Ok(feed)
    }
}

impl<S: Attached + ?Sized> Feed<S> {
    /// Of a source that has just been attached.
    pub fn new(card: &'static Card, source: Measuring<S>, keep: Keep) -> Self {
        Feed { card, source, kept: Kept::new(keep), recorded: Merger::default() }
    }

    /// Says on standard error what is not as good here as it could be.
    pub fn tell(&self) {
        let Measuring { backend, fallback_reason, .. } = &self.source;
        if let Some(reason) = fallback_reason {
            say!("whylate: {} uses the {backend} backend: {reason}{}", self.card.name, what_to_do(reason));
        }
        let Measuring { attached, .. } = &self.source;
        for told in attached.weaker().into_iter().chain(attached.left_out()).chain(attached.chosen()) {
            say!("whylate: {told}");
        }
    }

    /// Takes in the late events that have come; `each` hands back what the next snapshot may carry.
    ///
    /// # Errors
    /// When the source fails, or the first of `each`, which gets no other event then.
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

    /// What was seen since the previous call, with the late events that it is to carry.
    ///
    /// # Errors
    /// When the source fails.
    pub fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.snapshot_for(None)
    }

    /// The same, and everything of it is recorded.
    ///
    /// # Errors
    /// When the source fails.
    pub fn snapshot_for(&mut self, recorder: Option<&mut Recorder>) -> anyhow::Result<Snapshot> {
        self.record(recorder)?;
        let mut snapshot = self.recorded.take().context("nothing was measured")?;
        self.kept.tell(&mut snapshot);
        Ok(snapshot)
    }

    /// Records what was seen since the previous call; the next snapshot has it as well.
    ///
    /// # Errors
    /// When the source fails.
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

    /// The late events until a snapshot that is printed, where not all of them are.
    pub fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }
}

/// While something is recorded, when the next snapshot of it is due, however long nothing is shown; none so shortly before
/// something is shown that a replay could take it for that.
pub fn next_record(recorder: Option<&Recorder>, shown: Option<Instant>) -> Option<Instant> {
    let next = recorder.map(|_| Instant::now() + RECORD_EVERY)?;
    shown.is_none_or(|shown| next + RECORD_EVERY / 2 <= shown).then_some(next)
}

/// Waits until then, or until somebody ends it; `round` takes in what has come, so often, and tells if it is enough.
///
/// # Errors
/// When the kernel refuses to wait, or the first of `round`.
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

/// What a command is to show.
pub struct Wanted<'a> {
    /// What measures, where nothing is recorded.
    pub source: &'a dyn Source,
    pub schedule: Schedule,
    pub keep: Keep,
    /// Which late events are shown as they come; `None` where none are taken in.
    pub late: Option<Lates>,
    /// Of a recording, which series and late events; what measures is told by its options.
    pub only: &'a dyn Fn(&Labels) -> bool,
}

/// Which late events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lates {
    /// From where on they are shown.
    pub slower_ns: Option<u64>,
    /// From where on they have causes.
    pub why_ns: Option<u64>,
}

impl Lates {
    /// From where on anything is known of them; `None` where the source chooses.
    pub fn least_ns(self) -> Option<u64> {
        self.slower_ns.into_iter().chain(self.why_ns).min()
    }

    /// What these would have told of it, if anything.
    fn of(self, mut event: LateEvent) -> Option<LateEvent> {
        let Some(from_ns) = self.least_ns() else { return Some(event) };
        if event.latency_ns < from_ns {
            return None;
        }
        if self.why_ns.is_none_or(|why_ns| event.latency_ns < why_ns) {
            (event.causes, event.path) = (Vec::new(), Vec::new());
        }
        Some(event)
    }
}

/// What yields snapshots: a source, or a recording of it.
pub enum Stream {
    Live { feed: Box<Feed>, watch: Watch, recorder: Option<Recorder> },
    Recorded(Box<Played>),
}

impl Stream {
    /// Attaches the source, and records it where that is asked for, or opens the recording.
    ///
    /// # Errors
    /// When it cannot attach, or the recording cannot be read or written.
    pub fn open(origin: &Origin, wanted: &Wanted<'_>, record_to: Option<&Path>) -> anyhow::Result<Self> {
        let card = wanted.source.info().card;
        let recording = match origin {
            Origin::Recording(recording) => recording,
            Origin::Live => {
                let watch = Watch::new().context("cannot watch for Ctrl-C")?;
                // Whoever cannot be written to is told before anything is attached.
                let store = record_to.map(record::file).transpose()?;
                let feed = Feed::of(wanted.source, wanted.keep)?;
                let late_from_ns = wanted.late.map(|late| late.least_ns().unwrap_or(0));
                let header = about::of_one(card.name, feed.source.backend, late_from_ns);
                let recorder = store.map(|store| Recorder::start(store, header)).transpose()?;
                return Ok(Stream::Live { feed: Box::new(feed), watch, recorder });
            }
        };
        record::refuse(record_to)?;
        let played = recording.play()?;
        let recorded_from_ns = played.late_from_ns(card.name)?;
        if let Some(late) = wanted.late {
            let asked_ns = late.least_ns().unwrap_or(0);
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

    /// What measures, if something does.
    pub fn feed(&self) -> Option<&Feed> {
        match self {
            Stream::Live { feed, .. } => Some(feed),
            Stream::Recorded(_) => None,
        }
    }
}

/// Begins the output, shows late events as they come, if any, prints at each interval, and once more at the end. `seen`
/// gets each snapshot before it is printed.
///
/// # Errors
/// When the source fails, the recording cannot be read, or the output cannot be written.
pub fn drive(
    stream: Stream,
    wanted: &Wanted<'_>,
    text: &mut dyn Output,
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<()> {
    let output = if wanted.schedule.json { &mut JsonLines } else { text };
    let out = &mut io::BufWriter::new(io::stdout().lock());
    output.begin(out)?;
    out.flush()?;
    match stream {
        Stream::Live { mut feed, watch, mut recorder } => {
            drive_live(&mut feed, &watch, &mut recorder, wanted, output, out, seen)?;
            recorder.map_or(Ok(()), Recorder::end)
        }
        Stream::Recorded(mut played) => {
            let has_any = drive_recorded(&mut played, wanted, output, out, seen)?;
            played.report_missing();
            if has_any { Ok(()) } else { Err(nothing_in_span(played.name())) }
        }
    }
}

fn drive_live(
    feed: &mut Feed,
    watch: &Watch,
    recorder: &mut Option<Recorder>,
    wanted: &Wanted<'_>,
    output: &mut dyn Output,
    out: &mut dyn Write,
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<()> {
    let schedule = wanted.schedule;
    let started = Instant::now();
    let interval = schedule.interval.map(Duration::from_nanos);
    let end = schedule.duration.and_then(|ns| started.checked_add(Duration::from_nanos(ns)));
    for number in 1.. {
        // A fixed schedule: an output that takes long does not shift the ones after it.
        let due = interval.and_then(|interval| started.checked_add(interval.saturating_mul(number)));
        let ended = loop {
            let shown = due.into_iter().chain(end).min();
            let until = shown.into_iter().chain(next_record(recorder.as_ref(), shown)).min();
            let ended = if wanted.late.is_some() || feed.source.fills_between_snapshots() {
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

/// The same from a recording: snapshots are merged until an interval is full. False where the span has none.
fn drive_recorded(
    played: &mut Played,
    wanted: &Wanted<'_>,
    output: &mut dyn Output,
    out: &mut dyn Write,
    seen: &mut dyn FnMut(&Snapshot),
) -> anyhow::Result<bool> {
    let schedule = wanted.schedule;
    let source = wanted.source.info().card.name;
    let (mut merger, mut kept) = (Merger::default(), Kept::new(wanted.keep));
    let (mut played_ns, mut printed) = (0_u64, 0);
    // Intervals count from there: the beginning, or the end of the last gap.
    let (mut from_ns, mut full, mut ended_unix_ns, mut lead_ns) = (0_u64, 0, None, None);
    let mut print = |merger: &mut Merger, kept: &mut Kept, output: &mut dyn Output, out: &mut dyn Write| {
        let Some(mut snapshot) = merger.take() else { return anyhow::Ok(()) };
        kept.tell(&mut snapshot);
        seen(&snapshot);
        output.snapshot(out, snapshot)?;
        Ok(out.flush()?)
    };
    while let Some(mut snapshot) = played.next_snapshot(source)? {
        for event in std::mem::take(&mut snapshot.late) {
            let shown = wanted.late.filter(|_| (wanted.only)(&event.labels)).and_then(|late| late.of(event));
            if let Some(event) = shown {
                output.late(out, &event)?;
                kept.add(event);
            }
        }
        snapshot.series.retain(|series| series.labels.is_empty() || (wanted.only)(&series.labels));
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

    fn told(kept: &mut Kept) -> Snapshot {
        let mut snapshot = Snapshot::new(WQ.name, "fentry", "host", 0);
        kept.tell(&mut snapshot);
        snapshot
    }

    #[test]
    fn late_events_beyond_the_limit_are_counted() {
        let mut kept = Kept::new(Keep::All);
        (0..LATE_EVENTS + 3).for_each(|_| kept.add(LateEvent::default()));
        let snapshot = told(&mut kept);
        assert_eq!((snapshot.late.len(), snapshot.lost["late_events"]), (LATE_EVENTS, 3));
        let next = told(&mut kept);
        assert!(next.late.is_empty() && next.lost.is_empty());
    }

    #[test]
    fn only_the_worst_are_kept_where_that_is_asked_for() {
        let late = |latency_ns| {
            let causes = vec![Cause::new(CauseKind::Work, "hog", latency_ns)];
            LateEvent { latency_ns, causes, ..LateEvent::default() }
        };
        let mut kept = Kept::new(Keep::Worst(2));
        [4, 9, 2].into_iter().for_each(|ns| kept.add(late(ns)));
        let latencies = |snapshot: Snapshot| snapshot.late.iter().map(|event| event.latency_ns).collect::<Vec<_>>();
        assert_eq!(latencies(told(&mut kept)), [9, 4]);
        // What nobody has explained is not compared.
        kept.add(LateEvent { latency_ns: 1, ..LateEvent::default() });
        assert_eq!(latencies(told(&mut kept)), [1]);
        let mut only = Kept::new(Keep::OnlyWorst(2));
        [late(7), LateEvent { latency_ns: 1, ..LateEvent::default() }].into_iter().for_each(|event| only.add(event));
        assert_eq!(latencies(told(&mut only)), [7]);
        let mut nothing = Kept::new(Keep::Nothing);
        nothing.add(late(7));
        assert!(told(&mut nothing).late.is_empty());
    }
}
