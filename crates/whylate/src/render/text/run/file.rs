// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the path of a command to a file.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use whylate_model::CauseKind;
use whylate_model::folded::{BETWEEN, Frame, Kind, lines_of};
use whylate_model::path::command::Explained;
use whylate_model::path::{PathSegment, within};
use whylate_model::units::printable;
use whylate_model::work::{RunningStack, Work};

use crate::json::write_line;
use crate::render::extension::{Extension, chosen};
use crate::render::text::offcpu::{svg, write_lines};
use crate::render::text::path::{of_name, what};
use crate::render::text::work::has_enough_samples;

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
        Form::Folded | Form::Svg => write_stacks(out, form, "Critical path", frames(explained))?,
    }
    out.flush()
}

/// Writes stacks with their nanoseconds as a flame graph, or one per line in microseconds.
pub(crate) fn write_stacks(
    out: &mut dyn Write,
    form: Form,
    title: &str,
    stacks: Vec<(Vec<Frame>, u64)>,
) -> io::Result<()> {
    if form == Form::Svg {
        let legend = "light blue: worked; orange: others occupied its CPU; gray: waited";
        return svg::write_frames(out, title, legend, &stacks);
    }
    let joined = |frames: &[Frame]| frames.iter().map(|frame| frame.name.as_str()).collect::<Vec<_>>().join(";");
    let mut lines: BTreeMap<String, u64> = BTreeMap::new();
    for (frames, ns) in stacks {
        *lines.entry(joined(&frames)).or_default() += ns;
    }
    write_lines(out, &lines_of(lines))
}

/// Adds the segments of a path with the waits that enclose them, below a frame.
pub(crate) fn add_path(stacks: &mut BTreeMap<Vec<Frame>, u64>, root: &Frame, path: &[PathSegment]) {
    let path: Vec<PathSegment> = path.iter().map(of_name).collect();
    for (segment, waits) in path.iter().zip(waits_of(&path)) {
        let waits = waits.iter().map(|wait| Frame::new(Kind::Label, wait));
        let mut frames: Vec<Frame> = [root.clone()].into_iter().chain(waits).collect();
        frames.push(Frame::new(color_of(segment), &what(segment)));
        *stacks.entry(frames).or_default() += segment.ns;
    }
}

/// Returns stacks with their nanoseconds: the enclosing waits of each segment, and the segment. TIDs are stripped. Work is
/// split by the stacks of the threads of its name.
fn frames(explained: &Explained) -> Vec<(Vec<Frame>, u64)> {
    let path: Vec<PathSegment> = explained.path.iter().map(of_name).collect();
    let mut stacks: BTreeMap<Vec<Frame>, u64> = BTreeMap::new();
    let mut worked: BTreeMap<(Vec<Frame>, &str), u64> = BTreeMap::new();
    for (segment, waits) in path.iter().zip(waits_of(&path)) {
        let mut frames: Vec<Frame> = waits.iter().map(|wait| Frame::new(Kind::Label, wait)).collect();
        frames.push(Frame::new(color_of(segment), &what(segment)));
        match segment.who.comm() {
            Some(thread) if segment.is_member && segment.kind == CauseKind::Running => {
                *worked.entry((frames, thread)).or_default() += segment.ns;
            }
            _ => *stacks.entry(frames).or_default() += segment.ns,
        }
    }
    let work = explained.work.as_ref().filter(|work| has_enough_samples(work));
    for ((frames, thread), ns) in worked {
        split(frames, ns, thread, work, &mut stacks);
    }
    stacks.into_iter().collect()
}

/// Adds the time that threads of a name worked, by the samples of their stacks.
fn split(frames: Vec<Frame>, ns: u64, thread: &str, work: Option<&Work>, stacks: &mut BTreeMap<Vec<Frame>, u64>) {
    let of_thread = || work.iter().flat_map(|work| &work.stacks).filter(|(name, ..)| name == thread);
    let all_ns: u64 = of_thread().map(|(_, _, ns)| ns).sum();
    let mut left_ns = ns;
    for (_, stack, of_ns) in of_thread() {
        let part_ns = (u128::from(ns) * u128::from(*of_ns) / u128::from(all_ns.max(ns).max(1))) as u64;
        let frames = frames.iter().cloned().chain(functions(stack)).collect();
        *stacks.entry(frames).or_default() += part_ns;
        left_ns -= part_ns;
    }
    if left_ns > 0 {
        *stacks.entry(frames).or_default() += left_ns;
    }
}

/// Returns the frames of a running thread's stack, outermost first.
pub(crate) fn functions(stack: &RunningStack) -> impl Iterator<Item = Frame> {
    let of = |kind| move |name: &Arc<str>| Frame::new(kind, name);
    let has_both = !stack.user.is_empty() && !stack.kernel.is_empty();
    let between = has_both.then(|| Frame::new(Kind::Between, BETWEEN));
    let user = stack.user.iter().rev().map(of(Kind::User));
    user.chain(between).chain(stack.kernel.iter().rev().map(of(Kind::Kernel)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::text::text_of;

    fn folded(explained: &Explained) -> Vec<String> {
        let text = text_of(|out| write_file(out, Form::Folded, explained));
        text.lines().map(str::to_owned).collect()
    }

    fn part(ms: u64, kind: CauseKind, who: &str) -> PathSegment {
        PathSegment { ns: ms * 1_000_000, kind, who: who.parse().expect("any text"), ..PathSegment::default() }
    }

    #[test]
    fn graph_tells_work_waits_and_culprits_apart() {
        let behind =
            PathSegment { ready: Some("cc1:5".parse().expect("any text")), ..part(20, CauseKind::Thread, "hog:7") };
        let path = [part(10, CauseKind::Running, "cc1:5"), behind, part(30, CauseKind::Disk, "vda (read by cc1:5)")];
        assert_eq!(path.each_ref().map(color_of), [Kind::User, Kind::Runnable, Kind::Between]);
        assert_eq!(
            folded(&Explained { path: path.to_vec(), ..Explained::default() }),
            ["at disk vda (read by cc1) 30000", "cc1 waited for a CPU behind hog 20000", "cc1 worked 10000"]
        );
    }

    #[test]
    fn work_is_split_by_stacks() {
        let stack = |user: &[&str], kernel: &[&str]| RunningStack {
            user: user.iter().map(|&name| name.into()).collect(),
            kernel: kernel.iter().map(|&name| name.into()).collect(),
            ..RunningStack::default()
        };
        let of = |thread: &str, stack, ms: u64| (thread.to_owned(), Arc::new(stack), ms * 1_000_000);
        let stacks = vec![
            of("cc1", stack(&["parse", "main"], &[]), 6),
            of("cc1", stack(&["read", "main"], &["vfs_read"]), 3),
            of("as", stack(&["main"], &[]), 9),
        ];
        let path = vec![PathSegment { is_member: true, ..part(10, CauseKind::Running, "cc1:5") }];
        let folded_with = |samples| {
            let work = Some(Work {
                ns: 18_000_000,
                samples,
                equal_samples: samples,
                stacks: stacks.clone(),
                ..Work::default()
            });
            folded(&Explained { path: path.clone(), work, ..Explained::default() })
        };
        let parts = ["cc1 worked 1000", "cc1 worked;main;parse 6000", "cc1 worked;main;read;-;vfs_read 3000"];
        assert!(parts.iter().all(|part| folded_with(20).iter().any(|line| line == part)), "{:?}", folded_with(20));
        assert_eq!(folded_with(19), ["cc1 worked 10000"], "too few samples");
    }
}
