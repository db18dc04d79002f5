// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the path of a command: how its elapsed time was spent.

mod file;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use signal_hook::low_level::signal_name;
use whylate_model::object::Object;
use whylate_model::path::command::{Explained, LongWait};
use whylate_model::path::members::Members;
use whylate_model::path::{OTHERS, PathSegment};
use whylate_model::units::{counted, format_ns, printable};
use whylate_model::{ActorName, CauseKind};

use super::path::{self, object_instead, of_name, segments_of_waits, what};
use super::{footer, processes, reclaim, text_of, why, work};

pub use file::{Form, form_of, write_file};
pub(super) use file::{add_path, functions, write_stacks};

/// Outside culprits below this share of the elapsed time are merged into one line.
const SMALL_PERCENT: f64 = 0.5;
/// Maximum number of outside culprits, and of lines of the path, unless all of them are asked for.
const MAX_OUTSIDERS: usize = 4;
const MAX_ROWS: usize = 8;
// How an outside culprit delayed the command.
const OCCUPIED_CPU: &str = "occupied its CPU";
const IRQS_OFF: &str = "had interrupts off on its CPU";
const THROTTLED: &str = "throttled it";
const WAITED_FOR: &str = "worked while the command waited for it";
// How the peer of an object delayed the command while nothing worked.
const HELD: &str = "held";
const OWED: &str = "did not answer on";
/// Waits below this share of the elapsed time are not listed one by one, and smaller shares are not in the verdict.
const LONG_PERCENT: f64 = 1.0;

/// What is written of a command, beside its path.
#[derive(Debug)]
pub struct RunScreen<'a> {
    /// How the command ended; `None` if this is not known.
    pub status: Option<ExitStatus>,
    /// Lost events, by reason.
    pub lost: &'a BTreeMap<String, u64>,
    /// The command's threads, if they are known.
    pub members: Option<&'a Members>,
    /// Whether the processes are shown as a tree.
    pub has_tree: bool,
    /// Whether all long waits are written, and lost events by reason.
    pub is_verbose: bool,
    /// Options that show more.
    pub more: Vec<&'static str>,
}

/// Writes the text report of a command.
pub fn write(out: &mut dyn Write, command: &str, explained: &Explained, shown: &RunScreen<'_>) -> io::Result<()> {
    let outsiders = outsiders(explained, shown.members);
    writeln!(out, "{}", verdict(command, explained, shown, &outsiders))?;
    if let Some(work) = explained.work.as_ref().and_then(work::sentence) {
        writeln!(out, "{work}")?;
    }
    for reclaim in explained.reclaim.iter().filter_map(|sum| reclaim::sentence(sum, explained.elapsed_ns)) {
        writeln!(out, "{reclaim}")?;
    }
    write_outsiders(out, explained, &outsiders, shown.is_verbose)?;
    write_path(out, explained, shown.is_verbose)?;
    write_longest(out, explained, shown.is_verbose)?;
    if let Some(members) = shown.members.filter(|_| shown.has_tree) {
        writeln!(out)?;
        processes::write(out, explained, members)?;
    }
    // The losses of a trace are not those of the command's time.
    let lost_during_ns = shown.status.map_or(0, |_| explained.elapsed_ns);
    let about = footer::about(shown.lost, lost_during_ns, shown.is_verbose, &shown.more);
    if about.is_empty() { Ok(()) } else { writeln!(out, "\n{about}") }
}

fn percent(ns: u64, explained: &Explained) -> f64 {
    ns as f64 * 100.0 / explained.elapsed_ns.max(1) as f64
}

