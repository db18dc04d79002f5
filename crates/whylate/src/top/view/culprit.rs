// SPDX-License-Identifier: MIT OR Apache-2.0
//! Somebody who made others late: whom, when, and where in the code.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use whylate_model::units::{format_ns, printable};
use whylate_model::{CauseKind, LateEvent};

use super::{late, moments_per_part, program};
use crate::output::why;
use crate::top::panel::{Cell, Panel, Row};
use crate::top::state::{State, What};

/// So many of its stacks are shown.
const STACKS: usize = 5;
/// What the columns beside the graph take.
const BESIDE_GRAPH: usize = 60;

/// How long it kept that event waiting.
fn delay(event: &LateEvent, kind: CauseKind, who: &str) -> u64 {
    let causes = event.causes.iter().filter(|cause| cause.kind == kind && cause.who == who);
    causes.fold(0, |all, cause| all.saturating_add(cause.ns))
}

#[derive(Default)]
struct Victim {
    events: u64,
    total_ns: u64,
    worst_ns: u64,
    /// The worst of each part of the time that is shown.
    over_time: Vec<Option<u64>>,
    /// The latest of its events.
    event: Option<What>,
}

pub fn panels(state: &State, kind: CauseKind, who: &str, columns: usize) -> Vec<Panel> {
    let mut victims: BTreeMap<(&'static str, &str), Victim> = BTreeMap::new();
    let mut stacks: BTreeMap<&[String], (u64, u64)> = BTreeMap::new();
    let graph = columns.saturating_sub(BESIDE_GRAPH).clamp(8, 60);
    let per_part = moments_per_part(state, graph);
    let nothing = vec![Some(0); state.shown().len().div_ceil(per_part)];
    for (card, moment, place, event) in late::events(state) {
        let ns = delay(event, kind, who);
        if ns == 0 {
            continue;
        }
        let victim = victims.entry((card.name, &event.subject)).or_default();
        victim.events += 1;
        victim.total_ns = victim.total_ns.saturating_add(ns);
        victim.worst_ns = victim.worst_ns.max(ns);
        if victim.over_time.is_empty() {
            victim.over_time.clone_from(&nothing);
        }
        let part = (moment.saturating_sub(state.window.start.max(state.history.forgotten())) as usize) / per_part;
        if let Some(value) = victim.over_time.get_mut(part) {
            *value = Some(value.unwrap_or(0).max(ns));
        }
        victim.event.get_or_insert(What::Event(card.name, moment, place));
        for cause in event.causes.iter().filter(|cause| cause.kind == kind && cause.who == who) {
            if !cause.stack.is_empty() {
                let (count, ns) = stacks.entry(&cause.stack).or_default();
                (*count, *ns) = (*count + 1, ns.saturating_add(cause.ns));
            }
        }
    }
    let mut order: Vec<_> = victims.into_iter().collect();
    order.sort_by_key(|(_, victim)| Reverse(victim.total_ns));
    let rows = order.into_iter().map(|((source, subject), victim)| Row {
        key: format!("{source} {subject}"),
        cells: vec![
            Cell::Text(source.to_owned()),
            Cell::Text(subject.to_owned()),
            Cell::Count(victim.events),
            Cell::Ns(victim.total_ns),
            Cell::Ns(victim.worst_ns),
            Cell::Text(state.glyphs.spark(&victim.over_time, victim.worst_ns)),
        ],
        is_late: false,
        opens: victim.event,
    });
    let title = format!("Delayed by: {}", why::culprit(kind, who));
    let whom =
        Panel::table("victims", title, "<SOURCE, <VICTIM, EVENTS, TOTAL, WORST, <OVER TIME", rows.collect(), "nothing");
    let mut panels = vec![whom, late::panel(state, |_, event| delay(event, kind, who) > 0)];
    // A thread is called by its name and number.
    if let Some((thread, _)) = who.rsplit_once(':').filter(|_| kind == CauseKind::Thread) {
        panels.extend(program::link(&[("thread".to_owned(), thread.to_owned())].into()));
    }
    if !stacks.is_empty() {
        panels.push(Panel::text("stacks", "Its stacks, innermost first", &stacks_in_words(stacks)));
    }
    panels
}

fn stacks_in_words(stacks: BTreeMap<&[String], (u64, u64)>) -> String {
    let mut order: Vec<_> = stacks.into_iter().collect();
    order.sort_by_key(|(_, (_, ns))| Reverse(*ns));
    let mut text = String::new();
    for (stack, (count, ns)) in order.iter().take(STACKS) {
        text += &format!("{} in {}:\n", format_ns(*ns), why::counted(*count, "event"));
        stack.iter().for_each(|frame| text += &format!("    {}\n", printable(frame)));
    }
    if order.len() > STACKS {
        text += &format!("and {}\n", why::counted((order.len() - STACKS) as u64, "other stack"));
    }
    text
}
