// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of watching work items with whylate, and with the usual bpftrace one-liner, on the same load.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::child::{self, PEAK, Tool, wait_until};
use crate::drivers::in_rounds;
use crate::programs::Counts;
use crate::results::{Arguments, Section};
use crate::subject::{Ready, Running, Subject};
use crate::table::{Figure, Show, column, grid, median, median_of};
use crate::{kernel, programs};

/// Items per load, and for the memory.
const ITEMS: u64 = 50_000;
const ITEMS_FOR_MEMORY: u64 = 10_000;
/// How many of them wait at once, by load.
const LOADS: [u64; 2] = [100, 1000];

const ONE_LINER: &str = "tracepoint:workqueue:workqueue_queue_work { @start[args->work] = nsecs; } \
     tracepoint:workqueue:workqueue_execute_start /@start[args->work]/ \
     { @usecs = hist((nsecs - @start[args->work]) / 1000); delete(@start[args->work]); }";

/// The index of the subject to compare with.
const BPFTRACE: usize = 1;
/// BPF programs that each subject runs for each item, and the limit of its cost relative to bpftrace's.
const PROGRAMS: [usize; 4] = [2, 2, 2, 4];
const LIMITS: [Option<f64>; 4] = [None, None, Some(0.6), Some(1.2)];

fn subjects(whylate: &str) -> [Subject; 4] {
    let empty_pair = Ready::Links(programs::attach_to_work_items);
    [
        Subject::new("floor", "an empty `tp_btf` pair", &[], empty_pair),
        Subject::new("bpftrace", "hash map by work pointer, `hist`", &["bpftrace", "-e", ONE_LINER], Ready::Output),
        Subject::new("`whylate wq`", "latency", &[whylate, "wq"], Ready::Output),
        Subject::new("`whylate wq --table`", "all phases and runtime", &[whylate, "wq", "--table"], Ready::Output),
    ]
}

#[derive(Clone, Debug)]
struct Sample {
    programs: Vec<Counts>,
    items_per_second: f64,
    /// Relative to bpftrace's cost in the same round.
    ratio: f64,
}

impl Sample {
    /// Returns the sum of the mean run times: each program runs once per item.
    fn cost_ns(&self) -> f64 {
        self.programs.iter().map(Counts::mean_ns).sum()
    }
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let tools = [("bpftrace", "no bpftrace to compare with")];
    let Some(whylate) = arguments.prepare("bench-wq", &tools)? else { return Ok(true) };
    // Fails e.g. on a kernel without `bpf_wq`.
    if let Err(reason) = child::run(Command::new(&whylate).args(["inject", "work"])) {
        println!("skipped: {reason:#}");
        return Ok(true);
    }
    // Before the rounds: what the first start reads is in the page cache from the build.
    let start_ms = median(&(0..10).map(|_| start_ms(&whylate)).collect::<Result<Vec<_>>>()?);
    let start = "start to first output of `whylate wq`, median of 10";
    let mut figures = vec![Figure::new(start, start_ms, 1).unit("ms").at_most(150.0)];
    for options in [["wq", "-W", "1"], ["wq", "--json", "1"]] {
        let what = format!("peak resident memory of `whylate {}` after 10,000 items", options.join(" "));
        figures.push(Figure::new(what, peak_mb(&whylate, &options)?, 1).unit("MB").at_most(30.0));
    }
    let _counting = kernel::count_run_times()?;
    let (subjects, rounds) = (subjects(&whylate.to_string_lossy()), arguments.rounds);
    let names = subjects.each_ref().map(|subject| subject.name);
    let mut measured = in_rounds("work items", (rounds, true), &names, |which| {
        under_loads(&subjects[which], PROGRAMS[which], &whylate)
    })?;
    for round in &mut measured.0 {
        let theirs: Vec<f64> = round[BPFTRACE].iter().map(Sample::cost_ns).collect();
        for (sample, theirs_ns) in round.iter_mut().flat_map(|loads| loads.iter_mut().zip(&theirs)) {
            sample.ratio = sample.cost_ns() / theirs_ns;
        }
    }

