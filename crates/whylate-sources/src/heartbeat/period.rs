// SPDX-License-Identifier: MIT OR Apache-2.0
//! How often timers come where nobody has said so: each millisecond, and less often where their interrupt is dear.

use std::sync::OnceLock;

use super::interrupt_ns;

/// The periods of which one is chosen, shortest first: the first one whose interrupts cost little on this machine.
pub const DEFAULT_PERIODS_NS: [u64; 4] = [1_000_000, 2_000_000, 5_000_000, 10_000_000];

/// What a timer's interrupts may take of a CPU, in thousandths. They slow a scheduling benchmark by half as much again:
/// they evict caches and predictions (`bench/results.md`) and programs run in them: all of it has to stay below 1 %.
const INTERRUPTS_PERMILLE: u64 = 6;

/// How often a timer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Period {
    pub ns: u64,
    /// What one interrupt costs, in nanoseconds of a CPU, where that was measured to choose the period.
    pub interrupt_ns: Option<u64>,
}

impl Period {
    /// The one that was asked for, or one that the measured CPUs can afford.
    pub(crate) fn of(asked_ns: Option<u64>, measured: &[u32]) -> Self {
        asked_ns.map_or_else(|| Period::affordable(measured), |ns| Period { ns, interrupt_ns: None })
    }

    /// One that the measured CPUs can afford. What an interrupt costs is measured once.
    pub(crate) fn affordable(measured: &[u32]) -> Self {
        static COST: OnceLock<Option<u64>> = OnceLock::new();
        Self::chosen(*COST.get_or_init(|| interrupt_ns(measured)))
    }

    fn chosen(interrupt_ns: Option<u64>) -> Self {
        Period { ns: interrupt_ns.map_or(DEFAULT_PERIODS_NS[0], affordable_ns), interrupt_ns }
    }

    /// What to tell where it was chosen and is not the shortest one: what comes so often, and how to have it otherwise.
    pub(crate) fn remark(self, comes: &str, otherwise: &str) -> Option<String> {
        let interrupt_ns = self.interrupt_ns.filter(|_| self.ns > DEFAULT_PERIODS_NS[0])?;
        Some(format!(
            "a timer interrupt costs {:.1} us here, so {comes} every {} ms ({otherwise})",
            interrupt_ns as f64 / 1e3,
            self.ns / 1_000_000
        ))
    }
}

/// The shortest of the periods at which interrupts that each cost so much take no more of a CPU than they may; the
/// longest where none is long enough.
fn affordable_ns(interrupt_ns: u64) -> u64 {
    let is_affordable = |period_ns: &u64| interrupt_ns.saturating_mul(1_000) <= period_ns * INTERRUPTS_PERMILLE;
    let [.., longest_ns] = DEFAULT_PERIODS_NS;
    DEFAULT_PERIODS_NS.into_iter().find(is_affordable).unwrap_or(longest_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS_NS: u64 = 1_000_000;

    #[test]
    fn interrupts_take_six_thousandths_at_most() {
        for (interrupt_ns, period_ms) in [
            (0, 1),
            (1_500, 1),
            (6_000, 1),
            (6_001, 2),
            (12_000, 2),
            (12_001, 5),
            (14_100, 5),
            (30_000, 5),
            (30_001, 10),
            (60_000, 10),
            // Dearer than any period can make up for.
            (60_001, 10),
            (u64::MAX, 10),
        ] {
            assert_eq!(affordable_ns(interrupt_ns), period_ms * MS_NS, "{interrupt_ns} ns");
        }
    }

    #[test]
    fn what_cannot_be_measured_leaves_the_shortest() {
        let period = Period::chosen(None);
        assert_eq!((period.ns, period.interrupt_ns, period.remark("it comes", "")), (MS_NS, None, None));
    }

    #[test]
    fn a_period_that_was_asked_for_stays_and_is_no_news() {
        let period = Period::of(Some(5 * MS_NS), &[]);
        assert_eq!((period.ns, period.interrupt_ns, period.remark("it comes", "")), (5 * MS_NS, None, None));
    }

    #[test]
    fn only_a_longer_one_is_told() {
        assert_eq!(Period::chosen(Some(1_500)).remark("it comes", ""), None);
        let told = "a timer interrupt costs 14.1 us here, so heartbeats come every 5 ms (irqsoff --period 1ms for finer bounds)";
        assert_eq!(
            Period::chosen(Some(14_100)).remark("heartbeats come", "irqsoff --period 1ms for finer bounds").as_deref(),
            Some(told)
        );
    }
}
