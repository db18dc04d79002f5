// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much longer a scheduler benchmark takes while `whylate irqsoff`, or another tool, watches.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::child::{POLL, Tool};
use crate::figures::{Spread, median, median_interval, verdict};
use crate::{kernel, machine, programs, results, whylate};

/// Limit of the median slowdown by `ticks`, and of the median time that a thread loses to it, in percent.
const LIMIT: f64 = 1.0;
/// A third of a second, so that the load of other machines on the host changes little during it.
const LOAD: [&str; 5] = ["bench", "sched", "pipe", "-l", "30000"];
/// How long a thread spins at a time.
const SPIN: Duration = Duration::from_millis(100);
/// A timeout that is far longer than the load takes.
const DEADLINE: Duration = Duration::from_secs(120);
/// Time from a watcher's first output until it is surely attached, and from its end until the kernel has patched its
/// code back.
const SETTLE: Duration = Duration::from_millis(200);
/// A common script for the question how late timers are, with a timer of 1 kHz on each CPU to answer it.
const SCRIPT: &str = "BEGIN { printf(\"ready\\n\"); } profile:hz:1000 { @ticks = count(); } tracepoint:timer:hrtimer_expire_entry { \
                      $timer = (struct hrtimer *)args->hrtimer; @late = hist(args->now - $timer->node.expires); }";
/// A timer of 1 kHz on each CPU with an empty program.
const TIMER: &str = "BEGIN { printf(\"ready\\n\"); } profile:hz:1000 { }";
const TICKS: [&str; 3] = ["irqsoff", "--backend", "ticks"];
const AT_1_MS: [&str; 5] = ["irqsoff", "--backend", "ticks", "--period", "1ms"];
/// Index of the subject with a limit in [`SUBJECTS`].
const OURS: usize = 0;
const SUBJECTS: [&str; 5] = [
    "`whylate irqsoff --backend ticks`",
    "`whylate irqsoff --backend ticks --period 1ms`",
    "a timer of 1 kHz on each CPU, with an empty program (bpftrace)",
    "bpftrace script on `hrtimer_expire_entry` with a timer of 1 kHz",
    "nobody: what the machine adds by itself",
];
/// The tracepoint that the other subjects need.
const EVENT: &str = "events/preemptirq/irq_disable";

/// Figures of each subject, one per watched pair of runs.
#[derive(Default)]
struct Figures {
    /// How much longer the load took, in percent.
    slowdown: [Vec<f64>; SUBJECTS.len()],
    /// How much more of its time a spinning thread lost, in percent.
    lost: [Vec<f64>; SUBJECTS.len()],
    /// How often `ticks` chose each period, by its own message.
    chosen: BTreeMap<String, usize>,
}

/// One run of the load, and of a spinning thread.
#[derive(Clone, Copy)]
struct Run {
    load_s: f64,
    lost_percent: f64,
}

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if machine::is_skipped(&[
        ("perf", "no perf: no load to watch"),
        ("bpftrace", "no bpftrace: nothing to compare with"),
    ]) {
        return Ok(true);
    }
    let program = whylate::build("bench-irqsoff")?;
    // Device interrupts often go to the first one.
    let cpu = machine::usable_cpus()?.pop().context("there is no CPU")?;
    // The first run fills caches.
    load_s(cpu)?;
    let mut figures = Figures::default();
    for number in 0..arguments.rounds as usize {
        eprintln!("round {} of {}", number + 1, arguments.rounds);
        // The others alternate.
        let mut both = [OURS, 1 + number % (SUBJECTS.len() - 1)];
        both.rotate_left(number / 2 % 2);
        let mut before = once(cpu)?;
        for which in both {
            before = figures.watch(&program, which, cpu, before)?;
        }
    }
    let share = share_of_programs_percent(&program, cpu)?;
    arguments.publish("irqsoff", &figures.report(share))?;
    Ok(median(&figures.slowdown[OURS]) <= LIMIT && median(&figures.lost[OURS]) <= LIMIT)
}

