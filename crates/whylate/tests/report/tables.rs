// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables of a page and the output of `replay --json`, in one form.
#![allow(dead_code)]

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Cells of a table row: each cell's value, or its text if it has none.
pub type Row = Vec<String>;

/// Returns the rows of the table whose tag starts with `tag`, without details rows.
pub fn rows(page: &str, table: &str) -> Result<Vec<Row>> {
    let (_, rest) = page.split_once(table).with_context(|| format!("there is no {table}"))?;
    let (_, body) = rest.split_once("<tbody>").context("it has no body")?;
    let (body, _) = body.split_once("</tbody></table></div>").context("it does not end")?;
    let mut rows = Vec::new();
    for row in body.split("<tr").skip(1) {
        if row.starts_with(" class=\"more\"") {
            continue;
        }
        let cells = row.split("<td").skip(1).map(cell).collect::<Result<Row>>()?;
        if !cells.is_empty() {
            rows.push(cells);
        }
    }
    Ok(rows)
}

fn cell(text: &str) -> Result<String> {
    let (attributes, inside) = text.split_once('>').context("a cell does not end")?;
    if let Some((_, value)) = attributes.split_once("data-v=\"") {
        return Ok(value.split_once('"').context("a value does not end")?.0.to_owned());
    }
    let inside = inside.split_once("</td>").map_or(inside, |(inside, _)| inside);
    // Text between tags.
    let mut text = String::new();
    let mut is_tag = false;
    for c in inside.chars() {
        match c {
            '<' => is_tag = true,
            '>' => is_tag = false,
            c if !is_tag => text.push(c),
            _ => {}
        }
    }
    Ok(unescaped(&text))
}

/// Returns text without entities.
pub fn unescaped(text: &str) -> String {
    text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'").replace("&amp;", "&")
}

fn figure(of: &Value, is_known: bool) -> String {
    if is_known { of.to_string() } else { "-".to_owned() }
}

/// Returns the expected table of sources for an overview, without verdicts.
pub fn sources(look: &Value) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for of in look["sources"].as_array().context("sources")? {
        let (count, late) = (of["count"].as_u64().context("count")?, of["late"].as_u64().context("late")?);
        let (is_known, has_events) = (count > 0, of["late_of"].is_object());
        let is_late = if has_events {
            is_known && of["max_ns"].as_u64() >= of["late_from_ns"].as_u64()
        } else {
            of["is_late"] == true
        };
        let verdict = |is_late| if is_late { "LATE" } else { "ok" }.to_owned();
        let what = of["remark"].as_str().filter(|remark| !remark.is_empty()).or(of["of"].as_str()).unwrap_or_default();
        let recorded = if has_events { 0 } else { late };
        let late_cell = match recorded.max(of["late_figures"].as_u64().context("late_figures")?) {
            _ if !is_late => "0".to_owned(),
            0 => "-".to_owned(),
            late => late.to_string(),
        };
        let source = of["source"].as_str().context("source")?.to_owned();
        rows.push(vec![
            what.to_owned(),
            source.clone(),
            verdict(is_late),
            figure(&of["count"], of["of"] != ""),
            figure(&of["p50_ns"], is_known),
            figure(&of["p99_ns"], is_known),
            figure(&of["max_ns"], is_known),
            of["late_from_ns"].to_string(),
            late_cell,
        ]);
        for (events, count) in [(&of["late_of"], &of["late"]), (&of["held_up"], &of["held_up"]["late"])] {
            if !events.is_object() {
                continue;
            }
            let count = count.as_u64().context("how many")?;
            let unknown = || "-".to_owned();
            rows.push(vec![
                events["of"].as_str().context("of")?.to_owned(),
                source.clone(),
                verdict(count > 0),
                unknown(),
                unknown(),
                unknown(),
                figure(&events["max_ns"], count > 0),
                events["late_from_ns"].to_string(),
                count.to_string(),
            ]);
        }
    }
    Ok(rows)
}

/// Returns the expected table of culprits: delay, name, and victims.
pub fn culprits(look: &Value) -> Result<Vec<(u64, String, String)>> {
    let of_culprit = |of: &Value| -> Result<(u64, String, String)> {
        let mut victims = Vec::new();
        for victim in of["victims"].as_array().context("victims")? {
            let events = victim["events"].as_u64().context("events")?;
            let times = if events == 1 { "once".to_owned() } else { format!("{events} times") };
            let ns = |name: &str| -> Result<String> {
                Ok(whylate_model::units::format_ns(victim[name].as_u64().context("ns")?))
            };
            victims.push(format!(
                "{} {times} by {} (worst {})",
                victim["source"].as_str().context("source")?,
                ns("total_ns")?,
                ns("worst_ns")?
            ));
        }
        let who = whylate_model::units::printable(of["who"].as_str().context("who")?);
        Ok((of["total_ns"].as_u64().context("total")?, who, victims.join(", ")))
    };
    look["culprits"].as_array().context("culprits")?.iter().map(of_culprit).collect()
}

/// Rounds the percentiles of a page's sources as JSON has them: up to three digits, and at most the maximum.
fn rounded(sources: &[Row]) -> Vec<Row> {
    let mut sources = sources.to_vec();
    for row in &mut sources {
        let Some(Ok(max_ns)) = row.get(6).map(|max| max.parse::<u64>()) else { continue };
        for cell in &mut row[4..6] {
            let Ok(ns) = cell.parse::<u64>() else { continue };
            let unit = 10u64.pow((cell.len() as u32).saturating_sub(3));
            *cell = (ns.div_ceil(unit) * unit).min(max_ns).to_string();
        }
    }
    sources
}

/// Fails unless the tables of sources and culprits match the overview.
pub fn ensure_same(sources_rows: &[Row], culprit_rows: &[Row], look: &Value) -> Result<()> {
    let (sources_rows, expected) = (rounded(sources_rows), sources(look)?);
    ensure!(sources_rows == expected, "sources:\n{sources_rows:#?}\nreplayed:\n{expected:#?}");
    let expected = culprits(look)?;
    let all_ns: u64 = expected.iter().map(|culprit| culprit.0).sum();
    let large = expected.iter().filter(|culprit| culprit.0 as f64 / all_ns.max(1) as f64 >= 0.005).count();
    ensure!(culprit_rows.len() == large.min(30), "{} culprits, {large} replayed", culprit_rows.len());
    for (row, (total_ns, who, victims)) in culprit_rows.iter().zip(&expected) {
        let [share, delay, _, _, named, text] = &row[..] else { anyhow::bail!("{row:?}") };
        let share: f64 = share.parse()?;
        ensure!(
            (share - *total_ns as f64 / all_ns as f64).abs() < 1e-9 && *delay == total_ns.to_string(),
            "{row:?}: {total_ns}"
        );
        ensure!(named.starts_with(who.as_str()) && text == victims, "{row:?}: {who} {victims}");
    }
    Ok(())
}
