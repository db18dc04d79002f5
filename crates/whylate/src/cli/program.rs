// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate -p PID`, `--comm`, `--cgroup`: the time budget of one program.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use jiff::tz::TimeZone;
use whylate_model::Cgroup;
use whylate_model::culprits::By;
use whylate_model::path::budget::{OutsideState, ProgramReport, budget};
use whylate_model::path::history::Name;
use whylate_model::path::watched::Watched;
use whylate_model::path::{Query, ThreadRecords};
use whylate_model::reclaim::ReclaimRecords;
use whylate_model::units::format_ns;
use whylate_sources::kernel::{cgroups, clock};
use whylate_sources::offcpu::cpu_samples::{CpuSampler, Sampled, SampledThreads};
use whylate_sources::paths::{Member, Program, Recorded, Recorder, Stopped, StoppedThreads, SwitchCounts, priority};
use whylate_sources::{AttachError, Threads};

use crate::cli::values::pid;
use crate::cli::{Origin, UsageError};
use crate::engine::live::wait;
use crate::engine::progress::Progress;
use crate::engine::watch::{Ended, Watch};
use crate::files;
use crate::json::write_line;
use crate::render::extension::report_written;
use crate::render::text::fit::terminal_columns;
use crate::render::text::overview::Screen;
use crate::render::text::program as text;
use crate::render::text::run::Form;

/// Poll interval of the recorder.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Which program to measure.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct Of {
    /// Show where this process spends its time, and what it waits for
    #[arg(short, long, value_parser = pid)]
    pid: Option<u32>,
    /// Show all processes of this name
    #[arg(long, value_name = "NAME")]
    comm: Option<String>,
    /// Show all processes in this cgroup or below; a path as in /proc/PID/cgroup
    #[arg(long, value_name = "PATH")]
    cgroup: Option<String>,
}

impl Of {
    /// Returns the program given on the command line, if any.
    ///
    /// # Errors
    /// Fails if the process does not exist, or for a recording.
    pub fn program(&self, origin: &Origin) -> anyhow::Result<Option<Program>> {
        if !origin.is_live() && (self.pid.is_some() || self.comm.is_some() || self.cgroup.is_some()) {
            return Err(UsageError(anyhow!("a recording cannot show one program this way (run `whylate top FILE -p PID`, or replay a command such as `offcpu -p PID`)")).into());
        }
        self.present()
    }

    /// Returns the program given on the command line, if any.
    ///
    /// # Errors
    /// Fails if the process does not exist, or for the root cgroup, which has every thread.
    pub fn present(&self) -> anyhow::Result<Option<Program>> {
        if self.cgroup.as_deref() == Some("/") {
            return Err(UsageError(anyhow!("every thread is in cgroup /: omit --cgroup")).into());
        }
        super::present(self.pid)?;
        Ok(self.recorded())
    }

    /// Returns the program given on the command line, if any, without checking that it exists: it may be in a
    /// recording.
    pub fn recorded(&self) -> Option<Program> {
        let by_name = || self.comm.clone().map(Program::Name);
        let by_cgroup = || self.cgroup.clone().map(Program::Cgroup);
        self.pid.map(Program::Process).or_else(by_name).or_else(by_cgroup)
    }
}

/// How the result is printed.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    pub is_json: bool,
    pub is_verbose: bool,
    /// How culprits are ranked; `None` to omit the ranking.
    pub rank_by: Option<By>,
    /// File for a flame graph, and its format.
    pub output: Option<(&'a Path, Form)>,
}

