// SPDX-License-Identifier: MIT OR Apache-2.0
//! The keys.

use crate::top::panel::Panel;

const KEYS: &str = "\
up down, j k       choose a row (PgUp PgDn, g G: far)
Tab, Shift-Tab     the next or the previous part of the screen
Enter, l, right    open the chosen row: a source, a culprit, a late event, a series
Esc, h, left       back

/                  show only rows with a text in them (Enter keeps it, Esc ends it)
s                  sort by the next column
I                  reverse the order

Space              freeze what is shown, and go on; of a recording, play it
t T                a moment forward, a moment back
[ ]                show less or more of the past: 1 s to 1 h
w                  write the moments that are shown to a recording

?                  these keys
Ctrl-L             draw anew
Ctrl-Z             suspend; fg comes back
q, Ctrl-C          quit

LATE is what took at least the source's limit. A culprit's delay is the time that late
events waited because of it. whylate replay, diff and export read what w wrote.";

pub fn panels() -> Vec<Panel> {
    vec![Panel::text("Keys", KEYS)]
}
