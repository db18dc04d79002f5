// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws the tables of a page: the verdicts on the sources, the culprits, and the late events.

use std::cmp::Reverse;
use std::fmt::Write as _;

use whylate_model::culprits::Culprit;
use whylate_model::overview::Overview;
use whylate_model::units::format_ns;

use super::Report;
use super::event::{self, main_cause};
use super::listed::ListedEvent;
use super::markup::{bar, count, head, name_cell, ns, sentence, share, text};
use crate::render::text::overview::{status, victims};
use crate::render::text::time_of_day::{in_zone, time_of_day};
use crate::render::text::why;

/// Maximum number of culprits and of late events that are shown without scripts.
const CULPRITS: usize = 30;
/// Culprits below this part of the delay are summed up.
const SMALL_PART: f64 = 0.005;
const LATE: usize = 50;
/// Duration from which timestamps get a date, as times of day repeat or nearly do.
pub const DAY_NS: u64 = 72_000_000_000_000;

/// Returns the table of the verdicts on the sources.
pub fn sources(look: &Overview, id: &str) -> String {
    let columns = ["<What waited", "<Source", "<Verdict", "Count", "p50", "p99", "Max", "Limit", "Late"];
    let mut out = format!("<div class=\"wide\"><table id=\"{id}\">{}<tbody>", head(&columns));
    for row in look.rows() {
        let class = if row.is_late { " class=\"late\"" } else { "" };
        let _ = writeln!(
            out,
            "<tr{class}>{}{}<td>{}</td>{}{}{}{}{}{}</tr>",
            name_cell(&row.of),
            name_cell(row.source),
            status(row.is_late),
            count(row.count),
            ns(row.p50_ns),
            ns(row.p99_ns),
            ns(row.max_ns),
            ns(Some(row.late_from_ns)),
            count(row.late)
        );
    }
    out + "</tbody></table></div>\n"
}

/// Returns the table of culprits. The prefix keeps the IDs of two such tables apart.
pub fn culprits(look: &Overview, prefix: &str) -> String {
    let all_ns: u64 = look.culprits.iter().map(|culprit| culprit.total_ns).sum();
    let rest = why::unexplained(&look.unexplained(), all_ns, "event");
    let rest = rest.map_or_else(String::new, |rest| format!("<p class=\"note whole\">{}</p>", sentence(&rest)));
    if look.culprits.is_empty() {
        return format!("<p>No culprit is known.</p>{rest}");
    }
    let mut out = format!(
        "<p>They caused <b id=\"{prefix}delay\" data-v=\"{all_ns}\">{}</b> of delay in total.</p>{rest}<div class=\"wide\"><table id=\"{prefix}culprits\">{}<tbody>",
        format_ns(all_ns),
        head(&["Share", "Delay", "<Bar", "<How", "<Who", "<Victims"])
    );
    let part = |culprit: &Culprit| culprit.total_ns as f64 / all_ns.max(1) as f64;
    let shown = look.culprits.iter().take(CULPRITS).take_while(|culprit| part(culprit) >= SMALL_PART).count();
    let (shown, others) = look.culprits.split_at(shown);
    for (number, culprit) in shown.iter().enumerate() {
        let part = part(culprit);
        let cgroup = culprit
            .cgroup
            .as_ref()
            .filter(|of| of.path != "/")
            .map_or_else(String::new, |of| format!(" <small>{}</small>", text(&of.path)));
        let _ = writeln!(
            out,
            "<tr data-row=\"{number}\">{}{}{}<td>{}</td><td>{}{cgroup}</td><td>{}</td></tr>",
            share(part),
            ns(Some(culprit.total_ns)),
            bar(part),
            why::how(culprit.kind, &culprit.who),
            text(&why::actor(&culprit.who)),
            sentence(&victims(culprit))
        );
    }
    out += "</tbody></table></div>\n";
    let more = match others.len() as u64 {
        0 => String::new(),
        more => {
            let ns = others.iter().map(|culprit| culprit.total_ns).sum();
            format!("{} caused {} more.", why::counted(more, "other"), format_ns(ns))
        }
    };
    // The script has others in a part of the span.
    let _ = writeln!(out, "<p class=\"note\" id=\"{prefix}more-culprits\">{more}</p>");
    out
}

/// The columns of late events, without the row of details.
const COLUMNS: [&str; 6] = ["<At", "<Source", "Latency", "<Who was late", "CPU", "<Main cause"];

/// Returns the table of late events, the longest first.
pub fn late(report: &Report) -> String {
    let mut order: Vec<&ListedEvent> = report.late.iter().collect();
    order.sort_by_key(|late| Reverse(late.event.latency_ns));
    if order.is_empty() {
        return "<p>Nothing was late by these limits.</p>\n".to_owned();
    }
    let mut out = format!("<div class=\"wide\"><table id=\"late\">{}<tbody>", head(&COLUMNS));
    for late in order.iter().take(LATE) {
        out += &late_row(late, report);
        let details = event::write(&late.event);
        if !details.is_empty() {
            let _ = writeln!(
                out,
                "<tr class=\"more\"><td colspan=\"{}\"><details><summary>Why</summary>{details}</details></td></tr>",
                COLUMNS.len()
            );
        }
    }
    out + "</tbody></table></div>\n"
}

fn late_row(late: &ListedEvent, report: &Report) -> String {
    let event = &late.event;
    let subject = name_cell(if event.subject.is_empty() { "-" } else { &event.subject });
    format!(
        "<tr><td data-v=\"{}\">{}</td>{}{}{subject}{}<td>{}</td></tr>\n",
        event.at_unix_ns,
        at(event.at_unix_ns, report),
        name_cell(late.card.name),
        ns(Some(event.latency_ns)),
        count(Some(event.cpu.into())),
        text(&main_cause(event))
    )
}

/// Formats a time of day, with the date in a long recording.
fn at(unix_ns: u64, report: &Report) -> String {
    let time = time_of_day(unix_ns, &report.zone);
    match report.look.duration_ns < DAY_NS {
        true => time,
        false => format!("{} {time}", in_zone(unix_ns, &report.zone, "%m-%d")),
    }
}

/// Says how many of the late events the file has, and how many the page shows without scripts.
pub fn count_note(report: &Report) -> String {
    let (listed, all) = (report.late.len() as u64, report.late_count);
    let shown = report.late.len().min(LATE);
    let note = match listed < all {
        true => format!(
            "Of {all} late events this file has {listed}: the worst and the newest of each source, and the worst of each span of time. All of them count in the figures. "
        ),
        false => String::new(),
    };
    match shown < report.late.len() {
        true => format!("{note}Without scripts, the {shown} longest are shown."),
        false => note,
    }
}
