// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate` without a command, with every source and all causes: slowdown of loads compared with common tools,
//! run time of its programs, time to its answer, and memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};

use crate::child::{Tool, wait_until};
use crate::figures::{Check, median, median_interval, median_of};
use crate::occupancy::loads::{Load, TOOLS_CPU};
use crate::occupancy::slowdown::{Sample, of_round};
use crate::programs::Programs;
use crate::{figures, floor, kernel, machine, programs, results, whylate};

/// Limit of the programs' CPU time, in percent: 1.4 for the account, as measured before wakeup edges were kept, and 1
/// for wakeup edges.
const LIMIT: f64 = 2.4;
/// Switch rate at which the limit holds.
const SWITCHES_PER_SECOND: f64 = 100_000.0;
/// Minimum number of programs of all sources: from then on all are there soon.
const PROGRAMS: usize = 30;
/// Time until a tool surely watches, and after its end until the kernel has patched its code back.
const SETTLE: Duration = Duration::from_millis(1_500);
const SUBJECTS: [&str; 4] =
    ["`whylate`", "`perf sched record`", "`offcputime`", "nobody: what the machine adds by itself"];
const OURS: usize = 0;
/// Number of programs that are listed by name.
const LARGEST: usize = 12;

/// Arguments of the benchmark.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// Measure this alone, instead of everything one after another.
    #[arg(long)]
    part: Option<Part>,
}

/// What is measured by itself, and has a section of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// What BPF programs, memory and start cost.
    Cost,
    Pipe,
    Paced,
    Messaging,
    Fio,
}

impl Part {
    /// Returns the load that is slowed down; `None` for the first part.
    fn load(self, directory: &Path) -> Result<Option<Load>> {
        Ok(match self {
            Part::Cost => None,
            Part::Pipe => Some(Load::pipe()),
            Part::Paced => Some(Load::paced()?),
            Part::Messaging => Some(Load::messaging()),
            Part::Fio => Some(Load::fio(directory)),
        })
    }

    fn section(self) -> &'static str {
        match self {
            Part::Cost => "why",
            Part::Pipe => "why-pipe",
            Part::Paced => "why-paced",
            Part::Messaging => "why-messaging",
            Part::Fio => "why-fio",
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    if machine::is_skipped(&[]) {
        return Ok(true);
    }
    let program = whylate::build("bench-why")?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let rounds = arguments.results.rounds;
    let mut is_within = true;
    for &part in Part::value_variants() {
        if arguments.part.is_some_and(|wanted| wanted != part) {
            continue;
        }
        let text = match part.load(directory.path())? {
            None => {
                let costs = costs(&program, &Load::paced()?, rounds)?;
                is_within = percent(&costs, Cost::own_ns) <= LIMIT;
                report_cost(rounds, &costs, &footprint(&program)?)
            }
            Some(load) => {
                load.run().with_context(|| format!("cannot run {}", load.name))?;
                report_load(rounds, &load, &under(&load, &program, directory.path(), rounds)?)
            }
        };
        arguments.results.publish(part.section(), &text)?;
    }
    Ok(is_within)
}

/// Measures a load, by round and subject.
fn under(load: &Load, program: &Path, directory: &Path, rounds: u32) -> Result<Vec<Vec<Sample>>> {
    let samples = (0..rounds as usize).map(|round| {
        eprintln!("{}: round {} of {rounds}", load.name, round + 1);
        of_round(load, &SUBJECTS, round, |which| {
            let tool = start(program, directory, which)?;
            let watched = load.run()?;
            if let Some(tool) = tool {
                tool.end()?;
                thread::sleep(SETTLE);
            }
            Ok(watched)
        })
    });
    samples.collect()
}

/// Starts a subject; `None` for the unwatched one.
fn start(whylate: &Path, directory: &Path, which: usize) -> Result<Option<Tool>> {
    let (whylate, recording) = (whylate.to_string_lossy(), directory.join("perf.data"));
    let recording = recording.to_string_lossy();
    let command: &[&str] = match which {
        // Its threads that measure timers run on every CPU anyway.
        OURS => &[&whylate, "-d", "1h"],
        1 => &["perf", "sched", "record", "-o", &recording],
        2 => &["offcputime"],
        _ => return Ok(None),
    };
    let tool = match which {
        OURS => Tool::start(command[0], &command[1..])?,
        _ => Tool::start_on(TOOLS_CPU, command)?,
    };
    wait_until("it does not watch", || {
        Ok(match which {
            OURS => programs::of_process(tool.pid())?.len() >= PROGRAMS,
            1 => fs::metadata(directory.join("perf.data")).is_ok_and(|file| file.len() > 0),
            _ => !programs::of_process(tool.pid())?.is_empty(),
        })
    })?;
    thread::sleep(SETTLE);
    Ok(Some(tool))
}

/// Run time of the programs during one run of the paced load.
struct Cost {
    switches: u64,
    switches_per_second: f64,
    /// Counters of whylate's programs.
    programs: Vec<programs::Counts>,
    /// Mean run time of an empty program beside them at each switch, which is mostly the time of counting.
    floor_ns: f64,
    /// Run time of whylate's programs in an equal time without the load, on the other CPUs, less the time of counting.
    elsewhere_ns: f64,
}

impl Cost {
    fn runs(&self) -> u64 {
        self.programs.iter().map(|counts| counts.runs).sum()
    }

