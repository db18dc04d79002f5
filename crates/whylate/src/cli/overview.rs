// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate` without a command: the overview of what is late on this machine and of the culprits, by all sources.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use whylate_model::overview::{Gatherer, Overview, Unmeasured};
use whylate_model::recording::{Account, Header, Line, Measured};
use whylate_model::sources::named;
use whylate_model::units::format_ns;
use whylate_model::{Card, Merger, Snapshot, Stack};
use whylate_sources::Session;
use whylate_sources::kernel::clock;

use crate::cli::arguments::{OwnCpus, Rank, Record};
use crate::cli::values::duration_ns;
use crate::cli::{Origin, UsageError, program, record};
use crate::engine::progress::Progress;
use crate::engine::runner::{Feed, NOW_AND_THEN, next_record, wait};
use crate::engine::sources::{self, Sources, Wish};
use crate::engine::watch::{Ended, Watch};
use crate::render::json::write_line;
use crate::render::text::overview;
use crate::render::text::table::terminal_columns;
use crate::store::about;
use crate::store::play::{Recording, nothing_in_span};
use crate::store::recorder::{LateBuffer, Recorder};

/// Arguments of the overview.
#[derive(Debug, Args)]
// The view of one program has no ranking of culprits.
#[command(
    mut_arg("by", |by| by.conflicts_with_all(["pid", "comm", "cgroup"])),
    mut_arg("cpus", |cpus| cpus.conflicts_with_all(["pid", "comm", "cgroup"]))
)]
pub struct Arguments {
    /// How long to look (e.g. 10s, 1m)
    #[arg(short, long, value_name = "DURATION", value_parser = duration_ns, default_value = "10s")]
    duration: u64,
    #[command(flatten)]
    of: program::Of,
    #[command(flatten)]
    rank: Rank,
    #[command(flatten)]
    own: OwnCpus,
    /// One JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    record: Record,
}

/// Measures (or reads a recording), and prints the overview.
///
/// # Errors
/// Fails if no source can attach, a source fails, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<()> {
    let record_to = arguments.record.output.as_deref();
    if let Some(program) = arguments.of.program(origin)? {
        if record_to.is_some() {
            return Err(UsageError(anyhow!("the overview of one program cannot be recorded: omit -o")).into());
        }
        return program::run(&program, arguments.duration, arguments.json);
    }
    let look = match origin {
        Origin::Recording(recording) => {
            record::refuse(record_to)?;
            if !arguments.own.asked().is_empty() {
                return Err(UsageError(anyhow!("a recording has the CPUs that were measured: omit -c")).into());
            }
            Some(recorded(arguments, recording)?)
        }
        Origin::Live => live(arguments)?,
    };
    let Some(look) = look else { return Ok(()) };
    let mut out = io::BufWriter::new(io::stdout().lock());
    if arguments.json {
        write_line(&mut out, &look)?;
    } else {
        overview::write(&mut out, &look, terminal_columns())?;
    }
    out.flush()?;
    Ok(())
}

