// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the path of a command: how its elapsed time was spent.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use serde_json::json;
use whylate_model::folded::{Frame, Kind, lines_of};
use whylate_model::path::command::Explained;
use whylate_model::path::members::Members;
use whylate_model::path::{PathSegment, within};
use whylate_model::units::{format_ns, printable};
use whylate_model::{ActorName, CauseKind};

use super::offcpu::{svg, write_lines};
use super::path::{self, of_name, what};
use super::processes;
use crate::json::write_line;
use crate::render::extension::{Extension, chosen};

/// Outside culprits below this share of the elapsed time are merged into one line, and their maximum number.
const SMALL_PERCENT: f64 = 0.5;
const MAX_OUTSIDERS: usize = 10;
// How an outside culprit delayed the command.
const OCCUPIED_CPU: &str = "occupied its CPU";
const IRQS_OFF: &str = "had interrupts off on its CPU";
const THROTTLED: &str = "throttled it";
const WAITED_FOR: &str = "worked while the command waited for it";
/// Waits below this share of the elapsed time are not listed one by one.
const LONG_PERCENT: f64 = 1.0;

/// Format of the output file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A flame graph.
    Svg,
    /// Folded stacks, one per line.
    Folded,
    /// Events that Perfetto and chrome://tracing open.
    Trace,
}

/// Returns the format of a file with a path.
///
/// # Errors
/// Fails if the file has another extension.
pub fn form_of(path: &Path) -> anyhow::Result<Form> {
    if Extension::from_path(path) == Some(Extension::Json) {
        let name = printable(&path.to_string_lossy());
        say!(
            "whylate: {name} gets a trace for Perfetto, as before: name it .trace.json, as .json will be that of --json"
        );
        return Ok(Form::Trace);
    }
    chosen(path, &[(Extension::Svg, Form::Svg), (Extension::Folded, Form::Folded), (Extension::Trace, Form::Trace)])
}

/// Writes the path in a format.
///
/// # Errors
/// Fails if the writer does.
pub fn write_file(out: &mut dyn Write, form: Form, explained: &Explained) -> io::Result<()> {
    match form {
        Form::Trace => write_line(out, &events(&explained.path))?,
        Form::Folded => write_lines(out, &folded(&explained.path))?,
        Form::Svg => {
            let legend = "light blue: worked; orange: others occupied its CPU; gray: waited";
            svg::write_frames(out, "Critical path", legend, &frames(&explained.path))?;
        }
    }
    out.flush()
}

/// Returns stacks with their nanoseconds: the enclosing waits of each segment, and the segment. TIDs are stripped.
fn frames(path: &[PathSegment]) -> Vec<(Vec<Frame>, u64)> {
    let path: Vec<PathSegment> = path.iter().map(of_name).collect();
    let mut stacks: BTreeMap<Vec<Frame>, u64> = BTreeMap::new();
    for (segment, waits) in path.iter().zip(waits_of(&path)) {
        let mut frames: Vec<Frame> = waits.iter().map(|wait| Frame::new(Kind::Label, wait)).collect();
        frames.push(Frame::new(color_of(segment), &what(segment)));
        *stacks.entry(frames).or_default() += segment.ns;
    }
    stacks.into_iter().collect()
}

/// Returns the kind of frame that colors a segment: work, a culprit, or a wait.
fn color_of(segment: &PathSegment) -> Kind {
    match segment.kind {
        _ if segment.is_ready() => Kind::Runnable,
        CauseKind::Running => Kind::User,
        CauseKind::Work | CauseKind::Irq | CauseKind::Softirq | CauseKind::Nmi | CauseKind::Steal => Kind::Runnable,
        _ => Kind::Between,
    }
}

/// Returns folded stacks, in microseconds.
fn folded(path: &[PathSegment]) -> Vec<String> {
    let joined = |frames: &[Frame]| frames.iter().map(|frame| frame.name.as_str()).collect::<Vec<_>>().join(";");
    let mut lines: BTreeMap<String, u64> = BTreeMap::new();
    for (frames, ns) in frames(path) {
        *lines.entry(joined(&frames)).or_default() += ns;
    }
    lines_of(lines)
}

