// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a program: a sentence, a table of its states, and what held it up.

mod file;
mod main_cause;
mod priorities;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};

use whylate_model::culprits::Ranking;
use whylate_model::object::UnfinishedWait;
use whylate_model::path::budget::{Budget, EndedBy, ProgramReport, Waits};
use whylate_model::path::command::LongWait;
use whylate_model::units::{format_ns, printable};
use whylate_model::wait::{CallWaits, WaitClass, of_syscall};
use whylate_model::{CauseKind, Histogram};

use self::main_cause::{MainCause, main_cause};
use self::priorities::{with_names_alone, with_priorities};
use super::fit::fitted;
use super::overview::Screen;
use super::table::Table;
use super::{footer, path, reclaim, text_of, why, work};

pub use self::file::{form_of, write_file};

/// States and waits below this share of the program's time are merged.
const SHOWN_PERCENT: f64 = 1.0;
/// Maximum number of states in the sentence, and of rows of states unless all of them are asked for.
const MAX_IN_SENTENCE: usize = 3;
const MAX_STATES: usize = 7;
/// Maximum number of culprits with a line of their own.
const MAX_CULPRITS: usize = 5;
/// Maximum number of objects of waits that are not over, unless everything is asked for.
const MAX_UNFINISHED: usize = 5;
/// Maximum number of lines, unless everything is asked for.
const MAX_LINES: usize = 25;
/// All threads of a program are stuck if it did something else for less than this percentage of their time.
const STUCK_PERCENT: f64 = 1.0;
/// Command that shows what stuck threads wait for, and who holds it.
const NEXT_IF_STUCK: &str = "NEXT\n  whylate offcpu --blocked 1s";
/// A program is idle if it did something else for less than this percentage of the measured time.
const IDLE_PERCENT: f64 = 5.0;

/// A part of the program's time.
struct State<'a> {
    name: String,
    /// Name after "spent its time".
    phrase: String,
    ns: u64,
    waits: Option<&'a Waits>,
    /// Whether the threads only waited for work.
    is_by_design: bool,
}

/// Writes the result, with a ranking of culprits if one is given; `priority` looks up the scheduling priority of a TID.
pub fn write(
    out: &mut dyn Write,
    seen: &ProgramReport,
    ranking: Option<&Ranking>,
    screen: &Screen,
    priority: &mut dyn FnMut(u32) -> Option<String>,
) -> io::Result<()> {
    let columns = screen.columns.unwrap_or(usize::MAX);
    let states = states(&seen.budget);
    let mut lines = fitted(&sentence(seen, &states), columns);
    let work = seen.budget.work.as_ref().and_then(work::sentence);
    lines.extend(work.iter().flat_map(|work| fitted(work, columns)));
    let reclaim = seen.budget.reclaim.iter().filter_map(|sum| reclaim::sentence(sum, seen.budget.total_ns));
    lines.extend(reclaim.flat_map(|reclaim| fitted(&reclaim, columns)));
    for (path, ns) in &seen.throttled {
        let path = printable(path);
        let throttled =
            format!("cgroup {path} was throttled for {} over all CPUs: its CPU quota was used up", format_ns(*ns));
        lines.extend(fitted(&throttled, columns));
    }
    if seen.children > 0 {
        let children = if seen.children == 1 { "child process, which is" } else { "child processes, which are" };
        let left_out = format!("The process has {} {children} not included: see --comm and --cgroup.", seen.children);
        lines.extend(fitted(&left_out, columns));
    }
    if let Some(limitation) = &seen.limitation {
        lines.extend(fitted(limitation, columns));
    }
    if let Some(ranking) = ranking {
        let culprits = text_of(|out| write_culprits(out, ranking, screen.is_verbose));
        lines.extend(culprits.lines().flat_map(|line| fitted(line, columns)));
    }
    lines.push(String::new());
    lines.extend(text_of(|out| table(seen, &states, screen).write(out, screen.columns)).lines().map(str::to_owned));
    let details = text_of(|out| write_details(out, seen, screen, priority));
    let details: Vec<String> = details.lines().flat_map(|line| fitted(line, columns)).collect();
    let more: &[&str] = if screen.is_verbose { &[] } else { &["-v"] };
    let mut last = fitted(&footer::about(&seen.lost, seen.span_ns, screen.is_verbose, more), columns);
    if is_stuck(&seen.budget) {
        last.splice(0..0, NEXT_IF_STUCK.lines().map(str::to_owned));
    }
    // Below the details are their count and an empty line.
    let room = MAX_LINES.saturating_sub(lines.len() + last.len() + 2);
    let shown = if screen.is_verbose || details.len() <= room + 1 { details.len() } else { room };
    let more = details.len() - shown;
    lines.extend(details.into_iter().take(shown));
    if more > 0 {
        lines.push(format!("     ... ({} more with -v)", why::counted(more as u64, "line")));
    }
    lines.push(String::new());
    lines.extend(last);
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))
}

