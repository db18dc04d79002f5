// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of the account of the CPUs, compared with other tools that record every switch under the same loads.

use std::fs;

use anyhow::{Context as _, Result, ensure};

use crate::drivers::{Rounds, Slowdown, in_rounds, slowdowns};
use crate::loads::{self, Load, Run};
use crate::programs::Counts;
use crate::results::{Arguments, Section};
use crate::subject::{Ready, Subject};
use crate::table::{Figure, Show, column, first_quartile, grid, lines, median_of};
use crate::{kernel, machine};

/// The index of the paced load, and of whylate among the subjects with BPF programs and among those of slowdowns.
const PACED: usize = 1;
const WHYLATE: usize = 1;

#[derive(Clone, Debug)]
struct Cost {
    programs: Vec<Counts>,
    switches: u64,
}

impl Cost {
    /// Returns the run time of all programs per context switch.
    fn ns_per_switch(&self) -> f64 {
        self.programs.iter().map(|program| program.run_ns as f64).sum::<f64>() / self.switches.max(1) as f64
    }

    /// Returns the program at a context switch: `on_sched_switch`, runqlat's `sched_switch` or the floor's `on_switch`.
    fn at_switch(&self) -> Option<&Counts> {
        self.programs.iter().find(|program| program.name.ends_with("_switch"))
    }
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let tools = [("perf", "no perf to compare with")];
    let Some(whylate) = arguments.prepare("bench-occupancy", &tools)? else { return Ok(true) };
    // One CPU for the load, and one for the tools.
    machine::two_cpus()?;
    // With this setting, each run of a program costs two more clock readings.
    let setting = fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").unwrap_or_default();
    ensure!(setting.trim() != "1", "kernel.bpf_stats_enabled slows every BPF program: set it to 0 and try again");
    let (load_before, rounds) = (machine::load_average(), arguments.rounds);
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let command = [&whylate.to_string_lossy(), "wq", "--why", "10s"];
    let whylate = || Subject::new("`whylate wq --why 10s`", "occupancy; no item is late", &command, Ready::Output);
    let with_programs = [Subject::empty_at_switches(), whylate(), Subject::runqlat()?];
    let loads = [Load::pipe(), Load::paced()?, Load::messaging()];
    let costs = costs(&with_programs, &loads[..=PACED], rounds)?;
    let [floor, ours, runqlat] = with_programs;
    let subjects = [floor, ours, Subject::perf_sched(directory.path()), runqlat];
    let slowdowns = loads.iter().map(|load| slowdowns(load, &subjects, rounds)).collect::<Result<Vec<_>>>()?;

    let at_switch = "`on_sched_switch` at a context switch, the larger one of the loads";
    let slowdown = "slowdown at 100,000 switches a second, first quartile of all runs";
    let mut section = Section::new(arguments, "occupancy")
        .values(&[("load_before", &load_before), ("paced_runs", &loads::PACED_RUNS)])
        .figures([
            Figure::new(at_switch, at_switch_ns(&costs), 0).unit("ns").at_most(200.0),
            Figure::new(slowdown, paced_percent(&slowdowns[PACED], WHYLATE), 2).unit("%").at_most(2.0),
        ]);
    let columns = [
        column("slowdown, elapsed", Show::Spread(2), " %", Slowdown::percent),
        column("slowdown, CPU time", Show::Spread(2), " %", Slowdown::cpu_percent),
        column("added CPU ns a switch", Show::Spread(0), "", Slowdown::added_ns_per_switch),
    ];
    for (load, measured) in loads.iter().zip(&slowdowns) {
        let unwatched: Vec<&Run> = measured.all().map(|sample| &sample.before).collect();
        let rate = median_of(&unwatched, |run| run.switches_per_second());
        let elapsed_s = median_of(&unwatched, |run| run.mean_s());
        let noise: Vec<f64> = measured.all().map(Slowdown::noise_percent).collect();
        section = section
            .add(
                "slowdowns",
                format!("Load: `{}`: {}. Unwatched: {elapsed_s:.2} s, {rate:.0} switches/s.", load.name, load.what),
            )
            .add("slowdowns", grid("subject | what", &columns, measured.rows(subjects.iter().map(Subject::label))))
            .line("slowdowns", &format!("| nothing | | {} | | |", Show::Spread(2).cell(&noise, " %")));
    }
    let quartile = |(which, subject): (usize, &Subject)| {
        format!("{} {:.2} %", subject.name, paced_percent(&slowdowns[PACED], which))
    };
    let quartiles: Vec<String> = subjects.iter().enumerate().map(quartile).collect();
    section = section.add("quartiles", quartiles.join(", "));
    for (load, measured) in loads.iter().zip(&costs) {
        let (rows, idle) = cost_rows(measured, [&subjects[0], &subjects[1], &subjects[3]]);
        section = section
            .add("costs", format!("Load: `{}`", load.name))
            .add("costs", lines("subject | program | >runs a switch | >mean ns, median (min to max)", rows));
        if !idle.is_empty() {
            section = section.add("costs", format!("Never run under this load: {}.", idle.join(", ")));
        }
    }
    section.publish()
}

