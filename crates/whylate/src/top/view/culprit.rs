// SPDX-License-Identifier: MIT OR Apache-2.0
//! View of a culprit: its victims, when it delayed them, and its stacks.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use whylate_model::culprits::By;
use whylate_model::units::{format_ns, printable};
use whylate_model::{ActorName, Cause, CauseKind, LateEvent};

use super::{late, program, ticks_per_part};
use crate::render::text::why;
use crate::top::panel::{Cell, Panel, Row};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

/// Maximum number of stacks.
const STACKS: usize = 5;
/// Width of the columns beside the graph.
const BESIDE_GRAPH: usize = 60;

/// Iterates over the causes by this culprit: an actor or, without a TID, all of that name, or all in that cgroup.
fn own<'a>(window: &Window, event: &'a LateEvent, kind: CauseKind, who: &ActorName) -> impl Iterator<Item = &'a Cause> {
    let by = window.rank_by;
    let is_it = move |cause: &&Cause| {
        cause.kind == kind && (cause.who == *who || cause.who.is_named(who) || *by.name_of(cause, event) == *who)
    };
    event.causes.iter().filter(is_it)
}

/// Returns the delay by this culprit, in nanoseconds.
fn delay(window: &Window, event: &LateEvent, kind: CauseKind, who: &ActorName) -> u64 {
    own(window, event, kind, who).fold(0, |all, cause| all.saturating_add(cause.ns))
}

/// Delays of one victim, or by one thread.
#[derive(Default)]
struct Delays {
    events: u64,
    total_ns: u64,
    worst_ns: u64,
}

impl Delays {
    fn add(&mut self, ns: u64) {
        self.events += 1;
        self.total_ns = self.total_ns.saturating_add(ns);
        self.worst_ns = self.worst_ns.max(ns);
    }
}

#[derive(Default)]
struct Victim {
    delays: Delays,
    /// Longest delay per column of the graph, in nanoseconds.
    over_time: Vec<Option<u64>>,
    /// Newest late event.
    event: Option<ViewKind>,
}

pub fn panels(window: &Window, kind: CauseKind, who: &ActorName, columns: usize) -> Vec<Panel> {
    let mut victims: BTreeMap<(&'static str, &str), Victim> = BTreeMap::new();
    let mut stacks: BTreeMap<&[String], (u64, u64)> = BTreeMap::new();
    let mut threads: BTreeMap<&ActorName, Delays> = BTreeMap::new();
    let graph = columns.saturating_sub(BESIDE_GRAPH).clamp(8, 60);
    let per_part = ticks_per_part(window, graph);
    let nothing = vec![Some(0); window.ticks().len().div_ceil(per_part)];
    for (card, tick, index, event) in late::events(window) {
        let ns = delay(window, event, kind, who);
        if ns == 0 {
            continue;
        }
        let victim = victims.entry((card.name, &event.subject)).or_default();
        victim.delays.add(ns);
        if victim.over_time.is_empty() {
            victim.over_time.clone_from(&nothing);
        }
        let part = (tick.saturating_sub(window.range.start.max(window.history.forgotten())) as usize) / per_part;
        if let Some(value) = victim.over_time.get_mut(part) {
            *value = Some(value.unwrap_or(0).max(ns));
        }
        victim.event.get_or_insert(ViewKind::Event(card.name, tick, index));
        for cause in own(window, event, kind, who) {
            threads.entry(&cause.who).or_default().add(cause.ns);
            if !cause.stack.is_empty() {
                let (count, ns) = stacks.entry(&cause.stack).or_default();
                (*count, *ns) = (*count + 1, ns.saturating_add(cause.ns));
            }
        }
    }
    let mut order: Vec<_> = victims.into_iter().collect();
    order.sort_by_key(|(_, victim)| Reverse(victim.delays.total_ns));
    let rows = order.into_iter().map(|((source, subject), victim)| Row {
        key: format!("{source} {subject}"),
        cells: vec![
            Cell::Text(source.to_owned()),
            Cell::Text(subject.to_owned()),
            Cell::Count(victim.delays.events),
            Cell::Ns(victim.delays.total_ns),
            Cell::Ns(victim.delays.worst_ns),
            Cell::Text(window.glyphs.spark(&victim.over_time, victim.delays.worst_ns)),
        ],
        is_late: false,
        opens: victim.event,
    });
    // A single thread is shown with its TID.
    let who = if threads.len() == 1 { threads.keys().next().copied().unwrap_or(who) } else { who };
    let title = format!("Victims of {}", why::culprit(kind, who));
    let victims_panel =
        Panel::table("victims", title, "<SOURCE, <VICTIM, EVENTS, TOTAL, WORST, =OVER TIME", rows.collect(), "nothing");
    let mut panels = vec![victims_panel, late::panel(window, |_, event| delay(window, event, kind, who) > 0)];
    let thread = threads.keys().next().copied().unwrap_or(who);
    if let (CauseKind::Thread, Some(comm), Some(_)) = (kind, thread.comm(), thread.tid()) {
        panels.extend(program::link(&[("thread".to_owned(), comm.to_owned())].into()));
    }
    if threads.len() > 1 {
        panels.push(alike(window, kind, threads));
    }
    if !stacks.is_empty() {
        panels.push(Panel::text("stacks", "Its stacks, innermost first", &stacks_in_words(stacks)));
    }
    panels
}

/// Lists the threads of that name or in that cgroup, a row each.
fn alike(window: &Window, kind: CauseKind, threads: BTreeMap<&ActorName, Delays>) -> Panel {
    let what = if window.rank_by == By::Cgroup { "in this cgroup" } else { "with this name" };
    let title = format!("{} threads {what}", threads.len());
    let all_ns = threads.values().fold(0_u64, |all, of| all.saturating_add(of.total_ns));
    let mut order: Vec<_> = threads.into_iter().collect();
    order.sort_by_key(|(_, of)| Reverse(of.total_ns));
    let rows = order.into_iter().map(|(who, of)| Row {
        key: who.to_string(),
        cells: vec![
            Cell::Share(of.total_ns as f64 / all_ns.max(1) as f64),
            Cell::Ns(of.total_ns),
            Cell::Count(of.events),
            Cell::Ns(of.worst_ns),
            Cell::Text(why::actor(who)),
        ],
        is_late: false,
        opens: Some(ViewKind::Culprit(kind, who.clone())),
    });
    Panel::table("alike", title, "SHARE, DELAY, TIMES, WORST, <WHO", rows.collect(), "none")
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
