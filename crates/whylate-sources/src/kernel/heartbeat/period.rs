// SPDX-License-Identifier: MIT OR Apache-2.0
//! Default period of timers: 1 ms, and longer if their interrupt is expensive.

use std::sync::OnceLock;

use super::interrupt_ns;

/// Possible default periods, shortest first: the first one with cheap enough interrupts on this machine is chosen.
pub const DEFAULT_PERIODS_NS: [u64; 4] = [1_000_000, 2_000_000, 5_000_000, 10_000_000];

/// Maximum CPU time of a timer's interrupts, in thousandths. They slow a scheduling benchmark by half as much again,
/// since they evict caches and predictions (`bench/results.md`) and run programs; all of it has to stay below 1 %.
const INTERRUPTS_PERMILLE: u64 = 6;

/// Period of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Period {
    pub ns: u64,
    /// Cost of an interrupt in nanoseconds of a CPU, if it was measured to choose the period.
    pub interrupt_ns: Option<u64>,
}

impl Period {
    /// Uses the requested period, or an affordable one.
    pub(crate) fn new(asked_ns: Option<u64>, measured: &[u32]) -> Self {
        asked_ns.map_or_else(|| Period::affordable(measured), |ns| Period { ns, interrupt_ns: None })
    }

    /// Chooses a period that the measured CPUs can afford. The cost of an interrupt is measured once.
    pub(crate) fn affordable(measured: &[u32]) -> Self {
        static COST: OnceLock<Option<u64>> = OnceLock::new();
        Self::chosen(*COST.get_or_init(|| interrupt_ns(measured)))
    }

    fn chosen(interrupt_ns: Option<u64>) -> Self {
        Period { ns: interrupt_ns.map_or(DEFAULT_PERIODS_NS[0], affordable_ns), interrupt_ns }
    }

    /// Returns a note if a longer period than the shortest was chosen: what has this period, and how to change it.
    pub(crate) fn remark(self, comes: &str, otherwise: &str) -> Option<String> {
        let interrupt_ns = self.interrupt_ns.filter(|_| self.ns > DEFAULT_PERIODS_NS[0])?;
        Some(format!(
            "a timer interrupt costs {:.1} us here, so {comes} every {} ms ({otherwise})",
            interrupt_ns as f64 / 1e3,
            self.ns / 1_000_000
        ))
    }
}

/// Returns the shortest period at which interrupts of this cost stay within the limit, or the longest period.
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
    fn interrupt_cost_stays_within_limit() {
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
            // More expensive than any period can compensate.
            (60_001, 10),
            (u64::MAX, 10),
        ] {
            assert_eq!(affordable_ns(interrupt_ns), period_ms * MS_NS, "{interrupt_ns} ns");
        }
    }

    #[test]
    fn unmeasurable_cost_yields_shortest_period() {
        let period = Period::chosen(None);
        assert_eq!((period.ns, period.interrupt_ns, period.remark("it comes", "")), (MS_NS, None, None));
    }

    #[test]
    fn requested_period_is_kept_without_note() {
        let period = Period::new(Some(5 * MS_NS), &[]);
        assert_eq!((period.ns, period.interrupt_ns, period.remark("it comes", "")), (5 * MS_NS, None, None));
    }

    #[test]
    fn only_longer_period_is_noted() {
        assert_eq!(Period::chosen(Some(1_500)).remark("it comes", ""), None);
        let expected = "a timer interrupt costs 14.1 us here, so heartbeats come every 5 ms (irqsoff --period 1ms for finer bounds)";
        assert_eq!(
            Period::chosen(Some(14_100)).remark("heartbeats come", "irqsoff --period 1ms for finer bounds").as_deref(),
            Some(expected)
        );
    }
}
