// SPDX-License-Identifier: MIT OR Apache-2.0
//! Formats the figures as Markdown, and checks their limits.

use super::cost::{self, Sample as Cost};
use super::loads::{Load, PACED, Run};
use super::slowdown::{self, Sample as Slowdown};
use super::subjects::{Subject, Tools};
use crate::figures::{Spread, first_quartile, median_of, verdict};

/// Limit of the program at a context switch.
const SWITCH_LIMIT_NS: f64 = 200.0;
/// Limit of the slowdown of the paced load, in percent.
const SLOWDOWN_LIMIT: f64 = 2.0;

impl Spread {
    fn percent(&self) -> String {
        let [median, min, max] = [self.median, self.min, self.max].map(|part| part * 100.0);
        format!("{median:.2} % ({min:.2} to {max:.2})")
    }

    fn ns(&self) -> String {
        format!("{:.0} ({:.0} to {:.0})", self.median, self.min, self.max)
    }
}

/// Returns a figure of one subject under one load, over all rounds.
fn spread<T>(rounds: &[Vec<Vec<T>>], load: usize, subject: usize, figure: impl Fn(&T) -> f64) -> Spread {
    Spread::from_values(&rounds.iter().map(|round| figure(&round[load][subject])).collect::<Vec<_>>())
}

fn index_of(subject: Subject, subjects: &[Subject]) -> usize {
    subjects.iter().position(|&other| other == subject).unwrap_or_default()
}

/// Compares the first quartile of all watched runs of the paced load with that of the unwatched ones: other tasks on
/// the machine only make a run longer.
fn paced_percent(rounds: &[slowdown::Round], subject: Subject) -> f64 {
    let which = index_of(subject, &Subject::ALL);
    let all = |runs: fn(&Slowdown) -> [&Run; 2], subjects: &[usize]| {
        let samples = rounds.iter().flat_map(|round| subjects.iter().map(|&subject| &round[PACED][subject]));
        first_quartile(&samples.flat_map(runs).flat_map(|run| run.elapsed_s.iter().copied()).collect::<Vec<_>>())
    };
    let every = (0..Subject::ALL.len()).collect::<Vec<_>>();
    let alone_s = all(|sample| [&sample.before, &sample.after], &every);
    (all(|sample| [&sample.watched, &sample.watched], &[which]) / alone_s - 1.0) * 100.0
}

/// Returns the larger figure of the loads.
fn at_switch_ns(rounds: &[cost::Round]) -> f64 {
    let ours = index_of(Subject::Whylate, &Subject::WITH_PROGRAMS);
    let loads = rounds.first().map_or(0, Vec::len);
    (0..loads).map(|load| spread(rounds, load, ours, Cost::at_switch_ns).median).fold(0.0, f64::max)
}

/// Returns whether all limits are kept.
pub fn within_limits(slowdowns: &[slowdown::Round], costs: &[cost::Round]) -> bool {
    paced_percent(slowdowns, Subject::Whylate) <= SLOWDOWN_LIMIT && at_switch_ns(costs) <= SWITCH_LIMIT_NS
}

/// Formats everything that was measured.
pub fn markdown(
    tools: &Tools,
    loads: &[Load],
    slowdowns: &[slowdown::Round],
    costs: &[cost::Round],
    heading: String,
) -> String {
    let (mut text, count) = (heading, slowdowns.len());
    text += "\n| figure | measured | limit | result |\n|---|--:|--:|---|\n";
    let (ns, percent) = (at_switch_ns(costs), paced_percent(slowdowns, Subject::Whylate));
    text += &format!(
        "| `on_sched_switch` at a context switch, the larger one of the loads | {ns:.0} ns | {SWITCH_LIMIT_NS:.0} ns | {} |\n\
         | slowdown at 100,000 switches a second, first quartile of all runs | {percent:.2} % | {SLOWDOWN_LIMIT:.0} % | {} |\n",
        verdict(ns, SWITCH_LIMIT_NS),
        verdict(percent, SLOWDOWN_LIMIT)
    );
    let paced_runs = loads.get(PACED).map_or(0, |load| load.runs);
    text += &format!(
        "\n### Slowdown\n\nEach run of a load that is watched lies between two that nobody watches, and is compared with their mean: \
         by what the load tells (elapsed), and by its time on CPUs, which leaves out the time of other threads there. \
         Rounds: {count}, and one more before them; the subjects take turns in a rotating order. Medians; in brackets \
         the smallest and the largest. \"Nobody\" is a run that nobody watches beside the next such run: what the \
         machine itself adds. The paced load runs {paced_runs} times for each sample; the figure above compares the first quartile of all its \
         watched runs with that of all others, as others on the machine only ever make a run longer. The kernel counts no run times meanwhile. Tools are on another CPU than a load of one \
         CPU; what they do there is in no figure.\n"
    );
    for (index, load) in loads.iter().enumerate() {
        text += &slowdown_table(tools, load, slowdowns, index);
    }
    text += "\n### Cost of one event\n\nThe kernel's own count (`BPF_ENABLE_STATS`); its clock reads are in every figure, \
             and the floor tells about how much they are. `perf` runs no BPF program.\n";
    for (index, load) in loads.iter().enumerate().take(costs.first().map_or(0, Vec::len)) {
        text += &cost_table(load, costs, index);
    }
    text
}

