// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate timerlat`: latency of timers and of the threads that they wake, with the command line of `rtla timerlat`.

mod actions;
mod events;
mod figures;
mod live;
mod run;
mod screen;
pub mod values;

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};
use whylate_sources::timerlat::{Policy, Record, StepWidth, Stop, Threads, TimerlatOptions};

use self::events::Events;
use self::values::{Action, TRACE_FILE};
use crate::cli::arguments::{RankBy, Verbosity};
use crate::cli::values::{Cpus, duration_ns, period_us, seconds_ns, us};
use crate::render::text::timerlat::Unit;
use crate::render::text::timerlat::analysis::StackFormat;
use crate::render::text::timerlat::hist::HistogramOptions;

pub use run::run;

/// How late timers fire and how late the threads that they wake run, with the options and tables of `rtla timerlat`
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # a table, refreshed each second, until Ctrl-C
    whylate timerlat
    # stop at 40 us on CPUs 1 to 23, and show why
    whylate timerlat top -a 40 -c 1-23 -q
    # a one-minute histogram, with percentiles to p99.9999
    whylate timerlat hist -d 1m --percentiles
    # the 5 worst activations of 10 seconds, with their causes
    whylate timerlat top --worst 5 -d 10s
    # each activation over 200 us with its causes, as it happens
    whylate timerlat top --why 200us")]
pub struct Arguments {
    #[command(subcommand)]
    mode: Option<Mode>,
    #[command(flatten)]
    top: Top,
}

#[derive(Debug, Subcommand)]
enum Mode {
    Top(Top),
    Hist(Hist),
}

/// A table of the latencies of each CPU
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # measure for 10 s, then print the table
    whylate timerlat top -d 10s -q
    # stop at 40 us on CPU 1, and show why
    whylate timerlat top -a 40 -c 1")]
struct Top {
    #[command(flatten)]
    common: Common,
    /// Stop at this latency and show why, without statistics (us)
    #[arg(long, value_name = "LATENCY", value_parser = us, conflicts_with_all = ["auto", "irq", "thread", "no_aa"])]
    aa_only: Option<u64>,
}

/// A histogram of the latencies of each CPU, at the end
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # a one-minute histogram
    whylate timerlat hist -d 1m
    # 50 buckets of 10 us
    whylate timerlat hist -d 1m -b 10 -E 50")]
struct Hist {
    #[command(flatten)]
    common: Common,
    /// Width of a step of the histogram (us, or ns with -n)
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..1_000_000))]
    bucket_size: u64,
    /// Number of steps of the histogram
    #[arg(short = 'E', long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u64).range(10..10_000_000))]
    entries: u64,
    /// Omit the latency of the interrupt
    #[arg(long)]
    no_irq: bool,
    /// Omit the latency of the thread
    #[arg(long, conflicts_with = "no_irq")]
    no_thread: bool,
    /// Omit the heading
    #[arg(long)]
    no_header: bool,
    /// Omit the summary
    #[arg(long)]
    no_summary: bool,
    /// Omit the column of steps
    #[arg(long, requires = "with_zeros")]
    no_index: bool,
    /// Also print steps in which nothing was counted
    #[arg(long)]
    with_zeros: bool,
    /// Refresh the histogram each second
    #[arg(long, conflicts_with = "quiet")]
    live: bool,
}

