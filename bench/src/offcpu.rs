// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `whylate offcpu` costs a thread and a switch, beside other means, and how soon its flame graph is there.

mod naming;
pub mod sleepers;
mod slowdown;
mod walks;

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use anyhow::Result;
use rustix::process::geteuid;

use self::slowdown::{SUBJECTS, Slowdowns};
use self::walks::{Cost, Steady};
use crate::figures::{median, word};
use crate::{machine, results, whylate};

/// Of a look at a thread that has not run, and of the user stack of one that has.
const UNCHANGED_LIMIT_NS: f64 = 400.0;
const USER_STACK_LIMIT_NS: f64 = 2_000.0;
/// How many times a look costs that reads a file of /proc.
const PROC_RATIO: f64 = 30.0;
const STEADY_LIMIT_PERCENT: f64 = 5.0;
const GRAPH_LIMIT_MS: f64 = 300.0;
const NAMES_LIMIT_MS: f64 = 500.0;
const SAMPLE_LIMIT_PERCENT: f64 = 3.0;
/// Of what offcputime adds to a switch.
const TRACE_RATIO: f64 = 0.7;

/// Returns whether every figure is within its limit.
pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if !geteuid().is_root() {
        println!("skipped: needs root");
        return Ok(true);
    }
    for (tool, why) in [("perf", "no load to watch"), ("offcputime", "nothing to compare with")] {
        if Command::new(tool).arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
            println!("skipped: no {tool}: {why}");
            return Ok(true);
        }
    }
    let program = whylate::build("bench-offcpu")?;
    let names_ms = naming::names_ms()?;
    let graphs = (0..arguments.rounds).map(|_| naming::first_graph_ms(&program)).collect::<Result<Vec<_>>>()?;
    let mut costs = Vec::new();
    for threads in walks::THREADS {
        let cost = walks::measure(threads, arguments.rounds)?;
        eprintln!("{cost:?}");
        costs.push(cost);
    }
    let steady = walks::steady()?;
    eprintln!("{steady:?}, names: {names_ms} ms, graphs: {graphs:?} ms");
    let slowdowns = slowdown::measure(&program, arguments.rounds)?;
    let figures = figures(&costs, &steady, [median(&graphs), names_ms], &slowdowns);
    arguments.publish("offcpu", &markdown(&figures, &costs, &slowdowns, arguments.rounds))?;
    Ok(figures.iter().all(|(_, value, limit)| value <= limit))
}

fn figures(costs: &[Cost], steady: &Steady, ms: [f64; 2], slowdowns: &Slowdowns) -> Vec<(String, f64, f64)> {
    let mut figures = Vec::new();
    for cost in costs {
        let threads = cost.threads;
        figures.push((
            format!("a thread that has not run, {threads} threads (ns)"),
            cost.unchanged_ns,
            UNCHANGED_LIMIT_NS,
        ));
        figures.push((
            format!("the same as a part of /proc/PID/task/TID/stack, {threads} threads"),
            cost.unchanged_ns / cost.proc_ns,
            1.0 / PROC_RATIO,
        ));
        figures.push((
            format!("a user stack of {:.0} frames, {threads} threads (ns)", cost.user_frames),
            cost.user_stack_ns,
            USER_STACK_LIMIT_NS,
        ));
    }
    figures.push((
        format!("{} sleeping threads at 9 Hz (% of a CPU)", steady.threads),
        steady.cpu_percent,
        STEADY_LIMIT_PERCENT,
    ));
    figures.push((
        "threads of those that are not in the result".to_owned(),
        (steady.threads - steady.seen) as f64,
        0.0,
    ));
    figures.push(("lost samples meanwhile".to_owned(), steady.lost as f64, 0.0));
    let graph = format!("Ctrl-C to the flame graph of {} threads in {} places (ms)", naming::THREADS, naming::PLACES);
    figures.push((graph, ms[0], GRAPH_LIMIT_MS));
    figures.push((format!("names of {} kernel addresses (ms)", naming::ADDRESSES), ms[1], NAMES_LIMIT_MS));
    figures.push(("slowdown of the pipe by `sample` (%)".to_owned(), slowdowns.percent(0), SAMPLE_LIMIT_PERCENT));
    let theirs_ns = slowdowns.added_ns(SUBJECTS.len() - 1);
    figures.push(("added to a switch by `trace` (ns)".to_owned(), slowdowns.added_ns(1), TRACE_RATIO * theirs_ns));
    figures
}

fn markdown(figures: &[(String, f64, f64)], costs: &[Cost], slowdowns: &Slowdowns, rounds: u32) -> String {
    let mut text = format!(
        "## Off-CPU stacks\n\nCommand: `make bench-offcpu` (`cargo run --release -p whylate-bench -- offcpu --rounds {rounds}`)\n\n{}\n\
         | figure | measured | limit | result |\n|---|--:|--:|---|\n",
        machine::describe()
    );
    for (name, value, limit) in figures {
        // A `String` takes everything.
        let _ = writeln!(text, "| {name} | {} | {} | {} |", short(*value), short(*limit), word(*value, *limit));
    }
    text += "\n### CPU time for each thread and look, in ns\n\nOf a process whose threads sleep; the others of the machine, some 110, are walked \
             over, which is in the figures too. `changed` have run since the last look, and both their stacks are taken; the plain iterator takes the \
             kernel stack of each and does nothing with it. Medians of all rounds.\n\n\
             | threads | unchanged | changed | of that, user stack | plain iterator | /proc/PID/task/TID/stack | unchanged is cheaper by |\n\
             |--:|--:|--:|--:|--:|--:|--:|\n";
    for cost in costs {
        let _ = writeln!(
            text,
            "| {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} x |",
            cost.threads,
            cost.unchanged_ns,
            cost.changed_ns,
            cost.user_stack_ns,
            cost.plain_ns,
            cost.proc_ns,
            cost.proc_ns / cost.unchanged_ns
        );
    }
    text + &slowdowns.markdown()
}

/// Three digits are enough.
fn short(value: f64) -> String {
    let digits = if value >= 100.0 { 0 } else { 3 };
    format!("{value:.digits$}")
}
