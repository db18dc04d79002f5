// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ticks of a recording.

use std::collections::BTreeMap;

use whylate_model::recording::{Header, Line};
use whylate_model::sources::named;
use whylate_model::{Card, Snapshot};

use crate::engine::ticks::{Sink, Tick, Ticks};
use crate::store::Played;
use crate::store::play::nothing_in_span;

/// Maximum number of lines that are read for a tick, which bounds memory. The rest is in the next tick.
const MAX_LINES: usize = 2_000;

/// Which lines of a recording the ticks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// Snapshots of one source, each a tick.
    Source(&'static str),
    /// All lines but snapshots of sources that this version does not know.
    Known,
    All,
}

/// Reads a recording tick by tick.
pub struct Replay {
    played: Played,
    which: Which,
    /// The source that is replayed, if a single one.
    card: Option<&'static Card>,
    /// What is read of the next tick, the sources of its snapshots, and the number of lines read for it.
    tick: Tick,
    sources: Vec<String>,
    lines: usize,
    elapsed: Elapsed,
    is_over: bool,
    has_any: bool,
}

/// Replayed time, compared with the requested interval and duration, in nanoseconds.
#[derive(Debug, Default)]
struct Elapsed {
    interval_ns: Option<u64>,
    duration_ns: Option<u64>,
    /// Sum of all snapshots, and of those since the last complete interval.
    all_ns: u64,
    open_ns: u64,
    /// Number of complete intervals since `from_ns`: the start, or the end of the last gap.
    full: u64,
    from_ns: u64,
    /// Part of the first snapshot before the start.
    lead_ns: Option<u64>,
    ended_unix_ns: Option<u64>,
}

impl Replay {
    /// Replays all sources that this version knows.
    pub fn new(played: Played) -> Self {
        Replay {
            played,
            which: Which::Known,
            card: None,
            tick: Tick::default(),
            sources: Vec::new(),
            lines: 0,
            elapsed: Elapsed::default(),
            is_over: false,
            has_any: false,
        }
    }

    /// Replays one source, at the requested speed, up to `duration_ns`. Ticks at the end of an interval are due.
    pub fn of_source(played: Played, card: &'static Card, interval_ns: Option<u64>, duration_ns: Option<u64>) -> Self {
        let elapsed = Elapsed { interval_ns, duration_ns, ..Elapsed::default() };
        Replay { which: Which::Source(card.name), card: Some(card), elapsed, ..Replay::new(played) }
    }

    /// Replays every line.
    pub fn of_lines(played: Played) -> Self {
        Replay { which: Which::All, ..Replay::new(played) }
    }

    /// Returns the recording's header.
    pub fn header(&self) -> &Header {
        self.played.header()
    }

    /// Returns the recording.
    pub fn played(&self) -> &Played {
        &self.played
    }

    /// Returns the lines of the last snapshots with `repeated` stacks, by source.
    pub fn take_repeated_lines(&mut self) -> BTreeMap<String, Vec<u8>> {
        self.played.reader().take_repeated_lines()
    }

    /// Returns the next tick, with all its late events; `None` at the end.
    fn read(&mut self) -> anyhow::Result<Option<Tick>> {
        if self.is_over {
            return Ok(None);
        }
        while let Some(line) = self.played.next_line()? {
            if let Which::Source(source) = self.which {
                if let Line::Snapshot(snapshot) = &line
                    && snapshot.source == source
                {
                    self.played.pace(snapshot.duration_ns);
                    self.has_any = true;
                    let tick = self.tick_of(snapshot);
                    return Ok(Some(Tick { lines: vec![line], ..tick }));
                }
                continue;
            }
            let full = self.add(line);
            if full.is_some() {
                return Ok(full);
            }
        }
        self.is_over = true;
        Ok((!self.tick.lines.is_empty()).then(|| self.take()))
    }

    /// Adds a line to the next tick. Returns the tick that ends before or with it.
    fn add(&mut self, line: Line) -> Option<Tick> {
        let mut full = None;
        if let Line::Snapshot(snapshot) = &line {
            // Sources are read in turn: the second snapshot of one begins the next tick.
            if self.sources.contains(&snapshot.source) {
                full = Some(self.take());
            }
            // Snapshots of unknown sources would make ticks without end.
            if self.which == Which::All || named(&snapshot.source).is_some() {
                self.has_any = true;
                self.sources.push(snapshot.source.clone());
                let stacks = self.played.reader().take_repeated();
                self.tick.repeated.extend(stacks.map(|stacks| (snapshot.source.clone(), stacks)));
                self.tick.lines.push(line);
            }
        } else {
            self.tick.lines.push(line);
        }
        self.lines += 1;
        if full.is_none() && self.lines >= MAX_LINES { Some(self.take()) } else { full }
    }

    /// Takes what is read so far as a tick.
    fn take(&mut self) -> Tick {
        self.sources.clear();
        self.lines = 0;
        std::mem::take(&mut self.tick)
    }

