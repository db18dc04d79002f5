// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pins the screens of each recording in `tests/recordings/`; `tests/golden.rs` pins the output of commands.

#[path = "../../tests/golden/directory.rs"]
mod directory;

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use jiff::tz::TimeZone;

use super::feed::{Feed, Message};
use super::history::History;
use super::panel::Glyphs;
use super::state::{Mode, State};
use super::tests::{drawn, press};
use super::view_kind::ViewKind;
use crate::store::Span;
use crate::store::play::Recording;
use crate::store::times::given;
use directory::{RECORDINGS, check, recordings};

const VIEWS: [(&str, &str); 7] = [
    ("overview", ""),
    ("source", "S\n"),
    ("stacks", "Sj\n\t"),
    ("series", "Sj\n\n"),
    ("culprit", "C\n"),
    ("event", "L\n"),
    ("path", "L\n\t"),
];

/// Replays a recording into the state.
fn read(state: &mut State, span: Span, name: &str) -> Result<()> {
    let path = Path::new(RECORDINGS).join(format!("{name}.whylate"));
    let mut feed = Feed::recorded(Recording { path, span, speed: None, command: None })?;
    loop {
        match feed.take() {
            None => thread::sleep(Duration::from_millis(1)),
            Some(Message::Started(header)) => state.start(*header),
            Some(Message::Tick(lines, _)) => {
                state.add(lines);
                state.settle();
            }
            Some(Message::Ended(Some(problem))) => return Err(problem),
            Some(Message::Ended(None)) => break,
            Some(Message::Read(_)) => {}
            Some(_) => bail!("a recording attaches nothing"),
        }
    }
    state.end(None);
    state.settle();
    Ok(())
}

fn screen(name: &str, columns: usize, rows: usize) -> Result<State> {
    let mode = Mode::Replay(format!("{name}.whylate"));
    let mut state = State::new(mode, Glyphs::Unicode, TimeZone::UTC, History::new(64 << 20));
    state.resize(columns, rows);
    read(&mut state, Span::default(), name)?;
    Ok(state)
}

#[test]
fn golden_screens_are_those_of_each_recording() -> Result<()> {
    for name in recordings()? {
        for (columns, rows) in [(80, 24), (200, 50)] {
            let mut all = String::new();
            for (view, keys) in VIEWS {
                let mut state = screen(&name, columns, rows)?;
                press(&mut state, keys);
                all += &format!("{view}:\n{}\n", drawn(&state, columns as u16, rows as u16));
            }
            check(&name, &format!("top-{columns}x{rows}"), &all)?;
        }
    }
    Ok(())
}

/// The page of each source, and the columns that it shows in 80 columns.
const PAGES: [(&str, &str); 5] = [
    ("wq", "HANDLER COUNT P50 P99 MAX"),
    ("timerlat", "CPU COUNT P50 P99 MAX"),
    ("irqsoff", "KIND FUNCTION COUNT P50 P99 MAX"),
    ("block", "DEVICE OPERATION PROCESS COUNT P50 P99 MAX"),
    ("sqpoll", "PROCESS TID WORKING SPINNING STARVED"),
];

#[test]
fn golden_pages_of_sources_begin_with_the_decisive_columns() -> Result<()> {
    let name = "sources-6.18";
    for (columns, rows) in [(80, 24), (100, 30), (160, 45)] {
        let mut all = String::new();
        for (source, decisive) in PAGES {
            let mut state = screen(name, columns, rows)?;
            state.open(ViewKind::Source(source));
            let page = drawn(&state, columns as u16, rows as u16);
            let heading = page.lines().find(|line| line.contains(" COUNT ") || line.contains(" WORKING "));
            let words: Vec<&str> = heading.context("it has no table")?.split_whitespace().collect();
            let shown = decisive.split(' ').all(|column| words.contains(&column));
            ensure!(shown && !page.contains("LATENCY P99"), "{source} in {columns} columns: {page}");
            all += &format!("{source}:\n{page}\n");
        }
        check(name, &format!("top-pages-{columns}x{rows}"), &all)?;
    }
    Ok(())
}

#[test]
fn golden_sentence_of_an_empty_span_is_that_of_all_commands() -> Result<()> {
    let at = |text| given(text).map_err(anyhow::Error::msg);
    let span = Span { from: Some(at("2001-01-01T00:00:00Z")?), to: Some(at("2001-01-02T00:00:00Z")?) };
    let mut state = State::new(Mode::Live, Glyphs::Ascii, TimeZone::UTC, History::new(1 << 20));
    let problem = read(&mut state, span, "sources-6.18").err().context("it has something")?.to_string();
    ensure!(problem.contains("has no snapshots in that span: it covers 2026-"), "{problem}");
    // The command returns this error.
    ensure!(!state.has_started(), "the screen stays");
    Ok(())
}
