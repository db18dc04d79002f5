// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much longer a scheduler benchmark takes while `whylate irqsoff` or what people use today watches.

use std::ffi::OsStr;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::geteuid;

use crate::child::{POLL, Tool};
use crate::figures::{median, median_interval, word};
use crate::{kernel, machine, programs, results, whylate};

/// Of the median slowdown of `ticks`, in percent.
const LIMIT: f64 = 1.0;
/// A third of a second: what other machines of the same host do changes little meanwhile.
const LOAD: [&str; 5] = ["bench", "sched", "pipe", "-l", "50000"];
/// Far longer than it takes.
const DEADLINE: Duration = Duration::from_secs(120);
/// From a watcher's first output until it is surely attached, and from its end until the kernel has put its code back.
const SETTLE: Duration = Duration::from_millis(200);
/// What people write for the same question: how late timers are, with a timer of 1 kHz on each CPU to ask it.
const SCRIPT: &str = "BEGIN { printf(\"ready\\n\"); } profile:hz:1000 { @ticks = count(); } tracepoint:timer:hrtimer_expire_entry { \
                      $timer = (struct hrtimer *)args->hrtimer; @late = hist(args->now - $timer->node.expires); }";
/// A timer of 1 kHz on each CPU, whose program does nothing.
const TIMER: &str = "BEGIN { printf(\"ready\\n\"); } profile:hz:1000 { }";
const TICKS: [&str; 3] = ["irqsoff", "--backend", "ticks"];
/// Where they are in [`SUBJECTS`].
const OURS: usize = 0;
const TIMER_ALONE: usize = 2;
const NOBODY: usize = 4;
const SUBJECTS: [&str; 5] = [
    "`whylate irqsoff --backend ticks` (1 ms)",
    "`whylate irqsoff --backend ticks --period 2ms`",
    "a timer of 1 kHz on each CPU, with an empty program (bpftrace)",
    "bpftrace script on `hrtimer_expire_entry` with a timer of 1 kHz",
    "nobody: what the machine adds by itself",
];
/// What the running kernel must have to be watched by the others.
const EVENT: &str = "events/preemptirq/irq_disable";

/// The slowdown by each subject, in percent, in one round.
type Round = [f64; SUBJECTS.len()];

/// Returns whether every figure is within its limit.
pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if !geteuid().is_root() {
        println!("skipped: needs root");
        return Ok(true);
    }
    for (tool, why) in [("perf", "no load to watch"), ("bpftrace", "nothing to compare with")] {
        if Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
            println!("skipped: no {tool}: {why}");
            return Ok(true);
        }
    }
    let program = whylate::build("bench-irqsoff")?;
    let cpu = last_cpu()?;
    // The first run fills caches.
    load_s(cpu)?;
    let mut rounds = Vec::new();
    for number in 1..=arguments.rounds {
        eprintln!("round {number} of {}", arguments.rounds);
        let mut round = Round::default();
        for turn in 0..SUBJECTS.len() {
            // They take turns at being first.
            let which = (turn + number as usize) % SUBJECTS.len();
            round[which] = slowdown_percent(&program, which, cpu)?;
        }
        rounds.push(round);
    }
    let share = share_of_programs_percent(&program, cpu)?;
    arguments.publish("irqsoff", &report(&rounds, share))?;
    Ok(median(&of(&rounds, OURS)) <= LIMIT)
}

/// The last one that this process may use: interrupts of devices are often on the first.
fn last_cpu() -> Result<usize> {
    let allowed = rustix::thread::sched_getaffinity(None).context("cannot tell which CPUs there are")?;
    (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu)).context("there is no CPU")
}

fn of(rounds: &[Round], which: usize) -> Vec<f64> {
    rounds.iter().map(|round| round[which]).collect()
}

