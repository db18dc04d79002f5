// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `whylate` without a command costs, with every source and all causes: how much slower loads get beside what people use today, what its
//! programs take, and how soon and with how much memory it answers.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::geteuid;

use crate::child::{PATIENCE, POLL, Tool};
use crate::figures::{median, median_interval, word};
use crate::occupancy::loads::{Load, TOOLS_CPU};
use crate::occupancy::slowdown::Sample;
use crate::{kernel, machine, programs, results, whylate};

/// Of what its programs take of a CPU with 100,000 switches a second, in percent.
const LIMIT: f64 = 2.0;
/// Which load that is.
const PACED: usize = 1;
/// Programs of all sources together, at the least: from then on they are all there soon.
const PROGRAMS: usize = 30;
/// From when programs or files are there until a tool surely watches, and from its end until the kernel has put its code back.
const SETTLE: Duration = Duration::from_millis(1_500);
const SUBJECTS: [&str; 4] =
    ["`whylate`", "`perf sched record`", "`offcputime`", "nobody: what the machine adds by itself"];
const OURS: usize = 0;

/// Returns whether every figure is within its limit.
pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if !geteuid().is_root() {
        println!("skipped: needs root");
        return Ok(true);
    }
    let program = whylate::build("bench-why")?;
    let folder = tempfile::tempdir().context("cannot make a folder")?;
    let loads = [Load::pipe(), Load::paced()?, Load::messaging(), Load::fio(folder.path())];
    let cost = cost_percent(&program, &loads[PACED])?;
    let mut samples: Vec<[Vec<Sample>; SUBJECTS.len()]> = Vec::new();
    for load in &loads {
        load.run().with_context(|| format!("cannot run {}", load.name))?;
        samples.push(under(load, &program, folder.path(), arguments.rounds)?);
    }
    let footprint = footprint(&program)?;
    let text = report(arguments.rounds, &loads, &samples, &cost, &footprint);
    arguments.publish("why", &text)?;
    Ok(cost.percent <= LIMIT)
}

fn under(load: &Load, program: &Path, folder: &Path, rounds: u32) -> Result<[Vec<Sample>; SUBJECTS.len()]> {
    let mut samples: [Vec<Sample>; SUBJECTS.len()] = Default::default();
    for round in 0..rounds as usize {
        eprintln!("{}: round {} of {rounds}", load.name, round + 1);
        let mut before = load.run()?;
        for turn in 0..SUBJECTS.len() {
            let which = (round + turn) % SUBJECTS.len();
            let tool = start(program, folder, which).with_context(|| format!("cannot measure {}", SUBJECTS[which]))?;
            let watched = load.run()?;
            if let Some(tool) = tool {
                tool.end()?;
                thread::sleep(SETTLE);
            }
            let after = load.run()?;
            samples[which].push(Sample { before, watched, after: after.clone() });
            before = after;
        }
    }
    Ok(samples)
}

/// `None` for nobody.
fn start(whylate: &Path, folder: &Path, which: usize) -> Result<Option<Tool>> {
    let cpu = TOOLS_CPU.to_string();
    let (whylate, recording) = (whylate.to_string_lossy(), folder.join("perf.data"));
    let recording = recording.to_string_lossy();
    let command: &[&str] = match which {
        // Its threads that measure timers are on every CPU all the same.
        OURS => &[&whylate, "-d", "1h"],
        1 => &["perf", "sched", "record", "-o", &recording],
        2 => &["offcputime"],
        _ => return Ok(None),
    };
    let pinned = [&["-c", &cpu], command].concat();
    let tool = if which == OURS {
        Tool::start(command[0].as_ref(), &command[1..])?
    } else {
        Tool::start("taskset".as_ref(), &pinned)?
    };
    let deadline = Instant::now() + PATIENCE;
    let is_there = || -> Result<bool> {
        Ok(match which {
            OURS => programs::of_process(tool.pid())?.len() >= PROGRAMS,
            1 => fs::metadata(folder.join("perf.data")).is_ok_and(|file| file.len() > 0),
            _ => !programs::of_process(tool.pid())?.is_empty(),
        })
    };
    while !is_there()? {
        if Instant::now() > deadline {
            bail!("it does not watch");
        }
        thread::sleep(POLL);
    }
    thread::sleep(SETTLE);
    Ok(Some(tool))
}

/// What the programs take under the paced load.
struct Cost {
    /// Of the load's CPU.
    percent: f64,
    ns_per_switch: f64,
    switches_per_second: f64,
    /// Name, runs and mean of each that takes much.
    largest: Vec<(String, u64, f64)>,
}

