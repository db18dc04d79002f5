// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a path as an outline: the waker of a wait, its activity, and its own waits in turn.

use std::cmp::Reverse;
use std::io::{self, Write};

use whylate_model::object::Object;
use whylate_model::path::command::LongWait;
use whylate_model::path::outline::{Piece, pieces};
use whylate_model::path::{OTHERS, PathSegment};
use whylate_model::units::{format_ns, printable};
use whylate_model::wait::Stop;
use whylate_model::{ActorName, CauseKind};

use crate::render::text::pad::Spaces;
use crate::render::text::text_of;

/// Parts below this share of the total are merged into one line, if there are several.
const SMALL_PERCENT: f64 = 1.0;
/// Share of a row from which one wait is nearly all of it.
const NEARLY_ALL: f64 = 0.95;
/// Maximum depth of nested waits that are shown.
pub const MAX_DEPTH: usize = 12;

/// A line of an outline.
#[derive(Debug, Default)]
struct OutlinePart {
    ns: u64,
    text: String,
    /// The text names the object of the wait.
    has_object: bool,
    /// Waiter and its system call, if the line is a wait.
    wait: Option<(Option<ActorName>, Option<String>)>,
    within: Vec<OutlinePart>,
}

/// Writes a path; each line is a part of the less indented line above.
pub fn write(out: &mut dyn Write, path: &[PathSegment], indent: usize) -> io::Result<()> {
    write_up_to(out, path, indent, usize::MAX)
}

/// Writes a path with at most `max_within` lines below each of the least indented ones.
pub fn write_up_to(out: &mut dyn Write, path: &[PathSegment], indent: usize, max_within: usize) -> io::Result<()> {
    let path: Vec<PathSegment> = path.iter().cloned().map(with_telling_object).collect();
    let total_ns = path.iter().map(|segment| segment.ns).sum();
    write_parts(out, &parts_of(&path, 0), total_ns, (indent, 0), max_within)
}

/// Strips the object if it says no more than the system call.
fn with_telling_object(segment: PathSegment) -> PathSegment {
    PathSegment { object: segment.object.filter(|object| object.is_telling()), ..segment }
}

/// Writes the path of one wait, without the line of the outermost wait, which the caller has written.
pub fn write_wait(out: &mut dyn Write, path: &[PathSegment], indent: usize) -> io::Result<()> {
    let total_ns = path.iter().map(|segment| segment.ns).sum();
    let is_wait = path.iter().any(|segment| segment.depth > 0);
    let (inner, outer): (Vec<PathSegment>, Vec<PathSegment>) =
        path.iter().cloned().map(with_telling_object).partition(|segment| is_wait && segment.depth > 0);
    let mut parts: Vec<(&Object, Vec<PathSegment>)> = Vec::new();
    let mut rest = Vec::new();
    for piece in pieces(&inner, 0) {
        match piece {
            Piece::Wait { outer: PathSegment { object: Some(object), .. }, within } => {
                match parts.iter_mut().find(|(known, _)| known.is_same(object)) {
                    Some((_, segments)) => segments.extend_from_slice(within),
                    None => parts.push((object, within.to_vec())),
                }
            }
            Piece::Wait { within, .. } => rest.extend_from_slice(within),
            Piece::Own(segment) => rest.push(segment.clone()),
        }
    }
    let of_object = |(object, within): (&Object, Vec<PathSegment>)| {
        let within = parts_of(&within, 1);
        let ns = within.iter().map(|part| part.ns).sum();
        match &within[..] {
            [only] if only.has_object => OutlinePart { ns, text: only.text.clone(), ..OutlinePart::default() },
            _ => OutlinePart { ns, text: format!("for {object}:"), within, ..OutlinePart::default() },
        }
    };
    let mut parts: Vec<OutlinePart> = parts.into_iter().map(of_object).collect();
    let inner = rest;
    let mut others = parts_of(&inner, 1);
    if let Some(outermost) = inner.iter().find(|segment| segment.depth == 1) {
        others = without_repetition(&wait_of(outermost), others);
    }
    parts.extend(others);
    parts.extend(parts_of(&outer, 0));
    parts.sort_by_key(|part| Reverse(part.ns));
    write_parts(out, &parts, total_ns, (indent, 0), usize::MAX)
}

