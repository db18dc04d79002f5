// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a recording tick by tick. A thread reads and parses ahead, which takes as long as processing the ticks.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;

use anyhow::Context as _;
use whylate_model::culprits::By;
use whylate_model::recording::{Header, Reader};
use whylate_model::sources::named;
use whylate_model::{Histogram, Snapshot, Stack};

use super::{Report, ReportBuilder};
use crate::engine::replay::Replay;
use crate::engine::ticks::{Sink, Tick, drive};
use crate::store::play::{Recording, nothing_in_span};

/// Number of ticks sent at once, as waking the receiver costs as much as one tick; and number of such batches to read
/// ahead.
const BATCH: usize = 8;
const BATCHES_AHEAD: usize = 1;

enum Message {
    Header(Box<Header>),
    Ticks(Vec<Tick>),
    /// The end: messages about missing data, and the lines of the last snapshots that lack their stacks.
    End(Vec<String>, BTreeMap<String, Vec<u8>>),
}

/// Makes a report of a recording.
///
/// # Errors
/// Fails if the file is not a recording, or has no snapshot in its span.
pub fn recorded(recording: &Recording, rank_by: By) -> anyhow::Result<Report> {
    let (sender, receiver) = sync_channel(BATCHES_AHEAD);
    let (used_sender, used) = channel();
    let is_thinned = &AtomicBool::new(false);
    thread::scope(|scope| {
        // If the receiver is gone, its error ends the report.
        let reader = scope.spawn(move || read(recording, Batches { ticks: Vec::new(), sender, used, is_thinned }));
        let mut builder: Option<ReportBuilder> = None;
        for message in receiver {
            match (message, &mut builder) {
                (Message::Header(header), _) => builder = Some(ReportBuilder::new(*header, rank_by)?),
                (Message::Ticks(mut ticks), Some(builder)) => {
                    ticks.iter_mut().try_for_each(|tick| builder.tick(tick))?;
                    // At the end the reader no longer receives them.
                    let _ = used_sender.send(ticks);
                    is_thinned.store(builder.is_thinned(), Ordering::Relaxed);
                }
                (Message::End(missing, lines), Some(builder)) => {
                    builder.add_last_lines(&lines);
                    builder.clear_missing();
                    builder.add_missing(missing);
                }
                (_, None) => {}
            }
        }
        reader.join().ok().context("what reads the recording has failed")??;
        match builder.filter(|builder| !builder.is_empty()) {
            Some(builder) => builder.finish(),
            None => Err(nothing_in_span(&recording.path)),
        }
    })
}

/// Returns whether the figures of a source depend on how long threads have been at a stack.
fn depends_on_age(source: &str, stack: &Stack) -> bool {
    let Some(card) = named(source) else { return false };
    let mut snapshot = Snapshot::new(source, "", "", 0);
    snapshot.stacks.push(Stack { age: Histogram::from_iter([1]), ..stack.clone() });
    !(card.figures)(&snapshot).is_empty()
}

/// Sends the ticks of a recording, and returns the file's name.
fn read(recording: &Recording, mut batches: Batches<'_>) -> anyhow::Result<String> {
    let mut replay = Replay::new(recording.play()?);
    if batches.send(Message::Header(Box::new(replay.header().clone()))).is_continue() {
        drive(&mut replay, &mut batches)?;
        let lines = replay.take_repeated_lines();
        // If the receiver is gone, neither matters.
        let _ = (batches.flush(), batches.send(Message::End(replay.played().missing(), lines)));
    }
    Ok(replay.played().name().to_owned())
}

/// Sends ticks in batches. Once the embedded recording is thinned, it no longer needs the text of stacks that were seen
/// before. Lines come back to be reused: allocating in one thread and freeing in another makes both wait.
struct Batches<'a> {
    ticks: Vec<Tick>,
    sender: SyncSender<Message>,
    used: Receiver<Vec<Tick>>,
    is_thinned: &'a AtomicBool,
}

impl Batches<'_> {
    /// Sends a message. Returns whether there is a receiver.
    fn send(&self, message: Message) -> ControlFlow<()> {
        if self.sender.send(message).is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    fn flush(&mut self) -> ControlFlow<()> {
        let ticks = std::mem::take(&mut self.ticks);
        self.send(Message::Ticks(ticks))
    }
}

impl Sink for Batches<'_> {
    fn prepare(&mut self, reader: &mut Reader<File>) {
        if self.is_thinned.load(Ordering::Relaxed) {
            reader.repeat(depends_on_age);
        }
        let lines = self.used.try_iter().flatten().flat_map(|tick| tick.lines);
        lines.for_each(|line| reader.use_again(line));
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        self.ticks.push(tick);
        Ok(if self.ticks.len() < BATCH { ControlFlow::Continue(()) } else { self.flush() })
    }
}
