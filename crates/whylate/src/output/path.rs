// SPDX-License-Identifier: MIT OR Apache-2.0
//! A path as an outline: who was waited for, what that one did, and for whom it waited in turn.

use std::cmp::Reverse;
use std::io::{self, Write};

use whylate_model::CauseKind;
use whylate_model::path::PathSegment;
use whylate_model::thread::without_number;
use whylate_model::units::{format_ns, printable};

/// Parts of less than this share of the whole are summed up, where there are several.
const SMALL_PERCENT: f64 = 1.0;
/// Waits within waits are shown so deep.
pub const DEEPEST: usize = 12;

/// A line of an outline.
#[derive(Debug)]
struct Part {
    ns: u64,
    text: String,
    within: Vec<Part>,
}

/// Writes a path, of which each line is a part of the line that it stands below.
pub fn write(out: &mut dyn Write, path: &[PathSegment], indent: usize) -> io::Result<()> {
    let total_ns = path.iter().map(|segment| segment.ns).sum();
    write_parts(out, &parts_of(path, 0), total_ns, indent, 0)
}

/// The same of one wait: who waited, and in what, stands above already.
pub fn write_wait(out: &mut dyn Write, path: &[PathSegment], indent: usize) -> io::Result<()> {
    let total_ns = path.iter().map(|segment| segment.ns).sum();
    let is_wait = path.iter().any(|segment| segment.depth > 0);
    let (inner, outer): (Vec<PathSegment>, Vec<PathSegment>) =
        path.iter().cloned().partition(|segment| is_wait && segment.depth > 0);
    let mut parts = parts_of(&inner, 1);
    parts.extend(parts_of(&outer, 0));
    parts.sort_by_key(|part| Reverse(part.ns));
    write_parts(out, &parts, total_ns, indent, 0)
}

/// Parts at a depth, those that are alike together, the longest first.
fn parts_of(path: &[PathSegment], depth: u32) -> Vec<Part> {
    let mut own: Vec<(&PathSegment, u64)> = Vec::new();
    let mut waits: Vec<(&PathSegment, Vec<PathSegment>)> = Vec::new();
    for run in path.chunk_by(|a, b| (a.depth > depth) == (b.depth > depth)) {
        if run[0].depth > depth {
            let outer = run.iter().find(|segment| segment.depth == depth + 1).unwrap_or(&run[0]);
            let is_like = |(other, _): &(&PathSegment, Vec<PathSegment>)| {
                (&other.waiter, &other.via) == (&outer.waiter, &outer.via)
            };
            match waits.iter().position(is_like) {
                Some(at) => waits[at].1.extend_from_slice(run),
                None => waits.push((outer, run.to_vec())),
            }
            continue;
        }
        for segment in run {
            let is_like = |(other, _): &(&PathSegment, u64)| {
                (other.kind, &other.who, &other.ready) == (segment.kind, &segment.who, &segment.ready)
            };
            match own.iter().position(is_like) {
                Some(at) => own[at].1 += segment.ns,
                None => own.push((segment, segment.ns)),
            }
        }
    }
    let mut parts: Vec<Part> = Vec::new();
    for (segment, ns) in own {
        // Whoever could run is told once.
        let Some((ready, behind)) = behind(segment) else {
            parts.push(Part { ns, text: what(segment), within: Vec::new() });
            continue;
        };
        let text = format!("{ready} waited for a CPU:");
        let part = Part { ns, text: behind, within: Vec::new() };
        match parts.iter_mut().find(|part| part.text == text) {
            Some(wait) => {
                wait.ns += ns;
                wait.within.push(part);
            }
            None => parts.push(Part { ns, text, within: vec![part] }),
        }
    }
    parts.iter_mut().for_each(|part| part.within.sort_by_key(|part| Reverse(part.ns)));
    parts.extend(waits.into_iter().map(|(outer, inner)| {
        let via = outer.via.as_deref().map_or_else(String::new, |via| format!(" in {}", printable(via)));
        let waiter = outer.waiter.as_deref().unwrap_or("a thread");
        Part {
            ns: inner.iter().map(|segment| segment.ns).sum(),
            text: format!("{} waited{via}:", printable(waiter)),
            within: parts_of(&inner, depth + 1),
        }
    }));
    parts.sort_by_key(|part| Reverse(part.ns));
    parts
}

fn write_parts(out: &mut dyn Write, parts: &[Part], total_ns: u64, indent: usize, depth: usize) -> io::Result<()> {
    let percent = |ns: u64| ns as f64 * 100.0 / total_ns.max(1) as f64;
    let line = |out: &mut dyn Write, ns: u64, text: &str| {
        let deeper = 2 * depth;
        writeln!(out, "{:indent$}{:>5.1}% {:>8}  {:deeper$}{text}", "", percent(ns), format_ns(ns), "")
    };
    let shown = parts.partition_point(|part| percent(part.ns) >= SMALL_PERCENT);
    let (shown, small) = if parts.len() - shown > 1 { parts.split_at(shown) } else { (parts, &[][..]) };
    for part in shown {
        // A wait for one thing alone takes one line.
        if let [only] = &part.within[..]
            && only.within.is_empty()
        {
            line(out, part.ns, &format!("{} {}", part.text, only.text))?;
            continue;
        }
        line(out, part.ns, &part.text)?;
        if depth < DEEPEST {
            write_parts(out, &part.within, total_ns, indent, depth + 1)?;
        }
    }
    if !small.is_empty() {
        let ns = small.iter().map(|part| part.ns).sum();
        line(out, ns, &format!("{} smaller parts", small.len()))?;
    }
    Ok(())
}

