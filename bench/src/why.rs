// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate` without a command, with every source and all causes: slowdown of loads compared with common tools,
//! run time of its programs, time to its answer, and memory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};

use crate::child::{PEAK, Tool, status_kib};
use crate::drivers::{Slowdown, count_beside_empty, slowdowns};
use crate::kernel;
use crate::loads::{Load, Run, SWITCHES_PER_SECOND};
use crate::programs::{Counts, total};
use crate::results::{self, Section};
use crate::subject::{Ready, Running, Subject};
use crate::table::{Figure, Show, column, grid, median_of};

/// Minimum number of programs of all sources: from then on all are there soon.
const PROGRAMS: usize = 30;
/// Number of programs that are listed by name.
const LARGEST: usize = 12;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// Measure this alone, instead of everything one after another.
    #[arg(long)]
    part: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The cost of BPF programs, memory and the start.
    Cost,
    Pipe,
    Paced,
    Messaging,
    Fio,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let Some(program) = arguments.results.prepare("bench-why", &[])? else { return Ok(true) };
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let ours = || {
        Subject::new("`whylate`", "", &[&program.to_string_lossy(), "-d", "1h"], Ready::Programs(PROGRAMS)).everywhere()
    };
    let mut is_within = true;
    for &part in Part::value_variants() {
        if arguments.part.is_some_and(|wanted| wanted != part) {
            continue;
        }
        let (section, load) = match part {
            Part::Cost => {
                is_within &= cost_section(&arguments.results, &program, &ours())?.publish()?;
                continue;
            }
            Part::Pipe => ("why-pipe", Load::pipe()),
            Part::Paced => ("why-paced", Load::paced()?),
            Part::Messaging => ("why-messaging", Load::messaging()),
            Part::Fio => ("why-fio", Load::fio(directory.path())),
        };
        let subjects = [ours(), Subject::perf_sched(directory.path()), Subject::offcputime(), Subject::nothing()];
        let measured = slowdowns(&load, &subjects, arguments.results.rounds)?;
        let columns = [
            column("slowdown, elapsed", Show::Median(1), " %", Slowdown::percent),
            column("95 % interval", Show::Interval(1), " %", Slowdown::percent),
            column("slowdown, CPU time", Show::Median(1), " %", Slowdown::cpu_percent),
        ];
        let table = grid("watcher", &columns, measured.rows(subjects.iter().map(Subject::name_only)));
        Section::with_template(&arguments.results, section, "why-load")
            .values(&[("load", &load.name), ("what", &load.what), ("table", &table)])
            .publish()?;
    }
    Ok(is_within)
}

/// Run time of the programs per switch during one run of the paced load.
struct Cost {
    run: Run,
    programs: Vec<Counts>,
    runs: f64,
    /// Mean run time of an empty program beside them at each switch, which is mostly the time of counting.
    empty_ns: f64,
    /// As the kernel counts it; less the time of counting; and that on the load's CPU only.
    counted_ns: f64,
    everywhere_ns: f64,
    own_ns: f64,
}

fn costs(ours: &Subject, load: &Load, rounds: u32) -> Result<Vec<Cost>> {
    let _counting = kernel::count_run_times()?;
    let cpus = thread::available_parallelism()?.get() as f64;
    let cost = |running: &Running| {
        let began = Instant::now();
        let (run, programs, empty_ns) = count_beside_empty(running, || load.run())?;
        ensure!(programs.iter().any(|counts| counts.run_ns > 0), "no BPF program has run");
        let took = began.elapsed();
        let ((), idle) = running.count(|| {
            thread::sleep(took);
            Ok(())
        })?;
        let switches = run.switches.max(1) as f64;
        let runs = total(&programs, |counts| counts.runs) / switches;
        let counted_ns = total(&programs, |counts| counts.run_ns) / switches;
        let everywhere_ns = counted_ns - empty_ns * runs;
        // In an equal time without the load, on the other CPUs.
        let idle_ns = total(&idle, |counts| counts.run_ns) - empty_ns * total(&idle, |counts| counts.runs);
        let own_ns = everywhere_ns - idle_ns.max(0.0) * (cpus - 1.0) / cpus / switches;
        Ok(Cost { run, programs, runs, empty_ns, counted_ns, everywhere_ns, own_ns })
    };
    Ok(ours.watch(false, |running| (0..rounds).map(|_| cost(running)).collect())?.0)
}