    let json = child::json(Command::new(&whylate).args(["wq", "--json", "--duration", "100ms"]))?;
    let backend = json["backend"].as_str().unwrap_or("unknown");
    let mut section = Section::new(arguments, "wq").add("backend", backend);
    let columns = [
        column("median ns", Show::Median(0), "", |sample: &&Sample| sample.cost_ns()),
        column("min ns", Show::Min(0), "", |sample| sample.cost_ns()),
        column("ratio to bpftrace", Show::Spread(2), "", |sample| sample.ratio),
        column("items/s", Show::Median(0), "", |sample| sample.items_per_second),
    ];
    for (load, at_once) in LOADS.into_iter().enumerate() {
        let measured = measured.map(|loads| &loads[load]);
        for (which, name) in names.iter().enumerate() {
            let Some(limit) = LIMITS[which] else { continue };
            let what = format!("an item with {name}, {at_once} at once, as a ratio to bpftrace");
            figures.push(Figure::new(what, measured.median(which, |sample| sample.ratio), 2).at_most(limit));
        }
        let details = names.iter().enumerate().map(|(which, name)| details_line(name, &measured.subject(which)));
        section = section
            .add("loads", format!("Load: `whylate inject work --items {ITEMS} --at-once {at_once}`"))
            .add("loads", grid("subject | what", &columns, measured.rows(subjects.iter().map(Subject::label))))
            .add("loads", "Each program, mean ns, median of the rounds:")
            .add("loads", details.collect::<String>());
    }
    section.figures(figures).publish()
}

fn under_loads(subject: &Subject, programs: usize, whylate: &Path) -> Result<Vec<Sample>> {
    let running = subject.start(false)?;
    // That each program has run is the only sign that it is attached.
    wait_until("not all of its programs run", || {
        inject(whylate, 100, 100)?;
        let counts = running.programs()?;
        Ok(counts.len() == programs && counts.values().all(|counts| counts.runs > 0))
    })?;
    let samples = LOADS.iter().map(|&at_once| sample(&running, whylate, at_once)).collect();
    running.end()?;
    samples
}

/// Runs a load until it has as many items at once as requested: another number would be another load.
fn sample(running: &Running, whylate: &Path, at_once: u64) -> Result<Sample> {
    let mut sample = None;
    wait_until(&format!("the kernel has no memory for {at_once} work items at once: try again later"), || {
        let ((real_at_once, items_per_second), programs) = running.count(|| inject(whylate, ITEMS, at_once))?;
        let idle = programs.iter().find(|counts| counts.runs + counts.missed < ITEMS);
        ensure!(idle.is_none(), "one of its programs ran too seldom for {ITEMS} items: {idle:?}");
        sample = (real_at_once == at_once).then_some(Sample { programs, items_per_second, ratio: f64::NAN });
        Ok(sample.is_some())
    })?;
    sample.context("no sample")
}

/// Injects work items, `at_once` of them waiting together, and returns how many really wait together, which are fewer
/// if the kernel is briefly short of memory, and the items per second. Fails if not all have run.
fn inject(whylate: &Path, items: u64, at_once: u64) -> Result<(u64, f64)> {
    let options = format!("inject work --json --items {items} --at-once {at_once}");
    let record = child::json(Command::new(whylate).args(options.split(' ')))?;
    let number = |name: &str| record[name].as_u64().with_context(|| format!("the load does not print {name}"));
    let executed = number("executed")?;
    ensure!(executed == items, "the load ran {executed} items, not {items}");
    let span_ns = number("last_end_monotonic_ns")?.saturating_sub(number("first_queue_monotonic_ns")?);
    Ok((number("at_once")?, items as f64 * 1e9 / span_ns.max(1) as f64))
}

fn details_line(subject: &str, samples: &[&&Sample]) -> String {
    let names = samples.first().map_or(&[][..], |sample| &sample.programs);
    let programs = names.iter().enumerate().map(|(index, counts)| {
        let mean_ns = median_of(samples, |sample| sample.programs.get(index).map_or(0.0, Counts::mean_ns));
        format!("`{}` {mean_ns:.0}", counts.name)
    });
    let programs = programs.collect::<Vec<_>>().join(", ");
    let missed: u64 = samples.iter().flat_map(|sample| &sample.programs).map(|counts| counts.missed).sum();
    let missed = if missed > 0 { format!(" ({missed} events of all rounds missed)") } else { String::new() };
    format!("- {subject}: {programs}{missed}\n")
}

/// Returns the time from starting the program to the first byte of its output.
fn start_ms(whylate: &Path) -> Result<f64> {
    let mut tool = Tool::start(whylate, &["wq"])?;
    let first = tool.first_output()?;
    tool.end()?;
    Ok(first.as_secs_f64() * 1e3)
}

/// Returns the peak memory once it has counted the items and printed them; `options` have an interval of a second.
fn peak_mb(whylate: &Path, options: &[&str]) -> Result<f64> {
    let mut tool = Tool::start(whylate, options)?;
    tool.first_output()?;
    inject(whylate, ITEMS_FOR_MEMORY, LOADS[1])?;
    // The next output, and some time to make it.
    thread::sleep(Duration::from_millis(1500));
    let peak_kib = child::status_kib(tool.pid(), PEAK)?;
    tool.end()?;
    Ok(peak_kib * 1024.0 / 1e6)
}

#[cfg(test)]
#[path = "../unit/wq.rs"]
mod tests;
