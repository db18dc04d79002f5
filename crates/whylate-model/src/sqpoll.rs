// SPDX-License-Identifier: MIT OR Apache-2.0
//! Time use of io_uring's submission threads: counters to shares, and shares to advice.

mod verdict;

use std::collections::BTreeMap;

use crate::{Labels, Series};

pub use verdict::verdicts;

/// Identity of a submission thread: TIDs are reused, so it includes the creation time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SqThread {
    /// PID of the thread's process.
    pub pid: u32,
    /// TID of the thread.
    pub tid: u32,
    /// Creation time, on the clock of the source.
    pub born: u64,
}

/// Counters of one thread, as of `at_ns`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Time at which the counters were read (CLOCK_MONOTONIC).
    pub at_ns: u64,
    /// Time on a CPU.
    pub running_ns: u64,
    /// Time on a CPU with work to do; `None` if unknown.
    pub working_ns: Option<u64>,
    /// Time runnable without a CPU.
    pub starved_ns: u64,
    /// Requests taken from the thread's rings, if counted.
    pub sqes: Option<u64>,
    /// Number of wakeups, if counted.
    pub wakeups: Option<u64>,
    /// Time without a CPU, by the thread that it waited behind.
    pub behind_ns: BTreeMap<String, u64>,
    /// Time throttled, by the cgroup that used up its quota.
    pub throttled_ns: BTreeMap<String, u64>,
}

/// Time use of a thread between two readings. The shares of its states add up to 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// Time between the readings.
    pub duration_ns: u64,
    /// Share on a CPU with work to do.
    pub working: Option<f64>,
    /// Share on a CPU without work.
    pub spinning: Option<f64>,
    /// Share on a CPU: `working` and `spinning` together.
    pub running: f64,
    /// Share asleep.
    pub sleeping: f64,
    /// Share runnable without a CPU.
    pub starved: f64,
    /// Requests per second.
    pub sqes_per_s: Option<f64>,
    /// Wakeups per second.
    pub wakeups_per_s: Option<f64>,
    /// Shares of the time by the thread that it waited behind, largest first.
    pub starved_by: Vec<(String, f64)>,
    /// Shares of the time throttled, by the cgroup that used up its quota, largest first.
    pub throttled: Vec<(String, f64)>,
}

impl Usage {
    /// Returns the usage from `before` to `after`; `None` if no time has passed.
    ///
    /// Times measured with two clocks may exceed the total by a little; then the starved time is reduced.
    pub fn between(before: &Counters, after: &Counters) -> Option<Usage> {
        let duration_ns = after.at_ns.checked_sub(before.at_ns).filter(|&ns| ns > 0)?;
        let running_ns = after.running_ns.saturating_sub(before.running_ns).min(duration_ns);
        let starved_ns = after.starved_ns.saturating_sub(before.starved_ns).min(duration_ns - running_ns);
        let since = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
        let share = |ns: u64| ns as f64 / duration_ns as f64;
        let a_second = |count: u64| count as f64 * 1e9 / duration_ns as f64;
        let working_ns = since(after.working_ns, before.working_ns).map(|ns| ns.min(running_ns));
        let shares = |after: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>| {
            let more =
                |(who, ns): (&String, &u64)| (who.clone(), ns.saturating_sub(before.get(who).copied().unwrap_or(0)));
            let some = after.iter().map(more).filter(|&(_, ns)| ns > 0);
            let mut shares: Vec<(String, f64)> = some.map(|(who, ns)| (who, share(ns))).collect();
            shares.sort_by(|(_, a), (_, b)| b.total_cmp(a));
            shares
        };
        Some(Usage {
            duration_ns,
            working: working_ns.map(share),
            spinning: working_ns.map(|ns| share(running_ns - ns)),
            running: share(running_ns),
            sleeping: share(duration_ns - running_ns - starved_ns),
            starved: share(starved_ns),
            sqes_per_s: since(after.sqes, before.sqes).map(a_second),
            wakeups_per_s: since(after.wakeups, before.wakeups).map(a_second),
            starved_by: shares(&after.behind_ns, &before.behind_ns),
            throttled: shares(&after.throttled_ns, &before.throttled_ns),
        })
    }

    /// Returns the working share of the time on a CPU; `None` if the thread did not run or its work is unknown.
    pub fn utilisation(&self) -> Option<f64> {
        self.working.filter(|_| self.running > 0.0).map(|working| working / self.running)
    }