/// Returns the enclosing waits of each segment, outermost first.
fn waits_of(path: &[PathSegment]) -> Vec<Vec<String>> {
    let named = |wait: Option<&PathSegment>| {
        // A waiter without own segments is unknown.
        let Some(wait) = wait else { return "...".to_owned() };
        let via = wait.via.as_deref().map_or_else(String::new, |via| format!(" in {via}"));
        printable(&format!("{} waited{via}", wait.waiter_name()))
    };
    within(path).into_iter().map(|waits| waits.into_iter().map(named).collect()).collect()
}

/// Returns the path as trace events (JSON) on one track, each wait around its segments.
fn events(path: &[PathSegment]) -> serde_json::Value {
    let event = |name: &str, begin_ns: u64, end_ns: u64| {
        let us = |ns: u64| ns as f64 / 1e3;
        json!({"name": name, "ph": "X", "pid": 1, "tid": 1, "ts": us(begin_ns), "dur": us(end_ns - begin_ns)})
    };
    let (mut events, mut now_ns) = (
        vec![json!({"name": "thread_name", "ph": "M", "pid": 1, "tid": 1,
                                                "args": {"name": "critical path"}})],
        0,
    );
    let mut open: Vec<(String, u64)> = Vec::new();
    for (segment, within) in path.iter().zip(waits_of(path)) {
        let same = open.iter().zip(&within).take_while(|((name, _), other)| name == *other).count();
        events.extend(open.drain(same..).map(|(name, began_ns)| event(&name, began_ns, now_ns)));
        open.extend(within[same..].iter().map(|name| (name.clone(), now_ns)));
        events.push(event(&what(segment), now_ns, now_ns + segment.ns));
        now_ns += segment.ns;
    }
    events.extend(open.into_iter().map(|(name, began_ns)| event(&name, began_ns, now_ns)));
    json!({"traceEvents": events, "displayTimeUnit": "ns"})
}

/// Writes the text report of a command.
pub fn write(
    out: &mut dyn Write,
    command: &str,
    explained: &Explained,
    lost: &BTreeMap<String, u64>,
    tree: Option<&Members>,
) -> io::Result<()> {
    let elapsed_ns = explained.elapsed_ns;
    writeln!(out, "\n{} took {}:", printable(command), format_ns(elapsed_ns))?;
    let unnumbered: Vec<PathSegment> = explained.path.iter().map(of_name).collect();
    path::write(out, &unnumbered, 2)?;
    let long = |ns: u64| ns as f64 * 100.0 / elapsed_ns.max(1) as f64 >= LONG_PERCENT;
    let longest: Vec<_> = explained.longest.iter().filter(|wait| long(wait.ns)).collect();
    if !longest.is_empty() {
        writeln!(out, "The longest waits on its path:")?;
    }
    for wait in longest {
        let first = wait.path.iter().find(|segment| segment.depth == 1).or_else(|| wait.path.first());
        let waiter = first.unwrap_or(&PathSegment::default()).waiter_name();
        let via = first.and_then(|segment| segment.via.as_deref());
        let via = via.map_or_else(String::new, |via| format!(" in {}", printable(via)));
        let after = format_ns(wait.after_ns);
        writeln!(out, "  after {after}: {} waited {}{via}", printable(&waiter), format_ns(wait.ns))?;
        path::write_wait(out, &wait.path, 4)?;
    }
    write_outsiders(out, explained)?;
    if let Some(members) = tree {
        processes::write(out, explained, members)?;
    }
    if !lost.is_empty() {
        let lost: Vec<String> =
            lost.iter().map(|(reason, count)| format!("{count} {}", reason.replace('_', " "))).collect();
        writeln!(out, "lost: {} (see whylate help lost)", lost.join(", "))?;
    }
    Ok(())
}