/// Measures this machine. Returns `None` if interrupted before measuring, or if the output is closed.
fn live(arguments: &Arguments) -> anyhow::Result<Option<Overview>> {
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let store = arguments.record.output.as_deref().map(record::file).transpose()?;
    let (progress, wish) =
        (Progress::new("Looking at this machine"), Wish { cpus: arguments.own.asked(), ..Wish::default() });
    progress.show("attaching");
    let Some(Sources { session, mut looking, mut unmeasured, limitations }) =
        sources::attach(&watch, &wish, &mut |_| ())?
    else {
        progress.clear();
        say!("whylate: interrupted before anything was measured");
        return Ok(None);
    };
    let begins = sources::begin(&session, &mut looking)?;
    let began = Instant::now();
    let measured: Vec<Measured> = looking.iter().map(|feed| sources::measured(feed, &wish)).collect();
    let header = || {
        let (sources, unmeasured, limitations) = (measured.clone(), unmeasured.clone(), limitations.clone());
        Header { sources, unmeasured, limitations, ..about::this_machine() }
    };
    let mut recorder = store.map(|store| Recorder::start(store, header())).transpose()?;
    let mut seen = Results {
        gatherer: Gatherer::for_cards(looking.iter().map(|feed| feed.card).collect(), arguments.rank.into()),
        gathered: recorder.iter().flat_map(|_| looking.iter().map(|_| LateBuffer::default())).collect(),
        mergers: looking.iter().map(|_| Merger::default()).collect(),
        lost: BTreeMap::new(),
    };
    seen.drain(&mut looking, |number, at_ns| at_ns >= begins[number])?;
    let end = began.checked_add(Duration::from_nanos(arguments.duration));
    let ended = loop {
        let until = end.into_iter().chain(next_record(recorder.as_ref(), end)).min();
        let ended = wait(&watch, until, NOW_AND_THEN, &mut || {
            seen.drain(&mut looking, |number, at_ns| at_ns >= begins[number])?;
            progress.show(&format!("{} of {} s", began.elapsed().as_secs(), arguments.duration / 1_000_000_000));
            Ok(false)
        })?;
        if ended != Ended::Time || end.is_some_and(|end| Instant::now() >= end) {
            break ended;
        }
        let snapshots = seen.take(&mut looking)?;
        seen.record(snapshots, &session, recorder.as_mut());
    };
    if ended == Ended::OutputClosed {
        return Ok(None);
    }
    progress.show("detaching");
    let snapshots = seen.take(&mut looking)?;
    let ends: Vec<u64> = snapshots.iter().map(|snapshot| snapshot.ended_ns).collect();
    seen.drain(&mut looking, |number, at_ns| (begins[number]..=ends[number]).contains(&at_ns))?;
    seen.record(snapshots, &session, recorder.as_mut());
    let cards: Vec<&'static Card> = looking.iter().map(|feed| feed.card).collect();
    drop((looking, session));
    progress.clear();
    recorder.map_or(Ok(()), Recorder::end)?;
    let Results { gatherer, mut mergers, lost, .. } = seen;
    let mut snapshots: Vec<(&Card, Snapshot)> =
        cards.into_iter().zip(&mut mergers).filter_map(|(card, merger)| Some((card, merger.take()?))).collect();
    set_aside(&mut snapshots, &measured, &mut unmeasured);
    Ok(Some(Overview { limitations, lost, ..gatherer.finish(&snapshots, unmeasured) }))
}

/// Results so far; vectors have an entry per source, in the order of the feeds.
struct Results {
    gatherer: Gatherer,
    /// Late events for the next tick of the recording; empty if nothing is recorded.
    gathered: Vec<LateBuffer>,
    mergers: Vec<Merger>,
    /// Lost events of the shared CPU account, by reason.
    lost: BTreeMap<String, u64>,
}

impl Results {
    /// Drains late events, and drops those outside the span of their source.
    fn drain(&mut self, looking: &mut [Feed], is_within: impl Fn(usize, u64) -> bool) -> anyhow::Result<()> {
        for (number, feed) in looking.iter_mut().enumerate() {
            let card = feed.card;
            feed.take_late(&mut |event| {
                if is_within(number, event.at_ns) {
                    if let Some(gathered) = self.gathered.get_mut(number) {
                        gathered.add(&event);
                    }
                    self.gatherer.add(card, event);
                }
                Ok(None)
            })?;
        }
        Ok(())
    }

    fn take(&mut self, looking: &mut [Feed]) -> anyhow::Result<Vec<Snapshot>> {
        looking.iter_mut().map(Feed::snapshot).collect()
    }

    /// Records the snapshots with the buffered late events, and adds them to the results.
    fn record(&mut self, snapshots: Vec<Snapshot>, session: &Session, recorder: Option<&mut Recorder>) {
        let mut lost = session.take_lost();
        lost.retain(|_, count| *count > 0);
        if let Some(recorder) = recorder {
            let all = snapshots.iter().zip(&mut self.gathered);
            let mut lines: Vec<Line> = all.flat_map(|(snapshot, gathered)| gathered.lines(snapshot.clone())).collect();
            if !lost.is_empty() {
                lines.push(Line::Account(Account { at_unix_ns: clock::unix_ns(), lost: lost.clone() }));
            }
            recorder.tick(lines);
            if let Some(problem) = recorder.take_problem() {
                say!("whylate: {problem}");
            }
        }
        for (reason, count) in lost {
            *self.lost.entry(reason).or_default() += count;
        }
        for (merger, snapshot) in self.mergers.iter_mut().zip(snapshots) {
            merger.add(snapshot);
        }
    }
}

