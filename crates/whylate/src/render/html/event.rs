// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws a late event: its path in time, its causes, and the stacks of all involved threads.

use std::fmt::Write as _;

use whylate_model::units::format_ns;
use whylate_model::{ActorName, LateEvent};

use super::markup::{name, ns, sentence, share, text};
use super::timeline::{WIDTH, swatch};
use crate::render::text::path::what_in_whose_wait;
use crate::render::text::why::{actor, how};

/// Maximum number of parts before short ones are merged with their neighbors.
const PARTS: usize = 100;
/// Maximum number of frames per stack.
const FRAMES: usize = 64;

/// A part of an event's latency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimePart {
    pub ns: u64,
    /// Kind of the cause, as in JSON.
    pub kind: &'static str,
    pub text: String,
    pub depth: u32,
}

/// A stack and its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedStack<'a> {
    pub owner: String,
    pub frames: &'a [String],
}

/// Returns whether the parts are in order of time: those of a path are, sums are not.
pub fn is_in_order(event: &LateEvent) -> bool {
    !event.path.is_empty()
}

/// Returns the parts of the latency, in order of time if it is known. They add up to the latency.
pub fn parts(event: &LateEvent) -> Vec<TimePart> {
    if !is_in_order(event) {
        let part = |cause: &whylate_model::Cause| TimePart {
            ns: cause.ns,
            kind: cause.kind.name(),
            text: format!("{} {}", how(cause.kind, &cause.who), actor(&cause.who)),
            depth: 0,
        };
        return event.causes.iter().map(part).collect();
    }
    let mut parts: Vec<TimePart> = Vec::new();
    for segment in event.path.iter().filter(|segment| segment.ns > 0) {
        let (kind, text) = (segment.kind.name(), what_in_whose_wait(segment));
        match parts.last_mut() {
            Some(last) if last.kind == kind && last.text == text => last.ns += segment.ns,
            _ => parts.push(TimePart { ns: segment.ns, kind, text, depth: segment.depth }),
        }
    }
    merge_short(parts, event.latency_ns)
}

/// Merges adjacent parts that are too short to be visible in the picture.
fn merge_short(parts: Vec<TimePart>, whole_ns: u64) -> Vec<TimePart> {
    if parts.len() <= PARTS {
        return parts;
    }
    let mut merged: Vec<TimePart> = Vec::new();
    let (min_ns, short) = (whole_ns / PARTS as u64, "several short parts");
    for part in parts {
        match merged.last_mut() {
            Some(last) if part.ns < min_ns && last.text == short => last.ns += part.ns,
            _ if part.ns < min_ns => merged.push(TimePart { kind: "unknown", text: short.to_owned(), ..part }),
            _ => merged.push(part),
        }
    }
    merged
}

/// Returns the stacks of the victim, its wakers and the culprits.
pub fn stacks(event: &LateEvent) -> Vec<OwnedStack<'_>> {
    let mut stacks = Vec::new();
    add_stack(&mut stacks, format!("Victim: {}", event.subject), &event.stack);
    add_stack(&mut stacks, "Stack from an NMI while interrupts were off".to_owned(), &event.inside);
    let mut wakers: Vec<(ActorName, &[String])> = Vec::new();
    for segment in event.path.iter().filter(|segment| !segment.stack.is_empty()) {
        let waker = (segment.waiter_name(), &*segment.stack);
        if segment.stack != event.stack && !wakers.contains(&waker) {
            let waiter = &waker.0;
            add_stack(&mut stacks, format!("Waker: {waiter}, while it was blocked itself"), &segment.stack);
            wakers.push(waker);
        }
    }
    for cause in &event.causes {
        add_stack(&mut stacks, format!("Culprit: {} {}", how(cause.kind, &cause.who), actor(&cause.who)), &cause.stack);
    }
    stacks
}

fn add_stack<'a>(stacks: &mut Vec<OwnedStack<'a>>, owner: String, frames: &'a [String]) {
    if !frames.is_empty() {
        stacks.push(OwnedStack { owner, frames: &frames[..frames.len().min(FRAMES)] });
    }
}

/// Returns the labels, the upper bound of the latency, and the phases.
pub fn facts(event: &LateEvent) -> Vec<(String, String)> {
    let labels = event.labels.iter().map(|(label, value)| (label.replace('_', " "), value.clone()));
    let at_most = event.at_most_ns.map(|ns| ("at most".to_owned(), format_ns(ns)));
    let phases = event.phases.iter().map(|(phase, ns)| (phase.replace('_', " "), format_ns(*ns)));
    labels.chain(at_most).chain(phases).collect()
}

