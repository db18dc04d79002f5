// SPDX-License-Identifier: MIT OR Apache-2.0
//! Overview: the culprits, what each source measured, and the late events.

use std::ops::RangeInclusive;

use whylate_model::Card;
use whylate_model::culprits::{By, Culprit};
use whylate_model::late::LateKind;
use whylate_model::overview::RowKind;
use whylate_model::sources::named;
use whylate_model::units::format_ns;

use super::{late, over_time};
use crate::render::text::overview::programs::by;
use crate::render::text::overview::{delayed_events, status};
use crate::render::text::why;
use crate::top::history::Tick;
use crate::top::panel::{Cell, Panel, Row};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

/// Minimum width of the columns beside the graph.
const BESIDE_GRAPH: usize = 66;
const GRAPH: RangeInclusive<usize> = 12..=60;
/// Minimum screen width for a column of medians, and the width of the column.
const WIDE: usize = 100;
const MEDIANS: usize = 8;
const BAR: usize = 12;
/// Minimum screen width for the bars of culprits.
const WITH_BAR: usize = 60;
/// Minimum screen width for a column that describes what is measured.
const VERY_WIDE: usize = 150;
const DESCRIPTION: usize = 66;
/// Culprits below this share of the delay are merged into one row.
const SMALL_SHARE: f64 = 0.005;

pub fn panels(window: &Window, columns: usize) -> Vec<Panel> {
    let mut panels = vec![culprits(window, columns), sources(window, columns), late::panel(window, |_, _| true)];
    if !window.look.programs.held_up.is_empty() {
        panels.insert(1, programs(window));
    }
    panels
}

/// Lists the programs that were held up for a large share of the time.
fn programs(window: &Window) -> Panel {
    let all = &window.look.programs;
    let rows = all.held_up.iter().map(|of| {
        let latency = of.latency();
        let cells = vec![
            Cell::Share(of.share(all.covered_ns)),
            Cell::Text(of.program().to_string()),
            Cell::Count(latency.count()),
            Cell::Ns(latency.quantile_ns(0.5)),
            Cell::Text(by(all, of)),
        ];
        Row { key: of.program().to_string(), cells, is_late: true, opens: None }
    });
    let title = format!("HELD UP PROGRAMS over {}", format_ns(all.covered_ns));
    Panel::table("programs", title, "SHARE, <PROGRAM, WAITS, P50, ~BY", rows.collect(), "no program was held up")
}

fn sources(window: &Window, columns: usize) -> Panel {
    let (is_wide, is_very_wide) = (columns >= WIDE, columns >= VERY_WIDE);
    let beside = BESIDE_GRAPH + if is_wide { MEDIANS } else { 0 } + if is_very_wide { DESCRIPTION } else { 0 };
    let graph = columns.saturating_sub(beside).clamp(*GRAPH.start(), *GRAPH.end());
    let mut rows = Vec::new();
    for row in window.look.rows() {
        let Some(card) = named(row.source) else { continue };
        let values = over_time(window, graph, |tick| worst_of(window, tick, card, row.kind));
        let ns = |ns: Option<u64>| ns.map_or(Cell::Missing, Cell::Ns);
        let mut cells = vec![
            Cell::Text(row.judged.map_or(row.source, |judged| judged.row).to_owned()),
            Cell::Text(status(row.is_late).to_owned()),
            row.count.map_or(Cell::Missing, Cell::Count),
        ];
        cells.extend(is_wide.then(|| ns(row.p50_ns)));
        cells.extend([
            ns(row.p99_ns),
            ns(row.max_ns),
            Cell::Count(row.late.unwrap_or(0)),
            Cell::Text(window.glyphs.spark(&values, row.late_from_ns)),
        ]);
        cells.extend(is_very_wide.then(|| Cell::Text(row.of.into_owned())));
        let key = match row.kind {
            RowKind::Figures => "",
            RowKind::Events => " events",
            RowKind::HeldUp => " held up",
        };
        rows.push(Row {
            key: format!("{}{key}", row.source),
            cells,
            is_late: row.is_late,
            opens: Some(ViewKind::Source(card.name)),
        });
    }
    for missing in &window.look.unmeasured {
        let mut cells = vec![Cell::Text(missing.source.clone()), Cell::Text("n/a".to_owned())];
        cells.resize(if is_wide { 8 } else { 7 }, Cell::Missing);
        cells.extend(is_very_wide.then(|| Cell::Text(missing.reason.clone())));
        rows.push(Row {
            key: format!("{} is not measured", missing.source),
            cells,
            is_late: false,
            opens: page_of(&missing.source),
        });
    }
    for left_out in window.look.limitations.iter().filter(|of| of.is_about_cpus()) {
        let mut cells = vec![Cell::Text(left_out.source.clone()), Cell::Text("not all CPUs".to_owned())];
        cells.resize(if is_wide { 8 } else { 7 }, Cell::Missing);
        cells.extend(is_very_wide.then(|| Cell::Text(left_out.reason.clone())));
        rows.push(Row {
            key: format!("{} leaves CPUs out", left_out.source),
            cells,
            is_late: false,
            opens: page_of(&left_out.source),
        });
    }
    rows.sort_by_key(|row| !row.is_late);
    let span = format_ns(window.look.duration_ns);
    let title = format!("SOURCES over {span}; full bar = limit");
    let p50 = if is_wide { "P50, " } else { "" };
    let of = if is_very_wide { ", ~OF" } else { "" };
    let columns = format!("<WHAT WAITED, <VERDICT, COUNT, {p50}P99, MAX, LATE, =OVER TIME{of}");
    Panel::table("sources", title, &columns, rows, window.nothing("nothing was measured"))
}