fn percent(ns: u64, budget: &Budget) -> f64 {
    ns as f64 * 100.0 / budget.total_ns.max(1) as f64
}

/// Returns the parts of the program's time, longest first, and waits for work last. They add up to the time.
fn states(budget: &Budget) -> Vec<State<'_>> {
    let plain =
        |name: &str, ns| State { name: name.to_owned(), phrase: name.to_owned(), ns, waits: None, is_by_design: false };
    let reclaim_ns: u64 = budget.reclaim.iter().map(|reclaim| reclaim.on_cpu_ns).sum();
    let mut states = vec![plain("on CPU", budget.on_cpu_ns.saturating_sub(reclaim_ns))];
    states.extend((reclaim_ns > 0).then(|| plain("reclaiming memory on CPU", reclaim_ns)));
    states.extend((budget.own_sleep_ns > 0).then(|| plain("sleeping voluntarily", budget.own_sleep_ns)));
    let ready = || State { waits: Some(&budget.ready), ..plain("waiting for a CPU", budget.ready.ns) };
    states.extend((budget.ready.ns > 0).then(ready));
    states.extend(budget.waits.iter().map(|waits| {
        let name = kind(waits);
        let has_in = of_syscall(&waits.via).is_some() || waits.is_in_no_call();
        let phrase = if has_in { format!("in {name}") } else { name.clone() };
        State { name, phrase, ns: waits.ns, waits: Some(waits), is_by_design: waits.is_by_design() }
    }));
    states.sort_by_key(|state| (state.is_by_design, Reverse(state.ns)));
    states
}

/// Returns whether something is known of the waits beyond what the table of states says.
fn has_known_cause(waits: &Waits) -> bool {
    waits.path.iter().any(|segment| segment.kind != CauseKind::Unknown)
}

/// Returns whether all threads wait for something that did not come, and not by design.
fn is_stuck(budget: &Budget) -> bool {
    let stuck = budget.waits.iter().filter(|waits| waits.ended_by == Some(EndedBy::NotOver) && !waits.is_by_design());
    let stuck_ns: u64 = stuck.map(|waits| waits.ns).sum();
    stuck_ns > 0 && percent(budget.total_ns.saturating_sub(stuck_ns), budget) < STUCK_PERCENT
}

