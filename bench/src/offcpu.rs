// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate offcpu` per thread and switch, compared with other means, and its time to the flame graph.

mod naming;
mod walks;

use std::path::Path;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::drivers::{Slowdown, slowdowns};
use crate::loads::Load;
use crate::machine;
use crate::results::{self, Section};
use crate::subject::{Ready, Subject};
use crate::table::{Figure, Show, column, median_of};

/// Arguments of the benchmark.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// Only one part of it; each has a section of its own.
    #[arg(long, value_enum)]
    part: Option<Part>,
}

/// A part of the benchmark, which has a section of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The cost of visiting a thread.
    Walks,
    /// The time to a flame graph, and to the names of addresses.
    Names,
    /// The cost of watched switches.
    Switches,
}

/// Limit of the added time per switch relative to offcputime's.
const TRACE_RATIO: f64 = 0.7;

pub fn run(arguments: &Arguments) -> Result<bool> {
    let Some(program) = arguments.results.prepare("bench-offcpu", &[])? else { return Ok(true) };
    let mut are_within = true;
    for &part in Part::value_variants() {
        if arguments.part.is_none_or(|wanted| wanted == part) {
            are_within &= match part {
                Part::Walks => walks_part(&arguments.results)?,
                Part::Names => names_part(&arguments.results, &program)?,
                Part::Switches => switches_part(&arguments.results, &program)?,
            };
        }
    }
    Ok(are_within)
}

/// Begins the section of a part.
fn section<'a>(arguments: &'a results::Arguments, part: &str, name: &'a str, title: &str) -> Section<'a> {
    let command = format!("offcpu --part {part} --rounds {}", arguments.rounds);
    Section::new(arguments, name, &format!("Off-CPU stacks: {title}"), "bench-offcpu", &command)
}

fn walks_part(arguments: &results::Arguments) -> Result<bool> {
    let mut costs = Vec::new();
    for threads in walks::THREADS {
        costs.push(walks::measure(threads, arguments.rounds)?);
    }
    let steady = walks::steady()?;
    let mut figures = Vec::new();
    for samples in &costs {
        let (threads, frames) = (samples[0].threads, samples[0].user_frames);
        figures.extend([
            Figure::median(format!("a thread that has not run, {threads} threads (ns)"), 0, samples, |cost| {
                cost.unchanged_ns
            })
            .at_most(400.0),
            Figure::new(
                format!("a thread that has not run, as a part of /proc/PID/task/TID/stack, {threads} threads"),
                median_of(samples, |cost| cost.unchanged_ns) / median_of(samples, |cost| cost.proc_ns),
                3,
            )
            .at_most(1.0 / 30.0),
            Figure::median(format!("a user stack of {frames:.0} frames, {threads} threads (ns)"), 0, samples, |cost| {
                cost.user_stack_ns
            })
            .at_most(2_000.0),
        ]);
    }
    let what = format!("{} sleeping threads at 9 Hz (% of a CPU)", steady.threads);
    figures.extend([
        Figure::new(what, steady.cpu_percent, 2).at_most(5.0),
        Figure::new("threads of those that are not in the result", (steady.threads - steady.seen) as f64, 0)
            .at_most(0.0),
        Figure::new("lost samples of those", steady.lost as f64, 0).at_most(0.0),
    ]);
    let columns = [
        column("unchanged", Show::Median(0), "", |cost: &walks::Cost| cost.unchanged_ns),
        column("changed", Show::Median(0), "", |cost| cost.changed_ns),
        column("of that, user stack", Show::Median(0), "", |cost| cost.user_stack_ns),
        column("plain iterator", Show::Median(0), "", |cost| cost.plain_ns),
        column("/proc/PID/task/TID/stack", Show::Median(0), "", |cost| cost.proc_ns),
        column("unchanged is cheaper by", Show::Median(0), " x", |cost| cost.proc_ns / cost.unchanged_ns),
    ];
    section(arguments, "walks", "offcpu-walks", "walks over threads")
        .figures(figures)
        .text("### CPU time for each thread and walk, in ns")
        .text(&format!(
            "Of all threads of the machine: those of a process with sleeping threads, and the others. `changed` are threads of that process \
             alone, which have run since the last walk: both stacks of each are taken. They sleep at {} call sites of the same depth. The \
             plain iterator takes the kernel stack of each and does nothing with it. Medians of all rounds.",
            walks::CALL_SITES
        ))
        .grid("threads", &columns, costs.iter().map(|samples| (samples[0].threads.to_string(), samples.iter().collect())))
        .publish()
}

fn names_part(arguments: &results::Arguments, program: &Path) -> Result<bool> {
    let names_ms = naming::names_ms()?;
    let graphs = (0..arguments.rounds).map(|_| naming::first_graph_ms(program)).collect::<Result<Vec<_>>>()?;
    let graph =
        format!("Ctrl-C to the flame graph of {} threads at {} call sites (ms)", naming::THREADS, naming::CALL_SITES);
    section(arguments, "names", "offcpu-names", "names and graphs")
        .figures([
            Figure::median(graph, 0, &graphs, |ms| *ms).at_most(300.0),
            Figure::new(format!("names of {} kernel addresses (ms)", naming::ADDRESSES), names_ms, 0).at_most(500.0),
        ])
        .publish()
}

/// Measures the cost of watched switches, unless there is no load or no offcputime.
fn switches_part(arguments: &results::Arguments, program: &Path) -> Result<bool> {
    let tools = [("perf", "no perf: no load to watch"), ("offcputime", "no offcputime: nothing to compare with")];
    if machine::is_skipped(&tools) {
        return Ok(true);
    }
    let whylate = program.to_string_lossy();
    let ours = |name, options: &[&str]| {
        Subject::new(name, "", &[&[&*whylate, "offcpu", "--backend"], options].concat(), Ready::Programs(1))
    };
    let subjects = [
        ours("`whylate offcpu --backend sample`", &["sample"]),
        ours("`whylate offcpu --backend trace`", &["trace"]),
        // Takes the waker's stack in addition to the wakee's; offcputime has nothing like it.
        ours("`whylate offcpu --backend trace --wakers`", &["trace", "--wakers"]),
        Subject::offcputime(),
    ];
    let (load, theirs) = (Load::pipe(), subjects.len() - 1);
    let measured = slowdowns(&load, &subjects, arguments.rounds)?;
    let noise: Vec<f64> = measured.all().map(Slowdown::noise_percent).collect();
    let limit_ns = TRACE_RATIO * measured.median(theirs, Slowdown::added_ns_per_switch);
    let columns = [
        column("slowdown, elapsed", Show::Median(1), " %", Slowdown::percent),
        column("slowdown, CPU time", Show::Median(1), " %", Slowdown::cpu_percent),
        column("added CPU ns a switch", Show::Median(0), "", Slowdown::added_ns_per_switch),
    ];
    section(arguments, "switches", "offcpu-switches", "watched switches")
        .figures([
            Figure::new("slowdown of the pipe by `sample` (%)", measured.median(0, Slowdown::cpu_percent), 2).at_most(3.0),
            Figure::new("added to a switch by `trace` (ns)", measured.median(1, Slowdown::added_ns_per_switch), 0)
                .at_most(limit_ns),
        ])
        .text(&format!("### Slowdown of `{}`", load.name))
        .text(&format!(
            "Each watched run is compared with the unwatched ones before and after it, which differ from each other by {}. Tools are on \
             another CPU. Medians of all rounds.",
            Show::Median(1).cell(&noise, " %")
        ))
        .grid("subject", &columns, measured.rows(subjects.iter().map(|subject| subject.name.to_owned())))
        .publish()
}
