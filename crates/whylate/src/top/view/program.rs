// SPDX-License-Identifier: MIT OR Apache-2.0
//! View of a program: what its threads spend their time on, its culprits, and where it waits.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

use whylate_model::overview::Gatherer;
use whylate_model::units::format_ns;
use whylate_model::wait::WaitClass;
use whylate_model::{Card, Labels, Snapshot, Stack};

use super::{frames, late, overview};
use crate::top::panel::{Cell, Panel, Row};
use crate::top::program_filter::{ProgramFilter, Stacks};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

const BAR: usize = 12;

pub fn panels(window: &Window, program: &ProgramFilter, columns: usize) -> Vec<Panel> {
    let snapshots: Vec<(&'static Card, Rc<Snapshot>)> =
        of_programs(window).into_iter().filter_map(|card| Some((card, window.merged(card)?))).collect();
    let stacks = || snapshots.iter().flat_map(|(_, snapshot)| &snapshot.stacks);
    let own = || stacks().filter(|stack| program.matches(&stack.labels));
    let late = || late::events(window).filter(|(.., event)| program.matches(&event.labels));
    let seen = own().map(|stack| &stack.labels).chain(late().map(|(.., event)| &event.labels)).next();
    let mut panels = vec![time(window, program, seen, own())];
    let mut gatherer = Gatherer::for_cards(window.cards(), window.rank_by);
    late().for_each(|(card, .., event)| gatherer.add_kept(card, event));
    let culprits = gatherer.finish_with(&[], Vec::new()).culprits;
    panels.push(overview::culprits_of(window, &culprits, columns));
    panels.push(late::panel(window, |_, event| program.matches(&event.labels)));
    // Only sources that follow wait chains have them.
    let followed = window.cards().into_iter().filter(|card| card.held_up.is_some());
    panels.extend(followed.filter_map(|card| frames::chains(window, card, program)));
    for (card, snapshot) in &snapshots {
        panels.extend(frames::panels(window, card, &snapshot.stacks, &Stacks::Program(program.clone()), columns));
    }
    panels
}

/// Returns the sources with stacks of processes.
fn of_programs(window: &Window) -> Vec<&'static Card> {
    let mut cards = window.cards();
    cards.retain(|card| window.ticks().any(|tick| tick.has_programs(card)));
    cards
}

/// Breaks down thread time by class of wait.
fn time<'a>(
    window: &Window,
    program: &ProgramFilter,
    seen: Option<&Labels>,
    stacks: impl Iterator<Item = &'a Stack>,
) -> Panel {
    let (mut classes, mut all_ns): (BTreeMap<WaitClass, (u64, u64)>, u64) = (BTreeMap::new(), 0);
    for stack in stacks {
        let Some(wait) = &stack.wait else { continue };
        let (ns, oldest_ns) = classes.entry(wait.class).or_default();
        *ns = ns.saturating_add(stack.weight_ns);
        *oldest_ns = (*oldest_ns).max(stack.age.max_ns());
        all_ns = all_ns.saturating_add(stack.weight_ns);
    }
    let mut order: Vec<_> = classes.into_iter().collect();
    order.sort_by_key(|(_, (ns, _))| Reverse(*ns));
    let rows = order.into_iter().map(|(class, (ns, oldest_ns))| {
        let share = ns as f64 / all_ns.max(1) as f64;
        Row {
            key: class.words().to_owned(),
            cells: vec![
                Cell::Share(share),
                Cell::Ns(ns),
                Cell::Ordered(window.glyphs.bar(share, BAR), ns),
                Cell::Text(class.words().to_owned()),
                if oldest_ns > 0 { Cell::Ns(oldest_ns) } else { Cell::Missing },
            ],
            is_late: false,
            opens: None,
        }
    });
    let title = format!(
        "{}, {} of thread time in {}",
        program.name(seen),
        format_ns(all_ns),
        format_ns(window.look.duration_ns)
    );
    let nothing = "none of its threads was seen in this span";
    Panel::table("time", title, "SHARE, TIME, =BAR, <CLASS, AGE-MAX", rows.collect(), nothing)
}

/// Builds a row that opens the program of these labels; `None` if they name none.
pub fn link(labels: &Labels) -> Option<Panel> {
    let program = ProgramFilter::from_labels(labels)?;
    let label = |name: &str| labels.get(name).map_or(Cell::Missing, |value| Cell::Text(value.clone()));
    let row = Row {
        key: "program".to_owned(),
        cells: vec![Cell::Text(program.name(Some(labels))), label("thread"), label("cgroup")],
        is_late: false,
        opens: Some(ViewKind::Program(program)),
    };
    Some(Panel::table("program", "Program", "<PROGRAM, <THREAD, <CGROUP", vec![row], ""))
}
