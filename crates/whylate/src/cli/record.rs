// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate record`: records snapshots and late events of all sources.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use jiff::Timestamp;
use signal_hook::consts::SIGUSR1;
use whylate_model::recording::{Header, Kept as KeptLine};
use whylate_model::units::printable;
use whylate_sources::kernel::clock;
use whylate_sources::kernel::least_privilege::ReducedCapabilities;
use whylate_sources::kernel::passed_sockets::notify_ready;
use whylate_sources::kernel::pressure::{PressureThreshold, PressureTrigger};

use crate::cli::UsageError;
use crate::cli::arguments::OwnCpus;
use crate::cli::values::{bytes, duration_ns, source};
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::progress::Progress;
use crate::engine::sources::{Sources, Wish};
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::Watch;
use crate::render::extension::{Extension, chosen};
use crate::store::destination::Store;
use crate::store::recorder::{PRESSURE, Recorder, say_recorded};
use crate::store::{DirectoryStore, EXTENSION, FileStore, Retention, RingStore, When, about};

/// Default of `--min-free`.
const MIN_FREE: &str = "100M";
/// Default directory of the flight recorder (`--ring`).
const FLIGHTS: &str = "whylate-recordings";

/// Record what all sources measure, with the causes of late events, for `whylate replay`
///
/// Every second (--every), whylate writes the snapshot and the late events of each source. A recording stays readable
/// however it ends. Only its owner can read it. It has names of processes and functions, but no command lines.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # one hour, into a file in the current directory
    whylate record -d 1h
    # causes of everything over 10 ms, until Ctrl-C
    whylate record -o web1.whylate --why 10ms
    # until stopped, in a directory kept within these limits
    whylate record -o /var/log/whylate/ --keep 7d --max-size 2G
    # a file of the last 15 minutes whenever a latency reaches 100 ms
    whylate record --ring 15m --on-late 100ms
    # show what was recorded
    whylate replay web1.whylate")]
pub struct Arguments {
    /// File to write (.whylate), or a directory, which gets a new file each day [default: a file named after host and time; with --ring, the directory whylate-recordings]
    #[arg(short, long, value_name = "FILE|DIR/")]
    output: Option<PathBuf>,
    /// End after this time (e.g. 10m, 1h)
    #[arg(short, long, value_name = "DURATION", value_parser = duration_ns)]
    duration: Option<u64>,
    /// Only these sources, e.g. wq,offcpu
    #[arg(long, value_name = "SOURCES", value_delimiter = ',', value_parser = source)]
    sources: Vec<String>,
    #[command(flatten)]
    own: OwnCpus,
    /// Explain every latency of THRESHOLD or more [default: each source's own limit, as in the overview]
    #[arg(long, value_name = "THRESHOLD", value_parser = duration_ns)]
    why: Option<u64>,
    /// Interval between snapshots, from 100ms to 1h
    #[arg(long, value_name = "INTERVAL", value_parser = every, default_value = "1s")]
    every: u64,
    #[command(flatten)]
    kept: Kept,
}

/// What is kept of a recording, for commands that record until they are stopped. The limits of a directory can be given twice,
/// as those of a service's unit and those of its user: the last one counts.
#[derive(Debug, Args)]
pub struct Kept {
    /// With a directory: remove recordings older than this
    #[arg(long, value_name = "AGE", value_parser = duration_ns, overrides_with = "keep")]
    keep: Option<u64>,
    /// With a directory: remove the oldest recordings when all of them exceed this size in total, e.g. 2G
    #[arg(long, value_name = "SIZE", value_parser = max_size, overrides_with = "max_size")]
    max_size: Option<u64>,
    /// Pause while the file system has less free space than this
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = MIN_FREE)]
    min_free: u64,
    /// Keep this much of the past in memory (at most 64 MiB, compressed), and write it only on --on-late, --on-pressure or SIGUSR1
    #[arg(long, value_name = "DURATION", value_parser = duration_ns)]
    ring: Option<u64>,
    /// With --ring: write a file when a latency reaches this
    #[arg(long, value_name = "LATENCY", value_parser = duration_ns, requires = "ring")]
    pub on_late: Option<u64>,
    /// With --ring: write a file when tasks are stalled for longer than this, e.g. 'cpu.some>20%/2s', or 'memory.full>100ms/1s in /web.slice' for a cgroup
    #[arg(long, value_name = "PRESSURE", requires = "ring")]
    on_pressure: Vec<PressureThreshold>,
    /// With --ring: keep writing to the file for this long afterwards
    #[arg(long, value_name = "DURATION", value_parser = duration_ns, default_value = "1m", requires = "ring")]
    after: u64,
    /// With --ring: write at most this many files per hour
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000), requires = "ring")]
    files_per_hour: u32,
}

pub fn every(text: &str) -> Result<u64, String> {
    let ns = duration_ns(text)?;
    if (100_000_000..=3_600_000_000_000).contains(&ns) {
        Ok(ns)
    } else {
        Err("give an interval from 100ms to 1h".to_owned())
    }
}

