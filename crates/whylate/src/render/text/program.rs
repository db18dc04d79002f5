// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the time budget of a program, and its waits.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;
use whylate_model::path::PathSegment;
use whylate_model::path::budget::{Budget, EndedBy, Waits};
use whylate_model::units::{format_ns, printable};
use whylate_model::{ActorName, CauseKind, Histogram};

use super::path;

/// Waits below this share of the program's time are merged.
const SHOWN_PERCENT: f64 = 1.0;
/// Maximum number of longest waits that are shown.
const MAX_LONGEST: usize = 3;

/// Result of measuring one program.
#[derive(Debug, Serialize)]
pub struct ProgramReport {
    /// Name of the program.
    pub name: String,
    /// Number of the program's processes.
    pub processes: u64,
    /// Measured time, in nanoseconds.
    pub span_ns: u64,
    /// Time budget of the program's threads.
    #[serde(flatten)]
    pub budget: Budget,
    /// Throttled time of the program's cgroups and their ancestors (CPU quota), over all CPUs, in nanoseconds.
    pub throttled: BTreeMap<String, u64>,
    /// Lost events, by reason.
    pub lost: BTreeMap<String, u64>,
}

/// Writes the result; `priority` looks up the scheduling priority of a TID.
pub fn write(
    out: &mut dyn Write,
    seen: &ProgramReport,
    priority: &mut dyn FnMut(u32) -> Option<String>,
) -> io::Result<()> {
    let budget = &seen.budget;
    let percent = |ns: u64| ns as f64 * 100.0 / budget.total_ns.max(1) as f64;
    let mut shares = vec![format!("on CPU {:.1}%", percent(budget.on_cpu_ns))];
    if budget.own_sleep_ns > 0 {
        shares.push(format!("sleeping voluntarily {:.1}%", percent(budget.own_sleep_ns)));
    }
    if budget.ready.ns > 0 {
        shares.push(format!("waiting for a CPU {:.1}%", percent(budget.ready.ns)));
    }
    let is_shown = |waits: &&Waits| percent(waits.ns) >= SHOWN_PERCENT;
    let shown: Vec<&Waits> = budget.waits.iter().filter(is_shown).collect();
    shares.extend(shown.iter().map(|waits| format!("{} {:.1}%", kind(waits), percent(waits.ns))));
    let other_ns: u64 = budget.waits.iter().filter(|waits| !is_shown(waits)).map(|waits| waits.ns).sum();
    if other_ns > 0 {
        shares.push(format!("other waits {:.1}%", percent(other_ns)));
    }
    let plural = |count: u64, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    writeln!(
        out,
        "{} ({}, {}), {}: {}",
        printable(&seen.name),
        plural(seen.processes, "process", "processes"),
        plural(budget.threads, "thread", "threads"),
        format_ns(seen.span_ns),
        shares.join(", ")
    )?;
    for (path, ns) in &seen.throttled {
        let ns = format_ns(*ns);
        writeln!(
            out,
            "  cgroup {} was throttled for {ns}, over all CPUs: it had used up its CPU quota",
            printable(path)
        )?;
    }
    if percent(budget.ready.ns) >= SHOWN_PERCENT {
        write_kind(out, "waiting for a CPU", &budget.ready, priority)?;
    }
    for waits in shown {
        write_kind(out, &kind(waits), waits, priority)?;
    }
    if !budget.longest.is_empty() {
        writeln!(out, "The longest waits:")?;
    }
    for wait in budget.longest.iter().take(MAX_LONGEST) {
        let first = wait.path.iter().find(|segment| segment.depth == 1);
        let waiter = first.unwrap_or(&PathSegment::default()).waiter_name();
        let (via, stop) = first.map_or((None, None), |segment| (segment.via.as_deref(), segment.stop));
        let (after, waiter, long) = (format_ns(wait.after_ns), printable(&waiter), format_ns(wait.ns));
        match (stop, via) {
            (Some(stop), _) => writeln!(out, "  after {after}: {waiter} was {} for {long}", stop.words())?,
            (None, Some(via)) => writeln!(out, "  after {after}: {waiter} waited {long} in {}", printable(via))?,
            (None, None) => writeln!(out, "  after {after}: {waiter} waited {long}")?,
        }
        path::write_wait(out, &with_priorities(&wait.path, priority), 4)?;
    }
    if !seen.lost.is_empty() {
        let lost: Vec<String> =
            seen.lost.iter().map(|(reason, count)| format!("{count} {}", reason.replace('_', " "))).collect();
        writeln!(out, "lost: {} (see whylate help lost)", lost.join(", "))?;
    }
    Ok(())
}

fn write_kind(
    out: &mut dyn Write,
    name: &str,
    waits: &Waits,
    priority: &mut dyn FnMut(u32) -> Option<String>,
) -> io::Result<()> {
    writeln!(out, "  {name}: {}{}", format_ns(waits.ns), figures(&waits.latency))?;
    path::write_wait(out, &with_priorities(&waits.path, priority), 4)
}

