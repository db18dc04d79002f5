// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the page.

use std::fmt::Write as _;
use std::io::{self, Write};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::tz::TimeZone;
use sha2::{Digest as _, Sha256};
use whylate_model::overview::Overview;
use whylate_model::units::{counted, format_ns, format_span};
use whylate_model::{Card, Histogram};

use super::compare::Compared;
use super::markup::{count, head, name, ns, sentence, text};
use super::series::Column;
use super::timeline::Scale;
use super::{Report, data, flame, headline, series, tables, timeline};
use crate::render::text::overview::{Sentences, delayed, lost_events};
use crate::render::text::time_of_day::in_zone;

/// Number of culprits below the headline.
const FIRST_CULPRITS: usize = 3;
const STYLE: &str = include_str!("style.css");
/// One classic script: pages that are opened from a file cannot load modules.
const SCRIPT: &str = concat!(
    "(function () {\n\"use strict\";\n",
    include_str!("script/elements.js"),
    include_str!("script/sums.js"),
    include_str!("script/tables.js"),
    include_str!("script/graphs.js"),
    include_str!("script/selection.js"),
    "})();\n",
);

/// Command that made the page.
#[derive(Clone, Debug, Default)]
pub struct Made {
    /// The command line.
    pub command: String,
    pub version: String,
    pub at_unix_ns: u64,
    /// Command that replays the recording, up to the file's name.
    pub replay: String,
    /// File name for saving the embedded recording.
    pub saved_as: String,
}

/// Writes the page.
///
/// # Errors
/// Fails if the writer does.
pub fn write(out: &mut dyn Write, report: &Report, compared: Option<&Compared>, made: &Made) -> io::Result<()> {
    let headline = Sentences::new(&report.look.verdict()).to_string();
    let scale = match compared {
        Some(compared) => Scale::for_reports(&[report, &compared.other]),
        None => Scale::for_reports(&[report]),
    };
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text.as_bytes()));
    writeln!(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">")?;
    writeln!(
        out,
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'\">",
        hash(SCRIPT),
        hash(STYLE)
    )?;
    writeln!(
        out,
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">"
    )?;
    writeln!(out, "<meta name=\"generator\" content=\"whylate {}\">", text(&made.version))?;
    writeln!(out, "<title>{}: why it was late, {}</title>", text(&report.look.host), day(report))?;
    writeln!(out, "<style>{STYLE}</style>\n</head>\n<body>\n<main>")?;
    writeln!(out, "<header><p class=\"whylate\">whylate report</p>\n<h1>{}</h1>", sentence(&headline))?;
    if let Some(victim) = &report.victim {
        writeln!(out, "<p class=\"note whole\">{}</p>", sentence(&headline::sentence(victim)))?;
    }
    out.write_all(first_culprits(&report.look).as_bytes())?;
    out.write_all(about(report).as_bytes())?;
    writeln!(out, "</header>")?;
    if let Some(compared) = compared {
        out.write_all(compared.differences(&report.zone).as_bytes())?;
    }
    out.write_all(overview(report, &scale, compared).as_bytes())?;
    for (number, card) in report.ordered_as(report) {
        out.write_all(source_section(report, number, card).as_bytes())?;
    }
    out.write_all(embedded(report, made).as_bytes())?;
    writeln!(out, "</main>")?;
    out.write_all(data::block(report, &made.replay)?.as_bytes())?;
    let recording = STANDARD.encode(&report.embedded.bytes);
    writeln!(out, "<script type=\"application/octet-stream\" id=\"recording\">{recording}</script>")?;
    writeln!(out, "<script>{SCRIPT}</script>\n</body>\n</html>")
}

/// Returns a collapsed help text.
fn help(text: &str) -> String {
    format!("<details class=\"help\"><summary>How to read this</summary><p>{text}</p></details>\n")
}

fn day(report: &Report) -> String {
    in_zone(report.look.start_unix_ns, &report.zone, "%Y-%m-%d %H:%M")
}

