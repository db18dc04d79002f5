// SPDX-License-Identifier: MIT OR Apache-2.0
//! Overview: what each source measured, the culprits, and the late events.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use whylate_model::Card;
use whylate_model::culprits::Culprit;
use whylate_model::overview::Headline;
use whylate_model::sources::named;
use whylate_model::units::format_ns;

use super::{late, over_time};
use crate::render::text::overview::of_figures;
use crate::render::text::why;
use crate::top::history::Tick;
use crate::top::panel::{Cell, Panel, Row};
use crate::top::state::{State, ViewKind};

/// Minimum width of the columns beside the graph.
const BESIDE_GRAPH: usize = 66;
const GRAPH: RangeInclusive<usize> = 12..=60;
/// Minimum screen width for a column of medians.
const WIDE: usize = 100;
const BAR: usize = 12;

pub fn panels(state: &State, columns: usize) -> Vec<Panel> {
    vec![sources(state, columns), culprits(state), late::panel(state, |_, _| true)]
}

/// A source's headline figure and its limit.
struct Judged<'a> {
    name: &'static str,
    of: Cow<'a, str>,
    late_from_ns: u64,
    late: Option<u64>,
    max_ns: Option<u64>,
    is_late: bool,
    value: fn(&State, &Tick, &Card) -> Option<u64>,
}

fn sources(state: &State, columns: usize) -> Panel {
    let graph = columns.saturating_sub(BESIDE_GRAPH).clamp(*GRAPH.start(), *GRAPH.end());
    let is_wide = columns >= WIDE;
    let mut rows = Vec::new();
    for source in &state.look.sources {
        let Some(card) = named(&source.source) else { continue };
        for (number, judged) in judged(source).into_iter().enumerate() {
            let values = over_time(state, graph, |tick| (judged.value)(state, tick, card));
            let figure = |ns| if number == 0 && source.count > 0 { Cell::Ns(ns) } else { Cell::Missing };
            let count = if number == 0 && !source.of.is_empty() { Cell::Count(source.count) } else { Cell::Missing };
            let mut cells = vec![
                Cell::Text(source.source.clone()),
                Cell::Text(if judged.is_late { "LATE" } else { "normal" }.to_owned()),
                count,
            ];
            cells.extend(is_wide.then(|| figure(source.p50_ns)));
            cells.extend([
                figure(source.p99_ns),
                judged.max_ns.map_or(Cell::Missing, Cell::Ns),
                judged.late.map_or(Cell::Missing, Cell::Count),
                Cell::Text(state.glyphs.spark(&values, judged.late_from_ns)),
                Cell::Text(judged.of.into_owned()),
            ]);
            rows.push(Row {
                key: format!("{}{}", source.source, judged.name),
                cells,
                is_late: judged.is_late,
                opens: Some(ViewKind::Source(card.name)),
            });
        }
    }
    for missing in &state.look.unmeasured {
        let mut cells = vec![Cell::Text(missing.source.clone()), Cell::Text("n/a".to_owned())];
        cells.resize(if is_wide { 8 } else { 7 }, Cell::Missing);
        cells.push(Cell::Text(missing.reason.clone()));
        rows.push(Row { key: format!("{} is not measured", missing.source), cells, is_late: false, opens: None });
    }
    let span = format_ns(state.look.duration_ns);
    let title = format!("Sources over {span}; full height = late");
    let p50 = if is_wide { "P50, " } else { "" };
    let columns = format!("<SOURCE, <VERDICT, COUNT, {p50}P99, MAX, LATE, =OVER TIME, <OF");
    Panel::table("sources", title, &columns, rows, "nothing measured yet")
}

fn judged(source: &Headline) -> Vec<Judged<'_>> {
    let has_figures = source.count > 0;
    let own_is_late = match source.late_of {
        Some(_) => has_figures && source.max_ns >= source.late_from_ns,
        None => source.is_late,
    };
    let mut all = vec![Judged {
        name: "",
        of: of_figures(source),
        late_from_ns: source.late_from_ns,
        late: Some(if source.late_of.is_none() { source.late } else { source.late_figures }),
        max_ns: has_figures.then_some(source.max_ns),
        is_late: own_is_late,
        value: |state, tick, card| {
            let late = card.events.is_none().then(|| worst(state, tick, card, false)).flatten();
            tick.summary(card)?.max_ns().or(late).or(Some(0))
        },
    }];
    let seen = |late: u64, max_ns: u64| (late > 0).then_some(max_ns);
    all.extend(source.late_of.as_ref().map(|of| Judged {
        name: " events",
        of: of.of.as_str().into(),
        late_from_ns: of.late_from_ns,
        late: Some(source.late),
        max_ns: seen(source.late, of.max_ns),
        is_late: source.late > 0,
        value: |state, tick, card| worst(state, tick, card, false),
    }));
    all.extend(source.held_up.as_ref().map(|of| Judged {
        name: " held up",
        of: of.of.as_str().into(),
        late_from_ns: of.late_from_ns,
        late: Some(of.late),
        max_ns: seen(of.late, of.max_ns),
        is_late: of.late > 0,
        value: |state, tick, card| worst(state, tick, card, true),
    }));
    all
}

/// Returns the longest late event of a tick; 0 if there is none, `None` if the source did not measure.
fn worst(state: &State, tick: &Tick, card: &Card, with_path: bool) -> Option<u64> {
    tick.summary(card)?;
    let late = tick.late_of(card).filter(|event| event.path.is_empty() != with_path && state.counts(card, event));
    Some(late.map(|event| event.latency_ns).max().unwrap_or(0))
}

fn culprits(state: &State) -> Panel {
    let culprits = &state.look.culprits;
    let all_ns = total_ns(culprits);
    let explained = state.look.unexplained().explained_percent(all_ns);
    let explained = explained.map_or_else(String::new, |percent| format!("; {percent:.1}% of late time explained"));
    culprits_of(state, culprits, "Who made others late", &explained)
}

fn total_ns(culprits: &[Culprit]) -> u64 {
    culprits.iter().fold(0_u64, |all, culprit| all.saturating_add(culprit.total_ns))
}

/// Lists culprits, a row each; the title is put together from its start and end.
pub fn culprits_of(state: &State, culprits: &[Culprit], title: &str, ends: &str) -> Panel {
    let all_ns = total_ns(culprits);
    let rows = culprits.iter().map(|culprit| {
        let share = culprit.total_ns as f64 / all_ns.max(1) as f64;
        let victims: Vec<String> = culprit
            .victims
            .iter()
            .map(|of| format!("{} {} (worst {})", of.source, times(of.events), format_ns(of.worst_ns)))
            .collect();
        // Keyed by name alone, so that the row stays the same when more threads of that name appear.
        let name = culprit.who.by_name();
        Row {
            key: format!("{} {name}", culprit.kind.name()),
            cells: vec![
                Cell::Share(share),
                Cell::Ns(culprit.total_ns),
                Cell::Ordered(state.glyphs.bar(share, BAR), culprit.total_ns),
                Cell::Text(why::culprit_label(culprit)),
                Cell::Text(victims.join(", ")),
            ],
            is_late: false,
            opens: Some(ViewKind::Culprit(culprit.kind, name)),
        }
    });
    let total = if all_ns > 0 { format!(", {} total", format_ns(all_ns)) } else { String::new() };
    let title = format!("{title}{total}{ends}");
    Panel::table("culprits", title, "SHARE, DELAY, <BAR, <WHO, <VICTIMS", rows.collect(), "no known culprits")
}

/// Formats a count of occurrences.
pub fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}
