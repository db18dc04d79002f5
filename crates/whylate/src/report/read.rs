// SPDX-License-Identifier: MIT OR Apache-2.0
//! A recording, moment by moment. A thread reads and parses ahead, which takes as long as what is done with it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::thread;

use anyhow::Context as _;
use whylate_model::recording::{Header, Line, Repeated};
use whylate_model::sources::named;
use whylate_model::{Histogram, Snapshot, Stack};

use super::{Gathering, Report};
use crate::recording::play::{Recording, nothing_in_span};

/// So many moments are handed over at once, as waking whoever takes them costs as much as one; and that is read ahead once.
const AT_ONCE: usize = 8;
const AHEAD: usize = 1;
/// Lines of other kinds than snapshots that a moment has at most.
const MOST_LINES: usize = 10_000;

/// Lines, and the stacks of those snapshots that lack them, by source.
type Moment = (Vec<Line>, BTreeMap<String, Vec<Repeated>>);

enum Told {
    Header(Box<Header>),
    Moments(Vec<Moment>),
    /// The end, what is missing, and the lines of the last snapshots that lack their stacks.
    End(Vec<String>, BTreeMap<String, Vec<u8>>),
}

/// Makes a report of it.
///
/// # Errors
/// When it is no recording, or has nothing of its span.
pub fn recorded(recording: &Recording) -> anyhow::Result<Report> {
    let (sender, receiver) = sync_channel(AHEAD);
    let (spent_sender, spent) = channel();
    let is_thinned = &AtomicBool::new(false);
    thread::scope(|scope| {
        // Where nobody listens any more, its end is told by whoever did.
        let reader = scope.spawn(move || read(recording, is_thinned, &spent, &mut |told| sender.send(told).is_ok()));
        let mut gathering: Option<Gathering> = None;
        for told in receiver {
            match (told, &mut gathering) {
                (Told::Header(header), _) => gathering = Some(Gathering::new(*header)?),
                (Told::Moments(mut moments), Some(gathering)) => {
                    moments.iter_mut().try_for_each(|(lines, repeated)| gathering.moment_of(lines, repeated))?;
                    // At the end nobody takes them.
                    let _ = spent_sender.send(moments);
                    is_thinned.store(gathering.is_thinned(), Ordering::Relaxed);
                }
                (Told::End(missing, lines), Some(gathering)) => {
                    gathering.last_lines(&lines);
                    gathering.forget_gaps();
                    gathering.tell(missing);
                }
                (_, None) => {}
            }
        }
        let name = reader.join().ok().context("what reads the recording has failed")??;
        match gathering.filter(|gathering| !gathering.is_empty()) {
            Some(gathering) => gathering.finish(),
            None => Err(nothing_in_span(&name)),
        }
    })
}

/// Whether what a source has found depends on how long threads have been at that stack.
fn asks_for_age(source: &str, stack: &Stack) -> bool {
    let Some(card) = named(source) else { return false };
    let mut snapshot = Snapshot::new(source, "", "", 0);
    snapshot.stacks.push(Stack { age: Histogram::from_iter([1]), ..stack.clone() });
    !(card.figures)(&snapshot).is_empty()
}

/// Returns the file's name. A recording that is thinned needs no text of stacks that were seen before. What was told comes
/// back: memory that one thread takes and another one gives back makes both wait.
fn read(
    recording: &Recording,
    is_thinned: &AtomicBool,
    spent: &Receiver<Vec<Moment>>,
    tell: &mut dyn FnMut(Told) -> bool,
) -> anyhow::Result<String> {
    let mut played = recording.play()?;
    let mut goes_on = tell(Told::Header(Box::new(played.header().clone())));
    let (mut lines, mut seen, mut others): (Vec<Line>, Vec<String>, usize) = (Vec::new(), Vec::new(), 0);
    let (mut moments, mut repeated, mut beyond): (Vec<Moment>, _, _) = (Vec::new(), BTreeMap::new(), 0);
    while goes_on {
        if is_thinned.load(Ordering::Relaxed) {
            played.reader().repeat(asks_for_age);
        }
        let Some(line) = played.next_of_all()? else { break };
        match &line {
            // All sources are asked in turn: the second snapshot of one begins the next moment.
            // Whatever nobody knows would make moments without end.
            Line::Snapshot(snapshot) if named(&snapshot.source).is_none() => continue,
            Line::Snapshot(snapshot) => {
                if seen.contains(&snapshot.source) {
                    seen.clear();
                    others = 0;
                    moments.push((std::mem::take(&mut lines), std::mem::take(&mut repeated)));
                    if moments.len() >= AT_ONCE {
                        goes_on = tell(Told::Moments(std::mem::take(&mut moments)));
                        let lines = spent.try_iter().flatten().flat_map(|(lines, _)| lines);
                        lines.for_each(|line| played.reader().use_again(line));
                    }
                }
                seen.push(snapshot.source.clone());
                repeated.extend(played.reader().take_repeated().map(|stacks| (snapshot.source.clone(), stacks)));
            }
            _ if others >= MOST_LINES => {
                beyond += 1;
                continue;
            }
            _ => others += 1,
        }
        lines.push(line);
    }
    moments.push((lines, repeated));
    if goes_on && tell(Told::Moments(moments)) {
        let beyond = played.beyond_in_words(beyond);
        let lines = played.reader().take_repeated_lines();
        tell(Told::End(played.missing().into_iter().chain(beyond).collect(), lines));
    }
    Ok(played.name().to_owned())
}
