// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attaches all sources at once, for the overview, `top`, `record` and `report`.

use std::time::Instant;

use anyhow::Context as _;
use whylate_model::Card;
use whylate_model::overview::Unmeasured;
use whylate_model::recording::{Account, Header, Line, Measured};
use whylate_sources::kernel::clock;
use whylate_sources::{CommonOptions, Session, sources};

use crate::engine::runner::{Feed, Keep};
use crate::engine::watch::{Ended, Watch};
use crate::store::about;
use crate::store::recorder::LateBuffer;

/// The attached sources, the sources that could not attach, and limitations of the attached ones.
pub struct Sources {
    pub session: Session,
    pub looking: Vec<Feed>,
    pub unmeasured: Vec<Unmeasured>,
    pub limitations: Vec<Unmeasured>,
}

impl Sources {
    /// Returns the CPUs left out by a source that measures with threads or timers of its own.
    pub fn left_out(&self) -> Option<String> {
        let attached = self.looking.iter().map(|feed| &feed.source.attached);
        attached.filter_map(|attached| attached.left_out()).next().map(str::to_owned)
    }
}

/// Sources to attach, and their reports.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Names of the sources to attach; empty for all.
    pub only: Vec<String>,
    /// Latency from which late events are explained; `None` for each source's own limit.
    pub why_ns: Option<u64>,
    /// Explains events of this latency or longer, even where the limit above is higher.
    pub surely_from_ns: Option<u64>,
    /// Splits series by as many labels as each source can.
    pub in_detail: bool,
    /// CPUs for whylate's own threads and timers; empty for all usable ones.
    pub cpus: Vec<u32>,
}

impl Wish {
    fn takes(&self, card: &Card) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == card.name)
    }

    /// Returns the latency from which late events of this source are explained.
    pub fn late_from_ns(&self, card: &Card) -> u64 {
        self.at_most(self.why_ns.unwrap_or(card.events().late_from_ns))
    }

    fn at_most(&self, limit_ns: u64) -> u64 {
        self.surely_from_ns.map_or(limit_ns, |surely_ns| limit_ns.min(surely_ns))
    }
}

