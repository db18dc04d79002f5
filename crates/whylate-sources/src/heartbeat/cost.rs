// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a timer's interrupt takes of a CPU here: a microsecond or two on most machines, and ten times that where a
//! hypervisor has to set the timer and deliver its interrupt.

use std::thread;

use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

use crate::clock::{monotonic_ns, thread_cpu_ns};
use crate::perf_event::{EVERY_THREAD, start_timer};

/// How often the timer is due: for many interrupts soon, and not so often that the kernel throttles it.
const EVERY_NS: u64 = 200_000;
/// The thread's own time in which it looks, some 40 interrupts.
const OWN_NS: u64 = 8_000_000;
/// It gives up then, where others have the CPU.
const PATIENCE_NS: u64 = 60_000_000;
/// Readings of the clock by which it is told what one takes.
const READINGS: usize = 201;
/// No interrupt takes less.
const SHORTEST_NS: u64 = 300;
/// The timer's interrupts come in so long after they are due, give or take half of it.
const JITTER_NS: u64 = 10_000;
/// Fewer interrupts tell nothing.
const FEWEST: usize = 10;
/// Room for gaps: many more than there are interrupts.
const MOST: usize = 1_024;

/// A time between two readings of the clock in which the thread did not run.
#[derive(Clone, Copy, Debug)]
struct Gap {
    from_ns: u64,
    ns: u64,
}

/// What one interrupt of a timer takes of a CPU, in nanoseconds, as a thread sees it that reads the clock all the time;
/// `None` where that cannot be told. It takes some 10 ms, on one of the CPUs that are measured.
pub(crate) fn interrupt_ns(measured: &[u32]) -> Option<u64> {
    // The CPU that this thread has just got is free.
    let here = u32::try_from(sched_getcpu()).ok().filter(|here| measured.contains(here));
    let cpu = here.or(measured.last().copied())?;
    // A thread of its own, so that the caller stays free to run anywhere.
    let measuring = thread::Builder::new().name("heartbeat-cost".to_owned()).spawn(move || measure(cpu)).ok()?;
    measuring.join().ok()?
}

fn measure(cpu: u32) -> Option<u64> {
    let mut only = CpuSet::new();
    only.set(cpu as usize);
    sched_setaffinity(None, &only).ok()?;
    let mut readings = [0; READINGS];
    let mut last_ns = monotonic_ns();
    for reading in &mut readings {
        let now_ns = monotonic_ns();
        *reading = now_ns - last_ns;
        last_ns = now_ns;
    }
    let reading_ns = median(&mut readings)?;
    // Until the end of this function.
    let _timer = start_timer(EVERY_THREAD, cpu as libc::c_int, EVERY_NS).ok()?;
    let long_ns = reading_ns + SHORTEST_NS.max(reading_ns);
    let mut gaps = Vec::with_capacity(MOST);
    let began_own_ns = thread_cpu_ns();
    let mut last_ns = monotonic_ns();
    let give_up_ns = last_ns + PATIENCE_NS;
    while last_ns < give_up_ns && gaps.len() < MOST {
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
    of_gaps(&gaps, thread_cpu_ns() - began_own_ns, reading_ns)
}

/// From the long gaps between readings of the clock, and how much of the time was the thread's own: the timer was due
/// in that alone. Its gaps begin at the same point of its period, others anywhere.
fn of_gaps(gaps: &[Gap], own_ns: u64, reading_ns: u64) -> Option<u64> {
    let due = usize::try_from(own_ns / EVERY_NS).ok()?;
    let mut timers = at_one_point(gaps);
    if timers.len() < FEWEST || timers.len() * 3 < due {
        return None;
    }
    Some(median(&mut timers)?.saturating_sub(reading_ns))
}

/// The lengths of the most gaps that begin at the same point of the timer's period, give or take its jitter.
fn at_one_point(gaps: &[Gap]) -> Vec<u64> {
    let after = |gap: &Gap, first: &Gap| (EVERY_NS + gap.from_ns % EVERY_NS - first.from_ns % EVERY_NS) % EVERY_NS;
    let near = |first: &Gap| gaps.iter().filter(|gap| after(gap, first) < JITTER_NS).map(|gap| gap.ns).collect();
    gaps.iter().map(near).max_by_key(Vec::len).unwrap_or_default()
}

/// The middle one; `None` of none.
fn median(values: &mut [u64]) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_40_NS: u64 = 40 * EVERY_NS;

    /// The gaps of a timer, each late by something.
    fn timers(count: u64, ns: u64) -> Vec<Gap> {
        // They lie around the end of what is taken for a period.
        let first_ns = 7 * EVERY_NS - 1_000;
        (0..count).map(|number| Gap { from_ns: first_ns + number * EVERY_NS + 500 * (number % 5), ns }).collect()
    }

    /// Gaps at no point of the timer's period in particular.
    fn others(count: u64, ns: u64) -> Vec<Gap> {
        (0..count).map(|number| Gap { from_ns: 7 * EVERY_NS + number * 17_137, ns }).collect()
    }

    #[test]
    fn it_is_what_gaps_of_the_timer_are_longer_than_a_reading() {
        assert_eq!(of_gaps(&timers(40, 14_020), OWN_40_NS, 20), Some(14_000));
    }

    #[test]
    fn one_half_may_be_longer_than_it() {
        let gaps = [timers(25, 14_020), timers(15, 90_020)].concat();
        assert_eq!(of_gaps(&gaps, OWN_40_NS, 20), Some(14_000));
    }

    #[test]
    fn gaps_of_others_change_nothing() {
        for (count, ns) in [(9, 3_000_000), (120, 60_000), (400, 600)] {
            let gaps = [others(count, ns), timers(40, 1_500)].concat();
            assert_eq!(of_gaps(&gaps, OWN_40_NS, 25), Some(1_475), "{count} of {ns} ns");
        }
    }

    #[test]
    fn gaps_at_no_point_in_particular_or_too_little_time_tell_nothing() {
        assert_eq!(of_gaps(&others(100, 14_000), OWN_40_NS, 20), None);
        assert_eq!(of_gaps(&[], OWN_40_NS, 20), None);
        assert_eq!(of_gaps(&timers(9, 14_000), 9 * EVERY_NS, 20), None);
    }

    #[test]
    fn an_interrupt_takes_some_time_on_this_machine() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let Some(ns) = interrupt_ns(&crate::cpus::usable().expect("the kernel lists its CPUs")) else {
            println!("skipped: the cost of an interrupt cannot be told here");
            return;
        };
        println!("an interrupt takes {ns} ns");
        assert!((SHORTEST_NS..PATIENCE_NS).contains(&ns), "{ns} ns");
    }
}
