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
use crate::figures::{first_quartile, median, word};
use crate::{kernel, machine, results, whylate};

/// Of the median slowdown of `ticks`, in percent.
const LIMIT: f64 = 1.0;
/// Some seconds of `perf bench sched messaging`.
const MESSAGING: [&str; 7] = ["bench", "sched", "messaging", "-g", "5", "-l", "500"];
/// Far longer than it takes.
const DEADLINE: Duration = Duration::from_secs(120);
/// From a watcher's first output until it is surely attached, and from its end until the kernel has put its code back.
const SETTLE: Duration = Duration::from_millis(300);
/// What people write for the same question: how late timers are, with a timer of 1 kHz on each CPU to ask it.
const SCRIPT: &str = "BEGIN { printf(\"ready\\n\"); } profile:hz:1000 { @ticks = count(); } tracepoint:timer:hrtimer_expire_entry { \
                      $timer = (struct hrtimer *)args->hrtimer; @late = hist(args->now - $timer->node.expires); }";
const SUBJECTS: [&str; 3] = [
    "`whylate irqsoff --backend ticks` (1 ms)",
    "bpftrace script on `hrtimer_expire_entry` with a timer of 1 kHz",
    "nobody: what the machine adds by itself",
];
/// What the running kernel must have to be watched by the others.
const EVENT: &str = "events/preemptirq/irq_disable";

/// A watched run, and the mean of the runs right before and right after it, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub watched_s: f64,
    pub bare_s: f64,
}

impl Sample {
    pub fn slowdown_percent(&self) -> f64 {
        100.0 * (self.watched_s / self.bare_s - 1.0)
    }
}

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
    let mut samples: [Vec<Sample>; SUBJECTS.len()] = Default::default();
    for number in 1..=arguments.rounds {
        eprintln!("round {number} of {}", arguments.rounds);
        let mut before_s = load_s()?;
        for turn in 0..SUBJECTS.len() {
            // They take turns at being first.
            let which = (turn + number as usize) % SUBJECTS.len();
            let watched_s = watched_s(&program, which)?;
            let after_s = load_s()?;
            samples[which].push(Sample { watched_s, bare_s: (before_s + after_s) / 2.0 });
            before_s = after_s;
        }
    }
    let rows: Vec<Row> = SUBJECTS.iter().zip(&samples).map(|(name, of)| Row::of(name, of)).collect();
    arguments.publish("irqsoff", &report(&rows, arguments.rounds))?;
    Ok(rows[0].median <= LIMIT)
}

/// What one watcher costs, in percent.
pub struct Row {
    name: &'static str,
    median: f64,
    quartile: f64,
    least: f64,
    most: f64,
}

impl Row {
    pub fn of(name: &'static str, samples: &[Sample]) -> Self {
        let slowdowns: Vec<f64> = samples.iter().map(Sample::slowdown_percent).collect();
        Row {
            name,
            median: median(&slowdowns),
            quartile: first_quartile(&slowdowns),
            least: slowdowns.iter().copied().fold(f64::INFINITY, f64::min),
            most: slowdowns.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }

    pub fn line(&self, limit: Option<f64>) -> String {
        let judged = limit.map_or(("".to_owned(), ""), |limit| (format!("{limit} %"), word(self.median, limit)));
        let Row { name, median, quartile, least, most } = self;
        format!(
            "| {name} | {median:.2} % ({least:.2} to {most:.2}) | {quartile:.2} % | {} | {} |\n",
            judged.0, judged.1
        )
    }
}

fn report(rows: &[Row], rounds: u32) -> String {
    let mut text = format!(
        "## What `whylate irqsoff` costs\n\nCommand: `make bench-irqsoff` (`cargo run --release -p whylate-bench -- irqsoff --rounds \
         {rounds}`)\n\n{}",
        machine::describe()
    );
    text += &how(&format!("perf {}", MESSAGING.join(" ")), rounds);
    for (index, row) in rows.iter().enumerate() {
        text += &row.line((index == 0).then_some(LIMIT));
    }
    if !Path::new("/sys/kernel/tracing").join(EVENT).exists() {
        text += "| `events`, `tracer`, a script on the events | this kernel has no such events, and no such tracer: see below | | | |\n";
    }
    text
}

/// What was done, and the heading of the table.
pub fn how(load: &str, rounds: u32) -> String {
    format!(
        "\nSlowdown of `{load}`, {rounds} rounds: each watched run is compared with the mean of the runs right before and right after \
         it, which nobody watches; the watchers take turns at being first. Medians; in brackets the smallest and the largest.\n\n\
         | watcher | slowdown | first quartile | limit | |\n|---|--:|--:|--:|---|\n"
    )
}

/// How long the load takes while a subject watches.
fn watched_s(whylate: &Path, which: usize) -> Result<f64> {
    let mut tool = match which {
        0 => Tool::start(whylate.as_os_str(), &["irqsoff", "--backend", "ticks"])?,
        1 => Tool::start(OsStr::new("bpftrace"), &["-e", SCRIPT])?,
        _ => return load_s(),
    };
    tool.first_output()?;
    thread::sleep(SETTLE);
    let seconds = load_s()?;
    tool.end()?;
    thread::sleep(SETTLE);
    Ok(seconds)
}

/// How long the load takes, by its own clock. It is ended at the deadline.
fn load_s() -> Result<f64> {
    let mut command = Command::new("perf");
    command.args(MESSAGING).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
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
    fn slowdowns_are_of_the_runs_around() {
        let sample = Sample { watched_s: 1.02, bare_s: 1.0 };
        assert!((sample.slowdown_percent() - 2.0).abs() < 1e-9);
    }
}
