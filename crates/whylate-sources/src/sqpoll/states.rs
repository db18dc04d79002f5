// SPDX-License-Identifier: MIT OR Apache-2.0
//! States of the submission threads at one read, and the series of the time between two reads.

use std::collections::HashMap;

use whylate_model::Series;
use whylate_model::sqpoll::{Counters, SqThread, Usage, labels};

/// State of a thread at one read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ThreadState {
    /// Name of the thread's process.
    pub process: String,
    /// The CPU on which it runs or ran last.
    pub cpu: Option<u32>,
    /// Time for which the thread spins before it sleeps, in milliseconds.
    pub idle_ms: Option<u64>,
    /// Time at which the counters were 0 (CLOCK_MONOTONIC).
    pub zero_ns: u64,
    pub counters: Counters,
    /// Whether the thread has exited since; this is its final state then.
    pub has_ended: bool,
    pub rings: Vec<RingState>,
}

/// State of a ring at one read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RingState {
    /// Identifies the ring, however many descriptors it has.
    pub key: (u64, u64),
    /// Display name: a descriptor of the process.
    pub name: String,
    /// Number of requests that the thread has taken, modulo 2^32; `None` if it could not be read.
    pub sq_head: Option<u32>,
    /// Number of requests submitted to the ring, modulo 2^32.
    pub sq_tail: u32,
    pub sq_entries: u32,
    /// Relevant setup flags.
    pub kinds: Vec<&'static str>,
}

pub(super) type ThreadStates = HashMap<SqThread, ThreadState>;

/// Returns the series of the time between two reads, by process and thread. With `is_late`, the first read took place after
/// the start of the interval.
pub(super) fn series(before: &ThreadStates, after: &ThreadStates, interval_ns: u64, is_late: bool) -> Vec<Series> {
    let mut threads: Vec<(&SqThread, &ThreadState)> = after.iter().collect();
    threads.sort_by_key(|&(thread, _)| thread);
    let of_thread = |(thread, now)| thread_series(thread, before.get(thread), now, interval_ns, is_late);
    threads.into_iter().flat_map(of_thread).collect()
}

fn thread_series(
    thread: &SqThread,
    before: Option<&ThreadState>,
    now: &ThreadState,
    interval_ns: u64,
    is_late: bool,
) -> Vec<Series> {
    let counters = &now.counters;
    let zero = Counters {
        at_ns: now.zero_ns,
        working_ns: counters.working_ns.map(|_| 0),
        sqes: counters.sqes.map(|_| 0),
        wakeups: counters.wakeups.map(|_| 0),
        ..Counters::default()
    };
    let Some(usage) = Usage::between(before.map_or(&zero, |seen| &seen.counters), counters) else {
        return Vec::new();
    };
    let mut whole = Series { labels: labels(&now.process, thread), ..Series::default() };
    usage.describe(&mut whole.values);
    let mut put = |name: &str, value: f64| whole.values.insert(name.to_owned(), value);
    if let Some(cpu) = now.cpu {
        put("cpu", f64::from(cpu));
    }
    if let Some(idle_ms) = now.idle_ms {
        put("idle_ms", idle_ms as f64);
    }
    put("rings", now.rings.len() as f64);
    // A read takes a while; threads in both are measured from one read to the next.
    let present = usage.duration_ns as f64 / interval_ns.max(1) as f64;
    if (before.is_none() || now.has_ended || is_late) && present < 0.99 {
        put("present", present);
    }
    let rings = now.rings.iter().map(|ring| ring_series(&whole, ring, before, usage.duration_ns));
    let by = |name: &str, (who, share): &(String, f64)| {
        let mut series = Series { labels: whole.labels.clone(), ..Series::default() };
        series.labels.insert("by".to_owned(), who.clone());
        series.values.insert(name.to_owned(), *share);
        series
    };
    let starved = usage.starved_by.iter().map(|part| by("starved_by", part));
    let throttled = usage.throttled.iter().map(|part| by("throttled", part));
    let parts: Vec<Series> = rings.chain(starved).chain(throttled).collect();
    std::iter::once(whole).chain(parts).collect()
}

