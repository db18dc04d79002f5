// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate wq`: how long work items wait for a worker.

use clap::{ArgGroup, Args};
use whylate_model::culprits;
use whylate_model::late::Thresholds;
use whylate_model::sources::WQ;
use whylate_model::units::printable;
use whylate_sources::kernel::symbols;
use whylate_sources::wq::{By, WqOptions};

use crate::cli::arguments::{Explain, Rank, RankBy, Record, Schedule, Verbosity};
use crate::cli::runner::{Query, Stream, drive};
use crate::cli::values::duration_ns;
use crate::cli::{FAILURE, Origin};
use crate::render::text::fit::terminal_columns;
use crate::render::text::latency::LatencyOptions;
use crate::render::text::wq::shape::{self, Shape};
use crate::render::text::wq::{WqText, WqView};
use crate::store::late_buffer::Keep;

/// How long work items wait for a worker, and how long they run
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # work queue latency as a histogram, at Ctrl-C
    whylate wq
    # 1 second summaries, 10 times
    whylate wq 1 10
    # a row per handler each second: latency and run time
    whylate wq --table 1
    # each work handler in its own histogram
    whylate wq -W
    # one work handler
    whylate wq -w vmstat_update
    # a line per item that waited 10 ms or longer, as it happens
    whylate wq --slower 10ms
    # also the causes of each, and who caused most of the delay
    whylate wq --why 10ms
    # the 5 longest waits of a minute, explained
    whylate wq --worst 5 -d 1m
    # which pod or service delays work items
    whylate wq --why 10ms --rank-by cgroup -d 1m")]
#[command(
    group = ArgGroup::new("late").args(["slower", "why", "worst"]).multiple(true),
    mut_arg("verbose", |verbose| verbose.help("Also print the phases, workqueue and worker of each late item, and lost events by reason"))
)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// Trace only this work handler
    #[arg(short, long, value_name = "HANDLER")]
    work: Option<String>,
    /// Print each item that waited at least this long, as it happens (e.g. 10ms)
    #[arg(long, value_name = "LATENCY", value_parser = duration_ns)]
    slower: Option<u64>,
    #[command(flatten)]
    explain: Explain,
    #[command(flatten)]
    rank: Rank,
    /// With --slower or --why: also print the kernel stack that queued the item
    #[arg(long, requires = "late")]
    stack: bool,
    #[command(flatten)]
    pub(crate) schedule: Schedule,
    #[command(flatten)]
    verbosity: Verbosity,
    #[command(flatten)]
    record: Record,
    /// How the start of an item is detected: fentry, tracepoint, or auto for the best that works
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: String,
}

impl Arguments {
    pub(crate) fn view(&self) -> WqView<'_> {
        WqView { shape: &self.shape, handler: self.work.as_deref() }
    }

    /// Returns what is printed.
    pub(crate) fn shown(&self) -> LatencyOptions {
        LatencyOptions {
            thresholds: self.thresholds(),
            rank_by: self.ranked_by(),
            lines_only: self.lines_only(),
            is_verbose: self.verbosity.verbose,
        }
    }

    pub(crate) fn thresholds(&self) -> Thresholds {
        self.explain.with_limit_of(&WQ).thresholds(self.slower)
    }

    /// Returns how culprits are grouped.
    fn ranked_by(&self) -> culprits::By {
        if self.shape.by_cgroup() { culprits::By::Cgroup } else { self.rank.into() }
    }

    /// Returns whether late items are printed.
    fn lines(&self) -> bool {
        self.thresholds().min_ns().is_some()
    }

    /// Returns whether only late items and their culprits are printed.
    fn lines_only(&self) -> bool {
        self.lines()
            && !(self.schedule.json
                || self.shape.table
                || self.shape.works
                || self.shape.phases
                || self.schedule.repeats())
    }

    /// Returns options that measure only what is printed.
    pub(crate) fn options(&self) -> WqOptions {
        let by = match self.shape.by {
            Some(shape::By::Handler) => By::Handler,
            Some(shape::By::Workqueue) => By::Workqueue,
            Some(shape::By::Cpu) => By::Cpu,
            Some(shape::By::Pool) => By::Pool,
            _ if self.schedule.json || self.shape.table || self.shape.works || self.work.is_some() => By::Handler,
            _ => By::Nothing,
        };
        WqOptions {
            backend: Some(self.backend.clone()),
            only: self.work.clone(),
            by,
            phases: self.schedule.json || self.shape.table || self.shape.phases || self.lines(),
            late_over_ns: self.slower,
            explain_over_ns: self.thresholds().explain_ns,
            stacks: self.stack,
            ..WqOptions::default()
        }
    }
}

/// Measures or replays; prints at each interval, and at the end. Returns the exit status.
///
/// # Errors
/// Fails if the source cannot attach, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    let thresholds = arguments.thresholds();
    let by_cgroup = Rank { rank_by: Some(RankBy::Cgroup) };
    if arguments.shape.by_cgroup() { by_cgroup } else { arguments.rank }.needs(thresholds)?;
    let query = Query {
        source: &arguments.options(),
        schedule: arguments.schedule,
        explain: arguments.explain,
        is_verbose: arguments.verbosity.verbose,
        keep: Keep::for_output(arguments.schedule.json, thresholds),
        late: arguments.lines().then_some(thresholds),
        only: &|labels| arguments.work.as_ref().is_none_or(|work| labels.get("handler") == Some(work)),
    };
    let stream = Stream::open(origin, &query, arguments.record.output.as_deref())?;
    let mut text = WqText::new(arguments.view(), arguments.shown(), terminal_columns(), stream.next(origin));
    let mut seen_any = false;
    let is_late = drive(stream, &query, &mut text, &mut |snapshot| {
        seen_any |= !snapshot.total("latency").is_empty();
    })?;
    if let (Some(handler), false) = (&arguments.work, seen_any) {
        let why = match symbols::is_kernel_function(handler) {
            Some(false) => " (the kernel has no function with this name)",
            _ => "",
        };
        say!("whylate: no work item of {} was seen{why}", printable(handler));
        return Ok(FAILURE);
    }
    Ok(arguments.explain.status(is_late))
}