/// Returns the first culprits, in the colors of the timeline.
fn first_culprits(look: &Overview) -> String {
    let all_ns = look.explained_ns();
    if all_ns == 0 {
        return String::new();
    }
    let total = format_ns(all_ns);
    let mut out = format!("<p class=\"note whole\">Main culprits, of {total} of delay</p>\n<ol class=\"first\">");
    for (rank, culprit) in look.culprits.iter().take(FIRST_CULPRITS).enumerate() {
        let about = format!("{}; {}", timeline::about(culprit, all_ns), delayed(culprit));
        let _ = writeln!(out, "<li>{}{}</li>", timeline::swatch(&format!("c{rank}")), sentence(&about));
    }
    out + "</ol>\n"
}

/// Returns what was measured, where and when: a line, one for each reason why it was kept, and one for each part of the
/// span that is missing.
fn about(report: &Report) -> String {
    let (from_ns, to_ns) = span(report);
    let ends = if to_ns.saturating_sub(from_ns) < tables::DAY_NS { "%H:%M:%S %:z" } else { "%Y-%m-%d %H:%M:%S %:z" };
    let (from, to) = (in_zone(from_ns, &report.zone, "%Y-%m-%d %H:%M:%S"), in_zone(to_ns, &report.zone, ends));
    let line = format!("{} ({}), {from} to {to}", name(&report.look.host), name(&report.header.kernel));
    let mut out = format!("<p class=\"what\">{}</p>\n", sentence(&line));
    for kept in &report.kept {
        let _ = writeln!(out, "<p class=\"what\">{}</p>", sentence(kept));
    }
    for missing in &report.missing {
        let _ = writeln!(out, "<p class=\"advice\">Missing: {}</p>", sentence(missing));
    }
    out
}

/// Returns the start and the end of the report.
fn span(report: &Report) -> (u64, u64) {
    let slots = report.slots.iter();
    slots.fold((u64::MAX, 0), |(from, to), slot| (slot.start_unix_ns.min(from), slot.end_unix_ns.max(to)))
}