/// Returns the HTML of an event's details.
pub fn write(event: &LateEvent) -> String {
    let mut out = String::new();
    let parts = parts(event);
    if !parts.is_empty() {
        let heading = if is_in_order(event) { "In order of time" } else { "Sums, not in order of time" };
        let _ = write!(out, "<h4>{heading}</h4>{}", picture(&parts, event.latency_ns));
        out += "<ol class=\"parts\">";
        for part in &parts {
            let _ = write!(
                out,
                "<li>{}<b>{}</b> {}</li>",
                swatch(&format!("k-{}", part.kind)),
                format_ns(part.ns),
                sentence(&part.text)
            );
        }
        out += "</ol>";
    }
    if is_in_order(event) && !event.causes.is_empty() {
        out += "<h4>Causes, summed up</h4><table class=\"causes\"><thead><tr><th scope=\"col\" class=\"n\">Share</th><th scope=\"col\" class=\"n\">Time</th><th scope=\"col\">How</th><th scope=\"col\">Who</th></tr></thead><tbody>";
        for cause in &event.causes {
            let part = cause.ns as f64 / event.latency_ns.max(1) as f64;
            let _ = write!(
                out,
                "<tr>{}{}<td>{}</td><td>{}</td></tr>",
                share(part),
                ns(Some(cause.ns)),
                how(cause.kind, &cause.who),
                text(&actor(&cause.who))
            );
        }
        out += "</tbody></table>";
    }
    let facts = facts(event);
    if !facts.is_empty() {
        out += "<dl class=\"facts\">";
        for (what, value) in facts {
            let _ = write!(out, "<div><dt>{}</dt><dd>{}</dd></div>", text(&what), text(&value));
        }
        out += "</dl>";
    }
    for stack in stacks(event) {
        let _ = write!(out, "<details><summary>{}</summary><ol class=\"frames\">", text(&stack.owner));
        stack.frames.iter().for_each(|frame| out += &format!("<li>{}</li>", text(frame)));
        out += "</ol></details>";
    }
    out
}

fn picture(parts: &[TimePart], whole_ns: u64) -> String {
    let mut out = format!(
        "<svg class=\"path\" viewBox=\"0 0 {WIDTH} 10\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"The parts of its time; the list below names each\">"
    );
    let (mut at, whole) = (0_u64, u128::from(whole_ns.max(1)));
    for part in parts {
        let x = |ns: u64| (u128::from(ns) * u128::from(WIDTH) / whole) as u64;
        let (from, to) = (x(at), x(at.saturating_add(part.ns)));
        at = at.saturating_add(part.ns);
        let width = to.saturating_sub(from).max(1);
        let _ = write!(out, "<path class=\"k-{}\" d=\"M{from} 0h{width}v10h-{width}z\"/>", part.kind);
    }
    out + "</svg>"
}

/// Names the cause with the most time.
pub fn main_cause(event: &LateEvent) -> String {
    let longest = event.causes.iter().max_by_key(|cause| cause.ns);
    longest.map_or_else(|| "-".to_owned(), |cause| name(&crate::render::text::why::culprit(cause.kind, &cause.who)))
}

#[cfg(test)]
mod tests {
    use whylate_model::path::PathSegment;
    use whylate_model::{Cause, CauseKind};

    use super::*;

    #[test]
    fn a_thread_that_slept_is_the_main_cause_by_its_name() {
        let of = |who: &str| {
            let causes = vec![Cause::new(CauseKind::Timer, who.parse::<ActorName>().expect("any text"), 9)];
            main_cause(&LateEvent { causes, latency_ns: 9, ..LateEvent::default() })
        };
        assert_eq!(of("wl-copy:5837"), "wl-copy:5837 sleeping");
        assert_eq!(of("timeout in poll (curl:7)"), "timeout in poll (curl:7)");
    }

    #[test]
    fn parts_add_up_to_latency() {
        let segment = |number: u64| PathSegment {
            ns: 1 + number % 7,
            kind: CauseKind::Running,
            who: ActorName::thread("t", number as u32),
            waiter: Some(ActorName::thread("a", 1)),
            via: Some("futex".to_owned()),
            depth: 1,
            ..PathSegment::default()
        };
        let mut path: Vec<PathSegment> = (0..700).map(segment).collect();
        path.push(PathSegment {
            ns: 90_000,
            kind: CauseKind::Thread,
            who: ActorName::thread("hog", 7),
            ready: Some(ActorName::thread("a", 1)),
            ..PathSegment::default()
        });
        let latency_ns = path.iter().map(|segment| segment.ns).sum();
        let event = LateEvent { path, latency_ns, ..LateEvent::default() };
        let parts = parts(&event);
        assert_eq!(parts.iter().map(|part| part.ns).sum::<u64>(), latency_ns);
        assert!(parts.len() == 2 && parts[1].text == "a:1 waited for a CPU behind hog:7", "{parts:?}");
        let few = LateEvent { path: event.path[..3].to_vec(), latency_ns: 6, ..LateEvent::default() };
        assert_eq!(super::parts(&few)[0].text, "t:0 worked (while a:1 waited in futex)");
    }

    #[test]
    fn lists_each_stack_once() {
        let stack = |name: &str| vec![name.to_owned(), "entry".to_owned()];
        let waits = |waiter: &str, frames: &str| PathSegment {
            waiter: Some(waiter.into()),
            stack: stack(frames),
            ns: 1,
            ..PathSegment::default()
        };
        let event = LateEvent {
            subject: "a:1".to_owned(),
            stack: stack("futex_wait"),
            path: vec![waits("a:1", "futex_wait"), waits("b:2", "io_schedule"), waits("b:2", "io_schedule")],
            causes: vec![Cause { stack: stack("console_unlock"), ..Cause::new(CauseKind::IrqsOff, "dd:4", 3) }],
            ..LateEvent::default()
        };
        let owners: Vec<String> = stacks(&event).into_iter().map(|stack| stack.owner).collect();
        assert_eq!(owners, ["Victim: a:1", "Waker: b:2, while it was blocked itself", "Culprit: interrupts off dd:4"]);
    }
}