/// Writes a long wait: when it began, whose it was and how long, and its path.
pub fn write_long_wait(out: &mut dyn Write, wait: &LongWait) -> io::Result<()> {
    let first = wait.path.iter().find(|segment| segment.depth == 1).or_else(|| wait.path.first());
    let waiter = first.unwrap_or(&PathSegment::default()).waiter_name();
    let (via, stop) = first.map_or((None, None), |segment| (segment.via.as_deref(), segment.stop));
    let (after, waiter, long) = (format_ns(wait.after_ns), printable(&waiter), format_ns(wait.ns));
    match (stop, via) {
        (Some(stop), _) => writeln!(out, "after {after}: {waiter} was {} for {long}", stop.words())?,
        (None, Some(via)) => writeln!(out, "after {after}: {waiter} waited {long} in {}", printable(via))?,
        (None, None) => writeln!(out, "after {after}: {waiter} waited {long}")?,
    }
    write_wait(out, &wait.path, 2)
}

/// Returns whether a row of a path is this wait, or little more than it.
pub fn has_row_of(path: &[PathSegment], wait: &[PathSegment]) -> bool {
    let rows = |path: &[PathSegment]| parts_of(&path.iter().map(of_name).collect::<Vec<_>>(), 0);
    let is_wait =
        |row: &OutlinePart, wait: &OutlinePart| row.text == wait.text && wait.ns as f64 >= row.ns as f64 * NEARLY_ALL;
    rows(wait).first().is_some_and(|wait| rows(path).iter().any(|row| is_wait(row, wait)))
}

/// Returns the parts at a depth, longest first. Merges equal parts.
fn parts_of(path: &[PathSegment], depth: u32) -> Vec<OutlinePart> {
    let mut own: Vec<(PathSegment, u64)> = Vec::new();
    let mut waits: Vec<(&PathSegment, Vec<PathSegment>)> = Vec::new();
    for piece in pieces(path, depth) {
        match piece {
            Piece::Wait { outer, within } => match waits.iter().position(|(other, _)| other.is_of_same_wait(outer)) {
                Some(at) => waits[at].1.extend_from_slice(within),
                None => waits.push((outer, within.to_vec())),
            },
            // An empty segment only names the waiter.
            Piece::Own(segment) if segment.ns == 0 => {}
            Piece::Own(segment) => {
                let is_like = |(other, _): &(PathSegment, u64)| {
                    (other.kind, &other.who, &other.ready) == (segment.kind, &segment.who, &segment.ready)
                        && other.gave_up() == segment.gave_up()
                };
                match own.iter().position(is_like) {
                    Some(at) => {
                        own[at].0.timeouts = own[at].0.timeouts.saturating_add(segment.timeouts);
                        own[at].1 += segment.ns;
                    }
                    None => own.push((segment.clone(), segment.ns)),
                }
            }
        }
    }
    let mut parts: Vec<OutlinePart> = Vec::new();
    for (segment, ns) in own {
        // Run-queue waits of one thread are grouped below one line.
        let Some((ready, behind)) = behind(&segment) else {
            parts.push(OutlinePart {
                ns,
                text: what(&segment),
                has_object: segment.gave_up(),
                ..OutlinePart::default()
            });
            continue;
        };
        let text = format!("{ready} waited for a CPU:");
        let part = OutlinePart { ns, text: behind, ..OutlinePart::default() };
        match parts.iter_mut().find(|part| part.text == text) {
            Some(wait) => {
                wait.ns += ns;
                wait.within.push(part);
            }
            None => parts.push(OutlinePart { ns, text, within: vec![part], ..OutlinePart::default() }),
        }
    }
    parts.iter_mut().for_each(|part| part.within.sort_by_key(|part| Reverse(part.ns)));
    parts.extend(waits.into_iter().map(|(outer, inner)| {
        let wait = wait_of(outer);
        let ns = inner.iter().map(|segment| segment.ns).sum();
        let within = without_repetition(&wait, parts_of(&inner, depth + 1));
        let waiter = printable(&outer.waiter_name());
        if let [only] = &within[..]
            && only.has_object
        {
            let text = format!("{waiter} {}", only.text);
            return OutlinePart { ns, text, wait: Some(wait), ..OutlinePart::default() };
        }
        let text = format!("{waiter} {}:", waited(outer));
        OutlinePart { ns, text, within, wait: Some(wait), ..OutlinePart::default() }
    }));
    parts.sort_by_key(|part| Reverse(part.ns));
    parts
}

fn wait_of(segment: &PathSegment) -> (Option<ActorName>, Option<String>) {
    (segment.waiter.clone(), segment.via.clone())
}

