// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate offcpu`: where threads wait off CPU.

mod diff;

use std::fs::File;
use std::io::{Read as _, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use whylate_model::folded::Root;
use whylate_model::late::CGROUP;
use whylate_model::sources::OFFCPU;
use whylate_model::units::printable;
use whylate_model::wait::Classes;
use whylate_model::{Card, Labels, LateEvent, Merger, Snapshot, Stack};
use whylate_sources::Threads;
use whylate_sources::kernel::cgroups;
use whylate_sources::offcpu::{CallGraph, Choice, KernelThreads, OffcpuOptions, Often, RATES_HZ, TRACE};

use crate::cli::arguments::{Explain, Rank, Verbosity};
use crate::cli::import::stacks;
use crate::cli::runner::announce;
use crate::cli::values::{duration_ns, seconds_ns};
use crate::cli::{FAILURE, Origin, SUCCESS, UsageError, existing, present, record};
use crate::engine::feed::Feed;
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::replay::Replay;
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::Watch;
use crate::files;
use crate::render::extension::{Extension, chosen};
use crate::render::json::JsonLines;
use crate::render::text::fit::{Fit, terminal_columns};
use crate::render::text::offcpu::chains::Chains;
use crate::render::text::offcpu::file::{self, Form};
use crate::render::text::offcpu::{blocked, flat, threads, tree, value};
use crate::render::text::waits::Waits;
use crate::render::text::{Output, footer};
use crate::store::late_buffer::{Keep, LateBuffer};
use crate::store::play::Recording;
use crate::store::{Recorder, about};

/// Where threads wait while they are off their CPUs, and for what
#[derive(Debug, Args)]
#[command(
    subcommand_negates_reqs = true,
    mut_arg("why", |why| why.conflicts_with("blocked").help(LONG_WAITS)),
    mut_arg("worst", |worst| worst.conflicts_with_all(["blocked", "diff"]).help(WORST_WAITS)),
    mut_arg("fail_if_late", |fail| fail.conflicts_with_all(["blocked", "diff"])),
    after_help = "\
examples:
    # a tree of where threads wait, widest first
    whylate offcpu 10
    # as a flame graph
    whylate offcpu -d 10s -o sleep.svg
    # a row for each call site at which process 1234 waits
    whylate offcpu -d 10s -p 1234 --flat
    # threads that have waited for 10 s or longer by now
    whylate offcpu --blocked 10s
    # what keeps processes in uninterruptible sleep
    whylate offcpu --state D --kernel-threads no -d 1m
    # what each wait of 5 ms or longer was for, too
    whylate offcpu --why 5ms -d 10s
    # and who each was waiting for, in turn, as a flame graph
    whylate offcpu --why 5ms -d 10s -o chain.svg
    # the 5 longest waits of a minute, explained
    whylate offcpu --worst 5 -d 1m
    # the stack of who ended each wait, by tracing every switch
    whylate offcpu --wakers -d 10s -o woken.svg
    # with rules of your own, such as: lock my_mutex_lock
    whylate offcpu --flat --classes waits.txt -d 10s
    # what waits more, and what less, than before
    whylate offcpu --diff before.folded after.folded -o diff.svg
    # stacks that another tool has written
    whylate import procstat.txt -o sleep.svg"
)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Sub>,
    /// End after this time; a bare number is in seconds
    #[arg(value_name = "DURATION", value_parser = seconds_ns, conflicts_with_all = ["duration", "blocked", "diff"])]
    length: Option<u64>,
    /// Samples per second, 1 to 999; the interval is jittered, so it never runs in lockstep with a periodic sleeper
    #[arg(short = 'F', long = "frequency", value_name = "HZ", default_value_t = whylate_sources::offcpu::DEFAULT_HZ,
          value_parser = clap::value_parser!(u32).range(1..=999))]
    frequency: u32,
    /// End after this time (e.g. 10s, 5m, 1h)
    #[arg(short, long, value_parser = duration_ns)]
    duration: Option<u64>,
    /// Write to a file; its extension sets the format: .svg, .folded, .pb.gz, .speedscope.json, .json, or .whylate for a
    /// recording
    ///
    /// With --why, .svg and .folded have the chains of the explained waits: where each thread waited, which thread
    /// ended that wait, where that thread waited in turn, and so on to what took the time; widths are parts of the
    /// first thread's wait. .json has the longest waits. Explained waits do not fit into .pb.gz and .speedscope.json.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Only the threads of this process
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// Only processes of this name, with all their threads
    #[arg(long, value_name = "NAME")]
    comm: Option<String>,
    /// Only threads of this name
    #[arg(long, value_name = "NAME")]
    thread: Option<String>,
    /// Only threads in this cgroup, or below
    #[arg(long, value_name = "PATH")]
    cgroup: Option<String>,
    /// Only while in one of these states, in the letters of ps(1): R, S, D, I, T, t, P; F for frozen
    #[arg(long, value_name = "LETTERS", value_parser = states)]
    state: Option<String>,
    /// The kernel's own threads
    #[arg(long, value_enum, default_value_t = Kernel::Yes)]
    kernel_threads: Kernel,
    /// Kernel frames only
    #[arg(long)]
    no_user: bool,
    /// Keep only this many innermost frames of each stack
    #[arg(long, value_name = "FRAMES", default_value_t = 127, value_parser = clap::value_parser!(u32).range(1..=127))]
    max_depth: u32,
    /// How to unwind user stacks
    #[arg(long, value_enum, default_value_t = Callers::Rules, conflicts_with = "no_user")]
    call_graph: Callers,
    /// Show file and line of each user frame, and functions inlined there, where debug information is available; slower
    #[arg(long, conflicts_with = "no_user")]
    lines: bool,
    /// Show who ended each wait: append the waker's stack to the waiter's; traces every context switch (backend trace)
    #[arg(long, conflicts_with_all = ["blocked", "diff", "budget"])]
    wakers: bool,
    /// What stacks are grouped by
    #[arg(long, value_enum, default_value_t = By::Process)]
    by: By,
    /// Print a row per call site, with the rule that classified the wait
    #[arg(long, conflicts_with = "output")]
    flat: bool,
    /// Read your own rules for classifying waits: on each line a class and a function, such as `lock my_mutex_lock`
    ///
    /// Classes are idle, disk, network, lock, pipe, page_fault, timer and other. `*` in a function's name matches any
    /// characters, and lines that begin with # are comments. The innermost frame that matches a rule decides, before
    /// any built-in rule.
    #[arg(long, value_name = "FILE", conflicts_with = "diff")]
    classes: Option<PathBuf>,
    /// Leave out threads that are idle by design
    #[arg(long)]
    hide_idle: bool,
    /// With --why: also explain waits that are idle by design, such as sleeps and event loops, and waits that a timer
    /// ended
    #[arg(long, requires = "why")]
    idle: bool,
    /// Print the threads that have been waiting for at least this long (e.g. 10s), and who holds what they wait for
    /// where the kernel knows, then exit
    #[arg(long, value_name = "DURATION", value_parser = duration_ns, conflicts_with_all = ["output", "duration"])]
    blocked: Option<u64>,
    /// Compare two profiles (folded or JSON): what waits more, and what less
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"], conflicts_with_all = ["blocked", "json", "flat", "why"])]
    diff: Option<Vec<PathBuf>>,
    #[command(flatten)]
    explain: Explain,
    #[command(flatten)]
    rank: Rank,
    /// One JSON object
    #[arg(long, conflicts_with = "flat")]
    json: bool,
    #[command(flatten)]
    verbosity: Verbosity,
    /// How to measure: sample (the default), trace (every context switch), proc (without BPF), or auto (the cheaper of
    /// sample and trace; says why)
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Share of one CPU that sampling may use (e.g. 1%); sets the rate, in place of -F
    #[arg(long, value_name = "SHARE", value_parser = budget_ppm, conflicts_with = "frequency")]
    budget: Option<u32>,
}

