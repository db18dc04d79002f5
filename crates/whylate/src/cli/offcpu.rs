// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate offcpu`: where threads wait off CPU.

mod diff;
mod run;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use whylate_model::folded::Root;
use whylate_model::late::CGROUP;
use whylate_model::sources::OFFCPU;
use whylate_model::units::printable;
use whylate_model::wait::Classes;
use whylate_model::{Labels, Stack};
use whylate_sources::Threads;
use whylate_sources::kernel::cgroups;
use whylate_sources::offcpu::{CallGraph, KernelThreads, OffcpuOptions};

use crate::cli::arguments::{Explain, Rank, Verbosity};
use crate::cli::import::stacks;
use crate::cli::values::{duration_ns, pid, seconds_ns, share_ppm};
use crate::cli::{UsageError, existing, present};
use crate::store::late_buffer::Keep;

pub use run::run;

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
    # also what each wait of 5 ms or longer was for
    whylate offcpu --why 5ms -d 10s
    # the chains of these waits, from thread to thread, as a flame graph
    whylate offcpu --why 5ms -d 10s -o chain.svg
    # the 5 longest waits of a minute, explained
    whylate offcpu --worst 5 -d 1m
    # the stack of the thread that ended each wait; traces every switch
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
    /// Write to a file; its extension sets the format: .svg, .folded, .pb.gz, .speedscope.json, .json, or .whylate for
    /// a recording
    ///
    /// With --why, .svg and .folded have the chains of the explained waits: where each thread waited, which thread
    /// ended that wait, where that thread waited in turn, and so on to what took the time. In .svg, widths are shares
    /// of the first thread's wait. .json has the longest waits. Explained waits do not fit into .pb.gz and
    /// .speedscope.json.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Only the threads of this process
    #[arg(short, long, value_parser = pid)]
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
    /// Only time in these states, by their letters in ps(1): R, S, D, I, T, t, P; F for frozen
    #[arg(long, value_name = "LETTERS", value_parser = states)]
    state: Option<String>,
    /// Whether the kernel's own threads are shown
    #[arg(long, value_enum, default_value_t = Kernel::Yes)]
    kernel_threads: Kernel,
    /// Leave out user frames
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
    /// Print the threads that have waited for at least this long (e.g. 10s), what each waits for, and its holder or
    /// peer if known; then exit
    #[arg(long, value_name = "DURATION", value_parser = duration_ns, conflicts_with_all = ["output", "duration"])]
    blocked: Option<u64>,
    /// Compare two profiles (folded or JSON): what waits more, and what less
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"], conflicts_with_all = ["blocked", "json", "flat", "why"])]
    diff: Option<Vec<PathBuf>>,
    #[command(flatten)]
    explain: Explain,
    #[command(flatten)]
    rank: Rank,
    /// Print one JSON object
    #[arg(long, conflicts_with = "flat")]
    json: bool,
    #[command(flatten)]
    verbosity: Verbosity,
    /// How to measure: sample (the default), trace (every context switch), proc (without BPF), or auto (the cheaper of
    /// sample and trace; says why)
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Share of one CPU that sampling may use (e.g. 1%); sets the rate, in place of -F
    #[arg(long, value_name = "SHARE", value_parser = share_ppm, conflicts_with = "frequency")]
    budget: Option<u32>,
}

/// Help text of `--why`.
const LONG_WAITS: &str = "Explain every wait of THRESHOLD or more (e.g. 5ms): what ran on the CPU, or which thread ended the wait and what it did until then";
/// Help text of `--worst`.
const WORST_WAITS: &str = "Print and draw only the N longest waits; without --why, only those of 20ms or longer [default: print 10, draw all]";
/// Default number of longest waits that are shown.
const WORST: usize = 10;

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
    /// By unwind information (.eh_frame), which works for programs without frame pointers, too
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

    /// Returns whether only some threads are selected.
    pub(super) fn selects_threads(&self) -> bool {
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