/// Renders how long the command took and how it ended, and whose the time was: the longest share first.
fn verdict(command: &str, explained: &Explained, shown: &RunScreen<'_>, outsiders: &[Outsider]) -> String {
    let status = shown.status;
    let signal = status.and_then(|status| status.signal());
    let took = match (status.and_then(|status| status.code()), signal) {
        (_, Some(signal)) => {
            let name = signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned);
            format!("was killed by {name} after")
        }
        (Some(code), None) if code != 0 => format!("failed (exit status {code}) after"),
        _ => "took".to_owned(),
    };
    let (mut own_ns, mut waited_ns, mut unknown_ns) = (0, 0, 0);
    let mut waits: BTreeMap<String, u64> = BTreeMap::new();
    let with_outer = segments_of_waits(&explained.path);
    for (outer, segment) in with_outer {
        if delay_by_outsider(segment, explained).is_some() || delay_by_peer(segment, outer, shown.members).is_some() {
            continue;
        }
        if segment.is_member && segment.kind == CauseKind::Running {
            own_ns += segment.ns;
            continue;
        }
        if segment.kind == CauseKind::Unknown {
            unknown_ns += segment.ns;
            continue;
        }
        waited_ns += segment.ns;
        if segment.who != OTHERS {
            *waits.entry(waited_for(&of_name(segment), outer)).or_default() += segment.ns;
        }
    }
    let wait = waits.into_iter().max_by_key(|(_, ns)| *ns).map(|(wait, _)| wait);
    let outsider = outsiders.first().map(|outsider| match &outsider.object {
        Some(object) => format!("waiting for {object}"),
        None => outsider.who.clone(),
    });
    let mainly = |what: Option<String>| what.map_or_else(String::new, |what| format!(", mainly {what}"));
    let outsiders_ns: u64 = outsiders.iter().map(|outsider| outsider.ns).sum();
    let at_least = if explained.is_folded { "at least " } else { "" };
    let mut shares = vec![
        (own_ns, "", "its own work".to_owned()),
        (outsiders_ns, at_least, format!("held up by others{}", mainly(outsider))),
        (waited_ns, "", format!("waiting{}", mainly(wait))),
        (unknown_ns, "", "unknown".to_owned()),
    ];
    shares.retain(|(ns, ..)| percent(*ns, explained) >= LONG_PERCENT);
    shares.sort_by_key(|(ns, ..)| Reverse(*ns));
    let share =
        |(ns, at_least, whose): &(u64, &str, String)| format!("{at_least}{:.0}% {whose}", percent(*ns, explained));
    let shares = shares.iter().map(share).collect::<Vec<_>>().join("; ");
    let colon = if shares.is_empty() { "" } else { ": " };
    format!("{} {took} {}{colon}{shares}.", printable(command), format_ns(explained.elapsed_ns))
}

/// Renders what a segment of a wait was for; follows `waiting, mainly`.
fn waited_for(segment: &PathSegment, outer: Option<&PathSegment>) -> String {
    if let Some(object) = object_instead(segment, outer) {
        return format!("for {object}");
    }
    match segment.kind {
        _ if segment.is_ready() && segment.is_member => "for a CPU that its own threads occupied".to_owned(),
        _ if segment.is_ready() => "for a CPU".to_owned(),
        CauseKind::Irq | CauseKind::Softirq | CauseKind::Nmi => {
            format!("for {} {}", why::word(segment.kind), printable(&segment.who))
        }
        CauseKind::Steal => "for the hypervisor".to_owned(),
        CauseKind::Stopped if segment.who.comm().is_some() => format!("while stopped by {}", printable(&segment.who)),
        CauseKind::Stopped => "while stopped".to_owned(),
        _ => what(segment),
    }
}

/// Writes the rows of the path, the first ones only unless `is_verbose`.
fn write_path(out: &mut dyn Write, explained: &Explained, is_verbose: bool) -> io::Result<()> {
    writeln!(out, "\nWHERE THE TIME WENT")?;
    let by_name: Vec<PathSegment> = explained.path.iter().map(of_name).collect();
    let text = text_of(|out| path::write(out, &by_name, 2));
    let rows = text.lines().count();
    if is_verbose || rows <= MAX_ROWS + 1 {
        return write!(out, "{text}");
    }
    // The outermost rows come first: those within them have the room that is left.
    let of = |max_within| text_of(|out| path::write_up_to(out, &by_name, 2, max_within));
    let fitting = (0..MAX_ROWS).rev().map(of).find(|text| text.lines().count() <= MAX_ROWS);
    let text = fitting.unwrap_or_else(|| of(0));
    let shown = text.lines().count().min(MAX_ROWS);
    text.lines().take(shown).try_for_each(|row| writeln!(out, "{row}"))?;
    match rows - shown {
        0 => Ok(()),
        more => writeln!(out, "     ... ({} more with -v)", counted(more as u64, "line")),
    }
}

