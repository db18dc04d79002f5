// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slowdown of a scheduler benchmark by `whylate irqsoff`, in a virtual machine: for what the running kernel may lack,
//! the preemptirq events and the irqsoff tracer.

use anyhow::{Context, Result, ensure};

use crate::results::{Arguments, Section};
use crate::table::{Show, column};
use crate::vm;

const KERNEL: &str = "6.12-tracers";
/// The watchers, with the names of their rows.
const SUBJECTS: [(&str, &str); 5] = [
    ("events", "`whylate irqsoff --backend events`"),
    ("tracer", "`whylate irqsoff --backend tracer`"),
    ("bare", "the kernel's tracer `irqsoff` alone, `function-trace` off"),
    ("bpftrace", "bpftrace script on `preemptirq:irq_disable` and `irq_enable`"),
    ("ticks", "`whylate irqsoff --backend ticks`"),
];
/// Takes a second or two there.
const LOAD: &str = "perf bench sched messaging -g 1 -l 100";

/// A minimal script for the question.
const BPFTRACE: &str = "BEGIN { printf(\"ready\\n\"); } tracepoint:preemptirq:irq_disable { @start[cpu] = nsecs; } \
                        tracepoint:preemptirq:irq_enable /@start[cpu]/ { @length = hist(nsecs - @start[cpu]); delete(@start[cpu]); }";

/// No figure has a limit: only the order of emulated figures means anything.
pub fn run(arguments: &Arguments) -> Result<bool> {
    let rounds = arguments.rounds.to_string();
    let (load, script) = (format!("LOAD={LOAD}"), format!("SCRIPT={BPFTRACE}"));
    let before = ["--timeout", "3000", "--with", "perf", "--with", "bpftrace", "--", &load, &script];
    let text = vm::run(KERNEL, &before, include_str!("irqsoff_vm_cost.sh"), &[&rounds])?;
    ensure!(text.contains("@ end"), "the virtual machine failed: {text}");
    let slowdowns = slowdowns(&text)?;
    let rows = SUBJECTS.map(|(key, name)| {
        let samples = slowdowns.iter().filter(|(watcher, _)| *watcher == key).map(|(_, percent)| percent);
        (name.to_owned(), samples.collect::<Vec<_>>())
    });
    if let Some((name, _)) = rows.iter().find(|(_, samples)| samples.is_empty()) {
        anyhow::bail!("{name} was not measured");
    }
    let columns = [
        column("slowdown", Show::Spread(2), " %", |percent: &f64| *percent),
        column("first quartile", Show::Quartile(2), " %", |percent| *percent),
    ];
    let title = "Cost of `whylate irqsoff` beside the kernel's tracer, in a virtual machine";
    Section::new(
        arguments,
        "irqsoff-vm-cost",
        title,
        "bench-irqsoff",
        &format!("irqsoff-vm-cost --rounds {rounds}"),
    )
    .fact(&format!(
        "in the machine: Linux {KERNEL}, CPUs that QEMU emulates, which are slower for BPF programs than for the kernel: \
         only the order of the watchers means anything"
    ))
    .text(&format!(
        "Slowdown of `{LOAD}`, {rounds} rounds: each watched run is compared with the mean of the unwatched runs right before and right \
         after it; the watchers take turns at being first. Medians; in brackets the smallest and the largest."
    ))
    .grid("watcher", &columns, rows)
    .publish()
}

/// Parses lines such as `@ nothing 1.234` and `@ ticks 1.235`, in the order in which they ran. Returns the slowdown in
/// percent of each watched run, against the mean of the unwatched runs right before and right after it.
fn slowdowns(text: &str) -> Result<Vec<(&str, f64)>> {
    let runs: Vec<(&str, f64)> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("@ ")?.split_once(' '))
        .map(|(name, seconds)| Ok((name, seconds.parse().with_context(|| format!("{name} has no time: {seconds}"))?)))
        .collect::<Result<_>>()?;
    let watched = runs.windows(3).filter_map(|neighbors| match *neighbors {
        [("nothing", before_s), (name, watched_s), ("nothing", after_s)] => {
            Some((name, 100.0 * (2.0 * watched_s / (before_s + after_s) - 1.0)))
        }
        _ => None,
    });
    Ok(watched.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_each_run_with_its_neighbors() {
        let text = "@ nothing 1.0\n@ ticks 2.2\nx\n@ nothing 1.2\n@ bare 3.3\n@ nothing 1.0\n@ end\n";
        let slowdowns = slowdowns(text).expect("read");
        let rounded: Vec<(&str, f64)> = slowdowns.iter().map(|&(name, percent)| (name, percent.round())).collect();
        assert_eq!(rounded, [("ticks", 100.0), ("bare", 200.0)]);
        assert!(super::slowdowns("@ nothing nothing\n@ ticks 1\n").is_err());
    }
}
