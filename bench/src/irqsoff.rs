// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slowdown of a scheduler benchmark by `whylate irqsoff` and by other tools, and the time that a thread loses to them.
//! In a virtual machine with a kernel that has the events, the tracers and a module that makes delays: the slowdown by
//! each backend, and what each reports of delays of known length.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use whylate_model::{LateEvent, Snapshot};

use crate::drivers::{Slowdown, slowdown};
use crate::loads::{Load, OTHER_TASK, SPIN};
use crate::results::{Arguments, Section};
use crate::subject::{Ready, Subject};
use crate::table::{Figure, Show, column, grid, lines, median};
use crate::{kernel, machine, vm};

/// A common script for the question how late timers are, with a timer of 1 kHz on each CPU to answer it.
const SCRIPT: &str = "BEGIN { printf(\"ready\\n\"); } profile:hz:1000 { @ticks = count(); } tracepoint:timer:hrtimer_expire_entry { \
                      $timer = (struct hrtimer *)args->hrtimer; @late = hist(args->now - $timer->node.expires); }";
/// A timer of 1 kHz on each CPU with an empty program.
const TIMER: &str = "BEGIN { printf(\"ready\\n\"); } profile:hz:1000 { }";
const OURS: usize = 0;
const AT_1_MS: usize = 1;
/// The tracepoint that the other backends need.
const EVENT: &str = "/sys/kernel/tracing/events/preemptirq/irq_disable";

fn subjects(whylate: &str) -> [Subject; 5] {
    let tool = |name, command: &[&str]| Subject::new(name, "", command, Ready::Output);
    let at_1_ms = [whylate, "irqsoff", "--backend", "ticks", "--period", "1ms"];
    [
        tool("`whylate irqsoff --backend ticks`", &at_1_ms[..4]),
        tool("`whylate irqsoff --backend ticks --period 1ms`", &at_1_ms),
        tool("a timer of 1 kHz on each CPU, with an empty program (bpftrace)", &["bpftrace", "-e", TIMER]),
        tool("bpftrace script on `hrtimer_expire_entry` with a timer of 1 kHz", &["bpftrace", "-e", SCRIPT]),
        Subject::nothing(),
    ]
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let tools = [("perf", "no perf: no load to watch"), ("bpftrace", "no bpftrace: nothing to compare with")];
    let Some(program) = arguments.prepare("bench-irqsoff", &tools)? else { return Ok(true) };
    let subjects = subjects(&program.to_string_lossy());
    // Device interrupts often go to the first CPU.
    let (_, cpu) = machine::two_cpus()?;
    // Tools are not pinned to another CPU, as their timers run on each.
    let unwatched = Load { is_pinned: false, ..Load::pipe_and_spin(cpu) };
    let watched = Load { runs: 2, ..unwatched.clone() };
    // The first run fills caches.
    unwatched.run()?;
    let mut samples = subjects.each_ref().map(|_| Vec::<Slowdown>::new());
    let mut periods = BTreeMap::<String, usize>::new();
    let rounds = arguments.rounds as usize;
    for number in 0..rounds {
        eprintln!("round {} of {rounds}", number + 1);
        // The others alternate.
        let mut both = [OURS, 1 + number % (subjects.len() - 1)];
        both.rotate_left(number / 2 % 2);
        let mut before = unwatched.run()?;
        for which in both {
            let (sample, errors) = slowdown(&watched, &unwatched, &subjects[which], before)?;
            before = sample.after.clone();
            samples[which].push(sample);
            if which == OURS {
                *periods.entry(period(&errors)).or_default() += 1;
            }
        }
    }
    let share_percent = programs_percent(&subjects[AT_1_MS], &unwatched)?;

    let ours = &samples[OURS];
    let rows =
        || subjects.iter().zip(&samples).map(|(subject, samples)| (subject.name.to_owned(), samples.iter().collect()));
    let lost = [
        column("lost", Show::Median(2), " %", Slowdown::lost_percent),
        column("95 % interval", Show::Interval(2), " %", Slowdown::lost_percent),
        column("from, to", Show::Range(2), " %", Slowdown::lost_percent),
    ];
    let slowdowns = [
        column("slowdown", Show::Median(2), " %", Slowdown::percent),
        column("95 % interval", Show::Interval(2), " %", Slowdown::percent),
        column("from, to", Show::Range(2), " %", Slowdown::percent),
    ];
    let periods: Vec<String> = periods.iter().map(|(period, times)| format!("- {period}: {times} times")).collect();
    let mut section = Section::new(arguments, "irqsoff")
        .figures([
            Figure::median("slowdown by `ticks`", 2, ours, Slowdown::percent).unit("%").at_most(1.0),
            Figure::median("time that a thread loses to `ticks`", 2, ours, Slowdown::lost_percent)
                .unit("%")
                .at_most(1.0),
        ])
        .values(&[
            ("load", &unwatched.name),
            ("spin_ms", &SPIN.as_millis()),
            ("other_task_us", &OTHER_TASK.as_micros()),
        ])
        .add("slowdowns", grid("watcher", &slowdowns, rows()))
        .add("lost", grid("watcher", &lost, rows()))
        .values(&[("periods", &periods.join("\n")), ("programs_percent", &format!("{share_percent:.2}"))]);
    if !Path::new(EVENT).exists() {
        let row = "| `events`, `tracer`, a script on the events | this kernel has no such events, and no such tracer: see below | | |";
        section = section.line("slowdowns", row);
    }
    section.publish()
}

