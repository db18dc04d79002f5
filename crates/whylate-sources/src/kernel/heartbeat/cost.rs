// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures the CPU time of a timer interrupt: a microsecond or two on most machines, and ten times that if a
//! hypervisor has to set the timer and deliver its interrupt.

use std::thread;

use rustix::thread::sched_getcpu;

use crate::kernel::clock::{monotonic_ns, thread_cpu_ns};
use crate::kernel::perf_event::{EVERY_THREAD, start_timer};
use crate::kernel::priority::run_on;

/// Timer period: short for many interrupts, but not so short that the kernel throttles it.
const PERIOD_NS: u64 = 200_000;
/// CPU time of the measuring thread, some 40 interrupts.
const OWN_NS: u64 = 8_000_000;
/// Time limit, if other threads occupy the CPU.
const TIMEOUT_NS: u64 = 60_000_000;
/// Number of clock reads that measure the cost of a read.
const READINGS: usize = 201;
/// Minimum duration of an interrupt.
const SHORTEST_NS: u64 = 300;
/// Delay of a timer's interrupt after its due time, give or take half of it.
const JITTER_NS: u64 = 10_000;
/// Minimum number of interrupts for a result.
const MIN_INTERRUPTS: usize = 10;
/// Maximum number of gaps: many more than interrupts.
const MAX_GAPS: usize = 1_024;

/// A gap between two clock reads in which the thread did not run.
#[derive(Clone, Copy, Debug)]
struct Gap {
    from_ns: u64,
    ns: u64,
}

/// Returns the CPU time of a timer interrupt in nanoseconds, as seen by a thread that reads the clock all the time;
/// `None` if it cannot be measured. Takes some 10 ms on one of the measured CPUs.
pub(crate) fn interrupt_ns(measured: &[u32]) -> Option<u64> {
    // The current CPU was free just now.
    let here = u32::try_from(sched_getcpu()).ok().filter(|here| measured.contains(here));
    let cpu = here.or(measured.last().copied())?;
    // In a thread of its own, so that the caller's affinity does not change.
    let measuring = thread::Builder::new().name("heartbeat-cost".to_owned()).spawn(move || measure(cpu)).ok()?;
    measuring.join().ok()?
}

fn measure(cpu: u32) -> Option<u64> {
    run_on(&[cpu]).ok()?;
    let mut readings = [0; READINGS];
    let mut last_ns = monotonic_ns();
    for reading in &mut readings {
        let now_ns = monotonic_ns();
        *reading = now_ns - last_ns;
        last_ns = now_ns;
    }
    let reading_ns = median(&mut readings)?;
    // Runs until the end of this function.
    let _timer = start_timer(EVERY_THREAD, cpu as libc::c_int, PERIOD_NS).ok()?;
    let long_ns = reading_ns + SHORTEST_NS.max(reading_ns);
    let mut gaps = Vec::with_capacity(MAX_GAPS);
    let began_own_ns = thread_cpu_ns();
    let mut last_ns = monotonic_ns();
    let deadline_ns = last_ns + TIMEOUT_NS;
    while last_ns < deadline_ns && gaps.len() < MAX_GAPS {
        let now_ns = monotonic_ns();
        let gap_ns = now_ns - last_ns;
        if gap_ns < long_ns {
            last_ns = now_ns;
        } else {
            gaps.push(Gap { from_ns: last_ns, ns: gap_ns });
            if thread_cpu_ns() - began_own_ns >= OWN_NS {
                break;
            }
            last_ns = monotonic_ns();
        }
    }
    interrupt_ns_from(&gaps, thread_cpu_ns() - began_own_ns, reading_ns)
}

/// Computes the result from the long gaps between clock reads and the thread's CPU time, in which alone the timer was
/// due. The timer's gaps start at the same phase of its period, others anywhere.
fn interrupt_ns_from(gaps: &[Gap], own_ns: u64, reading_ns: u64) -> Option<u64> {
    let due = usize::try_from(own_ns / PERIOD_NS).ok()?;
    let mut timers = gaps_in_phase(gaps);
    if timers.len() < MIN_INTERRUPTS || timers.len() * 3 < due {
        return None;
    }
    Some(median(&mut timers)?.saturating_sub(reading_ns))
}

/// Returns the lengths of the largest set of gaps that start at the same phase of the timer's period, give or take its
/// jitter.
fn gaps_in_phase(gaps: &[Gap]) -> Vec<u64> {
    let after = |gap: &Gap, first: &Gap| (PERIOD_NS + gap.from_ns % PERIOD_NS - first.from_ns % PERIOD_NS) % PERIOD_NS;
    let near = |first: &Gap| gaps.iter().filter(|gap| after(gap, first) < JITTER_NS).map(|gap| gap.ns).collect();
    gaps.iter().map(near).max_by_key(Vec::len).unwrap_or_default()
}

/// Returns the median; `None` for an empty slice.
fn median(values: &mut [u64]) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_40_NS: u64 = 40 * PERIOD_NS;

    /// Gaps of a timer with some jitter.
    fn timers(count: u64, ns: u64) -> Vec<Gap> {
        // Near the wraparound of the phase.
        let first_ns = 7 * PERIOD_NS - 1_000;
        (0..count).map(|number| Gap { from_ns: first_ns + number * PERIOD_NS + 500 * (number % 5), ns }).collect()
    }

    /// Gaps at varying phases of the timer's period.
    fn others(count: u64, ns: u64) -> Vec<Gap> {
        (0..count).map(|number| Gap { from_ns: 7 * PERIOD_NS + number * 17_137, ns }).collect()
    }

    #[test]
    fn cost_is_median_gap_without_clock_read() {
        assert_eq!(interrupt_ns_from(&timers(40, 14_020), OWN_40_NS, 20), Some(14_000));
    }

    #[test]
    fn tolerates_longer_gaps_below_half() {
        let gaps = [timers(25, 14_020), timers(15, 90_020)].concat();
        assert_eq!(interrupt_ns_from(&gaps, OWN_40_NS, 20), Some(14_000));
    }

    #[test]
    fn ignores_gaps_out_of_phase() {
        for (count, ns) in [(9, 3_000_000), (120, 60_000), (400, 600)] {
            let gaps = [others(count, ns), timers(40, 1_500)].concat();
            assert_eq!(interrupt_ns_from(&gaps, OWN_40_NS, 25), Some(1_475), "{count} of {ns} ns");
        }
    }

    #[test]
    fn too_few_gaps_in_phase_yield_no_result() {
        assert_eq!(interrupt_ns_from(&others(100, 14_000), OWN_40_NS, 20), None);
        assert_eq!(interrupt_ns_from(&[], OWN_40_NS, 20), None);
        assert_eq!(interrupt_ns_from(&timers(9, 14_000), 9 * PERIOD_NS, 20), None);
    }

    #[test]
    fn measures_interrupt_on_this_machine() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let Some(ns) = interrupt_ns(&crate::kernel::cpu_choice::usable().expect("the kernel lists its CPUs")) else {
            println!("skipped: the cost of an interrupt cannot be measured here");
            return;
        };
        println!("an interrupt takes {ns} ns");
        assert!((SHORTEST_NS..TIMEOUT_NS).contains(&ns), "{ns} ns");
    }
}
