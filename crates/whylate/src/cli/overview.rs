// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate` without a command: the overview of what is late on this machine and of the culprits, by all sources.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::overview::{Gatherer, Overview, not_recorded};
use whylate_model::recording::{Header, Line, Measured, Unmeasured};
use whylate_model::sources::named;
use whylate_model::{Card, LateEvent, Merger, Snapshot, Stack};

use crate::cli::arguments::{OwnCpus, Rank, Record, Verbosity};
use crate::cli::values::{duration_ns, seconds_ns};
use crate::cli::{LATE, Origin, SUCCESS, UsageError, program, record};
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::progress::Progress;
use crate::engine::replay::Replay;
use crate::engine::sources::{self, Wish};
use crate::engine::ticks::{Sink, Tick, add_lost, drive};
use crate::engine::watch::Watch;
use crate::json::write_line;
use crate::render::text::fit::terminal_columns;
use crate::render::text::overview::{self, Screen};
use crate::render::text::program::form_of;
use crate::store::Recorder;
use crate::store::play::Recording;

/// Default duration, in nanoseconds.
const DURATION_NS: u64 = 10_000_000_000;

/// How clap writes the duration that is no option.
pub const LENGTH: &str = "[DURATION]";

/// Arguments of the overview.
#[derive(Debug, Args)]
#[command(
    mut_arg("rank_by", |by| by.alias("by")),
    mut_arg("output", |output| output.help("Also record to this file (.whylate), for `whylate replay`; of one program: draw a flame graph (.svg, .folded)")),
    mut_arg("verbose", |verbose| verbose.help("Also print the other worst events or waits, lost events by reason, and what was not measured")),
    mut_arg("cpus", |cpus| cpus.conflicts_with_all(["pid", "comm", "cgroup"]))
)]
pub struct Arguments {
    /// How long to measure; a bare number is in seconds
    #[arg(value_name = "DURATION", value_parser = seconds_ns, conflicts_with = "duration")]
    length: Option<u64>,
    /// How long to measure, e.g. 10s or 1m [default: 10s]
    #[arg(short, long, value_name = "DURATION", value_parser = duration_ns)]
    duration: Option<u64>,
    #[command(flatten)]
    of: program::Of,
    #[command(flatten)]
    rank: Rank,
    #[command(flatten)]
    own: OwnCpus,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    verbosity: Verbosity,
    /// Exit with status 4 if anything was late
    #[arg(long)]
    fail_if_late: bool,
    #[command(flatten)]
    record: Record,
}

impl Arguments {
    /// Returns how long to measure, if given.
    pub fn duration_ns(&self) -> Option<u64> {
        self.duration.or(self.length)
    }

    /// Refuses options that one program does not have.
    fn are_of_one_program(&self) -> anyhow::Result<()> {
        let what = match self {
            _ if self.json && self.rank.rank_by.is_some() => {
                "--json has the causes of each wait, unranked: omit --rank-by, or --json"
            }
            _ if self.fail_if_late => "--fail-if-late judges the whole machine: omit it, or -p, --comm and --cgroup",
            _ => return Ok(()),
        };
        Err(UsageError(anyhow!(what)).into())
    }
}

/// Measures (or reads a recording), and prints the overview. Returns the exit status.
///
/// # Errors
/// Fails if no source can attach, a source fails, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    let record_to = arguments.record.output.as_deref();
    if let Some(program) = arguments.of.program(origin)? {
        arguments.are_of_one_program()?;
        let Arguments { json, verbosity, rank, .. } = *arguments;
        let output = record_to.map(|path| Ok::<_, anyhow::Error>((path, form_of(path)?))).transpose()?;
        let (is_verbose, rank_by) = (verbosity.verbose, rank.rank_by.map(By::from));
        let shown = program::Shown { is_json: json, is_verbose, rank_by, output };
        return program::run(&program, arguments.duration_ns().unwrap_or(DURATION_NS), &shown).map(|()| SUCCESS);
    }
    let look = match origin {
        Origin::Recording(recording) => {
            record::refuse(record_to)?;
            if !arguments.own.asked().is_empty() {
                return Err(UsageError(anyhow!("the CPUs were chosen when the recording was made: omit -c")).into());
            }
            if arguments.own.explain_ppm().is_some() {
                return Err(
                    UsageError(anyhow!("causes were explained when the recording was made: omit --budget")).into()
                );
            }
            if arguments.duration_ns().is_some() {
                return Err(UsageError(anyhow!("the overview has all of a recording: choose a span with --at")).into());
            }
            Some(recorded(arguments, recording)?)
        }
        Origin::Live => live(arguments)?,
    };
    let Some(mut look) = look else { return Ok(SUCCESS) };
    let mut out = io::BufWriter::new(io::stdout().lock());
    if arguments.json {
        look.round_percentiles();
        write_line(&mut out, &look)?;
    } else {
        let replay = if let Origin::Recording(recording) = origin { recording.command.clone() } else { None };
        let (columns, zone) = (terminal_columns(), TimeZone::system());
        let screen = Screen { columns, is_verbose: arguments.verbosity.verbose, zone, replay };
        overview::write(&mut out, &look, &screen)?;
    }
    out.flush()?;
    let is_late = look.sources.iter().any(|source| source.is_late);
    Ok(if arguments.fail_if_late && is_late { LATE } else { SUCCESS })
}