/// Writes culprits outside the command: those that occupied a CPU for which the path waited, and those it waited for.
fn write_outsiders(out: &mut dyn Write, explained: &Explained) -> io::Result<()> {
    // Merged segments have no owner, and a merged work item does not show that a thread waited for its CPU.
    let is_lost = |segment: &PathSegment| explained.is_folded && segment.who == whylate_model::path::OTHERS;
    let how = |segment: &PathSegment| match segment.kind {
        _ if segment.is_member || is_lost(segment) => None,
        CauseKind::Thread | CauseKind::Work if segment.is_ready() => Some(OCCUPIED_CPU),
        CauseKind::IrqsOff if segment.is_ready() => Some(IRQS_OFF),
        CauseKind::Throttled if segment.is_ready() => Some(THROTTLED),
        CauseKind::Running | CauseKind::Work => Some(WAITED_FOR),
        _ => None,
    };
    // By name, and the thread if it is the only one of its name.
    let mut by_name: BTreeMap<(String, &str), (u64, Option<&ActorName>)> = BTreeMap::new();
    for (segment, how) in explained.path.iter().filter_map(|segment| Some((segment, how(segment)?))) {
        let item = if segment.kind == CauseKind::Work { "work item " } else { "" };
        let (ns, thread) =
            by_name.entry((format!("{item}{}", of_name(segment).who), how)).or_insert((0, Some(&segment.who)));
        *ns += segment.ns;
        *thread = thread.filter(|thread| **thread == segment.who);
    }
    let named = by_name.into_iter().map(|((name, how), (ns, thread))| {
        let who = thread.filter(|thread| thread.is_thread()).map_or(name, ActorName::to_string);
        ((who, how), ns)
    });
    let mut sums: Vec<_> = named.collect();
    sums.sort_by(|(a, a_ns), (b, b_ns)| (Reverse(a_ns), a).cmp(&(Reverse(b_ns), b)));
    if sums.is_empty() {
        return Ok(());
    }
    let percent = |ns: u64| ns as f64 * 100.0 / explained.elapsed_ns.max(1) as f64;
    let all_ns: u64 = sums.iter().map(|(_, ns)| ns).sum();
    let all = format!("{}{}", if explained.is_folded { "at least " } else { "" }, format_ns(all_ns));
    writeln!(out, "Others delayed it by {all} ({:.1}% of the elapsed time):", percent(all_ns))?;
    let shown = sums.iter().take(MAX_OUTSIDERS).take_while(|(_, ns)| percent(*ns) >= SMALL_PERCENT).count();
    let (shown, small) = sums.split_at(if sums.len() - shown > 1 { shown } else { sums.len() });
    for ((who, how), ns) in shown {
        writeln!(out, "  {:>5.1}% {:>8}  {} {how}", percent(*ns), format_ns(*ns), printable(who))?;
    }
    if !small.is_empty() {
        let small_ns: u64 = small.iter().map(|(_, ns)| ns).sum();
        writeln!(out, "  {:>5.1}% {:>8}  {} others", percent(small_ns), format_ns(small_ns), small.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use whylate_model::path::command::LongWait;

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
        let explained = Explained { elapsed_ns, path, is_folded: false, longest: vec![wait] };
        let lost = [("unseen_switches".to_owned(), 4), ("waits_not_followed".to_owned(), 12)].into();
        insta::assert_snapshot!(screens_of(|out, _| write(out, "make -j8", &explained, &lost, None)));
    }

    #[test]
    fn graph_tells_work_waits_and_culprits_apart() {
        let behind =
            PathSegment { ready: Some("cc1:5".parse().expect("any text")), ..part(20, CauseKind::Thread, "hog:7") };
        let path = [part(10, CauseKind::Running, "cc1:5"), behind, part(30, CauseKind::Disk, "vda (read by cc1:5)")];
        assert_eq!(path.each_ref().map(color_of), [Kind::User, Kind::Runnable, Kind::Between]);
        assert_eq!(
            folded(&path),
            ["at disk vda (read by cc1) 30000", "cc1 waited for a CPU behind hog 20000", "cc1 worked 10000"]
        );
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
        let explained = Explained { elapsed_ns: 111_000_000, path, is_folded: false, longest: Vec::new() };
        insta::assert_snapshot!(crate::render::text::text_of(|out| write_outsiders(out, &explained)), @r"
        Others delayed it by 66.0ms (59.5% of the elapsed time):
           36.0%   40.0ms  server:9 worked while the command waited for it
           18.0%   20.0ms  rustc:7 occupied its CPU
            2.7%   3.00ms  cgroup /a throttled it
            1.8%   2.00ms  dd:8 had interrupts off on its CPU
            0.9%   1.00ms  work item vmstat_update worked while the command waited for it
        ");
    }
}