impl Figures {
    /// Measures two runs that a subject watches, against the unwatched ones right before and right after them. Returns
    /// the latter.
    fn watch(&mut self, whylate: &Path, which: usize, cpu: usize, before: Run) -> Result<Run> {
        let mut tool = start(whylate, which)?;
        if let Some(tool) = &mut tool {
            tool.first_output()?;
            thread::sleep(SETTLE);
        }
        let watched = [once(cpu)?, once(cpu)?];
        if let Some(tool) = tool {
            let said = tool.end()?;
            if which == OURS {
                *self.chosen.entry(period_of(&said)).or_default() += 1;
            }
            thread::sleep(SETTLE);
        }
        let after = once(cpu)?;
        let load_s = |[one, other]: [Run; 2]| one.load_s + other.load_s;
        let lost = |[one, other]: [Run; 2]| (one.lost_percent + other.lost_percent) / 2.0;
        self.slowdown[which].push(100.0 * (load_s(watched) / load_s([before, after]) - 1.0));
        self.lost[which].push(lost(watched) - lost([before, after]));
        Ok(after)
    }

    fn report(&self, share_percent: f64) -> String {
        let rounds = self.slowdown[OURS].len();
        let arguments = format!("irqsoff --rounds {rounds}");
        let mut text = results::heading("What `whylate irqsoff` costs", "bench-irqsoff", &arguments);
        text += &format!(
            "\nSlowdown of `perf {}` on one CPU, {rounds} rounds. In a round `ticks` watches, and one of the others in \
             turn: two runs each, with one right before and one right after them that nobody watches. Medians, with the interval in which \
             the median lies by a confidence of 95 % (sign test), and the smallest and the largest.\n\n\
             | watcher | slowdown | 95 % interval | from, to | limit | |\n|---|--:|--:|--:|--:|---|\n",
            LOAD.join(" "),
        );
        text += &lines(&self.slowdown);
        if !Path::new("/sys/kernel/tracing").join(EVENT).exists() {
            text += "| `events`, `tracer`, a script on the events | this kernel has no such events, and no such tracer: see below | | | | |\n";
        }
        text += &format!(
            "\nMeanwhile, for {} ms after each run, how much more of its time a thread loses that does nothing on that CPU but read the \
             clock: interrupts, their programs and what the hypervisor does for them, and not what they throw out of caches. Times of \
             {} us and longer, in which others had the CPU, are left out.\n\n\
             | watcher | lost | 95 % interval | from, to | limit | |\n|---|--:|--:|--:|--:|---|\n",
            SPIN.as_millis(),
            OTHER_TASK.as_micros()
        );
        text += &lines(&self.lost);
        text += "\nWithout `--period`, `ticks` measures what a timer's interrupt costs and chooses its period by that. Here it has chosen:\n\n";
        for (period, times) in &self.chosen {
            text += &format!("- {period}: {times} times\n");
        }
        text += &format!(
            "\nThe BPF programs of `ticks` at 1 ms take {share_percent:.2} % of each CPU, as the kernel counts them \
             (`BPF_ENABLE_STATS`). The rest is the timer's interrupt, which costs as much without them.\n"
        );
        text
    }
}

/// Parses the period from its message at startup.
fn period_of(said: &str) -> String {
    let period =
        said.split_once("heartbeats come every ").and_then(|(_, rest)| rest.split_once(" (")).map(|(period, _)| period);
    period.unwrap_or("1 ms").to_owned()
}

fn lines(figures: &[Vec<f64>]) -> String {
    let subjects = SUBJECTS.iter().zip(figures).enumerate();
    subjects.map(|(which, (name, figures))| line(name, figures, (which == OURS).then_some(LIMIT))).collect()
}

fn line(name: &str, figures: &[f64], limit: Option<f64>) -> String {
    let Spread { median, min: min_percent, max: max_percent } = Spread::from_values(figures);
    let (limit, judged) = limit.map_or_else(Default::default, |limit| (format!("{limit} %"), verdict(median, limit)));
    let interval = median_interval(figures)
        .map_or_else(|| "too few rounds".to_owned(), |(low, high)| format!("{low:.2} to {high:.2} %"));
    format!("| {name} | {median:.2} % | {interval} | {min_percent:.2}, {max_percent:.2} % | {limit} | {judged} |\n")
}

fn start(whylate: &Path, which: usize) -> Result<Option<Tool>> {
    let tool = match which {
        OURS => Tool::start(whylate, &TICKS),
        1 => Tool::start(whylate, &AT_1_MS),
        2 => Tool::start("bpftrace", &["-e", TIMER]),
        3 => Tool::start("bpftrace", &["-e", SCRIPT]),
        _ => return Ok(None),
    };
    tool.map(Some)
}

