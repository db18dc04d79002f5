// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares two runs on one page: what differs, by the test of `whylate diff`, and the other run on the scales of the
//! first.

use std::fmt::Write as _;

use whylate_model::diff::{Diff, Outcome, Row};

use super::markup::{head, name_cell, sentence, text};
use super::{Report, tables};
use crate::render::text::diff::{change, change_of_burst, figure, heading, value, what, write_test};

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
        match differing.is_empty() {
            true => {
                let said = match diff {
                    _ if diff.test.are_too_few() => "Too short to compare",
                    _ if !diff.bursts.is_empty() => "By the test no row differs",
                    _ => "Nothing differs",
                };
                let _ = write!(
                    out,
                    "<p>{said}: {} rows were compared; {} more have too little data.</p>",
                    diff.compared, diff.too_little
                );
            }
            false => {
                let _ = write!(
                    out,
                    "<p>{} of {} rows differ; {} more have too little data.</p>",
                    diff.differ, diff.compared, diff.too_little
                );
                let columns = ["<Source", "<What", "<Figure", "Before", "After", "<Change", "N before", "N after"];
                let _ = write!(out, "<div class=\"wide\"><table id=\"diff\">{}<tbody>", head(&columns));
                differing.iter().take(ROWS).for_each(|row| out += &row_of(row, change));
                out += "</tbody></table></div>\n";
                if differing.len() > ROWS {
                    let _ = write!(
                        out,
                        "<p class=\"note\">Only the first {ROWS} are shown; <code>whylate diff</code> shows all.</p>"
                    );
                }
            }
        }
        if !diff.bursts.is_empty() {
            out += "<p>On one side alone or ten times as many there, in bursts that the test cannot judge:</p>\n";
            let columns = ["<Source", "<What", "<Figure", "Before", "After", "<Change", "N before", "N after"];
            let _ = write!(out, "<div class=\"wide\"><table id=\"bursts\">{}<tbody>", head(&columns));
            diff.bursts.iter().take(ROWS).for_each(|row| out += &row_of(row, change_of_burst));
            out += "</tbody></table></div>\n";
        }
        let mut test = Vec::new();
        // Writing to a vector does not fail.
        let _ = write_test(&mut test, &diff.test);
        let _ = write!(out, "<p class=\"note\">{}</p>", sentence(String::from_utf8_lossy(&test).trim_end()));
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
        for missing in &other.missing {
            let _ = write!(out, "<p class=\"note\">Missing: {}</p>", sentence(missing));
        }
        out += &tables::sources(&other.look, "other-sources");
        out += "<h3>Who made others late</h3>\n";
        out += &tables::culprits(&other.look, "other-");
        out + "<p class=\"note\">Everything below is from the first recording (Before).</p></section>\n"
    }
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
    format!(
        "<tr class=\"{class}\">{}{}{}{}{}<td>{arrow}{}</td>{}{}</tr>\n",
        name_cell(source),
        name_cell(&what(&row.what)),
        name_cell(&figure(row)),
        cell(value(&row.before, row.unit)),
        cell(value(&row.after, row.unit)),
        text(&change(row)),
        cell(row.before.count.to_string()),
        cell(row.after.count.to_string()),
    )
}
