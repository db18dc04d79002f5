// SPDX-License-Identifier: MIT OR Apache-2.0
//! A recording, moment by moment. A thread reads and parses ahead, which takes as long as what is done with it.

use std::sync::mpsc::sync_channel;
use std::thread;

use anyhow::{Context as _, bail};
use whylate_model::recording::{Header, Line};

use super::{Gathering, Report};
use crate::recording::play::Recording;

/// So many moments are read ahead.
const AHEAD: usize = 16;
/// Lines of other kinds than snapshots that a moment has at most.
const MOST_LINES: usize = 10_000;

enum Told {
    Header(Box<Header>),
    Moment(Vec<Line>),
    /// The end, and what is missing.
    End(Vec<String>),
}

/// Makes a report of it.
///
/// # Errors
/// When it is no recording, or has nothing of its span.
pub fn recorded(recording: &Recording) -> anyhow::Result<Report> {
    let (sender, receiver) = sync_channel(AHEAD);
    thread::scope(|scope| {
        // Where nobody listens any more, its end is told by whoever did.
        let reader = scope.spawn(move || read(recording, &mut |told| sender.send(told).is_ok()));
        let mut gathering: Option<Gathering> = None;
        for told in receiver {
            match (told, &mut gathering) {
                (Told::Header(header), _) => gathering = Some(Gathering::new(*header)?),
                (Told::Moment(lines), Some(gathering)) => gathering.moment(lines)?,
                (Told::End(missing), Some(gathering)) => {
                    gathering.forget_gaps();
                    gathering.tell(missing);
                }
                (_, None) => {}
            }
        }
        let name = reader.join().ok().context("what reads the recording has failed")??;
        match gathering.filter(|gathering| !gathering.is_empty()) {
            Some(gathering) => gathering.finish(),
            None => bail!("{name} has no snapshots in that span (choose one within the recording)"),
        }
    })
}

/// Returns the file's name.
fn read(recording: &Recording, tell: &mut dyn FnMut(Told) -> bool) -> anyhow::Result<String> {
    let mut played = recording.play()?;
    let mut goes_on = tell(Told::Header(Box::new(played.header().clone())));
    let (mut lines, mut seen, mut others): (Vec<Line>, Vec<String>, usize) = (Vec::new(), Vec::new(), 0);
    while goes_on && let Some(line) = played.next_of_all()? {
        match &line {
            // All sources are asked in turn: the second snapshot of one begins the next moment.
            Line::Snapshot(snapshot) => {
                if seen.contains(&snapshot.source) {
                    seen.clear();
                    others = 0;
                    goes_on = tell(Told::Moment(std::mem::take(&mut lines)));
                }
                seen.push(snapshot.source.clone());
            }
            _ if others >= MOST_LINES => continue,
            _ => others += 1,
        }
        lines.push(line);
    }
    if goes_on && tell(Told::Moment(lines)) {
        tell(Told::End(played.missing()));
    }
    Ok(played.name().to_owned())
}
