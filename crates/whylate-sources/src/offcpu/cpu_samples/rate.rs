// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sampling period: as short as the CPU time for sampling allows.

/// Shortest and longest period. Neither is a multiple of a timer tick, with which a program's work may be in phase.
const SHORTEST_NS: u64 = 10_101_010;
const LONGEST_NS: u64 = 10_101_010_000;
/// CPU time that sampling may take, in millionths of one CPU, and the part of it that remains while a debt is paid off.
const BUDGET_PPM: f64 = 5_000.0;
const LEFT_IN_DEBT_PPM: f64 = 2_500.0;
/// Time in which a debt is paid off: files of programs are read once, when they are first seen.
const REPAID_IN_NS: f64 = 10e9;
/// Until they are known: CPU time of a sample without the interrupt, and the number of CPUs that the program's threads
/// run on.
const PRESUMED_NS: f64 = 30_000.0;
const PRESUMED_CPUS: f64 = 4.0;
/// Maximum factor by which a period grows or shrinks at once, and the minimum one for which it is changed.
const MAX_STEP: f64 = 2.0;
const MIN_STEP: f64 = 1.2;
/// Minimum time, and number of periods, between two changes: a change restarts the timers with a whole period. A long
/// period is shortened earlier.
const BETWEEN_CHANGES_NS: u64 = 2_000_000_000;
const BETWEEN_CHANGES_PERIODS: u64 = 8;
const BEFORE_SHORTENING_PERIODS: u64 = 2;
/// CPU time beyond the budget from which no more processes are read: at the start, as a share of the time since then,
/// and at most.
const FIRST_DEBT_NS: f64 = 250e6;
const DEBT_SHARE: f64 = 0.01;
const MAX_DEBT_NS: f64 = 2e9;

/// Chooses the period by what sampling has cost so far.
#[derive(Clone, Debug)]
pub(super) struct Rate {
    cpus: f64,
    interrupt_ns: f64,
    period_ns: u64,
    /// CPU time of one expiry of a CPU's timer, as a moving average.
    expiry_ns: f64,
    began_ns: u64,
    /// Time of the last change of the period.
    changed_ns: u64,
    /// Number of expiries, and CPU time without interrupts, at the last update.
    expiries: u64,
    used_ns: u64,
    /// Part of it without a sample.
    idle_ns: u64,
    /// CPU time so far, interrupts included.
    spent_ns: f64,
}

impl Rate {
    /// Starts at `at_ns` with the CPU time of a timer interrupt on this machine.
    pub(super) fn new(cpus: usize, interrupt_ns: u64, at_ns: u64) -> Self {
        let interrupt_ns = interrupt_ns as f64;
        let cpus = cpus.max(1) as f64;
        let expiry_ns = interrupt_ns + PRESUMED_NS * PRESUMED_CPUS.min(cpus) / cpus;
        let period_ns = affordable(expiry_ns * cpus, BUDGET_PPM);
        Rate {
            cpus,
            interrupt_ns,
            period_ns,
            expiry_ns,
            began_ns: at_ns,
            changed_ns: at_ns,
            expiries: 0,
            used_ns: 0,
            idle_ns: 0,
            spent_ns: 0.0,
        }
    }

    pub(super) fn period_ns(&self) -> u64 {
        self.period_ns
    }

    /// Returns whether processes may be read that were not seen before.
    pub(super) fn may_read(&self, at_ns: u64) -> bool {
        let whole_ns = at_ns.saturating_sub(self.began_ns) as f64;
        self.debt_ns(at_ns) < (FIRST_DEBT_NS + whole_ns * DEBT_SHARE).min(MAX_DEBT_NS)
    }

    /// Returns the CPU time so far beyond the budget.
    fn debt_ns(&self, at_ns: u64) -> f64 {
        self.spent_ns - at_ns.saturating_sub(self.began_ns) as f64 * BUDGET_PPM / 1e6
    }