/// Writes the longest wait, unless a row of the path is that wait; with `is_verbose`, all long waits.
fn write_longest(out: &mut dyn Write, explained: &Explained, is_verbose: bool) -> io::Result<()> {
    let is_long = |wait: &&LongWait| percent(wait.ns, explained) >= LONG_PERCENT;
    let longest: Vec<&LongWait> = explained.longest.iter().filter(is_long).collect();
    match &longest[..] {
        [] => Ok(()),
        [longest, ..] if !is_verbose && path::has_row_of(&explained.path, &longest.path) => Ok(()),
        [longest, ..] if !is_verbose => {
            writeln!(out, "\nLONGEST WAIT")?;
            path::write_long_wait(out, longest)
        }
        all => {
            writeln!(out, "\nLONGEST WAITS")?;
            all.iter().try_for_each(|wait| path::write_long_wait(out, wait))
        }
    }
}

/// Actor outside the command that delayed it.
#[derive(Debug)]
struct Outsider {
    who: String,
    how: String,
    ns: u64,
    /// What the command waited for, if the outsider is a peer of it and did not work.
    object: Option<Object>,
}

/// Returns how a segment's actor delayed the command from outside: it occupied a CPU for which the path waited, or the
/// path waited for it. `None` for other segments.
fn delay_by_outsider(segment: &PathSegment, explained: &Explained) -> Option<&'static str> {
    // Merged segments have no owner, and a merged work item does not show that a thread waited for its CPU.
    let is_lost = explained.is_folded && segment.who == OTHERS;
    match segment.kind {
        _ if segment.is_member || is_lost => None,
        CauseKind::Thread | CauseKind::Work if segment.is_ready() => Some(OCCUPIED_CPU),
        CauseKind::IrqsOff if segment.is_ready() => Some(IRQS_OFF),
        CauseKind::Throttled if segment.is_ready() => Some(THROTTLED),
        CauseKind::Running | CauseKind::Work => Some(WAITED_FOR),
        _ => None,
    }
}

/// Returns the object of the outermost wait, if a process outside the command could have ended the wait and nothing on
/// this machine worked: the holder of a lock is the culprit even while it sleeps.
fn delay_by_peer<'a>(
    segment: &PathSegment,
    outer: Option<&'a PathSegment>,
    members: Option<&Members>,
) -> Option<(&'a Object, ActorName)> {
    let (members, object) = (members?, object_instead(segment, outer)?);
    let peer: ActorName = object.peers.first()?.process.who.parse().ok()?;
    let is_member = peer.tid().is_none_or(|tid| members.has(tid, u64::MAX));
    (!is_member).then_some((object, peer))
}

/// Returns what delayed the command from outside, the longest delay first: by name, and the thread if it is the only one
/// of its name.
fn outsiders(explained: &Explained, members: Option<&Members>) -> Vec<Outsider> {
    type Sum<'a> = (u64, Option<ActorName>, Option<&'a Object>);
    let mut by_name: BTreeMap<(&str, ActorName, String), Sum<'_>> = BTreeMap::new();
    for (outer, segment) in segments_of_waits(&explained.path) {
        let (item, who, how, object) = match delay_by_outsider(segment, explained) {
            Some(how) => {
                let item = if segment.kind == CauseKind::Work { "work item " } else { "" };
                (item, segment.who.clone(), how.to_owned(), None)
            }
            None => {
                let Some((object, peer)) = delay_by_peer(segment, outer, members) else { continue };
                let how = if object.is_lock() { HELD } else { OWED };
                ("", peer, format!("{how} {}", object.without_peers()), Some(object))
            }
        };
        let (ns, thread, seen) =
            by_name.entry((item, who.by_name(), how)).or_insert_with(|| (0, Some(who.clone()), object));
        *ns += segment.ns;
        *thread = thread.take().filter(|thread| *thread == who);
        *seen = object;
    }
    let named = by_name.into_iter().map(|((item, name, how), (ns, thread, object))| {
        let who = thread.filter(ActorName::is_thread).unwrap_or(name);
        Outsider { who: format!("{item}{}", why::actor(&who)), how, ns, object: object.cloned() }
    });
    let mut outsiders: Vec<Outsider> = named.collect();
    outsiders.sort_by(|a, b| (Reverse(a.ns), &a.who, &a.how).cmp(&(Reverse(b.ns), &b.who, &b.how)));
    outsiders
}

