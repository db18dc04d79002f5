// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate wq`: how long work items wait for a worker.

use anyhow::Context as _;
use clap::{ArgGroup, Args, ValueEnum};
use whylate_model::units::printable;
use whylate_sources::symbols;
use whylate_sources::wq::{By, WqOptions};

use crate::commands::runner::{Feed, Schedule, drive};
use crate::commands::watch::Watch;
use crate::output::table::terminal_columns;
use crate::output::wq::Text;
use crate::values::duration_ns;

/// How long work items wait for a worker, and how long they run
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    whylate wq               # summarize work queue latency as a histogram
    whylate wq 1 10          # print 1 second summaries, 10 times
    whylate wq -W            # show each work handler separately
    whylate wq -w xyz        # show the work handler named \"xyz\" only
    whylate wq --table 1     # a row per handler: latency and run time, each second
    whylate wq --slower 10ms # a line per item that waited 10 ms or longer, as it happens
    whylate wq --why 10ms    # and what made each of them wait, and who caused most of it
    whylate wq --why 1ms --worst 5 -d 1m
                             # explain the 5 longest waits of a minute")]
#[command(group = ArgGroup::new("late").multiple(true))]
pub struct Arguments {
    /// Print a histogram per work handler
    #[arg(short = 'W', long)]
    pub(crate) works: bool,
    /// Trace only this work handler
    #[arg(short, long, value_name = "HANDLER")]
    pub(crate) work: Option<String>,
    /// Print a histogram of each phase: waiting for max_active, waiting for a worker, running, on a CPU, asleep, ready
    #[arg(long)]
    pub(crate) phases: bool,
    /// Print a row per handler with its latency and run time
    #[arg(long)]
    pub(crate) table: bool,
    /// Column that orders the table
    #[arg(long, value_enum, default_value_t = Sort::Max, requires = "table")]
    pub(crate) sort: Sort,
    /// What to group by
    #[arg(long, value_enum)]
    pub(crate) by: Option<Key>,
    /// Print a line per item that waited at least this long, as it happens (e.g. 10ms)
    #[arg(long, value_name = "LATENCY", value_parser = duration_ns, group = "late")]
    pub(crate) slower: Option<u64>,
    /// Explain every item that waited at least this long (e.g. 1ms): its causes, which add up to the wait, and the main culprits
    #[arg(long, value_name = "THRESHOLD", value_parser = duration_ns, group = "late")]
    pub(crate) why: Option<u64>,
    /// With --why: print only the N longest waits, longest first, at each output
    #[arg(long, value_name = "N", requires = "why", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) worst: Option<u16>,
    /// With --slower or --why: the kernel stack that queued the item
    #[arg(long, requires = "late")]
    pub(crate) stack: bool,
    #[command(flatten)]
    pub(crate) schedule: Schedule,
    /// Where the start of an item is taken: fentry, tracepoint, or auto for the best that works
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    pub(crate) backend: String,
}

/// What the series are told apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Key {
    Handler,
    Workqueue,
    Cpu,
    Pool,
}

impl Key {
    /// The label of a series that holds it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Key::Handler => "handler",
            Key::Workqueue => "workqueue",
            Key::Cpu => "cpu",
            Key::Pool => "pool",
        }
    }
}

/// The column that orders the table, largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    Count,
    Mean,
    P50,
    P99,
    Max,
    /// Longest run time
    Runtime,
    /// By name, A to Z
    Name,
}

impl Arguments {
    /// True when late items are to be printed.
    pub(crate) fn lines(&self) -> bool {
        self.slower.is_some() || self.why.is_some()
    }

    /// True when late items and their culprits are all that is to be printed.
    pub(crate) fn lines_only(&self) -> bool {
        self.lines() && !(self.schedule.json || self.table || self.works || self.phases || self.schedule.repeats())
    }

    /// Measures no more than what is printed.
    pub(crate) fn options(&self) -> WqOptions {
        let by = match self.by {
            Some(Key::Handler) => By::Handler,
            Some(Key::Workqueue) => By::Workqueue,
            Some(Key::Cpu) => By::Cpu,
            Some(Key::Pool) => By::Pool,
            None if self.schedule.json || self.table || self.works || self.work.is_some() => By::Handler,
            None => By::Nothing,
        };
        WqOptions {
            backend: Some(self.backend.clone()),
            only: self.work.clone(),
            by,
            phases: self.schedule.json || self.table || self.phases || self.lines(),
            late_over_ns: self.slower,
            explain_over_ns: self.why,
            stacks: self.stack,
            ..WqOptions::default()
        }
    }
}

/// Attaches, prints at each interval, and once more at the end.
///
/// # Errors
/// When the source cannot attach, or the output cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let mut feed = Feed::of(&arguments.options(), arguments.schedule.keep(arguments.worst))?;
    let mut text = Text::new(arguments, terminal_columns());
    let mut seen_any = false;
    drive(&mut feed, &watch, arguments.schedule, arguments.lines(), &mut text, &mut |snapshot| {
        seen_any |= !snapshot.total("latency").is_empty();
    })?;
    if let (Some(handler), false) = (&arguments.work, seen_any) {
        let why = match symbols::is_kernel_function(handler) {
            Some(false) => " (the kernel has no function of that name)",
            _ => "",
        };
        eprintln!("whylate: no work item of {} was seen{why}", printable(handler));
    }
    Ok(())
}