/// Returns the folded table of facts: what was measured, lost and left out.
fn facts(report: &Report) -> String {
    let header = &report.header;
    let mut facts: Vec<(&str, String)> = Vec::new();
    let cpus = if header.cpus > 0 { format!(", {}", counted(header.cpus.into(), "CPU")) } else { String::new() };
    facts.push(("Machine", format!("{} ({}{cpus})", name(&report.look.host), name(&header.kernel))));
    let (from_ns, to_ns) = span(report);
    let utc = |ns: u64| in_zone(ns, &TimeZone::UTC, "%Y-%m-%d %H:%M:%S");
    let is_utc = [from_ns, to_ns].iter().all(|&ns| in_zone(ns, &report.zone, "%z") == "+0000");
    let in_utc = if is_utc { String::new() } else { format!("; in UTC {} to {}", utc(from_ns), utc(to_ns)) };
    let zone = report.zone.iana_name().map_or_else(String::new, |zone| format!(" ({})", name(zone)));
    let is_of_a_day = to_ns.saturating_sub(from_ns) < tables::DAY_NS;
    let ends = if is_of_a_day { "%H:%M:%S %:z" } else { "%Y-%m-%d %H:%M:%S %:z" };
    facts.push((
        "Time",
        format!(
            "{} to {}{zone}{in_utc}; {} in total",
            in_zone(from_ns, &report.zone, "%Y-%m-%d %H:%M:%S"),
            in_zone(to_ns, &report.zone, ends),
            format_span(to_ns.saturating_sub(from_ns))
        ),
    ));
    let measured: Vec<String> =
        header.sources.iter().map(|of| format!("{} ({})", name(&of.source), name(&of.backend))).collect();
    facts.push(("Measured", measured.join(", ")));
    facts.push(("Lost", lost(report)));
    facts.extend(report.kept.iter().map(|kept| ("Kept", kept.clone())));
    facts.extend(report.missing.iter().map(|missing| ("Missing", missing.clone())));
    let (ticks, each) = report.slots.ticks();
    if each > 1 {
        let length = format_ns(to_ns.saturating_sub(from_ns) / report.slots.len().max(1) as u64);
        facts.push((
            "Downsampled",
            format!("{ticks} snapshots of each source are merged into {} of some {length} each; figures over a span of these are exact", report.slots.len()),
        ));
    }
    if (report.late.len() as u64) < report.late_count {
        let listed = report.late.len() as u64;
        facts.push((
            "Not listed",
            format!(
                "{} of {} late events; all of them count in the figures",
                report.late_count - listed,
                report.late_count
            ),
        ));
    }
    facts.extend(
        report.look.unmeasured.iter().map(|of| ("Not measured", format!("{}: {}", name(&of.source), of.reason))),
    );
    let (left_out, limitations): (Vec<_>, Vec<_>) = report.look.limitations.iter().partition(|of| of.is_about_cpus());
    facts.extend(left_out.iter().map(|of| ("Not on all CPUs", format!("{}: {}", name(&of.source), of.reason))));
    let mut out = "<details class=\"help\" id=\"about\"><summary>What was measured, lost and left out</summary>\n\
                   <dl class=\"facts\" id=\"facts\">"
        .to_owned();
    for (what, value) in facts {
        let _ = writeln!(out, "<div><dt>{what}</dt><dd>{}</dd></div>", sentence(&value));
    }
    out += "</dl>\n";
    if !limitations.is_empty() {
        let notes = counted(limitations.len() as u64, "note");
        let _ = write!(out, "<details class=\"help\"><summary>Less precise on that machine: {notes}</summary><ul>");
        for of in limitations {
            let _ = write!(out, "<li>{}: {}</li>", text(&of.source), sentence(&of.reason));
        }
        out += "</ul></details>\n";
    }
    out + "</details>\n"
}

/// Lists the events that could not be counted, and why.
fn lost(report: &Report) -> String {
    let all = lost_events(&report.look);
    if all.is_empty() { "nothing".to_owned() } else { format!("{} (whylate help lost explains each)", all.join(", ")) }
}

/// Controls that the script shows, to select a span.
const SELECTION: &str = "<div id=\"selection\" hidden>
<p><label>From <input type=\"range\" id=\"from\" min=\"0\" value=\"0\" step=\"1\"></label>
<label>to <input type=\"range\" id=\"to\" min=\"0\" value=\"0\" step=\"1\"></label>
<button type=\"button\" id=\"all\">Whole span</button>
<output id=\"span\"></output></p>
<p class=\"note\" id=\"under\"></p>
<p class=\"note\">As text: <code id=\"command\"></code></p>
</div>
";

