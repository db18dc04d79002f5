// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate top`: the look as a live screen, or a recording in the same one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use jiff::tz::TimeZone;
use whylate_model::recording::Frame;
use whylate_model::units::printable;

use crate::commands::sources::Wish;
use crate::commands::{Origin, record};
use crate::files;
use crate::output::json::write_line;
use crate::recording::play::Recording;
use crate::recording::store::{head, tail};
use crate::recording::times::{Given, given};
use crate::recording::{EXTENSION, Span};
use crate::top::feed::{Feed, Told};
use crate::top::history::History;
use crate::top::panel::Glyphs;
use crate::top::state::{Mode, Reaction, State};
use crate::top::terminal::{Event, Screen};
use crate::values::{bytes, duration_ns, source};

/// What a recording goes on by while it is played.
const PLAYED_EVERY: Duration = Duration::from_secs(1);
/// A frame of what is written has so many moments.
const MOMENTS_OF_FRAME: usize = 16;

/// Shows live what is late and who makes it late, or a recording
///
/// Enter opens what is chosen, down to the causes and stacks of one late event. Space freezes; t, T, [ and ] go through the
/// time that is kept; w writes a recording of what is shown; ? shows all keys.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    whylate top                        # every source, each second
    whylate top --sources wq,timerlat --why 1ms
                                       # two of them, with causes from 1 ms on
    whylate top web1.whylate           # a recording
    whylate top web1.whylate --from 10:00 --to 10:05
                                       # five minutes of it")]
pub struct Arguments {
    /// A recording, in place of this machine
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Interval between snapshots, from 100ms to 1m
    #[arg(long, value_name = "INTERVAL", value_parser = every, default_value = "1s", conflicts_with = "file")]
    every: u64,
    /// Only these sources, e.g. wq,offcpu
    #[arg(long, value_name = "SOURCES", value_delimiter = ',', value_parser = source, conflicts_with = "file")]
    sources: Vec<String>,
    /// Explain each latency this long or longer [default: each source's own limit, as in the look]
    #[arg(long, value_name = "THRESHOLD", value_parser = duration_ns, conflicts_with = "file")]
    why: Option<u64>,
    /// Of a recording, only what was seen from then on, e.g. 10:00, 10m ago or 2026-11-26T10:00:00Z
    #[arg(long, value_name = "TIME", value_parser = given, requires = "file")]
    from: Option<Given>,
    /// Of a recording, only what was seen until then
    #[arg(long, value_name = "TIME", value_parser = given, requires = "file")]
    to: Option<Given>,
    /// How much of the past is kept to go back to
    #[arg(long, value_name = "SIZE", value_parser = history, default_value = "64M")]
    history: u64,
}

fn every(text: &str) -> Result<u64, String> {
    let ns = duration_ns(text)?;
    let is_sensible = (100_000_000..=60_000_000_000).contains(&ns);
    is_sensible.then_some(ns).ok_or_else(|| "give an interval from 100ms to 1m".to_owned())
}

fn history(text: &str) -> Result<u64, String> {
    let size = bytes(text)?;
    let is_sensible = (1 << 20..=4 << 30).contains(&size);
    is_sensible.then_some(size).ok_or_else(|| "give a size from 1M to 4G".to_owned())
}

/// Shows the screen until somebody quits it.
///
/// # Errors
/// When there is no terminal, nothing can be measured, or the recording cannot be read.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<()> {
    let recording = match (origin, &arguments.file) {
        (Origin::Recording(recording), _) => Some(recording.clone()),
        (Origin::Live, Some(file)) => {
            let span = Span { from: arguments.from.clone(), to: arguments.to.clone() };
            Some(Recording { path: file.clone(), span, speed: None })
        }
        (Origin::Live, None) => None,
    };
    let glyphs = if is_utf8() { Glyphs::Unicode } else { Glyphs::Ascii };
    let kept = History::of(usize::try_from(arguments.history).unwrap_or(usize::MAX));
    let mode = match &recording {
        Some(recording) => {
            // What is no recording is said where the command was given.
            drop(recording.play()?);
            Mode::Replay(printable(&recording.path.file_name().unwrap_or_default().to_string_lossy()))
        }
        None => Mode::Live,
    };
    let mut state = State::new(mode, glyphs, TimeZone::system(), kept);
    // As no-color.org has it.
    state.has_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut screen = Screen::open()?;
    let feed = match recording {
        Some(recording) => Feed::recorded(recording),
        None => {
            let (only, why_ns) = (arguments.sources.clone(), arguments.why);
            Feed::live(Wish { only, why_ns, in_detail: true, ..Wish::default() }, Duration::from_nanos(arguments.every))
        }
    };
    let mut feed = feed?;
    let problem = show(&mut screen, &mut state, &mut feed)?;
    drop(screen);
    drop(feed);
    problem.map_or(Ok(()), |problem| bail!(problem))
}

