// SPDX-License-Identifier: MIT OR Apache-2.0
//! Panels: tables with a selectable row, and text. Selections are kept outside, by row key, so that they survive
//! updates.

use std::cmp::Ordering;

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};
use whylate_model::units::{format_ns, printable};

use super::view_kind::ViewKind;

/// A panel has at least a title, a heading, and a row.
const MIN_ROWS: u16 = 3;

/// Value of a table cell.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    Ns(u64),
    Count(u64),
    /// Fraction of 1, shown as a percentage.
    Share(f64),
    Number(f64),
    /// Text with its own sort key.
    Ordered(String, u64),
    Missing,
}

impl Cell {
    /// Returns the displayed text, with control characters escaped.
    pub fn text(&self) -> String {
        match self {
            Cell::Text(text) | Cell::Ordered(text, _) => printable(text),
            Cell::Ns(ns) => format_ns(*ns),
            Cell::Count(count) => count.to_string(),
            Cell::Share(share) => format!("{:.1}%", share * 100.0),
            Cell::Number(number) if number.fract() == 0.0 => format!("{number:.0}"),
            Cell::Number(number) => format!("{number:.2}"),
            Cell::Missing => "-".to_owned(),
        }
    }

    fn number(&self) -> Option<f64> {
        match self {
            Cell::Ns(number) | Cell::Count(number) | Cell::Ordered(_, number) => Some(*number as f64),
            Cell::Share(number) | Cell::Number(number) => Some(*number),
            Cell::Text(_) | Cell::Missing => None,
        }
    }

    /// Orders names ascending and figures descending; missing values come last.
    fn order(&self, other: &Cell) -> Ordering {
        match (self, other) {
            (Cell::Text(one), Cell::Text(other)) => one.cmp(other),
            _ => other.number().unwrap_or(f64::NEG_INFINITY).total_cmp(&self.number().unwrap_or(f64::NEG_INFINITY)),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Identifies the row within its table, at any position.
    pub key: String,
    pub cells: Vec<Cell>,
    pub is_late: bool,
    /// View that Enter opens.
    pub opens: Option<ViewKind>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Column names and rows in their default order. A leading `<` marks a column of names, `~` one of details, which
    /// are cut before names, and `=` one of graphs.
    Table {
        columns: Vec<String>,
        rows: Vec<Row>,
    },
    Text(Vec<String>),
}

/// A part of the screen.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// Identifies the panel within its view. Selections are kept by it.
    pub id: &'static str,
    pub title: String,
    pub body: Body,
    /// Text shown for an empty table.
    pub nothing: &'static str,
}

impl Panel {
    pub fn table(
        id: &'static str,
        title: impl Into<String>,
        columns: &str,
        rows: Vec<Row>,
        nothing: &'static str,
    ) -> Self {
        let columns = columns.split(',').map(|column| column.trim().to_owned()).collect();
        Panel { id, title: title.into(), body: Body::Table { columns, rows }, nothing }
    }

    pub fn text(id: &'static str, title: impl Into<String>, text: &str) -> Self {
        let lines = text.trim_end().lines().map(str::to_owned).collect();
        Panel { id, title: title.into(), body: Body::Text(lines), nothing: "" }
    }

    /// Returns the number of rows or lines.
    pub fn len(&self) -> usize {
        match &self.body {
            Body::Table { rows, .. } => rows.len(),
            Body::Text(lines) => lines.len(),
        }
    }

    pub fn rows(&self) -> &[Row] {
        match &self.body {
            Body::Table { rows, .. } => rows,
            Body::Text(_) => &[],
        }
    }

    pub fn columns(&self) -> &[String] {
        match &self.body {
            Body::Table { columns, .. } => columns,
            Body::Text(_) => &[],
        }
    }

