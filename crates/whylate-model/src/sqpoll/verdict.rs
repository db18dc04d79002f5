// SPDX-License-Identifier: MIT OR Apache-2.0
//! Advice on SQPOLL settings, where the figures of a span justify it.

use super::is_part_of;
use super::is_thread;
use crate::snapshot::{Series, Snapshot};

/// Minimum span: shorter ones are not representative.
const MIN_SPAN_NS: u64 = 500_000_000;
/// Minimum share of the span in which a thread must be present to be judged.
const MIN_PRESENT: f64 = 0.9;
/// Below this working share of its time on a CPU, polling costs more than it saves...
const MAX_IDLE_UTILIZATION: f64 = 0.2;
/// ... if it spins for at least this share of the time.
const MIN_SPINNING: f64 = 0.5;
/// Minimum rate of wakeups to advise on: each is a system call and a context switch, which SQPOLL is meant to save.
const MIN_WAKEUPS_PER_S: f64 = 100.0;
/// Maximum mean sleep for which spinning longer costs less than waking up.
const MAX_SLEEP_S: f64 = 0.01;
/// Minimum starved share of the time to advise on.
const MIN_STARVED: f64 = 0.05;
/// Minimum working share of a busy thread, in which requests of several rings delay each other.
const MIN_WORKING: f64 = 0.8;

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// Returns advice, one sentence each, with the figures that it follows from; empty if the figures justify none.
pub fn verdicts(snapshot: &Snapshot) -> Vec<String> {
    if snapshot.duration_ns < MIN_SPAN_NS {
        return Vec::new();
    }
    let threads = || snapshot.series.iter().filter(|series| is_thread(series) && is_present(series));
    let mut verdicts: Vec<String> = threads().flat_map(|series| thread_verdicts(series, snapshot)).collect();
    verdicts.extend(process_verdicts(threads()));
    verdicts
}

fn is_present(series: &Series) -> bool {
    series.values.get("present").is_none_or(|&share| share >= MIN_PRESENT)
}

fn thread_verdicts(series: &Series, snapshot: &Snapshot) -> Vec<String> {
    let value = |name: &str| series.values.get(name).copied();
    let name = |label: &str| series.labels.get(label).map_or("?", String::as_str);
    let who = format!("{}:{}", name("process"), name("tid"));
    let has_ring =
        |kind: &str| snapshot.series.iter().any(|part| is_part_of(part, series) && part.values.get(kind) == Some(&1.0));
    // The kernel's own count excludes completions and includes each poll of a network device.
    let is_whole = snapshot.backend != "fdinfo";
    let mut advises_shorter_idle = false;
    let now = value("idle_ms").map_or_else(String::new, |ms| format!(" (now {ms:.0} ms)"));
    let mut sentences = Vec::new();
    if let (Some(utilisation), Some(spinning)) = (value("utilisation"), value("spinning"))
        && utilisation < MAX_IDLE_UTILIZATION
        && spinning > MIN_SPINNING
        && is_whole
        // Its work for the network consists of no requests.
        && !has_ring("napi")
    {
        advises_shorter_idle = true;
        sentences.push(format!(
            "{who} spins {} of the time and works {:.1}%: shorten sq_thread_idle{now}, or do without SQPOLL",
            percent(spinning),
            value("working").unwrap_or(0.0) * 100.0
        ));
    }
    if let (Some(wakeups), Some(sleeping)) = (value("wakeups_per_s"), value("sleeping"))
        && wakeups >= MIN_WAKEUPS_PER_S
        && sleeping / wakeups <= MAX_SLEEP_S
        && !advises_shorter_idle
    {
        let mean_ms = sleeping / wakeups * 1e3;
        sentences.push(format!(
            "{who} is woken {wakeups:.0} times a second, after {mean_ms:.2} ms of sleep: lengthen sq_thread_idle{now}"
        ));
    }
    if let Some(starved) = value("starved").filter(|&starved| starved >= MIN_STARVED) {
        let cpu = value("cpu").map_or_else(String::new, |cpu| format!(" CPU {cpu:.0}"));
        let parts = |value: &'static str| {
            let parts = snapshot.series.iter().filter(|part| is_part_of(part, series));
            parts.filter_map(move |part| Some((part.labels.get("by")?, part.values.get(value).copied()?)))
        };
        let sum = |value| parts(value).map(|(_, share)| share).sum::<f64>();
        let largest = |value, how: &str| {
            let largest = parts(value).max_by(|(_, a), (_, b)| a.total_cmp(b));
            largest.map_or_else(String::new, |(by, share)| {
                format!(", {} of it {how} {by}", percent((share / starved).min(1.0)))
            })
        };
        let (by, advice) = if sum("throttled") >= starved / 2.0 {
            // It would be throttled on a CPU of its own as well.
            (
                largest("throttled", "throttled by"),
                "raise the quota of that cgroup (cpu.max), or have its threads run less",
            )
        } else if sum("starved_by") >= starved / 2.0 {
            (largest("starved_by", "behind"), "pin it to a CPU of its own (sq_thread_cpu)")
        } else {
            let advice = "see who else runs there, and whether its cgroup has used up its share (cpu.max)";
            (largest("starved_by", "behind"), advice)
        };
        sentences.push(format!("{who} waits for{cpu} {} of the time{by}: {advice}", percent(starved)));
    }
    // With IOPOLL, an outstanding request counts as work.
    let may_split = is_whole && !has_ring("iopoll");
    if let Some(working) = value("working").filter(|&working| working > MIN_WORKING && may_split) {
        let what = match value("rings") {
            Some(rings) if rings > 1.0 => format!("share its {rings:.0} rings among several threads"),
            _ => "spread the load over another ring with its own thread".to_owned(),
        };
        sentences.push(format!("{who} works {} of the time: {what}", percent(working)));
    }
    sentences
}