/// Parses the period from its message at startup.
fn period(errors: &str) -> String {
    let rest = errors.split_once("heartbeats come every ").and_then(|(_, rest)| rest.split_once(" ("));
    rest.map_or("1 ms", |(period, _)| period).to_owned()
}

/// Returns the run time of a subject's BPF programs under the load, in percent of all CPUs' time. Counting slows them
/// down.
fn programs_percent(subject: &Subject, load: &Load) -> Result<f64> {
    let _counting = kernel::count_run_times()?;
    let load = Load { runs: 5, ..load.clone() };
    let running = subject.start(false)?;
    let began = Instant::now();
    let (_, programs) = running.count(|| load.run())?;
    let took = began.elapsed();
    running.end()?;
    let run_ns: u64 = programs.iter().map(|counts| counts.run_ns).sum();
    ensure!(run_ns > 0, "no BPF program has run");
    Ok(100.0 * run_ns as f64 / (took.as_nanos() as f64 * thread::available_parallelism()?.get() as f64))
}

const KERNEL: &str = "6.12-tracers";
/// Delays, kinds of delays and backends of the script, of which one backend does not measure one kind.
const MEASURED: usize = 4 * (2 * 4 - 1);
/// Suffix of a backend that measures all CPUs, the default. The others measure the CPU with the delays only.
const ALL_CPUS: &str = "-all";
/// Gives the module and the backends one clock: on a busy host the kernel calibrates each wrongly.
const ONE_CLOCK: &str = "tsc=reliable clocksource=tsc";
/// Part of the names of the module's functions that make a delay.
const MAKER: &str = "preemptirqtest";
/// Maximum error of the median length by exact backends: one of the two.
const APART_PERCENT: f64 = 2.0;
const APART_US: f64 = 20.0;

/// What a backend reported of the delays of one kind.
#[derive(Clone, Debug, Default)]
struct Row {
    backend: String,
    mode: String,
    length_us: u64,
    /// Reported length less the real one, per delay.
    errors_us: Vec<f64>,
    /// How many name the function that made the delay; all of them, for exact lengths.
    named: usize,
    /// For backends with an upper bound: how many delays lie between the bounds.
    within: Option<usize>,
    /// Other sections that were at least as long.
    longer: usize,
    function: String,
    lost: u64,
}

