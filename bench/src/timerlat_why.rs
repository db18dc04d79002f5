// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether `whylate timerlat` and `rtla timerlat` attribute delays to their true cause, in one boot of a kernel that
//! has the tracer and a module that disables interrupts.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::results::{self, Section};
use crate::table::{Figure, lines};
use crate::vm;

const KERNEL: &str = "6.12-tracers";

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// An rtla that analyses, from Linux 6.5 on (tools/tracing/rtla of its source).
    #[arg(long, value_name = "PROGRAM")]
    rtla: PathBuf,
}

/// A delay, its name in the tools, and the part of the latency that it belongs to.
struct Cause {
    name: &'static str,
    name_in_tools: &'static str,
    parts: &'static [&'static str],
}

/// Each lasts 50 ms, or just less: an emulated CPU is late by milliseconds at any time.
const CAUSES: [Cause; 3] = [
    Cause { name: "interrupts off", name_in_tools: "irq_test", parts: &["IRQ handler delay"] },
    Cause {
        name: "a FIFO:98 thread",
        name_in_tools: "whylate-hog",
        parts: &["Blocking thread", "Thread interference"],
    },
    Cause { name: "a softirq", name_in_tools: "hrtimer", parts: &["Softirq interference"] },
];
const TOOLS: [&str; 4] = ["rtla -T", "rtla -i", "whylate, tracer", "whylate, bpf"];

/// The analysis of one stop.
#[derive(Clone, Debug, Default, PartialEq)]
struct Analysis {
    /// The largest part of the latency, its share in percent, and the names below it.
    part: String,
    percent: f64,
    named: Vec<String>,
    latency_us: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let rtla = arguments.rtla.canonicalize().with_context(|| format!("no {}", arguments.rtla.display()))?;
    let (rtla, rounds) = (rtla.to_string_lossy(), arguments.results.rounds.to_string());
    let script = [vm::KEEP_ENABLED, include_str!("timerlat_why.sh")].concat();
    let text = vm::run(KERNEL, &["--timeout", "3000", "--with", &rtla, "--"], &script, &[&rounds, &rtla])?;
    let analyses = parse(&text)?;
    let ours = || analyses.iter().filter(|((_, tool), _)| TOOLS[*tool].starts_with("whylate"));
    let right: usize = ours().map(|((cause, _), runs)| count_right(&CAUSES[*cause], runs).1).sum();
    let all: usize = ours().map(|(_, runs)| runs.len()).sum();
    let wrong_percent = 100.0 * (all - right) as f64 / all.max(1) as f64;
    let rows = analyses.iter().map(|((cause, tool), runs)| row(&CAUSES[*cause], TOOLS[*tool], runs));
    let heads = "delay | tool | >stops | >right in part | >right by name | last cause";
    let what = "runs of whylate that do not stop with the right name (%)";
    Section::new(&arguments.results, "timerlat-why")
        .figures([Figure::new(what, wrong_percent, 1).at_most(5.0)])
        .values(&[("kernel", &KERNEL), ("table", &lines(heads, rows))])
        .publish()
}

fn row(cause: &Cause, tool: &str, runs: &[Option<Analysis>]) -> String {
    let (in_part, by_name) = count_right(cause, runs);
    let stops = runs.iter().flatten().count();
    let last = runs.iter().flatten().next_back().map(|Analysis { part, percent, named, latency_us }| {
        let named = named.first().map_or("no name", String::as_str);
        format!("{part} {percent:.1} % of {:.1} ms: {named}", latency_us / 1e3)
    });
    let last = last.unwrap_or_else(|| "no analysis".to_owned());
    format!("{} | {tool} | {stops} of {} | {in_part} | {by_name} | {last}", cause.name, runs.len())
}

/// Analyses by cause and tool, one per run; `None` if nothing stopped the run.
type Analyses = BTreeMap<(usize, usize), Vec<Option<Analysis>>>;

fn parse(text: &str) -> Result<Analyses> {
    let mut analyses = Analyses::new();
    for (words, rest) in vm::parts(text) {
        let [cause, tool] = words[..] else { bail!("not a run's head: {}", words.join(" ")) };
        let (cause, tool): (usize, usize) = (cause.parse()?, tool.parse()?);
        ensure!(cause < CAUSES.len() && tool < TOOLS.len(), "not a run's head: {cause} {tool}");
        analyses.entry((cause, tool)).or_default().push(analysis(rest));
    }
    Ok(analyses)
}

/// Parses the analysis of the first stop: lines of parts have a share, lines below them have none.
fn analysis(text: &str) -> Option<Analysis> {
    let is_head = |line: &&str| line.contains("hit stop tracing, analyzing it");
    let block = text.lines().skip_while(|line| !is_head(line)).skip(1);
    let (mut parts, mut latency_us) = (Vec::<Analysis>::new(), 0.0);
    for line in block.take_while(|line| !is_head(line)) {
        let Some((before, after)) = line.rsplit_once(" us") else { continue };
        let Some((name, us)) = before.trim().rsplit_once(char::is_whitespace) else { continue };
        let (name, us): (&str, f64) = (name.trim().trim_end_matches(':'), us.parse().ok()?);
        let share = after.trim().trim_start_matches('(').split(['%', ')']).next().unwrap_or_default().trim();
        if share == "100" {
            latency_us = us;
            break;
        }
        match share.parse() {
            Ok(percent) => parts.push(Analysis { part: name.to_owned(), percent, ..Analysis::default() }),
            // The latency itself has no share, and no names below it.
            Err(_) if name == "IRQ latency" => {}
            Err(_) => parts.last_mut()?.named.push(name.to_owned()),
        }
    }
    let largest = parts.into_iter().max_by(|a, b| a.percent.total_cmp(&b.percent))?;
    Some(Analysis { latency_us, ..largest })
}

/// Counts the analyses with the delay in the right part, and those of them that also name its maker.
fn count_right(cause: &Cause, analyses: &[Option<Analysis>]) -> (usize, usize) {
    let in_part = |analysis: &&Analysis| {
        analysis.percent >= 50.0 && cause.parts.iter().any(|part| analysis.part.starts_with(part))
    };
    let in_part = analyses.iter().flatten().filter(in_part);
    let names =
        |analysis: &&Analysis| analysis.named.iter().any(|name| name.to_lowercase().contains(cause.name_in_tools));
    (in_part.clone().count(), in_part.filter(names).count())
}

#[cfg(test)]
#[path = "../unit/timerlat_why.rs"]
mod tests;
