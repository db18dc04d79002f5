// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate irqsoff`: culprits of disabled interrupts or preemption.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use whylate_model::late::Thresholds;
use whylate_model::sources::IRQSOFF;
use whylate_sources::irqsoff::{IrqsoffOptions, What, console_level};

use crate::cli::arguments::{Explain, Rank, Record, Schedule, Verbosity};
use crate::cli::import::{self, interrupts};
use crate::cli::runner::{Query, Stream, drive};
use crate::cli::values::{Cpus, duration_ns, period};
use crate::cli::{Origin, SUCCESS};
use crate::render::text::Output;
use crate::render::text::fit::terminal_columns;
use crate::render::text::irqsoff::{IrqsoffText, IrqsoffTextOptions, timers};
use crate::store::late_buffer::Keep;

/// Who disables interrupts or preemption, and for how long
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # who kept interrupts off, and the longest time with its stack
    whylate irqsoff
    # the same each second, ten times
    whylate irqsoff 1 10
    # a histogram of lengths per culprit
    whylate irqsoff --histogram
    # a line each time that interrupts are off for 5 ms or longer
    whylate irqsoff --slower 5ms
    # also what ran on the CPU in that time
    whylate irqsoff --why 5ms
    # and which pod or service kept interrupts off for longest
    whylate irqsoff --why 5ms --rank-by cgroup -d 1m
    # how late every hrtimer is, by its function and CPU, each second
    whylate irqsoff --timers 1
    # a periodic timer per CPU: the periods it misses, and why
    whylate irqsoff --timer-test 1.33ms
    # who disables preemption, or keeps a CPU that another thread needs
    whylate irqsoff --preempt
    # one CPU, with a timer every 100 us
    whylate irqsoff -c 3 --period 100us
    # a latency trace of ftrace, or a capture of trace_pipe
    whylate import trace.txt")]
#[command(
    group = ArgGroup::new("late_lengths").args(["slower", "why"]).multiple(true),
    mut_arg("rank_by", |by| by.help("With --why: how culprits are ranked [default: name]")),
    mut_arg("worst", |worst| worst.help("Print the N longest times with interrupts off, with their stacks, at each output [default: 1, or none if lines are printed live]"))
)]
pub struct Arguments {
    /// Print a histogram of lengths per culprit
    #[arg(long)]
    pub(crate) histogram: bool,
    /// Print each time that interrupts are off for at least this long, as it happens (e.g. 5ms)
    #[arg(long, value_name = "LENGTH", value_parser = duration_ns)]
    slower: Option<u64>,
    #[command(flatten)]
    explain: Explain,
    #[command(flatten)]
    rank: Rank,
    /// Period of the timer of each CPU (e.g. 500us). Sections with interrupts off that are shorter than this are seen
    /// only by chance, and lengths are accurate to one period [default: 1ms, or 2, 5 or 10 ms where the timer's
    /// interrupts would take more than 0.6 % of a CPU]
    #[arg(long, value_name = "PERIOD", value_parser = period)]
    period: Option<u64>,
    /// Leave out lengths shorter than this
    #[arg(long, alias = "from", value_name = "LENGTH", value_parser = duration_ns, default_value = "100us")]
    min: u64,
    /// Print how late every hrtimer is, by its function and CPU, with missed periods and the run time of the function
    #[arg(
        long,
        conflicts_with_all = ["late_lengths", "worst", "fail_if_late", "period", "min", "backend", "timer_test", "preempt"],
    )]
    timers: bool,
    /// Test with a periodic timer per CPU: print each time that it misses periods, with what made it late
    #[arg(long, value_name = "PERIOD", value_parser = period, conflicts_with_all = ["late_lengths", "period", "min", "preempt"])]
    pub(crate) timer_test: Option<u64>,
    /// Only these CPUs, e.g. 0,2-5
    #[arg(short, long, value_name = "CPUS")]
    cpus: Option<Cpus>,
    /// Trace disabled preemption, not interrupts: by the events preemptirq:preempt_* where the kernel has them;
    /// otherwise, on Linux 6.17 to 6.19, by how long a thread keeps its CPU after the scheduler wants to switch
    #[arg(long)]
    pub(crate) preempt: bool,
    #[command(flatten)]
    pub(crate) schedule: Schedule,
    #[command(flatten)]
    verbosity: Verbosity,
    #[command(flatten)]
    record: Record,
    /// How to measure: events, ticks, tracer, need_resched; auto uses events where the kernel has them, otherwise
    /// ticks, or need_resched with --preempt
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: String,
    /// Former name of `whylate import`
    #[arg(long, value_name = "FILE", hide = true, conflicts_with_all = ["output", "rank_by", "interval", "count", "duration", "cpus", "backend", "period", "min", "preempt", "timers", "timer_test", "fail_if_late"])]
    pub(crate) import: Option<PathBuf>,
}