fn overview(report: &Report, scale: &Scale, compared: Option<&Compared>) -> String {
    let mut out = "<section id=\"when\"><h2>When it was late</h2>\n".to_owned();
    out += &help(
        "Each picture shows one source over time: the higher, the longer something took; the stronger the color, the more often. \
         Dots are late events, and the bars at the bottom are the delay that each culprit caused then. \
         The bars of a program show for which share of the time it was held up. \
         Drag over a picture, or use the two sliders, to select a span: everything below then covers only that span.",
    );
    let first = timeline::write(report, report, scale);
    let _ = match compared {
        Some(compared) => writeln!(
            out,
            "<div class=\"two\"><div class=\"run\" id=\"first\"><h3>Before</h3>\n{first}</div>\n<div class=\"run\"><h3>After</h3>\n{}</div></div>",
            timeline::write(&compared.other, report, scale)
        ),
        None => writeln!(out, "<div class=\"run\" id=\"first\">{first}</div>"),
    };
    let _ = writeln!(out, "{SELECTION}{}</section>", facts(report));
    out += &compared.map_or_else(String::new, Compared::other);
    out += "<section id=\"judged\"><h2>What each source found</h2>\n";
    out += &help(
        "A source is LATE if something took as long as its limit or longer. \
         p50 and p99 are the times that 50% and 99% of all took at most; they are at most 12.5% too high (timerlat: 1.6%); the maximum is exact. \
         Late counts those from the limit on.",
    );
    out += &tables::sources(&report.look, "sources");
    let next: Vec<String> = report
        .look
        .rows()
        .filter(|row| row.is_late)
        .map(|row| format!("<li><code>{}</code></li>", sentence(row.next)))
        .collect();
    if !next.is_empty() {
        let _ = writeln!(out, "<p>Look closer on that machine with:</p><ul class=\"next\">{}</ul>", next.concat());
    }
    out += "</section>\n<section id=\"who\"><h2>Culprits</h2>\n";
    out += &help(
        "Each late event's time is split into causes that add up to it; here they are added up by who caused them. \
         A culprit is whatever the event waited for, or behind: a thread, an interrupt, a work item, a disk, a limit, or the hypervisor. \
         Click one to see only the events and stacks that it had a part in.",
    );
    out += &tables::culprits(&report.look, "");
    out += "</section>\n<section id=\"events\"><h2>Late events</h2>\n";
    out += &help(
        "Each row is one wait that was late, with what most of it was due to. \
         Open one to see its time drawn in order, its causes, and the stacks of the victim, its wakers and the culprits. \
         Headings sort the table.",
    );
    let _ = writeln!(out, "<p id=\"how-many\">{}</p>", sentence(&tables::count_note(report)));
    out += &tables::late(report);
    out + "</section>\n"
}

fn source_section(report: &Report, number: usize, card: &Card) -> String {
    let Some(snapshot) = &report.whole[number] else { return String::new() };
    let what = if card.judged.of.is_empty() { card.events().of } else { card.judged.of };
    let heading = if what.is_empty() { card.name.to_owned() } else { format!("{}: {what}", card.name) };
    let mut out = format!(
        "<section class=\"source\" data-source=\"{}\" data-number=\"{number}\"><h2>{}</h2>\n",
        card.name,
        text(&heading)
    );
    let figures = report.found.iter().find(|found| found.card.name == card.name).map(super::SourceSummary::figures);
    if let Some(figures) = figures.filter(|figures| !figures.is_empty()) {
        out += &help(
            "Each bar covers durations twice as long as the bar to its left; its height is how many there were. \
             The table below it has the counts and percentiles. \
             Series further below are the same by what took the time.",
        );
        out += &histogram(&figures);
    }
    for advice in (card.advice)(snapshot) {
        let _ = writeln!(out, "<p class=\"advice\">{}</p>", sentence(&advice));
    }
    out += &series::shares(card, snapshot);
    out += &series::grouped(card, snapshot);
    if !snapshot.series.is_empty() {
        let columns = Column::all(card, report.snapshots(number));
        let _ = write!(out, "<h3>Series</h3>\n{}", series::table(&columns, snapshot, "series", data::SERIES));
        out += "<p class=\"note of-part\" hidden></p>\n";
    }
    let graphs = flame::graphs(report, number);
    if !graphs.is_empty() {
        out += &help(
            "Each box is a function or a name, as wide as the time that was spent in it and in what it called; the root, on top, is all of it. \
             Below a thread's own frames there may be its waker and what the waker did in that time. \
             Click a box to zoom in; search for the share of time in matching frames.",
        );
    }
    for graph in &graphs {
        let (idle_ns, all_ns) = graph.idle_ns();
        let _ = write!(out, "<div class=\"graph\"><h3>{}</h3>", text(&graph.title));
        if idle_ns > 0 && idle_ns < all_ns {
            let _ = write!(
                out,
                "<p class=\"note whole\">{} of {} of thread time is idle by design and hidden at first.</p>",
                format_ns(idle_ns),
                format_ns(all_ns)
            );
        }
        if graph.beyond_ns > 0 {
            let _ = write!(
                out,
                "<p class=\"note whole\">Another {} is in stacks beyond the first 10,000.</p>",
                format_ns(graph.beyond_ns)
            );
        }
        out += &graph.draw();
        out += "</div>\n";
    }
    out + "</section>\n"
}