/// Help text of `--why`.
const LONG_WAITS: &str = "Explain every wait of THRESHOLD or more (e.g. 5ms): what ran on the CPU, or which thread ended the wait and what it did until then";
/// Help text of `--worst`.
const WORST_WAITS: &str =
    "Print and draw only the N longest waits; without --why, of those of 20ms or longer [default: print 10, draw all]";
/// Default number of longest waits that are shown.
const WORST: usize = 10;

/// Parses a percentage into millionths.
fn budget_ppm(text: &str) -> Result<u32, String> {
    let percent: f64 = text.trim_end_matches('%').trim().parse().map_err(|_| "name a percentage, such as 1%")?;
    if !(0.001..=100.0).contains(&percent) {
        return Err("name a percentage from 0.001 to 100".to_owned());
    }
    Ok((percent * 10_000.0) as u32)
}

/// Parses state letters of ps(1).
fn states(text: &str) -> Result<String, String> {
    match text.chars().find(|letter| !"RSDITtPF,".contains(*letter)) {
        None if text.is_empty() => Err("name at least one state".to_owned()),
        None => Ok(text.to_owned()),
        Some(letter) => Err(format!("{letter:?} is no state of a thread (choose from R, S, D, I, T, t, P, F)")),
    }
}

#[derive(Debug, Subcommand)]
enum Sub {
    /// Former name of `whylate import`
    #[command(hide = true)]
    Import(stacks::Arguments),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kernel {
    Yes,
    No,
    Only,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Callers {
    /// By unwind information (.eh_frame), which programs without frame pointers have, too
    #[value(alias = "dwarf")]
    Rules,
    /// By frame pointers, except for the innermost function, which often keeps none
    Fp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    Process,
    Thread,
    Cgroup,
}

impl Arguments {
    fn root(&self) -> Root {
        match self.by {
            By::Process => Root::Process,
            By::Thread => Root::Thread,
            By::Cgroup => Root::Cgroup,
        }
    }

    fn keep(&self) -> Keep {
        Keep::TopN(self.explain.worst.map_or(WORST, usize::from))
    }

    /// Returns whether the labels of a recorded thread match the filters of the command line.
    fn is_of(&self, labels: &Labels) -> bool {
        let is = |name: &str, wanted: &Option<String>| {
            wanted.as_ref().is_none_or(|wanted| labels.get(name).is_some_and(|label| label == wanted))
        };
        let is_below = |cgroup: &String| {
            let wanted = self.cgroup.as_deref().unwrap_or_default();
            cgroup
                .strip_prefix(wanted.trim_end_matches('/'))
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        is("pid", &self.pid.map(|pid| pid.to_string()))
            && is("process", &self.comm)
            && is("thread", &self.thread)
            && (self.cgroup.is_none() || labels.get(CGROUP).is_some_and(is_below))
    }

    /// Returns whether only some threads are asked for.
    fn selects_threads(&self) -> bool {
        self.pid.is_some() || [&self.comm, &self.thread, &self.cgroup].into_iter().any(Option::is_some)
    }

    fn is_in_state(&self, stack: &Stack) -> bool {
        self.state.as_ref().is_none_or(|letters| letters.contains(stack.state.as_str()))
    }

    fn explain(&self) -> Explain {
        self.explain.with_limit_of(&OFFCPU)
    }

    fn duration(&self) -> Option<u64> {
        self.duration.or(self.length)
    }

    fn options(&self) -> anyhow::Result<OffcpuOptions> {
        let cgroup = match &self.cgroup {
            Some(path) => Some(existing(cgroups::id_of(path)).with_context(|| {
                format!(
                    "cannot find the cgroup {} (name a directory of cgroup v2, or of the controller cpu of v1)",
                    printable(path)
                )
            })?),
            None => None,
        };
        Ok(OffcpuOptions {
            backend: self.backend.clone(),
            rate_hz: self.frequency,
            budget_ppm: self.budget,
            threads: Threads {
                process: present(self.pid)?,
                name: self.thread.clone(),
                process_name: self.comm.clone(),
                cgroup,
            },
            states: self.state.clone().unwrap_or_default(),
            kernel_threads: match self.kernel_threads {
                Kernel::Yes => KernelThreads::Yes,
                Kernel::No => KernelThreads::No,
                Kernel::Only => KernelThreads::Only,
            },
            user_stacks: !self.no_user,
            call_graph: match self.call_graph {
                Callers::Rules => CallGraph::Rules,
                Callers::Fp => CallGraph::FramePointers,
            },
            lines: self.lines,
            wakers: self.wakers,
            by_thread: self.by == By::Thread || self.blocked.is_some(),
            holders: self.blocked.is_some(),
            objects_over_ns: self.blocked,
            max_depth: self.max_depth,
            classes: self.classes.as_deref().map_or_else(|| Ok(Classes::default()), read_classes)?,
            explain_over_ns: self.explain().why,
            explain_sleeps_over_ns: self.explain().why,
            idle: self.idle,
            ..OffcpuOptions::default()
        })
    }
}

/// Maximum size of a file of rules, which has a few lines.
const MAX_CLASSES_BYTES: u64 = 1 << 20;

fn read_classes(path: &Path) -> anyhow::Result<Classes> {
    let name = printable(&path.to_string_lossy());
    let mut bytes = Vec::new();
    let cannot = || format!("cannot read {name}");
    let file = existing(File::open(path)).with_context(cannot)?;
    file.take(MAX_CLASSES_BYTES + 1).read_to_end(&mut bytes).with_context(cannot)?;
    if bytes.len() as u64 > MAX_CLASSES_BYTES {
        return Err(
            UsageError(anyhow::anyhow!("{name} is too large for a file of rules: name one of at most 1 MiB")).into()
        );
    }
    let text = String::from_utf8_lossy(&bytes);
    let classes = Classes::parse(&text).map_err(|error| UsageError(anyhow::anyhow!("{name}, {error}")))?;
    Ok(classes)
}

fn what_is_done(arguments: &Arguments, backend: &str) -> String {
    match arguments.budget {
        _ if backend == TRACE => "Tracing every switch of threads".to_owned(),
        Some(ppm) => format!(
            "Sampling where threads wait, as often as {} % of a CPU allows, and at least once a second",
            f64::from(ppm) / 1e4
        ),
        None => format!("Sampling where threads wait, {} times a second", arguments.frequency),
    }
}

/// Prints a note if even the lowest sampling rate exceeded the budget, as there are too many threads.
fn warn_if_over_budget(snapshot: &Snapshot, ppm: u32) {
    let walk_ns = value(snapshot, "walk_cpu_ns");
    let lowest = walk_ns * f64::from(*RATES_HZ.start());
    if lowest > f64::from(ppm) * 1e3 {
        say!(
            "whylate: looking at {} threads once a second took {:.3} % of a CPU, which is more than {} %",
            value(snapshot, "threads"),
            lowest / 1e7,
            f64::from(ppm) / 1e4
        );
    }
}

/// Sums of late events for the output.
struct Gathering {
    waits: Option<Waits>,
    chains: Option<Chains>,
    only_worst: bool,
    /// Whether anything was late so far.
    is_late: bool,
}

impl Gathering {
    fn new(arguments: &Arguments, draws_chains: bool) -> Self {
        let over_ns = arguments.explain().why;
        Gathering {
            waits: over_ns.map(|over_ns| Waits::new(over_ns, arguments.rank.into())),
            chains: over_ns.filter(|_| draws_chains).map(|over_ns| Chains::new(over_ns, arguments.root())),
            only_worst: arguments.explain.worst.is_some(),
            is_late: false,
        }
    }

    fn add(&mut self, event: &LateEvent) {
        if let Some(waits) = &mut self.waits {
            waits.add(event);
        }
        if let Some(chains) = &mut self.chains {
            chains.count(event);
            // The worst waits are known at the end.
            if !self.only_worst {
                chains.add(event);
            }
        }
    }
}

/// Samples until interrupted or the duration is over, or reads a recording; prints or writes the result. Returns the exit
/// status.
///
/// # Errors
/// Fails if the source cannot attach, the recording cannot be read, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    if let Some(Sub::Import(arguments)) = &arguments.command {
        return stacks::run(arguments).map(|()| SUCCESS);
    }
    if let Some([before, after]) = arguments.diff.as_deref() {
        return diff::run(before, after, arguments.output.as_deref()).map(|()| SUCCESS);
    }
    let explain = arguments.explain();
    arguments.rank.needs(explain.thresholds(None))?;
    let record_to = arguments.output.as_deref().filter(|path| record::is_recording(path));
    let forms = if explain.why.is_some() { &file::EXPLAINED[..] } else { &file::FORMS };
    let forms: Vec<(Extension, Option<Form>)> = forms.iter().map(|&(of, form)| (of, Some(form))).collect();
    let forms = [&forms[..], &[(Extension::Recording, None)]].concat();
    let form = match arguments.output.as_deref() {
        Some(path) => chosen(path, &forms)?.map(|form| (path, form)),
        None => None,
    };
    let draws_chains = explain.why.is_some() && matches!(form, Some((_, Form::Svg | Form::Folded)));
    if draws_chains && (arguments.wakers || arguments.lines) {
        let what = "--wakers and --lines have no effect on chains of explained waits: drop them, or drop --why";
        return Err(UsageError(anyhow::anyhow!(what)).into());
    }
    let mut gathering = Gathering::new(arguments, draws_chains);
    let snapshot = match origin {
        Origin::Recording(recording) => {
            record::refuse(record_to)?;
            Some(recorded(arguments, recording, &mut gathering)?)
        }
        Origin::Live => live(arguments, &mut gathering, record_to, form.is_some())?,
    };
    let Some(snapshot) = snapshot else { return Ok(SUCCESS) };
    let is_late = gathering.is_late || arguments.explain.judges_late_snapshot(&OFFCPU, &snapshot);
    let has_none = snapshot.stacks.is_empty() && snapshot.late.is_empty();
    show(arguments, snapshot, gathering, form)?;
    if has_none && arguments.blocked.is_none() {
        say!("whylate: no such thread was off CPU (see names and cgroups with ps -eo pid,comm,cgroup)");
        return Ok(FAILURE);
    }
    Ok(arguments.explain.status(is_late))
}

/// Measures this machine. Returns `None` if the output is closed and no file is written.
fn live(
    arguments: &Arguments,
    gathering: &mut Gathering,
    record_to: Option<&Path>,
    has_file: bool,
) -> anyhow::Result<Option<Snapshot>> {
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let mut options = arguments.options()?;
    if arguments.wakers {
        if matches!(options.backend.as_deref(), None | Some("auto")) {
            say!("whylate: offcpu uses the {TRACE} backend, as only a wakeup shows who woke a thread");
        }
    } else if options.backend.as_deref() == Some("auto") {
        let often = options.budget_ppm.map_or(Often::RateHz(options.rate_hz), Often::BudgetPpm);
        let choice = Choice::look(often).context("cannot find out which backend is cheaper")?;
        say!("whylate: offcpu uses {choice}");
        options.backend = (choice.backend() == TRACE).then(|| TRACE.to_owned());
    }
    let store = record_to.map(record::file).transpose()?;
    let feed = Feed::attach(&options)?;
    let backend = feed.source.backend;
    let header = about::of_one(OFFCPU.name, backend, arguments.explain().why);
    let recorder = store.map(|store| Recorder::start(store, header)).transpose()?;
    if arguments.blocked.is_none() && !arguments.json {
        announce(&what_is_done(arguments, backend), arguments.duration().is_some());
    }
    // Which threads are blocked now takes no time to measure.
    let duration_ns = arguments.blocked.map_or(arguments.duration(), |_| Some(0));
    let pace = Pace {
        duration: duration_ns.map(Duration::from_nanos),
        poll: arguments.explain().why.map(|_| NOW_AND_THEN),
        outlives_output: has_file || recorder.is_some() || arguments.blocked.is_some(),
        ..Pace::default()
    };
    let mut live = Live::of_one(feed, watch, pace);
    live.record(recorder);
    let mut sums = Sums { is_live: true, ..Sums::new(arguments, gathering) };
    drive(&mut live, &mut sums)?;
    live.finish()?;
    let snapshot = sums.finish();
    if let (Some(snapshot), Some(ppm)) = (&snapshot, arguments.budget.filter(|_| backend != TRACE)) {
        warn_if_over_budget(snapshot, ppm);
    }
    Ok(snapshot)
}

/// Merges the snapshots of a recording.
fn recorded(arguments: &Arguments, recording: &Recording, gathering: &mut Gathering) -> anyhow::Result<Snapshot> {
    let played = recording.play()?;
    if played.late_from_ns(OFFCPU.name)?.is_none() && arguments.explain().why.is_some() {
        say!("whylate: {} was recorded without late events of {}", played.name(), OFFCPU.name);
    }
    let mut replay = Replay::of_source(played, &OFFCPU, None, arguments.duration());
    let mut sums = Sums::new(arguments, gathering);
    drive(&mut replay, &mut sums)?;
    replay.finish()?;
    sums.finish().context("nothing was measured")
}

/// Snapshots so far, merged into one.
struct Sums<'a> {
    arguments: &'a Arguments,
    gathering: &'a mut Gathering,
    merger: Merger,
    kept: LateBuffer,
    /// Whether the source has filtered by its options what comes.
    is_live: bool,
}

