// SPDX-License-Identifier: MIT OR Apache-2.0
//! One late event: its path in time, its causes, and the stacks of everybody in it.

use std::fmt::Write as _;

use whylate_model::LateEvent;
use whylate_model::units::format_ns;

use super::markup::{name, ns, sentence, share, text};
use super::timeline::{WIDTH, swatch};
use crate::output::path::what_in_whose_wait;
use crate::output::why::how;

/// Shorter parts of a path are told together where it has more than so many.
const PARTS: usize = 100;
/// Of a stack, so many frames.
const FRAMES: usize = 64;

/// A part of an event's time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub ns: u64,
    /// As in JSON.
    pub kind: &'static str,
    pub text: String,
    pub depth: u32,
}

/// A stack and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    pub of: String,
    pub frames: &'a [String],
}

/// Whether its parts are in order of time: those of a path are, sums are not.
pub fn is_in_order(event: &LateEvent) -> bool {
    !event.path.is_empty()
}

/// The parts of its time, in order where that is known; they add up to it.
pub fn parts(event: &LateEvent) -> Vec<Part> {
    if !is_in_order(event) {
        let part = |cause: &whylate_model::Cause| Part {
            ns: cause.ns,
            kind: cause.kind.name(),
            text: format!("{} {}", how(cause.kind, &cause.who), cause.who),
            depth: 0,
        };
        return event.causes.iter().map(part).collect();
    }
    let mut parts: Vec<Part> = Vec::new();
    for segment in event.path.iter().filter(|segment| segment.ns > 0) {
        let (kind, text) = (segment.kind.name(), what_in_whose_wait(segment));
        match parts.last_mut() {
            Some(last) if last.kind == kind && last.text == text => last.ns += segment.ns,
            _ => parts.push(Part { ns: segment.ns, kind, text, depth: segment.depth }),
        }
    }
    without_short(parts, event.latency_ns)
}

/// Parts that nobody could see in the picture, as one with their neighbours.
fn without_short(parts: Vec<Part>, whole_ns: u64) -> Vec<Part> {
    if parts.len() <= PARTS {
        return parts;
    }
    let mut kept: Vec<Part> = Vec::new();
    let (least_ns, short) = (whole_ns / PARTS as u64, "several short parts");
    for part in parts {
        match kept.last_mut() {
            Some(last) if part.ns < least_ns && last.text == short => last.ns += part.ns,
            _ if part.ns < least_ns => kept.push(Part { kind: "unknown", text: short.to_owned(), ..part }),
            _ => kept.push(part),
        }
    }
    kept
}

/// The stacks of who waited, of whom it waited for, and of who made it late.
pub fn places(event: &LateEvent) -> Vec<Place<'_>> {
    let mut places = Vec::new();
    add(&mut places, format!("Victim: {}", event.subject), &event.stack);
    add(&mut places, "Stack from an NMI while interrupts were off".to_owned(), &event.inside);
    let mut told: Vec<(&str, &[String])> = Vec::new();
    for segment in event.path.iter().filter(|segment| !segment.stack.is_empty()) {
        let waiter = segment.waiter.as_deref().unwrap_or("a thread");
        if segment.stack != event.stack && !told.contains(&(waiter, &segment.stack)) {
            told.push((waiter, &segment.stack));
            add(&mut places, format!("Waker: {waiter}, while it was blocked itself"), &segment.stack);
        }
    }
    for cause in &event.causes {
        add(&mut places, format!("Culprit: {} {}", how(cause.kind, &cause.who), cause.who), &cause.stack);
    }
    places
}

fn add<'a>(places: &mut Vec<Place<'a>>, of: String, frames: &'a [String]) {
    if !frames.is_empty() {
        places.push(Place { of, frames: &frames[..frames.len().min(FRAMES)] });
    }
}

/// What else is known of it.
pub fn facts(event: &LateEvent) -> Vec<(String, String)> {
    let labels = event.labels.iter().map(|(label, value)| (label.replace('_', " "), value.clone()));
    let at_most = event.at_most_ns.map(|ns| ("at most".to_owned(), format_ns(ns)));
    let phases = event.phases.iter().map(|(phase, ns)| (phase.replace('_', " "), format_ns(*ns)));
    labels.chain(at_most).chain(phases).collect()
}

/// All of it.
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
                text(&cause.who)
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
    for place in places(event) {
        let _ = write!(out, "<details><summary>{}</summary><ol class=\"frames\">", text(&place.of));
        place.frames.iter().for_each(|frame| out += &format!("<li>{}</li>", text(frame)));
        out += "</ol></details>";
    }
    out
}

fn picture(parts: &[Part], whole_ns: u64) -> String {
    let mut out = format!(
        "<svg class=\"path\" viewBox=\"0 0 {WIDTH} 10\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"The parts of its time; the list below tells each in words\">"
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

/// What most of it was due to.
pub fn main_cause(event: &LateEvent) -> String {
    let longest = event.causes.iter().max_by_key(|cause| cause.ns);
    longest.map_or_else(|| "-".to_owned(), |cause| name(&crate::output::why::culprit(cause.kind, &cause.who)))
}

#[cfg(test)]
mod tests {
    use whylate_model::path::PathSegment;
    use whylate_model::{Cause, CauseKind};

    use super::*;

    #[test]
    fn a_thread_that_slept_is_the_main_cause_by_its_name() {
        let of = |who: &str| {
            let causes = vec![Cause::new(CauseKind::Timer, who, 9)];
            main_cause(&LateEvent { causes, latency_ns: 9, ..LateEvent::default() })
        };
        assert_eq!(of("wl-copy:5837"), "wl-copy:5837 sleeping");
        assert_eq!(of("timeout in poll (curl:7)"), "timeout in poll (curl:7)");
    }

    #[test]
    fn parts_add_up_to_the_event_however_many_there_are() {
        let segment = |number: u64| PathSegment {
            ns: 1 + number % 7,
            kind: CauseKind::Running,
            who: format!("t:{number}"),
            waiter: Some("a:1".to_owned()),
            via: Some("futex".to_owned()),
            depth: 1,
            ..PathSegment::default()
        };
        let mut path: Vec<PathSegment> = (0..700).map(segment).collect();
        path.push(PathSegment {
            ns: 90_000,
            kind: CauseKind::Thread,
            who: "hog:7".to_owned(),
            ready: Some("a:1".to_owned()),
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
    fn everybodys_stack_is_told_once() {
        let stack = |name: &str| vec![name.to_owned(), "entry".to_owned()];
        let waits = |waiter: &str, frames: &str| PathSegment {
            waiter: Some(waiter.to_owned()),
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
        let told: Vec<String> = places(&event).into_iter().map(|place| place.of).collect();
        assert_eq!(told, ["Victim: a:1", "Waker: b:2, while it was blocked itself", "Culprit: interrupts off dd:4"]);
    }
}