/// Returns a bar for each power of two, and percentiles.
fn histogram(figures: &Histogram) -> String {
    let mut rows: Vec<(u32, u64)> = Vec::new();
    for (range, count) in figures.iter() {
        let middle = range.start() / 2 + range.end() / 2 + (range.start() & range.end() & 1);
        let power = middle.checked_ilog2().unwrap_or(0);
        match rows.last_mut() {
            Some((last, sum)) if *last == power => *sum += count,
            _ => rows.push((power, count)),
        }
    }
    let (low, high) = (rows.first().map_or(0, |row| row.0), rows.last().map_or(0, |row| row.0));
    let max = rows.iter().map(|row| row.1).max().unwrap_or(1).max(1);
    let mut path = String::new();
    for (power, count) in &rows {
        let height = (*count as f64 / max as f64 * 100.0).max(1.0);
        let _ = write!(path, "M{} {:.1}h9v{height:.1}h-9z", (power - low) * 10, 100.0 - height);
    }
    let bound = |power: u32| format_ns(1_u64.checked_shl(power).unwrap_or(u64::MAX));
    let width = (high - low + 1) * 10;
    let quantile = |share| ns(Some(figures.quantile_ns(share)));
    format!(
        "<svg class=\"histogram\" viewBox=\"0 0 {width} 100\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Histogram; the table below has its percentiles\"><path d=\"{path}\"/></svg>\n\
         <ol class=\"x\"><li>{}</li><li>{}</li><li>{}</li></ol>\n\
         <div class=\"wide\"><table class=\"percentiles\">{}<tbody><tr>{}{}{}{}{}{}</tr></tbody></table></div>\n",
        bound(low),
        bound((low + high).div_ceil(2)),
        bound(high + 1),
        head(&["Count", "p50", "p90", "p99", "p99.9", "Max"]),
        count(Some(figures.count())),
        quantile(0.5),
        quantile(0.9),
        quantile(0.99),
        quantile(0.999),
        ns(Some(figures.max_ns()))
    )
}

/// Returns the section of the embedded recording, and of how the page was made.
fn embedded(report: &Report, made: &Made) -> String {
    let kib = report.embedded.bytes.len().div_ceil(1024);
    let what = match report.embedded.is_whole {
        true => "This file contains the recording that it was made from",
        false => "This file contains a recording of the merged snapshots, with the late events that are shown here",
    };
    let mut out = format!("<section id=\"raw\"><h2>Raw data</h2>\n<p>{what} ({kib} KiB).</p>\n");
    let _ = writeln!(
        out,
        "<p><button type=\"button\" id=\"save\" data-name=\"{}\" hidden>Save the recording</button></p>",
        text(&made.saved_as)
    );
    out += "<noscript><p>With scripts, a button saves it. Without, it is the base64 text of the script block with the id \"recording\".</p></noscript>\n";
    out += &help(
        "<code>whylate replay</code> and <code>whylate top</code> show a recording as if it were live; <code>whylate diff</code> compares two. \
         It is JSON lines in zstd frames, so <code>zstd -dc FILE | jq</code> reads it as well. \
         This page needs no network and no whylate.",
    );
    let at = in_zone(made.at_unix_ns, &TimeZone::UTC, "%Y-%m-%d %H:%M:%S UTC");
    let _ = writeln!(
        out,
        "<p>Made by whylate {} at {at}:</p>\n<pre><code>{}</code></pre>",
        text(&made.version),
        sentence(&made.command)
    );
    out + "</section>\n"
}