/// Writes the outsiders with their delays, if these are worth naming; only the first ones unless `is_verbose`.
fn write_outsiders(
    out: &mut dyn Write,
    explained: &Explained,
    outsiders: &[Outsider],
    is_verbose: bool,
) -> io::Result<()> {
    let all_ns: u64 = outsiders.iter().map(|outsider| outsider.ns).sum();
    if percent(all_ns, explained) < SMALL_PERCENT {
        return Ok(());
    }
    let at_least = if explained.is_folded { "at least " } else { "" };
    writeln!(out, "\nCULPRITS, {at_least}{} in total", format_ns(all_ns))?;
    let is_shown = |outsider: &&Outsider| percent(outsider.ns, explained) >= SMALL_PERCENT;
    let most = if is_verbose { outsiders.len() } else { MAX_OUTSIDERS };
    let shown = outsiders.iter().take(most).take_while(is_shown).count();
    let (shown, small) = outsiders.split_at(if outsiders.len() - shown > 1 { shown } else { outsiders.len() });
    for Outsider { who, how, ns, .. } in shown {
        writeln!(out, "  {:>5.1}% {:>8}  {who} {how}", percent(*ns, explained), format_ns(*ns))?;
    }
    if !small.is_empty() {
        let small_ns: u64 = small.iter().map(|outsider| outsider.ns).sum();
        writeln!(out, "  {:>5.1}% {:>8}  {} others", percent(small_ns, explained), format_ns(small_ns), small.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use whylate_model::holders::Holder;
    use whylate_model::object::{ObjectKind, Peer};
    use whylate_model::path::command::LongWait;
    use whylate_model::path::members::Births;

    use super::*;
    use crate::render::text::screens_of;

    fn part(ms: u64, kind: CauseKind, who: &str) -> PathSegment {
        PathSegment { ns: ms * 1_000_000, kind, who: who.parse().expect("any text"), ..PathSegment::default() }
    }

    #[test]
    fn strips_tids_but_not_disk_numbers() {
        let who_of = |kind, who| of_name(&part(1, kind, who)).who;
        let by = |kind| who_of(kind, "8:16 (write by jbd2/vda-8:80)");
        assert_eq!(who_of(CauseKind::Running, "kworker/0:1:77"), "kworker/0:1");
        assert_eq!(who_of(CauseKind::Thread, "x:outside"), "x");
        assert_eq!([by(CauseKind::Disk), by(CauseKind::DiskQueue)], ["8:16 (write by jbd2/vda-8)"; 2]);
        assert_eq!(who_of(CauseKind::Disk, "8:0 (read)"), "8:0 (read)");
    }

    #[test]
    fn fits_terminals() {
        let within = |ms, kind, who: &str, depth, waiter: &str, via: &str| PathSegment {
            depth,
            waiter: Some(waiter.parse().expect("any text")),
            via: Some(via.to_owned()),
            ready: (kind == CauseKind::Thread).then(|| ActorName::thread("cc1plus", 4712)),
            ..part(ms, kind, who)
        };
        let path = vec![
            PathSegment { is_member: true, ..part(300, CauseKind::Running, "make:4711") },
            within(900, CauseKind::Running, "cc1plus:4712", 1, "make:4711", "wait4"),
            within(450, CauseKind::Thread, "a-busy-neighbor:99", 1, "make:4711", "wait4"),
            within(120, CauseKind::Disk, "vda (read by cc1plus:4712)", 2, "cc1plus:4712", "openat"),
            within(80, CauseKind::DiskQueue, "vda (writeback of vda)", 2, "cc1plus:4712", "openat"),
            within(150, CauseKind::Timer, "timer", 1, "make:4711", "clock_nanosleep"),
        ];
        let elapsed_ns = path.iter().map(|segment| segment.ns).sum();
        let wait = LongWait { after_ns: 300_000_000, ns: 1_550_000_000, path: path[1..5].to_vec() };
        let path_of_sleep = path[5..].to_vec();
        let sleep = LongWait { after_ns: 1_850_000_000, ns: 150_000_000, path: path_of_sleep };
        let explained = Explained { elapsed_ns, path, longest: vec![wait, sleep], ..Explained::default() };
        let lost = [("unseen_switches".to_owned(), 4), ("waits_not_followed".to_owned(), 12)].into();
        let shown = |is_verbose, status: i32| RunScreen {
            status: Some(ExitStatus::from_raw(status)),
            lost: &lost,
            members: None,
            has_tree: false,
            is_verbose,
            more: if is_verbose { vec!["--tree"] } else { vec!["--tree", "-o FILE.svg", "-v"] },
        };
        insta::assert_snapshot!(screens_of(|out, _| write(out, "make", &explained, &shown(false, 0))));
        insta::assert_snapshot!(
            "v_shows_all_long_waits",
            text_of(|out| write(out, "make", &explained, &shown(true, 2 << 8)))
        );
    }

    /// Returns the path of a command that waits for an object, and the time in nanoseconds.
    fn sleeper() -> (Vec<PathSegment>, u64) {
        let own = PathSegment { is_member: true, ..part(20, CauseKind::Running, "sleep:5") };
        let asleep = PathSegment {
            depth: 1,
            waiter: Some(ActorName::thread("sleep", 5)),
            via: Some("clock_nanosleep".to_owned()),
            ..part(180, CauseKind::Timer, "timer")
        };
        (vec![own, asleep], 200_000_000)
    }

    #[test]
    fn first_line_says_whose_the_time_was_and_how_it_ended() {
        let (path, elapsed_ns) = sleeper();
        let mut explained = Explained { elapsed_ns, path, ..Explained::default() };
        let lost = BTreeMap::new();
        let verdict = |explained: &Explained, status| {
            let screen =
                RunScreen { status, lost: &lost, members: None, has_tree: false, is_verbose: false, more: vec![] };
            verdict("sleep", explained, &screen, &outsiders(explained, None))
        };
        let raw = |status| Some(ExitStatus::from_raw(status));
        let shares = "90% waiting, mainly until a timer expired; 10% its own work.";
        for (status, took) in [
            (None, "took"),
            (raw(0), "took"),
            (raw(2 << 8), "failed (exit status 2) after"),
            (raw(9), "was killed by SIGKILL after"),
            (raw(64), "was killed by signal 64 after"),
        ] {
            assert_eq!(verdict(&explained, status), format!("sleep {took} 200ms: {shares}"));
        }
        // Behind whylate's reader, and behind threads of its own.
        let ready = Some(ActorName::thread("sleep", 5));
        let behind = |ms, who: &str, is_member| PathSegment {
            ready: ready.clone(),
            is_member,
            ..part(ms, CauseKind::Thread, who)
        };
        explained.path = vec![behind(150, "whylate:7", false), behind(50, "sleep:6", true)];
        explained.is_folded = true;
        assert_eq!(
            verdict(&explained, None),
            "sleep took 200ms: at least 75% held up by others, mainly whylate:7 (whylate itself); \
             25% waiting, mainly for a CPU that its own threads occupied."
        );
        explained.path.clear();
        assert_eq!(verdict(&explained, None), "sleep took 200ms.");
    }

    #[test]
    fn longest_wait_is_shown_if_it_is_no_row_of_the_path() {
        let (path, elapsed_ns) = sleeper();
        let wait = |path: &[PathSegment]| LongWait {
            after_ns: 20_000_000,
            ns: path.iter().map(|segment| segment.ns).sum(),
            path: path.to_vec(),
        };
        let longest = |path: Vec<PathSegment>, wait| {
            let explained = Explained { elapsed_ns, path, longest: vec![wait], ..Explained::default() };
            [false, true].map(|is_verbose| text_of(|out| write_longest(out, &explained, is_verbose)))
        };
        let shown = "after 20.0ms: sleep:5 waited 180ms in clock_nanosleep\n  100.0%    180ms  until a timer expired\n";
        let only = longest(path.clone(), wait(&path[1..]));
        assert_eq!(only, [String::new(), format!("\nLONGEST WAITS\n{shown}")]);
        // One of two.
        let two = longest([&path[..], &path[1..]].concat(), wait(&path[1..]));
        assert_eq!(two[0], format!("\nLONGEST WAIT\n{shown}"));
    }

    #[test]
    fn first_rows_fit_a_screen_and_v_shows_all() {
        let ran = |number: u64| {
            let ready = Some(ActorName::thread("cc1", 5));
            PathSegment { ready, ..part(100 - number, CauseKind::Thread, &format!("job-{number}:7")) }
        };
        let path: Vec<PathSegment> = (0..20).map(ran).collect();
        let elapsed_ns = path.iter().map(|segment| segment.ns).sum();
        let explained = Explained { elapsed_ns, path, ..Explained::default() };
        let lost = BTreeMap::new();
        let lines = |is_verbose| {
            let screen =
                RunScreen { status: None, lost: &lost, members: None, has_tree: false, is_verbose, more: vec!["-v"] };
            let text = text_of(|out| write(out, "make", &explained, &screen));
            assert_eq!(text.contains("     ... (13 lines more with -v)\n"), !is_verbose, "{text}");
            assert_eq!(text.contains(" 16 others\n"), !is_verbose, "{text}");
            text.lines().count()
        };
        assert_eq!((lines(false), lines(true)), (21, 48));
    }

    #[test]
    fn rows_that_are_shown_have_the_time_of_all_within() {
        let via = Some("read".to_owned());
        let waited = |number: u64| PathSegment {
            depth: 1,
            waiter: Some(ActorName::thread("make", 5)),
            via: via.clone(),
            ..part(40, CauseKind::Running, &format!("job-{number}:7"))
        };
        let path: Vec<PathSegment> =
            [part(100, CauseKind::Running, "make:5")].into_iter().chain((0..10).map(waited)).collect();
        let explained = Explained { elapsed_ns: 500_000_000, path, ..Explained::default() };
        let text = text_of(|out| write_path(out, &explained, false));
        let rows = "   80.0%    400ms  make waited in read:\n    8.0%   40.0ms    job-0 worked\n";
        assert!(text.contains(rows) && text.contains("   20.0%    100ms  make worked\n"), "{text}");
        assert!(!text.contains("job-6") && text.contains("     ... (4 lines more with -v)\n"), "{text}");
    }

    #[test]
    fn holder_of_lock_is_culprit_even_while_it_sleeps() {
        let held_by = |who: &str| {
            let process = Holder { who: who.to_owned(), state: "S".to_owned(), ..Holder::default() };
            let peers = vec![Peer { process, others: 0 }];
            Box::new(Object { peers, ..Object::with_path(ObjectKind::FileLock, "/run/app.lock") })
        };
        let waits = |holder: &str, is_member| {
            let waits = PathSegment {
                is_member,
                depth: 1,
                waiter: Some(ActorName::thread("flock", 6)),
                via: Some("flock".to_owned()),
                object: Some(held_by(holder)),
                ..part(20, CauseKind::Running, holder)
            };
            let asleep = PathSegment {
                depth: 2,
                waiter: Some(holder.into()),
                via: Some("clock_nanosleep".to_owned()),
                object: None,
                ..part(180, CauseKind::Timer, "timer")
            };
            let path = vec![waits, asleep];
            Explained { elapsed_ns: 200_000_000, path, ..Explained::default() }
        };
        let members = Births::default().descendants_of(6);
        let lost = BTreeMap::new();
        let shown = |holder: &str, is_member| {
            let screen = RunScreen {
                status: None,
                lost: &lost,
                members: Some(&members),
                has_tree: false,
                is_verbose: false,
                more: Vec::new(),
            };
            text_of(|out| write(out, "make", &waits(holder, is_member), &screen))
        };
        insta::assert_snapshot!(shown("scan:9", false));
        let own = shown("flock:6", true);
        assert!(!own.contains("CULPRITS"), "{own}");
    }

    #[test]
    fn outsiders_occupy_cpu_or_are_waited_for() {
        let own = PathSegment { is_member: true, ..part(10, CauseKind::Running, "cc1:5") };
        let within = PathSegment { depth: 1, ..part(40, CauseKind::Running, "server:9") };
        let path = vec![
            own,
            part(20, CauseKind::Thread, "rustc:7"),
            within,
            part(3, CauseKind::Throttled, "cgroup /a"),
            part(2, CauseKind::IrqsOff, "dd:8"),
            part(1, CauseKind::Work, "vmstat_update"),
            part(30, CauseKind::Timer, "others"),
            part(5, CauseKind::Softirq, "others"),
        ];
        let explained = Explained { elapsed_ns: 111_000_000, path, ..Explained::default() };
        let written = |out: &mut dyn Write| write_outsiders(out, &explained, &outsiders(&explained, None), false);
        insta::assert_snapshot!(text_of(written), @r"

        CULPRITS, 66.0ms in total
           36.0%   40.0ms  server:9 worked while the command waited for it
           18.0%   20.0ms  rustc:7 occupied its CPU
            2.7%   3.00ms  cgroup /a throttled it
            1.8%   2.00ms  dd:8 had interrupts off on its CPU
            0.9%   1.00ms  work item vmstat_update worked while the command waited for it
        ");
    }
}