/// What both have.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("explained").multiple(true))]
struct Common {
    /// Print only a summary at the end, as hist does anyway
    #[arg(short, long)]
    quiet: bool,
    /// Set -i, -T and -s to this latency (us), and enable -t
    #[arg(short, long, value_name = "LATENCY", value_parser = us)]
    auto: Option<u64>,
    /// Time from one activation to the next, 100 us to 1 s (us)
    #[arg(short, long, value_name = "PERIOD", default_value = "1000", value_parser = period_us)]
    period: u64,
    /// Align the threads of all CPUs: each wakes this long after the thread of the previous CPU (us)
    #[arg(short = 'A', long, value_name = "OFFSET", value_parser = values::offset)]
    aligned: Option<u64>,
    /// Stop at this IRQ latency (us)
    #[arg(short, long, value_name = "LATENCY", value_parser = us)]
    irq: Option<u64>,
    /// Stop at this thread or return-to-user latency (us)
    #[arg(short = 'T', long, value_name = "LATENCY", value_parser = us)]
    thread: Option<u64>,
    /// Show the stack that the timer interrupted if the thread latency is at least this (us)
    #[arg(short, long, value_name = "LATENCY", value_parser = us)]
    stack: Option<u64>,
    /// How the analysis prints stack entries without a symbol: truncate ends the stack there, skip omits them, full
    /// prints their addresses
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = StackFormat::Truncate, hide_possible_values = true)]
    stack_format: StackFormat,
    /// Allow only idle states with at most this exit latency, through /dev/cpu_dma_latency (us)
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    dma_latency: Option<u32>,
    /// Measure threads in user space; the default where possible
    #[arg(short, long, conflicts_with_all = ["user_load", "kernel_threads"])]
    user_threads: bool,
    /// Measure your own user-space threads, which read osnoise/per_cpu/cpuN/timerlat_fd (needs the kernel's timerlat
    /// tracer)
    #[arg(short = 'U', long, conflicts_with = "kernel_threads")]
    user_load: bool,
    /// Measure kernel threads (needs the kernel's timerlat tracer)
    #[arg(short, long)]
    kernel_threads: bool,
    /// CPUs to measure, e.g. 0,2-5
    #[arg(short, long, value_name = "CPUS")]
    cpus: Option<Cpus>,
    /// CPUs for whylate's own threads (housekeeping CPUs)
    #[arg(short = 'H', long, value_name = "CPUS")]
    house_keeping: Option<Cpus>,
    /// End after this time (s, m, h, d; a bare number is in seconds)
    #[arg(short, long, value_name = "TIME", value_parser = seconds_ns)]
    duration: Option<u64>,
    /// Print debug information
    #[arg(short = 'D', long)]
    debug: bool,
    /// Save a trace when a threshold is hit: that of the kernel's tracer, or, without the tracer, the latest
    /// activations and what ran on the CPU during late ones
    #[arg(short, long, value_name = "FILE", num_args = 0..=1, default_missing_value = TRACE_FILE)]
    trace: Option<PathBuf>,
    #[command(flatten)]
    events: Events,
    /// Size of the buffer of each CPU for -t and -a (KiB; needs the kernel's timerlat tracer)
    #[arg(long, value_name = "KB", value_parser = clap::value_parser!(u32).range(1..))]
    trace_buffer_size: Option<u32>,
    /// Scheduling policy and priority of the measured threads: o:NICE, r:PRIORITY, f:PRIORITY or d:RUNTIME:PERIOD
    #[arg(short = 'P', long, value_name = "CLASS", default_value = "f:95", value_parser = values::policy)]
    priority: Policy,
    /// Run whylate and the measured threads in this cgroup; without a name, in the cgroup of the caller
    #[arg(short = 'C', long, value_name = "CGROUP", num_args = 0..=1, default_missing_value = "")]
    cgroup: Option<String>,
    /// With a threshold: print which thread ran on each CPU when it was hit
    #[arg(long, alias = "dump-task")]
    dump_tasks: bool,
    /// Do not analyze why a threshold was hit
    #[arg(long)]
    no_aa: bool,
    /// Show nanoseconds
    #[arg(short, long)]
    nano: bool,
    /// Discard the activations of this warm-up time (s)
    #[arg(long, value_name = "TIME", value_parser = seconds_ns)]
    warm_up: Option<u64>,
    /// Disable idle states deeper than this on the measured CPUs; -1 disables all
    #[arg(long, value_name = "STATE", allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1..=100))]
    deepest_idle_state: Option<i32>,
    /// When a threshold is hit: trace[,file=FILE], signal,num=N,pid=PID, shell,command=COMMAND, or continue
    #[arg(long, value_name = "ACTION")]
    on_threshold: Vec<Action>,
    /// At the end: trace[,file=FILE], signal,num=N,pid=PID, or shell,command=COMMAND
    #[arg(long, value_name = "ACTION")]
    on_end: Vec<Action>,
    /// An option of rtla that is refused
    #[arg(long, value_name = "FILE", hide = true)]
    bpf_action: Option<PathBuf>,
    /// Print percentiles of each latency to p99.9999, raw and corrected for missed periods
    #[arg(long)]
    percentiles: bool,
    /// Show the N worst activations with their causes
    #[arg(long, value_name = "N", group = "explained", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    worst: Option<u16>,
    /// Explain each activation with at least this latency as it happens, without stopping (e.g. 200us)
    #[arg(long, value_name = "LATENCY", group = "explained", value_parser = duration_ns)]
    why: Option<u64>,
    /// With --why: how culprits are ranked, at the end [default: name]
    #[arg(long, value_enum, value_name = "WHAT", requires = "why", conflicts_with = "json")]
    rank_by: Option<RankBy>,
    /// Print one JSON object per line (each second; for hist and top -q, only at the end)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    verbosity: Verbosity,
    /// Exit with status 4 if a thread's latency reached the threshold of --why, or 5ms without --why
    #[arg(long)]
    fail_if_late: bool,
    /// Also record to this file (.whylate), for `whylate replay`
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How to measure: tracer, bpf, or auto for the kernel's tracer where there is one
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: String,
}