/// Renders the system call of a group of waits, and the event that ended them. The system call alone is not enough: a
/// server waits for clients and for its own threads in the same one.
fn kind(waits: &Waits) -> String {
    let ended_by = match waits.ended_by {
        None => "",
        Some(EndedBy::Own) => " for its own threads",
        Some(EndedBy::Others) => " for others",
        Some(EndedBy::Disk) => " for a disk",
        Some(EndedBy::Timer) => " for a timer",
        Some(EndedBy::Network) => " for a packet",
        Some(EndedBy::Interrupt) => " for an interrupt",
        Some(EndedBy::NotOver) => " (not over yet)",
        Some(EndedBy::Unseen) => " (its end was not seen)",
    };
    format!("{}{ended_by}", printable(&waits.via))
}

fn figures(latency: &Histogram) -> String {
    let (count, max) = (latency.count(), format_ns(latency.max_ns()));
    match count {
        0 => String::new(),
        1 => ", 1 wait".to_owned(),
        _ => format!(", {count} waits, p50 {}, max {max}", format_ns(latency.quantile_ns(0.5))),
    }
}

/// Adds the priorities of the waiting thread and of the running one to run-queue waits, if they differ.
fn with_priorities(path: &[PathSegment], priority: &mut dyn FnMut(u32) -> Option<String>) -> Vec<PathSegment> {
    let mut known: BTreeMap<u32, Option<String>> = BTreeMap::new();
    let mut of = |thread: &ActorName| {
        let tid = thread.tid()?;
        known.entry(tid).or_insert_with(|| priority(tid)).clone()
    };
    let mut segments = path.to_vec();
    for segment in segments.iter_mut().filter(|segment| segment.kind == CauseKind::Thread) {
        let Some(ready) = &segment.ready else { continue };
        let (of_ready, of_who) = (of(ready), of(&segment.who));
        if let (Some(of_ready), Some(of_who)) = (of_ready, of_who)
            && of_ready != of_who
        {
            let priorities = format!(" ({of_who}; {}: {of_ready})", ready.comm().unwrap_or_default());
            segment.who = segment.who.clone().within("", &priorities);
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use whylate_model::path::command::LongWait;

    const MS: u64 = 1_000_000;

    fn part(ms: u64, kind: CauseKind, who: &str, depth: u32, [waiter, via]: [&str; 2]) -> PathSegment {
        PathSegment {
            ns: ms * MS,
            kind,
            who: who.parse().expect("any text"),
            ready: (kind == CauseKind::Thread).then(|| ActorName::thread("encoder", 26535)),
            waiter: Some(waiter.parse().expect("any text")),
            via: Some(via.to_owned()),
            depth,
            ..PathSegment::default()
        }
    }

    #[test]
    fn renders_budget_and_waits() {
        use CauseKind::{Disk, Running, Thread, Timer};
        let service = ["service:100", "read"];
        let pipe = vec![
            part(180, Running, "encoder:26535", 1, service),
            part(1_620, Thread, "cron-job:26536", 1, service),
            part(200, Timer, "timer", 2, ["encoder:26535", "clock_nanosleep"]),
        ];
        let disk = vec![part(400, Disk, "vda (write by service:100)", 1, ["service:100", "fdatasync"])];
        let waits = |via: &str, ended_by, latencies: &[u64], path: &[PathSegment]| Waits {
            via: via.to_owned(),
            ended_by: Some(ended_by),
            ns: path.iter().map(|part| part.ns).sum(),
            latency: latencies.iter().map(|ms| ms * MS).collect(),
            path: path.to_vec(),
        };
        let budget = Budget {
            threads: 1,
            total_ns: 4_000 * MS,
            on_cpu_ns: 480 * MS,
            own_sleep_ns: 1_110 * MS,
            ready: Waits { ns: 10 * MS, latency: [MS; 10].into_iter().collect(), ..Waits::default() },
            waits: vec![
                waits("read", EndedBy::Others, &[40, 45, 90], &pipe),
                waits("fdatasync", EndedBy::Disk, &[400], &disk),
            ],
            not_followed: 0,
            longest: vec![LongWait {
                after_ns: 1_500 * MS,
                ns: 90 * MS,
                path: vec![
                    part(9, Running, "encoder:26535", 1, service),
                    part(81, Thread, "cron-job:26536", 1, service),
                ],
            }],
        };
        let seen = ProgramReport {
            name: "service\x1b[2J".to_owned(),
            processes: 1,
            span_ns: 4_000 * MS,
            budget,
            throttled: BTreeMap::from([("/a/b".to_owned(), 300 * MS)]),
            lost: BTreeMap::from([("unseen_switches".to_owned(), 3)]),
        };
        let mut out = Vec::new();
        let mut priority = |tid| Some(if tid == 26535 { "nice 19" } else { "nice 0" }.to_owned());
        write(&mut out, &seen, &mut priority).expect("a vector takes everything");
        insta::assert_snapshot!(String::from_utf8(out).expect("text"));
    }
}
