// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ticks of attached sources.

use std::time::{Duration, Instant};

use whylate_model::recording::{Account, Header, Line};
use whylate_model::{LateEvent, Snapshot};
use whylate_sources::kernel::clock;
use whylate_sources::{Attached, Session};

use crate::engine::feed::Feed;
use crate::engine::sources::{Sources, Wish, measured};
use crate::engine::ticks::{Sink, Tick, Ticks};
use crate::engine::watch::{Ended, Watch};
use crate::store::late_buffer::{Keep, LateBuffer};
use crate::store::{Recorder, about};

/// Poll interval while late events are printed as they arrive.
pub const AT_ONCE: Duration = Duration::from_millis(100);
/// Poll interval while late events are only summarized.
pub const NOW_AND_THEN: Duration = Duration::from_millis(200);
/// Longest interval between ticks of a recording that is made while text is printed.
const RECORD_EVERY: Duration = Duration::from_secs(1);

/// Waits until a time, a signal or a closed output. Calls `round` once every `every`; ends when it returns true.
///
/// # Errors
/// When poll(2) or `round` fails.
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

/// When ticks are taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// Interval between ticks that are due. `None` for one at the end.
    pub interval: Option<Duration>,
    /// Interval before the first tick, if it is shorter.
    pub first: Option<Duration>,
    /// Time until the last tick. `None` for until a signal.
    pub duration: Option<Duration>,
    /// Poll interval of late events. `None` if they are not read.
    pub poll: Option<Duration>,
    /// Whether a closed standard output ends the run as a signal does, with a last tick: it goes to a file.
    pub outlives_output: bool,
}

/// Takes late events of a source.
type TakeLate = fn(&mut dyn Attached, &mut dyn FnMut(LateEvent)) -> anyhow::Result<()>;

/// Attached sources, measured tick by tick.
pub struct Live {
    attached: AttachedSources,
    watch: Watch,
    pace: Pace,
    started: Instant,
    due: Option<Instant>,
    end: Option<Instant>,
    is_over: bool,
    is_output_closed: bool,
}

struct AttachedSources {
    sources: Vec<LiveSource>,
    /// State that several sources share.
    session: Option<Session>,
    /// Errors of sources that failed since the last tick.
    problems: Vec<String>,
    /// Names of the sources that failed since the last tick.
    failed: Vec<&'static str>,
    /// Records what is measured while it is shown.
    recorder: Option<Recorder>,
}

struct LiveSource {
    feed: Feed,
    /// Span of late events that count, on CLOCK_MONOTONIC.
    began_ns: u64,
    ended_ns: u64,
    late: LateBuffer,
    snapshot: Option<Snapshot>,
    failed: Option<anyhow::Error>,
}

impl LiveSource {
    fn new(feed: Feed, began_ns: u64) -> Self {
        let late = LateBuffer::new(Keep::All);
        LiveSource { feed, began_ns, ended_ns: u64::MAX, late, snapshot: None, failed: None }
    }
}

impl Live {
    /// Measures one source.
    pub fn of_one(feed: Feed, watch: Watch, pace: Pace) -> Self {
        Live::start(AttachedSources::new(vec![LiveSource::new(feed, 0)], None), watch, pace)
    }

    /// Resets all sources, so that they cover one span. Returns them with the header of a recording.
    ///
    /// # Errors
    /// When a source fails.
    pub fn begin(sources: Sources, wish: &Wish, watch: Watch, pace: Pace) -> anyhow::Result<(Self, Header)> {
        let Sources { session, mut looking, unmeasured, limitations } = sources;
        // Discards what came in while attaching, so that the resetting snapshot below is quick.
        looking.iter_mut().try_for_each(Feed::discard)?;
        let mut sources = Vec::new();
        let measured = looking.iter().map(|feed| measured(feed, wish)).collect();
        for mut feed in looking {
            let began_ns = feed.source.snapshot()?.ended_ns;
            sources.push(LiveSource::new(feed, began_ns));
        }
        session.take_lost();
        let header = Header { sources: measured, unmeasured, limitations, ..about::this_machine() };
        Ok((Live::start(AttachedSources::new(sources, Some(session)), watch, pace), header))
    }