    /// Keeps the rows with a cell that contains the filter, ignoring case, and sorts them.
    pub fn arrange(&mut self, choice: &Choice, filter: &str) {
        let Body::Table { columns, rows } = &mut self.body else { return };
        if !filter.is_empty() {
            let filter = filter.to_lowercase();
            rows.retain(|row| row.cells.iter().any(|cell| cell.text().to_lowercase().contains(&filter)));
            if rows.is_empty() {
                self.nothing = "no row matches the filter";
            }
        }
        if let Some(column) = choice.sorted_by.filter(|&column| column < columns.len()) {
            let cell = |row: &Row| row.cells.get(column).cloned().unwrap_or(Cell::Missing);
            rows.sort_by(|one, other| cell(one).order(&cell(other)));
        }
        if choice.is_reversed {
            rows.reverse();
        }
    }
}

/// Selection in a panel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Key of the selected row; `None` for text, and before any was selected.
    pub key: Option<String>,
    /// Last index of the selected row, used if the row disappears. For text, its first visible line.
    pub index: usize,
    /// Index of the sort column; `None` is the default order.
    pub sorted_by: Option<usize>,
    pub is_reversed: bool,
}

impl Choice {
    /// Returns the index of the selected row in the current panel.
    pub fn index_in(&self, panel: &Panel) -> usize {
        let found = self.key.as_ref().and_then(|key| panel.rows().iter().position(|row| row.key == *key));
        found.unwrap_or_else(|| self.index.min(panel.len().saturating_sub(1)))
    }

    /// Updates the index of the selected row. A row that disappears stays selected by key until the next move, as it
    /// may come back. Before the first move, the first row is selected.
    pub fn follow(&mut self, panel: &Panel) {
        self.index = self.index_in(panel);
    }

    /// Moves the selection by `by` rows.
    pub fn step(&mut self, panel: &Panel, by: isize) {
        let last = panel.len().saturating_sub(1);
        self.index = self.index_in(panel).saturating_add_signed(by).min(last);
        self.key = panel.rows().get(self.index).map(|row| row.key.clone());
    }

    /// Sorts by the next column; after the last one, restores the default order.
    pub fn sort_on(&mut self, panel: &Panel) {
        let columns = panel.columns().len();
        self.sorted_by = match self.sorted_by {
            None if columns > 0 => Some(0),
            Some(column) if column + 1 < columns => Some(column + 1),
            _ => None,
        };
    }
}

/// Returns the height of each panel in lines: the focused panel first, then as many others as fit.
pub fn heights(panels: &[Panel], focus: usize, room: u16) -> Vec<u16> {
    let heading = |panel: &Panel| u16::from(!panel.rows().is_empty());
    let wanted: Vec<u16> = panels
        .iter()
        .map(|panel| u16::try_from(panel.len().max(1)).unwrap_or(u16::MAX).saturating_add(1 + heading(panel)))
        .collect();
    let mut heights = vec![0; panels.len()];
    let mut left = room;
    let order = || std::iter::once(focus).chain((0..panels.len()).filter(|&number| number != focus));
    for number in order().filter(|&number| number < panels.len()) {
        let least = wanted[number].min(MIN_ROWS);
        if left >= least {
            heights[number] = least;
            left -= least;
        }
    }
    // Distributes the rest in turns, so that no panel takes all of it.
    while left > 0 {
        let mut has_given = false;
        for number in order().filter(|&number| number < panels.len()) {
            if heights[number] > 0 && heights[number] < wanted[number] && left > 0 {
                heights[number] += 1;
                left -= 1;
                has_given = true;
            }
        }
        if !has_given {
            break;
        }
    }
    heights
}

/// Character set of graphs: some terminals lack block characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Glyphs {
    #[default]
    Unicode,
    Ascii,
}

impl Glyphs {
    fn steps(self) -> [char; 8] {
        match self {
            Glyphs::Unicode => ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'],
            Glyphs::Ascii => ['.', ':', '-', '=', '+', '*', '%', '#'],
        }
    }

    /// Returns a bar of that share of the columns: at most `columns` long, and at least one character if the share is
    /// not 0.
    pub fn bar(self, share: f64, columns: usize) -> String {
        let full = match self {
            Glyphs::Unicode => "█",
            Glyphs::Ascii => "#",
        };
        let least = usize::from(share > 0.0).min(columns);
        full.repeat(((share * columns as f64).round() as usize).clamp(least, columns))
    }