/// Flattens waits of threads of one name for one another, in the same system call as far as known. Otherwise a queue of
/// 16 such threads for one lock would be 16 lines deep.
fn without_repetition(outer: &(Option<ActorName>, Option<String>), parts: Vec<OutlinePart>) -> Vec<OutlinePart> {
    let (waiter, via) = outer;
    if waiter.as_ref().is_none_or(|waiter| waiter.tid().is_some()) {
        return parts;
    }
    let mut kept: Vec<OutlinePart> = Vec::new();
    for part in parts {
        match &part.wait {
            Some((inner, inner_via)) if inner == waiter && (inner_via.is_none() || inner_via == via) => {
                without_repetition(outer, part.within).into_iter().for_each(|part| merge(&mut kept, part));
            }
            _ => merge(&mut kept, part),
        }
    }
    kept.sort_by_key(|part| Reverse(part.ns));
    kept
}

/// Merges a part into the one with the same text, or appends it.
fn merge(parts: &mut Vec<OutlinePart>, part: OutlinePart) {
    match parts.iter_mut().find(|other| other.text == part.text) {
        Some(other) => {
            other.ns += part.ns;
            part.within.into_iter().for_each(|part| merge(&mut other.within, part));
            other.within.sort_by_key(|part| Reverse(part.ns));
        }
        None => parts.push(part),
    }
}

/// Writes parts, each with at most `max_within` lines below it; `depth` is how often they are indented further.
fn write_parts(
    out: &mut dyn Write,
    parts: &[OutlinePart],
    total_ns: u64,
    (indent, depth): (usize, usize),
    max_within: usize,
) -> io::Result<()> {
    let percent = |ns: u64| ns as f64 * 100.0 / total_ns.max(1) as f64;
    let line = |out: &mut dyn Write, ns: u64, text: &str| {
        let (indent, deeper) = (Spaces(indent), Spaces(2 * depth));
        writeln!(out, "{indent}{:>5.1}% {:>8}  {deeper}{text}", percent(ns), format_ns(ns))
    };
    let shown = parts.partition_point(|part| percent(part.ns) >= SMALL_PERCENT);
    let (shown, small) = if parts.len() - shown > 1 { parts.split_at(shown) } else { (parts, &[][..]) };
    for part in shown {
        // A wait with a single cause takes one line.
        if let [only] = &part.within[..]
            && only.within.is_empty()
        {
            line(out, part.ns, &format!("{} {}", part.text, only.text))?;
            continue;
        }
        line(out, part.ns, &part.text)?;
        if depth < MAX_DEPTH {
            let within = text_of(|out| write_parts(out, &part.within, total_ns, (indent, depth + 1), usize::MAX));
            within.lines().take(max_within).try_for_each(|line| writeln!(out, "{line}"))?;
        }
    }
    if !small.is_empty() {
        let ns = small.iter().map(|part| part.ns).sum();
        line(out, ns, &format!("{} smaller parts", small.len()))?;
    }
    Ok(())
}

/// Renders a run-queue wait: the waiting thread, and what occupied its CPU. `None` for other segments.
fn behind(segment: &PathSegment) -> Option<(String, String)> {
    let who = super::why::actor(&segment.who);
    let clause = match segment.kind {
        CauseKind::Thread => format!("behind {who}"),
        CauseKind::Work => format!("behind work item {who}"),
        CauseKind::Irq => format!("behind interrupt {who}"),
        CauseKind::Softirq => format!("behind softirq {who}"),
        CauseKind::Nmi => "behind an NMI".to_owned(),
        CauseKind::IrqsOff => format!("while {who} had interrupts off"),
        CauseKind::IdleExit => format!("while {who} was idle"),
        CauseKind::Wakeup => "while it was being woken".to_owned(),
        CauseKind::Throttled => format!("throttled by {who}"),
        CauseKind::Steal => "while the hypervisor ran something else".to_owned(),
        _ => format!("unknown: {who}"),
    };
    // Merged small segments have no waiter.
    segment.is_ready().then(|| (segment.ready.as_ref().map_or_else(|| "threads".to_owned(), printable), clause))
}

/// Renders a segment of a path.
pub fn what(segment: &PathSegment) -> String {
    let (who, clauses) = who_and_what(segment);
    who.into_iter().chain(clauses).collect::<Vec<_>>().join(" ")
}