fn max_size(text: &str) -> Result<u64, String> {
    let size = bytes(text)?;
    if size >= 1 << 20 { Ok(size) } else { Err("give at least 1M".to_owned()) }
}

/// Returns whether the file name has the extension of recordings.
pub fn is_recording(path: &Path) -> bool {
    Extension::from_path(path) == Some(Extension::Recording)
}

/// Creates the file that a command records to while it prints.
///
/// # Errors
/// Fails if the file cannot be created, or has another extension.
pub fn file(path: &Path) -> anyhow::Result<Box<dyn Store>> {
    chosen(path, &[(Extension::Recording, ())])?;
    let name = printable(&path.to_string_lossy());
    let store = FileStore::create(path, 0).with_context(|| format!("cannot write {name}"))?;
    Ok(Box::new(store))
}

/// Refuses to record a replay.
///
/// # Errors
/// Fails if a file to record to is given.
pub fn refuse(record_to: Option<&Path>) -> anyhow::Result<()> {
    match record_to {
        None => Ok(()),
        Some(_) => Err(UsageError(anyhow!("a replay cannot be recorded again: omit -o")).into()),
    }
}

impl Kept {
    /// Returns whether there is a flight recorder, which writes a file on request.
    pub fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// Returns whether an option needs a recording.
    pub fn needs_recording(&self) -> bool {
        self.keep.is_some() || self.max_size.is_some() || self.ring.is_some()
    }

    /// Checks the name of what is recorded to; `option` is the one that takes it.
    ///
    /// # Errors
    /// Fails if an option needs a directory, or the name of a file has another extension.
    pub fn check(&self, output: Option<&Path>, option: &str) -> anyhow::Result<()> {
        if self.directory(output).is_some() {
            return Ok(());
        }
        if self.needs_recording() {
            let what = format!(
                "--keep, --max-size and --ring need a directory: give one with {option}, e.g. {option} recordings/"
            );
            return Err(UsageError(anyhow!(what)).into());
        }
        match output.filter(|path| !is_recording(path)) {
            Some(path) => {
                let name = printable(&path.to_string_lossy());
                let what = format!("cannot write {name}: its name must end in .{EXTENSION}, or in / for a directory");
                Err(UsageError(anyhow!(what)).into())
            }
            None => Ok(()),
        }
    }

    /// Returns the directory to record to; `None` if it is a file.
    fn directory(&self, output: Option<&Path>) -> Option<PathBuf> {
        match output {
            Some(path) if path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/") => Some(path.to_owned()),
            None if self.ring.is_some() => Some(PathBuf::from(FLIGHTS)),
            _ => None,
        }
    }

    /// Opens the store to write to, which [`Kept::check`] has accepted, and returns it with its printable name.
    ///
    /// # Errors
    /// Fails if the file or directory cannot be written.
    pub fn store(&self, output: Option<&Path>, host: &str) -> anyhow::Result<(Box<dyn Store>, String)> {
        let retention = Retention { keep_ns: self.keep, most_bytes: self.max_size, min_free: self.min_free };
        let named = |path: &Path| printable(&path.to_string_lossy());
        if let Some(directory) = self.directory(output) {
            let name = named(&directory);
            let store =
                DirectoryStore::open(&directory, retention).with_context(|| format!("cannot record to {name}"))?;
            let Some(before_ns) = self.ring else { return Ok((Box::new(store), name)) };
            let (late_from_ns, files_an_hour) = (self.on_late, self.files_per_hour);
            let when = When { before_ns, after_ns: self.after, late_from_ns, files_an_hour };
            return Ok((Box::new(RingStore::new(when, store)), name));
        }
        let path = match output {
            Some(path) => path.to_owned(),
            None => default_name(host)?,
        };
        let name = named(&path);
        let store = FileStore::create(&path, self.min_free).with_context(|| format!("cannot write {name}"))?;
        Ok((Box::new(store), name))
    }

    /// Starts to watch for what asks for a file: SIGUSR1 and pressure.
    ///
    /// # Errors
    /// Fails if a signal handler cannot be installed, or the kernel refuses a threshold of pressure.
    pub fn triggers(&self) -> anyhow::Result<Triggers> {
        let is_asked = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGUSR1, Arc::clone(&is_asked)).context("cannot watch for SIGUSR1")?;
        let register = |threshold| PressureTrigger::register(threshold).map_err(|why| anyhow!("--on-pressure: {why}"));
        let pressure = self.on_pressure.iter().map(register).collect::<anyhow::Result<_>>()?;
        Ok(Triggers { is_asked, pressure })
    }
}

/// What asks for a file of the flight recorder.
#[derive(Debug)]
pub struct Triggers {
    /// Whether SIGUSR1 has come.
    is_asked: Arc<AtomicBool>,
    pressure: Vec<PressureTrigger>,
}

impl Triggers {
    /// Forgets the pressure until now, once everything is attached.
    pub fn begin(&mut self) {
        self.pressure.iter_mut().for_each(PressureTrigger::restart);
    }