    fn start(attached: AttachedSources, watch: Watch, pace: Pace) -> Self {
        let started = Instant::now();
        let after = |length: Option<Duration>| length.and_then(|length| started.checked_add(length));
        let first = pace.interval.map(|interval| pace.first.map_or(interval, |first| first.min(interval)));
        let (due, end) = (after(first), after(pace.duration));
        Live { attached, watch, pace, started, due, end, is_over: false, is_output_closed: false }
    }

    /// Also records what is measured, with more ticks if few are due.
    pub fn record(&mut self, recorder: Option<Recorder>) {
        self.attached.recorder = recorder;
    }

    /// Returns when the next tick is recorded that is not due, if any. `None` if the next one that is due is less than
    /// 1.5 `RECORD_EVERY` away: a replay could not distinguish the two.
    fn next_recorded(&self, shown: Option<Instant>) -> Option<Instant> {
        let next = Instant::now() + RECORD_EVERY;
        let is_before = shown.is_none_or(|shown| next + RECORD_EVERY / 2 <= shown);
        (self.attached.recorder.is_some() && is_before).then_some(next)
    }

    /// Detaches the sources, and ends the recording.
    ///
    /// # Errors
    /// When something could not be recorded.
    pub fn finish(self) -> anyhow::Result<()> {
        let AttachedSources { sources, session, recorder, .. } = self.attached;
        session.iter().for_each(Session::end);
        drop((sources, session));
        recorder.map_or(Ok(()), Recorder::end)
    }

    /// Passes the late events that have arrived since the last tick to the sink.
    ///
    /// # Errors
    /// When the source or the sink fails.
    pub fn take_late(&mut self, sink: &mut dyn Sink) -> anyhow::Result<()> {
        self.attached.take_late(sink)
    }

    /// Returns the first source; `None` if all have failed.
    pub fn feed(&self) -> Option<&Feed> {
        self.attached.sources.first().map(|source| &source.feed)
    }

    /// Returns whether the run ended because the reader of standard output is gone.
    pub fn is_output_closed(&self) -> bool {
        self.is_output_closed
    }
}

impl Ticks for Live {
    fn next(&mut self, sink: &mut dyn Sink) -> anyhow::Result<Option<Tick>> {
        if self.is_over {
            return Ok(None);
        }
        let shown = self.due.into_iter().chain(self.end).min();
        let until = shown.into_iter().chain(self.next_recorded(shown)).min();
        let ended = match self.pace.poll {
            Some(every) => wait(&self.watch, until, every, &mut || {
                self.attached.take_late(sink)?;
                Ok(sink.poll()?.is_break())
            })?,
            None => self.watch.until(until)?,
        };
        self.is_over = ended != Ended::Time || self.end.is_some_and(|end| Instant::now() >= end);
        self.is_output_closed = ended == Ended::OutputClosed && !self.pace.outlives_output;
        if self.is_output_closed {
            return Ok(None);
        }
        if self.pace.poll.is_some() {
            self.attached.explain_pending(sink)?;
        }
        let tick = self.attached.tick(sink, self.is_over)?;
        // On a busy machine a tick may take until after the end. A replay does not go on after it either.
        self.is_over |= self.end.is_some_and(|end| Instant::now() >= end);
        let is_due = self.due.is_some_and(|due| Instant::now() >= due);
        if let (true, Some(interval)) = (is_due, self.pace.interval) {
            // A fixed schedule: an output that takes long does not shift the ones after it. Ticks that were missed,
            // e.g. while whylate was stopped, are skipped.
            let number = (self.started.elapsed().as_nanos() / interval.as_nanos().max(1)) as u32 + 1;
            self.due = self.started.checked_add(interval.saturating_mul(number));
        }
        Ok(Some(Tick { is_due, is_last: self.is_over, ..tick }))
    }
}

impl AttachedSources {
    fn new(sources: Vec<LiveSource>, session: Option<Session>) -> Self {
        AttachedSources { sources, session, problems: Vec::new(), failed: Vec::new(), recorder: None }
    }