/// Measures for `duration_ns`, and prints one screen, or everything.
///
/// # Errors
/// Fails if nothing can be recorded, there is no such program, or the output cannot be written.
pub fn run(program: &Program, duration_ns: u64, shown: &Shown<'_>) -> anyhow::Result<()> {
    if let Some((path, _)) = shown.output {
        // Fails before anything is measured if the file cannot be created.
        files::try_to_create(path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    ensure_there(program, program.is_running().context("cannot read /proc")?).map_err(UsageError)?;
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let progress = Progress::new(format!("Looking at {}", name(program)));
    progress.show("attaching");
    // Loads its programs while the recorder does.
    let sampler = sampled(program).and_then(|threads| Ok(CpuSampler::begin(threads)?));
    let mut recorder = Recorder::start().context("cannot record what the CPUs do")?;
    let sampler = sampler.and_then(|sampler| Ok(sampler.wait()?));
    if let Some(limitation) = recorder.limitation().filter(|_| shown.is_verbose) {
        say!("whylate: {limitation}");
    }
    let mut threads = program.threads().context("cannot read /proc")?;
    recorder.wants(threads.keys().copied());
    let children = program.children();
    let throttled_before = throttled(&threads);
    let from_ns = clock::monotonic_ns();
    recorder.span_begins(from_ns);
    let began = Instant::now();
    let end = began.checked_add(Duration::from_nanos(duration_ns));
    let mut seconds = None;
    let ended = wait(&watch, end, POLL_INTERVAL, &mut || {
        recorder.take_in();
        let now = began.elapsed().as_secs();
        if seconds.replace(now) != Some(now) {
            progress.show(&format!("{now} of {} s", duration_ns / 1_000_000_000));
        }
        Ok(false)
    })?;
    if ended == Ended::OutputClosed {
        return Ok(());
    }
    recorder.span_ends();
    let switches = SwitchCounts::read(threads.iter().map(|(&tid, member)| (member.process, tid)));
    let to_ns = clock::monotonic_ns();
    let mut throttled = throttled(&threads);
    throttled.retain(|path, ns| {
        *ns = ns.saturating_sub(throttled_before.get(path).copied().unwrap_or(0));
        *ns > 0
    });
    for (tid, member) in program.threads_but(&threads).context("cannot read /proc")? {
        threads.insert(tid, Member { waits_in: None, is_outside_calls: false, ..member });
    }
    recorder.take_in();
    let mut stopped = StoppedThreads::default();
    let mut known = |tid, member: &Member| {
        outside_state(member, stopped.why_stopped(member.process, tid, recorder.shows_stop(tid)))
    };
    let known: BTreeMap<u32, OutsideState> = threads.iter().map(|(&tid, member)| (tid, known(tid, member))).collect();
    ensure_there(program, !threads.is_empty())?;
    let unfinished = switches.unfinished_waits();
    let Recorded { past, births, deaths, mut lost, mut names, reclaim } = recorder.finish(to_ns);
    let samples = sampler.and_then(|sampler| sampler.finish(names.symbols(), &mut lost));
    let (records, limitations) = thread_records(reclaim, samples);
    let limitation = (!limitations.is_empty()).then(|| limitations.join("; "));
    let deaths: BTreeMap<u32, u64> = deaths.into_iter().collect();
    let asked: Vec<Query> = threads
        .iter()
        .flat_map(|(&tid, member)| {
            let asked = |from_ns, to_ns| Query { tid, from_ns, to_ns, is_wait: false, is_command: false };
            // TIDs are reused: a death before the birth is that of an earlier thread.
            let born_ns = births.last_of(tid).unwrap_or(from_ns).max(from_ns);
            let dead_ns = deaths.get(&tid).copied();
            let to_ns = dead_ns.filter(|&dead_ns| dead_ns > born_ns).unwrap_or(to_ns).min(to_ns);
            // The former main thread, if another thread of the process called execve(2) and took over its TID.
            let is_taken_over = member.process == tid && births.taken_over_ns(tid).is_some();
            let former = dead_ns.filter(|&dead_ns| is_taken_over && (from_ns..=born_ns).contains(&dead_ns));
            [asked(born_ns, to_ns)].into_iter().chain(former.map(|dead_ns| asked(from_ns, dead_ns)))
        })
        .collect();
    let mut interrupted = None;
    let mut goes_on = || {
        interrupted = watch.until(Some(Instant::now())).ok().filter(|ended| *ended != Ended::Time);
        interrupted.is_none()
    };
    let mut back = progress.back(from_ns, to_ns, &mut goes_on);
    let mut reached_ns = to_ns;
    let mut goes_on = |at_ns| {
        reached_ns = at_ns;
        back(at_ns)
    };
    let mut past = Watched::new(past, &mut goes_on);
    let budget = budget(&mut past, &asked, &known, &(), &mut names, &records);
    if let Some(error) = past.past.past.take_error() {
        return Err(error).context("cannot read what was kept in a temporary file");
    }
    drop(back);
    progress.clear();
    match interrupted {
        Some(Ended::OutputClosed) => return Ok(()),
        Some(_) => {
            say!("whylate: interrupted: only the last {} are explained", format_ns(to_ns.saturating_sub(reached_ns)))
        }
        None => {}
    }
    lost.insert("waits_not_followed".to_owned(), budget.not_followed);
    lost.retain(|_, count| *count > 0);
    let processes: BTreeSet<u32> = threads.values().map(|member| member.process).collect();
    let seen = ProgramReport {
        name: name_of(program, &threads),
        processes: processes.len() as u64,
        children,
        span_ns: to_ns - from_ns,
        budget,
        unfinished,
        throttled,
        lost,
        limitation,
    };
    let mut out = io::BufWriter::new(io::stdout().lock());
    if shown.is_json {
        write_line(&mut out, &seen)?;
    } else {
        let mut cgroup_of = |tid| cgroups::path_of_thread(tid).as_deref().map(Cgroup::new);
        let ranking = shown.rank_by.map(|by| seen.budget.culprits(by, &mut cgroup_of));
        let is_verbose = shown.is_verbose;
        let screen = Screen { columns: terminal_columns(), is_verbose, zone: TimeZone::system(), replay: None };
        text::write(&mut out, &seen, ranking.as_ref(), &screen, &mut priority)?;
    }
    out.flush()?;
    if let Some((path, form)) = shown.output {
        let cannot = || format!("cannot write {}", path.display());
        files::write(path, |out| text::write_file(out, form, &seen)).with_context(cannot)?;
        if !shown.is_json {
            report_written(path);
        }
    }
    Ok(())
}

/// Selects the program's threads for sampling.
fn sampled(program: &Program) -> anyhow::Result<SampledThreads> {
    Ok(SampledThreads::Of(match program {
        Program::Process(process) => Threads::of_process(*process),
        Program::Name(name) => Threads { process_name: Some(name.clone()), ..Threads::default() },
        Program::Cgroup(path) => Threads { cgroup: Some(cgroups::id_of(path)?), ..Threads::default() },
    }))
}

/// Returns what is known of the threads beside the timeline, or what is not known, and why.
pub fn thread_records(
    reclaim: Result<ReclaimRecords, AttachError>,
    sampled: anyhow::Result<Sampled>,
) -> (ThreadRecords, Vec<String>) {
    let reclaim = reclaim.map_err(|error| format!("memory stalls are not known: {:#}", anyhow::Error::from(error)));
    let sampled = sampled.map_err(|error| format!("functions are not known: {error:#}"));
    let left_out = sampled.as_ref().ok().and_then(|sampled| sampled.left_out.as_ref());
    let left_out = left_out.map(|left_out| format!("functions are not known where no samples were taken ({left_out})"));
    let limitations = [reclaim.as_ref().err().cloned(), sampled.as_ref().err().cloned(), left_out];
    let records = ThreadRecords { reclaim: reclaim.unwrap_or_default(), samples: sampled.unwrap_or_default().samples };
    (records, limitations.into_iter().flatten().collect())
}

/// Returns an error if the program has no thread.
fn ensure_there(program: &Program, is_there: bool) -> anyhow::Result<()> {
    let name = name(program);
    anyhow::ensure!(is_there, "no thread of {name} was found (see names and cgroups with ps -eo pid,comm,cgroup)");
    Ok(())
}

/// Returns what is known of a thread at the end of the measurement.
fn outside_state(member: &Member, stopped: Option<Stopped>) -> OutsideState {
    OutsideState {
        name: Name::new(&member.thread_name),
        waits_in: member.waits_in.clone(),
        is_outside_calls: member.is_outside_calls,
        is_kernel: member.is_kernel,
        stop: stopped.map(|stopped| stopped.stop),
        tracer: stopped.and_then(|stopped| stopped.tracer),
    }
}

/// Returns the total throttled time of the threads' cgroups so far, in nanoseconds.
fn throttled(threads: &BTreeMap<u32, Member>) -> BTreeMap<String, u64> {
    let processes: BTreeSet<u32> = threads.values().map(|member| member.process).collect();
    processes.into_iter().flat_map(cgroups::throttled_ns).collect()
}

fn name(program: &Program) -> String {
    match program {
        Program::Process(pid) => format!("process {pid}"),
        Program::Name(name) => name.clone(),
        Program::Cgroup(path) => format!("cgroup {path}"),
    }
}

/// Renders the program; a process by its name and PID.
fn name_of(program: &Program, threads: &BTreeMap<u32, Member>) -> String {
    match (program, threads.values().next()) {
        (Program::Process(pid), Some(member)) => format!("{}:{pid}", member.name),
        _ => name(program),
    }
}