    /// Returns the run time per switch, as the kernel counts it.
    fn counted_ns(&self) -> f64 {
        self.of_switch(self.programs.iter().map(|counts| counts.run_ns).sum())
    }

    /// Returns the run time per switch, less the time of counting.
    fn everywhere_ns(&self) -> f64 {
        self.counted_ns() - self.floor_ns * self.runs() as f64 / self.switches.max(1) as f64
    }

    /// Returns the run time per switch on the load's CPU only, less the time of counting.
    fn own_ns(&self) -> f64 {
        self.everywhere_ns() - self.elsewhere_ns / self.switches.max(1) as f64
    }

    /// Returns a sum per switch.
    fn of_switch(&self, sum: u64) -> f64 {
        sum as f64 / self.switches.max(1) as f64
    }
}

/// Returns the share of a CPU that switches 100,000 times per second, in percent.
fn percent(costs: &[Cost], ns_per_switch: fn(&Cost) -> f64) -> f64 {
    100.0 * median_of(costs, ns_per_switch) * SWITCHES_PER_SECOND / 1e9
}

fn costs(program: &Path, load: &Load, rounds: u32) -> Result<Vec<Cost>> {
    let _counting = kernel::count_run_times()?;
    let tool = start(program, Path::new("/nonexistent"), OURS)?.context("it is a tool")?;
    let _floor = floor::attach_to_switches().context("cannot attach the empty program")?;
    let count = || -> Result<[Programs; 2]> {
        Ok([programs::of_process(tool.pid())?, programs::of_process(std::process::id())?])
    };
    let cpus = std::thread::available_parallelism()?.get() as f64;
    let mut costs = Vec::new();
    for _ in 0..rounds {
        let before = count()?;
        let began = Instant::now();
        let run = load.run()?;
        let took = began.elapsed();
        let after = count()?;
        thread::sleep(took);
        let idle = count()?;
        let [programs, floor] = [0, 1].map(|index| programs::difference(&before[index], &after[index]));
        let floor = floor.iter().find(|counts| counts.runs > 0).context("the empty program has not run")?;
        ensure!(programs.iter().any(|counts| counts.run_ns > 0), "no BPF program has run");
        let idle = programs::difference(&after[0], &idle[0]);
        let idle_ns =
            idle.iter().map(|counts| counts.run_ns as f64 - counts.runs as f64 * floor.mean_ns()).sum::<f64>();
        costs.push(Cost {
            switches: run.switches,
            switches_per_second: run.switches_per_second(),
            programs,
            floor_ns: floor.mean_ns(),
            elsewhere_ns: idle_ns.max(0.0) * (cpus - 1.0) / cpus,
        });
    }
    tool.end()?;
    Ok(costs)
}

struct Footprint {
    /// Time from its start to its output, less the second that it measured.
    answer_s: f64,
    memory_mb: f64,
    maps_mb: f64,
    binary_mb: f64,
    binary: PathBuf,
}

fn footprint(program: &Path) -> Result<Footprint> {
    let mut answers = Vec::new();
    for _ in 0..5 {
        let mut tool = Tool::start(program, &["-d", "1s"])?;
        answers.push(tool.first_output()?.as_secs_f64() - 1.0);
    }
    let tool = start(program, Path::new("/nonexistent"), OURS)?.context("it is a tool")?;
    thread::sleep(Duration::from_secs(5));
    let peak_kib = tool.peak_kib()?;
    let mut maps = 0_u64;
    let mut seen = std::collections::BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{}/fdinfo", tool.pid()))? {
        // The descriptor may have been closed since.
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        if let (Some(id), Some(bytes)) = (field("map_id:"), field("memlock:"))
            && seen.insert(id.to_owned())
        {
            maps += bytes.parse::<u64>().unwrap_or(0);
        }
    }
    tool.end()?;
    Ok(Footprint {
        answer_s: median(&answers),
        memory_mb: peak_kib / 1024.0,
        maps_mb: maps as f64 / 1048576.0,
        binary_mb: fs::metadata(program)?.len() as f64 / 1048576.0,
        binary: program.to_owned(),
    })
}

