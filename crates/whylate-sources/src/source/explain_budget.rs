// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits the CPU time that user space spends on explaining late events. A machine with many late events is overloaded:
//! explaining each of them would delay other programs.

use std::cell::Cell;
use std::rc::Rc;

use rustix::time::{ClockId, clock_gettime};

use crate::kernel::clock;

/// Length of time for which the budget may be spent at once.
const BURST_NS: u64 = 5_000_000_000;

/// Token bucket of CPU time, shared by the sources of a session.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExplainBudget(Rc<Bucket>);

#[derive(Debug, Default)]
struct Bucket {
    /// Elapsed time per CPU time that may be spent in it; 0: no limit.
    factor: Cell<u64>,
    /// Time up to which the budget is spent (CLOCK_MONOTONIC).
    spent_until_ns: Cell<u64>,
}

impl ExplainBudget {
    /// Limits explanations to a share of the machine, in parts per million of all `cpus`; 0: no limit.
    pub(crate) fn limit(&self, share_ppm: u32, cpus: usize) {
        let cpus_ppm = u64::from(share_ppm).saturating_mul(cpus as u64);
        self.0.factor.set(if cpus_ppm == 0 { 0 } else { 1_000_000_u64.div_ceil(cpus_ppm) });
    }

    /// Charges the CPU time of this thread until the result is dropped. `None` if the budget is spent.
    pub(crate) fn spend(&self) -> Option<Spending<'_>> {
        if self.0.factor.get() == 0 {
            return Some(Spending { bucket: &self.0, began_ns: 0 });
        }
        let is_spent = self.0.spent_until_ns.get() > clock::monotonic_ns().saturating_add(BURST_NS);
        (!is_spent).then(|| Spending { bucket: &self.0, began_ns: thread_cpu_ns() })
    }
}

impl Bucket {
    fn charge(&self, cpu_ns: u64, now_ns: u64) {
        let cost_ns = cpu_ns.saturating_mul(self.factor.get());
        self.spent_until_ns.set(self.spent_until_ns.get().max(now_ns).saturating_add(cost_ns));
    }
}

/// Guard: until it is dropped, CPU time of the thread counts towards a budget.
pub(crate) struct Spending<'a> {
    bucket: &'a Bucket,
    began_ns: u64,
}

impl Drop for Spending<'_> {
    fn drop(&mut self) {
        if self.bucket.factor.get() > 0 {
            self.bucket.charge(thread_cpu_ns().saturating_sub(self.began_ns), clock::monotonic_ns());
        }
    }
}

/// Returns the CPU time of the calling thread.
fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_and_share_of_the_machine_can_be_spent() {
        let budget = ExplainBudget::default();
        budget.0.charge(u64::MAX, 1);
        assert!(budget.spend().is_some(), "there is no limit");
        // 1 % of 2 CPUs: 20 ms each second.
        budget.limit(10_000, 2);
        let now_ns = clock::monotonic_ns();
        budget.0.spent_until_ns.set(0);
        budget.0.charge(99_000_000, now_ns);
        let spending = budget.spend().expect("5 s allow 100 ms");
        // If dropped, it would charge the CPU time of the test.
        std::mem::forget(spending);
        budget.0.charge(3_000_000_000, now_ns);
        assert!(budget.spend().is_none());
        assert_eq!(budget.0.spent_until_ns.get(), now_ns + 50 * 3_099_000_000);
    }
}