/// Returns advice on threads of one process that could be merged.
fn process_verdicts<'a>(threads: impl Iterator<Item = &'a Series>) -> Vec<String> {
    let mut idle: Vec<(&str, &str, f64, usize)> = Vec::new();
    for series in threads {
        let label = |name: &str| series.labels.get(name).map_or("?", String::as_str);
        let value = |name: &str| series.values.get(name).copied();
        let (Some(working), Some(spinning)) = (value("working"), value("spinning")) else { continue };
        // A sleeping thread costs nothing.
        if working >= MAX_IDLE_UTILIZATION || working + spinning < MIN_SPINNING {
            continue;
        }
        match idle.iter_mut().find(|(_, pid, _, _)| *pid == label("pid")) {
            Some((_, _, sum, count)) => {
                *sum += working;
                *count += 1;
            }
            None => idle.push((label("process"), label("pid"), working, 1)),
        }
    }
    idle.into_iter()
        .filter(|&(_, _, sum, count)| count > 1 && sum < MIN_SPINNING)
        .map(|(process, pid, sum, count)| {
            format!(
                "{process}:{pid} has {count} submission threads that together work {:.1}% of one CPU: let its rings share one (IORING_SETUP_ATTACH_WQ)",
                sum * 100.0
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: &str, values: &[(&str, f64)]) -> Series {
        Series {
            labels: [("process", "app"), ("pid", "10"), ("tid", tid)].map(|(k, v)| (k.into(), v.into())).into(),
            values: values.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
            ..Series::default()
        }
    }

    fn verdicts_of(series: Vec<Series>) -> Vec<String> {
        let mut snapshot = Snapshot::new("sqpoll", "bpf", "host", 0);
        snapshot.duration_ns = 1_000_000_000;
        snapshot.series = series;
        verdicts(&snapshot)
    }

    const SPINS: [(&str, f64); 6] = [
        ("working", 0.01),
        ("spinning", 0.97),
        ("sleeping", 0.02),
        ("starved", 0.0),
        ("utilisation", 0.01 / 0.98),
        ("idle_ms", 2000.0),
    ];

    #[test]
    fn spinning_thread_is_reported_with_figures() {
        let expected =
            "app:11 spins 97% of the time and works 1.0%: shorten sq_thread_idle (now 2000 ms), or do without SQPOLL";
        assert_eq!(verdicts_of(vec![thread("11", &SPINS)]), [expected]);
    }

    #[test]
    fn spinning_threads_of_one_process_should_be_merged() {
        let verdicts = verdicts_of(vec![thread("11", &SPINS), thread("12", &SPINS)]);
        assert_eq!(verdicts.len(), 3, "{verdicts:?}");
        assert!(
            verdicts[2].starts_with("app:10 has 2 submission threads that together work 2.0% of one CPU"),
            "{verdicts:?}"
        );
    }

    #[test]
    fn frequently_woken_thread_should_spin_longer() {
        let woken = |wakeups: f64| thread("11", &[("sleeping", 0.5), ("starved", 0.0), ("wakeups_per_s", wakeups)]);
        assert_eq!(
            verdicts_of(vec![woken(1000.0)]),
            ["app:11 is woken 1000 times a second, after 0.50 ms of sleep: lengthen sq_thread_idle"]
        );
        assert_eq!(verdicts_of(vec![woken(40.0)]), [""; 0]);
    }

    #[test]
    fn starved_thread_names_culprit() {
        let starved = thread("11", &[("starved", 0.5), ("sleeping", 0.5), ("cpu", 3.0)]);
        let mut by = thread("11", &[("starved_by", 0.4)]);
        by.labels.insert("by".to_owned(), "hog:7".to_owned());
        assert_eq!(
            verdicts_of(vec![starved, by]),
            [
                "app:11 waits for CPU 3 50% of the time, 80% of it behind hog:7: pin it to a CPU of its own (sq_thread_cpu)"
            ]
        );
    }

    #[test]
    fn throttled_thread_is_not_advised_to_be_pinned() {
        let starved = thread("11", &[("starved", 0.8), ("sleeping", 0.0), ("cpu", 1.0)]);
        let part = |by: &str, value| {
            let mut part = thread("11", &[value]);
            part.labels.insert("by".to_owned(), by.to_owned());
            part
        };
        let behind = part("hog:7", ("starved_by", 0.04));
        let throttled = part("cgroup /a/b", ("throttled", 0.76));
        assert_eq!(
            verdicts_of(vec![starved.clone(), behind, throttled]),
            [
                "app:11 waits for CPU 1 80% of the time, 95% of it throttled by cgroup /a/b: raise the quota of that cgroup (cpu.max), or have its threads run less"
            ]
        );
        // A quota that is rarely used up is not the reason.
        let mostly_behind = [part("hog:7", ("starved_by", 0.72)), part("cgroup /a/b", ("throttled", 0.1))];
        let sentences = verdicts_of([vec![starved], mostly_behind.into()].concat());
        assert!(
            sentences.len() == 1
                && sentences[0].ends_with("90% of it behind hog:7: pin it to a CPU of its own (sq_thread_cpu)"),
            "{sentences:?}"
        );
    }

    #[test]
    fn busy_thread_should_share_its_rings() {
        let busy = |rings| thread("11", &[("working", 0.9), ("spinning", 0.1), ("utilisation", 0.9), ("rings", rings)]);
        assert_eq!(
            verdicts_of(vec![busy(3.0)]),
            ["app:11 works 90% of the time: share its 3 rings among several threads"]
        );
        assert_eq!(
            verdicts_of(vec![busy(1.0)]),
            ["app:11 works 90% of the time: spread the load over another ring with its own thread"]
        );
    }

    #[test]
    fn cgroup_throttling_named_when_runqueue_empty() {
        let starved = thread("11", &[("starved", 0.5), ("sleeping", 0.5), ("cpu", 3.0)]);
        let sentences = verdicts_of(vec![starved]);
        assert!(sentences.len() == 1 && sentences[0].contains("cpu.max"), "{sentences:?}");
    }

    #[test]
    fn contradicting_advice_is_dropped() {
        let values = [SPINS.as_slice(), &[("wakeups_per_s", 200.0)]].concat();
        assert_eq!(verdicts_of(vec![thread("11", &values)]).len(), 1);
    }

    #[test]
    fn iopoll_is_no_reason_to_split() {
        let busy = thread("11", &[("working", 0.99), ("spinning", 0.0), ("utilisation", 1.0), ("rings", 1.0)]);
        let mut ring = thread("11", &[("iopoll", 1.0)]);
        ring.labels.insert("ring".to_owned(), "fd 3".to_owned());
        assert_eq!(verdicts_of(vec![busy, ring]), [""; 0]);
    }

    #[test]
    fn insufficient_figures_give_no_advice() {
        // Work is indistinguishable from spinning; or the thread was hardly present, mostly asleep, or neither busy nor
        // idle.
        let short_lived = [SPINS.as_slice(), &[("present", 0.2)]].concat();
        for values in [
            &[("running", 1.0), ("sleeping", 0.0), ("starved", 0.0)][..],
            &short_lived,
            &[("working", 0.001), ("spinning", 0.05), ("utilisation", 0.02), ("sleeping", 0.949), ("starved", 0.0)],
            &[("working", 0.5), ("spinning", 0.5), ("utilisation", 0.5), ("sleeping", 0.0), ("starved", 0.0)],
        ] {
            assert_eq!(verdicts_of(vec![thread("11", values)]), [""; 0], "{values:?}");
        }
        let mut snapshot = Snapshot::new("sqpoll", "bpf", "host", 0);
        snapshot.duration_ns = 100_000_000;
        snapshot.series = vec![thread("11", &SPINS)];
        assert_eq!(verdicts(&snapshot), [""; 0]);
    }
}
