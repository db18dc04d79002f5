// SPDX-License-Identifier: MIT OR Apache-2.0
//! Formats the figures as Markdown, and checks their limits.

use super::cost::{self, BPFTRACE, LOADS, Round, SUBJECTS, Sample};
use crate::figures::{self, Check, Spread, median, verdict};

/// One subject under one load, over all rounds.
struct Row {
    ns: Spread,
    /// The ratios within each round.
    ratio: Spread,
    programs: Vec<(String, f64)>,
    items_per_second: f64,
    missed: u64,
}

impl Row {
    fn new(rounds: &[Round], load: usize, subject: usize) -> Self {
        let samples: Vec<&Sample> = rounds.iter().map(|round| &round[load][subject]).collect();
        let medians = |figure: &dyn Fn(&Sample) -> f64| -> Vec<f64> { samples.iter().map(|s| figure(s)).collect() };
        let ratios: Vec<f64> =
            rounds.iter().map(|round| round[load][subject].cost_ns() / round[load][BPFTRACE].cost_ns()).collect();
        let names = samples.first().map_or(&[][..], |sample| &sample.programs);
        let programs = names.iter().enumerate().map(|(index, (name, _))| {
            let mean_ns = median(&medians(&|sample| sample.programs.get(index).map_or(0.0, |program| program.1)));
            (name.clone(), mean_ns)
        });
        Self {
            ns: Spread::from_values(&medians(&Sample::cost_ns)),
            ratio: Spread::from_values(&ratios),
            programs: programs.collect(),
            items_per_second: median(&medians(&|sample| sample.items_per_second)),
            missed: samples.iter().map(|sample| sample.missed).sum(),
        }
    }
}

/// Returns whether all limits are kept.
pub fn within_limits(rounds: &[Round], checks: &[Check]) -> bool {
    let costs = (0..LOADS.len()).all(|load| {
        SUBJECTS
            .iter()
            .enumerate()
            .all(|(subject, of)| of.limit.is_none_or(|l| Row::new(rounds, load, subject).ratio.median <= l))
    });
    costs && checks.iter().all(Check::is_within)
}

/// Formats everything that was measured.
pub fn markdown(rounds: &[Round], checks: &[Check], count: u32, heading: &str) -> String {
    let mut text = format!(
        "{heading}\nCost of one work item: the sum of the mean run times of a subject's BPF programs, as the kernel counts them \
         (`BPF_ENABLE_STATS`; its clock reads are in every figure). Rounds: {count}, and one more before them; in each, each subject alone, \
         in a rotating order. The ratio to bpftrace is the median of the ratios within each round; in brackets the \
         smallest and the largest.\n"
    );
    for (load, at_once) in LOADS.iter().enumerate() {
        text += &format!("\nLoad: `whylate inject work --items {} --at-once {at_once}`\n\n", cost::ITEMS);
        text += "| subject | what | median ns | min ns | ratio to bpftrace | limit | result | items/s |\n";
        text += "|---|---|--:|--:|--:|--:|---|--:|\n";
        let mut details = String::new();
        for (index, subject) in SUBJECTS.iter().enumerate() {
            let row = Row::new(rounds, load, index);
            let (limit, result) = match subject.limit {
                Some(limit) => (format!("{limit:.2}"), verdict(row.ratio.median, limit)),
                None => (String::new(), ""),
            };
            text += &format!(
                "| {} | {} | {:.0} | {:.0} | {:.2} ({:.2} to {:.2}) | {limit} | {result} | {:.0} |\n",
                subject.name,
                subject.what,
                row.ns.median,
                row.ns.min,
                row.ratio.median,
                row.ratio.min,
                row.ratio.max,
                row.items_per_second
            );
            details += &details_line(subject.name, &row);
        }
        text += &format!("\nEach program, mean ns, median of the rounds:\n\n{details}");
    }
    text + &figures::table(checks, [1, 0])
}

fn details_line(subject: &str, row: &Row) -> String {
    let mut line = format!("- {subject}:");
    for (index, (name, mean_ns)) in row.programs.iter().enumerate() {
        line += &format!("{} `{name}` {mean_ns:.0}", if index > 0 { "," } else { "" });
    }
    if row.missed > 0 {
        line += &format!(" ({} events of all rounds missed)", row.missed);
    }
    line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(costs: [f64; 4]) -> Vec<Round> {
        let sample = |ns| Sample { programs: vec![("p".to_owned(), ns)], items_per_second: 1.0, missed: 0 };
        vec![vec![costs.map(sample).to_vec(); LOADS.len()]; 3]
    }

    #[test]
    fn values_above_the_limit_fail() {
        assert!(within_limits(&rounds([10.0, 100.0, 60.0, 120.0]), &[]));
        assert!(!within_limits(&rounds([10.0, 100.0, 61.0, 120.0]), &[]));
        assert!(!within_limits(&rounds([10.0, 100.0, 60.0, 120.0]), &[Check::new("x", 31.0, "MB", 30.0)]));
        let text = markdown(&rounds([10.0, 100.0, 60.0, 121.0]), &[], 3, "- here\n");
        assert!(text.contains("0.60 (0.60 to 0.60) | 0.60 | pass") && text.contains("| 1.20 | **fail** |"));
    }
}
