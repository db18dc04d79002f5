// SPDX-License-Identifier: MIT OR Apache-2.0
//! What to change, where the figures of a span carry it.

use super::is_part_of;
use super::is_thread;
use crate::snapshot::{Series, Snapshot};

/// Shorter spans show moments, not habits.
const SHORTEST_NS: u64 = 500_000_000;
/// A thread that was there for less of the span is not judged.
const PRESENT: f64 = 0.9;
/// Below this share of its time on a CPU, polling costs more than it does...
const IDLE_UTILISATION: f64 = 0.2;
/// ... if it has this much of a CPU for nothing.
const MUCH_SPINNING: f64 = 0.5;
/// Each of these wake-ups is a system call and a context switch: so many a second are what SQPOLL is there to save.
const MANY_WAKEUPS_PER_S: f64 = 100.0;
/// Spinning on through longer sleeps costs more than waking up.
const SHORT_SLEEP_S: f64 = 0.01;
/// Of its time, waiting for a CPU.
const MUCH_STARVED: f64 = 0.05;
/// Of the time, working: more rings' work would have to wait for itself.
const BUSY: f64 = 0.8;

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Advice, a sentence each, with the figures it follows from. None where the figures do not carry any.
pub fn verdicts(snapshot: &Snapshot) -> Vec<String> {
    if snapshot.duration_ns < SHORTEST_NS {
        return Vec::new();
    }
    let threads = || snapshot.series.iter().filter(|series| is_thread(series) && is_present(series));
    let mut verdicts: Vec<String> = threads().flat_map(|series| of_thread(series, snapshot)).collect();
    verdicts.extend(of_processes(threads()));
    verdicts
}

fn is_present(series: &Series) -> bool {
    series.values.get("present").is_none_or(|&share| share >= PRESENT)
}

fn of_thread(series: &Series, snapshot: &Snapshot) -> Vec<String> {
    let value = |name: &str| series.values.get(name).copied();
    let name = |label: &str| series.labels.get(label).map_or("?", String::as_str);
    let who = format!("{}:{}", name("process"), name("tid"));
    let has_ring =
        |kind: &str| snapshot.series.iter().any(|part| is_part_of(part, series) && part.values.get(kind) == Some(&1.0));
    // The kernel's own count leaves completions out, and counts each look at a network device.
    let is_whole = snapshot.backend != "fdinfo";
    let mut is_to_sleep_sooner = false;
    let now = value("idle_ms").map_or_else(String::new, |ms| format!(" (now {ms:.0} ms)"));
    let mut told = Vec::new();
    if let (Some(utilisation), Some(spinning)) = (value("utilisation"), value("spinning"))
        && utilisation < IDLE_UTILISATION
        && spinning > MUCH_SPINNING
        && is_whole
        // What it does for the network is no request.
        && !has_ring("napi")
    {
        is_to_sleep_sooner = true;
        told.push(format!(
            "{who} spins {} of the time and works {:.1} %: shorten sq_thread_idle{now}, or do without SQPOLL",
            percent(spinning),
            value("working").unwrap_or(0.0) * 100.0
        ));
    }
    if let (Some(wakeups), Some(sleeping)) = (value("wakeups_per_s"), value("sleeping"))
        && wakeups >= MANY_WAKEUPS_PER_S
        && sleeping / wakeups <= SHORT_SLEEP_S
        && !is_to_sleep_sooner
    {
        let mean_ms = sleeping / wakeups * 1e3;
        told.push(format!(
            "{who} is woken {wakeups:.0} times a second, after {mean_ms:.2} ms of sleep: lengthen sq_thread_idle{now}"
        ));
    }
    if let Some(starved) = value("starved").filter(|&starved| starved >= MUCH_STARVED) {
        let cpu = value("cpu").map_or_else(String::new, |cpu| format!(" CPU {cpu:.0}"));
        let parts = |value: &'static str| {
            let parts = snapshot.series.iter().filter(|part| is_part_of(part, series));
            parts.filter_map(move |part| Some((part.labels.get("by")?, part.values.get(value).copied()?)))
        };
        let sum = |value| parts(value).map(|(_, share)| share).sum::<f64>();
        let most = |value, how: &str| {
            let most = parts(value).max_by(|(_, a), (_, b)| a.total_cmp(b));
            most.map_or_else(String::new, |(by, share)| {
                format!(", {} of it {how} {by}", percent((share / starved).min(1.0)))
            })
        };
        let (by, advice) = if sum("throttled") >= starved / 2.0 {
            // With a CPU of its own it would be throttled all the same.
            (
                most("throttled", "throttled by"),
                "raise the quota of that cgroup (cpu.max), or have its threads run less",
            )
        } else if sum("starved_by") >= starved / 2.0 {
            (most("starved_by", "behind"), "pin it to a CPU of its own (sq_thread_cpu)")
        } else {
            let advice = "see who else runs there, and whether its cgroup has used up its share (cpu.max)";
            (most("starved_by", "behind"), advice)
        };
        told.push(format!("{who} waits for{cpu} {} of the time{by}: {advice}", percent(starved)));
    }
    // With IOPOLL a request that is outstanding is work.
    let may_split = is_whole && !has_ring("iopoll");
    if let Some(working) = value("working").filter(|&working| working > BUSY && may_split) {
        let what = match value("rings") {
            Some(rings) if rings > 1.0 => format!("share its {rings:.0} rings among several threads"),
            _ => "spread the load over another ring with its own thread".to_owned(),
        };
        told.push(format!("{who} works {} of the time: {what}", percent(working)));
    }
    told
}

