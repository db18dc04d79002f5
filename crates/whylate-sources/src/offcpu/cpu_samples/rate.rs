// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sampling period: as short as the CPU time for sampling allows.

/// Shortest and longest period. Neither is a multiple of a timer tick, with which a program's work may be in phase.
const SHORTEST_NS: u64 = 10_101_010;
const LONGEST_NS: u64 = 10_101_010_000;
/// CPU time that sampling may take, in millionths of one CPU, and the part of it that remains while a debt is paid off.
const BUDGET_PPM: f64 = 5_000.0;
const LEFT_IN_DEBT_PPM: f64 = 1_250.0;
/// Time in which a debt is paid off: files of programs are read once, when they are first seen.
const REPAID_IN_NS: f64 = 10e9;
/// CPU time of a sample until it is known, without the interrupt.
const PRESUMED_NS: f64 = 30_000.0;
/// Maximum factor by which a period grows or shrinks at once.
const MAX_STEP: f64 = 2.0;

/// What sampling has used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Used {
    /// CPU time without interrupts.
    pub(super) used_ns: u64,
    /// The part of it that brought no sample, and does not depend on the period.
    pub(super) idle_ns: u64,
    /// Number of expired timers.
    pub(super) expiries: u64,
}

/// Chooses the period by what sampling has cost so far.
#[derive(Clone, Debug)]
pub(super) struct Rate {
    cpus: f64,
    interrupt_ns: f64,
    period_ns: u64,
    /// CPU time of one expiry of a CPU's timer, as a moving average.
    expiry_ns: f64,
    began_ns: u64,
    /// At the last update.
    before: Used,
    /// CPU time so far, interrupts included.
    spent_ns: f64,
}

impl Rate {
    /// Starts at `at_ns` with the CPU time of a timer interrupt on this machine.
    pub(super) fn new(cpus: usize, interrupt_ns: u64, at_ns: u64) -> Self {
        let interrupt_ns = interrupt_ns as f64;
        let expiry_ns = interrupt_ns + PRESUMED_NS;
        let cpus = cpus.max(1) as f64;
        let period_ns = affordable(expiry_ns * cpus, BUDGET_PPM);
        let (began_ns, before, spent_ns) = (at_ns, Used::default(), 0.0);
        Rate { cpus, interrupt_ns, period_ns, expiry_ns, began_ns, before, spent_ns }
    }

    pub(super) fn period_ns(&self) -> u64 {
        self.period_ns
    }

    /// Sets the period by what was used until now.
    pub(super) fn update(&mut self, at_ns: u64, used: Used) {
        let expiries = used.expiries.saturating_sub(self.before.expiries) as f64;
        if expiries < 1.0 {
            return;
        }
        let now_ns = used.used_ns.saturating_sub(self.before.used_ns) as f64 + expiries * self.interrupt_ns;
        self.spent_ns += now_ns;
        let of_samples_ns = (now_ns - used.idle_ns.saturating_sub(self.before.idle_ns) as f64).max(0.0);
        self.before = used;
        self.expiry_ns = 0.75 * self.expiry_ns + 0.25 * of_samples_ns / expiries;
        let whole_ns = at_ns.saturating_sub(self.began_ns) as f64;
        let idle_ppm = used.idle_ns as f64 * 1e6 / whole_ns;
        let debt_ns = self.spent_ns - whole_ns * BUDGET_PPM / 1e6;
        let budget_ppm = BUDGET_PPM - idle_ppm - debt_ns.max(0.0) / REPAID_IN_NS * 1e6;
        let budget_ppm = budget_ppm.max(LEFT_IN_DEBT_PPM);
        let wanted_ns = affordable(self.expiry_ns * self.cpus, budget_ppm) as f64;
        let before_ns = self.period_ns as f64;
        self.period_ns = wanted_ns.clamp(before_ns / MAX_STEP, before_ns * MAX_STEP) as u64;
    }
}

/// Returns the shortest period at which expiries of all CPUs that take `cost_ns` together stay within the budget.
fn affordable(cost_ns: f64, budget_ppm: f64) -> u64 {
    ((cost_ns * 1e6 / budget_ppm) as u64).clamp(SHORTEST_NS, LONGEST_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_NS: u64 = 500_000_000;

    /// Runs for some time with samples that take `sample_ns`, after files were read for `once_ns`. Returns the last period,
    /// and the share of one CPU that all of it took, in millionths.
    fn run(cpus: usize, interrupt_ns: u64, sample_ns: u64, once_ns: u64, seconds: u64) -> (u64, f64) {
        let mut rate = Rate::new(cpus, interrupt_ns, 0);
        let (mut used_ns, mut interrupts_ns, mut at_ns, mut count) = (once_ns, 0.0, 0, 0.0);
        while at_ns < seconds * 1_000_000_000 {
            at_ns += STEP_NS;
            let expiries = cpus as f64 * STEP_NS as f64 / rate.period_ns() as f64;
            used_ns += (expiries * sample_ns as f64) as u64;
            interrupts_ns += expiries * interrupt_ns as f64;
            count += expiries;
            rate.update(at_ns, Used { used_ns, idle_ns: 0, expiries: count as u64 });
        }
        (rate.period_ns(), (used_ns as f64 + interrupts_ns) * 1e6 / at_ns as f64)
    }

    #[test]
    fn cheap_samples_have_the_shortest_period() {
        assert_eq!(run(2, 1_500, 10_000, 0, 10).0, SHORTEST_NS);
    }

    #[test]
    fn all_of_it_stays_within_the_budget() {
        for (cpus, interrupt_ns, sample_ns) in [(2, 14_000, 40_000), (64, 1_500, 20_000), (256, 14_000, 40_000)] {
            let (period_ns, ppm) = run(cpus, interrupt_ns, sample_ns, 0, 60);
            assert!(period_ns > SHORTEST_NS && (BUDGET_PPM * 0.8..BUDGET_PPM * 1.05).contains(&ppm), "{ppm} ppm");
        }
    }

    #[test]
    fn files_that_were_read_once_are_paid_off() {
        let (_, ppm) = run(2, 14_000, 40_000, 100_000_000, 60);
        assert!(ppm < BUDGET_PPM * 1.1, "{ppm} ppm");
        let mut rate = Rate::new(2, 14_000, 0);
        let used = |step| Used { used_ns: 100_000_000, idle_ns: 0, expiries: step * 50 };
        (1..=8).for_each(|step| rate.update(step * STEP_NS, used(step)));
        assert!(rate.period_ns() < 200_000_000, "a command of a few seconds is still sampled: {rate:?}");
    }

    #[test]
    fn time_without_samples_is_no_time_of_samples() {
        let mut rate = Rate::new(2, 1_500, 0);
        // 0.3 % of a CPU, and samples of 10 us.
        let mut used = Used::default();
        for step in 1..=60 {
            let expiries = 2 * STEP_NS / rate.period_ns();
            used.expiries += expiries;
            used.idle_ns += STEP_NS * 3 / 1_000;
            used.used_ns += STEP_NS * 3 / 1_000 + expiries * 10_000;
            rate.update(step * STEP_NS, used);
        }
        assert!(rate.period_ns() < 13_000_000, "{rate:?}");
        // More than the budget: what is left in debt remains.
        let mut rate = Rate::new(2, 1_500, 0);
        let used = |step| {
            let ns = step * STEP_NS / 100;
            Used { used_ns: ns, idle_ns: ns, expiries: step * 50 }
        };
        (1..=60).for_each(|step| rate.update(step * STEP_NS, used(step)));
        assert!(rate.period_ns() <= SHORTEST_NS, "{rate:?}");
    }
}