/// Default number of worst activations in a trace saved at the end.
const RECORDED_WORST: usize = 10;

#[derive(Clone, Copy, Debug)]
enum View {
    /// The table, live or only at the end.
    Top { is_live: bool },
    /// The histogram.
    Hist { shown: HistogramOptions, is_live: bool },
    /// Only the analysis.
    Analysis,
}

#[derive(Debug)]
struct Plan<'a> {
    common: &'a Common,
    view: View,
    stop: Stop,
    steps: Option<StepWidth>,
    /// Latency from which the stack that the timer interrupted is shown, in nanoseconds.
    stack_ns: Option<u64>,
}

impl Arguments {
    fn plan(&self) -> Plan<'_> {
        match &self.mode {
            None => self.top.plan(),
            Some(Mode::Top(top)) => top.plan(),
            Some(Mode::Hist(hist)) => hist.plan(),
        }
    }
}

impl Top {
    fn plan(&self) -> Plan<'_> {
        let view = if self.aa_only.is_some() { View::Analysis } else { View::Top { is_live: !self.common.quiet } };
        let stack_ns = self.common.stack.or(self.common.auto).or(self.aa_only);
        Plan { common: &self.common, view, stop: self.common.stop(self.aa_only), steps: None, stack_ns }
    }
}

impl Hist {
    fn plan(&self) -> Plan<'_> {
        let unit = self.common.unit();
        let shown = HistogramOptions {
            unit,
            kinds: [!self.no_irq, !self.no_thread, true],
            without_header: self.no_header,
            without_index: self.no_index,
            without_summary: self.no_summary,
            with_zeros: self.with_zeros,
        };
        let steps = StepWidth { step_ns: self.bucket_size * unit.ns(), steps: self.entries as usize };
        let view = View::Hist { shown, is_live: self.live };
        let stack_ns = self.common.stack.or(self.common.auto);
        Plan { common: &self.common, view, stop: self.common.stop(None), steps: Some(steps), stack_ns }
    }
}

impl Common {
    fn unit(&self) -> Unit {
        if self.nano { Unit::Nanoseconds } else { Unit::Microseconds }
    }

    fn stop(&self, aa_only: Option<u64>) -> Stop {
        let both = self.auto.or(aa_only);
        Stop { irq_ns: self.irq.or(both), thread_ns: self.thread.or(both) }
    }

    /// Returns the file to save a trace to when a threshold is hit.
    fn trace_file(&self) -> Option<PathBuf> {
        self.trace.clone().or_else(|| self.auto.map(|_| TRACE_FILE.into()))
    }

    fn threads(&self) -> Threads {
        match (self.user_threads, self.user_load, self.kernel_threads) {
            (true, _, _) => Threads::User,
            (_, true, _) => Threads::Others,
            (_, _, true) => Threads::Kernel,
            _ => Threads::Any,
        }
    }

    fn on_threshold(&self) -> Vec<Action> {
        self.trace_file().map(Action::Trace).into_iter().chain(self.on_threshold.iter().cloned()).collect()
    }

    /// Returns whether a trace may be saved.
    fn saves(&self) -> bool {
        self.on_threshold().iter().any(Action::is_trace) || self.saves_at_end()
    }

    fn saves_at_end(&self) -> bool {
        self.on_end.iter().any(Action::is_trace)
    }
}