    /// Returns how often a row stands for an event; empty for once.
    pub fn times(self, count: u64) -> String {
        match (count, self) {
            (..=1, _) => String::new(),
            (_, Glyphs::Unicode) => format!(" × {count}"),
            (_, Glyphs::Ascii) => format!(" x {count}"),
        }
    }

    /// Returns a graph of latencies, a character each: full from the limit on, one step less per factor of 4 below.
    /// `None` is a blank.
    pub fn spark(self, values: &[Option<u64>], limit_ns: u64) -> String {
        let step = |ns: u64| match (ns >= limit_ns, limit_ns / ns.max(1)) {
            (true, _) => 7,
            (false, times) => 6_usize.saturating_sub(times.checked_ilog2().unwrap_or(0) as usize / 2),
        };
        values.iter().map(|value| value.map_or(' ', |ns| self.steps()[step(ns)])).collect()
    }
}

/// Mark of whylate's own threads, in parentheses. It is worth more than the thread's name.
const OWN: &str = "whylate itself";
const OWN_IN_PARENTHESES: &str = " (whylate itself)";
/// Minimum width of the text before parentheses, and of what is in them.
const MIN_BEFORE: usize = 16;
const MIN_INSIDE: usize = 12;

/// Cuts out the middle of a text that is wider than a number of columns. Parentheses at its end stay whole; if they
/// do not fit, they are left out.
pub fn cut(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    if let Some((before, last)) = parentheses_at_the_end(text) {
        let room = columns.saturating_sub(last.width() + " ()".len());
        // A kind of delay and what it is about: `wakeup (dd:7)`. The kind stays whole.
        if room < MIN_BEFORE && !before.contains(' ') && last != OWN {
            let room = columns.saturating_sub(before.width() + " ()".len());
            return match last.ends_with(OWN_IN_PARENTHESES) && room < OWN.width() {
                true => OWN.chars().take(columns).collect(),
                false if room < MIN_INSIDE => cut(before, columns),
                false => format!("{before} ({})", cut(last, room)),
            };
        }
        return match room >= MIN_BEFORE {
            true => format!("{} ({last})", cut(before, room)),
            false if last == OWN => OWN.chars().take(columns).collect(),
            false => cut(before, columns),
        };
    }
    let kept = columns.saturating_sub(2);
    let (begin, end) = (kept - kept / 2, kept / 2);
    let end: String = beginning(text.chars().rev(), end).into_iter().rev().collect();
    let begin: String = beginning(text.chars(), begin).into_iter().collect();
    format!("{begin}{}{end}", &".."[..columns.min(2)])
}

/// Splits a text that ends in parentheses, which may have others in them; returns what is before and in them.
fn parentheses_at_the_end(text: &str) -> Option<(&str, &str)> {
    let inside = text.strip_suffix(')')?;
    let mut depth = 1;
    for (at, c) in inside.char_indices().rev() {
        match c {
            ')' => depth += 1,
            '(' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return inside[..at].strip_suffix(' ').map(|before| (before, &inside[at + 1..]));
        }
    }
    None
}