    /// Returns the tick of a source's next snapshot, without its lines.
    fn tick_of(&mut self, snapshot: &Snapshot) -> Tick {
        let Elapsed { interval_ns, duration_ns, all_ns, open_ns, full, from_ns, lead_ns, ended_unix_ns } =
            &mut self.elapsed;
        let length_ns = snapshot.duration_ns;
        let is_after = |end_ns: u64| snapshot.start_unix_ns > end_ns.saturating_add(length_ns);
        let is_after_gap = interval_ns.is_some() && ended_unix_ns.is_some_and(is_after) && *open_ns > 0;
        if is_after_gap {
            (*from_ns, *full, *open_ns) = (all_ns.saturating_sub(lead_ns.unwrap_or(0)), 0, 0);
        }
        *ended_unix_ns = Some(snapshot.start_unix_ns.saturating_add(length_ns));
        *all_ns = all_ns.saturating_add(length_ns);
        *open_ns = open_ns.saturating_add(length_ns);
        let since_ns = all_ns.saturating_sub(*lead_ns.get_or_insert_with(|| self.played.lead_ns(snapshot)));
        let completes = |asked_ns| self.played.completes_interval(since_ns, length_ns, asked_ns);
        let due_ns = interval_ns.map(|interval_ns| from_ns.saturating_add(interval_ns.saturating_mul(*full + 1)));
        let is_due = due_ns.is_some_and(completes);
        if is_due {
            (*full, *open_ns) = (*full + 1, 0);
        }
        self.is_over = duration_ns.is_some_and(completes);
        Tick { is_due, is_after_gap, ..Tick::default() }
    }

    /// Reports on standard error why the recording was kept, and what is missing of the span.
    ///
    /// # Errors
    /// When it had no snapshot.
    pub fn finish(&self) -> anyhow::Result<()> {
        self.played.report_notes();
        self.ensure_any()
    }

    /// Returns an error if there was no snapshot.
    ///
    /// # Errors
    /// The one that every command ends with.
    pub fn ensure_any(&self) -> anyhow::Result<()> {
        if self.has_any { Ok(()) } else { Err(nothing_in_span(self.played.path())) }
    }
}

impl Ticks for Replay {
    fn next(&mut self, sink: &mut dyn Sink) -> anyhow::Result<Option<Tick>> {
        sink.prepare(self.played.reader());
        let Some(mut tick) = self.read()? else { return Ok(None) };
        for line in &mut tick.lines {
            if let Line::Snapshot(snapshot) = line
                && let Some(card) = self.card.or_else(|| named(&snapshot.source))
            {
                for event in std::mem::take(&mut snapshot.late) {
                    snapshot.late.extend(sink.late(card, event)?);
                }
            }
        }
        Ok(Some(tick))
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use tempfile::TempDir;
    use whylate_model::recording::{Account, Gap};

    use super::*;
    use crate::engine::ticks::drive;
    use crate::store::packer::Packer;
    use crate::store::play::Recording;
    use crate::store::{Span, about};

    /// Collects the names of the lines of each tick.
    #[derive(Default)]
    struct LineNames(Vec<Vec<String>>);

    impl Sink for LineNames {
        fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
            let name = |line: &Line| match line {
                Line::Snapshot(snapshot) => snapshot.source.clone(),
                Line::Account(_) => "account".to_owned(),
                _ => "other".to_owned(),
            };
            self.0.push(tick.lines.iter().map(name).collect());
            Ok(ControlFlow::Continue(()))
        }
    }

    fn snapshot(source: &str) -> Line {
        Line::Snapshot(Box::new(Snapshot::new(source, "made", "host", 1)))
    }

    /// Replays these lines as one recording.
    fn replayed(lines: &[Line]) -> (Replay, Vec<Vec<String>>) {
        let directory = TempDir::new().expect("a directory");
        let path = directory.path().join("a.whylate");
        let mut packer = Packer::begin(Vec::new(), &[Line::Header(about::this_machine())]).expect("it is packed");
        packer.tick(lines).expect("it is packed");
        std::fs::write(&path, packer.end(2).expect("it is packed")).expect("it is written");
        let mut replay = Replay::new(
            Recording { path, span: Span::default(), speed: None, command: None }.play().expect("a recording"),
        );
        let mut names = LineNames::default();
        drive(&mut replay, &mut names).expect("it is read");
        (replay, names.0)
    }

    #[test]
    fn second_snapshot_of_a_source_begins_the_next_tick() {
        let account = Line::Account(Account { at_unix_ns: 1, lost: BTreeMap::new() });
        let lines = [snapshot("wq"), snapshot("block"), account, snapshot("wq"), snapshot("newer"), snapshot("block")];
        let (replay, ticks) = replayed(&lines);
        assert_eq!(ticks, [vec!["wq", "block", "account"], vec!["wq", "block", "other"]]);
        replay.ensure_any().expect("it has snapshots");
    }

    #[test]
    fn lines_beyond_the_limit_are_in_the_next_tick() {
        let gap = Line::Gap(Gap { start_unix_ns: 1, duration_ns: 0, reason: "overload".to_owned(), count: 1 });
        let mut lines = vec![gap; MAX_LINES + 7];
        // A later version may have many sources.
        lines.extend((0..MAX_LINES).map(|number| snapshot(&format!("newer{number}"))));
        let (replay, ticks) = replayed(&lines);
        assert_eq!(ticks.iter().map(Vec::len).collect::<Vec<_>>(), [MAX_LINES, 7, 1]);
        assert!(replay.ensure_any().is_err());
    }
}
