// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slowdown of a scheduler benchmark by `whylate irqsoff` and by other tools, and the time that a thread loses to them.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::drivers::{Slowdown, slowdown};
use crate::loads::{Load, OTHER_TASK, SPIN};
use crate::results::{Arguments, Section};
use crate::subject::{Ready, Subject};
use crate::table::{Figure, Show, column};
use crate::{kernel, machine};

/// Limit of the median slowdown by `ticks`, and of the median time that a thread loses to it, in percent.
const LIMIT: f64 = 1.0;
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
    let command = format!("irqsoff --rounds {rounds}");
    let mut section = Section::new(arguments, "irqsoff", "Cost of `whylate irqsoff`", "bench-irqsoff", &command)
        .figures([
            Figure::median("slowdown by `ticks`", 2, ours, Slowdown::percent).unit("%").at_most(LIMIT),
            Figure::median("time that a thread loses to `ticks`", 2, ours, Slowdown::lost_percent).unit("%").at_most(LIMIT),
        ])
        .text(&format!(
            "Slowdown of `{}`, {rounds} rounds. In a round `ticks` watches, and one of the others in \
             turn: two runs each, with an unwatched one right before and one right after them. Medians, with their 95 % confidence \
             interval (sign test), and the smallest and the largest.",
            unwatched.name
        ))
        .grid(
            "watcher",
            &[
                column("slowdown", Show::Median(2), " %", Slowdown::percent),
                column("95 % interval", Show::Interval(2), " %", Slowdown::percent),
                column("from, to", Show::Range(2), " %", Slowdown::percent),
            ],
            rows(),
        );
    if !Path::new(EVENT).exists() {
        section = section.row("`events`, `tracer`, a script on the events | this kernel has no such events, and no such tracer: see below | | ");
    }
    section = section
        .text(&format!(
            "After each run, for {} ms, a thread does nothing on that CPU but read the clock. The time that it loses is that of interrupts, \
             their programs and the hypervisor's work for them, without the effect of evicted caches. Times of {} us and longer, in which \
             other threads were on the CPU, are left out.",
            SPIN.as_millis(),
            OTHER_TASK.as_micros()
        ))
        .grid(
            "watcher",
            &[
                column("lost", Show::Median(2), " %", Slowdown::lost_percent),
                column("95 % interval", Show::Interval(2), " %", Slowdown::lost_percent),
                column("from, to", Show::Range(2), " %", Slowdown::lost_percent),
            ],
            rows(),
        )
        .text("Without `--period`, `ticks` measures the cost of a timer's interrupt and chooses its period by that. Here it has chosen:")
        .text(&periods.iter().map(|(period, times)| format!("- {period}: {times} times\n")).collect::<String>());
    section
        .text(&format!(
            "The BPF programs of `ticks` at 1 ms take {share_percent:.2} % of each CPU, as the kernel counts them \
             (`BPF_ENABLE_STATS`). The rest is the timer's interrupt, which costs as much without them."
        ))
        .publish()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_chosen_period() {
        let errors = "whylate: a timer interrupt costs 14.1 us here, so heartbeats come every 2 ms (irqsoff --period 1ms for finer bounds)";
        assert_eq!(period(errors), "2 ms");
        assert_eq!(period("whylate: irqsoff uses the ticks backend: it is asked for"), "1 ms");
    }
}