/// Threads of one process that could be one.
fn of_processes<'a>(threads: impl Iterator<Item = &'a Series>) -> Vec<String> {
    let mut idle: Vec<(&str, &str, f64, usize)> = Vec::new();
    for series in threads {
        let label = |name: &str| series.labels.get(name).map_or("?", String::as_str);
        let value = |name: &str| series.values.get(name).copied();
        let (Some(working), Some(spinning)) = (value("working"), value("spinning")) else { continue };
        // One that sleeps costs nothing.
        if working >= IDLE_UTILISATION || working + spinning < MUCH_SPINNING {
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
        .filter(|&(_, _, sum, count)| count > 1 && sum < MUCH_SPINNING)
        .map(|(process, pid, sum, count)| {
            format!(
                "{process}:{pid} has {count} submission threads that together work {:.1} % of one CPU: let its rings share one (IORING_SETUP_ATTACH_WQ)",
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

    fn told(series: Vec<Series>) -> Vec<String> {
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
    fn one_that_spins_for_nothing_is_told_with_its_figures() {
        let expected =
            "app:11 spins 97 % of the time and works 1.0 %: shorten sq_thread_idle (now 2000 ms), or do without SQPOLL";
        assert_eq!(told(vec![thread("11", &SPINS)]), [expected]);
    }

    #[test]
    fn several_of_one_process_that_spin_could_be_one() {
        let verdicts = told(vec![thread("11", &SPINS), thread("12", &SPINS)]);
        assert_eq!(verdicts.len(), 3, "{verdicts:?}");
        assert!(
            verdicts[2].starts_with("app:10 has 2 submission threads that together work 2.0 % of one CPU"),
            "{verdicts:?}"
        );
    }

    #[test]
    fn one_that_is_woken_all_the_time_should_stay_awake() {
        let woken = |wakeups: f64| thread("11", &[("sleeping", 0.5), ("starved", 0.0), ("wakeups_per_s", wakeups)]);
        assert_eq!(
            told(vec![woken(1000.0)]),
            ["app:11 is woken 1000 times a second, after 0.50 ms of sleep: lengthen sq_thread_idle"]
        );
        assert_eq!(told(vec![woken(40.0)]), [""; 0]);
    }

    #[test]
    fn one_that_waits_for_a_cpu_is_told_behind_whom() {
        let starved = thread("11", &[("starved", 0.5), ("sleeping", 0.5), ("cpu", 3.0)]);
        let mut by = thread("11", &[("starved_by", 0.4)]);
        by.labels.insert("by".to_owned(), "hog:7".to_owned());
        assert_eq!(
            told(vec![starved, by]),
            [
                "app:11 waits for CPU 3 50 % of the time, 80 % of it behind hog:7: pin it to a CPU of its own (sq_thread_cpu)"
            ]
        );
    }

    #[test]
    fn one_that_is_throttled_is_not_told_to_be_pinned() {
        let starved = thread("11", &[("starved", 0.8), ("sleeping", 0.0), ("cpu", 1.0)]);
        let part = |by: &str, value| {
            let mut part = thread("11", &[value]);
            part.labels.insert("by".to_owned(), by.to_owned());
            part
        };
        let behind = part("hog:7", ("starved_by", 0.04));
        let throttled = part("cgroup /a/b", ("throttled", 0.76));
        assert_eq!(
            told(vec![starved.clone(), behind, throttled]),
            [
                "app:11 waits for CPU 1 80 % of the time, 95 % of it throttled by cgroup /a/b: raise the quota of that cgroup (cpu.max), or have its threads run less"
            ]
        );
        // A quota that is seldom used up is not the reason.
        let mostly_behind = [part("hog:7", ("starved_by", 0.72)), part("cgroup /a/b", ("throttled", 0.1))];
        let told = told([vec![starved], mostly_behind.into()].concat());
        assert!(
            told.len() == 1 && told[0].ends_with("90 % of it behind hog:7: pin it to a CPU of its own (sq_thread_cpu)"),
            "{told:?}"
        );
    }

    #[test]
    fn a_busy_one_has_too_many_rings_or_too_few_threads() {
        let busy = |rings| thread("11", &[("working", 0.9), ("spinning", 0.1), ("utilisation", 0.9), ("rings", rings)]);
        assert_eq!(told(vec![busy(3.0)]), ["app:11 works 90 % of the time: share its 3 rings among several threads"]);
        assert_eq!(
            told(vec![busy(1.0)]),
            ["app:11 works 90 % of the time: spread the load over another ring with its own thread"]
        );
    }

    #[test]
    fn one_that_waits_behind_nobody_may_be_held_by_its_cgroup() {
        let starved = thread("11", &[("starved", 0.5), ("sleeping", 0.5), ("cpu", 3.0)]);
        let told = told(vec![starved]);
        assert!(told.len() == 1 && told[0].contains("cpu.max"), "{told:?}");
    }

    #[test]
    fn advice_does_not_contradict_itself() {
        let values = [SPINS.as_slice(), &[("wakeups_per_s", 200.0)]].concat();
        assert_eq!(told(vec![thread("11", &values)]).len(), 1);
    }

    #[test]
    fn polling_devices_is_no_reason_to_split() {
        let busy = thread("11", &[("working", 0.99), ("spinning", 0.0), ("utilisation", 1.0), ("rings", 1.0)]);
        let mut ring = thread("11", &[("iopoll", 1.0)]);
        ring.labels.insert("ring".to_owned(), "fd 3".to_owned());
        assert_eq!(told(vec![busy, ring]), [""; 0]);
    }

    #[test]
    fn nothing_is_told_that_the_figures_do_not_carry() {
        // Work cannot be told from spinning; or the thread was hardly there, mostly asleep, or neither busy nor idle.
        let moment = [SPINS.as_slice(), &[("present", 0.2)]].concat();
        for values in [
            &[("running", 1.0), ("sleeping", 0.0), ("starved", 0.0)][..],
            &moment,
            &[("working", 0.001), ("spinning", 0.05), ("utilisation", 0.02), ("sleeping", 0.949), ("starved", 0.0)],
            &[("working", 0.5), ("spinning", 0.5), ("utilisation", 0.5), ("sleeping", 0.0), ("starved", 0.0)],
        ] {
            assert_eq!(told(vec![thread("11", values)]), [""; 0], "{values:?}");
        }
        let mut snapshot = Snapshot::new("sqpoll", "bpf", "host", 0);
        snapshot.duration_ns = 100_000_000;
        snapshot.series = vec![thread("11", &SPINS)];
        assert_eq!(verdicts(&snapshot), [""; 0]);
    }
}