impl<'a> Sums<'a> {
    fn new(arguments: &'a Arguments, gathering: &'a mut Gathering) -> Self {
        let kept = LateBuffer::new(arguments.keep());
        Sums { arguments, gathering, merger: Merger::default(), kept, is_live: false }
    }

    /// Returns the merged snapshot with the late events that are kept. `None` if there was no snapshot.
    fn finish(mut self) -> Option<Snapshot> {
        let mut snapshot = self.merger.take()?;
        self.kept.move_into(&mut snapshot);
        Some(snapshot)
    }
}

impl Sink for Sums<'_> {
    fn late(&mut self, _card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        let is_asked = self.arguments.explain().why.is_some_and(|over_ns| event.latency_ns >= over_ns);
        if self.is_live || is_asked && self.arguments.is_of(&event.labels) {
            self.gathering.is_late |= self.arguments.explain.judges_late(&OFFCPU, &event);
            self.gathering.add(&event);
            self.kept.add(event);
        }
        Ok(None)
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        tick.report_problems();
        let Sums { arguments, is_live, .. } = *self;
        for mut snapshot in tick.into_snapshots() {
            let is_asked = |stack: &Stack| arguments.is_of(&stack.labels) && arguments.is_in_state(stack);
            snapshot.stacks.retain(|stack| is_live || is_asked(stack));
            self.merger.add(snapshot);
        }
        Ok(ControlFlow::Continue(()))
    }
}

