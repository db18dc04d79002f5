// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides which programs are over the limit.

use super::{HeldUpBy, HeldUpPart, HeldUpProgram, Programs};
use crate::Cause;

/// Share of the time for which a program is held up, as a fraction, from which it is over the limit.
pub const LIMIT: f64 = 0.25;
/// Minimum number of waits. Fewer waits are late events, if they are long.
pub const MIN_WAITS: u64 = 5;
/// Minimum time that was read from the CPU trace. Shares of less time are due to chance.
pub const MIN_COVERED_NS: u64 = 1_000_000_000;
/// Minimum median of waits for a disk or a CPU that hold a program up. A disk that answers faster does the program's work,
/// and a few long waits for a CPU among many short ones are late events.
const MIN_MEDIAN_NS: u64 = 2_000_000;
/// Minimum ratio of a thread's run-queue wait per time on a CPU to that of other programs. If all programs wait alike, CPUs
/// are shared fairly, as in a build with more jobs than CPUs.
const UNFAIR: f64 = 3.0;

impl Programs {
    /// Returns the programs that are over the limit, with the parts that count. Threads and processes with the same name
    /// are one program; the thread that was held up most stands for it.
    pub fn over_limit(&self) -> Programs {
        let mut over: Vec<HeldUpProgram> = Vec::new();
        if self.covered_ns >= MIN_COVERED_NS {
            let judged = self.held_up.iter().filter_map(|program| self.judged(program));
            for program in judged {
                let name = |program: &HeldUpProgram| program.program().by_name();
                match over.iter_mut().find(|known| name(known) == name(&program)) {
                    Some(known) if known.held_up_ns() >= program.held_up_ns() => known.others += 1 + program.others,
                    Some(known) => {
                        let others = known.others + 1 + program.others;
                        *known = HeldUpProgram { others, ..program };
                    }
                    None => over.push(program),
                }
            }
        }
        over.sort_by(|a, b| (b.held_up_ns(), &a.who).cmp(&(a.held_up_ns(), &b.who)));
        let parts = || over.iter().flat_map(|program| &program.parts);
        let is_culprit = |name: &str| parts().any(|part| part.causes.iter().any(|of| of.who.comm() == Some(name)));
        let spawned = self.spawned.iter().filter(|spawned| is_culprit(&spawned.name)).cloned().collect();
        let Programs { covered_ns, on_cpu_ns, ready_ns, .. } = *self;
        Programs { covered_ns, on_cpu_ns, ready_ns, held_up: over, spawned }
    }

    /// Returns the program with the parts that count, if their sum is over the limit.
    fn judged(&self, program: &HeldUpProgram) -> Option<HeldUpProgram> {
        let counts = |part: &&HeldUpPart| match part.by {
            HeldUpBy::RunQueue => {
                is_slow(part) && sleeps(program, part.ns) && self.is_unfair(part.ns, program.on_cpu_ns)
            }
            HeldUpBy::Disk => is_slow(part),
            HeldUpBy::Quota | HeldUpBy::Lock | HeldUpBy::Memory | HeldUpBy::Program => true,
            HeldUpBy::Unknown => false,
        };
        let parts = program.parts.iter().filter(counts).cloned();
        let parts: Vec<HeldUpPart> = parts.map(|part| HeldUpPart { causes: by_name(&part.causes), ..part }).collect();
        let judged = HeldUpProgram { parts, ..program.clone() };
        let waits: u64 = judged.parts.iter().map(|part| part.latency.count()).sum();
        (waits >= MIN_WAITS && judged.share(self.covered_ns) >= LIMIT).then_some(judged)
    }

    /// Returns whether a program waits longer for CPUs than the others, in relation to its time on CPUs.
    fn is_unfair(&self, ready_ns: u64, on_cpu_ns: u64) -> bool {
        let others_ready_ns = self.ready_ns.saturating_sub(ready_ns) as f64;
        let others_on_cpu_ns = self.on_cpu_ns.saturating_sub(on_cpu_ns).max(1) as f64;
        ready_ns as f64 >= UNFAIR * others_ready_ns / others_on_cpu_ns * on_cpu_ns as f64
    }
}

/// Returns whether the waits for a disk or a CPU are long.
fn is_slow(part: &HeldUpPart) -> bool {
    part.latency.quantile_ns(0.5) >= MIN_MEDIAN_NS
}

/// Adds up the causes of threads with the same name, such as those of a program that is started again and again.
fn by_name(causes: &[Cause]) -> Vec<Cause> {
    let mut sums: Vec<Cause> = Vec::new();
    for cause in causes {
        let name = cause.who.by_name();
        match sums.iter_mut().find(|sum| sum.kind == cause.kind && sum.who.by_name() == name) {
            Some(sum) if sum.who == cause.who => sum.ns = sum.ns.saturating_add(cause.ns),
            Some(sum) => (sum.who, sum.ns) = (name, sum.ns.saturating_add(cause.ns)),
            None => sums.push(cause.clone()),
        }
    }
    sums.sort_by(|a, b| (b.ns, a.kind, &a.who).cmp(&(a.ns, b.kind, &b.who)));
    sums
}

