// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate export`: converts a recording to formats of other tools.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use whylate_model::recording::Line;

use crate::cli::UsageError;
use crate::cli::arguments::Within;
use crate::engine::replay::Replay;
use crate::engine::ticks::{Lines, drive};
use crate::render::export::{Destination, Export};
use crate::render::extension::{Extension, chosen, report_written};
use crate::store::play::Recording;

/// Export a recording to Perfetto, SQL engines and spreadsheets
///
/// SQL engines can also read a recording itself: it is JSON lines in zstd frames. docs/sql.md has queries for
/// recordings and for tables.
#[derive(Debug, Args)]
#[command(override_usage = "whylate export FILE -o OUT [-o OUT]...")]
#[command(after_help = "\
examples:
    # a trace to open at https://ui.perfetto.dev
    whylate export web1.whylate -o web1.perfetto-trace
    # five minutes of it
    whylate export web1.whylate --at 10:00..10:05 -o late.perfetto-trace
    # tables in a directory: web1.parquet/late.parquet, ...
    whylate export web1.whylate -o web1.parquet/
    # query them
    duckdb -c \"FROM 'web1.parquet/causes.parquet'\"
    # tables of a fleet: fleet.parquet/date=2026-11-26/host=web1/ ...
    whylate export web1.whylate -o fleet.parquet/ --partition
    # as CSV, for spreadsheets
    whylate export web1.whylate -o web1.csv/")]
pub struct Arguments {
    /// A recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    within: Within,
    /// Write late events, their causes, and counters to OUT; its extension sets the format: .perfetto-trace for a
    /// trace, .parquet/ or .csv/ for a directory of tables
    #[arg(short, long, value_name = "OUT", required_unless_present_any = ["perfetto", "parquet", "csv"])]
    output: Vec<PathBuf>,
    /// Write Parquet tables to date=YYYY-MM-DD/host=NAME/ below the directory; recordings of many hosts can share it.
    /// Exporting a recording again replaces its files
    #[arg(long)]
    partition: bool,
    /// Former spelling: a Perfetto trace with any name
    #[arg(long, value_name = "OUT", hide = true)]
    perfetto: Option<PathBuf>,
    /// Former spelling: Parquet tables in a directory with any name
    #[arg(long, value_name = "DIRECTORY", hide = true)]
    parquet: Option<PathBuf>,
    /// Former spelling: CSV tables in a directory with any name
    #[arg(long, value_name = "DIRECTORY", hide = true)]
    csv: Option<PathBuf>,
}

/// Format of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Perfetto,
    Parquet,
    Csv,
}

const FORMS: [(Extension, Form); 3] =
    [(Extension::Perfetto, Form::Perfetto), (Extension::Parquet, Form::Parquet), (Extension::Csv, Form::Csv)];

impl Arguments {
    /// Returns the outputs with their formats.
    fn outputs(&self) -> anyhow::Result<Vec<(Form, &Path)>> {
        let former = [(Form::Perfetto, &self.perfetto), (Form::Parquet, &self.parquet), (Form::Csv, &self.csv)];
        let former = former.into_iter().filter_map(|(form, path)| Some(anyhow::Ok((form, path.as_deref()?))));
        let named = self.output.iter().map(|path| anyhow::Ok((chosen(path, &FORMS)?, path.as_path())));
        former.chain(named).collect()
    }
}

/// Exports the recording.
///
/// # Errors
/// Fails if the file is not a recording, has no snapshots within the span, or an output cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let outputs = arguments.outputs()?;
    let span = arguments.within.span();
    if arguments.partition && !outputs.iter().any(|(form, _)| *form == Form::Parquet) {
        return Err(UsageError(anyhow!("--partition is for Parquet: add -o DIR.parquet/")).into());
    }
    // A part would replace the files of the whole recording.
    if arguments.partition && (span.from.is_some() || span.to.is_some()) {
        return Err(UsageError(anyhow!("--partition writes whole recordings: omit --from, --to and --at")).into());
    }
    let recording = Recording { path: arguments.file.clone(), span, speed: None, command: None };
    let mut replay = Replay::of_lines(match outputs.iter().any(|(form, _)| *form == Form::Perfetto) {
        true => recording.play_with_clocks()?,
        false => recording.play()?,
    });
    let destination = Destination::for_recording(&arguments.file)?;
    let started = outputs.iter().map(|&(form, path)| match form {
        Form::Perfetto => destination.perfetto(path, replay.header()),
        Form::Parquet if arguments.partition => destination.partitions(path, replay.header()),
        Form::Parquet => destination.parquet(path),
        Form::Csv => destination.csv(path),
    });
    let mut exports: Vec<Box<dyn Export>> = started.collect::<Result<_, _>>()?;
    let mut lines = Lines(|line: Line| {
        exports.iter_mut().try_for_each(|export| export.line(&line)).context("cannot write the export")
    });
    drive(&mut replay, &mut lines)?;
    replay.finish()?;
    exports.into_iter().try_for_each(|export| export.end()).context("cannot write the export")?;
    outputs.iter().for_each(|(_, path)| report_written(path));
    Ok(())
}