/// Moves sources that had nothing to measure from the snapshots to `unmeasured`.
fn set_aside(snapshots: &mut Vec<(&'static Card, Snapshot)>, measured: &[Measured], unmeasured: &mut Vec<Unmeasured>) {
    snapshots.retain(|(card, snapshot)| {
        let nothing = measured.iter().find(|of| of.source == card.name).and_then(|of| of.nothing.clone());
        let has_lost = snapshot.lost.values().any(|&count| count > 0);
        match nothing.filter(|_| snapshot.series.is_empty() && !has_lost) {
            Some(reason) => unmeasured.push(Unmeasured { source: card.name.to_owned(), reason }),
            None => return true,
        }
        false
    });
}

/// Builds the overview from a recording.
fn recorded(arguments: &Arguments, recording: &Recording) -> anyhow::Result<Overview> {
    let mut played = recording.play()?;
    let header = played.header().clone();
    let cards: Vec<&'static Card> = header.sources.iter().filter_map(|of| named(&of.source)).collect();
    let mut gatherer = Gatherer::for_cards(cards.clone(), arguments.rank.into());
    let mut mergers: Vec<Merger> = cards.iter().map(|_| Merger::default()).collect();
    // Threads that still sleep are those in the last snapshot.
    let mut last_stacks: Vec<Vec<Stack>> = cards.iter().map(|_| Vec::new()).collect();
    let mut lost: BTreeMap<String, u64> = BTreeMap::new();
    let mut has_any = false;
    while let Some(line) = played.next_line()? {
        match line {
            Line::Snapshot(mut snapshot) => {
                has_any = true;
                let Some(number) = cards.iter().position(|card| card.name == snapshot.source) else { continue };
                for event in std::mem::take(&mut snapshot.late) {
                    gatherer.add(cards[number], event);
                }
                last_stacks[number] = std::mem::take(&mut snapshot.stacks);
                mergers[number].add(*snapshot);
            }
            Line::Account(account) => {
                for (reason, count) in account.lost {
                    let all = lost.entry(reason).or_default();
                    *all = all.saturating_add(count);
                }
            }
            _ => {}
        }
    }
    let merged = cards.iter().zip(&mut mergers).zip(last_stacks);
    let merged = merged.filter_map(|((card, merger), stacks)| Some((*card, Snapshot { stacks, ..merger.take()? })));
    let (mut snapshots, mut unmeasured): (Vec<_>, _) = (merged.collect(), header.unmeasured);
    set_aside(&mut snapshots, &header.sources, &mut unmeasured);
    played.report_missing();
    let mut limitations = header.limitations;
    limitations.extend(not_recorded(&header.sources));
    if !has_any {
        return Err(nothing_in_span(played.name()));
    }
    Ok(Overview { limitations, lost, ..gatherer.finish(&snapshots, unmeasured) })
}

/// Lists sources of a recording with a threshold above the overview's, so that late events are missing.
pub fn not_recorded(sources: &[Measured]) -> impl Iterator<Item = Unmeasured> {
    sources.iter().filter_map(|of| {
        let (from_ns, own_ns) = (of.late_from_ns?, named(&of.source)?.events().late_from_ns);
        let reason = format!("late events of {} and longer only: the recording has no others", format_ns(from_ns));
        (from_ns > own_ns).then(|| Unmeasured { source: of.source.clone(), reason })
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use whylate_model::sources::WQ;
    use whylate_model::{Cause, CauseKind, LateEvent};
    use whylate_sources::{Attached, Measuring};

    use super::*;
    use crate::engine::runner::Keep;

    /// Late events at these times (CLOCK_MONOTONIC), while the wall clock is set back all the time.
    struct SetBack(Vec<u64>);

    impl Attached for SetBack {
        fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
            Ok(Snapshot::new(WQ.name, "made", "host", 0))
        }

        fn drain_late(&mut self, _wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
            for (number, at_ns) in self.0.drain(..).enumerate() {
                let cause = Cause::new(CauseKind::Thread, "a:1", 1 << 30);
                let at_unix_ns = 1_000_000 - number as u64;
                each(LateEvent { at_ns, at_unix_ns, latency_ns: 1 << 30, causes: vec![cause], ..LateEvent::default() });
            }
            Ok(())
        }
    }

    #[test]
    fn late_events_are_counted_while_wall_clock_is_set() {
        let attached: Box<dyn Attached> = Box::new(SetBack(vec![99, 100, 150, 200, 201]));
        let feed = Feed::new(&WQ, Measuring { backend: "made", fallback_reason: None, attached }, Keep::Nothing);
        let mut seen =
            Results { gatherer: Gatherer::default(), gathered: Vec::new(), mergers: Vec::new(), lost: BTreeMap::new() };
        seen.drain(&mut [feed], |_, at_ns| (100..=200).contains(&at_ns)).expect("it measures");
        let look = seen.gatherer.finish(&[(&WQ, Snapshot::new(WQ.name, "made", "host", 0))], Vec::new());
        assert_eq!(look.sources[0].late, 3);
    }
}
