// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate report`: an HTML file that explains what was late in a recording or on this machine.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use whylate_model::culprits::By;
use whylate_model::recording::Header;
use whylate_model::units::printable;
use whylate_sources::kernel::clock;

use crate::cli::arguments::{OwnCpus, Rank, Within};
use crate::cli::values::duration_ns;
use crate::cli::{diff, record};
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::progress::Progress;
use crate::engine::sources::{self, Wish};
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::Watch;
use crate::files::{self, PendingFile};
use crate::render::export::Destination;
use crate::render::extension::{Extension, chosen, report_written};
use crate::render::html::{self, Compared, Made, Report, ReportBuilder, recorded};
use crate::say::quoted;
use crate::store::play::Recording;
use crate::store::{Span, about};

/// File extension of reports.
const EXTENSION: &str = "html";
/// Interval between snapshots, as in `record`.
const EVERY: Duration = Duration::from_secs(1);

/// Write a self-contained HTML report on a recording or this machine
///
/// The file opens without a network, a server or whylate. It shows when something was late, what it was, who made it
/// late, and the stacks that prove it. Drag over its timeline to see one span. It contains the snapshots, which can be
/// saved as a recording again.
#[derive(Debug, Args)]
#[command(mut_arg("cpus", |cpus| cpus.conflicts_with("file")))]
#[command(mut_arg("from", |from| from.requires("file")), mut_arg("to", |to| to.requires("file")), mut_arg("at", |at| at.requires("file")))]
#[command(after_help = "\
examples:
    # from a recording
    whylate report web1.whylate
    # from five minutes of it
    whylate report web1.whylate --at 10:00..10:05 -o late.html
    # from this machine, measured for a minute now
    whylate report -d 1m
    # from two recordings, with what differs first
    whylate report monday.whylate --diff tuesday.whylate")]
pub struct Arguments {
    /// A recording, instead of this machine
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Without FILE: measure for this long (e.g. 30s, 5m)
    #[arg(short, long, value_name = "DURATION", value_parser = duration_ns, default_value = "30s", conflicts_with = "file")]
    duration: u64,
    #[command(flatten)]
    own: OwnCpus,
    /// File to write (.html) [default: a file named after host and time]
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
    #[command(flatten)]
    within: Within,
    #[command(flatten)]
    rank: Rank,
    /// With FILE: also show this recording, and what differs between the two
    #[arg(long, value_name = "FILE2", requires = "file")]
    diff: Option<PathBuf>,
}

impl Arguments {
    /// Returns whether the report measures this machine.
    pub fn is_live(&self) -> bool {
        self.file.is_none()
    }

    /// Returns the file to write, if given.
    fn output(&self) -> anyhow::Result<Option<&Path>> {
        // The former spelling.
        let is_htm = |path: &Path| path.extension().is_some_and(|of| of == "htm");
        match self.output.as_deref() {
            Some(path) if !is_htm(path) => chosen(path, &[(Extension::Html, path)]).map(Some),
            path => Ok(path),
        }
    }
}

/// Writes the report.
///
/// # Errors
/// Fails if nothing can be measured, a recording cannot be read or has nothing of its span, or the file cannot be
/// written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let given = arguments.output()?;
    let recording = arguments.file.clone().map(|path| Recording {
        path,
        span: arguments.within.span(),
        speed: None,
        command: None,
    });
    // Fails before anything is measured if the file cannot be written.
    let host = || match &recording {
        Some(recording) => recording.play().map(|played| played.header().host.clone()),
        None => Ok(about::this_machine().host),
    };
    match given {
        Some(path) => drop(begin(path, recording.as_ref())?),
        None => drop(begin(&free(&host()?)?, recording.as_ref())?),
    }
    // Fails early if the second recording cannot be read.
    if let Some(path) = &arguments.diff {
        Recording { path: path.clone(), span: Span::default(), speed: None, command: None }.play()?;
    }
    let rank_by = arguments.rank.by_thread();
    let report = match &recording {
        Some(recording) => Some(recorded(recording, rank_by)?),
        None => live(arguments, rank_by)?,
    };
    let Some(report) = report else { return Ok(()) };
    let compared = match (&recording, &arguments.diff) {
        (Some(recording), Some(path)) => {
            let other = Recording { path: path.clone(), span: Span::default(), speed: None, command: None };
            let diff = diff::compare(&[recording.clone(), other.clone()], false)?;
            Some(Compared { diff, other: recorded(&other, rank_by)? })
        }
        _ => None,
    };
    let path = match given {
        Some(path) => path.to_owned(),
        None => free(&report.header.host)?,
    };
    let mut out = begin(&path, recording.as_ref())?;
    let name = printable(&path.to_string_lossy());
    let made = made(&path, recording.as_ref());
    html::write(&mut out, &report, compared.as_ref(), &made)
        .and_then(|()| out.end())
        .with_context(|| format!("cannot write {name}"))?;
    for missing in report.missing.iter().chain(compared.iter().flat_map(|compared| &compared.other.missing)) {
        say!("whylate: {}", printable(missing));
    }
    report_written(&path);
    Ok(())
}

