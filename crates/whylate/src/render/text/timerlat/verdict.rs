// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders whether a machine has kept the thresholds of a measurement.

use std::io::{self, Write};

use whylate_model::units::{format_ns, format_round_ns};

use super::total::{IRQ, KINDS, Total};
use crate::render::color;

/// Verdict on a latency that reached its threshold.
const LATE: &str = "LATE:";

/// End of each latency, in the order of [`KINDS`].
const ENDS: [&str; 3] = ["until the interrupt", "until the thread ran", "until the return to user space"];

/// A thread that has not run by the end of the measurement is late by at least this much: it is waited for.
const MIN_OVERDUE_NS: u64 = 200_000_000;

/// Longest latency of a kind, and its CPU.
#[derive(Clone, Copy, Debug)]
struct Worst {
    kind: usize,
    cpu: u32,
    ns: u64,
    limit_ns: u64,
}

/// Writes a line that says whether a latency reached its threshold, by kind in the order of [`KINDS`]. `hit` is a CPU on which a threshold was reached. Writes nothing without a threshold or a latency.
pub fn write(
    out: &mut dyn Write,
    total: &Total,
    limits: [Option<u64>; KINDS.len()],
    hit: Option<u32>,
) -> io::Result<()> {
    let [irq_ns, thread_ns, _] = limits;
    let all = total.cpus.iter().flat_map(|(&cpu, of_cpu)| {
        let kinds = limits.into_iter().zip(&of_cpu.latencies).enumerate();
        kinds.filter_map(move |(kind, (limit_ns, latencies))| {
            Some(Worst { kind, cpu, ns: latencies.max_ns(), limit_ns: limit_ns? })
        })
    });
    let all: Vec<Worst> = all.collect();
    let longest = |over: bool| all.iter().filter(|one| (one.ns >= one.limit_ns) == over).max_by_key(|one| one.ns);
    if let Some(Worst { kind, cpu, ns, limit_ns }) = longest(true) {
        let (limit, took) = (format_round_ns(*limit_ns), format_ns(*ns));
        let sums = &total.all().latencies[*kind];
        // A bucket that the threshold divides is left out.
        let times = match sums.count_from(*limit_ns) {
            0 | 1 => String::new(),
            times => format!("; at least {times} of {} activations reached it", sums.count()),
        };
        return writeln!(out, "{} {limit} reached on CPU {cpu}: {took} {}{times}", color::late(LATE), ENDS[*kind]);
    }
    if let Some(cpu) = hit {
        // For instance, of an activation without a switch-in.
        let late = color::late(LATE);
        return writeln!(out, "{late} a threshold was reached on CPU {cpu}, by a latency that is not in the table");
    }
    if let Some((&cpu, of_cpu)) = total.cpus.iter().find(|(_, of_cpu)| of_cpu.overdue > 0) {
        let overdue = of_cpu.overdue;
        return match thread_ns.filter(|&limit_ns| limit_ns <= MIN_OVERDUE_NS) {
            Some(limit_ns) => {
                let limit = format_round_ns(limit_ns);
                writeln!(
                    out,
                    "{} {limit} reached on CPU {cpu}: its thread had not run by the end, for {overdue} periods",
                    color::late(LATE)
                )
            }
            None => writeln!(out, "unknown: the thread of CPU {cpu} had not run by the end, for {overdue} periods"),
        };
    }
    let Some(Worst { kind, cpu, ns, .. }) = longest(false) else { return Ok(()) };
    let sums = total.all();
    // A missed period has no interrupt of its own.
    let (periods, without) = match thread_ns {
        Some(_) => (sums.count() + sums.missed, 0),
        None => (sums.latencies[IRQ].count(), sums.count() - sums.latencies[IRQ].count() + sums.missed),
    };
    if periods == 0 {
        return Ok(());
    }
    let limit = match (irq_ns, thread_ns) {
        (Some(irq_ns), Some(thread_ns)) if irq_ns != thread_ns => {
            format!(
                "{} until the interrupt or {} until the thread ran",
                format_round_ns(irq_ns),
                format_round_ns(thread_ns)
            )
        }
        _ => format_round_ns(irq_ns.or(thread_ns).unwrap_or(0)),
    };
    let cpus = match total.cpus.values().filter(|of_cpu| of_cpu.count() > 0).count() {
        1 => "1 CPU".to_owned(),
        cpus => format!("{cpus} CPUs"),
    };
    let unmeasured = match without {
        0 => String::new(),
        _ => format!("; {without} more had no interrupt of their own"),
    };
    writeln!(
        out,
        "ok: none of {periods} periods on {cpus} reached {limit}; worst {} {} on CPU {cpu}{unmeasured}",
        format_ns(*ns),
        ENDS[*kind]
    )
}