fn ring_series(whole: &Series, ring: &RingState, before: Option<&ThreadState>, duration_ns: u64) -> Series {
    let mut series = Series { labels: whole.labels.clone(), ..Series::default() };
    series.labels.insert("ring".to_owned(), ring.name.clone());
    series.values.insert("entries".to_owned(), f64::from(ring.sq_entries));
    series.values.extend(ring.kinds.iter().map(|&kind| (kind.to_owned(), 1.0)));
    if let Some(head) = ring.sq_head {
        series.values.insert("pending".to_owned(), f64::from(ring.sq_tail.wrapping_sub(head)));
        let was = match before {
            // Rings of a new thread started at 0. Other rings may have been busy at the last read.
            None => Some(0),
            Some(seen) => seen.rings.iter().find(|other| other.key == ring.key).and_then(|ring| ring.sq_head),
        };
        if let Some(was) = was {
            let taken = f64::from(head.wrapping_sub(was));
            series.values.insert("sqes_per_s".to_owned(), taken * 1e9 / duration_ns as f64);
        }
    }
    series
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREAD: SqThread = SqThread { pid: 10, tid: 11, born: 5 };

    fn seen(at_ns: u64, running_ns: u64, head: u32) -> ThreadState {
        ThreadState {
            process: "app".to_owned(),
            zero_ns: 100,
            counters: Counters {
                at_ns,
                running_ns,
                working_ns: Some(running_ns / 2),
                sqes: Some(7),
                ..Counters::default()
            },
            rings: vec![RingState {
                key: (1, 1),
                name: "fd 3".to_owned(),
                sq_head: Some(head),
                sq_tail: head.wrapping_add(2),
                sq_entries: 8,
                kinds: vec!["iopoll"],
            }],
            ..ThreadState::default()
        }
    }

    fn between(before: Option<ThreadState>, after: ThreadState) -> Vec<Series> {
        let look = |seen: Option<ThreadState>| seen.into_iter().map(|seen| (THREAD, seen)).collect::<ThreadStates>();
        series(&look(before), &look(Some(after)), 1_000, false)
    }

    #[test]
    fn new_thread_is_measured_from_its_start() {
        let series = between(None, seen(600, 250, 4));
        assert_eq!(series[0].values["working"], 0.25);
        assert_eq!(series[0].values["present"], 0.5);
        assert_eq!(series[0].labels["tid"], "11");
    }

    #[test]
    fn handles_wraparound_of_ring_heads() {
        let series = between(Some(seen(1_000, 0, u32::MAX - 3)), seen(2_000, 0, 6));
        assert_eq!(series[1].labels["ring"], "fd 3");
        assert_eq!((series[1].values["pending"], series[1].values["sqes_per_s"]), (2.0, 10.0 * 1e6));
        assert!(!series[0].values.contains_key("present"));
    }

    #[test]
    fn ring_busy_at_last_read_has_no_rate() {
        let mut busy = seen(1_000, 0, 1);
        busy.rings.clear();
        let series = between(Some(busy), seen(2_000, 0, 3_197_153));
        assert!(!series[1].values.contains_key("sqes_per_s"), "{series:?}");
    }

    #[test]
    fn thread_in_both_reads_is_fully_present() {
        assert!(!between(Some(seen(1_000, 0, 1)), seen(1_500, 0, 1))[0].values.contains_key("present"));
        let ended = ThreadState { has_ended: true, ..seen(1_500, 0, 1) };
        assert_eq!(between(Some(seen(1_000, 0, 1)), ended)[0].values["present"], 0.5);
    }

    #[test]
    fn thread_found_late_is_present_from_the_first_read() {
        let look = |seen: ThreadState| ThreadStates::from([(THREAD, seen)]);
        let found = series(&look(seen(1_000, 400, 1)), &look(seen(1_500, 650, 1)), 1_000, true);
        assert_eq!((found[0].values["present"], found[0].values["working"]), (0.5, 0.25));
    }

    #[test]
    fn unreadable_ring_has_no_counters() {
        let mut blind = seen(2_000, 0, 6);
        blind.rings[0].sq_head = None;
        let series = between(Some(seen(1_000, 0, 1)), blind);
        assert_eq!(series[1].values.keys().collect::<Vec<_>>(), ["entries", "iopoll"]);
    }
}
