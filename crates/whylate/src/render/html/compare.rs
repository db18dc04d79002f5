// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares two runs on one page: what differs, by the test of `whylate diff`, and the other run on the scales of the
//! first.

use std::fmt::Write as _;

use whylate_model::diff::{Diff, Measure, Outcome, Row};

use super::markup::{head, name_cell, sentence, text};
use super::{Report, tables};
use crate::render::text::diff::{change, change_of_burst, figure, heading, outcome, share, value, what, write_test};
use crate::render::text::overview::Sentences;
use crate::render::text::text_of;

/// Maximum number of rows.
const ROWS: usize = 200;

/// The other run, and the differences.
pub struct Compared {
    pub diff: Diff,
    pub other: Report,
}

impl Compared {
    /// Returns the section of differences, the first of the page.
    pub fn differences(&self, zone: &jiff::tz::TimeZone) -> String {
        let diff = &self.diff;
        let mut out = "<section id=\"differs\"><h2>What differs</h2>\n<dl class=\"facts\">".to_owned();
        for (side, about) in [("Before", &diff.before), ("After", &diff.after)] {
            let _ = write!(out, "<div><dt>{side}</dt><dd>{}</dd></div>", sentence(&heading(about, zone)));
        }
        out += "</dl>\n";
        let differing: Vec<&Row> = diff.rows.iter().filter(|row| row.outcome.differs()).collect();
        let _ = write!(out, "<p>{}; {} more have too little data.</p>", outcome(diff), diff.too_little);
        if !differing.is_empty() {
            out += &table("diff", differing.iter().copied(), change);
        }
        if differing.len() > ROWS {
            let _ = write!(
                out,
                "<p class=\"note\">Only the first {ROWS} are shown; <code>whylate diff</code> shows all.</p>"
            );
        }
        if !diff.bursts.is_empty() {
            out += "<p>On one side only, or ten times as many there, in bursts that the test cannot judge:</p>\n";
            out += &table("bursts", diff.bursts.iter(), change_of_burst);
        }
        let test = text_of(|out| write_test(out, &diff.test));
        let _ = write!(out, "<p class=\"note\">{}</p>", sentence(test.trim_end()));
        for omitted in &diff.not_compared {
            let _ = write!(
                out,
                "<p class=\"note\">Not compared, or of limited comparability: {}: {}</p>",
                text(&omitted.source),
                sentence(&omitted.reason)
            );
        }
        out + "</section>\n"
    }

    /// Returns the section of the other run. The following sections are of the first one.
    pub fn other(&self) -> String {
        let other = &self.other;
        let mut out = "<section id=\"other\"><h2>After: what the other run found</h2>\n".to_owned();
        let _ = writeln!(out, "<p><b>{}</b></p>", sentence(&Sentences::new(&other.look.verdict()).to_string()));
        for missing in &other.missing {
            let _ = write!(out, "<p class=\"note\">Missing: {}</p>", sentence(missing));
        }
        out += &tables::sources(&other.look, "other-sources");
        out += "<h3>Culprits</h3>\n";
        out += &tables::culprits(&other.look, "other-");
        out + "<p class=\"note\">Everything below is from the first recording (Before).</p></section>\n"
    }
}

fn table<'a>(id: &str, rows: impl Iterator<Item = &'a Row>, change: fn(&Row) -> String) -> String {
    let columns = ["<Source", "<What", "<Figure", "Before", "After", "<Change", "N before", "N after"];
    let rows: String = rows.take(ROWS).map(|row| row_of(row, change)).collect();
    format!("<div class=\"wide\"><table id=\"{id}\">{}<tbody>{rows}</tbody></table></div>\n", head(&columns))
}

/// Returns a row of the table of differences. Rows without a difference are gray.
fn row_of(row: &Row, change: fn(&Row) -> String) -> String {
    let source = if row.source.is_empty() { "all" } else { &row.source };
    let class = match row.outcome {
        Outcome::More => "more-of-it",
        Outcome::Less => "less-of-it",
        Outcome::NoDifference | Outcome::TooLittle | Outcome::Untested => "neutral",
    };
    let arrow = match row.outcome {
        Outcome::More => "more: ",
        Outcome::Less => "less: ",
        _ => "",
    };
    let cell = |value: String| format!("<td class=\"n\">{}</td>", text(&value));
    let of_side = |side: &Measure| match share(side) {
        Some(share) => format!("{} ({share})", value(side, row.unit)),
        None => value(side, row.unit),
    };
    format!(
        "<tr class=\"{class}\">{}{}{}{}{}<td>{arrow}{}</td>{}{}</tr>\n",
        name_cell(source),
        name_cell(&what(&row.what)),
        name_cell(&figure(row)),
        cell(of_side(&row.before)),
        cell(of_side(&row.after)),
        text(&change(row)),
        cell(row.before.count.to_string()),
        cell(row.after.count.to_string()),
    )
}