#[cfg(test)]
mod tests {
    use super::super::total::sample;
    use super::*;
    use crate::render::color::tests::colored;
    use crate::render::text::text_of;

    fn verdict(irq_ns: Option<u64>, thread_ns: Option<u64>, hit: Option<u32>) -> String {
        text_of(|out| write(out, &sample::total(), [irq_ns, thread_ns, thread_ns], hit))
    }

    #[test]
    fn names_longest_latency_over_its_threshold() {
        // 3,456 times 4,900, 50,000 and 73,100 ns on CPU 0.
        assert_eq!(
            verdict(Some(1_000_000), Some(1_000_000), Some(0)),
            "LATE: 1ms reached on CPU 0: 253ms until the return to user space\n"
        );
        assert_eq!(verdict(Some(1_000_000), None, Some(0)), "LATE: 1ms reached on CPU 0: 16.9ms until the interrupt\n");
    }

    #[test]
    fn only_the_verdict_on_what_is_late_is_colored() {
        let late = [(Some(1_000_000), Some(0)), (Some(1_000_000_000), Some(12))];
        let colored = |irq_ns, hit| colored(|| verdict(irq_ns, None, hit));
        late.into_iter().for_each(|(irq_ns, hit)| assert_eq!(colored(irq_ns, hit), ["LATE:"]));
        assert!(colored(Some(1_000_000_000), None).is_empty());
    }

    #[test]
    fn names_worst_latency_below_threshold() {
        assert_eq!(
            verdict(Some(1_000_000_000), Some(1_000_000_000), None),
            "ok: none of 18 periods on 2 CPUs reached 1s; worst 253ms until the return to user space on CPU 0\n"
        );
        let both = verdict(Some(20_000_000), Some(1_000_000_000), None);
        assert!(both.contains("reached 20ms until the interrupt or 1s until the thread ran; worst 253ms"), "{both}");
        // The 12 missed periods had no interrupt of their own.
        let irq = verdict(Some(1_000_000_000), None, None);
        assert!(irq.starts_with("ok: none of 6 periods on 2 CPUs reached 1s; worst 16.9ms"), "{irq}");
        assert!(irq.ends_with("on CPU 0; 12 more had no interrupt of their own\n"), "{irq}");
    }

    #[test]
    fn thread_that_has_not_run_by_the_end_is_late() {
        let mut total = sample::total();
        total.cpus.get_mut(&12).expect("it is measured").overdue = 3;
        // Otherwise, other latencies reach the limit.
        total.cpus.values_mut().for_each(|of_cpu| of_cpu.latencies = Default::default());
        let verdict = |limit_ns| text_of(|out| write(out, &total, [None, Some(limit_ns), Some(limit_ns)], None));
        assert_eq!(
            verdict(500_000),
            "LATE: 500us reached on CPU 12: its thread had not run by the end, for 3 periods\n"
        );
        assert!(verdict(1_000_000_000).starts_with("unknown: the thread of CPU 12 had not run"));
    }

    #[test]
    fn says_nothing_without_threshold_and_names_hit_without_latency() {
        assert_eq!(verdict(None, None, None), "");
        assert!(verdict(Some(1_000_000_000), None, Some(12)).starts_with("LATE: a threshold was reached on CPU 12"));
    }
}
