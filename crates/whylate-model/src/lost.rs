// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the reasons in `lost` mean.

/// A reason for which events are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason {
    /// Its name in JSON.
    pub name: &'static str,
    /// The sources that yield it.
    pub sources: &'static [&'static str],
    /// What happened, in a line.
    pub meaning: &'static str,
}

const fn reason(name: &'static str, sources: &'static [&'static str], meaning: &'static str) -> Reason {
    Reason { name, sources, meaning }
}

const ALL: &[&str] = &["wq", "timerlat", "irqsoff", "offcpu", "sqpoll"];

/// Every reason of every source, in the order of names. One name may mean something else in another source.
pub const REASONS: &[Reason] = &[
    reason(
        "armed_late",
        &["timerlat"],
        "a stopped or preempted thread set its timer after it was due; only its return to user space counts",
    ),
    reason("buckets_full", &["wq", "irqsoff"], "the memory for histograms was full"),
    reason(
        "busy_rings",
        &["sqpoll"],
        "a ring was locked at every try, or did not show its thread while that was spinning (backend fdinfo)",
    ),
    reason("cancelled", &["wq"], "a queued item was cancelled or armed anew; noticed when its memory is queued again"),
    reason("cpus_full", &["irqsoff"], "the file has events of more CPUs than are read (--import)"),
    reason("culprits_full", &["irqsoff"], "the table of culprits was full"),
    reason(
        "end_unmatched",
        &["wq"],
        "an item ended that was not seen starting, mostly because it ran when measuring began",
    ),
    reason("ended_unseen", &["sqpoll"], "a submission thread was gone, and its exit was not seen"),
    reason("events", &["irqsoff"], "the kernel says in the file that it lost events (--import)"),
    reason("evicted", &["wq"], "an item that had been queued for more than 10 s had to make room for another one"),
    reason(
        "holders",
        &["wq"],
        "a running item could not be recorded, so items that wait for it do not name it (--why)",
    ),
    reason("items_full", &["wq"], "the table of queued items was full"),
    reason("late_events", ALL, "late events came faster than they were read, or were too many for one line of JSON"),
    reason("looks", &["irqsoff"], "a CPU went offline and came back; no NMI looks into its sections any more"),
    reason("nested", ALL, "a BPF program was skipped because it was already running on that CPU"),
    reason("occupancy_nested", ALL, "an event interrupted the accounting of its CPU, and is missing from it (--why)"),
    reason("occupancy_stacks", ALL, "the stack that a late interrupt found could not be stored (--why)"),
    reason("places_full", &["offcpu"], "the table of places was full"),
    reason("processes_full", &["offcpu"], "the table of processes was full"),
    reason("reused", &["wq"], "the item's memory was freed and used for another item"),
    reason(
        "rules_full",
        &["offcpu"],
        "there was no room for a frame's unwind rule; the stack ends in [unwound partly]",
    ),
    reason("running_full", &["wq"], "the table of running items was full"),
    reason(
        "samples",
        &["sqpoll"],
        "a submission thread could not be sampled, or its stack could not be read (before Linux 6.9)",
    ),
    reason("samples", &["timerlat"], "the kernel's tracer overwrote samples before they were read (backend tracer)"),
    reason("series_full", &["wq", "irqsoff"], "the table of series was full"),
    reason(
        "stacks",
        &["irqsoff"],
        "the stack of a late tick could not be kept; it counts without the function that enabled interrupts",
    ),
    reason("stacks", &["wq"], "the stack of whoever queued an item could not be kept"),
    reason("stacks_full", &["offcpu"], "the table of stacks was full"),
    reason("threads_full", &["offcpu", "sqpoll"], "the table of threads was full"),
    reason("torn", &["offcpu"], "the thread ran while its stack was read; its time counts without a stack"),
    reason(
        "traces",
        &["irqsoff"],
        "longer sections came faster than their traces were read, or a trace was not there (backend tracer)",
    ),
    reason(
        "unmatched",
        &["irqsoff"],
        "the start or end of a section or a timer's function, or a reschedule mark, was not seen; mostly right after the start",
    ),
    reason(
        "unmatched",
        &["wq"],
        "an item started that was not seen being queued, mostly because it was queued before measuring began",
    ),
    reason("unread_processes", &["sqpoll"], "the kernel denied access to the rings of a process"),
    reason("unreadable", &["irqsoff"], "a line of the file is no event (--import)"),
    reason("unreadable", &["offcpu"], "the stack of a living thread could not be read (backend proc)"),
    reason(
        "unseen",
        &["irqsoff"],
        "a due tick was not seen, mostly because opening perf events made the kernel reprogram its timers",
    ),
    reason("unseen", &["offcpu"], "a wait was not seen to begin; its time is left out (backend trace)"),
    reason(
        "unseen",
        &["timerlat"],
        "the timer or the switch of an activation was not seen; only its return to user space counts",
    ),
    reason(
        "unseen_switches",
        ALL,
        "the CPU ran a thread that was not seen switching in; some supervisors hide theirs (--why)",
    ),
    reason("unseen_wakers", &["offcpu"], "the waker was not seen; the wait counts as [waker not seen] (--wakers)"),
    reason(
        "unseen_wakeups",
        &["offcpu", "sqpoll"],
        "the start of a long wait for a CPU was not seen, so the wait is left out (--why)",
    ),
    reason(
        "work_ends",
        &["sqpoll"],
        "the end of work was not seen; the time until the next work or sleep counts as work (--precise)",
    ),
];

/// The sources whose reasons are explained.
pub fn sources() -> &'static [&'static str] {
    ALL
}

/// The reasons that a source may yield, in the order of their names.
pub fn of_source(source: &str) -> impl Iterator<Item = &'static Reason> {
    REASONS.iter().filter(move |reason| reason.sources.contains(&source))
}

/// What a source's reason means.
pub fn meaning(source: &str, name: &str) -> Option<&'static str> {
    of_source(source).find(|reason| reason.name == name).map(|reason| reason.meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_means_one_thing_in_a_source() {
        for source in sources() {
            let names: Vec<&str> = of_source(source).map(|reason| reason.name).collect();
            assert!(names.is_sorted_by(|a, b| a < b), "{source}: {names:?}");
        }
        assert!(REASONS.iter().all(|reason| reason.sources.iter().all(|source| sources().contains(source))));
        assert_ne!(meaning("wq", "stacks"), meaning("irqsoff", "stacks"));
        assert_eq!(meaning("wq", "torn"), None);
    }

    #[test]
    fn a_meaning_is_a_line() {
        for Reason { name, meaning, .. } in REASONS {
            assert!((20..=120).contains(&meaning.len()) && !meaning.contains('\n'), "{name}: {}", meaning.len());
        }
    }
}