    /// Passes the late events that have arrived to the sink.
    fn take_late(&mut self, sink: &mut dyn Sink) -> anyhow::Result<()> {
        self.drain(sink, |source, each| source.drain_late(Duration::ZERO, each))?;
        self.drop_failed()
    }

    /// Passes to the sink the late events that snapshots would explain and keep.
    fn explain_pending(&mut self, sink: &mut dyn Sink) -> anyhow::Result<()> {
        self.drain(sink, |source, each| source.explain_pending(each))?;
        self.drop_failed()
    }

    /// Passes the late events of each source that `take` takes to the sink.
    fn drain(&mut self, sink: &mut dyn Sink, take: TakeLate) -> anyhow::Result<()> {
        let recorder = &mut self.recorder;
        for LiveSource { feed, began_ns, ended_ns, late, failed, .. } in &mut self.sources {
            let mut outcome = Ok(());
            let drained = take(&mut *feed.source.attached, &mut |event| {
                if outcome.is_err() || !(*began_ns..=*ended_ns).contains(&event.at_ns) {
                    return;
                }
                if let Some(recorder) = recorder {
                    recorder.late(feed.card.name, event.clone());
                }
                match sink.late(feed.card, event) {
                    Ok(event) => event.into_iter().for_each(|event| late.add(LateEvent { evidence: None, ..event })),
                    Err(error) => outcome = Err(error),
                }
            });
            outcome?;
            *failed = drained.err();
        }
        Ok(())
    }