/// Returns a default file name that is not in use.
fn free(host: &str) -> anyhow::Result<PathBuf> {
    Ok(files::free(record::default_name(host)?.with_extension(EXTENSION)))
}

/// Starts the file. Does not overwrite the recording that is read.
fn begin(path: &Path, recording: Option<&Recording>) -> anyhow::Result<PendingFile> {
    match recording {
        Some(recording) => {
            let name = || format!("cannot read {}", printable(&recording.path.to_string_lossy()));
            Destination::for_recording(&recording.path).with_context(name)?.begin(path)
        }
        None => PendingFile::new(path).with_context(|| format!("cannot write {}", printable(&path.to_string_lossy()))),
    }
}

/// Returns how the report was made: command line, version, time, and the command to replay.
fn made(path: &Path, recording: Option<&Recording>) -> Made {
    let words: Vec<String> = std::env::args_os().skip(1).map(|word| quoted(&word.to_string_lossy())).collect();
    let saved_as = path.with_extension(crate::store::EXTENSION);
    let saved_as = saved_as.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let replayed =
        recording.map_or_else(|| saved_as.clone(), |recording| recording.path.to_string_lossy().into_owned());
    Made {
        command: format!("whylate {}", words.join(" ")),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        at_unix_ns: clock::unix_ns(),
        replay: format!("whylate replay {}", quoted(&printable(&replayed))),
        saved_as,
    }
}

/// Measures this machine. Returns `None` if interrupted before anything was measured.
fn live(arguments: &Arguments, rank_by: By) -> anyhow::Result<Option<Report>> {
    let watch = Watch::of_signals().context("cannot watch for Ctrl-C")?;
    let (explain_ppm, cpus) = (arguments.own.explain_ppm(), arguments.own.asked());
    let wish = Wish { in_detail: true, explain_ppm, cpus, ..Wish::default() };
    let Some(sources) = sources::attach(&watch, &wish, &mut |_| ())? else {
        say!("whylate: interrupted before anything was measured");
        return Ok(None);
    };
    let pace = Pace {
        interval: Some(EVERY),
        duration: Some(Duration::from_nanos(arguments.duration)),
        poll: Some(NOW_AND_THEN),
        ..Pace::default()
    };
    let (mut live, header) = Live::begin(sources, &wish, watch, pace)?;
    let every_ns = u64::try_from(EVERY.as_nanos()).ok();
    let builder = ReportBuilder::new(Header { every_ns, ..header }, rank_by)?;
    let progress = Progress::new("Looking at this machine");
    let mut measured = Measured { builder, progress, started: Instant::now(), duration_ns: arguments.duration };
    drive(&mut live, &mut measured)?;
    drop(live);
    let Measured { builder, progress, .. } = measured;
    drop(progress);
    if builder.is_empty() {
        bail!("nothing was measured (try a longer time with -d)");
    }
    builder.finish().map(Some)
}

/// A report of what is measured, and how far it is.
struct Measured {
    builder: ReportBuilder,
    progress: Progress,
    started: Instant,
    duration_ns: u64,
}

impl Sink for Measured {
    fn tick(&mut self, mut tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        if !tick.problems.is_empty() {
            self.progress.clear();
            tick.report_problems();
        }
        self.builder.add_missing(std::mem::take(&mut tick.problems));
        self.builder.tick(&mut tick)?;
        let seconds = self.started.elapsed().as_secs();
        self.progress.show(&format!("{seconds} of {} s", self.duration_ns / 1_000_000_000));
        Ok(ControlFlow::Continue(()))
    }
}
