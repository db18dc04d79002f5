// SPDX-License-Identifier: MIT OR Apache-2.0
//! The keys.

use crate::top::panel::Panel;

const KEYS: &str = "\
up down, j k       select a row (PgUp PgDn: a page; g G: first, last)
Tab, Shift-Tab     next, previous panel
Enter, l, right    open the selected row: source, series, culprit or event
Esc, h, left       back

/                  filter rows by text (Enter keeps the filter, Esc clears)
s                  sort by the next column, marked *
I                  reverse the order

Space              freeze or resume; play or pause a recording
t T                go one snapshot forward, back (freezes)
[ ]                shorten, lengthen the span: 1 s to 1 h
w                  save the span that is shown as a recording

?                  this help
Ctrl-L             redraw
Ctrl-Z             suspend (fg resumes)
q, Ctrl-C          quit

LATE: at least the source's limit. A culprit's delay is the time that late
events waited because of it.";

pub fn panels() -> Vec<Panel> {
    vec![Panel::text("help", "Help", KEYS)]
}