pub fn run_in_vm(arguments: &Arguments) -> Result<bool> {
    let times = arguments.rounds as usize;
    let before = ["--timeout", "3000", "--append", ONE_CLOCK, "--"];
    let text = vm::run(KERNEL, &before, include_str!("irqsoff_vm.sh"), &[&times.to_string()])?;
    let rows = rows(&text)?;
    ensure!(rows.len() == MEASURED, "{} of {MEASURED} were measured", rows.len());
    let heads = "backend | off | >delay (us) | >reported | function | within bounds | >median error (us) | >worst error (us) | >longer | >lost";
    let table = lines(heads, rows.iter().map(|row| row.cells(times)));
    Section::new(arguments, "irqsoff-vm")
        .figures(figures(&rows, times))
        .values(&[("kernel", &KERNEL), ("table", &table)])
        .publish()
}

fn rows(text: &str) -> Result<Vec<Row>> {
    let parse = |(words, rest): (Vec<&str>, _)| {
        let [backend, mode, length_us] = words[..] else { return None };
        Some(row(backend, mode, length_us.parse().ok()?, rest))
    };
    vm::parts(text).filter_map(parse).collect()
}

fn row(backend: &str, mode: &str, length_us: u64, json: &str) -> Result<Row> {
    let mut row = Row { backend: backend.to_owned(), mode: mode.to_owned(), length_us, ..Row::default() };
    let mut snapshots = 0;
    for line in json.lines().filter(|line| line.starts_with('{')) {
        let snapshot: Snapshot = serde_json::from_str(line)?;
        let wanted = backend.trim_end_matches(ALL_CPUS);
        ensure!(snapshot.backend == wanted, "{} measured, not {wanted}", snapshot.backend);
        snapshots += 1;
        // `late_events` counts events that did not fit into a line, or were not read in time.
        let reasons = ["traces", "late_events", "unseen"];
        row.lost += reasons.iter().filter_map(|reason| snapshot.lost.get(*reason)).sum::<u64>();
        snapshot.late.iter().for_each(|event| row.add(event));
    }
    ensure!(snapshots > 0, "{backend} printed nothing");
    Ok(row)
}

impl Row {
    fn add(&mut self, event: &LateEvent) {
        let label = |name: &str| event.labels.get(name).map_or("", String::as_str);
        let latency_us = event.latency_ns as f64 / 1e3;
        let length_us = self.length_us as f64;
        let is_of_thread = label("task").starts_with(&format!("{}_test:", self.mode));
        // A backend with exact lengths also reports sections of interrupts that came in during a delay.
        let is_delay = match event.at_most_ns {
            Some(_) => event.stack.iter().any(|frame| frame.contains(MAKER)),
            None => label("function").contains(MAKER),
        };
        if !is_of_thread || !is_delay {
            self.longer += usize::from(latency_us >= length_us);
            return;
        }
        self.errors_us.push(latency_us - length_us);
        if label("function").contains(MAKER) {
            self.named += 1;
            self.function = label("function").to_owned();
        }
        if let Some(at_most_ns) = event.at_most_ns {
            let is_within = latency_us <= length_us + self.allowed_us() && at_most_ns as f64 / 1e3 >= length_us;
            *self.within.get_or_insert(0) += usize::from(is_within);
        }
    }

    fn worst_us(&self) -> f64 {
        self.errors_us.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0)
    }

    fn allowed_us(&self) -> f64 {
        APART_US.max(self.length_us as f64 * APART_PERCENT / 100.0)
    }

    fn cells(&self, times: usize) -> String {
        let Row { backend, mode, length_us, errors_us, named, function, longer, lost, .. } = self;
        let reported = errors_us.len();
        let within = self.within.map_or_else(|| "exact".to_owned(), |within| format!("{within} of {reported}"));
        let about = match reported {
            0 => "none |  |  | ".to_owned(),
            _ => format!("`{function}` in {named} | {within} | {:.1} | {:.1}", median(errors_us), self.worst_us()),
        };
        format!("{backend} | {mode} | {length_us} | {reported} of {times} | {about} | {longer} | {lost}")
    }
}