    /// Adds the shares to the values of the thread's series.
    pub fn describe(&self, values: &mut BTreeMap<String, f64>) {
        let mut put = |name: &str, value: Option<f64>| {
            if let Some(value) = value {
                values.insert(name.to_owned(), value);
            }
        };
        put("working", self.working);
        put("spinning", self.spinning);
        put("running", self.working.is_none().then_some(self.running));
        put("sleeping", Some(self.sleeping));
        put("starved", Some(self.starved));
        put("utilisation", self.utilisation());
        put("sqes_per_s", self.sqes_per_s);
        put("wakeups_per_s", self.wakeups_per_s);
    }
}

/// Returns the labels of a thread's series.
pub fn labels(process: &str, thread: &SqThread) -> Labels {
    let labels = [("process", process.to_owned()), ("pid", thread.pid.to_string()), ("tid", thread.tid.to_string())];
    labels.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Returns whether a series is about a whole thread, not about one of its rings or one of its culprits.
pub fn is_thread(series: &Series) -> bool {
    !series.labels.contains_key("ring") && !series.labels.contains_key("by")
}

/// Returns whether a series is about a part of the thread that `whole` is about.
pub fn is_part_of(part: &Series, whole: &Series) -> bool {
    !is_thread(part) && whole.labels.iter().all(|(name, value)| part.labels.get(name) == Some(value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counters(at_ns: u64, running_ns: u64, working_ns: u64, starved_ns: u64) -> Counters {
        Counters { at_ns, running_ns, working_ns: Some(working_ns), starved_ns, ..Counters::default() }
    }

    #[test]
    fn computes_shares_between_readings() {
        let usage =
            Usage::between(&counters(1_000, 500, 100, 10), &counters(2_000, 1_000, 150, 260)).expect("time has passed");
        assert_eq!((usage.working, usage.spinning), (Some(0.05), Some(0.45)));
        assert_eq!((usage.sleeping, usage.starved), (0.25, 0.25));
        assert_eq!(usage.utilisation(), Some(0.1));
    }

    #[test]
    fn no_elapsed_time_gives_no_usage() {
        assert_eq!(Usage::between(&counters(5, 0, 0, 0), &counters(5, 0, 0, 0)), None);
        assert_eq!(Usage::between(&counters(5, 0, 0, 0), &counters(4, 0, 0, 0)), None);
    }

    #[test]
    fn sleeping_thread_has_no_utilization() {
        let usage = Usage::between(&counters(0, 7, 3, 0), &counters(10, 7, 3, 0)).expect("time has passed");
        assert_eq!((usage.sleeping, usage.utilisation()), (1.0, None));
    }

    #[test]
    fn unknown_work_gives_running_only() {
        let blind = |at_ns, running_ns| Counters { at_ns, running_ns, ..Counters::default() };
        let usage = Usage::between(&blind(0, 0), &blind(10, 4)).expect("time has passed");
        let mut values = BTreeMap::new();
        usage.describe(&mut values);
        assert_eq!(values.get("running"), Some(&0.4));
        assert!(!values.contains_key("working") && !values.contains_key("utilisation"), "{values:?}");
    }

    #[test]
    fn culprits_are_sorted_by_delay() {
        let behind = |pairs: &[(&str, u64)]| pairs.iter().map(|&(who, ns)| (who.to_owned(), ns)).collect();
        let before = Counters { behind_ns: behind(&[("a:1", 100)]), ..Counters::default() };
        let after = Counters {
            at_ns: 1_000,
            starved_ns: 600,
            behind_ns: behind(&[("a:1", 200), ("b:2", 500), ("c:3", 0)]),
            ..Counters::default()
        };
        let usage = Usage::between(&before, &after).expect("time has passed");
        assert_eq!(usage.starved_by, [("b:2".to_owned(), 0.5), ("a:1".to_owned(), 0.1)]);
    }

    proptest! {
        #[test]
        fn shares_add_up_to_one(
            ns in 1_u64..1 << 50, running in 0_u64..1 << 51, working in 0_u64..1 << 51, starved in 0_u64..1 << 51
        ) {
            let usage = Usage::between(&counters(7, 0, 0, 0), &counters(7 + ns, running, working, starved)).expect("time has passed");
            let sum = usage.working.unwrap_or(0.0) + usage.spinning.unwrap_or(0.0) + usage.sleeping + usage.starved;
            prop_assert!((sum - 1.0).abs() < 1e-9, "{sum}");
            prop_assert!(usage.utilisation().is_none_or(|share| (0.0..=1.0).contains(&share)));
        }
    }
}