impl Plan<'_> {
    /// Returns whether a hit is explained or saved.
    fn analyses(&self) -> bool {
        let common = self.common;
        let has_stop = self.stop.irq_ns.is_some() || self.stop.thread_ns.is_some();
        has_stop && (!common.no_aa || common.saves())
    }

    fn options(&self) -> TimerlatOptions {
        let common = self.common;
        let analyses = self.analyses();
        let stop_ns = self.stop.thread_ns.filter(|_| analyses);
        let record = Record {
            events: common.events.0.clone(),
            buffer_kb: common.trace_buffer_size,
            worst: common.saves_at_end().then_some(RECORDED_WORST),
        };
        TimerlatOptions {
            backend: Some(common.backend.clone()),
            threads: common.threads(),
            record: common.saves().then_some(record),
            period_ns: common.period,
            aligned_ns: common.aligned,
            is_frugal: false,
            cpus: common.cpus.as_ref().map(|cpus| cpus.0.clone()).unwrap_or_default(),
            policy: common.priority,
            explain_over_ns: [stop_ns, common.why].into_iter().flatten().min(),
            explain_irq_over_ns: self.stop.irq_ns.filter(|_| analyses),
            explain_worst: common.worst.map(usize::from),
            stacks: self.stack_ns.is_some(),
            stack_over_ns: self.stack_ns,
            stop: self.stop,
            steps: self.steps,
            keep_evidence: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parsed;

    fn with<T>(words: &[&str], look: impl FnOnce(&Plan<'_>) -> T) -> T {
        let arguments: Arguments = parsed(words.iter().copied()).unwrap_or_else(|error| panic!("{words:?}: {error}"));
        look(&arguments.plan())
    }

    fn options(words: &[&str]) -> TimerlatOptions {
        with(words, |plan| plan.options())
    }

    fn is_refused(words: &[&str]) -> bool {
        parsed::<Arguments>(words.iter().copied()).is_err()
    }

    #[test]
    fn top_is_default_subcommand() {
        for words in [&["-q", "-p", "500"][..], &["top", "-q", "-p", "500"]] {
            assert_eq!(
                options(words),
                TimerlatOptions {
                    backend: Some("auto".to_owned()),
                    period_ns: 500_000,
                    keep_evidence: true,
                    ..TimerlatOptions::default()
                }
            );
            with(words, |plan| assert!(matches!(plan.view, View::Top { is_live: false })));
        }
        with(&["top"], |plan| assert!(matches!(plan.view, View::Top { is_live: true })));
        with(&["hist", "-q"], |plan| assert!(matches!(plan.view, View::Hist { is_live: false, .. })));
        assert!(is_refused(&["hist", "-q", "--live"]));
    }

    #[test]
    fn auto_is_irq_thread_stack_and_trace() {
        let auto = options(&["-a", "40"]);
        assert_eq!(auto.stop, Stop { irq_ns: Some(40_000), thread_ns: Some(40_000) });
        assert_eq!(auto, options(&["-i", "40", "-T", "40", "-s", "40", "-t"]));
        with(&["-a", "40"], |plan| assert_eq!(plan.common.trace_file(), Some(TRACE_FILE.into())));
        for file in [&["-t", "mine"][..], &["-t=mine"], &["-tmine"], &["--trace", "mine"], &["--trace=mine"]] {
            with(&[&["-a", "40"], file].concat(), |plan| {
                assert_eq!(plan.common.on_threshold(), [Action::Trace("mine".into())]);
            });
        }
        with(&["-t", "-a", "40"], |plan| assert_eq!(plan.common.trace_file(), Some(TRACE_FILE.into())));
        with(&["-T", "40"], |plan| assert_eq!(plan.common.trace_file(), None));
        with(&["-t"], |plan| assert_eq!(plan.common.trace_file(), Some(TRACE_FILE.into())));
    }

    #[test]
    fn irq_and_thread_thresholds_are_independent() {
        assert_eq!(options(&["-i", "7"]).stop, Stop { irq_ns: Some(7_000), thread_ns: None });
        assert_eq!(options(&["-T", "7"]).stop, Stop { irq_ns: None, thread_ns: Some(7_000) });
        let aa_only = options(&["--aa-only", "9"]);
        assert_eq!(aa_only.stop, Stop { irq_ns: Some(9_000), thread_ns: Some(9_000) });
        assert!(aa_only.stacks);
        with(&["--aa-only", "9"], |plan| assert!(matches!(plan.view, View::Analysis)));
        // Without the analysis, the BPF programs explain nothing.
        let plain = options(&["-T", "7", "--no-aa"]);
        assert_eq!((plain.stop.thread_ns, plain.explain_over_ns), (Some(7_000), None));
    }

    #[test]
    fn options_select_what_is_measured() {
        let asked = options(&["-c", "1,3-4", "-P", "r:7", "-s", "9", "--worst", "3", "--why", "12us"]);
        assert_eq!((asked.cpus, asked.policy, asked.stacks), (vec![1, 3, 4], Policy::RoundRobin(7), true));
        assert_eq!((asked.explain_worst, asked.explain_over_ns), (Some(3), Some(12_000)));
        assert_eq!(options(&["--why", "12us", "-T", "7"]).explain_over_ns, Some(7_000));
    }

    #[test]
    fn steps_are_in_the_unit_that_is_shown() {
        let steps = |words: &[&str]| options(words).steps;
        assert_eq!(steps(&["hist"]), Some(StepWidth { step_ns: 1_000, steps: 256 }));
        assert_eq!(steps(&["hist", "-b", "5", "-E", "10"]), Some(StepWidth { step_ns: 5_000, steps: 10 }));
        assert_eq!(steps(&["hist", "-b", "5", "-n"]), Some(StepWidth { step_ns: 5, steps: 256 }));
        assert_eq!(steps(&["top"]), None);
    }

    #[test]
    fn each_part_of_the_histogram_can_be_left_out() {
        let shown = |words: &[&str]| {
            with(&[&["hist"], words].concat(), |plan| match plan.view {
                View::Hist { shown, is_live } => (shown, is_live),
                _ => panic!("not a histogram"),
            })
        };
        assert_eq!(shown(&["--no-irq"]).0.kinds, [false, true, true]);
        assert_eq!(shown(&["--no-thread"]).0.kinds, [true, false, true]);
        assert!(shown(&["--no-header"]).0.without_header && shown(&["--no-summary"]).0.without_summary);
        let (no_index, is_live) = shown(&["--no-index", "--with-zeros", "--live"]);
        assert!(no_index.without_index && no_index.with_zeros && is_live);
        assert!(is_refused(&["hist", "--no-index"]) && is_refused(&["hist", "--no-irq", "--no-thread"]));
    }

    #[test]
    fn options_of_the_tracer_are_passed_on() {
        let threads = |words: &[&str]| options(words).threads;
        assert_eq!(
            [threads(&["-U"]), threads(&["-k"]), threads(&["-u"]), threads(&[])],
            [Threads::Others, Threads::Kernel, Threads::User, Threads::Any]
        );
        let recorded = |words: &[&str]| options(words).record;
        let record = recorded(&["-t", "-e", "sched:sched_switch", "--filter", "a", "--trace-buffer-size", "64"]);
        let record = record.expect("a trace is asked for");
        assert_eq!((record.events.len(), record.events[0].filter.as_deref()), (1, Some("a")));
        assert_eq!(record.buffer_kb, Some(64));
        // Without an option that saves a trace, nothing is recorded.
        assert_eq!(recorded(&["-e", "sched:sched_switch"]), None);
        for words in [&["-a", "9"][..], &["--on-threshold", "trace", "-T", "9"], &["--on-end", "trace"]] {
            assert!(recorded(words).is_some(), "{words:?}");
        }
        // Without a threshold, the worst activations are recorded.
        let worst = |words: &[&str]| recorded(words).and_then(|record| record.worst);
        assert_eq!((worst(&["--on-end", "trace"]), worst(&["-t"])), (Some(RECORDED_WORST), None));
        assert_eq!(
            (options(&["-A", "0"]).aligned_ns, options(&["--aligned", "20"]).aligned_ns),
            (Some(0), Some(20_000))
        );
        let group = |words: &[&str]| with(words, |plan| plan.common.cgroup.clone());
        assert_eq!(
            (group(&["-C", "a"]), group(&["-C=a"]), group(&["-C", "-q"])),
            (Some("a".into()), Some("a".into()), Some(String::new()))
        );
        let stacks = options(&["-s", "9"]);
        assert_eq!((stacks.stacks, stacks.stack_over_ns), (true, Some(9_000)));
        assert_eq!(options(&["--backend", "tracer"]).backend.as_deref(), Some("tracer"));
    }

    #[test]
    fn rejects_invalid_options() {
        let wrong: [&[&str]; 15] = [
            &["--stack-format", "short"],
            &["-A", "2s"],
            &["-p", "99"],
            &["-c", "x"],
            &["-H", "3-1"],
            &["-P", "f:100"],
            &["--dma-latency", "10001"],
            &["--deepest-idle-state", "-2"],
            &["hist", "-b", "0"],
            &["hist", "-E", "9"],
            &["--on-threshold", "stop"],
            &["-u", "-k"],
            &["--aa-only", "5", "-a", "5"],
            &["-d", "0"],
            &["--why", "5"],
        ];
        for words in wrong {
            assert!(is_refused(words), "{words:?}");
        }
    }
}