fn report(rounds: &[Round], share_percent: f64) -> String {
    let mut text = format!(
        "## What `whylate irqsoff` costs\n\nCommand: `make bench-irqsoff` (`cargo run --release -p whylate-bench -- irqsoff --rounds \
         {}`)\n\n{}\nSlowdown of `perf {}` on one CPU, {} rounds. In a round, each watcher watches two runs, and nobody watches one right \
         before and one right after them; the watchers take turns at being first. Medians, with the interval in which the median lies by \
         a confidence of 95 % (sign test), and the smallest and the largest.\n\n\
         | watcher | slowdown | 95 % interval | from, to | limit | |\n|---|--:|--:|--:|--:|---|\n",
        rounds.len(),
        machine::describe(),
        LOAD.join(" "),
        rounds.len(),
    );
    for (which, name) in SUBJECTS.iter().enumerate() {
        text += &line(name, &of(rounds, which), (which == OURS).then_some(LIMIT));
    }
    let beyond: Vec<f64> = rounds.iter().map(|round| round[OURS] - round[TIMER_ALONE]).collect();
    text += &line("what `ticks` (1 ms) costs beyond the timer alone", &beyond, None);
    if !Path::new("/sys/kernel/tracing").join(EVENT).exists() {
        text += "| `events`, `tracer`, a script on the events | this kernel has no such events, and no such tracer: see below | | | | |\n";
    }
    text += &format!(
        "\nThe BPF programs of `ticks` (1 ms) take {share_percent:.2} % of each CPU, as the kernel counts them (`BPF_ENABLE_STATS`). The \
         rest is the timer's interrupt, which costs as much without them.\n"
    );
    text
}

fn line(name: &str, slowdowns: &[f64], limit: Option<f64>) -> String {
    let median = median(slowdowns);
    let (limit, judged) = limit.map_or_else(Default::default, |limit| (format!("{limit} %"), word(median, limit)));
    let interval = median_interval(slowdowns)
        .map_or_else(|| "too few rounds".to_owned(), |(low, high)| format!("{low:.2} to {high:.2} %"));
    let least = slowdowns.iter().copied().fold(f64::INFINITY, f64::min);
    let most = slowdowns.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("| {name} | {median:.2} % | {interval} | {least:.2}, {most:.2} % | {limit} | {judged} |\n")
}

/// Of two runs that a subject watches, beside the runs right before and right after them.
fn slowdown_percent(whylate: &Path, which: usize, cpu: usize) -> Result<f64> {
    let before_s = load_s(cpu)?;
    let mut tool = start(whylate, which)?;
    if let Some(tool) = &mut tool {
        tool.first_output()?;
        thread::sleep(SETTLE);
    }
    let watched_s = load_s(cpu)? + load_s(cpu)?;
    if let Some(tool) = tool {
        tool.end()?;
        thread::sleep(SETTLE);
    }
    let after_s = load_s(cpu)?;
    Ok(100.0 * (watched_s / (before_s + after_s) - 1.0))
}

fn start(whylate: &Path, which: usize) -> Result<Option<Tool>> {
    let bpftrace = OsStr::new("bpftrace");
    let slower = [&TICKS[..], &["--period", "2ms"]].concat();
    let tool = match which {
        OURS => Tool::start(whylate.as_os_str(), &TICKS),
        1 => Tool::start(whylate.as_os_str(), &slower),
        TIMER_ALONE => Tool::start(bpftrace, &["-e", TIMER]),
        NOBODY => return Ok(None),
        _ => Tool::start(bpftrace, &["-e", SCRIPT]),
    };
    tool.map(Some)
}

/// How long the BPF programs of `ticks` run under the load, in percent of the time of all CPUs. Counting makes them slower.
fn share_of_programs_percent(whylate: &Path, cpu: usize) -> Result<f64> {
    let _counting = kernel::count_run_times().context("the kernel does not count run times of BPF programs")?;
    let mut tool = Tool::start(whylate.as_os_str(), &TICKS)?;
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

/// How long the load takes on this CPU, by its own clock. It is ended at the deadline.
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
    // It prints some lines, which a pipe holds.
    child.stdout.take().context("the load has no output")?.read_to_string(&mut text)?;
    total_s(&text).with_context(|| format!("the load does not tell its time: {text}"))
}

/// From `Total time: 1.234 [sec]`.
fn total_s(text: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.trim().strip_prefix("Total time:"))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_tells_its_time() {
        assert_eq!(total_s("# Running\n\n     Total time: 0.152 [sec]\n"), Some(0.152));
        assert_eq!(total_s("Total: none"), None);
    }

    #[test]
    fn a_line_says_how_sure_it_is() {
        let slowdowns = [0.5, 0.25, 0.75, 1.0, 1.25, 1.5];
        assert_eq!(line("x", &slowdowns, Some(1.0)), "| x | 0.88 % | 0.25 to 1.50 % | 0.25, 1.50 % | 1 % | pass |\n");
        assert!(line("x", &slowdowns[..2], None).contains("| too few rounds |"));
    }
}