fn once(cpu: usize) -> Result<Run> {
    Ok(Run { load_s: load_s(cpu)?, lost_percent: lost_percent(cpu)? })
}

/// A gap between two clock readings from this on is an interrupt or another disturbance; a reading takes far less.
const MIN_GAP: Duration = Duration::from_nanos(500);
/// A longer gap is another task on the CPU, not an interrupt.
const OTHER_TASK: Duration = Duration::from_micros(200);

/// Returns how much of its time a thread loses on this CPU, in percent.
fn lost_percent(cpu: usize) -> Result<f64> {
    let spinning = thread::spawn(move || {
        machine::pin_to(cpu)?;
        let (mut lost, mut away) = (Duration::ZERO, Duration::ZERO);
        let began = Instant::now();
        let mut last = began;
        while last - began < SPIN {
            let now = Instant::now();
            match now - last {
                gap if gap >= OTHER_TASK => away += gap,
                gap if gap >= MIN_GAP => lost += gap,
                _ => {}
            }
            last = now;
        }
        anyhow::Ok(100.0 * lost.as_secs_f64() / (last - began - away).as_secs_f64())
    });
    spinning.join().map_err(|_| anyhow!("the thread that spins failed"))?
}

/// Returns the run time of the BPF programs of `ticks` under the load, in percent of all CPUs' time. Counting slows
/// them down.
fn share_of_programs_percent(whylate: &Path, cpu: usize) -> Result<f64> {
    let _counting = kernel::count_run_times()?;
    let mut tool = Tool::start(whylate, &AT_1_MS)?;
    tool.first_output()?;
    let (before, began) = (programs::of_process(tool.pid())?, Instant::now());
    for _ in 0..5 {
        load_s(cpu)?;
    }
    let (after, took) = (programs::of_process(tool.pid())?, began.elapsed());
    tool.end()?;
    let cpus = thread::available_parallelism()?.get();
    let run_ns: u64 = programs::difference(&before, &after).iter().map(|counts| counts.run_ns).sum();
    ensure!(run_ns > 0, "no BPF program has run");
    Ok(100.0 * run_ns as f64 / (took.as_nanos() as f64 * cpus as f64))
}

/// Returns how long the load takes on this CPU, by its own clock. It is killed at the deadline.
fn load_s(cpu: usize) -> Result<f64> {
    let mut command = Command::new("taskset");
    command.args(["-c", &cpu.to_string(), "perf"]).args(LOAD);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = kernel::die_with_parent(&mut command).spawn().context("cannot start the load")?;
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > DEADLINE {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the load does not end");
        }
        thread::sleep(POLL);
    };
    ensure!(status.success(), "the load failed, {status}");
    let mut text = String::new();
    // It prints a few lines, which fit into a pipe.
    child.stdout.take().context("the load has no output")?.read_to_string(&mut text)?;
    total_s(&text).with_context(|| format!("the load does not tell its time: {text}"))
}

/// Parses `Total time: 1.234 [sec]`.
fn total_s(text: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.trim().strip_prefix("Total time:"))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_total_time_of_load() {
        assert_eq!(total_s("# Running\n\n     Total time: 0.152 [sec]\n"), Some(0.152));
        assert_eq!(total_s("Total: none"), None);
    }

    #[test]
    fn parses_chosen_period() {
        let said = "whylate: a timer interrupt costs 14.1 us here, so heartbeats come every 2 ms (irqsoff --period 1ms for finer bounds)";
        assert_eq!(period_of(said), "2 ms");
        assert_eq!(period_of("whylate: irqsoff uses the ticks backend: it is asked for"), "1 ms");
    }

    #[test]
    fn row_has_confidence_interval() {
        let slowdowns = [0.5, 0.25, 0.75, 1.0, 1.25, 1.5];
        assert_eq!(line("x", &slowdowns, Some(1.0)), "| x | 0.88 % | 0.25 to 1.50 % | 0.25, 1.50 % | 1 % | pass |\n");
        assert!(line("x", &slowdowns[..2], None).contains("| too few rounds |"));
    }
}
