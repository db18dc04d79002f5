// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether looking at all threads or tracing all switches is cheaper here and now.

use std::fmt;
use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::{SAMPLE, TRACE};

/// What a look at a thread costs that has not run since the last one, what one costs that has, and a switch that is traced, in nanoseconds
/// (`make bench-offcpu`).
const UNCHANGED_NS: f64 = 300.0;
const CHANGED_NS: f64 = 3_000.0;
const SWITCH_NS: f64 = 2_000.0;

/// For so long switches are counted.
const LOOK: Duration = Duration::from_millis(200);

/// What this machine does, and what follows for both ways.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Threads of the whole machine.
    pub threads: u64,
    /// Switches of all CPUs in a second.
    pub switches_per_second: f64,
    /// Walks a second that were asked for.
    pub rate_hz: u32,
}

impl Choice {
    /// Counts threads, and switches for 0.2 s.
    ///
    /// # Errors
    /// When /proc does not tell.
    pub fn look(rate_hz: u32) -> io::Result<Self> {
        let (began, before) = (Instant::now(), switches()?);
        thread::sleep(LOOK);
        let switches_per_second = (switches()? - before) as f64 / began.elapsed().as_secs_f64();
        let load = fs::read_to_string("/proc/loadavg")?;
        // `0.20 0.18 0.12 1/80 11206`: the threads are behind the slash (proc_loadavg(5)).
        let threads = load.split(' ').nth(3).and_then(|field| field.split_once('/')?.1.parse().ok());
        let threads =
            threads.ok_or_else(|| io::Error::other("/proc/loadavg does not tell how many threads there are"))?;
        Ok(Choice { threads, switches_per_second, rate_hz })
    }

    /// What sampling takes, as a part of one CPU.
    pub fn sample_share(&self) -> f64 {
        let looks = self.threads as f64 * f64::from(self.rate_hz);
        // A thread is changed at most once a walk, however often it has run.
        let changed = self.switches_per_second.min(looks);
        (looks * UNCHANGED_NS + changed * (CHANGED_NS - UNCHANGED_NS)) / 1e9
    }

    /// What tracing takes, as a part of one CPU.
    pub fn trace_share(&self) -> f64 {
        self.switches_per_second * SWITCH_NS / 1e9
    }

    /// The name of the cheaper backend.
    pub fn backend(&self) -> &'static str {
        if self.trace_share() < self.sample_share() { TRACE } else { SAMPLE }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: looking at {} threads {} times a second takes about {:.2} % of a CPU, tracing {:.0} switches a second {:.2} %",
            self.backend(),
            self.threads,
            self.rate_hz,
            self.sample_share() * 100.0,
            self.switches_per_second,
            self.trace_share() * 100.0,
        )
    }
}

/// Of all CPUs since the start (proc_stat(5)).
fn switches() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/stat")?;
    let count = text.lines().find_map(|line| line.strip_prefix("ctxt ")).and_then(|count| count.trim().parse().ok());
    count.ok_or_else(|| io::Error::other("/proc/stat does not tell how many switches there were"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_one_is_chosen() {
        // Many threads that hardly run, and few that switch all the time.
        let many = Choice { threads: 10_000, switches_per_second: 500.0, rate_hz: 9 };
        let busy = Choice { threads: 100, switches_per_second: 500_000.0, rate_hz: 9 };
        assert_eq!([many.backend(), busy.backend()], [TRACE, SAMPLE]);
        assert!((busy.trace_share() - 1.0).abs() < 1e-9, "2 us for each of half a million");
        assert!((busy.sample_share() - 0.0027).abs() < 1e-9, "no thread is changed more than once a walk");
        assert_eq!(
            many.to_string(),
            "trace: looking at 10000 threads 9 times a second takes about 2.83 % of a CPU, tracing 500 switches a second 0.10 %"
        );
    }

    #[test]
    fn this_machine_has_threads_that_switch() {
        let choice = Choice::look(9).expect("/proc");
        assert!(choice.threads > 1 && choice.switches_per_second > 0.0);
    }
}