/// Returns whether a thread mostly sleeps, as a service does that has work now and then. Threads that could run all the
/// time, and short-lived ones, are expected to share the CPUs.
fn sleeps(program: &HeldUpProgram, ready_ns: u64) -> bool {
    program.who.tid().is_some() && program.on_cpu_ns.saturating_add(ready_ns) <= program.lived_ns / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ActorName, CauseKind};

    const S_NS: u64 = 1_000_000_000;

    fn part(by: HeldUpBy, ms: u64, each_ms: u64) -> HeldUpPart {
        let latency = (0..ms / each_ms).map(|_| each_ms * 1_000_000).collect();
        let causes = vec![Cause::new(CauseKind::Running, ActorName::thread("indexer", 8), ms * 1_000_000)];
        HeldUpPart { by, ns: ms * 1_000_000, latency, causes, ..HeldUpPart::default() }
    }

    fn program(tid: u32, on_cpu_ms: u64, parts: Vec<HeldUpPart>) -> HeldUpProgram {
        let who = ActorName::thread("service", tid);
        HeldUpProgram { who, on_cpu_ns: on_cpu_ms * 1_000_000, lived_ns: 10 * S_NS, parts, ..HeldUpProgram::default() }
    }

    fn programs(held_up: Vec<HeldUpProgram>) -> Programs {
        Programs { covered_ns: 10 * S_NS, on_cpu_ns: 10 * S_NS, ready_ns: 5 * S_NS, held_up, spawned: Vec::new() }
    }

    fn is_over(parts: Vec<HeldUpPart>) -> bool {
        !programs(vec![program(7, 1_000, parts)]).over_limit().held_up.is_empty()
    }

    #[test]
    fn share_of_time_decides() {
        assert!(is_over(vec![part(HeldUpBy::Lock, 2_500, 49)]));
        assert!(!is_over(vec![part(HeldUpBy::Lock, 2_499, 49)]));
        // All kinds count together.
        assert!(is_over(vec![part(HeldUpBy::Lock, 1_300, 10), part(HeldUpBy::Memory, 1_200, 10)]));
        // A few long waits are late events.
        assert!(
            !is_over(vec![part(HeldUpBy::Program, 4_000, 1_000)])
                && is_over(vec![part(HeldUpBy::Program, 5_000, 1_000)])
        );
        let mut short = programs(vec![program(7, 0, vec![part(HeldUpBy::Lock, 800, 10)])]);
        short.covered_ns = S_NS - 1;
        assert!(short.over_limit().held_up.is_empty());
    }

    #[test]
    fn fast_disk_does_not_hold_a_program_up() {
        assert!(is_over(vec![part(HeldUpBy::Disk, 5_000, 3)]) && !is_over(vec![part(HeldUpBy::Disk, 5_000, 1)]));
    }

    #[test]
    fn a_hog_holds_a_program_up_and_fairly_shared_cpus_do_not() {
        // The program is runnable for more than half of the time.
        assert!(!is_over(vec![part(HeldUpBy::RunQueue, 4_001, 20)]));
        // The other programs wait half as long as they run (4 s of 9 s); this program waits 4 s per second on a CPU.
        assert!(is_over(vec![part(HeldUpBy::RunQueue, 4_000, 20)]));
        // In a build, all jobs wait equally long.
        let job = |tid| program(tid, 1_000, vec![part(HeldUpBy::RunQueue, 3_000, 5)]);
        let build = Programs {
            covered_ns: 10 * S_NS,
            on_cpu_ns: 8 * S_NS,
            ready_ns: 24 * S_NS,
            held_up: (1..9).map(job).collect(),
            spawned: Vec::new(),
        };
        assert!(build.over_limit().held_up.is_empty());
    }

    #[test]
    fn threads_with_one_name_are_one_program_shown_by_the_worst_thread() {
        let of = |tid, ms| program(tid, 1_000, vec![part(HeldUpBy::Lock, ms, 10)]);
        let over = programs(vec![of(1, 3_000), of(2, 6_000), of(3, 100), of(4, 4_000)]).over_limit().held_up;
        let [one] = &over[..] else { panic!("{over:?}") };
        assert_eq!((one.who.to_string(), one.others, one.held_up_ns()), ("service:2".to_owned(), 2, 6 * S_NS));
    }

    #[test]
    fn culprits_with_one_name_are_summed() {
        let cause = |tid, ns| Cause::new(CauseKind::Running, ActorName::thread("true", tid), ns);
        let other = Cause::new(CauseKind::Running, ActorName::thread("indexer", 8), 15);
        let sums = by_name(&[cause(1, 10), other.clone(), cause(2, 10)]);
        assert_eq!(sums[0], Cause::new(CauseKind::Running, ActorName::program("true"), 20));
        assert_eq!(sums[1], other);
    }

    #[test]
    fn share_of_concurrent_short_lived_threads_is_of_their_lifetime() {
        let mut crowd = program(0, 0, vec![part(HeldUpBy::Lock, 20_000, 10)]);
        crowd.lived_ns = 100 * S_NS;
        assert!(programs(vec![crowd.clone()]).over_limit().held_up.is_empty());
        crowd.lived_ns = 80 * S_NS;
        assert_eq!(programs(vec![crowd]).over_limit().held_up.len(), 1);
    }
}