/// Measures the run time of BPF programs per event under each load, as the kernel counts it.
fn costs(subjects: &[Subject], loads: &[Load], rounds: u32) -> Result<Vec<Rounds<Cost>>> {
    let _counting = kernel::count_run_times()?;
    let names: Vec<&str> = subjects.iter().map(|subject| subject.name).collect();
    let of_load = |load: &Load| {
        in_rounds(&format!("cost of an event, {}", load.name), (rounds, false), &names, |which| {
            let watch = subjects[which].watch(load.is_pinned, |running| running.count(|| load.run()))?;
            let (run, programs) = watch.0;
            let cost = Cost { programs, switches: run.switches };
            let program = cost.at_switch().with_context(|| format!("no program at a context switch: {cost:?}"))?;
            // The kernel skips a program that would run inside itself.
            let is_whole = program.runs + program.missed >= run.switches;
            ensure!(is_whole, "its program {} ran {} times for {} switches", program.name, program.runs, run.switches);
            Ok(cost)
        })
    };
    loads.iter().map(of_load).collect()
}

/// Returns the mean run time of whylate's program at a context switch, under the load where it is larger.
fn at_switch_ns(costs: &[Rounds<Cost>]) -> f64 {
    let at_switch_ns = |cost: &Cost| cost.at_switch().map_or(0.0, Counts::mean_ns);
    costs.iter().map(|measured| measured.median(WHYLATE, at_switch_ns)).fold(0.0, f64::max)
}

/// Compares the first quartile of all watched runs of the paced load with that of the unwatched ones: other tasks on
/// the machine only make a run longer.
fn paced_percent(measured: &Rounds<Slowdown>, which: usize) -> f64 {
    let quartile_s = |runs: Vec<&Run>| {
        first_quartile(&runs.iter().flat_map(|run| run.elapsed_s.iter().copied()).collect::<Vec<_>>())
    };
    let unwatched_s = quartile_s(measured.all().flat_map(|sample| [&sample.before, &sample.after]).collect());
    let watched = measured.subject(which);
    100.0 * (quartile_s(watched.iter().map(|sample| &sample.watched).collect()) / unwatched_s - 1.0)
}

/// Returns a row for each program, and the names of those that never ran.
fn cost_rows(measured: &Rounds<Cost>, subjects: [&Subject; 3]) -> (Vec<String>, Vec<String>) {
    let (mut rows, mut idle) = (Vec::new(), Vec::new());
    for (which, Subject { name, .. }) in subjects.into_iter().enumerate() {
        let samples = measured.subject(which);
        let values = |figure: &dyn Fn(&Cost) -> f64| samples.iter().map(|cost| figure(cost)).collect::<Vec<_>>();
        let programs = samples.first().map_or(&[][..], |cost| &cost.programs);
        for (nth, counts) in programs.iter().enumerate() {
            let runs = values(&|cost| cost.programs[nth].runs as f64 / cost.switches as f64);
            if runs.iter().all(|&runs| runs == 0.0) {
                idle.push(format!("`{}`", counts.name));
                continue;
            }
            let ns = values(&|cost| cost.programs[nth].mean_ns());
            let (runs, ns) = (Show::Median(4).cell(&runs, ""), Show::Spread(0).cell(&ns, ""));
            rows.push(format!("{name} | `{}` | {runs} | {ns}", counts.name));
        }
        let sum = Show::Spread(0).cell(&values(&Cost::ns_per_switch), "");
        rows.push(format!("{name} | all, a switch of the load | | {sum}"));
    }
    (rows, idle)
}

#[cfg(test)]
#[path = "../unit/occupancy.rs"]
mod tests;
