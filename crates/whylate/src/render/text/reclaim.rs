// SPDX-License-Identifier: MIT OR Apache-2.0
//! Says for how long threads reclaimed memory, and why they had to.

use whylate_model::reclaim::{Reclaim, ReclaimKind};
use whylate_model::units::{format_ns, printable};

use super::why;

/// Smaller shares of the time are left out.
const SHOWN_PERCENT: f64 = 1.0;

/// Returns a sentence about the time in which threads reclaimed memory for one reason, if it is a notable share of
/// `total_ns`.
pub(super) fn sentence(reclaim: &Reclaim, total_ns: u64) -> Option<String> {
    let percent = reclaim.ns as f64 * 100.0 / total_ns.max(1) as f64;
    if percent < SHOWN_PERCENT {
        return None;
    }
    let (time, times) = (format_ns(reclaim.ns), why::counted(reclaim.latency.count(), "time"));
    let longest = format_ns(reclaim.latency.max_ns());
    let (doing, why) = match (reclaim.kind, &reclaim.cgroup) {
        (ReclaimKind::Cgroup, Some(path)) => {
            ("reclaiming memory", format!("because cgroup {} was at its memory limit", printable(path)))
        }
        (ReclaimKind::Cgroup, None) => ("reclaiming memory", "of a cgroup without a known limit".to_owned()),
        (ReclaimKind::Direct, _) => ("reclaiming memory", "because little memory was free".to_owned()),
        (ReclaimKind::Compaction, _) => ("compacting memory", "to get contiguous pages".to_owned()),
    };
    // Most of the machine's pages are freed by kswapd, in no time of the program.
    let is_of_cgroup = reclaim.kind == ReclaimKind::Cgroup && reclaim.pages > 0;
    let reclaimer = reclaim.reclaimers.first().filter(|_| is_of_cgroup).map(|reclaimer| {
        let percent = reclaimer.pages as f64 * 100.0 / reclaim.pages as f64;
        format!(
            " {} had to free most of its pages ({percent:.0}%): it takes memory there fastest.",
            printable(&reclaimer.who)
        )
    });
    Some(format!(
        "Spent {time} ({percent:.0}%) {doing} {why} ({times}, max {longest}).{}",
        reclaimer.unwrap_or_default()
    ))
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;
    use whylate_model::Histogram;
    use whylate_model::path::budget::{Budget, ProgramReport};
    use whylate_model::reclaim::Reclaimer;

    use super::*;
    use crate::render::text::overview::Screen;
    use crate::render::text::{program, text_of};

    fn reclaim() -> Reclaim {
        let latency: Histogram = [1_000_000, 2_000_000].into_iter().collect();
        let reclaimers = vec![Reclaimer { who: "writer:8".to_owned(), pages: 97 }];
        let cgroup = Some("/web\n".to_owned());
        Reclaim { cgroup, ns: 3_000_000, on_cpu_ns: 2_000_000, latency, pages: 100, reclaimers, ..Reclaim::default() }
    }

    #[test]
    fn cgroup_and_process_that_fills_it_are_named() {
        let text = sentence(&reclaim(), 10_000_000).expect("notable");
        let writer = "writer:8 had to free most of its pages (97%): it takes memory there fastest.";
        let because = "because cgroup /web? was at its memory limit (2 times, max 2.00ms).";
        assert_eq!(text, format!("Spent 3.00ms (30%) reclaiming memory {because} {writer}"));
        assert_eq!(sentence(&reclaim(), 400_000_000), None);
    }

    #[test]
    fn time_of_a_program_in_reclaim_is_a_state() {
        let (total_ns, on_cpu_ns) = (10_000_000, 8_000_000);
        let budget = Budget { threads: 1, total_ns, on_cpu_ns, reclaim: vec![reclaim()], ..Budget::default() };
        let seen = ProgramReport { name: "victim:7".to_owned(), span_ns: total_ns, budget, ..ProgramReport::default() };
        let screen = Screen { columns: None, is_verbose: false, zone: TimeZone::UTC, replay: None };
        let text = text_of(|out| program::write(out, &seen, None, &screen, &mut |_| None));
        let spent = "spent 60% of its time on CPU, 20% reclaiming memory on CPU";
        assert!(text.contains(spent) && text.contains("\nSpent 3.00ms (30%) reclaiming memory because"), "{text}");
    }

    #[test]
    fn memory_of_the_machine_has_no_cgroup() {
        let of = |kind| sentence(&Reclaim { kind, cgroup: None, ..reclaim() }, 10_000_000).expect("notable");
        let figures = "(2 times, max 2.00ms).";
        let direct = "Spent 3.00ms (30%) reclaiming memory because little memory was free";
        assert_eq!(of(ReclaimKind::Direct), format!("{direct} {figures}"));
        let compaction = "Spent 3.00ms (30%) compacting memory to get contiguous pages";
        assert_eq!(of(ReclaimKind::Compaction), format!("{compaction} {figures}"));
        assert!(
            of(ReclaimKind::Cgroup)
                .starts_with("Spent 3.00ms (30%) reclaiming memory of a cgroup without a known limit")
        );
    }
}