/// Returns the page of a source, which says why it is not measured, or not on all CPUs.
fn page_of(source: &str) -> Option<ViewKind> {
    named(source).map(|card| ViewKind::Source(card.name))
}

/// Returns the largest value of a row in a tick.
fn worst_of(window: &Window, tick: &Tick, card: &Card, kind: RowKind) -> Option<u64> {
    if kind != RowKind::Figures {
        return worst(window, tick, card, kind == RowKind::HeldUp);
    }
    let late = card.events.is_none().then(|| worst(window, tick, card, false)).flatten();
    tick.summary(card)?.max_ns().or(late).or(Some(0))
}

/// Returns the longest late event of a tick; 0 if there is none, `None` if the source did not measure.
fn worst(window: &Window, tick: &Tick, card: &Card, is_held_up: bool) -> Option<u64> {
    tick.summary(card)?;
    let late = tick
        .late_of(card)
        .filter(|event| (event.kind != LateKind::Latency) == is_held_up && window.counts(card, event));
    Some(late.map(|event| event.latency_ns).max().unwrap_or(0))
}

fn culprits(window: &Window, columns: usize) -> Panel {
    let explained = window.look.unexplained().explained_percent(window.look.explained_ns());
    let explained = explained.map_or_else(String::new, |percent| format!("; {percent:.1}% of late time explained"));
    let panel = culprits_of(window, &window.look.culprits, columns);
    Panel { title: panel.title + &explained, ..panel }
}

fn total_ns(culprits: &[Culprit]) -> u64 {
    culprits.iter().fold(0_u64, |all, culprit| all.saturating_add(culprit.total_ns))
}

/// Lists culprits, a row each.
pub fn culprits_of(window: &Window, culprits: &[Culprit], columns: usize) -> Panel {
    let all_ns = total_ns(culprits);
    let share_of = |culprit: &Culprit| culprit.total_ns as f64 / all_ns.max(1) as f64;
    let shown = culprits.partition_point(|culprit| share_of(culprit) >= SMALL_SHARE);
    let (shown, small) = culprits.split_at(if culprits.len() - shown > 1 { shown } else { culprits.len() });
    let has_bar = columns >= WITH_BAR;
    let rows = shown.iter().map(|culprit| {
        let share = share_of(culprit);
        let mut cells = vec![Cell::Share(share), Cell::Ns(culprit.total_ns)];
        cells.extend(has_bar.then(|| Cell::Ordered(window.glyphs.bar(share, BAR), culprit.total_ns)));
        cells.extend([
            Cell::Text(why::culprit_label(culprit)),
            Cell::Ns(culprit.worst_ns()),
            Cell::Text(delayed_events(culprit)),
        ]);
        let name = match window.rank_by {
            // Keyed by name alone, so that the row stays the same when more threads of that name appear.
            By::Name => culprit.who.by_name(),
            By::Culprit | By::Cgroup => culprit.who.clone(),
        };
        Row {
            key: format!("{} {name}", culprit.kind.name()),
            cells,
            is_late: false,
            opens: Some(ViewKind::Culprit(culprit.kind, name)),
        }
    });
    let small_ns = total_ns(small);
    let others = (!small.is_empty()).then(|| {
        let mut cells = vec![Cell::Share(small_ns as f64 / all_ns.max(1) as f64), Cell::Ns(small_ns)];
        cells.extend(has_bar.then_some(Cell::Missing));
        cells.extend([Cell::Text(why::counted(small.len() as u64, "other")), Cell::Missing, Cell::Missing]);
        Row { key: "others".to_owned(), cells, is_late: false, opens: None }
    });
    let total = if all_ns > 0 { format!(", {} in total", format_ns(all_ns)) } else { String::new() };
    let bar = if has_bar { ", =BAR" } else { "" };
    Panel::table(
        "culprits",
        format!("CULPRITS{total}"),
        &format!("SHARE, DELAY{bar}, <WHO, WORST, ~DELAYED"),
        rows.chain(others).collect(),
        window.nothing("no known culprits"),
    )
}