/// Renders the shares of the states, and the main cause of the waits; or that the program is idle.
fn sentence(seen: &ProgramReport, states: &[State<'_>]) -> String {
    let budget = &seen.budget;
    let processes = if seen.processes == 1 { "process" } else { "processes" };
    let of = format!("{} {processes}, {}", seen.processes, why::counted(budget.threads, "thread"));
    let (name, span) = (format!("{} ({of})", printable(&seen.name)), format_ns(seen.span_ns));
    let shares = states.iter().filter(|state| percent(state.ns, budget) >= SHOWN_PERCENT).take(MAX_IN_SENTENCE);
    let shares = shares.enumerate().map(|(number, state)| {
        let of = if number == 0 { " of its time" } else { "" };
        format!("{:.0}%{of} {}", percent(state.ns, budget), state.phrase)
    });
    let shares = shares.collect::<Vec<_>>().join(", ");
    if shares.is_empty() {
        return format!("{name} has no recorded time in {span}.");
    }
    // If the peer is stopped, the program is not idle: it waits in vain.
    let has_stopped_peer = seen.unfinished.iter().any(|wait| wait.object.has_stopped_peer());
    let design_ns: u64 = budget.waits.iter().filter(|waits| waits.is_by_design()).map(|waits| waits.ns).sum();
    let busy_ns = budget.total_ns.saturating_sub(design_ns.saturating_add(budget.own_sleep_ns));
    if !has_stopped_peer && (busy_ns as f64) * 100.0 < IDLE_PERCENT * seen.span_ns as f64 {
        return format!("{name} is idle: it spent {shares}, over {span}.");
    }
    let cause = main_cause(budget).filter(|cause| percent(cause.ns, budget) >= SHOWN_PERCENT);
    let sentence = |cause: MainCause<'_>| format!(" Main cause, {:.0}%: {}.", percent(cause.ns, budget), cause.what);
    let cause = cause.map_or_else(String::new, sentence);
    let stopped = if has_stopped_peer { " A process that it waits for is stopped: see NOT OVER YET." } else { "" };
    format!("{name} spent {shares}, over {span}.{cause}{stopped}")
}

/// Writes the culprits of the program's waits, the longest delay first; only the first ones unless `is_verbose`.
fn write_culprits(out: &mut dyn Write, ranking: &Ranking, is_verbose: bool) -> io::Result<()> {
    let all_ns = ranking.latency_ns;
    if all_ns == 0 {
        return writeln!(out, "\nNo known culprit.");
    }
    writeln!(out, "\nCULPRITS, {} in total", format_ns(all_ns))?;
    let most = if is_verbose { ranking.culprits.len() } else { MAX_CULPRITS };
    why::write_shares(out, &ranking.culprits, all_ns, most, &mut |out, _, row| writeln!(out, "{row}"))
}

/// Returns a row for each state: its time, and the number and distribution of its waits.
fn table(seen: &ProgramReport, states: &[State<'_>], screen: &Screen) -> Table {
    let budget = &seen.budget;
    let mut table = Table::new("<STATE, TIME, SHARE, WAITS, P50, MAX");
    let is_shown = |state: &&State<'_>| percent(state.ns, budget) >= SHOWN_PERCENT;
    let (states, for_work) = states.split_at(states.partition_point(|state| !state.is_by_design));
    let shown = states.iter().take(MAX_STATES).take_while(is_shown).count();
    let shown = if screen.is_verbose || states.len() <= shown + 1 { states.len() } else { shown };
    let share = |ns: u64| format!("{:.1}%", percent(ns, budget));
    let row = |state: &State<'_>| {
        let mut cells = vec![state.name.clone(), format_ns(state.ns), share(state.ns)];
        cells.extend(state.waits.map_or_else(|| ["", "", ""].map(str::to_owned), |waits| figures(&waits.latency)));
        cells
    };
    let sum = |name: String, states: &[State<'_>]| {
        let ns = states.iter().map(|state| state.ns).sum();
        let mut cells = vec![name, format_ns(ns), share(ns)];
        cells.resize(6, String::new());
        cells
    };
    states[..shown].iter().for_each(|state| table.row(row(state)));
    let rest = &states[shown..];
    if !rest.is_empty() {
        table.row(sum(why::counted(rest.len() as u64, "other state"), rest));
    }
    // Threads that only wait for work would fill the table.
    match for_work {
        [] => {}
        [_] => for_work.iter().for_each(|state| table.row(row(state))),
        _ if screen.is_verbose => for_work.iter().for_each(|state| table.row(row(state))),
        _ => table.row(sum("waiting for work".to_owned(), for_work)),
    }
    table
}

/// Writes what held the program up, by state; with -v also its longest waits.
fn write_details(
    out: &mut dyn Write,
    seen: &ProgramReport,
    screen: &Screen,
    priority: &mut dyn FnMut(u32) -> Option<String>,
) -> io::Result<()> {
    let budget = &seen.budget;
    let is_shown = |waits: &Waits| {
        percent(waits.ns, budget) >= SHOWN_PERCENT
            && (screen.is_verbose || !waits.is_by_design() && has_known_cause(waits))
            && !waits.path.is_empty()
    };
    let ready = Some(("waiting for a CPU".to_owned(), &budget.ready)).filter(|_| budget.ready.ns > 0);
    let waits = budget.waits.iter().map(|waits| (kind(waits), waits));
    let mut shown: Vec<(String, &Waits)> =
        ready.into_iter().chain(waits).filter(|(_, waits)| is_shown(waits)).collect();
    // The first lines are those of the cause that the first line of all names.
    let main = main_cause(budget).filter(|cause| percent(cause.ns, budget) >= SHOWN_PERCENT);
    let is_main = |waits: &Waits| main.as_ref().is_some_and(|main| std::ptr::eq(main.waits, waits));
    shown.sort_by_key(|(_, waits)| (!is_main(waits), Reverse(waits.ns)));
    if !shown.is_empty() {
        writeln!(out, "\nWHAT HELD IT UP")?;
    }
    for (name, waits) in shown {
        writeln!(out, "{name}: {}", format_ns(waits.ns))?;
        let path = with_priorities(&waits.path, priority);
        let path = if screen.is_verbose { path } else { with_names_alone(path) };
        path::write_wait(out, &path, 2)?;
    }
    write_unfinished_waits(out, &seen.unfinished, screen.is_verbose)?;
    if !screen.is_verbose || budget.longest.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nLONGEST WAITS")?;
    for wait in &budget.longest {
        let path = with_priorities(&wait.path, priority);
        path::write_long_wait(out, &LongWait { path, ..*wait })?;
    }
    Ok(())
}

/// Writes what threads wait for at the end: first where a process that could end the wait is stopped, and waits by design
/// last.
fn write_unfinished_waits(out: &mut dyn Write, waits: &[UnfinishedWait], is_verbose: bool) -> io::Result<()> {
    let mut by_object: BTreeMap<(bool, bool, String, String), Vec<String>> = BTreeMap::new();
    for wait in waits {
        let is_by_design = of_syscall(&wait.via) == Some(CallWaits::For(WaitClass::Idle));
        let via = printable(&wait.via);
        let key = (!wait.object.has_stopped_peer(), is_by_design, via, wait.object.to_string());
        by_object.entry(key).or_default().push(printable(&wait.waiter));
    }
    if by_object.is_empty() {
        return Ok(());
    }
    let mut sorted: Vec<_> = by_object.into_iter().collect();
    sorted
        .sort_by_key(|((is_running, is_by_design, ..), waiters)| (*is_running, *is_by_design, Reverse(waiters.len())));
    writeln!(out, "\nNOT OVER YET")?;
    let shown = if is_verbose { sorted.len() } else { MAX_UNFINISHED };
    for ((_, _, via, object), waiters) in sorted.iter().take(shown) {
        let who = match &waiters[..] {
            [waiter] => waiter.clone(),
            [first, ..] => format!("{first} and {}", why::counted(waiters.len() as u64 - 1, "other thread")),
            [] => continue,
        };
        let verb = if waiters.len() == 1 { "waits" } else { "wait" };
        writeln!(out, "{who} {verb} in {via} for {object}")?;
    }
    Ok(())
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

/// Returns the cells below WAITS, P50 and MAX.
fn figures(latency: &Histogram) -> [String; 3] {
    match latency.count() {
        0 => ["", "", ""].map(str::to_owned),
        1 => ["1".to_owned(), String::new(), format_ns(latency.max_ns())],
        count => [count.to_string(), format_ns(latency.quantile_ns(0.5)), format_ns(latency.max_ns())],
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::culprits::By;
    use whylate_model::holders::Holder;
    use whylate_model::object::{Object, ObjectKind, Peer};
    use whylate_model::path::PathSegment;
    use whylate_model::{ActorName, Cgroup};

    use super::*;
    use crate::render::text::screens_of;

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

    fn waits(via: &str, ended_by: EndedBy, latencies: &[u64], path: &[PathSegment]) -> Waits {
        Waits {
            via: via.to_owned(),
            ended_by: Some(ended_by),
            ns: latencies.iter().map(|ms| ms * MS).sum::<u64>().max(path.iter().map(|part| part.ns).sum()),
            latency: latencies.iter().map(|ms| ms * MS).collect(),
            path: path.to_vec(),
        }
    }

    fn report(name: &str, budget: Budget) -> ProgramReport {
        let total_ns = budget.total_ns;
        ProgramReport {
            name: name.to_owned(),
            children: 0,
            processes: 1,
            span_ns: total_ns / budget.threads.max(1),
            budget,
            unfinished: Vec::new(),
            throttled: BTreeMap::new(),
            limitation: None,
            lost: BTreeMap::new(),
        }
    }

    /// A service that waits for an encoder, which waits for a CPU, and for a disk.
    fn service() -> ProgramReport {
        use CauseKind::{Disk, Running, Thread, Timer};
        let service = ["service:100", "read"];
        let pipe = [
            part(180, Running, "encoder:26535", 1, service),
            part(1_620, Thread, "cron-job:26536", 1, service),
            part(200, Timer, "timer", 2, ["encoder:26535", "clock_nanosleep"]),
        ];
        let disk = [part(400, Disk, "vda (write by service:100)", 1, ["service:100", "fdatasync"])];
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
            work: None,
            reclaim: Vec::new(),
        };
        ProgramReport {
            throttled: BTreeMap::from([("/a/b".to_owned(), 300 * MS)]),
            lost: BTreeMap::from([("unseen_switches".to_owned(), 3)]),
            ..report("service\x1b[2J", budget)
        }
    }

    #[test]
    fn main_cause_leads_with_one_row_per_name() {
        use CauseKind::{Thread, Timer};
        let behind = |ms, who: &str| {
            let segment = part(ms, Thread, who, 0, ["", ""]);
            PathSegment { ready: Some("postgres".into()), waiter: None, via: None, ..segment }
        };
        let idle = part(900, Timer, "timer", 2, ["client:7", "pselect6"]);
        let of_client = part(1, CauseKind::Running, "client:7", 1, ["postgres:8", "epoll_wait"]);
        let path = vec![behind(60, "log-packer:4"), behind(50, "log-packer:2"), behind(70, "cc:26535")];
        let ready = Waits { ns: 180 * MS, path, ..Waits::default() };
        let waits = vec![waits("epoll_wait", EndedBy::Others, &[], &[of_client, idle])];
        let seen = report("postgres", Budget { threads: 2, total_ns: 2_000 * MS, ready, waits, ..Budget::default() });
        insta::assert_snapshot!(written(&seen, None, false));
        insta::assert_snapshot!("v_shows_each_thread", written(&seen, None, true));
    }

    fn written(seen: &ProgramReport, columns: Option<usize>, is_verbose: bool) -> String {
        let screen = Screen { columns, is_verbose, zone: jiff::tz::TimeZone::UTC, replay: None };
        let mut priority = |tid| Some(if tid == 26535 { "nice 19" } else { "nice 0" }.to_owned());
        text_of(|out| write(out, seen, None, &screen, &mut priority))
    }

    #[test]
    fn begins_with_a_sentence_and_a_table() {
        let written = |out: &mut dyn Write, columns| write!(out, "{}", written(&service(), columns, false));
        insta::assert_snapshot!(screens_of(written));
    }

    #[test]
    fn culprits_are_ranked_on_request() {
        let seen = service();
        let mut cgroup_of = |tid| Some(Cgroup::new(if tid == 26536 { "/jobs" } else { "/service" }));
        let ranked = |by, cgroup_of: &mut dyn FnMut(u32) -> Option<Cgroup>| {
            let screen = Screen { columns: Some(80), is_verbose: false, zone: jiff::tz::TimeZone::UTC, replay: None };
            let ranking = seen.budget.culprits(by, cgroup_of);
            let text = text_of(|out| write(out, &seen, Some(&ranking), &screen, &mut |_| None));
            assert!(text.lines().count() <= MAX_LINES, "{text}");
            text.split("\n\n").nth(1).unwrap_or_default().to_owned()
        };
        insta::assert_snapshot!("culprits_by_cgroup", ranked(By::Cgroup, &mut cgroup_of));
        insta::assert_snapshot!("culprits_by_name", ranked(By::Name, &mut cgroup_of));
    }

    #[test]
    fn threads_of_one_name_are_the_main_cause_rather_than_a_timer() {
        use CauseKind::{Thread, Timer};
        let of = ["encoder:26535", "futex"];
        let path =
            [part(100, Timer, "timer", 1, of), part(30, Thread, "hog:1", 1, of), part(20, Thread, "hog:2", 1, of)];
        let of_path = |path: &[PathSegment]| {
            let waits = vec![waits("futex", EndedBy::Others, &[], path)];
            let budget = Budget { total_ns: 1_000 * MS, waits, ..Budget::default() };
            main_cause(&budget).map(|cause| (cause.ns, cause.what))
        };
        assert_eq!(of_path(&path), Some((50 * MS, "encoder waited for a CPU behind hog".to_owned())));
        assert_eq!(of_path(&path[..2]), Some((30 * MS, "encoder:26535 waited for a CPU behind hog:1".to_owned())));
        assert_eq!(of_path(&path[..1]), Some((100 * MS, "until a timer expired".to_owned())));
    }

    #[test]
    fn left_out_children_are_counted() {
        let text = |children| written(&ProgramReport { children, ..service() }, None, false);
        assert!(
            text(1).contains("\nThe process has 1 child process, which is not included: see --comm and --cgroup.\n")
        );
        assert!(text(9).contains("\nThe process has 9 child processes, which are not included: see --comm and"));
        assert!(!text(0).contains("child"));
    }

    #[test]
    fn v_shows_everything() {
        insta::assert_snapshot!(written(&service(), None, true));
    }

    #[test]
    fn idle_program_is_called_idle() {
        let unknown = [part(2_000, CauseKind::Unknown, "not over yet", 1, ["bash:7937", "pselect6"])];
        let mut budget = Budget {
            threads: 1,
            total_ns: 2_000 * MS,
            waits: vec![waits("pselect6", EndedBy::NotOver, &[2_000], &unknown)],
            ..Budget::default()
        };
        let first = |budget: &Budget| {
            let text = written(&report("bash:7937", budget.clone()), None, false);
            text.lines().next().unwrap_or_default().to_owned()
        };
        assert_eq!(
            first(&budget),
            "bash:7937 (1 process, 1 thread) is idle: it spent 100% of its time in pselect6 (not over yet), over 2.00s."
        );
        // Of a thousand threads, one is busy.
        (budget.threads, budget.total_ns, budget.on_cpu_ns) = (1000, 2_000_000 * MS, 2_000 * MS);
        budget.waits[0].ns = 1_998_000 * MS;
        assert!(first(&budget).contains(") spent 100% of its time in pselect6"), "{}", first(&budget));
        // A thread that waits for a lock is not idle, even if nothing happens.
        budget = Budget { threads: 1, total_ns: 2_000 * MS, on_cpu_ns: 0, ..budget };
        budget.waits = vec![waits("futex", EndedBy::NotOver, &[2_000], &[])];
        assert_eq!(
            first(&budget),
            "bash:7937 (1 process, 1 thread) spent 100% of its time in futex (not over yet), over 2.00s."
        );
    }

    #[test]
    fn waits_for_work_are_the_last_row() {
        let idle = |via: &str, ended_by, ms| waits(via, ended_by, &[ms], &[]);
        let waits = vec![
            idle("epoll_wait", EndedBy::NotOver, 5_000),
            idle("poll", EndedBy::Timer, 3_000),
            idle("flock", EndedBy::Others, 1_000),
        ];
        let budget = Budget { threads: 5, total_ns: 10_000 * MS, on_cpu_ns: 1_000 * MS, waits, ..Budget::default() };
        let text = written(&report("server", budget), None, false);
        let sentence = "spent 10% of its time on CPU, 10% in flock for others, 50% in epoll_wait (not over yet), over";
        assert!(text.contains(sentence), "{text}");
        let rows: Vec<&str> = text.lines().filter(|line| line.contains("0% ") || line.ends_with('%')).skip(1).collect();
        let last = rows.last().copied().unwrap_or_default();
        assert!(last.starts_with("waiting for work") && last.contains("80.0%"), "{text}");
    }

    #[test]
    fn unfinished_waits_name_objects_and_stopped_peers_first() {
        let wait = |waiter: &str, via: &str, kind, state: Option<&str>| {
            let peer = |state: &str| Peer {
                process: Holder { who: "db:9".to_owned(), state: state.to_owned(), ..Holder::default() },
                others: 0,
            };
            let object = Object { peers: state.map(peer).into_iter().collect(), ..Object::new(kind) };
            UnfinishedWait { waiter: waiter.parse().expect("any text"), via: via.to_owned(), object }
        };
        let unfinished = vec![
            wait("web:1", "epoll_wait", ObjectKind::Epoll, None),
            wait("web:2", "futex", ObjectKind::Futex, None),
            wait("web:3", "futex", ObjectKind::Futex, None),
            wait("web:4\x1b", "recvfrom", ObjectKind::UnixSocket, Some("T")),
        ];
        let idle = |unfinished| {
            let waits = vec![waits("poll", EndedBy::NotOver, &[2_000], &[])];
            let budget = Budget { threads: 1, total_ns: 2_000 * MS, waits, ..Budget::default() };
            written(&ProgramReport { unfinished, ..report("web:4", budget) }, None, false)
        };
        assert!(idle(Vec::new()).contains(" is idle: "));
        let stopped = idle(vec![wait("web:4", "poll", ObjectKind::UnixSocket, Some("T"))]);
        assert!(!stopped.contains(" is idle: ") && stopped.contains("it waits for is stopped: see NOT OVER YET."));
        let text = written(&ProgramReport { unfinished, ..service() }, None, true);
        let (_, waits) = text.split_once("NOT OVER YET\n").expect("waits that are not over");
        let expected = "web:4? waits in recvfrom for a Unix socket, peer db:9 (stopped by a signal)
web:2 and 1 other thread wait in futex for a futex
web:1 waits in epoll_wait for an epoll instance
";
        assert!(waits.starts_with(expected), "{waits}");
    }

    #[test]
    fn stuck_program_has_a_next_command() {
        let next = |via: &str, ended_by, on_cpu_ns| {
            let waits = vec![waits(via, ended_by, &[2_000], &[])];
            let budget = Budget { threads: 1, total_ns: 2_000 * MS + on_cpu_ns, on_cpu_ns, waits, ..Budget::default() };
            written(&report("server:1", budget), None, false).contains("\nNEXT\n  whylate offcpu --blocked 1s\n")
        };
        assert!(next("futex", EndedBy::NotOver, 0) && next("flock", EndedBy::NotOver, MS));
        assert!(!next("futex", EndedBy::Others, 0), "it goes on");
        assert!(!next("futex", EndedBy::NotOver, 1_000 * MS), "another thread works");
        assert!(!next("pselect6", EndedBy::NotOver, 0), "it waits by design");
    }

    #[test]
    fn fits_a_screen_unless_everything_is_asked_for() {
        let calls =
            ["read", "write", "futex", "fsync", "recvfrom", "sendto", "openat", "close", "ioctl", "io_uring_enter"];
        let deep = |via: &str| -> Vec<PathSegment> {
            let each = (0..12).map(|n| part(20, CauseKind::Running, &format!("helper-{n}:{n}"), 1, ["server:1", via]));
            each.collect()
        };
        let waits = calls.map(|via| waits(via, EndedBy::Others, &[100, 140], &deep(via)));
        let budget = Budget { threads: 1, total_ns: 2_400 * MS, waits: waits.to_vec(), ..Budget::default() };
        let server = report("server", budget);
        let text = written(&server, Some(80), false);
        assert!(text.lines().count() <= MAX_LINES && text.contains(" lines more with -v)"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let all = written(&server, Some(80), true);
        assert!(calls.iter().all(|call| all.contains(&format!("{call} for others: 240ms"))), "{all}");
    }
}