impl Arguments {
    pub(crate) fn shown(&self) -> IrqsoffTextOptions {
        IrqsoffTextOptions {
            histogram: self.histogram,
            timer_test: self.timer_test,
            preempt: self.preempt,
            is_import: false,
            lines_from_ns: self.lines().then(|| self.lines_from_ns()),
            worst: self.worst(),
            rank_by: self.thresholds().explain_ns.map(|_| self.rank.into()),
            from_ns: self.options().from_ns,
            is_verbose: self.verbosity.verbose,
        }
    }

    /// Returns the threshold of explained sections. `--worst` needs none: it always has the longest ones.
    fn why_ns(&self) -> Option<u64> {
        Explain { worst: None, ..self.explain }.with_limit_of(&IRQSOFF).why
    }

    fn thresholds(&self) -> Thresholds {
        let show_ns = self.slower.or(self.timer_test);
        Thresholds { show_ns, explain_ns: self.why_ns(), worst: self.worst() }
    }

    /// Returns whether late events are printed as they happen.
    pub(crate) fn lines(&self) -> bool {
        self.lines_from_ns() < u64::MAX
    }

    pub(crate) fn lines_from_ns(&self) -> u64 {
        [self.slower, self.why_ns(), self.timer_test].into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    /// Returns the number of longest sections to print at each output.
    pub(crate) fn worst(&self) -> Option<usize> {
        let unless_asked = (!self.schedule.json && !self.lines()).then_some(1);
        self.explain.worst.or(unless_asked).map(usize::from)
    }

    /// Returns which late events a snapshot carries: none in text, where the output ranks them by itself.
    pub(crate) fn keep(&self) -> Keep {
        if self.schedule.json { Keep::worst(self.worst()) } else { Keep::Nothing }
    }

    pub(crate) fn options(&self) -> IrqsoffOptions {
        IrqsoffOptions {
            backend: Some(self.backend.clone()),
            what: if self.preempt { What::Preemption } else { What::Irqs },
            period_ns: self.timer_test.or(self.period),
            cpus: self.cpus.as_ref().map_or_else(Vec::new, |cpus| cpus.0.clone()),
            from_ns: self.timer_test.unwrap_or(self.min),
            late_over_ns: self.slower.or(self.timer_test),
            explain_over_ns: self.why_ns(),
            worst: self.worst(),
            timer_test: self.timer_test.is_some(),
            timers: self.timers,
            ..IrqsoffOptions::default()
        }
    }
}

/// Measures or replays; prints at each interval, and at the end. Returns the exit status.
///
/// # Errors
/// Fails if the source cannot attach, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    if let Some(file) = &arguments.import {
        let selection = interrupts::Selection {
            histogram: arguments.histogram,
            lines_from_ns: arguments.lines().then(|| arguments.lines_from_ns()),
            worst: arguments.worst(),
            json: arguments.schedule.json,
            is_verbose: arguments.verbosity.verbose,
        };
        return import::read(file, |input| interrupts::print(selection, input)).map(|()| SUCCESS);
    }
    arguments.rank.needs(arguments.thresholds())?;
    let (shown, columns) = (arguments.shown(), terminal_columns());
    let mut text: Box<dyn Output> = match arguments.timers {
        true => Box::new(timers::TimerText::new(shown.histogram, shown.is_verbose, columns)),
        false => Box::new(IrqsoffText::new(shown, columns, console_level())),
    };
    // Preemption-off sections are only counted when late events are drained.
    let has_late_events = arguments.lines() || arguments.worst().is_some() || arguments.preempt;
    let query = Query {
        source: &arguments.options(),
        schedule: arguments.schedule,
        explain: arguments.explain,
        is_verbose: arguments.verbosity.verbose,
        keep: arguments.keep(),
        late: has_late_events.then_some(arguments.thresholds()),
        only: &|_| true,
    };
    let stream = Stream::open(origin, &query, arguments.record.output.as_deref())?;
    let is_late = drive(stream, &query, text.as_mut(), &mut |_| ())?;
    Ok(arguments.explain.status(is_late))
}