fn report_cost(rounds: u32, costs: &[Cost], footprint: &Footprint) -> String {
    let title = "What `whylate` without a command costs, with every source and all causes";
    let mut text = results::heading(title, "bench-why", &format!("why --rounds {rounds}"));
    let what = "all BPF programs, of a CPU that switches 100,000 times a second (%)";
    text += &figures::table([&Check::new(what, percent(costs, Cost::own_ns), "", LIMIT)], [2, 1]);
    let name = footprint.binary.file_name().unwrap_or_default().to_string_lossy();
    for (what, value, digits) in [
        ("the same, of a switch (ns)", median_of(costs, Cost::own_ns), 0),
        ("the same with what they take of other CPUs (ns)", median_of(costs, Cost::everywhere_ns), 0),
        ("and with what counting takes (ns)", median_of(costs, Cost::counted_ns), 0),
        ("an empty program at a switch, in the same runs (ns)", median_of(costs, |cost| cost.floor_ns), 0),
        ("runs of programs, of a switch", median_of(costs, |cost| cost.of_switch(cost.runs())), 2),
        ("start to the screen, beyond the time looked for (s)", footprint.answer_s, 2),
        ("peak memory (MB)", footprint.memory_mb, 1),
        ("memory of its maps (MB)", footprint.maps_mb, 1),
        (&format!("size of the program `{name}` (MB)"), footprint.binary_mb, 1),
    ] {
        text += &format!("| {what} | {value:.digits$} | | |\n");
    }
    text += &format!(
        "\nMedians of {rounds} runs of two threads that take turns on one CPU, {:.0} switches a second. The kernel counts run times of programs \
         meanwhile (`BPF_ENABLE_STATS`), which adds two readings of the clock to each run of each program: an empty program at the same \
         switches tells how much that is, and as much is taken off for each run. The kernel counts for all CPUs at once: what programs take in as \
         long a time without the load is taken off for each CPU but the load's. Those that take most, as counted on all CPUs:\n\n| program | runs a switch | mean ns | ns a switch |\n|---|--:|--:|--:|\n",
        median_of(costs, |cost| cost.switches_per_second)
    );
    let Some(first) = costs.first() else { return text };
    let mut largest: Vec<usize> = (0..first.programs.len()).collect();
    let ns = |nth: usize| median_of(costs, |cost| cost.of_switch(cost.programs[nth].run_ns));
    largest.sort_by(|&a, &b| ns(b).total_cmp(&ns(a)));
    for nth in largest.into_iter().take(LARGEST) {
        let runs = median_of(costs, |cost| cost.of_switch(cost.programs[nth].runs));
        let mean_ns = median_of(costs, |cost| cost.programs[nth].mean_ns());
        text += &format!("| `{}` | {runs:.4} | {mean_ns:.0} | {:.1} |\n", first.programs[nth].name, ns(nth));
    }
    text
}

fn report_load(rounds: u32, load: &Load, samples: &[Vec<Sample>]) -> String {
    let mut text = format!(
        "### `{}`\n\n{}. {rounds} rounds; each watched run lies between two that nobody watches. Medians, with the interval in which the \
         median lies by a confidence of 95 % (sign test).\n\n| watcher | slowdown, elapsed | 95 % interval | slowdown, CPU time |\n\
         |---|--:|--:|--:|\n",
        load.name, load.what
    );
    for (which, name) in SUBJECTS.iter().enumerate() {
        let percent =
            |of: fn(&Sample) -> f64| samples.iter().map(|round| 100.0 * of(&round[which])).collect::<Vec<_>>();
        let elapsed = percent(Sample::slowdown);
        let interval = median_interval(&elapsed)
            .map_or_else(|| "too few rounds".to_owned(), |(low, high)| format!("{low:.1} to {high:.1} %"));
        text += &format!(
            "| {name} | {:.1} % | {interval} | {:.1} % |\n",
            median(&elapsed),
            median(&percent(Sample::cpu_slowdown))
        );
    }
    text
}