/// Which thread could run, and who had its CPU, in a clause.
fn behind(segment: &PathSegment) -> Option<(String, String)> {
    let who = printable(&segment.who);
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
    // Small parts that were summed up have lost who waited.
    segment.is_ready().then(|| (printable(segment.ready.as_deref().unwrap_or("threads")), clause))
}

/// What happened in a part of a path, in a clause.
pub fn what(segment: &PathSegment) -> String {
    let (who, clauses) = who_and_what(segment);
    who.into_iter().chain(clauses).collect::<Vec<_>>().join(" ")
}

/// The same in its parts: the thread whose part it is, where it is one's, and what happened to it, the widest first.
pub fn who_and_what(segment: &PathSegment) -> (Option<String>, Vec<String>) {
    if let Some((ready, behind)) = behind(segment) {
        return (Some(ready), vec!["waited for a CPU".to_owned(), behind]);
    }
    let who = printable(&segment.who);
    let clause = match segment.kind {
        CauseKind::Running => return (Some(who), vec!["worked".to_owned()]),
        CauseKind::Work => format!("work item {who} ran"),
        CauseKind::Irq => format!("interrupt {who} ran"),
        CauseKind::Softirq => format!("softirq {who} ran"),
        CauseKind::Steal => "the hypervisor ran something else".to_owned(),
        CauseKind::Disk if who.starts_with("unknown (") => "for a disk (its request was overwritten)".to_owned(),
        CauseKind::Disk => format!("at disk {who}"),
        CauseKind::DiskQueue => format!("in the queue of disk {who}"),
        CauseKind::Timer => "until a timer expired".to_owned(),
        CauseKind::Network => "until a packet arrived".to_owned(),
        CauseKind::Interrupt if who == "interrupt" => "until an interrupt arrived".to_owned(),
        CauseKind::Interrupt => format!("until interrupt {who} arrived"),
        CauseKind::Rcu => "until an RCU grace period ended".to_owned(),
        CauseKind::Outside => format!("for a thread {who}"),
        CauseKind::Unknown => format!("unknown: {who}"),
        kind => format!("{} {who}", super::why::word(kind)),
    };
    (None, vec![clause])
}

/// The same with names alone, and without its stack: each of a build's compilers is a compiler.
pub fn of_name(segment: &PathSegment) -> PathSegment {
    let plain = PathSegment {
        ns: segment.ns,
        kind: segment.kind,
        who: segment.who.clone(),
        ready: segment.ready.clone(),
        via: segment.via.clone(),
        waiter: segment.waiter.clone(),
        stack: Vec::new(),
        depth: segment.depth,
        is_member: segment.is_member,
    };
    plain.with_threads(&|called| without_number(called).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(
        ms: u64,
        kind: CauseKind,
        who: &str,
        depth: u32,
        waiter: Option<&str>,
        via: Option<&str>,
    ) -> PathSegment {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let ready = (kind == CauseKind::Thread).then(|| "server:4711".to_owned());
        let who = who.to_owned();
        PathSegment {
            ns: ms * 1_000_000,
            kind,
            who,
            ready,
            waiter: owned(waiter),
            via: owned(via),
            depth,
            ..PathSegment::default()
        }
    }

    #[test]
    fn a_wait_for_a_cpu_is_told_as_one_also_where_it_is_not_known_whose() {
        let of = |kind| what(&PathSegment { kind, who: "bully".to_owned(), ..PathSegment::default() });
        assert_eq!(of(CauseKind::Thread), "threads waited for a CPU behind bully");
        assert_eq!(of(CauseKind::Irq), "interrupt bully ran");
    }

    #[test]
    fn what_is_not_known_more_closely_has_words_of_its_own() {
        let of = |kind, who: &str| what(&PathSegment { kind, who: who.to_owned(), ..PathSegment::default() });
        assert_eq!(of(CauseKind::Interrupt, "virtio3"), "until interrupt virtio3 arrived");
        assert_eq!(of(CauseKind::Interrupt, "interrupt"), "until an interrupt arrived");
        assert_eq!(of(CauseKind::Disk, "vda (read by dd:7)"), "at disk vda (read by dd:7)");
        let overwritten = "unknown (its request was overwritten)";
        assert_eq!(of(CauseKind::Disk, overwritten), "for a disk (its request was overwritten)");
    }

    #[test]
    fn each_line_is_a_part_of_the_one_it_stands_below() {
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
        let mut out = Vec::new();
        write_wait(&mut out, &path[..5], 4).expect("a vector takes everything");
        writeln!(out).expect("the same");
        write(&mut out, &path, 4).expect("the same");
        insta::assert_snapshot!(String::from_utf8(out).expect("text"));
    }
}
