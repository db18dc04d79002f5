// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders whether a machine has kept the thresholds that stop a measurement.

use std::io::{self, Write};

use whylate_model::units::{format_ns, format_round_ns};

use super::total::{KINDS, Total};

/// What each latency ends with, in the order of [`KINDS`].
const ENDS: [&str; 3] = ["until the interrupt", "until the thread ran", "until the return to user space"];

/// Longest latency of a kind, and its CPU.
#[derive(Clone, Copy, Debug)]
struct Worst {
    kind: usize,
    cpu: u32,
    ns: u64,
    limit_ns: u64,
}

/// Writes a line that says whether a latency reached its threshold: of the interrupt, and of the thread with its return
/// to user space. Writes nothing without a threshold, or if the latency that was `hit` is not in the sums.
pub fn write(
    out: &mut dyn Write,
    total: &Total,
    irq_ns: Option<u64>,
    thread_ns: Option<u64>,
    hit: bool,
) -> io::Result<()> {
    let limits: [Option<u64>; KINDS.len()] = [irq_ns, thread_ns, thread_ns];
    let all = total.cpus.iter().flat_map(|(&cpu, of_cpu)| {
        let kinds = limits.into_iter().zip(&of_cpu.latencies).enumerate();
        kinds.filter_map(move |(kind, (limit_ns, latencies))| {
            Some(Worst { kind, cpu, ns: latencies.max_ns(), limit_ns: limit_ns? })
        })
    });
    let all: Vec<Worst> = all.collect();
    let longest = |over: bool| all.iter().filter(|one| (one.ns >= one.limit_ns) == over).max_by_key(|one| one.ns);
    let sums = total.all();
    let periods = sums.count() + sums.missed;
    if let Some(Worst { kind, cpu, ns, limit_ns }) = longest(true) {
        let (limit, took) = (format_round_ns(*limit_ns), format_ns(*ns));
        return writeln!(out, "LATE: {limit} reached on CPU {cpu}: {took} {}", ENDS[*kind]);
    }
    let Some(Worst { kind, cpu, ns, .. }) = longest(false).filter(|_| periods > 0 && !hit) else { return Ok(()) };
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
    let cpus = match total.cpus.len() {
        1 => "1 CPU".to_owned(),
        cpus => format!("{cpus} CPUs"),
    };
    let open = match sums.overdue {
        0 => String::new(),
        overdue => format!("; {overdue} had not ended"),
    };
    writeln!(
        out,
        "ok: none of {periods} periods on {cpus} reached {limit}; worst {} {} on CPU {cpu}{open}",
        format_ns(*ns),
        ENDS[*kind]
    )
}

#[cfg(test)]
mod tests {
    use super::super::total::sample;
    use super::*;
    use crate::render::text::text_of;

    fn verdict(irq_ns: Option<u64>, thread_ns: Option<u64>, hit: bool) -> String {
        text_of(|out| write(out, &sample::total(), irq_ns, thread_ns, hit))
    }

    #[test]
    fn names_longest_latency_over_its_threshold() {
        // 3,456 times 4,900, 50,000 and 73,100 ns on CPU 0.
        assert_eq!(
            verdict(Some(1_000_000), Some(1_000_000), true),
            "LATE: 1ms reached on CPU 0: 253ms until the return to user space\n"
        );
        assert_eq!(verdict(Some(1_000_000), None, true), "LATE: 1ms reached on CPU 0: 16.9ms until the interrupt\n");
    }

    #[test]
    fn names_worst_latency_below_threshold() {
        assert_eq!(
            verdict(Some(1_000_000_000), Some(1_000_000_000), false),
            "ok: none of 18 periods on 2 CPUs reached 1s; worst 253ms until the return to user space on CPU 0\n"
        );
        let both = verdict(Some(20_000_000), Some(1_000_000_000), false);
        assert!(both.contains("reached 20ms until the interrupt or 1s until the thread ran; worst 253ms"), "{both}");
    }

    #[test]
    fn says_nothing_without_threshold_or_hit_latency() {
        assert_eq!(verdict(None, None, false), "");
        assert_eq!(verdict(Some(1_000_000_000), None, true), "");
    }
}