    /// Returns the reasons for a file since the last call. Prints why a trigger can no longer fire.
    pub fn fired(&mut self) -> Vec<KeptLine> {
        let is_asked = self.is_asked.swap(false, Ordering::Relaxed);
        let mut fired: Vec<KeptLine> = is_asked.then(|| reason("signal", String::new())).into_iter().collect();
        self.pressure.retain_mut(|trigger| match trigger.exceeded() {
            Ok(pressure) => {
                fired.extend(pressure.map(|pressure| reason(PRESSURE, pressure)));
                true
            }
            Err(problem) => {
                say!("whylate: {problem}");
                false
            }
        });
        fired
    }
}

/// Returns the line of a recording for a reason that is seen now.
pub fn reason(kind: &str, detail: String) -> KeptLine {
    KeptLine { at_unix_ns: clock::unix_ns(), reason: kind.to_owned(), detail }
}

/// Returns a file name made of host and time. Only plain characters of the host's name are used.
pub fn default_name(host: &str) -> anyhow::Result<PathBuf> {
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let host: String = host.chars().filter(is_plain).take(64).collect();
    let stamp =
        Timestamp::from_nanosecond(clock::unix_ns().into()).context("the system clock is out of range (set it)")?;
    Ok(PathBuf::from(format!("{host}-{}.{EXTENSION}", stamp.strftime("%Y-%m-%dT%H%M%SZ"))))
}

/// Drops the capabilities that are not needed once everything is attached, until the result is dropped.
pub fn reduce_capabilities(writes_files: bool) -> Option<ReducedCapabilities> {
    let reduced = ReducedCapabilities::reduce(writes_files);
    reduced.inspect_err(|error| say!("whylate: cannot drop capabilities: {error:#}")).ok()
}

/// Records until a signal or the end of the duration.
///
/// # Errors
/// Fails if no source can attach, or the recording cannot be started.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    arguments.kept.check(arguments.output.as_deref(), "-o")?;
    let watch = Watch::of_signals().context("cannot watch for Ctrl-C")?;
    let mut triggers = arguments.kept.triggers()?;
    let machine = about::this_machine();
    let (store, name) = arguments.kept.store(arguments.output.as_deref(), &machine.host)?;
    let wish = Wish {
        only: arguments.sources.clone(),
        why_ns: arguments.why,
        surely_from_ns: arguments.kept.on_late,
        in_detail: true,
        is_sparing: false,
        cpus: arguments.own.asked(),
        explain_ppm: arguments.own.explain_ppm(),
    };
    let Some(sources) = Sources::attach(&watch, &wish, "record")? else { return Ok(()) };
    let pace = Pace {
        interval: Some(Duration::from_nanos(arguments.every)),
        duration: arguments.duration.map(Duration::from_nanos),
        poll: Some(NOW_AND_THEN),
        ..Pace::default()
    };
    let (mut live, header) = Live::begin(sources, &wish, watch, pace)?;
    let recorder = Recorder::start(store, Header { every_ns: Some(arguments.every), ..header })?;
    triggers.begin();
    let reduced = reduce_capabilities(true);
    notify_ready();
    let progress = Progress::new(format!("Recording to {name}"));
    let progress = if arguments.duration.is_some() { progress } else { progress.until_interrupted() };
    let of_s = arguments.duration.map_or_else(String::new, |ns| format!(" of {}", ns / 1_000_000_000));
    let mut recording = Recording { recorder, triggers, progress, started: Instant::now(), of_s, late: 0, lost: 0 };
    drive(&mut live, &mut recording)?;
    // Detaching restores settings.
    drop((reduced, live));
    let Recording { recorder, progress, .. } = recording;
    drop(progress);
    let files = recorder.finish()?;
    if files.is_empty() {
        say!("whylate: no file was written: nothing was late enough, and no SIGUSR1 came");
        return Ok(());
    }
    files.iter().for_each(|file| say_recorded(file));
    Ok(())
}

/// Records ticks, and shows how many.
struct Recording {
    recorder: Recorder,
    triggers: Triggers,
    progress: Progress,
    started: Instant,
    /// Duration in seconds, after `of`; empty if there is none.
    of_s: String,
    late: u64,
    lost: u64,
}

impl Sink for Recording {
    fn poll(&mut self) -> anyhow::Result<ControlFlow<()>> {
        self.triggers.fired().into_iter().for_each(|reason| self.recorder.request_file(reason));
        Ok(ControlFlow::Continue(()))
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        self.late += tick.late();
        self.lost += tick.lost();
        self.recorder.tick(tick.lines);
        for problem in tick.problems.into_iter().chain(self.recorder.take_problem()) {
            self.progress.clear();
            say!("whylate: {problem}");
        }
        let (seconds, megabytes) = (self.started.elapsed().as_secs(), self.recorder.bytes() as f64 / 1e6);
        let (of_s, late, lost) = (&self.of_s, self.late, self.lost);
        self.progress.show(&format!("{seconds}{of_s} s, {megabytes:.1} MB, {late} late events, {lost} lost"));
        Ok(ControlFlow::Continue(()))
    }
}
