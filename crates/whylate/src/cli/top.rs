// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate top`: the overview as a live screen, of this machine or of a recording.

use std::io::{self, IsTerminal as _, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::recording::{Header, Line};
use whylate_model::units::printable;

use crate::cli::arguments::{OwnCpus, Rank, Within};
use crate::cli::values::{bytes, duration_ns, source};
use crate::cli::{Origin, program, record};
use crate::engine::sources::Wish;
use crate::files;
use crate::render::color;
use crate::store::about;
use crate::store::packer::Packer;
use crate::store::play::Recording;
use crate::top::feed::{Feed, Message, panic_if_asked};
use crate::top::history::History;
use crate::top::panel::Glyphs;
use crate::top::program_filter::ProgramFilter;
use crate::top::state::{Mode, Phase, Reaction, State};
use crate::top::terminal::{Event, Screen};
use whylate_sources::kernel::clock;

/// Default memory for the history, in bytes; `HISTORY_OF_FILE` for a recording.
const HISTORY: u64 = 64 << 20;
const HISTORY_OF_FILE: u64 = 1 << 30;
/// Interval between steps while a recording is played.
const PLAYED_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of messages to process before keys are polled again.
const AT_ONCE: usize = 32;

/// Show what is late and who makes it late, live or recorded
///
/// Enter opens the selected row, down to the causes and stacks of one late event. Space freezes; t and T step through time;
/// brackets change the span; w saves the span as a recording; ? shows all keys.
#[derive(Debug, Args)]
#[command(mut_arg("cpus", |cpus| cpus.conflicts_with("file")), mut_arg("rank_by", |by| by.help("How culprits are ranked [default: name]")))]
#[command(mut_arg("from", |from| from.requires("file")), mut_arg("to", |to| to.requires("file")), mut_arg("at", |at| at.requires("file")))]
#[command(after_help = "\
examples:
    # every source, each second
    whylate top
    # two of them
    whylate top --sources wq,timerlat
    # what these processes do, and who makes them late
    whylate top --comm postgres
    # a recording
    whylate top web1.whylate
    # five minutes of it
    whylate top web1.whylate --at 10:00..10:05")]
pub struct Arguments {
    /// A recording, instead of this machine
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Interval between snapshots, from 100ms to 1m
    #[arg(long, value_name = "INTERVAL", value_parser = every, default_value = "1s", conflicts_with = "file")]
    every: u64,
    /// Only these sources, e.g. wq,offcpu
    #[arg(long, value_name = "SOURCES", value_delimiter = ',', value_parser = source, conflicts_with = "file")]
    sources: Vec<String>,
    #[command(flatten)]
    own: OwnCpus,
    #[command(flatten)]
    within: Within,
    #[command(flatten)]
    of: program::Of,
    #[command(flatten)]
    rank: Rank,
    /// Memory for the past, from 1M to 4G (default: 64M; with FILE 1G, which holds most recordings entirely)
    #[arg(long, value_name = "SIZE", value_parser = history)]
    history: Option<u64>,
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

/// Shows the screen until the user quits.
///
/// # Errors
/// Fails if there is no terminal, nothing can be measured, or the recording cannot be read.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<()> {
    let recording = match (origin, &arguments.file) {
        (Origin::Recording(recording), _) => Some(recording.clone()),
        (Origin::Live, Some(file)) => {
            Some(Recording { path: file.clone(), span: arguments.within.span(), speed: None, command: None })
        }
        (Origin::Live, None) => None,
    };
    let glyphs = if is_utf8() { Glyphs::Unicode } else { Glyphs::Ascii };
    let default = if recording.is_some() { HISTORY_OF_FILE } else { HISTORY };
    let kept = History::new(usize::try_from(arguments.history.unwrap_or(default)).unwrap_or(usize::MAX));
    let mode = match &recording {
        Some(recording) => {
            // An unreadable recording is reported before the screen opens.
            drop(recording.play()?);
            if !io::stdout().is_terminal() {
                let text = recording
                    .command
                    .clone()
                    .unwrap_or_else(|| format!("whylate replay {}", printable(&recording.path.to_string_lossy())));
                bail!("standard output is not a terminal (run `{text}` for text, or `{text} --json`)");
            }
            Mode::Replay(printable(&recording.path.file_name().unwrap_or_default().to_string_lossy()))
        }
        None => Mode::Live,
    };
    let of = if mode == Mode::Live { arguments.of.present()? } else { arguments.of.recorded() };
    let mut state = State::new(mode, glyphs, TimeZone::system(), kept);
    if let Some(program) = of {
        state.open_program(ProgramFilter::Program(program));
    }
    state.has_colours = color::is_on();
    state.window.rank_by = arguments.rank.rank_by.map_or(By::Name, By::from);
    let mut screen = Screen::open()?;
    let feed = match recording {
        Some(recording) => Feed::recorded(recording),
        None => {
            let (only, cpus) = (arguments.sources.clone(), arguments.own.asked());
            let explain_ppm = arguments.own.explain_ppm();
            let wish = Wish { only, in_detail: true, explain_ppm, cpus, ..Wish::default() };
            Feed::live(wish, Duration::from_nanos(arguments.every))
        }
    };
    let mut feed = feed?;
    let mut missing = Vec::new();
    let outcome = show(&mut screen, &mut state, &mut feed, &mut missing);
    drop(screen);
    drop(feed);
    // Gaps of a recording are reported after the screen is closed, as by `replay`.
    missing.iter().for_each(|missing| say!("whylate: {missing}"));
    outcome
}

/// Draws on each event, until the user quits.
fn show(screen: &mut Screen, state: &mut State, feed: &mut Feed, missing: &mut Vec<String>) -> anyhow::Result<()> {
    let resize = |screen: &Screen, state: &mut State| {
        let (columns, rows) = screen.size().unwrap_or((80, 24));
        state.resize(columns, rows);
    };
    resize(screen, state);
    let (mut played, mut has_more) = (Instant::now(), false);
    loop {
        // Keys apply to what the screen shows.
        state.settle();
        // The next wait reports a closed terminal.
        let _ = screen.draw(state);
        if state.window.history.newest().is_some() {
            panic_if_asked("screen");
        }
        let next = state.is_playing().then(|| played + PLAYED_EVERY);
        let until = if has_more { Some(Instant::now()) } else { next };
        let event = screen.next(feed.wake(), until)?;
        if event == Event::Fed || has_more {
            has_more = take(state, feed, missing)?;
        }
        match event {
            Event::End => return Ok(()),
            Event::Resized => {
                resize(screen, state);
                screen.forget().context("cannot draw")?;
            }
            Event::Continued => screen.resume()?,
            Event::Time if next.is_some_and(|next| next <= Instant::now()) => {
                played = Instant::now();
                state.play();
            }
            Event::Time | Event::Fed => {}
            Event::Keys(keys) => {
                for key in keys {
                    match state.press(key) {
                        Reaction::Nothing => {}
                        Reaction::Quit => return Ok(()),
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

/// Processes messages of the feed. Returns whether there may be more.
///
/// # Errors
/// Fails if the feed has failed before the first snapshot; later errors are shown on the screen.
fn take(state: &mut State, feed: &mut Feed, missing: &mut Vec<String>) -> anyhow::Result<bool> {
    for _ in 0..AT_ONCE {
        match feed.take() {
            None => return Ok(false),
            Some(Message::Attaching(source)) => state.phase = Phase::Attaching(source),
            Some(Message::Early(header, lines)) => state.add_early(*header, lines),
            Some(Message::Started(header)) => state.start(*header),
            Some(Message::Tick(lines, own)) => {
                state.own = own;
                state.add(lines);
            }
            Some(Message::Problem(problem)) => state.problem = problem,
            Some(Message::Read(notes)) => *missing = notes,
            Some(Message::Ended(Some(problem))) if !state.has_started() => return Err(problem),
            Some(Message::Ended(problem)) => state.end(problem.map(|problem| format!("{problem:#}"))),
        }
    }
    Ok(true)
}

/// Saves the shown span as a recording. Returns the message for the screen.
fn write(state: &State) -> String {
    let written = record::default_name(&state.window.header.host).and_then(|path| {
        let path = files::free(path);
        files::write(&path, |out| write_lines(out, state))?;
        Ok(path)
    });
    match written {
        Ok(path) => format!("saved {0} (open it with: whylate top {0})", path.display()),
        Err(error) => format!("cannot save: {error:#}"),
    }
}

fn write_lines(out: &mut dyn Write, state: &State) -> io::Result<()> {
    let is_live = state.mode == Mode::Live;
    let start_unix_ns = state.window.ticks().next().map_or(0, |tick| tick.start_unix_ns);
    let mut head = vec![Line::Header(Header { start_unix_ns, ..state.window.header.clone() })];
    // A recording has the clock lines of its own machine.
    head.extend(is_live.then(|| Line::Clock(about::now())));
    let mut packer = Packer::begin(out, &head)?;
    state.window.lines().try_for_each(|lines| packer.tick(&lines))?;
    packer.end(if is_live { clock::unix_ns() } else { state.window.end_unix_ns().unwrap_or(0) })?;
    Ok(())
}

/// Returns whether the locale has UTF-8 (locale(7)).
fn is_utf8() -> bool {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
    let locale = locale.to_ascii_uppercase();
    locale.contains("UTF-8") || locale.contains("UTF8")
}
