// SPDX-License-Identifier: MIT OR Apache-2.0
//! The verdict in words: the first lines of the overview and of `whylate top`, and the headline of a report.

use std::fmt::{self, Display, Formatter};

use whylate_model::overview::{MainCulprit, Row, Verdict};
use whylate_model::units::{format_ns, format_span, printable};

use super::{programs, status};
use crate::render::color;
use crate::render::text::why;

/// Verdict in words: what was late, with the total delay; and, in separate sentences, the main culprit and the program that was
/// held up most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentences {
    is_late: bool,
    /// Text after `LATE`, or the whole verdict if nothing was late.
    what: String,
    /// Host and duration at the start of that text, and what was late by kind.
    parts: (String, Vec<String>),
    pub culprit: Option<String>,
    /// The program that was held up for the largest share of the time.
    pub program: Option<String>,
}

impl Sentences {
    pub fn new(verdict: &Verdict<'_>) -> Self {
        let Verdict { host, duration_ns, late, programs: held_up_programs, delay_ns, recorded, main } = verdict;
        let is_late = !late.is_empty() || !held_up_programs.held_up.is_empty();
        let (host, span) = (printable(host), format_span(*duration_ns));
        let delay = match (delay_ns, recorded) {
            (0, _) => String::new(),
            (_, None) => format!("; {} of delay", format_ns(*delay_ns)),
            (_, Some(recorded)) => {
                let were = if *recorded == 1 { "was" } else { "were" };
                format!("; {recorded} of them {were} recorded, with {} of delay", format_ns(*delay_ns))
            }
        };
        let kinds: Vec<String> = match is_late {
            true => {
                let held_up = held_up_programs.held_up.len() as u64;
                let held_up = (held_up > 0).then(|| why::counted(held_up, "held-up program"));
                held_up.into_iter().chain(late.iter().map(late_values)).collect()
            }
            false => Vec::new(),
        };
        let head = format!(" on {host} in {span}");
        let what = match is_late {
            true => format!("{head}: {}{delay}.", kinds.join(", ")),
            false => format!("Nothing was late{head}."),
        };
        let parts = (head, kinds);
        let culprit = main.as_ref().map(|MainCulprit { culprit, percent, is_of_all }| {
            let of = if *is_of_all { "it" } else { "the explained delay" };
            format!("{percent:.0}% of {of}: {}.", why::culprit_label(culprit))
        });
        let program = held_up_programs.held_up.first().map(|of| format!("{}.", programs::line(held_up_programs, of)));
        Sentences { is_late, what, parts, culprit, program }
    }

    /// Returns the first sentence.
    pub fn first(&self) -> String {
        format!("{}{}", if self.is_late { status(true) } else { "" }, self.what)
    }

    /// Returns the first sentence without the delay and with fewer and fewer kinds of what was late, each time with the
    /// main culprit.
    pub fn shortened(&self) -> impl Iterator<Item = String> {
        let (head, kinds) = &self.parts;
        let culprit = self.culprit.iter().map(|culprit| format!(" {culprit}")).collect::<String>();
        (0..=kinds.len()).rev().filter(|_| self.is_late).map(move |shown| {
            let others = match kinds.len() - shown {
                0 => String::new(),
                _ if shown == 0 => String::new(),
                others => format!(" and {}", why::counted(others as u64, "other kind")),
            };
            let colon = if shown > 0 { ": " } else { "" };
            let kinds = kinds[..shown].join(", ");
            format!("{}{head}{colon}{kinds}{others}.{culprit}", status(true))
        })
    }

    /// Returns the first sentence in the colors of a terminal.
    pub fn colored(&self) -> String {
        let late = if self.is_late { color::late(status(true)) } else { "".into() };
        format!("{late}{}", self.what)
    }
}

/// Formats all sentences as one text, without color.
impl Display for Sentences {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first())?;
        self.culprit.iter().chain(&self.program).try_for_each(|sentence| write!(f, " {sentence}"))
    }
}

/// Counts the late values of a row.
fn late_values(row: &Row<'_>) -> String {
    let [one, several] = row.judged.map_or([row.source; 2], |judged| judged.late);
    match row.late {
        Some(1) => format!("1 {}", printable(one)),
        Some(count) => format!("{count} {}", printable(several)),
        None => format!("some {}", printable(several)),
    }
}