    /// Sets the period by what was used until now: `used_ns` of CPU time without interrupts, for a number of expiries
    /// of all timers. `idle_ns` of it brought no sample, and does not depend on the period. Returns whether the timers
    /// have to be restarted with another period.
    pub(super) fn update(&mut self, at_ns: u64, expiries: u64, used_ns: u64, idle_ns: u64) -> bool {
        let new = expiries.saturating_sub(self.expiries) as f64;
        if new < 1.0 {
            return false;
        }
        let now_ns = used_ns.saturating_sub(self.used_ns) as f64 + new * self.interrupt_ns;
        self.spent_ns += now_ns;
        let of_samples_ns = (now_ns - idle_ns.saturating_sub(self.idle_ns) as f64).max(0.0);
        (self.expiries, self.used_ns, self.idle_ns) = (expiries, used_ns, idle_ns);
        self.expiry_ns = 0.75 * self.expiry_ns + 0.25 * of_samples_ns / new;
        let whole_ns = at_ns.saturating_sub(self.began_ns) as f64;
        let idle_ppm = idle_ns as f64 * 1e6 / whole_ns.max(1.0);
        let budget_ppm = BUDGET_PPM - idle_ppm - self.debt_ns(at_ns).max(0.0) / REPAID_IN_NS * 1e6;
        let budget_ppm = budget_ppm.max(LEFT_IN_DEBT_PPM);
        let wanted_ns = affordable(self.expiry_ns * self.cpus, budget_ppm) as f64;
        let before_ns = self.period_ns as f64;
        let is_shorter = wanted_ns < before_ns;
        let periods = if is_shorter { BEFORE_SHORTENING_PERIODS } else { BETWEEN_CHANGES_PERIODS };
        let pause_ns = BETWEEN_CHANGES_NS.max(periods * self.period_ns);
        let is_other = wanted_ns > before_ns * MIN_STEP || wanted_ns < before_ns / MIN_STEP;
        if !is_other || at_ns.saturating_sub(self.changed_ns) < pause_ns {
            return false;
        }
        self.period_ns = wanted_ns.clamp(before_ns / MAX_STEP, before_ns * MAX_STEP) as u64;
        self.changed_ns = at_ns;
        true
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

    /// Timers of CPUs, which a change of the period restarts with a whole period.
    struct Timers {
        rate: Rate,
        cpus: u64,
        at_ns: u64,
        next_ns: u64,
        expiries: u64,
        used_ns: u64,
        idle_ns: u64,
        changes: u64,
    }

    impl Timers {
        fn new(cpus: u64, interrupt_ns: u64) -> Self {
            let rate = Rate::new(cpus as usize, interrupt_ns, 0);
            let next_ns = rate.period_ns();
            Timers { rate, cpus, at_ns: 0, next_ns, expiries: 0, used_ns: 0, idle_ns: 0, changes: 0 }
        }

        /// Runs until the next update with samples that take `sample_ns` of CPU time.
        fn step(&mut self, sample_ns: u64) {
            self.at_ns += STEP_NS;
            while self.next_ns <= self.at_ns {
                self.next_ns += self.rate.period_ns();
                self.expiries += self.cpus;
                self.used_ns += self.cpus * sample_ns;
            }
            if self.rate.update(self.at_ns, self.expiries, self.used_ns, self.idle_ns) {
                self.next_ns = self.at_ns + self.rate.period_ns();
                self.changes += 1;
            }
        }

        fn run(&mut self, sample_ns: u64, seconds: u64) {
            (0..seconds * 2).for_each(|_| self.step(sample_ns));
        }

        /// Returns the share of one CPU that all of it took, in millionths.
        fn ppm(&self) -> f64 {
            (self.used_ns as f64 + self.expiries as f64 * self.rate.interrupt_ns) * 1e6 / self.at_ns as f64
        }
    }

    #[test]
    fn cheap_samples_have_the_shortest_period() {
        let mut timers = Timers::new(2, 1_500);
        timers.run(10_000, 20);
        // A change by less than a fifth is none.
        assert!((timers.rate.period_ns() as f64) < SHORTEST_NS as f64 * MIN_STEP, "{:?}", timers.rate);
    }

    #[test]
    fn all_of_it_stays_within_the_budget() {
        for (cpus, interrupt_ns, sample_ns) in [(2, 14_000, 40_000), (64, 1_500, 20_000), (256, 14_000, 40_000)] {
            let mut timers = Timers::new(cpus, interrupt_ns);
            timers.run(sample_ns, 120);
            let ppm = timers.ppm();
            assert!(timers.rate.period_ns() > SHORTEST_NS, "{:?}", timers.rate);
            assert!((BUDGET_PPM * 0.7..BUDGET_PPM * 1.25).contains(&ppm), "{ppm} ppm: {:?}", timers.rate);
        }
    }

    #[test]
    fn one_thread_on_a_large_machine_is_sampled_soon() {
        // Only one of 256 CPUs has samples of 45 us; the program at the others takes 0.1 us.
        let mut timers = Timers::new(256, 1_500);
        (0..20).for_each(|_| timers.step((45_000 + 255 * 100) / 256));
        let of_cpu = timers.expiries / timers.cpus;
        assert!(of_cpu >= 50, "{of_cpu} samples in 10 s: {:?}", timers.rate);
        assert!(timers.ppm() < BUDGET_PPM * 1.25, "{} ppm", timers.ppm());
    }

    #[test]
    fn reading_stops_at_a_debt_and_goes_on_when_it_is_paid_off() {
        let mut timers = Timers::new(2, 1_500);
        assert!(timers.rate.may_read(0));
        timers.used_ns = 400_000_000;
        timers.run(10_000, 2);
        assert!(!timers.rate.may_read(timers.at_ns), "{:?}", timers.rate);
        timers.run(10_000, 20);
        assert!(timers.rate.may_read(timers.at_ns), "{:?}", timers.rate);
        timers.used_ns += 3_000_000_000;
        timers.run(10_000, 180);
        assert!(!timers.rate.may_read(timers.at_ns), "{:?}", timers.rate);
    }

    #[test]
    fn changes_are_so_rare_that_timers_expire() {
        // Periods from 10 ms to some seconds, and costs that change each time.
        for cpus in [2, 80, 256, 1_024] {
            let mut timers = Timers::new(cpus, 14_000);
            let (mut last, mut periods) = (0, 0.0);
            for step in 0..480_u64 {
                timers.step(if step % 3 == 0 { 150_000 } else { 10_000 });
                periods += STEP_NS as f64 / timers.rate.period_ns() as f64;
                last = timers.changes.max(last);
            }
            let expiries = timers.expiries as f64 / cpus as f64;
            // Half of a period is lost on average at a change, at most a whole one.
            let at_most = 1.0 / BETWEEN_CHANGES_PERIODS as f64 + 1.0 / periods;
            assert!(expiries >= periods * (1.0 - at_most) - 1.0, "{cpus} CPUs: {expiries} of {periods}");
            assert!(last <= 120, "{last} changes");
        }
    }

    #[test]
    fn files_that_were_read_once_are_paid_off() {
        let mut timers = Timers::new(2, 14_000);
        timers.used_ns = 100_000_000;
        timers.run(40_000, 4);
        assert!(timers.rate.debt_ns(timers.at_ns) > 50e6, "{:?}", timers.rate);
        assert!(
            timers.rate.period_ns() < 200_000_000,
            "a command of a few seconds is still sampled: {:?}",
            timers.rate
        );
        timers.run(40_000, 116);
        assert!(timers.ppm() < BUDGET_PPM * 1.25, "{} ppm", timers.ppm());
    }

    #[test]
    fn time_without_samples_is_no_time_of_samples() {
        // 0.3 % of a CPU, and samples of 10 us.
        let mut timers = Timers::new(2, 1_500);
        for _ in 0..60 {
            timers.idle_ns += STEP_NS * 3 / 1_000;
            timers.used_ns += STEP_NS * 3 / 1_000;
            timers.step(10_000);
        }
        assert!(timers.rate.period_ns() < 15_000_000, "{:?}", timers.rate);
        // More than the budget: what is left in debt remains.
        let mut timers = Timers::new(2, 1_500);
        for _ in 0..60 {
            timers.idle_ns += STEP_NS / 100;
            timers.used_ns += STEP_NS / 100;
            timers.step(0);
        }
        assert!(timers.rate.period_ns() <= SHORTEST_NS * 2, "{:?}", timers.rate);
    }
}