fn cost_section<'a>(arguments: &'a results::Arguments, program: &Path, ours: &Subject) -> Result<Section<'a>> {
    let rounds = arguments.rounds;
    let costs = costs(ours, &Load::paced()?, rounds)?;
    // From the start to the output, less the second that is measured.
    let answer_s = |_| Ok(Tool::start(program, &["-d", "1s"])?.first_output()?.as_secs_f64() - 1.0);
    let answers = (0..5).map(answer_s).collect::<Result<Vec<f64>>>()?;
    let (tool, _) = ours.watch(false, |running| {
        thread::sleep(Duration::from_secs(5));
        let tool = running.tool.as_ref().context("it is no tool")?;
        Ok((status_kib(tool.pid(), PEAK)? / 1024.0, maps_bytes(tool.pid())? as f64 / 1048576.0))
    })?;
    let (memory_mb, maps_mb) = tool;
    let percent = 100.0 * median_of(&costs, |cost| cost.own_ns) * SWITCHES_PER_SECOND / 1e9;
    let binary_mb = fs::metadata(program)?.len() as f64 / 1048576.0;
    let first = costs.first().context("no rounds")?;
    let mut rows: Vec<(String, Vec<(f64, &Counts)>)> = (0..first.programs.len())
        .map(|nth| {
            let samples = costs.iter().map(|cost| (cost.run.switches.max(1) as f64, &cost.programs[nth]));
            (format!("`{}`", first.programs[nth].name), samples.collect())
        })
        .collect();
    let ns_per_switch = |(switches, counts): &(f64, &Counts)| counts.run_ns as f64 / switches;
    rows.sort_by(|(_, a), (_, b)| median_of(b, ns_per_switch).total_cmp(&median_of(a, ns_per_switch)));
    rows.truncate(LARGEST);
    let columns = [
        column("runs a switch", Show::Median(4), "", |(switches, counts): &(f64, &Counts)| {
            counts.runs as f64 / switches
        }),
        column("mean ns", Show::Median(0), "", |(_, counts)| counts.mean_ns()),
        column("ns a switch", Show::Median(1), "", |(switches, counts)| counts.run_ns as f64 / switches),
    ];
    let rate = median_of(&costs, |cost| cost.run.switches_per_second());
    let rows = rows.iter().map(|(name, samples)| (name.clone(), samples.iter().collect()));
    Ok(Section::new(arguments, "why")
        .figures([
            // 1.4 for the account, as measured before wakeup edges were kept, and 1 for wakeup edges.
            Figure::new("all BPF programs, of a CPU that switches 100,000 times a second (%)", percent, 2).at_most(2.4),
            Figure::median("all BPF programs, of a switch (ns)", 0, &costs, |cost| cost.own_ns),
            Figure::median("with their runs on other CPUs (ns)", 0, &costs, |cost| cost.everywhere_ns),
            Figure::median("and with the time of counting (ns)", 0, &costs, |cost| cost.counted_ns),
            Figure::median("an empty program at a switch, in the same runs (ns)", 0, &costs, |cost| cost.empty_ns),
            Figure::median("runs of programs, of a switch", 2, &costs, |cost| cost.runs),
            Figure::median("start to the screen, beyond the measured time (s)", 2, &answers, |answer_s| *answer_s),
            Figure::new("peak memory (MB)", memory_mb, 1),
            Figure::new("memory of its maps (MB)", maps_mb, 1),
            Figure::new("size of the program `whylate` (MB)", binary_mb, 1),
        ])
        .values(&[("rate", &format!("{rate:.0}")), ("table", &grid("program", &columns, rows))]))
}

fn maps_bytes(pid: u32) -> Result<u64> {
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // The descriptor may have been closed since.
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        if let (Some(id), Some(bytes)) = (field("map_id:"), field("memlock:")) {
            maps.insert(id.to_owned(), bytes.parse::<u64>().unwrap_or(0));
        }
    }
    Ok(maps.values().sum())
}