fn slowdown_table(tools: &Tools, load: &Load, rounds: &[slowdown::Round], index: usize) -> String {
    let unwatched: Vec<_> = rounds.iter().flat_map(|round| &round[index]).map(|sample| &sample.before).collect();
    let rate = median_of(&unwatched, |run| run.switches_per_second());
    let elapsed_s = median_of(&unwatched, |run| run.mean_s());
    let noise =
        Spread::from_values(&rounds.iter().flat_map(|round| &round[index]).map(Slowdown::noise).collect::<Vec<_>>());
    let mut text = format!(
        "\nLoad: `{}`: {}. When nobody watches: {elapsed_s:.2} s, {rate:.0} switches/s.\n\n\
         | subject | what | slowdown, elapsed | slowdown, CPU time | added CPU ns a switch |\n|---|---|--:|--:|--:|\n\
         | nobody | | {} | | |\n",
        load.name,
        load.what,
        noise.percent()
    );
    for (which, subject) in Subject::ALL.into_iter().enumerate() {
        let spread = |figure: fn(&Slowdown) -> f64| spread(rounds, index, which, figure);
        text += &format!(
            "| {} | {} | {} | {} | {} |\n",
            subject.name(),
            subject.what(tools),
            spread(Slowdown::slowdown).percent(),
            spread(Slowdown::cpu_slowdown).percent(),
            spread(Slowdown::added_ns_per_switch).ns()
        );
    }
    if index == PACED {
        let quartiles =
            Subject::ALL.map(|subject| format!("{} {:.2} %", subject.name(), paced_percent(rounds, subject)));
        text += &format!("\nBy the first quartile of all runs: {}.\n", quartiles.join(", "));
    }
    text
}

fn cost_table(load: &Load, rounds: &[cost::Round], index: usize) -> String {
    let mut text = format!(
        "\nLoad: `{}`\n\n| subject | program | runs a switch | mean ns, median (min to max) |\n|---|---|--:|--:|\n",
        load.name
    );
    let mut idle = Vec::new();
    for (which, subject) in Subject::WITH_PROGRAMS.into_iter().enumerate() {
        let names = rounds.first().map_or(&[][..], |round| &round[index][which].programs);
        for (nth, counts) in names.iter().enumerate() {
            let runs = spread(rounds, index, which, |sample| sample.programs[nth].runs as f64 / sample.switches as f64);
            if runs.max == 0.0 {
                idle.push(format!("`{}`", counts.name));
                continue;
            }
            let ns = spread(rounds, index, which, |sample| sample.programs[nth].mean_ns());
            text += &format!("| {} | `{}` | {:.4} | {} |\n", subject.name(), counts.name, runs.median, ns.ns());
        }
        let sum = spread(rounds, index, which, Cost::ns_per_switch);
        text += &format!("| {} | all, a switch of the load | | {} |\n", subject.name(), sum.ns());
    }
    if !idle.is_empty() {
        text += &format!("\nNever run under this load: {}.\n", idle.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::Counts;

    fn slowdown_rounds(watched_s: f64) -> Vec<slowdown::Round> {
        let run = |elapsed_s| Run { elapsed_s: vec![elapsed_s; 10], cpu_s: elapsed_s, switches: 1_000_000 };
        let sample = Slowdown { before: run(1.0), watched: run(watched_s), after: run(1.2) };
        vec![vec![vec![sample; Subject::ALL.len()]; 3]; 5]
    }

    fn cost_rounds(ns: u64) -> Vec<cost::Round> {
        let program = |name: &str, run_ns| Counts { name: name.to_owned(), runs: 10, run_ns: run_ns * 10, missed: 0 };
        let programs = vec![program("on_sched_waking", 1000), program("on_sched_switch", ns)];
        vec![vec![vec![Cost { programs, switches: 10 }; Subject::WITH_PROGRAMS.len()]; 2]; 5]
    }

    #[test]
    fn slowdown_is_relative_to_both_neighbors() {
        let sample = &slowdown_rounds(1.155)[0][0][0];
        assert!((sample.slowdown() - 0.05).abs() < 1e-9);
        assert!((sample.added_ns_per_switch() - 55.0).abs() < 1e-6);
    }

    #[test]
    fn values_above_the_limit_fail() {
        assert!(within_limits(&slowdown_rounds(1.019), &cost_rounds(200)));
        assert!(!within_limits(&slowdown_rounds(1.021), &cost_rounds(200)));
        assert!(!within_limits(&slowdown_rounds(1.0), &cost_rounds(201)));
    }
}
