// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chooses the cheaper backend for this machine: sampling all threads, or tracing all context switches.

use std::fmt;
use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::{RATES_HZ, SAMPLE, TRACE};

/// Costs in ns (`make bench-offcpu`): visiting a thread that has not run since the last walk, and one that has; a
/// traced switch.
const UNCHANGED_NS: f64 = 300.0;
const CHANGED_NS: f64 = 3_000.0;
const SWITCH_NS: f64 = 2_000.0;

const COUNT_TIME: Duration = Duration::from_millis(200);

/// Load of this machine, from which the cost of both backends follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Threads of the whole machine.
    pub threads: u64,
    /// Context switches of all CPUs per second.
    pub switches_per_second: f64,
    /// Sampling rate, or the CPU budget that sets it.
    pub often: Often,
}

/// Sampling rate, or the CPU budget that sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Often {
    /// Walks per second.
    RateHz(u32),
    /// The rate at which walks take this share of one CPU, in millionths.
    BudgetPpm(u32),
}

impl Choice {
    /// Counts threads, and context switches over 0.2 s.
    ///
    /// # Errors
    /// Fails if /proc/stat or /proc/loadavg cannot be read or parsed.
    pub fn look(often: Often) -> io::Result<Self> {
        let (began, before) = (Instant::now(), switches()?);
        thread::sleep(COUNT_TIME);
        let switches_per_second = (switches()? - before) as f64 / began.elapsed().as_secs_f64();
        let load = fs::read_to_string("/proc/loadavg")?;
        let threads =
            threads_of(&load).ok_or_else(|| io::Error::other("/proc/loadavg does not show the number of threads"))?;
        Ok(Choice { threads, switches_per_second, often })
    }

    /// Returns the walks per second.
    pub fn rate_hz(&self) -> f64 {
        match self.often {
            Often::RateHz(rate_hz) => f64::from(rate_hz),
            Often::BudgetPpm(ppm) => {
                let budget_ns = f64::from(ppm) * 1e3;
                let threads = self.threads.max(1) as f64;
                // If switches outnumber visits, all visited threads have run; if not, each switch is seen once.
                let all_changed = budget_ns / (threads * CHANGED_NS);
                let rate_hz = if threads * all_changed <= self.switches_per_second {
                    all_changed
                } else {
                    (budget_ns - self.switches_per_second * (CHANGED_NS - UNCHANGED_NS)) / (threads * UNCHANGED_NS)
                };
                rate_hz.clamp(f64::from(*RATES_HZ.start()), f64::from(*RATES_HZ.end()))
            }
        }
    }

    /// Estimates the CPU time of sampling, as a share of one CPU.
    pub fn sample_share(&self) -> f64 {
        let visits = self.threads as f64 * self.rate_hz();
        // A thread counts as changed at most once a walk, however often it has run.
        let changed = self.switches_per_second.min(visits);
        (visits * UNCHANGED_NS + changed * (CHANGED_NS - UNCHANGED_NS)) / 1e9
    }

    /// Estimates the CPU time of tracing, as a share of one CPU.
    pub fn trace_share(&self) -> f64 {
        self.switches_per_second * SWITCH_NS / 1e9
    }

    /// Returns the name of the cheaper backend.
    pub fn backend(&self) -> &'static str {
        if self.trace_share() < self.sample_share() { TRACE } else { SAMPLE }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: looking at {} threads {:.0} times a second takes about {:.2}% of a CPU, tracing {:.0} switches a second {:.2}%",
            self.backend(),
            self.threads,
            self.rate_hz(),
            self.sample_share() * 100.0,
            self.switches_per_second,
            self.trace_share() * 100.0,
        )
    }
}

/// Parses the number of threads of the machine: behind the slash in `0.20 0.18 0.12 1/80 11206` (proc_loadavg(5)).
pub(super) fn threads_of(load: &str) -> Option<u64> {
    load.split(' ').nth(3)?.split_once('/')?.1.parse().ok()
}

/// Reads the context switches of all CPUs since boot (proc_stat(5)).
fn switches() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/stat")?;
    let count = text.lines().find_map(|line| line.strip_prefix("ctxt ")).and_then(|count| count.trim().parse().ok());
    count.ok_or_else(|| io::Error::other("/proc/stat does not show the number of context switches"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chooses_cheaper_backend() {
        // Many threads that hardly run, and few that switch all the time.
        let many = Choice { threads: 10_000, switches_per_second: 500.0, often: Often::RateHz(9) };
        let busy = Choice { threads: 100, switches_per_second: 500_000.0, often: Often::RateHz(9) };
        assert_eq!([many.backend(), busy.backend()], [TRACE, SAMPLE]);
        assert!((busy.trace_share() - 1.0).abs() < 1e-9, "2 us for each of half a million");
        assert!((busy.sample_share() - 0.0027).abs() < 1e-9, "no thread is changed more than once a walk");
        assert_eq!(
            many.to_string(),
            "trace: looking at 10000 threads 9 times a second takes about 2.83% of a CPU, tracing 500 switches a second 0.10%"
        );
    }

    #[test]
    fn budget_sets_the_rate() {
        let choice =
            |threads, switches_per_second, ppm| Choice { threads, switches_per_second, often: Often::BudgetPpm(ppm) };
        // 1 % of a CPU is 10 ms: a walk over 1,000 threads takes 0.3 ms if hardly one has run, 3 ms if all have.
        let (idle, busy) = (choice(1_000, 0.0, 10_000), choice(1_000, 1e6, 10_000));
        assert!((idle.rate_hz() - 10.0 / 0.3).abs() < 1e-9 && (busy.rate_hz() - 10.0 / 3.0).abs() < 1e-9);
        for choice in [idle, busy, choice(1_000, 1_000.0, 10_000)] {
            assert!((choice.sample_share() - 0.01).abs() < 1e-9, "{choice}");
        }
        // At the lowest rate 100,000 threads exceed the budget; the estimate is of the actual cost.
        let many = choice(100_000, 500.0, 1_000);
        assert_eq!(many.rate_hz(), 1.0);
        assert!(many.sample_share() > 0.03 && many.backend() == TRACE, "{many}");
    }

    #[test]
    fn counts_threads_and_switches() {
        let choice = Choice::look(Often::RateHz(9)).expect("/proc");
        assert!(choice.threads > 1 && choice.switches_per_second > 0.0);
    }
}
