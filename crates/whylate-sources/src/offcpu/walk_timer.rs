// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sampling interval: fixed, or set by a CPU budget.

use std::time::Duration;

use super::{OffcpuOptions, RATES_HZ};

/// The interval between walks.
#[derive(Clone, Copy, Debug)]
pub(super) struct WalkTimer {
    period: Duration,
    /// CPU time that walks may take, in millionths of one CPU.
    budget_ppm: Option<u32>,
    /// CPU time of a walk in ns, as a moving average.
    cost_ns: f64,
    /// xorshift64 (Marsaglia 2003).
    random: u64,
}

impl WalkTimer {
    pub(super) fn new(options: &OffcpuOptions, seed: u64) -> Self {
        let period = Duration::from_secs(1) / options.rate_hz.max(1);
        WalkTimer { period, budget_ppm: options.budget_ppm, cost_ns: 0.0, random: seed | 1 }
    }

    pub(super) fn add_cost(&mut self, cpu_ns: u64) {
        let Some(budget_ppm) = self.budget_ppm else { return };
        let now = cpu_ns as f64;
        self.cost_ns = if self.cost_ns == 0.0 { now } else { 0.75 * self.cost_ns + 0.25 * now };
        let period_ns = self.cost_ns * 1e6 / f64::from(budget_ppm.max(1));
        let (shortest, longest) = (1e9 / f64::from(*RATES_HZ.end()), 1e9 / f64::from(*RATES_HZ.start()));
        self.period = Duration::from_nanos(period_ns.clamp(shortest, longest) as u64);
    }

    pub(super) fn period(&self) -> Duration {
        self.period
    }

    /// Draws an interval evenly from half to one and a half periods, so that no periodic thread is always sampled in
    /// phase.
    pub(super) fn interval(&mut self) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.period.mul_f64(0.5 + (self.random >> 11) as f64 / (1_u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_sets_the_period() {
        let options = OffcpuOptions { budget_ppm: Some(10_000), ..OffcpuOptions::default() };
        let mut timer = WalkTimer::new(&options, 1);
        // One percent of a CPU is a walk of 0.5 ms every 50 ms; one of 50 ms would take five percent at the lowest
        // rate.
        timer.add_cost(500_000);
        assert_eq!(timer.period(), Duration::from_millis(50));
        for _ in 0..50 {
            timer.add_cost(50_000_000);
        }
        assert_eq!(timer.period(), Duration::from_secs(1));
        let mut fixed = WalkTimer::new(&OffcpuOptions::default(), 1);
        fixed.add_cost(500_000);
        assert_eq!(fixed.period(), Duration::from_secs(1) / 9);
    }

    #[test]
    fn jittered_intervals_keep_the_rate() {
        let mut timer = WalkTimer::new(&OffcpuOptions::default(), 7);
        let intervals: Vec<Duration> = (0..1000).map(|_| timer.interval()).collect();
        let (min, max) = (timer.period() / 2, timer.period() * 3 / 2);
        assert!(intervals.iter().all(|interval| (min..=max).contains(interval)));
        let mean = intervals.iter().sum::<Duration>() / 1000;
        assert!(mean.abs_diff(timer.period()) < timer.period() / 20, "{mean:?}");
    }
}
