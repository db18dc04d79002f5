// SPDX-License-Identifier: MIT OR Apache-2.0
//! View of a late event: causes, path or phases over time, and stacks.

use whylate_model::path::PathSegment;
use whylate_model::units::{format_ns, printable};
use whylate_model::{CauseKind, LateEvent};

use super::{late, program};
use crate::render::text::pad::{Left, Spaces};
use crate::render::text::{path, text_of, why};
use crate::top::panel::{Cell, Glyphs, Panel, Row};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

/// Width of the text beside a bar.
const BESIDE_BAR: usize = 60;
/// Parts below this share of the latency are summed up in one line.
const SMALL: f64 = 0.005;

pub fn panels(window: &Window, source: &'static str, tick: u64, index: usize, columns: usize) -> Vec<Panel> {
    let late = window.history.get(tick).and_then(|tick| tick.late.get(index));
    let Some((_, event)) = late.filter(|(card, _)| card.name == source) else {
        return vec![Panel::text("causes", "Late event", "This event is no longer kept.")];
    };
    let at = late::time_of_day(event.at_unix_ns, window);
    let who = printable(&event.subject);
    let title = format!("{source}: {who} waited {} until {at}, CPU {}", format_ns(event.latency_ns), event.cpu);
    let rows = event.causes.iter().enumerate().map(|(number, cause)| Row {
        key: number.to_string(),
        cells: vec![
            Cell::Share(cause.ns as f64 / event.latency_ns.max(1) as f64),
            Cell::Ns(cause.ns),
            Cell::Text(why::how(cause.kind, &cause.who).to_owned()),
            Cell::Text(why::actor(&cause.who)),
        ],
        is_late: false,
        opens: Some(ViewKind::Culprit(cause.kind, cause.who.clone())),
    });
    let nothing = "no causes were recorded";
    let mut panels = vec![Panel::table("causes", title, "SHARE, DELAY, <KIND, <WHO", rows.collect(), nothing)];
    let bar = columns.saturating_sub(BESIDE_BAR).clamp(8, 100);
    if !event.path.is_empty() {
        panels.push(Panel::text("time", "Timeline", &in_time(window.glyphs, event, bar)));
        panels.push(Panel::text("chain", "Wait chain", &text_of(|out| path::write_wait(out, &event.path, 0))));
    } else if !event.phases.is_empty() {
        let parts = event.phases.iter().map(|(name, ns)| (*ns, printable(name)));
        panels.push(Panel::text("time", "Timeline", &bars(window.glyphs, parts.collect(), event.latency_ns, bar)));
    }
    panels.extend(program::link(&event.labels));
    let about = about(event);
    if !about.is_empty() {
        panels.push(Panel::text("about", "Labels and stacks", &about));
    }
    panels
}

fn in_time(glyphs: Glyphs, event: &LateEvent, columns: usize) -> String {
    // A sleeper is named nowhere else on the line.
    let what = |segment: &PathSegment| match segment.kind {
        CauseKind::Timer => path::what_in_whose_wait(segment),
        _ => path::what(segment),
    };
    let parts = event.path.iter().map(|segment| (segment.ns, what(segment)));
    bars(glyphs, parts.collect(), event.latency_ns, columns)
}

/// Renders a line per part, with a bar at its position in time.
fn bars(glyphs: Glyphs, parts: Vec<(u64, String)>, total_ns: u64, columns: usize) -> String {
    let share = |ns: u64| ns as f64 / total_ns.max(1) as f64;
    let (mut text, mut before_ns, mut small) = (String::new(), 0_u64, (0_u64, 0_u64));
    for (ns, what) in &parts {
        let at = ((share(before_ns) * columns as f64) as usize).min(columns.saturating_sub(1));
        before_ns = before_ns.saturating_add(*ns);
        if share(*ns) < SMALL && parts.len() > 1 {
            small = (small.0 + 1, small.1.saturating_add(*ns));
            continue;
        }
        let room = columns - at;
        let bar = glyphs.bar(share(*ns) * columns as f64 / room as f64, room);
        text += &format!(
            "|{}{}| {:>5.1}% {:>8}  {what}\n",
            Spaces(at),
            Left(&bar, room),
            share(*ns) * 100.0,
            format_ns(*ns),
        );
    }
    if small.0 > 0 {
        text += &format!("and {}, {} in total\n", why::counted(small.0, "smaller part"), format_ns(small.1));
    }
    text
}

fn about(event: &LateEvent) -> String {
    let mut text = String::new();
    for (name, value) in &event.labels {
        text += &format!("{}: {}\n", printable(name), printable(value));
    }
    let mut stack = |title: &str, frames: &[String]| {
        if !frames.is_empty() {
            text += &format!("{title}:\n");
            frames.iter().for_each(|frame| text += &format!("    {}\n", printable(frame)));
        }
    };
    stack("Stack, innermost first", &event.stack);
    stack("Stack from an NMI while interrupts were off, innermost first", &event.inside);
    for cause in event.causes.iter().filter(|cause| !cause.stack.is_empty()) {
        stack(&format!("{}, {}", why::culprit(cause.kind, &cause.who), format_ns(cause.ns)), &cause.stack);
    }
    text
}
