// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a recording tick by tick. A thread reads and parses ahead, which takes as long as processing the ticks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::thread;

use anyhow::Context as _;
use whylate_model::recording::{Header, Line, Repeated};
use whylate_model::sources::named;
use whylate_model::{Histogram, Snapshot, Stack};

use super::{Report, ReportBuilder};
use crate::store::play::{Recording, nothing_in_span};

/// Number of ticks sent at once, as waking the receiver costs as much as one tick; and number of such batches to read
/// ahead.
const BATCH: usize = 8;
const BATCHES_AHEAD: usize = 1;
/// Maximum number of lines other than snapshots in a tick.
const MAX_OTHER_LINES: usize = 10_000;

/// Lines, and by source the stacks of those snapshots that lack them.
type Tick = (Vec<Line>, BTreeMap<String, Vec<Repeated>>);

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
pub fn recorded(recording: &Recording) -> anyhow::Result<Report> {
    let (sender, receiver) = sync_channel(BATCHES_AHEAD);
    let (used_sender, used) = channel();
    let is_thinned = &AtomicBool::new(false);
    thread::scope(|scope| {
        // If the receiver is gone, its error ends the report.
        let reader =
            scope.spawn(move || read(recording, is_thinned, &used, &mut |message| sender.send(message).is_ok()));
        let mut builder: Option<ReportBuilder> = None;
        for message in receiver {
            match (message, &mut builder) {
                (Message::Header(header), _) => builder = Some(ReportBuilder::new(*header)?),
                (Message::Ticks(mut ticks), Some(builder)) => {
                    ticks.iter_mut().try_for_each(|(lines, repeated)| builder.tick_with_repeated(lines, repeated))?;
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
        let name = reader.join().ok().context("what reads the recording has failed")??;
        match builder.filter(|builder| !builder.is_empty()) {
            Some(builder) => builder.finish(),
            None => Err(nothing_in_span(&name)),
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

/// Sends the ticks of a recording, and returns the file's name. Once the embedded recording is thinned, it no longer
/// needs the text of stacks that were seen before. Lines come back to be reused: allocating in one thread and freeing
/// in another makes both wait.
fn read(
    recording: &Recording,
    is_thinned: &AtomicBool,
    used: &Receiver<Vec<Tick>>,
    send: &mut dyn FnMut(Message) -> bool,
) -> anyhow::Result<String> {
    let mut played = recording.play()?;
    let mut is_receiving = send(Message::Header(Box::new(played.header().clone())));
    let (mut lines, mut seen, mut others): (Vec<Line>, Vec<String>, usize) = (Vec::new(), Vec::new(), 0);
    let (mut ticks, mut repeated, mut skipped): (Vec<Tick>, _, _) = (Vec::new(), BTreeMap::new(), 0);
    while is_receiving {
        if is_thinned.load(Ordering::Relaxed) {
            played.reader().repeat(depends_on_age);
        }
        let Some(line) = played.next_of_any_kind()? else { break };
        match &line {
            // Sources are read in turn: the second snapshot of one begins the next tick. Snapshots of unknown sources
            // are skipped, as they would make ticks without end.
            Line::Snapshot(snapshot) if named(&snapshot.source).is_none() => continue,
            Line::Snapshot(snapshot) => {
                if seen.contains(&snapshot.source) {
                    seen.clear();
                    others = 0;
                    ticks.push((std::mem::take(&mut lines), std::mem::take(&mut repeated)));
                    if ticks.len() >= BATCH {
                        is_receiving = send(Message::Ticks(std::mem::take(&mut ticks)));
                        let lines = used.try_iter().flatten().flat_map(|(lines, _)| lines);
                        lines.for_each(|line| played.reader().use_again(line));
                    }
                }
                seen.push(snapshot.source.clone());
                repeated.extend(played.reader().take_repeated().map(|stacks| (snapshot.source.clone(), stacks)));
            }
            _ if others >= MAX_OTHER_LINES => {
                skipped += 1;
                continue;
            }
            _ => others += 1,
        }
        lines.push(line);
    }
    ticks.push((lines, repeated));
    if is_receiving && send(Message::Ticks(ticks)) {
        let skipped = played.skipped_message(skipped);
        let lines = played.reader().take_repeated_lines();
        send(Message::End(played.missing().into_iter().chain(skipped).collect(), lines));
    }
    Ok(played.name().to_owned())
}