fn show(
    arguments: &Arguments,
    mut snapshot: Snapshot,
    gathering: Gathering,
    form: Option<(&Path, Form)>,
) -> anyhow::Result<()> {
    let Gathering { mut waits, mut chains, .. } = gathering;
    if let Some((path, form)) = form {
        let cannot = || format!("cannot write {}", path.display());
        let written = files::write(path, |out| match &mut chains {
            Some(chains) => {
                if arguments.explain.worst.is_some() {
                    snapshot.late.iter().for_each(|event| chains.add(event));
                }
                chains.write(out, form, &snapshot)
            }
            None => file::write(out, form, &snapshot, arguments.root(), arguments.hide_idle),
        });
        if let Some(waits) = waits.as_mut().filter(|_| !arguments.json) {
            let mut out = Fit::stdout(true);
            waits.write(&mut out, &snapshot)?;
            footer::write(&mut out, &snapshot, arguments.verbosity.verbose)?;
            out.flush()?;
        } else if let Some(gaps) = chains.as_ref().and_then(|chains| chains.gaps(&snapshot)) {
            say!("whylate: {gaps}");
        }
        return written.with_context(cannot);
    }
    let mut out = Fit::stdout(!arguments.json);
    if arguments.json {
        if let Some(least_ns) = arguments.blocked {
            snapshot.stacks.retain(|stack| threads::is_blocked(stack, least_ns));
        }
        JsonLines.snapshot(&mut out, snapshot)?;
    } else {
        let columns = terminal_columns();
        match arguments.blocked {
            Some(least_ns) => {
                let choice = blocked::Shown {
                    hide_idle: arguments.hide_idle,
                    least_ns,
                    is_selected: arguments.selects_threads(),
                    is_verbose: arguments.verbosity.verbose,
                };
                blocked::write(&mut out, &snapshot, &choice, columns)?
            }
            None if arguments.flat => flat::table(&snapshot, arguments.hide_idle, None).write(&mut out, columns)?,
            None => tree::write(&mut out, &snapshot, arguments.root(), arguments.hide_idle, columns)?,
        }
        if let Some(waits) = &mut waits {
            waits.write(&mut out, &snapshot)?;
        }
        footer::write(&mut out, &snapshot, arguments.verbosity.verbose)?;
    }
    out.flush()?;
    Ok(())
}