/// Returns the characters that fit into a number of columns.
fn beginning(text: impl Iterator<Item = char>, columns: usize) -> Vec<char> {
    let mut used = 0;
    let fits = |character: &char| {
        used += character.width().unwrap_or(0);
        used <= columns
    };
    text.take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(key: &str, ns: u64) -> Row {
        Row { key: key.to_owned(), cells: vec![Cell::Text(key.to_owned()), Cell::Ns(ns)], is_late: false, opens: None }
    }

    fn panel(rows: Vec<Row>) -> Panel {
        Panel::table("things", "things", "<NAME, MAX", rows, "none")
    }

    #[test]
    fn selection_follows_row_key() {
        let mut choice = Choice::default();
        let before = panel(vec![row("a", 1), row("b", 2), row("c", 3)]);
        choice.follow(&before);
        assert_eq!((choice.index, &choice.key), (0, &None));
        choice.step(&before, 1);
        let mut after = panel(vec![row("c", 3), row("a", 1), row("b", 2)]);
        choice.follow(&after);
        assert_eq!((choice.index, choice.key.as_deref()), (2, Some("b")));
        // A missing row keeps its index, and its selection when it comes back.
        choice.follow(&panel(vec![row("c", 3)]));
        assert_eq!((choice.index, choice.key.as_deref()), (0, Some("b")));
        choice.follow(&after);
        assert_eq!(choice.index, 2);
        choice.sort_on(&after);
        choice.sort_on(&after);
        after.arrange(&choice, "");
        assert_eq!(after.rows()[0].key, "c", "figures begin with the largest");
        after.arrange(&choice, "B");
        assert_eq!(after.len(), 1);
        choice.step(&panel(Vec::new()), 5);
        assert_eq!((choice.index, choice.key), (0, None));
    }

    #[test]
    fn graph_is_full_at_the_limit() {
        let values = [None, Some(0), Some(1_000), Some(600_000), Some(1_000_000), Some(9_000_000)];
        assert_eq!(Glyphs::Ascii.spark(&values, 1_000_000), " .-%##");
        assert_eq!(Glyphs::Unicode.spark(&values[4..], 1_000_000), "██");
        assert_eq!((Glyphs::Ascii.bar(0.5, 10), Glyphs::Ascii.bar(0.001, 10)), ("#####".to_owned(), "#".to_owned()));
        assert_eq!((Glyphs::Ascii.bar(7.0, 3), Glyphs::Ascii.bar(0.0, 3)), ("###".to_owned(), String::new()));
    }

    #[test]
    fn focused_panel_gets_space_first() {
        let panel = |lines: usize| Panel::text("a", "a", &"x\n".repeat(lines));
        let panels = [panel(20), panel(20), panel(1)];
        assert_eq!(heights(&panels, 1, 22), [10, 10, 2]);
        assert_eq!(heights(&panels, 1, 4), [0, 4, 0]);
        assert_eq!(heights(&panels, 2, 5), [3, 0, 2]);
    }

    #[test]
    fn cuts_text_by_display_width() {
        assert_eq!((cut("abcdef", 6), cut("abcdefg", 6)), ("abcdef".to_owned(), "ab..fg".to_owned()));
        let wide = cut("\u{6f22}\u{5b57}\u{6f22}\u{5b57}", 7);
        assert_eq!((wide.as_str(), wide.width()), ("\u{6f22}..\u{5b57}", 6));
        assert_eq!(cut("e\u{301}e\u{301}e\u{301}", 3).width(), 3);
        assert_eq!((cut("abc", 1), cut("abc", 0)), (".".to_owned(), String::new()));
    }

    #[test]
    fn parentheses_are_whole_or_left_out() {
        let who = "thread whylate-measure (whylate itself) (2 threads)";
        for (columns, shown) in [
            (50, "thread why..e-measure (whylate itself) (2 threads)"),
            (40, "whylate itself (2 threads)"),
            (25, "whylate itself"),
            (5, "whyla"),
        ] {
            assert_eq!(cut(who, columns), shown);
        }
        let who = "wakeup (timerlat/0:6255 (whylate itself))";
        for (columns, shown) in
            [(40, "wakeup (whylate itself)"), (23, "wakeup (whylate itself)"), (22, "whylate itself")]
        {
            assert_eq!(cut(who, columns), shown);
        }
        assert_eq!(cut("wakeup (run queue of CPU 0)", 21), "wakeup (run q..CPU 0)");
        assert_eq!(cut("wakeup (run queue of CPU 0)", 20), "wakeup");
        assert_eq!(cut("a) b (c", 5), "a)..c");
        let who = "thread dd (2 threads)";
        assert_eq!([cut(who, 21), cut(who, 20)], [who, "thread dd"]);
    }
}