/// Progress of `attach`.
pub enum Attaching<'a> {
    /// This source is attached next.
    Begins(&'a Card),
    /// Sources attached so far. Late events have no causes before all sources are attached.
    Done(&'a mut [Feed]),
}

/// Attaches every source that can attach, and records why others cannot. Calls `on_progress` before and after each
/// source. Returns `None` if interrupted: on a busy machine, attaching may take long.
///
/// # Errors
/// Fails if no source can attach.
pub fn attach(
    watch: &Watch,
    wish: &Wish,
    on_progress: &mut dyn FnMut(Attaching<'_>),
) -> anyhow::Result<Option<Sources>> {
    let (mut session, mut first) = (Session::of_several_on(&wish.cpus), None);
    if !wish.cpus.is_empty() {
        // A CPU that cannot be measured is an error of the command, not of each source.
        session.cpus(&[])?;
    }
    let (mut looking, mut unmeasured, mut limitations) = (Vec::new(), Vec::new(), Vec::<Unmeasured>::new());
    for mut source in sources() {
        if watch.until(Some(Instant::now()))? != Ended::Time {
            return Ok(None);
        }
        let card = source.info().card;
        if !wish.takes(card) {
            continue;
        }
        on_progress(Attaching::Begins(card));
        let with_reason = |reason| Unmeasured { source: card.name.to_owned(), reason };
        source.ask(CommonOptions {
            explain_over_ns: Some(wish.late_from_ns(card)),
            explain_held_up_over_ns: card
                .held_up
                .map(|judged| wish.at_most(wish.why_ns.unwrap_or(judged.late_from_ns))),
            in_detail: wish.in_detail,
            ..CommonOptions::default()
        });
        match source.attach(&session) {
            Ok(source) => {
                // A limitation of the shared CPU account is reported once, not by each source.
                for reason in source.limitations().into_iter().chain(source.chosen()) {
                    if limitations.iter().all(|known| known.reason != reason) {
                        limitations.push(with_reason(reason.to_owned()));
                    }
                }
                // CPUs left out are reported for each source.
                limitations.extend(source.left_out().map(|reason| with_reason(reason.to_owned())));
                looking.push(Feed::new(card, source, Keep::Nothing));
                on_progress(Attaching::Done(&mut looking));
            }
            Err(error) => {
                // The CPU account may rely on timers of a source that failed to attach: start with a new session.
                if looking.is_empty() {
                    session = Session::of_several_on(&wish.cpus);
                }
                unmeasured.push(with_reason(error.to_string()));
                first.get_or_insert(error);
            }
        }
    }
    match first {
        Some(error) if looking.is_empty() => Err(anyhow::Error::from(error).context("cannot attach any source")),
        _ => {
            session.begin().context("cannot keep the account of the CPUs")?;
            Ok(Some(Sources { session, looking, unmeasured, limitations }))
        }
    }
}

/// Resets every source after the last one attached, so that all cover one span, and returns the start time of each
/// (CLOCK_MONOTONIC, nanoseconds).
///
/// # Errors
/// Fails if a source fails.
pub fn begin(session: &Session, looking: &mut [Feed]) -> anyhow::Result<Vec<u64>> {
    // Drains what came in while attaching, so that the resetting snapshot below is quick.
    for feed in &mut *looking {
        feed.snapshot()?;
        feed.take_late(&mut |_| Ok(None))?;
    }
    let mut begins = Vec::new();
    for feed in looking {
        begins.push(feed.snapshot()?.ended_ns);
    }
    session.take_lost();
    Ok(begins)
}

/// All attached sources since their reset, and late events since the last tick.
pub struct Recorded {
    session: Session,
    sources: Vec<SourceState>,
    /// Errors of sources that failed since the last tick.
    problems: Vec<String>,
}

struct SourceState {
    feed: Feed,
    began_ns: u64,
    gathered: LateBuffer,
    failed: Option<anyhow::Error>,
}

/// Snapshots of all sources since the previous tick, as lines of a recording.
#[derive(Debug, Default)]
pub struct Tick {
    pub lines: Vec<Line>,
    /// Numbers of late events and of lost events in `lines`.
    pub late: u64,
    pub lost: u64,
    /// Errors of sources that failed and were dropped since the previous tick.
    pub problems: Vec<String>,
}

impl Recorded {
    /// Resets all sources, and returns them with the header of a recording.
    ///
    /// # Errors
    /// Fails if a source fails.
    pub fn begin(sources: Sources, wish: &Wish) -> anyhow::Result<(Self, Header)> {
        let Sources { session, mut looking, unmeasured, limitations } = sources;
        let begins = begin(&session, &mut looking)?;
        let measured = looking.iter().map(|feed| measured(feed, wish)).collect();
        let header = Header { sources: measured, unmeasured, limitations, ..about::this_machine() };
        let sources = looking.into_iter().zip(begins);
        let sources = sources.map(|(feed, began_ns)| SourceState {
            feed,
            began_ns,
            gathered: LateBuffer::default(),
            failed: None,
        });
        Ok((Recorded { session, sources: sources.collect(), problems: Vec::new() }, header))
    }

    /// Buffers late events that have arrived since each source was reset.
    ///
    /// # Errors
    /// Fails if all sources have failed.
    pub fn take_late(&mut self) -> anyhow::Result<()> {
        for SourceState { feed, began_ns, gathered, failed } in &mut self.sources {
            let outcome = feed.take_late(&mut |event| {
                if event.at_ns >= *began_ns {
                    gathered.add(&event);
                }
                Ok(None)
            });
            *failed = outcome.err();
        }
        self.leave_failed()
    }

    /// Drops failed sources. Returns an error when none is left.
    fn leave_failed(&mut self) -> anyhow::Result<()> {
        let mut last = None;
        for at in (0..self.sources.len()).rev() {
            if let Some(error) = self.sources[at].failed.take() {
                let name = self.sources.remove(at).feed.card.name;
                self.problems.push(format!("{name} has failed, and the others go on: {error:#}"));
                last = Some(error);
            }
        }
        match last {
            Some(error) if self.sources.is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes a snapshot of all sources, with the late events since the previous call.
    ///
    /// # Errors
    /// Fails if all sources have failed.
    pub fn tick(&mut self) -> anyhow::Result<Tick> {
        let mut tick = Tick::default();
        for SourceState { feed, gathered, failed, .. } in &mut self.sources {
            match feed.snapshot() {
                Ok(snapshot) => {
                    tick.late += gathered.count();
                    tick.lost += snapshot.lost.values().sum::<u64>();
                    tick.lines.extend(gathered.lines(snapshot));
                }
                Err(error) => *failed = Some(error),
            }
        }
        self.leave_failed()?;
        tick.problems = std::mem::take(&mut self.problems);
        let mut lost = self.session.take_lost();
        lost.retain(|_, count| *count > 0);
        if !lost.is_empty() {
            tick.lost += lost.values().sum::<u64>();
            tick.lines.push(Line::Account(Account { at_unix_ns: clock::unix_ns(), lost }));
        }
        Ok(tick)
    }
}

/// Describes a source for the header of a recording.
pub fn measured(feed: &Feed, wish: &Wish) -> Measured {
    Measured {
        source: feed.card.name.to_owned(),
        backend: feed.source.backend.to_owned(),
        late_from_ns: Some(wish.late_from_ns(feed.card)),
        nothing: feed.source.sees_nothing().map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use anyhow::bail;
    use whylate_model::sources::{TIMERLAT, WQ};
    use whylate_model::{LateEvent, Snapshot};
    use whylate_sources::{Attached, Measuring};

    use super::*;

    /// A source that fails after this many snapshots.
    struct Measures(&'static Card, u32);

    impl Attached for Measures {
        fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
            let Some(left) = self.1.checked_sub(1) else { bail!("its map is gone") };
            self.1 = left;
            Ok(Snapshot::new(self.0.name, "made", "host", 0))
        }

        fn drain_late(&mut self, _wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
            each(LateEvent { at_ns: 7, ..LateEvent::default() });
            Ok(())
        }
    }

    fn failing_source(card: &'static Card, times: u32) -> SourceState {
        let attached: Box<dyn Attached> = Box::new(Measures(card, times));
        let feed = Feed::new(card, Measuring { backend: "made", fallback_reason: None, attached }, Keep::Nothing);
        SourceState { feed, began_ns: 0, gathered: LateBuffer::default(), failed: None }
    }

    #[test]
    fn failed_source_does_not_stop_others() {
        let sources = vec![failing_source(&WQ, 1), failing_source(&TIMERLAT, 2)];
        let mut recorded = Recorded { session: Session::of_several(), sources, problems: Vec::new() };
        recorded.take_late().expect("both are there");
        let tick = recorded.tick().expect("both are there");
        assert_eq!((tick.lines.len(), tick.late, tick.problems.len()), (2, 2, 0));
        let tick = recorded.tick().expect("one is there");
        assert_eq!(tick.problems, ["wq has failed, and the others go on: its map is gone"]);
        assert_eq!(tick.lines.len(), 1);
        assert!(recorded.tick().is_err(), "nothing measures any more");
    }
}