/// Returns the segments of a path, each with the outermost wait that it is part of.
pub fn segments_of_waits(path: &[PathSegment]) -> impl Iterator<Item = (Option<&PathSegment>, &PathSegment)> {
    pieces(path, 0).flat_map(|piece| {
        let (outer, within) = match piece {
            Piece::Own(segment) => (None, std::slice::from_ref(segment)),
            Piece::Wait { outer, within } => (Some(outer), within),
        };
        within.iter().map(move |segment| (outer, segment))
    })
}

/// Returns the object of the outermost wait, if the segment is a sleep or ends outside the machine's CPUs, and the object
/// says more: the lock matters more than why its holder slept.
pub fn object_instead<'a>(segment: &PathSegment, outer: Option<&'a PathSegment>) -> Option<&'a Object> {
    use CauseKind::{Interrupt, Network, Stopped, Timer};
    let is_idle = matches!(segment.kind, Timer | Network | Interrupt | Stopped) && !segment.gave_up();
    outer?.object.as_deref().filter(|object| is_idle && object.is_telling())
}

/// Renders a segment of a path with the wait that it is part of.
pub fn what_in_whose_wait(segment: &PathSegment) -> String {
    let waiter = segment.waiter.as_ref().filter(|_| segment.depth > 0);
    let within = waiter.map(|waiter| format!(" (while {} {})", printable(waiter), waited(segment)));
    format!("{}{}", what(segment), within.unwrap_or_default())
}

/// Renders a segment in pieces: the thread, if it belongs to one, and clauses, the most general first.
pub fn who_and_what(segment: &PathSegment) -> (Option<String>, Vec<String>) {
    if let Some((ready, behind)) = behind(segment) {
        return (Some(ready), vec!["waited for a CPU".to_owned(), behind]);
    }
    let who = super::why::actor(&segment.who);
    let is_unnamed = segment.kind.is_unnamed(&segment.who);
    let clause = match segment.kind {
        CauseKind::Running => return (Some(who), vec!["worked".to_owned()]),
        CauseKind::Work => format!("work item {who} ran"),
        CauseKind::Irq => format!("interrupt {who} ran"),
        CauseKind::Softirq => format!("softirq {who} ran"),
        CauseKind::Steal => "the hypervisor ran something else".to_owned(),
        CauseKind::Disk if is_unnamed => "for a disk (its request was overwritten)".to_owned(),
        CauseKind::Disk => format!("at disk {who}"),
        CauseKind::DiskQueue => format!("in the queue of disk {who}"),
        CauseKind::Timer if segment.gave_up() => gave_up(segment),
        CauseKind::Timer if is_unnamed || who == OTHERS => "until a timer expired".to_owned(),
        CauseKind::Timer => format!("until a timer expired ({who})"),
        CauseKind::Network => "until a packet arrived".to_owned(),
        CauseKind::Interrupt if is_unnamed => "until an interrupt arrived".to_owned(),
        CauseKind::Interrupt => format!("until interrupt {who} arrived"),
        CauseKind::Rcu => "until an RCU grace period ended".to_owned(),
        CauseKind::Outside => format!("for a thread {who}"),
        CauseKind::Stopped => stopped(segment, &who),
        CauseKind::Unknown => format!("unknown: {who}"),
        kind => format!("{} {who}", super::why::word(kind)),
    };
    (None, vec![clause])
}

/// Renders that the waiter got no answer, or no lock, before the timeout of its call.
fn gave_up(segment: &PathSegment) -> String {
    let times = match segment.timeouts {
        0 | 1 => String::new(),
        times => format!(" {times} times"),
    };
    let object = segment.object.as_deref();
    let after = object.and_then(|object| object.timeout_ns);
    let after = after.map_or_else(String::new, |ns| format!(" after {}", format_ns(ns)));
    let on = object.map_or_else(String::new, |object| format!(" on {}", object.without_timeout()));
    let via = segment.via.as_deref().map_or_else(String::new, |via| format!(" in {}", printable(via)));
    format!("gave up{times}{via}{after}{on}")
}

/// Renders who stopped a thread, or what let it continue.
fn stopped(segment: &PathSegment, who: &str) -> String {
    match segment.stop {
        Some(stop) if who == stop.who() => "which process did it is not known".to_owned(),
        Some(Stop::Signal) => format!("until {who} let it go on"),
        Some(Stop::Freezer) => format!("until {who} thawed it"),
        Some(Stop::Tracer) | None => format!("by {who}"),
    }
}

/// Returns how the waiter of the path was stopped, if it was.
pub fn stop_of(path: &[PathSegment]) -> Option<Stop> {
    path.iter().find(|segment| segment.depth == 1)?.stop
}

