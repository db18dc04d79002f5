// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ticks, what yields them, and what receives them: one loop for live sources and for recordings.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::ControlFlow;

use whylate_model::recording::{Line, Reader, Repeated};
use whylate_model::sources::count_lost;
use whylate_model::{Card, LateEvent, Snapshot};

use crate::store::recorder::is_late;

/// Snapshots of one interval, at most one per source, and the lines beside them.
#[derive(Debug, Default)]
pub struct Tick {
    /// Lines of a recording: the snapshots with their late events, and accounts, gaps and clock readings.
    pub lines: Vec<Line>,
    /// By source, the stacks of snapshots that lack them.
    pub repeated: BTreeMap<String, Vec<Repeated>>,
    /// Whether the requested interval ends with the tick.
    pub is_due: bool,
    /// Whether a live run ends with the tick.
    pub is_last: bool,
    /// Whether a gap lies between the tick and earlier ones of its interval, which ends before it.
    pub is_after_gap: bool,
    /// Problems since the last tick: of live sources that are left out from now on, and of the recording.
    pub problems: Vec<String>,
    /// Names of the live sources that have failed since the last tick.
    pub failed: Vec<&'static str>,
}

impl Tick {
    fn snapshots(&self) -> impl Iterator<Item = &Snapshot> {
        self.lines.iter().filter_map(|line| if let Line::Snapshot(snapshot) = line { Some(&**snapshot) } else { None })
    }

    /// Prints the problems to standard error.
    pub fn report_problems(&self) {
        self.problems.iter().for_each(|problem| say!("whylate: {problem}"));
    }

    /// Returns the number of late events that the overview counts.
    pub fn late(&self) -> u64 {
        self.snapshots().flat_map(|snapshot| &snapshot.late).filter(|event| is_late(event)).count() as u64
    }

    /// Returns the number of lost events.
    pub fn lost(&self) -> u64 {
        let lost = self.lines.iter().filter_map(|line| match line {
            Line::Snapshot(snapshot) => Some(count_lost(&snapshot.source, &snapshot.lost)),
            Line::Account(account) => Some(account.lost.values().sum()),
            _ => None,
        });
        lost.sum()
    }

    /// Returns the snapshots.
    pub fn into_snapshots(self) -> impl Iterator<Item = Snapshot> {
        self.lines
            .into_iter()
            .filter_map(|line| if let Line::Snapshot(snapshot) = line { Some(*snapshot) } else { None })
    }
}

/// Adds numbers of lost events, by reason.
pub fn add_lost(into: &mut BTreeMap<String, u64>, lost: BTreeMap<String, u64>) {
    for (reason, count) in lost {
        let all = into.entry(reason).or_default();
        *all = all.saturating_add(count);
    }
}

/// Yields ticks.
pub trait Ticks {
    /// Returns the next tick, after passing its late events to `sink`; `None` at the end.
    ///
    /// # Errors
    /// When no source can measure any more, the recording cannot be read, or `sink` fails.
    fn next(&mut self, sink: &mut dyn Sink) -> anyhow::Result<Option<Tick>>;
}

/// Receives late events and ticks.
pub trait Sink {
    /// Receives a late event as it arrives. The snapshot of its tick has the event that is returned.
    ///
    /// # Errors
    /// When the output cannot be written.
    fn late(&mut self, _card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        Ok(Some(event))
    }

    /// Is called before the next tick of a recording is read, with what the reader offers beside lines.
    fn prepare(&mut self, _reader: &mut Reader<File>) {}

    /// Is called once every poll interval of late events, while the next tick is awaited. Returns whether to wait on: if
    /// not, the tick is taken at once.
    ///
    /// # Errors
    /// When the output cannot be written.
    fn poll(&mut self) -> anyhow::Result<ControlFlow<()>> {
        Ok(ControlFlow::Continue(()))
    }

    /// Receives a tick. Returns whether to go on.
    ///
    /// # Errors
    /// When the output cannot be written.
    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>>;
}

/// Sink that passes each line of the ticks to a function.
pub struct Lines<F>(pub F);

impl<F: FnMut(Line) -> anyhow::Result<()>> Sink for Lines<F> {
    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        tick.lines.into_iter().try_for_each(&mut self.0)?;
        Ok(ControlFlow::Continue(()))
    }
}

/// Passes all ticks to the sink.
///
/// # Errors
/// When no source can measure any more, the recording cannot be read, or `sink` fails.
pub fn drive(ticks: &mut dyn Ticks, sink: &mut dyn Sink) -> anyhow::Result<()> {
    while let Some(tick) = ticks.next(sink)? {
        if sink.tick(tick)?.is_break() {
            break;
        }
    }
    Ok(())
}