/// Draws on each event. Returns what has failed before anything was seen.
fn show(screen: &mut Screen, state: &mut State, feed: &mut Feed) -> anyhow::Result<Option<String>> {
    let resize = |screen: &Screen, state: &mut State| {
        let (columns, rows) = screen.size().unwrap_or((80, 24));
        state.resize(columns, rows);
    };
    resize(screen, state);
    let mut played = Instant::now();
    loop {
        // A terminal that is gone is told by the next wait.
        let _ = screen.draw(state);
        let until = state.is_playing().then(|| played + PLAYED_EVERY);
        match screen.next(&feed.wake, until)? {
            Event::End => return Ok(None),
            Event::Resized => {
                resize(screen, state);
                screen.forget().context("cannot draw")?;
            }
            Event::Time => {
                played = Instant::now();
                state.play();
            }
            Event::Fed => {
                while let Some(told) = feed.take() {
                    match told {
                        Told::Attaching(source) => state.phase = crate::top::state::Phase::Attaching(source),
                        Told::Begun(header) => state.begin(*header),
                        Told::Moment(lines, own) => {
                            state.own = own;
                            state.add(lines);
                        }
                        Told::Missed(count) => state.missed += count,
                        // Whoever sees nothing is told below the prompt.
                        Told::Ended(Some(problem)) if state.history.newest().is_none() => return Ok(Some(problem)),
                        Told::Ended(problem) => state.end(problem),
                    }
                }
            }
            Event::Keys(keys) => {
                for key in keys {
                    match state.press(key) {
                        Reaction::Nothing => {}
                        Reaction::Quit => return Ok(None),
                        Reaction::Suspend => screen.suspend()?,
                        Reaction::Redraw => screen.forget().context("cannot draw")?,
                        Reaction::Write => state.said = write(state),
                    }
                }
                played = Instant::now();
            }
        }
    }
}

/// Writes what is shown to a new file, and says so.
fn write(state: &State) -> String {
    let written = record::default_name(&state.header.host).and_then(|path| {
        let path = free(path);
        files::write(&path, |out| {
            let (index, frame) = head(&state.header)?;
            out.write_all(&index.to_bytes())?;
            out.write_all(&frame)?;
            let moments: Vec<_> = state.shown_lines().collect();
            for moments in moments.chunks(MOMENTS_OF_FRAME) {
                let mut frame = Frame::new()?;
                for line in moments.iter().flatten() {
                    let mut bytes = Vec::new();
                    write_line(&mut bytes, line)?;
                    frame.add(&bytes, line.span_unix_ns())?;
                }
                let (bytes, index) = frame.finish()?;
                out.write_all(&index.to_bytes())?;
                out.write_all(&bytes)?;
            }
            let (index, frame) = tail()?;
            out.write_all(&index.to_bytes())?;
            out.write_all(&frame)
        })?;
        Ok(path)
    });
    match written {
        Ok(path) => format!("wrote {} (whylate top or replay shows it)", path.display()),
        Err(error) => format!("cannot write: {error:#}"),
    }
}

/// The name, or the first one with a number that nothing has.
fn free(path: PathBuf) -> PathBuf {
    let numbered = |number: u32| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        PathBuf::from(format!("{stem}-{number}.{EXTENSION}"))
    };
    let is_free = |path: &PathBuf| std::fs::symlink_metadata(path).is_err();
    std::iter::once(path.clone()).chain((2..1000).map(numbered)).find(is_free).unwrap_or(path)
}

/// Whether the terminal is told to take UTF-8, as locale(7) has it.
fn is_utf8() -> bool {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
    let locale = locale.to_ascii_uppercase();
    locale.contains("UTF-8") || locale.contains("UTF8")
}