/// Renders the wait of the waiter, or its stop; follows the waiter's name.
pub fn waited(segment: &PathSegment) -> String {
    let via = match (segment.stop, &segment.via) {
        (Some(stop), _) => return format!("was {}", stop.words()),
        (None, Some(via)) => format!("waited in {}", printable(via)),
        (None, None) => "waited".to_owned(),
    };
    let object = segment.object.as_ref().filter(|object| object.is_telling());
    object.map_or_else(|| via.clone(), |object| format!("{via} for {object}"))
}

/// Strips TIDs, stacks, timers and cgroups from a segment, so that e.g. all compilers of a build are merged.
pub fn of_name(segment: &PathSegment) -> PathSegment {
    let plain = PathSegment {
        timer: None,
        cgroup: None,
        cgroup_of_waiter: None,
        ns: segment.ns,
        kind: segment.kind,
        who: segment.who.clone(),
        ready: segment.ready.clone(),
        via: segment.via.clone(),
        waiter: segment.waiter.clone(),
        object: segment
            .object
            .clone()
            .filter(|object| object.is_telling())
            .map(|object| Box::new(object.without_local_address())),
        timeouts: segment.timeouts,
        stack: Vec::new(),
        stop: segment.stop,
        depth: segment.depth,
        is_member: segment.is_member,
    };
    plain.with_threads(&ActorName::by_name)
}

#[cfg(test)]
mod tests {
    use whylate_model::holders::Holder;
    use whylate_model::object::{ObjectKind, Peer};

    use super::*;
    use crate::render::text::text_of;

    fn segment(
        ms: u64,
        kind: CauseKind,
        who: &str,
        depth: u32,
        waiter: Option<&str>,
        via: Option<&str>,
    ) -> PathSegment {
        let name = |text: &str| text.parse().expect("any text");
        PathSegment {
            ns: ms * 1_000_000,
            kind,
            who: name(who),
            ready: (kind == CauseKind::Thread).then(|| ActorName::thread("server", 4711)),
            waiter: waiter.map(name),
            via: via.map(str::to_owned),
            depth,
            ..PathSegment::default()
        }
    }

    #[test]
    fn renders_run_queue_wait_of_unknown_thread() {
        let of = |kind| what(&PathSegment { kind, who: "bully".into(), ..PathSegment::default() });
        assert_eq!(of(CauseKind::Thread), "threads waited for a CPU behind bully");
        assert_eq!(of(CauseKind::Irq), "interrupt bully ran");
    }

    #[test]
    fn renders_unspecific_causes() {
        let of = |kind, who: &str| {
            what(&PathSegment { kind, who: who.parse().expect("any text"), ..PathSegment::default() })
        };
        assert_eq!(of(CauseKind::Timer, "timer"), "until a timer expired");
        assert_eq!(of(CauseKind::Timer, "TCP retransmission"), "until a timer expired (TCP retransmission)");
        assert_eq!(of(CauseKind::Interrupt, "virtio3"), "until interrupt virtio3 arrived");
        assert_eq!(of(CauseKind::Interrupt, "interrupt"), "until an interrupt arrived");
        assert_eq!(of(CauseKind::Disk, "vda (read by dd:7)"), "at disk vda (read by dd:7)");
        let overwritten = "unknown (its request was overwritten)";
        assert_eq!(of(CauseKind::Disk, overwritten), "for a disk (its request was overwritten)");
    }

    #[test]
    fn outline_names_objects_and_timeouts() {
        let lock = Object {
            peers: vec![Peer {
                process: Holder { who: "indexer:812".to_owned(), state: "S".to_owned(), ..Holder::default() },
                others: 0,
            }],
            ..Object::with_path(ObjectKind::FileLock, "/srv/lock")
        };
        let udp = Object {
            local: Some("127.0.0.1:41000".to_owned()),
            remote: Some("127.0.0.53:53".to_owned()),
            timeout_ns: Some(5_000_000_000),
            peers: vec![Peer {
                process: Holder { who: "resolver:88".to_owned(), state: "T".to_owned(), ..Holder::default() },
                others: 0,
            }],
            ..Object::new(ObjectKind::Udp)
        };
        let make = |ms, kind, who, object: &Object, via| PathSegment {
            object: Some(Box::new(object.clone())),
            timeouts: u32::from(kind == CauseKind::Timer),
            ..segment(ms, kind, who, 1, Some("make:7"), Some(via))
        };
        let futex = Object { address: Some(0x7f00_1234), ..Object::new(ObjectKind::Futex) };
        let path = vec![
            make(100, CauseKind::Running, "indexer:812", &lock, "flock"),
            segment(400, CauseKind::Timer, "timer", 2, Some("indexer:812"), Some("clock_nanosleep")),
            make(5_000, CauseKind::Timer, "timeout of the wait", &udp, "poll"),
            segment(90, CauseKind::Running, "make:7", 0, None, None),
            make(5_000, CauseKind::Timer, "timeout of the wait", &udp, "poll"),
            segment(90, CauseKind::Running, "make:7", 0, None, None),
            PathSegment { timeouts: 0, ..make(300, CauseKind::Running, "worker:9", &futex, "futex") },
        ];
        insta::assert_snapshot!(text_of(|out| {
            write(out, &path, 2)?;
            writeln!(out)?;
            write(out, &path.iter().map(of_name).collect::<Vec<_>>(), 2)?;
            writeln!(out)?;
            write_wait(out, &path[..3], 2)?;
            writeln!(out)?;
            write_long_wait(out, &LongWait { after_ns: 0, ns: 5_000_000_000, path: path[2..3].to_vec() })
        }));
    }