/// Returns the figures with limits: those of the backends with exact lengths.
fn figures(rows: &[Row], times: usize) -> Vec<Figure> {
    let exact = rows.iter().filter(|row| row.backend != "ticks" && !row.backend.ends_with(ALL_CPUS));
    let errors = exact.map(|row| {
        let name = format!("median error of `{}`, {} us, {} (us)", row.backend, row.length_us, row.mode);
        let error_us = if row.errors_us.is_empty() { f64::NAN } else { median(&row.errors_us).abs() };
        Figure::new(name, error_us, 1).at_most(row.allowed_us())
    });
    let events = rows.iter().filter(|row| row.backend == "events");
    let missed = events.clone().map(|row| times.abs_diff(row.errors_us.len())).sum::<usize>();
    let name = format!("delays that `events` missed, of {}", events.count() * times);
    errors.chain([Figure::new(name, missed as f64, 0).at_most(0.0)]).collect()
}

/// The watchers, with the names of their rows.
const VM_SUBJECTS: [(&str, &str); 5] = [
    ("events", "`whylate irqsoff --backend events`"),
    ("tracer", "`whylate irqsoff --backend tracer`"),
    ("bare", "the kernel's tracer `irqsoff` alone, `function-trace` off"),
    ("bpftrace", "bpftrace script on `preemptirq:irq_disable` and `irq_enable`"),
    ("ticks", "`whylate irqsoff --backend ticks`"),
];
/// Takes a second or two there.
const VM_LOAD: &str = "perf bench sched messaging -g 1 -l 100";

/// A minimal script for the question.
const BPFTRACE: &str = "BEGIN { printf(\"ready\\n\"); } tracepoint:preemptirq:irq_disable { @start[cpu] = nsecs; } \
                        tracepoint:preemptirq:irq_enable /@start[cpu]/ { @length = hist(nsecs - @start[cpu]); delete(@start[cpu]); }";

/// No figure has a limit: only the order of emulated figures means anything.
pub fn run_cost_in_vm(arguments: &Arguments) -> Result<bool> {
    let rounds = arguments.rounds.to_string();
    let (load, script) = (format!("LOAD={VM_LOAD}"), format!("SCRIPT={BPFTRACE}"));
    let before = ["--timeout", "3000", "--with", "perf", "--with", "bpftrace", "--", &load, &script];
    let text = vm::run(KERNEL, &before, include_str!("irqsoff_vm_cost.sh"), &[&rounds])?;
    ensure!(text.contains("@ end"), "the virtual machine failed: {text}");
    let slowdowns = slowdowns(&text)?;
    let rows = VM_SUBJECTS.map(|(key, name)| {
        let samples = slowdowns.iter().filter(|(watcher, _)| *watcher == key).map(|(_, percent)| percent);
        (name.to_owned(), samples.collect::<Vec<_>>())
    });
    if let Some((name, _)) = rows.iter().find(|(_, samples)| samples.is_empty()) {
        anyhow::bail!("{name} was not measured");
    }
    let columns = [
        column("slowdown", Show::Spread(2), " %", |percent: &f64| *percent),
        column("first quartile", Show::Quartile(2), " %", |percent| *percent),
    ];
    Section::new(arguments, "irqsoff-vm-cost")
        .values(&[("kernel", &KERNEL), ("load", &VM_LOAD), ("table", &grid("watcher", &columns, rows))])
        .publish()
}

/// Parses lines such as `@ nothing 1.234` and `@ ticks 1.235`, in the order in which they ran. Returns the slowdown in
/// percent of each watched run, against the mean of the unwatched runs right before and right after it.
fn slowdowns(text: &str) -> Result<Vec<(&str, f64)>> {
    let runs: Vec<(&str, f64)> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("@ ")?.split_once(' '))
        .map(|(name, seconds)| Ok((name, seconds.parse().with_context(|| format!("{name} has no time: {seconds}"))?)))
        .collect::<Result<_>>()?;
    let watched = runs.windows(3).filter_map(|neighbors| match *neighbors {
        [("nothing", before_s), (name, watched_s), ("nothing", after_s)] => {
            Some((name, 100.0 * (2.0 * watched_s / (before_s + after_s) - 1.0)))
        }
        _ => None,
    });
    Ok(watched.collect())
}

#[cfg(test)]
#[path = "../unit/irqsoff.rs"]
mod tests;
