// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate export`: converts a recording to formats of other tools.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{ArgGroup, Args};
use whylate_model::recording::Line;

use crate::cli::arguments::Within;
use crate::engine::replay::Replay;
use crate::engine::ticks::{Lines, drive};
use crate::render::export::{Destination, Export};
use crate::store::play::Recording;

/// Export a recording as a trace for Perfetto, or as tables for SQL engines and spreadsheets
///
/// A recording can be queried as it is, too: it is JSON lines in zstd frames. docs/sql.md has queries for both.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("form").required(true).multiple(true).args(["perfetto", "parquet", "csv"]))]
#[command(override_usage = "whylate export FILE [--perfetto OUT] [--parquet DIR] [--csv DIR]")]
#[command(after_help = "\
examples:
    # a trace to open at https://ui.perfetto.dev
    whylate export web1.whylate --perfetto web1.perfetto-trace
    # five minutes of it
    whylate export web1.whylate --at 10:00..10:05 --perfetto late.trace
    # tables in a directory: web1/late.parquet, ...
    whylate export web1.whylate --parquet web1
    # query them
    duckdb -c \"FROM 'web1/causes.parquet'\"
    # as CSV, for spreadsheets
    whylate export web1.whylate --csv web1")]
pub struct Arguments {
    /// A recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    within: Within,
    /// Write a Perfetto trace of late events, their causes, and counters
    #[arg(long, value_name = "OUT")]
    perfetto: Option<PathBuf>,
    /// Write Parquet tables into this directory
    #[arg(long, value_name = "DIRECTORY")]
    parquet: Option<PathBuf>,
    /// Write the same tables as CSV into this directory
    #[arg(long, value_name = "DIRECTORY")]
    csv: Option<PathBuf>,
}

/// Exports the recording.
///
/// # Errors
/// Fails if the file is not a recording, has no snapshots within the span, or an output cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let recording = Recording { path: arguments.file.clone(), span: arguments.within.span(), speed: None };
    let mut replay = Replay::of_lines(match arguments.perfetto {
        Some(_) => recording.play_with_clocks()?,
        None => recording.play()?,
    });
    let destination = Destination::for_recording(&arguments.file)?;
    let perfetto = arguments.perfetto.as_deref().map(|path| destination.perfetto(path, replay.header()));
    let parquet = arguments.parquet.as_deref().map(|directory| destination.parquet(directory));
    let csv = arguments.csv.as_deref().map(|directory| destination.csv(directory));
    let mut exports: Vec<Box<dyn Export>> = [perfetto, parquet, csv].into_iter().flatten().collect::<Result<_, _>>()?;
    let mut lines = Lines(|line: Line| {
        exports.iter_mut().try_for_each(|export| export.line(&line)).context("cannot write the export")
    });
    drive(&mut replay, &mut lines)?;
    replay.finish()?;
    exports.into_iter().try_for_each(|export| export.end()).context("cannot write the export")
}
