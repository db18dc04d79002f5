// SPDX-License-Identifier: MIT OR Apache-2.0
//! What one look saw of the submission threads, and what has happened between two looks.

use std::collections::HashMap;

use whylate_model::Series;
use whylate_model::sqpoll::{Counters, SqThread, Usage, labels};

/// A thread at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The name of its process.
    pub process: String,
    /// The CPU that it has or had last.
    pub cpu: Option<u32>,
    /// For how long it spins before it sleeps.
    pub idle_ms: Option<u64>,
    /// When its counters were 0 (CLOCK_MONOTONIC).
    pub zero_ns: u64,
    pub counters: Counters,
    /// It has ended since, and this is what it was at its end.
    pub has_ended: bool,
    pub rings: Vec<SeenRing>,
}

/// A ring at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SeenRing {
    /// Which one it is, however many descriptors it has.
    pub key: (u64, u64),
    /// What people call it: a descriptor of the process.
    pub name: String,
    /// How many requests the thread has taken, modulo 2^32; `None` where it could not be read.
    pub sq_head: Option<u32>,
    /// How many have been put into it.
    pub sq_tail: u32,
    pub sq_entries: u32,
    /// What it was set up with, of what matters here.
    pub kinds: Vec<&'static str>,
}

pub(super) type Look = HashMap<SqThread, Seen>;

/// The series of the time between two looks, by process and thread.
pub(super) fn series(before: &Look, after: &Look, interval_ns: u64) -> Vec<Series> {
    let mut threads: Vec<(&SqThread, &Seen)> = after.iter().collect();
    threads.sort_by_key(|&(thread, _)| thread);
    threads.into_iter().flat_map(|(thread, now)| of_thread(thread, before.get(thread), now, interval_ns)).collect()
}

fn of_thread(thread: &SqThread, before: Option<&Seen>, now: &Seen, interval_ns: u64) -> Vec<Series> {
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
    // One look takes a while, and threads that were there at both are told from one to the other.
    let present = usage.duration_ns as f64 / interval_ns.max(1) as f64;
    if (before.is_none() || now.has_ended) && present < 0.99 {
        put("present", present);
    }
    let rings = now.rings.iter().map(|ring| of_ring(&whole, ring, before, usage.duration_ns));
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

fn of_ring(whole: &Series, ring: &SeenRing, before: Option<&Seen>, duration_ns: u64) -> Series {
    let mut series = Series { labels: whole.labels.clone(), ..Series::default() };
    series.labels.insert("ring".to_owned(), ring.name.clone());
    series.values.insert("entries".to_owned(), f64::from(ring.sq_entries));
    series.values.extend(ring.kinds.iter().map(|&kind| (kind.to_owned(), 1.0)));
    if let Some(head) = ring.sq_head {
        series.values.insert("pending".to_owned(), f64::from(ring.sq_tail.wrapping_sub(head)));
        let was = match before {
            // Those of a thread that is new have begun at 0. Others may have been busy at the last look.
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

    fn seen(at_ns: u64, running_ns: u64, head: u32) -> Seen {
        Seen {
            process: "app".to_owned(),
            zero_ns: 100,
            counters: Counters {
                at_ns,
                running_ns,
                working_ns: Some(running_ns / 2),
                sqes: Some(7),
                ..Counters::default()
            },
            rings: vec![SeenRing {
                key: (1, 1),
                name: "fd 3".to_owned(),
                sq_head: Some(head),
                sq_tail: head.wrapping_add(2),
                sq_entries: 8,
                kinds: vec!["iopoll"],
            }],
            ..Seen::default()
        }
    }

    fn between(before: Option<Seen>, after: Seen) -> Vec<Series> {
        let look = |seen: Option<Seen>| seen.into_iter().map(|seen| (THREAD, seen)).collect::<Look>();
        series(&look(before), &look(Some(after)), 1_000)
    }

    #[test]
    fn a_thread_that_came_meanwhile_is_measured_from_then_on() {
        let series = between(None, seen(600, 250, 4));
        assert_eq!(series[0].values["working"], 0.25);
        assert_eq!(series[0].values["present"], 0.5);
        assert_eq!(series[0].labels["tid"], "11");
    }

    #[test]
    fn heads_of_rings_wrap_around() {
        let series = between(Some(seen(1_000, 0, u32::MAX - 3)), seen(2_000, 0, 6));
        assert_eq!(series[1].labels["ring"], "fd 3");
        assert_eq!((series[1].values["pending"], series[1].values["sqes_per_s"]), (2.0, 10.0 * 1e6));
        assert!(!series[0].values.contains_key("present"));
    }

    #[test]
    fn a_ring_that_was_busy_at_the_last_look_has_no_rate() {
        let mut busy = seen(1_000, 0, 1);
        busy.rings.clear();
        let series = between(Some(busy), seen(2_000, 0, 3_197_153));
        assert!(!series[1].values.contains_key("sqes_per_s"), "{series:?}");
    }

    #[test]
    fn a_thread_that_was_there_at_both_looks_was_there_all_the_time() {
        assert!(!between(Some(seen(1_000, 0, 1)), seen(1_500, 0, 1))[0].values.contains_key("present"));
        let ended = Seen { has_ended: true, ..seen(1_500, 0, 1) };
        assert_eq!(between(Some(seen(1_000, 0, 1)), ended)[0].values["present"], 0.5);
    }

    #[test]
    fn a_ring_that_could_not_be_read_has_no_figures() {
        let mut blind = seen(2_000, 0, 6);
        blind.rings[0].sq_head = None;
        let series = between(Some(seen(1_000, 0, 1)), blind);
        assert_eq!(series[1].values.keys().collect::<Vec<_>>(), ["entries", "iopoll"]);
    }
}
