// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers as text. What has to hold of every answer is asserted here.

use std::fmt::Write as _;

use whylate_model::path::ThreadRecords;
use whylate_model::path::budget::{Budget, Waits, budget};
use whylate_model::path::command::{Explained, LongWait, explain};
use whylate_model::path::{Finding, PathBuilder, PathSegment, Query, walk};

use super::format::{Kind, Question, Timeline, ZERO_NS};

/// Returns the answer of this build to one question.
pub fn render(question: &Question, timeline: &mut Timeline) -> String {
    match question.kind {
        Kind::Span | Kind::Wait => path(question.asked[0], timeline),
        Kind::Command => command(question.asked[0], timeline),
        Kind::Budget => budget_of(&question.asked, timeline),
    }
}

/// A duration in microseconds.
fn us(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000, ns % 1_000)
}

fn sum_ns(segments: &[PathSegment]) -> u64 {
    segments.iter().map(|segment| segment.ns).sum()
}

/// One line for each segment: time, depth, kind, who; who was runnable, and which wait it is a part of.
fn write_segments(segments: &[PathSegment], text: &mut String) {
    for segment in segments {
        let PathSegment { ns, kind, who, ready, via, waiter, stop, depth, is_member, .. } = segment;
        write!(text, "{:>12}  {depth}  {:<10} {who}", us(*ns), kind.name()).expect("text");
        let cgroup = segment.cgroup.as_ref().map(|cgroup| format!(" in {}", cgroup.path));
        text.push_str(&cgroup.unwrap_or_default());
        text.push_str(if *is_member { " (member)" } else { "" });
        if let Some(ready) = ready {
            write!(text, "; {ready} runnable").expect("text");
        }
        if let Some(waiter) = waiter {
            write!(text, "; {waiter} ").expect("text");
            text.push_str(&match (via, stop) {
                (Some(via), None) => format!("waits in {via}"),
                (None, None) => "waits".to_owned(),
                (via, Some(stop)) => format!("waits: {} ({stop:?})", via.as_deref().unwrap_or("?")),
            });
        }
        text.push('\n');
    }
}

/// The path of a span or of the last wait: without a gap, back to the start of the question or the switch-out of the thread.
fn path(asked: Query, timeline: &mut Timeline) -> String {
    let (mut found, mut begins_ns, mut asleep_ns) = (PathBuilder::default(), asked.to_ns, None);
    walk(&mut timeline.past(), &[asked], &(), &mut |_, finding| {
        match finding {
            Finding::Segment(segment) => {
                assert_eq!(segment.to_ns, begins_ns, "a gap before {segment:?}");
                begins_ns = segment.from_ns;
            }
            Finding::Asleep { hop: 0, at_ns, .. } if asked.is_wait => asleep_ns = Some(at_ns),
            _ => {}
        }
        found.add(finding);
    });
    assert_eq!(begins_ns, asleep_ns.unwrap_or(asked.from_ns), "the beginning is missing");
    let path = found.finish(&mut timeline.symbols);
    assert_eq!(path.total_ns(), asked.to_ns - begins_ns, "the path does not add up");
    assert_eq!(path.causes().iter().map(|cause| cause.ns).sum::<u64>(), path.total_ns());
    let mut text = format!("path of {} us", us(path.total_ns()));
    if let Some(asleep_ns) = asleep_ns {
        write!(text, ", blocked at {}", us(asleep_ns - ZERO_NS)).expect("text");
    }
    text.push_str(if path.is_folded { ", folded\n" } else { "\n" });
    write_segments(&path.segments, &mut text);
    text
}

fn write_longest(longest: &[LongWait], text: &mut String) {
    for (number, LongWait { after_ns, ns, path }) in longest.iter().enumerate() {
        assert_eq!(sum_ns(path), *ns, "a long wait does not add up");
        writeln!(text, "longest wait {}: {} us, from {} us after the start", number + 1, us(*ns), us(*after_ns))
            .expect("text");
        write_segments(path, text);
    }
}

fn command(asked: Query, timeline: &mut Timeline) -> String {
    let explained = explain(&mut timeline.past(), asked, &(), &mut timeline.symbols, &ThreadRecords::default());
    let Explained { elapsed_ns, path, is_folded, longest, .. } = explained;
    assert_eq!(elapsed_ns, asked.to_ns - asked.from_ns);
    assert_eq!(sum_ns(&path), elapsed_ns, "the path does not add up");
    let mut text = format!("critical path of {} us{}\n", us(elapsed_ns), if is_folded { ", folded" } else { "" });
    write_segments(&path, &mut text);
    write_longest(&longest, &mut text);
    text
}

fn budget_of(asked: &[Query], timeline: &mut Timeline) -> String {
    let mut past = timeline.past();
    let Budget { threads, total_ns, on_cpu_ns, own_sleep_ns, ready, waits, longest, not_followed, .. } =
        budget(&mut past, asked, &timeline.known, &(), &mut timeline.symbols, &ThreadRecords::default());
    assert_eq!(total_ns, asked.iter().map(|asked| asked.to_ns - asked.from_ns).sum::<u64>());
    let waits_ns: u64 = waits.iter().map(|waits| waits.ns).sum();
    assert_eq!(on_cpu_ns + own_sleep_ns + ready.ns + waits_ns, total_ns, "the budget does not add up");
    let mut text = format!("budget of {threads} threads, {} us\n", us(total_ns));
    writeln!(text, "on CPU: {} us", us(on_cpu_ns)).expect("text");
    writeln!(text, "voluntary sleep: {} us", us(own_sleep_ns)).expect("text");
    let mut write_waits = |title: &str, waits: &Waits| {
        assert_eq!(sum_ns(&waits.path), waits.ns, "the path of {title} does not add up");
        writeln!(text, "{title}: {} us, {} waits", us(waits.ns), waits.latency.count()).expect("text");
        write_segments(&waits.path, &mut text);
    };
    write_waits("waiting for a CPU", &ready);
    for waits in &waits {
        let ended_by = waits.ended_by.map(|ended_by| format!("{ended_by:?}")).unwrap_or_default();
        write_waits(&format!("waits ({}), ended by {ended_by}", waits.via), waits);
    }
    write_longest(&longest, &mut text);
    writeln!(text, "not followed: {not_followed} waits").expect("text");
    text
}
