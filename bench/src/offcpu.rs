// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate offcpu` per thread and switch, compared with other means, and how soon its flame graph is there.

mod naming;
pub mod sleepers;
mod slowdown;
mod walks;

use anyhow::Result;
use clap::{Args, ValueEnum};

use self::slowdown::SUBJECTS;
use self::walks::Cost;
use crate::figures::{median, verdict};
use crate::{machine, results, whylate};

/// Arguments of the benchmark.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// Only one part of it; each has a section of its own.
    #[arg(long, value_enum)]
    part: Option<Part>,
}

/// What can be measured by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// What a look at a thread costs.
    Walks,
    /// How soon there is a flame graph, and how fast addresses are named.
    Names,
    /// What switches cost that are watched.
    Switches,
}

/// A figure: name, value and limit.
type Figure = (String, f64, f64);

/// Limits of visiting a thread that has not run, and of the user stack of one that has.
const UNCHANGED_LIMIT_NS: f64 = 400.0;
const USER_STACK_LIMIT_NS: f64 = 2_000.0;
/// Minimum factor by which reading a file of /proc per thread is more expensive.
const PROC_RATIO: f64 = 30.0;
const STEADY_LIMIT_PERCENT: f64 = 5.0;
const GRAPH_LIMIT_MS: f64 = 300.0;
const NAMES_LIMIT_MS: f64 = 500.0;
const SAMPLE_LIMIT_PERCENT: f64 = 3.0;
/// Limit relative to offcputime's cost per switch.
const TRACE_RATIO: f64 = 0.7;

pub fn run(arguments: &Arguments) -> Result<bool> {
    if machine::is_skipped(&[]) {
        return Ok(true);
    }
    let mut are_within = true;
    for (part, name) in [(Part::Walks, "walks"), (Part::Names, "names"), (Part::Switches, "switches")] {
        if arguments.part.is_some_and(|wanted| wanted != part) {
            continue;
        }
        let rounds = arguments.results.rounds;
        let measured = match part {
            Part::Walks => Some(walks_part(rounds)?),
            Part::Names => Some(names_part(rounds)?),
            Part::Switches => switches_part(rounds)?,
        };
        let Some((title, figures, tables)) = measured else { continue };
        let command = format!("offcpu --part {name} --rounds {rounds}");
        let heading = results::heading(&format!("Off-CPU stacks: {title}"), "bench-offcpu", &command);
        let text = format!("{heading}\n{}{tables}", rows(&figures));
        arguments.results.publish(&format!("offcpu-{name}"), &text)?;
        are_within &= figures.iter().all(|(_, value, limit)| value <= limit);
    }
    Ok(are_within)
}

fn rows(figures: &[Figure]) -> String {
    let mut text = "| figure | measured | limit | result |\n|---|--:|--:|---|\n".to_owned();
    for (name, value, limit) in figures {
        text += &format!("| {name} | {} | {} | {} |\n", short(*value), short(*limit), verdict(*value, *limit));
    }
    text
}

fn walks_part(rounds: u32) -> Result<(&'static str, Vec<Figure>, String)> {
    let mut costs = Vec::new();
    for threads in walks::THREADS {
        let cost = walks::measure(threads, rounds)?;
        eprintln!("{cost:?}");
        costs.push(cost);
    }
    let steady = walks::steady()?;
    eprintln!("{steady:?}");
    let mut figures = Vec::new();
    for cost in &costs {
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
    figures.extend([
        (format!("{} sleeping threads at 9 Hz (% of a CPU)", steady.threads), steady.cpu_percent, STEADY_LIMIT_PERCENT),
        ("threads of those that are not in the result".to_owned(), (steady.threads - steady.seen) as f64, 0.0),
        ("lost samples meanwhile".to_owned(), steady.lost as f64, 0.0),
    ]);
    Ok(("looking at threads", figures, costs_table(&costs)))
}

fn names_part(rounds: u32) -> Result<(&'static str, Vec<Figure>, String)> {
    let program = whylate::build("bench-offcpu")?;
    let names_ms = naming::names_ms()?;
    let graphs = (0..rounds).map(|_| naming::first_graph_ms(&program)).collect::<Result<Vec<_>>>()?;
    eprintln!("names: {names_ms} ms, graphs: {graphs:?} ms");
    let graph = format!("Ctrl-C to the flame graph of {} threads in {} places (ms)", naming::THREADS, naming::PLACES);
    let figures = vec![
        (graph, median(&graphs), GRAPH_LIMIT_MS),
        (format!("names of {} kernel addresses (ms)", naming::ADDRESSES), names_ms, NAMES_LIMIT_MS),
    ];
    Ok(("names and graphs", figures, String::new()))
}

/// Measures the cost of watched switches. Returns `None` without the load or offcputime.
fn switches_part(rounds: u32) -> Result<Option<(&'static str, Vec<Figure>, String)>> {
    let tools = [("perf", "no perf: no load to watch"), ("offcputime", "no offcputime: nothing to compare with")];
    if machine::is_skipped(&tools) {
        return Ok(None);
    }
    let slowdowns = slowdown::measure(&whylate::build("bench-offcpu")?, rounds)?;
    let theirs_ns = slowdowns.added_ns(SUBJECTS.len() - 1);
    let figures = vec![
        ("slowdown of the pipe by `sample` (%)".to_owned(), slowdowns.percent(0), SAMPLE_LIMIT_PERCENT),
        ("added to a switch by `trace` (ns)".to_owned(), slowdowns.added_ns(1), TRACE_RATIO * theirs_ns),
    ];
    Ok(Some(("switches that are watched", figures, slowdowns.markdown())))
}

fn costs_table(costs: &[Cost]) -> String {
    let mut text = format!(
        "\n### CPU time for each thread and look, in ns\n\nOf all threads of the machine: those of a process whose threads sleep, and \
         the others. `changed` are threads of that process alone, which have run since the last look: both stacks of each are taken. \
         They sleep in {} places at the same depth. The plain iterator takes the kernel stack of each and does nothing with it. \
         Medians of all rounds.\n\n\
         | threads | unchanged | changed | of that, user stack | plain iterator | /proc/PID/task/TID/stack | unchanged is cheaper by |\n\
         |--:|--:|--:|--:|--:|--:|--:|\n",
        walks::PLACES
    );
    for cost in costs {
        text += &format!(
            "| {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} x |\n",
            cost.threads,
            cost.unchanged_ns,
            cost.changed_ns,
            cost.user_stack_ns,
            cost.plain_ns,
            cost.proc_ns,
            cost.proc_ns / cost.unchanged_ns
        );
    }
    text
}

/// Formats with three significant digits or so.
fn short(value: f64) -> String {
    let digits = if value >= 100.0 { 0 } else { 3 };
    format!("{value:.digits$}")
}