fn cost_percent(program: &Path, load: &Load) -> Result<Cost> {
    let _counting = kernel::count_run_times().context("the kernel does not count run times of BPF programs")?;
    let tool = start(program, Path::new("/nonexistent"), OURS)?.context("it is a tool")?;
    let before = programs::of_process(tool.pid())?;
    let run = load.run()?;
    let after = programs::of_process(tool.pid())?;
    tool.end()?;
    let mut counts = programs::difference(&before, &after);
    let run_ns: u64 = counts.iter().map(|counts| counts.run_ns).sum();
    ensure!(run_ns > 0, "no BPF program has run");
    counts.sort_by_key(|counts| std::cmp::Reverse(counts.run_ns));
    let elapsed_s: f64 = run.elapsed_s.iter().sum();
    Ok(Cost {
        percent: 100.0 * run_ns as f64 / 1e9 / elapsed_s,
        ns_per_switch: run_ns as f64 / run.switches.max(1) as f64,
        switches_per_second: run.switches_per_second(),
        largest: counts.iter().take(6).map(|counts| (counts.name.clone(), counts.runs, counts.mean_ns())).collect(),
    })
}

struct Footprint {
    /// From its start to the screen, less the second that it looked for.
    answer_s: f64,
    memory_mb: f64,
    maps_mb: f64,
    binary_mb: f64,
    binary: PathBuf,
}

fn footprint(program: &Path) -> Result<Footprint> {
    let mut answers = Vec::new();
    for _ in 0..5 {
        let mut tool = Tool::start(program.as_os_str(), &["-d", "1s"])?;
        answers.push(tool.first_output()?.as_secs_f64() - 1.0);
    }
    let tool = start(program, Path::new("/nonexistent"), OURS)?.context("it is a tool")?;
    thread::sleep(Duration::from_secs(5));
    let status = fs::read_to_string(format!("/proc/{}/status", tool.pid()))?;
    let peak_kib =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")).and_then(|rest| rest.split_whitespace().next());
    let peak_kib: f64 = peak_kib.context("the kernel does not tell its memory")?.parse()?;
    let mut maps = 0_u64;
    let mut seen = std::collections::BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{}/fdinfo", tool.pid()))? {
        // A descriptor may be closed meanwhile.
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

fn report(
    rounds: u32,
    loads: &[Load],
    samples: &[[Vec<Sample>; SUBJECTS.len()]],
    cost: &Cost,
    footprint: &Footprint,
) -> String {
    let mut text = format!(
        "## What `whylate` without a command costs, with every source and all causes\n\nCommand: `make bench-why` (`cargo run --release -p \
         whylate-bench -- why --rounds {rounds}`)\n\n{}\n| figure | measured | limit | result |\n|---|--:|--:|---|\n",
        machine::describe()
    );
    // A `String` takes everything.
    let _ = writeln!(
        text,
        "| all BPF programs, of a CPU that switches {:.0} times a second (%) | {:.2} | {LIMIT:.1} | {} |",
        cost.switches_per_second,
        cost.percent,
        word(cost.percent, LIMIT)
    );
    let _ = writeln!(text, "| the same, of a switch (ns) | {:.0} | | |", cost.ns_per_switch);
    let _ = writeln!(text, "| start to the screen, beyond the time looked for (s) | {:.2} | | |", footprint.answer_s);
    let _ = writeln!(text, "| peak memory (MB) | {:.1} | | |", footprint.memory_mb);
    let _ = writeln!(text, "| memory of its maps (MB) | {:.1} | | |", footprint.maps_mb);
    let name = footprint.binary.file_name().unwrap_or_default().to_string_lossy();
    let _ = writeln!(text, "| size of the program `{name}` (MB) | {:.1} | | |", footprint.binary_mb);
    text += "\nThe kernel counts run times of programs meanwhile (`BPF_ENABLE_STATS`), which adds two readings of the clock to each. Those that \
             take most:";
    for (name, runs, mean_ns) in &cost.largest {
        let _ = write!(text, " `{name}` {mean_ns:.0} ns ({runs} runs);");
    }
    text.pop();
    text += ".\n";
    for (load, samples) in loads.iter().zip(samples) {
        let _ = write!(
            text,
            "\n### `{}`\n\n{}. {rounds} rounds; each watched run lies between two that nobody watches. Medians, with the interval in which the \
             median lies by a confidence of 95 % (sign test).\n\n| watcher | slowdown, elapsed | 95 % interval | slowdown, CPU time |\n\
             |---|--:|--:|--:|\n",
            load.name, load.what
        );
        for (which, name) in SUBJECTS.iter().enumerate() {
            let percent =
                |of: fn(&Sample) -> f64| samples[which].iter().map(|sample| 100.0 * of(sample)).collect::<Vec<_>>();
            let elapsed = percent(Sample::slowdown);
            let interval = median_interval(&elapsed)
                .map_or_else(|| "too few rounds".to_owned(), |(low, high)| format!("{low:.1} to {high:.1} %"));
            let _ = writeln!(
                text,
                "| {name} | {:.1} % | {interval} | {:.1} % |",
                median(&elapsed),
                median(&percent(Sample::cpu_slowdown))
            );
        }
    }
    text
}