/// Measures this machine. Returns `None` if interrupted before measuring, or if the output is closed.
fn live(arguments: &Arguments) -> anyhow::Result<Option<Overview>> {
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let store = arguments.record.output.as_deref().map(record::file).transpose()?;
    let progress = Progress::new("Looking at this machine");
    let (explain_ppm, cpus) = (arguments.own.explain_ppm(), arguments.own.asked());
    let wish = Wish { explain_ppm, cpus, ..Wish::default() };
    progress.show("attaching");
    let Some(sources) = sources::attach(&watch, &wish, &mut |_| ())? else {
        progress.clear();
        say!("whylate: interrupted before anything was measured");
        return Ok(None);
    };
    let duration_ns = arguments.duration_ns().unwrap_or(DURATION_NS);
    let pace = Pace { duration: Some(Duration::from_nanos(duration_ns)), poll: Some(NOW_AND_THEN), ..Pace::default() };
    let (mut live, header) = Live::begin(sources, &wish, watch, pace)?;
    live.record(store.map(|store| Recorder::start(store, header.clone())).transpose()?);
    let mut results = Results::new(arguments, &header);
    results.progress = Some((progress, Instant::now(), duration_ns));
    drive(&mut live, &mut results)?;
    if live.is_output_closed() {
        return Ok(None);
    }
    // The end of a recording is said below the progress.
    results.progress.iter().for_each(|(progress, ..)| progress.clear());
    live.finish()?;
    Ok(Some(results.finish(header)))
}

/// Builds the overview from a recording.
fn recorded(arguments: &Arguments, recording: &Recording) -> anyhow::Result<Overview> {
    let mut replay = Replay::new(recording.play()?);
    let header = replay.header().clone();
    let mut results = Results::new(arguments, &header);
    drive(&mut replay, &mut results)?;
    replay.finish()?;
    Ok(results.finish(header))
}

/// Results so far; vectors have an entry per source of the header.
struct Results {
    cards: Vec<&'static Card>,
    gatherer: Gatherer,
    mergers: Vec<Merger>,
    /// Stacks of the last snapshots: threads that still sleep are in these.
    last_stacks: Vec<Vec<Stack>>,
    /// Lost events of the shared CPU account, by reason.
    lost: BTreeMap<String, u64>,
    /// The progress line, the start, and the duration in nanoseconds.
    progress: Option<(Progress, Instant, u64)>,
}

impl Results {
    fn new(arguments: &Arguments, header: &Header) -> Self {
        let cards: Vec<&'static Card> = header.sources.iter().filter_map(|of| named(&of.source)).collect();
        // Readers of JSON have each culprit, and can add up those of one name.
        let rank_by = if arguments.json { arguments.rank.by_thread() } else { arguments.rank.into() };
        Results {
            gatherer: Gatherer::for_cards(cards.clone(), rank_by),
            mergers: cards.iter().map(|_| Merger::default()).collect(),
            last_stacks: cards.iter().map(|_| Vec::new()).collect(),
            lost: BTreeMap::new(),
            progress: None,
            cards,
        }
    }

    fn finish(self, header: Header) -> Overview {
        let Results { cards, gatherer, mut mergers, last_stacks, lost, .. } = self;
        let merged = cards.iter().zip(&mut mergers).zip(last_stacks);
        let merged = merged.filter_map(|((card, merger), stacks)| Some((*card, Snapshot { stacks, ..merger.take()? })));
        let (mut snapshots, mut unmeasured): (Vec<_>, _) = (merged.collect(), header.unmeasured);
        set_aside(&mut snapshots, &header.sources, &mut unmeasured);
        let mut limitations = header.limitations;
        limitations.extend(not_recorded(&header.sources));
        Overview { limitations, lost, ..gatherer.finish(&snapshots, unmeasured) }
    }
}

impl Sink for Results {
    fn late(&mut self, card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        if self.cards.iter().any(|of| of.name == card.name) {
            self.gatherer.add(card, event);
        }
        Ok(None)
    }

    fn poll(&mut self) -> anyhow::Result<ControlFlow<()>> {
        if let Some((progress, began, duration_ns)) = &self.progress {
            progress.show(&format!("{} of {} s", began.elapsed().as_secs(), duration_ns / 1_000_000_000));
        }
        Ok(ControlFlow::Continue(()))
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        self.progress.iter().filter(|_| !tick.problems.is_empty()).for_each(|(progress, ..)| progress.clear());
        tick.report_problems();
        for line in tick.lines {
            match line {
                Line::Snapshot(mut snapshot) => {
                    let Some(number) = self.cards.iter().position(|card| card.name == snapshot.source) else {
                        continue;
                    };
                    self.last_stacks[number] = std::mem::take(&mut snapshot.stacks);
                    self.mergers[number].add(*snapshot);
                }
                Line::Account(account) => add_lost(&mut self.lost, account.lost),
                _ => {}
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Moves sources that had nothing to measure from the snapshots to `unmeasured`.
fn set_aside(snapshots: &mut Vec<(&'static Card, Snapshot)>, measured: &[Measured], unmeasured: &mut Vec<Unmeasured>) {
    snapshots.retain(|(card, snapshot)| {
        let nothing = measured.iter().find(|of| of.source == card.name).and_then(|of| of.nothing.clone());
        let has_lost = snapshot.lost.values().any(|&count| count > 0);
        match nothing.filter(|_| snapshot.series.is_empty() && !has_lost) {
            Some(reason) => unmeasured.push(Unmeasured::new(card.name, reason)),
            None => return true,
        }
        false
    });
}