    /// Drops failed sources. Returns an error when none is left.
    fn drop_failed(&mut self) -> anyhow::Result<()> {
        let mut last = None;
        for at in (0..self.sources.len()).rev() {
            if let Some(error) = self.sources[at].failed.take() {
                let name = self.sources.remove(at).feed.card.name;
                self.failed.push(name);
                self.problems.push(format!("{name} has failed, and the others go on: {error:#}"));
                last = Some(error);
            }
        }
        match last {
            Some(error) if self.sources.is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes a snapshot of all sources, with the late events since the previous one.
    fn tick(&mut self, sink: &mut dyn Sink, is_last: bool) -> anyhow::Result<Tick> {
        for LiveSource { feed, snapshot, failed, .. } in &mut self.sources {
            match feed.source.snapshot() {
                Ok(taken) => *snapshot = Some(taken),
                Err(error) => *failed = Some(error),
            }
        }
        self.drop_failed()?;
        if is_last && self.session.is_some() {
            for LiveSource { ended_ns, snapshot, .. } in &mut self.sources {
                *ended_ns = snapshot.as_ref().map_or(u64::MAX, |snapshot| snapshot.ended_ns);
            }
            self.drain(sink, |source, each| source.drain_late(Duration::ZERO, each))?;
        }
        // The recorder has the late events already.
        let (mut lines, mut recorded) = (Vec::new(), Vec::new());
        for LiveSource { late, snapshot, .. } in &mut self.sources {
            if let Some(mut snapshot) = snapshot.take() {
                recorded.extend(self.recorder.iter().map(|_| Line::Snapshot(Box::new(snapshot.clone()))));
                late.move_into(&mut snapshot);
                lines.push(Line::Snapshot(Box::new(snapshot)));
            }
        }
        let mut lost = self.session.as_ref().map(Session::take_lost).unwrap_or_default();
        lost.retain(|_, count| *count > 0);
        if !lost.is_empty() {
            let account = Line::Account(Account { at_unix_ns: clock::unix_ns(), lost });
            recorded.push(account.clone());
            lines.push(account);
        }
        self.drop_failed()?;
        if let Some(recorder) = &mut self.recorder {
            recorder.tick(recorded);
            self.problems.extend(recorder.take_problem());
        }
        Ok(Tick {
            lines,
            problems: std::mem::take(&mut self.problems),
            failed: std::mem::take(&mut self.failed),
            ..Tick::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::ops::ControlFlow;
    use std::os::unix::net::UnixStream;

    use anyhow::bail;
    use whylate_model::Card;
    use whylate_model::sources::{TIMERLAT, WQ};
    use whylate_sources::Measuring;

    use super::*;

    /// A source that fails after `left` snapshots, which end at 200. Each drain has the late events of one entry, by
    /// their times on CLOCK_MONOTONIC, while the wall clock is set back all the time. It leaves one event, at 170, for later.
    struct Measures {
        card: &'static Card,
        left: u32,
        late: VecDeque<Vec<u64>>,
        has_pending: bool,
    }

    impl Attached for Measures {
        fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
            let Some(left) = self.left.checked_sub(1) else { bail!("its map is gone") };
            self.left = left;
            Ok(Snapshot { ended_ns: 200, ..Snapshot::new(self.card.name, "made", "host", 0) })
        }

        fn drain_late(&mut self, _wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
            for (number, at_ns) in self.late.pop_front().unwrap_or_default().into_iter().enumerate() {
                each(LateEvent { at_ns, at_unix_ns: 1_000_000 - number as u64, ..LateEvent::default() });
            }
            Ok(())
        }

        fn explain_pending(&mut self, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
            if std::mem::take(&mut self.has_pending) {
                each(LateEvent { at_ns: 170, ..LateEvent::default() });
            }
            Ok(())
        }
    }

    fn source(card: &'static Card, left: u32, late: &[&[u64]]) -> LiveSource {
        let late = late.iter().map(|of| of.to_vec()).collect();
        let attached: Box<dyn Attached> = Box::new(Measures { card, left, late, has_pending: true });
        LiveSource::new(Feed { card, source: Measuring { backend: "made", fallback_reason: None, attached } }, 100)
    }

    /// Does nothing: ticks have all late events.
    struct Ignores;

    impl Sink for Ignores {
        fn tick(&mut self, _tick: Tick) -> anyhow::Result<ControlFlow<()>> {
            Ok(ControlFlow::Continue(()))
        }
    }

    #[test]
    fn failed_source_does_not_stop_others() {
        let sources = vec![source(&WQ, 1, &[&[107]]), source(&TIMERLAT, 2, &[&[107]])];
        let mut live = AttachedSources::new(sources, Some(Session::of_several()));
        live.take_late(&mut Ignores).expect("both are there");
        let tick = live.tick(&mut Ignores, false).expect("both are there");
        assert_eq!((tick.lines.len(), tick.late(), tick.problems.len()), (2, 2, 0));
        let tick = live.tick(&mut Ignores, false).expect("one is there");
        assert_eq!(tick.problems, ["wq has failed, and the others go on: its map is gone"]);
        assert_eq!(tick.lines.len(), 1);
        assert!(live.tick(&mut Ignores, false).is_err(), "nothing measures any more");
    }

    #[test]
    fn late_events_of_the_span_count_while_wall_clock_is_set() {
        let sources = vec![source(&WQ, 9, &[&[99, 100, 150], &[200, 201]])];
        let (_peer, stop) = UnixStream::pair().expect("a pair");
        let pace = Pace { duration: Some(Duration::ZERO), poll: Some(NOW_AND_THEN), ..Pace::default() };
        let attached = AttachedSources::new(sources, Some(Session::of_several()));
        let mut live = Live::start(attached, Watch::of_socket(stop), pace);
        let tick = live.next(&mut Ignores).expect("it measures").expect("a tick");
        // Those of the drain, of the end, and the one that was left for later.
        assert_eq!(tick.late(), 4);
        assert!(live.next(&mut Ignores).expect("it has ended").is_none());
    }

    #[test]
    fn closed_output_ends_without_a_tick_unless_a_file_is_written() {
        for (outlives_output, ticks) in [(false, 0), (true, 1)] {
            let (peer, stop) = UnixStream::pair().expect("a pair");
            drop(peer);
            let attached = AttachedSources::new(vec![source(&WQ, 9, &[])], None);
            let mut live = Live::start(attached, Watch::of_socket(stop), Pace { outlives_output, ..Pace::default() });
            let mut taken = 0;
            while live.next(&mut Ignores).expect("it measures").is_some() {
                taken += 1;
            }
            assert_eq!((taken, live.is_output_closed()), (ticks, !outlives_output));
        }
    }
}