    #[test]
    fn renders_who_continued_stopped_thread() {
        let text = |stop: Stop, who: &str| {
            let via = Some(stop.words());
            let part = segment(5, CauseKind::Stopped, who, 1, Some("napper:7"), via);
            text_of(|out| write(out, &[PathSegment { stop: Some(stop), ..part }], 0))
                .split("  ")
                .last()
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        for (stop, who, expected) in [
            (Stop::Signal, "bash:9", "napper:7 was stopped by a signal: until bash:9 let it go on"),
            (Stop::Signal, "signal", "napper:7 was stopped by a signal: which process did it is not known"),
            (Stop::Tracer, "gdb:9", "napper:7 was stopped by a tracer: by gdb:9"),
            (Stop::Freezer, "runc:9", "napper:7 was frozen: until runc:9 thawed it"),
        ] {
            assert_eq!(text(stop, who), expected);
            assert_eq!(stop_of(&[PathSegment { stop: Some(stop), depth: 1, ..PathSegment::default() }]), Some(stop));
        }
    }

    #[test]
    fn each_line_is_part_of_outer_line() {
        use CauseKind::{Disk, Running, Softirq, Thread, Unknown};
        let client = (Some("client:4710"), Some("futex"));
        let server = (Some("server:4711"), Some("fdatasync"));
        let path = [
            segment(5, Running, "server:4711", 1, client.0, client.1),
            segment(1, Running, "jbd2:80", 2, server.0, server.1),
            segment(6, Disk, "nvme0n1 (write by jbd2:80)", 3, Some("jbd2:80"), None),
            segment(1, Running, "jbd2:80", 2, server.0, server.1),
            segment(3, Running, "server:4711", 1, client.0, client.1),
            segment(12_000, Thread, "bully\x1b[2J:4712", 1, client.0, client.1),
            segment(2, Softirq, "net_rx", 1, client.0, client.1),
            segment(3, Unknown, "its waker was not seen", 2, server.0, Some("write")),
        ];
        insta::assert_snapshot!(text_of(|out| {
            write_wait(out, &path[..5], 4)?;
            writeln!(out)?;
            write(out, &path, 4)
        }));
    }

    #[test]
    fn merges_lock_queue_of_threads_with_one_name() {
        use CauseKind::{Disk, Running};
        let of = |ms, kind, who, depth, waiter, via| segment(ms, kind, who, depth, Some(waiter), via);
        let futex = Some("futex");
        // Each lock holder waited for the lock itself before, or for the disk. One wait has no system call.
        let queue = |server| {
            vec![
                of(1, Disk, "vda", 4, server, Some("fsync")),
                of(2, Running, server, 3, server, futex),
                of(4, Running, server, 2, server, None),
                of(8, Running, server, 1, server, futex),
            ]
        };
        insta::assert_snapshot!(text_of(|out| { write_wait(out, &queue("server"), 0)?; write_wait(out, &queue("server:7"), 0) }), @r"
         93.3%   14.0ms  server worked
          6.7%   1.00ms  server waited in fsync: at disk vda
         53.3%   8.00ms  server:7 worked
         46.7%   7.00ms  server:7 waited:
         26.7%   4.00ms    server:7 worked
         20.0%   3.00ms    server:7 waited in futex:
         13.3%   2.00ms      server:7 worked
          6.7%   1.00ms      server:7 waited in fsync: at disk vda
        ");
    }
}
